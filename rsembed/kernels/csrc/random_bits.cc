// Random bits of rows, each from a key of its own: an XLA FFI handler.
//
// The numbers are those of jax.random: a key is folded with the row's lanes, one after the other, and counts the columns.

#include <algorithm>
#include <cstdint>
#include <string>
#include <vector>

#include "arguments.h"
#include "parallel.h"
#include "row_kernels.h"
#include "xla/ffi/api/ffi.h"

namespace rsembed {
namespace {

constexpr int64_t kBitsPerTask = 1 << 14;

ffi::Error RowBits(ffi::ThreadPool pool, ffi::BufferR1<ffi::U32> key, ffi::RemainingArgs args,
                   ffi::Result<ffi::BufferR2<ffi::U32>> bits) {
  const int64_t num_rows = bits->dimensions()[0], dim = bits->dimensions()[1];
  Reader reader(args);
  std::vector<const uint32_t*> lanes;
  for (size_t k = 0; k < args.size(); ++k) {
    lanes.push_back(static_cast<uint32_t*>(reader.Next("lane", ffi::U32, num_rows)));
  }
  if (key.element_count() != 2) reader.Fail("wrong size of key");
  if (dim > int64_t{UINT32_MAX}) reader.Fail("too many columns");
  if (reader.Failed()) return reader.Complaint();
  const int64_t rows_per_task = std::max<int64_t>(kBitsPerTask / std::max<int64_t>(dim, 1), 1);
  const auto row_bits = BestRowKernels().row_bits;
  Workers(pool).ForEachRange(num_rows, rows_per_task, [&](int64_t first, int64_t last) {
    row_bits(key.typed_data(), lanes.data(), lanes.size(), dim, first, last, bits->typed_data());
  });
  return ffi::Error::Success();
}

}  // namespace

#pragma GCC visibility push(default)

XLA_FFI_DEFINE_HANDLER_SYMBOL(rsembed_row_bits, RowBits,
                              ffi::Ffi::Bind()
                                  .Ctx<ffi::ThreadPool>()
                                  .Arg<ffi::BufferR1<ffi::U32>>()
                                  .RemainingArgs()
                                  .Ret<ffi::BufferR2<ffi::U32>>());

#pragma GCC visibility pop

}  // namespace rsembed
