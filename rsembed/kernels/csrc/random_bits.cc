// Random bits of rows, each from a key of its own: an XLA FFI handler.
//
// The numbers are those of jax.random: a key is folded with the row's lanes, one after the other, and counts the columns.
// Source: Threefry-2x32 with 20 rounds, Salmon et al., Parallel random numbers: as easy as 1, 2, 3 (2011).

#include <algorithm>
#include <cstdint>
#include <string>
#include <vector>

#include "arguments.h"
#include "parallel.h"
#include "xla/ffi/api/ffi.h"

namespace rsembed {
namespace {

constexpr int64_t kBitsPerTask = 1 << 14;

struct Key {
  uint32_t first, second;
};

inline uint32_t Rotated(uint32_t x, int distance) { return x << distance | x >> (32 - distance); }

inline Key Threefry(Key key, uint32_t x, uint32_t y) {
  constexpr int kDistances[2][4] = {{13, 15, 26, 6}, {17, 29, 16, 24}};
  const uint32_t schedule[3] = {key.first, key.second, key.first ^ key.second ^ 0x1BD11BDAu};
  x += schedule[0];
  y += schedule[1];
  for (int group = 0; group < 5; ++group) {
    for (int round = 0; round < 4; ++round) {
      x += y;
      y = Rotated(y, kDistances[group % 2][round]) ^ x;
    }
    x += schedule[(group + 1) % 3];
    y += schedule[(group + 2) % 3] + group + 1;
  }
  return {x, y};
}

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
  Workers(pool).ForEachRange(num_rows, rows_per_task, [&](int64_t first, int64_t last) {
    for (int64_t row = first; row < last; ++row) {
      Key own = {key.typed_data()[0], key.typed_data()[1]};
      for (const uint32_t* lane : lanes) own = Threefry(own, 0, lane[row]);
      uint32_t* const out = bits->typed_data() + row * dim;
      for (int64_t column = 0; column < dim; ++column) {
        const Key drawn = Threefry(own, 0, static_cast<uint32_t>(column));
        out[column] = drawn.first ^ drawn.second;
      }
    }
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
