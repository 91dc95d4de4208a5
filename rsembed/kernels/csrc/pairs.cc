// Dot products of all pairs of a sample's vectors, and the gradient of the vectors. This file is compiled once per
// instruction set.
//
// No standard C++ header is included, because such headers contain inline functions and templates, see row_kernels.h.
#include "row_kernels.h"

#include <stdint.h>
#include <stdlib.h>
#include <string.h>
#if defined(__x86_64__)
#include <immintrin.h>
#endif

#ifndef RSEMBED_ISA
#define RSEMBED_ISA baseline
#endif

namespace rsembed {
namespace RSEMBED_ISA {

namespace {

#include "vectors.h"

// Number of rows that `multiply` computes at once. The sums of kTogether rows stay in registers. Every input vector is
// loaded once for kTogether rows, multiplied by a factor for each row, and added to the sum of each row.
constexpr int kTogether = 4;

inline int64_t rounded_up(int64_t x, int64_t multiple) { return (x + multiple - 1) / multiple * multiple; }

// Computes for kRows rows r: to[r * stride + lane] = sum over k, in order, of
// factors[r * pitch + k] * from[k * width + lane].
template <int kRows>
inline void multiply(const float* factors, int64_t pitch, const float* from, int64_t width, int64_t count, float* to,
                     int64_t stride, int64_t num_lanes) {
  Floats sum[kRows] = {};
  for (int64_t k = 0; k < count; ++k) {
    const float* const at = from + k * width;
    const Floats vector = num_lanes < kLanes ? load_tail(at, num_lanes) : load(at);
    for (int r = 0; r < kRows; ++r) sum[r] += broadcast(factors[r * pitch + k]) * vector;
  }
  for (int r = 0; r < kRows; ++r) {
    if (num_lanes < kLanes) store_tail(to + r * stride, sum[r], num_lanes);
    else store(to + r * stride, sum[r]);
  }
}

inline void multiply_rows(int64_t num_rows, const float* factors, int64_t pitch, const float* from, int64_t width,
                          int64_t count, float* to, int64_t stride, int64_t num_lanes) {
  if (num_rows >= kTogether) return multiply<kTogether>(factors, pitch, from, width, count, to, stride, num_lanes);
  for (int64_t r = 0; r < num_rows; ++r) {
    multiply<1>(factors + r * pitch, pitch, from, width, count, to + r * stride, stride, num_lanes);
  }
}

}  // namespace

// Computes the dot products of all vectors i < j of a sample, ordered by i, then by j, for samples [first, last). A
// sample has `n` vectors of `dim` numbers.
void pair_products(const float* vectors, int64_t n, int64_t dim, int64_t first, int64_t last, float* products) {
  const int64_t width = rounded_up(n, kLanes), num_pairs = n * (n - 1) / 2;
  const RowsInUse scratch(dim + kTogether, width);
  float *const columns = scratch.get(), *const rows = columns + dim * width;
  memset(columns, 0, dim * width * sizeof(float));
  for (int64_t sample = first; sample < last; ++sample) {
    const float* const own = vectors + sample * n * dim;
    float* out = products + sample * num_pairs;
    for (int64_t i = 0; i < n; ++i) {
      for (int64_t k = 0; k < dim; ++k) columns[k * width + i] = own[i * dim + k];
    }
    for (int64_t i = 0; i < n; i += kTogether) {
      const int64_t num_rows = n - i < kTogether ? n - i : kTogether;
      for (int64_t lane = (i + 1) / kLanes * kLanes; lane < n; lane += kLanes) {
        multiply_rows(num_rows, own + i * dim, dim, columns + lane, width, dim, rows + lane, width, kLanes);
      }
      for (int64_t r = i; r < i + num_rows; ++r) {
        const int64_t count = n - 1 - r;
        memcpy(out, rows + (r - i) * width + r + 1, count * sizeof(float));
        out += count;
      }
    }
  }
}

// Computes the gradient of the vectors of samples [first, last) from the gradient of their dot products.
void pull_pairs(const float* vectors, const float* d_products, int64_t n, int64_t dim, int64_t first, int64_t last,
                float* d_vectors) {
  const int64_t num_pairs = n * (n - 1) / 2;
  const RowsInUse scratch(n, n);
  float* const factors = scratch.get();
  for (int64_t sample = first; sample < last; ++sample) {
    const float* const own = vectors + sample * n * dim;
    const float* d_product = d_products + sample * num_pairs;
    float* const out = d_vectors + sample * n * dim;
    for (int64_t i = 0; i < n; ++i) {
      factors[i * n + i] = 0.0f;
      for (int64_t j = i + 1; j < n; ++j) factors[i * n + j] = factors[j * n + i] = *d_product++;
    }
    for (int64_t i = 0; i < n; i += kTogether) {
      const int64_t num_rows = n - i < kTogether ? n - i : kTogether;
      for (int64_t lane = 0; lane < dim; lane += kLanes) {
        const int64_t num_lanes = dim - lane < kLanes ? dim - lane : kLanes;
        multiply_rows(num_rows, factors + i * n, n, own + lane, dim, n, out + i * dim + lane, dim, num_lanes);
      }
    }
  }
}

}  // namespace RSEMBED_ISA
}  // namespace rsembed
