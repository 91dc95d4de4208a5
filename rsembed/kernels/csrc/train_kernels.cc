// Compiled once per instruction set with -DRSEMBED_ISA=baseline, avx2 or avx512; see train_kernels.h.
//
// No standard C++ header is included, for the reason given in row_kernels.h.
#include "train_kernels.h"

#include <stdint.h>
#include <string.h>
#if defined(__x86_64__)
#include <immintrin.h>
#endif

#ifndef RSEMBED_ISA
#define RSEMBED_ISA baseline
#endif
#define RSEMBED_STRING_OF(name) #name
#define RSEMBED_STRING(name) RSEMBED_STRING_OF(name)

namespace rsembed {
namespace RSEMBED_ISA {
namespace {

#include "vectors.h"

// A matrix whose element (i, k) lies at i * row + k * column: as it is, or with its axes swapped.
struct Matrix {
  const float* data;
  int64_t row, column;
};

// One vector at a time: compilers keep arrays in registers that are never copied as a whole.
template <typename Vector>
inline Vector read(const float* from) {
  Vector x;
  memcpy(&x, from, sizeof(x));
  return x;
}

// kRows x kVectors vectors of c (+)= a @ b, kept in registers over all `depth` terms.
template <typename Vector, int kRows, int kVectors>
inline void tile(int64_t depth, Matrix a, const float* b, int64_t b_row, float* c, int64_t c_row, bool adds) {
  constexpr int64_t kWidth = sizeof(Vector) / 4;
  Vector sum[kRows][kVectors];
  for (int i = 0; i < kRows; ++i) {
    for (int j = 0; j < kVectors; ++j) sum[i][j] = adds ? read<Vector>(c + i * c_row + j * kWidth) : Vector{};
  }
  for (int64_t k = 0; k < depth; ++k) {
    Vector row[kVectors];
    for (int j = 0; j < kVectors; ++j) row[j] = read<Vector>(b + k * b_row + j * kWidth);
    for (int i = 0; i < kRows; ++i) {
      const float x = a.data[i * a.row + k * a.column];
      for (int j = 0; j < kVectors; ++j) sum[i][j] += x * row[j];
    }
  }
  for (int i = 0; i < kRows; ++i) {
    for (int j = 0; j < kVectors; ++j) memcpy(c + i * c_row + j * kWidth, &sum[i][j], sizeof(Vector));
  }
}

template <typename Vector, int kRows, int kVectors>
inline void strip(int64_t rows, int64_t depth, Matrix a, const float* b, int64_t width, float* c, bool adds) {
  int64_t i = 0;
  const auto at = [&](int64_t row) { return Matrix{a.data + row * a.row, a.row, a.column}; };
  for (; i + kRows <= rows; i += kRows) {
    tile<Vector, kRows, kVectors>(depth, at(i), b, width, c + i * width, width, adds);
  }
  if (kRows > 4 && i + 4 <= rows) {
    tile<Vector, 4, kVectors>(depth, at(i), b, width, c + i * width, width, adds);
    i += 4;
  }
  for (; i < rows; ++i) tile<Vector, 1, kVectors>(depth, at(i), b, width, c + i * width, width, adds);
}

// c[rows, width] (+)= a[rows, depth] @ b[depth, width].
void multiply(int64_t rows, int64_t width, int64_t depth, Matrix a, const float* b, float* c, bool adds) {
  int64_t j = 0;
  for (; j + 2 * kLanes <= width; j += 2 * kLanes) strip<Floats, 4, 2>(rows, depth, a, b + j, width, c + j, adds);
  for (; j + kLanes <= width; j += kLanes) strip<Floats, 8, 1>(rows, depth, a, b + j, width, c + j, adds);
  for (; j + 4 <= width; j += 4) strip<Quad, 8, 1>(rows, depth, a, b + j, width, c + j, adds);
  for (; j < width; ++j) strip<float, 8, 1>(rows, depth, a, b + j, width, c + j, adds);
}

void transpose(const float* slice, int64_t left, int64_t width, float* out) {
  for (int64_t j = 0; j < width; ++j) {
    for (int64_t i = 0; i < left; ++i) out[j * left + i] = slice[i * width + j];
  }
}

void add(const float* from, float gain, int64_t count, float* to) {
  int64_t k = 0;
  for (; k + kLanes <= count; k += kLanes) store(to + k, load(to + k) + gain * load(from + k));
  for (; k < count; ++k) to[k] += gain * from[k];
}

float dot(const float* a, const float* b, int64_t count) {
  Floats sum = {};
  int64_t k = 0;
  for (; k + kLanes <= count; k += kLanes) sum += load(a + k) * load(b + k);
  float total = sum_of_lanes(sum);
  for (; k < count; ++k) total += a[k] * b[k];
  return total;
}

const float* slice(const Train& train, int64_t t, uint32_t lookup) {
  return train.cores[t] + train.digits[t][lookup] * train.size[t];
}

// The products of the first slices, `[kLookupsPerBlock, product[t]]` for every core, stand at the front of the scratch.
float* products(const Train& train, int64_t t, float* scratch) {
  for (int64_t before = 0; before < t; ++before) scratch += kLookupsPerBlock * train.product[before];
  return scratch;
}

// If the first core is the grouped one, all lookups share the first product and it is not copied.
const float* product_of(const Train& train, int64_t t, int64_t k, const uint32_t* lookups, float* scratch) {
  if (t == 0) return slice(train, 0, lookups[k]);
  return products(train, t, scratch) + k * train.product[t];
}

const float* rows(const Train& train, const uint32_t* lookups, int64_t count, float* scratch) {
  for (int64_t t = 1; t < train.num_cores; ++t) {
    const int64_t left = train.left[t], width = train.columns[t] * train.right[t], num_rows = train.rows[t];
    float* const out = products(train, t, scratch);
    if (t == train.grouped) {  // one product for the whole block
      float* const stacked = products(train, t - 1, scratch);
      if (t == 1) {
        for (int64_t k = 0; k < count; ++k) {
          memcpy(stacked + k * train.size[0], slice(train, 0, lookups[k]), 4 * train.size[0]);
        }
      }
      multiply(count * num_rows, width, left, {stacked, left, 1}, slice(train, t, lookups[0]), out, false);
      continue;
    }
    for (int64_t k = 0; k < count; ++k) {
      const float* const before = product_of(train, t - 1, k, lookups, scratch);
      multiply(num_rows, width, left, {before, left, 1}, slice(train, t, lookups[k]), out + k * train.product[t], false);
    }
  }
  return products(train, train.num_cores - 1, scratch);
}

void pull(const Train& train, const uint32_t* lookups, int64_t count, const float* d_rows, const float* transposed,
          float* d_grouped, float* const* d_slices, float* scratch) {
  const int64_t grouped = train.grouped;
  int64_t most = 0;
  for (int64_t t = 0; t < train.num_cores; ++t) most = train.product[t] > most ? train.product[t] : most;
  float* spare[2];
  spare[0] = products(train, train.num_cores, scratch);
  spare[1] = spare[0] + kLookupsPerBlock * most;
  float* const swapped = spare[1] + kLookupsPerBlock * most;
  const float* d_product = d_rows;  // [count, product[t]]
  for (int64_t t = train.num_cores - 1; t > 0; --t) {
    const int64_t left = train.left[t], width = train.columns[t] * train.right[t], num_rows = train.rows[t];
    float* const d_before = t == 1 && grouped != 0 ? d_slices[0] : spare[t % 2];
    if (t == grouped) {
      const float* const stacked = products(train, t - 1, scratch);
      multiply(left, width, count * num_rows, {stacked, 1, left}, d_product, d_grouped, true);
      multiply(count * num_rows, left, width, {d_product, width, 1}, transposed, d_before, false);
    } else {
      for (int64_t k = 0; k < count; ++k) {
        const float* const d_one = d_product + k * train.product[t];
        const float* const before = product_of(train, t - 1, k, lookups, scratch);
        multiply(left, width, num_rows, {before, 1, left}, d_one, d_slices[t] + k * train.size[t], false);
        transpose(slice(train, t, lookups[k]), left, width, swapped);
        multiply(num_rows, left, width, {d_one, width, 1}, swapped, d_before + k * train.product[t - 1], false);
      }
    }
    d_product = d_before;
  }
  if (grouped == 0) {
    for (int64_t k = 0; k < count; ++k) add(d_product + k * train.size[0], 1.0f, train.size[0], d_grouped);
  }
}

}  // namespace

const TrainKernels kTrainKernels = {RSEMBED_STRING(RSEMBED_ISA), rows, pull, transpose, add, dot};

}  // namespace RSEMBED_ISA
}  // namespace rsembed
