// XLA FFI handlers for the dot products of all pairs of a sample's vectors. Only rsembed/kernels/native.py calls the
// handlers of this file.

#include <algorithm>
#include <cstdint>

#include "arguments.h"
#include "parallel.h"
#include "row_kernels.h"
#include "xla/ffi/api/ffi.h"

namespace rsembed {
namespace {

using Vectors = ffi::BufferR3<ffi::F32>;
using Products = ffi::BufferR2<ffi::F32>;
constexpr int64_t kNumbersPerBlock = 1 << 16;

// Calls body(n, dim, first, last) for blocks [first, last) of samples. A sample has `n` vectors of `dim` numbers.
// Returns an error if the size of `products` is not the number of pairs.
template <typename Body>
ffi::Error ForEachSample(ffi::ThreadPool pool, const Vectors& vectors, const Products& products, const Body& body) {
  const int64_t batch = vectors.dimensions()[0], n = vectors.dimensions()[1], dim = vectors.dimensions()[2];
  if (products.dimensions()[0] != batch || products.dimensions()[1] != n * (n - 1) / 2) {
    return ffi::Error::InvalidArgument("rsembed: vectors and products of pairs differ in size");
  }
  const int64_t samples_per_block = std::max<int64_t>(kNumbersPerBlock / std::max<int64_t>(n * dim, 1), 1);
  Workers(pool).ForEachRange(batch, samples_per_block, [&](int64_t first, int64_t last) { body(n, dim, first, last); });
  return ffi::Error::Success();
}

ffi::Error PairProducts(ffi::ThreadPool pool, Vectors vectors, ffi::Result<Products> products) {
  return ForEachSample(pool, vectors, *products, [&](int64_t n, int64_t dim, int64_t first, int64_t last) {
    BestRowKernels().pair_products(vectors.typed_data(), n, dim, first, last, products->typed_data());
  });
}

ffi::Error PullPairs(ffi::ThreadPool pool, Vectors vectors, Products d_products, ffi::Result<Vectors> d_vectors) {
  if (d_vectors->element_count() != vectors.element_count()) {
    return ffi::Error::InvalidArgument("rsembed: vectors and their gradient differ in size");
  }
  return ForEachSample(pool, vectors, d_products, [&](int64_t n, int64_t dim, int64_t first, int64_t last) {
    BestRowKernels().pull_pairs(vectors.typed_data(), d_products.typed_data(), n, dim, first, last,
                                d_vectors->typed_data());
  });
}

}  // namespace

#pragma GCC visibility push(default)

XLA_FFI_DEFINE_HANDLER_SYMBOL(rsembed_pair_products, PairProducts,
                              ffi::Ffi::Bind().Ctx<ffi::ThreadPool>().Arg<Vectors>().Ret<Products>());

XLA_FFI_DEFINE_HANDLER_SYMBOL(rsembed_pull_pairs, PullPairs,
                              ffi::Ffi::Bind().Ctx<ffi::ThreadPool>().Arg<Vectors>().Arg<Products>().Ret<Vectors>());

#pragma GCC visibility pop

}  // namespace rsembed
