// This file is compiled once per instruction set (-DRSEMBED_ISA=baseline, avx2 or avx512), see train_kernels.h.
//
// No standard C++ header is included, because such headers contain inline functions and templates, see row_kernels.h.
#include "train_kernels.h"

#include <stdint.h>
#include <stdlib.h>
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

// Matrix with element (i, k) at data[i * row + k * column], which can also be the transpose of an array.
struct Matrix {
  const float* data;
  int64_t row, column;
};

// Loads and stores of vectors at unaligned addresses.
template <typename Vector>
struct Anywhere {
  typedef Vector type __attribute__((aligned(4), may_alias));
};

// Computes c = a @ b, or c += a @ b if `adds`, for a tile of kRows rows and kVectors vectors, which stays in registers
// over all `depth` terms.
template <typename Vector, int kRows, int kVectors>
inline void tile(int64_t depth, Matrix a, const float* b, int64_t b_row, float* c, int64_t c_row, bool adds) {
  typedef typename Anywhere<Vector>::type Unaligned;
  constexpr int64_t kWidth = sizeof(Vector) / 4;
  Vector sum[kRows][kVectors] = {};
  for (int64_t k = 0; k < depth; ++k, b += b_row, a.data += a.column) {
    Vector row[kVectors];
    for (int j = 0; j < kVectors; ++j) row[j] = *reinterpret_cast<const Unaligned*>(b + j * kWidth);
    for (int i = 0; i < kRows; ++i) {
      for (int j = 0; j < kVectors; ++j) sum[i][j] += a.data[i * a.row] * row[j];
    }
  }
  for (int i = 0; i < kRows; ++i) {
    for (int j = 0; j < kVectors; ++j) {
      Unaligned* const to = reinterpret_cast<Unaligned*>(c + i * c_row + j * kWidth);
      *to = adds ? *to + sum[i][j] : sum[i][j];
    }
  }
}

template <typename Vector, int kVectors>
inline void strip(int64_t rows, int64_t depth, Matrix a, const float* b, int64_t width, float* c, bool adds) {
  while (rows > 0) {
    // The sums of a tile of six rows fill the registers. Eight rows are computed as two tiles of four rows, which is
    // faster than one tile of six rows and two tiles of one row.
    const int64_t count = rows >= 6 && rows != 8 ? 6 : rows >= 4 ? 4 : 1;
    if (count == 6) tile<Vector, 6, kVectors>(depth, a, b, width, c, width, adds);
    if (count == 4) tile<Vector, 4, kVectors>(depth, a, b, width, c, width, adds);
    if (count == 1) tile<Vector, 1, kVectors>(depth, a, b, width, c, width, adds);
    rows -= count;
    a.data += count * a.row;
    c += count * width;
  }
}

// Loads consecutive numbers into a vector, and repeats each number in four lanes.
inline Floats spread(const float* from) {
#if defined(__AVX512F__)
  const __m512i lanes = _mm512_set_epi32(3, 3, 3, 3, 2, 2, 2, 2, 1, 1, 1, 1, 0, 0, 0, 0);
  return (Floats)_mm512_maskz_permutevar_ps(0xffff, _mm512_maskz_broadcast_f32x4(0xffff, _mm_loadu_ps(from)), lanes);
#elif defined(__AVX2__)
  double two;
  memcpy(&two, from, sizeof(two));
  return (Floats)_mm256_permutevar_ps((__m256)_mm256_set1_pd(two), _mm256_set_epi32(1, 1, 1, 1, 0, 0, 0, 0));
#else
  return broadcast(*from);
#endif
}

inline Quad sum_of_quads(Floats x) {
  Quad quads[kLanes / 4];
  memcpy(quads, &x, sizeof(x));
  for (int k = 1; k < kLanes / 4; ++k) quads[0] += quads[k];
  return quads[0];
}

// Computes c[kRows, 4] = a[kRows, depth] @ b[depth, 4]. A vector holds kLanes / 4 rows of `b`.
template <int kRows>
inline void narrow_tile(int64_t depth, const float* a, const float* b, float* c) {
  Floats sum[kRows] = {};
  for (int64_t k = 0; k < depth; k += kLanes / 4) {
    const Floats row = load(b + 4 * k);
    for (int i = 0; i < kRows; ++i) sum[i] += spread(a + i * depth + k) * row;
  }
  for (int i = 0; i < kRows; ++i) *reinterpret_cast<Anywhere<Quad>::type*>(c + 4 * i) = sum_of_quads(sum[i]);
}

// Computes c[rows, width] = a[rows, depth] @ b[depth, width]. If `adds` is true, the product is added to the old value
// of c.
void multiply(int64_t rows, int64_t width, int64_t depth, Matrix a, const float* b, float* c, bool adds) {
  if (width == 4 && !adds && a.column == 1 && a.row == depth && depth % (kLanes / 4) == 0) {
    for (; rows >= 8; rows -= 8, a.data += 8 * depth, c += 32) narrow_tile<8>(depth, a.data, b, c);
    for (; rows > 0; --rows, a.data += depth, c += 4) narrow_tile<1>(depth, a.data, b, c);
    return;
  }
  int64_t j = 0;
  for (; j + 2 * kLanes <= width; j += 2 * kLanes) strip<Floats, 2>(rows, depth, a, b + j, width, c + j, adds);
  for (; j + kLanes <= width; j += kLanes) strip<Floats, 1>(rows, depth, a, b + j, width, c + j, adds);
  for (; j + 4 <= width; j += 4) strip<Quad, 1>(rows, depth, a, b + j, width, c + j, adds);
  for (; j < width; ++j) strip<float, 1>(rows, depth, a, b + j, width, c + j, adds);
}

void transpose(const float* slice, int64_t left, int64_t width, float* out) {
  int64_t i = 0;
#if defined(__x86_64__)
  for (; i + 4 <= left && width % 4 == 0; i += 4) {
    for (int64_t j = 0; j < width; j += 4) {
      const float* const from = slice + i * width + j;
      float* const to = out + j * left + i;
      __m128 a = _mm_loadu_ps(from), b = _mm_loadu_ps(from + width);
      __m128 c = _mm_loadu_ps(from + 2 * width), d = _mm_loadu_ps(from + 3 * width);
      _MM_TRANSPOSE4_PS(a, b, c, d);
      _mm_storeu_ps(to, a);
      _mm_storeu_ps(to + left, b);
      _mm_storeu_ps(to + 2 * left, c);
      _mm_storeu_ps(to + 3 * left, d);
    }
  }
#endif
  for (; i < left; ++i) {
    for (int64_t j = 0; j < width; ++j) out[j * left + i] = slice[i * width + j];
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

// Matrix products of the slices that a block of lookups reads. If consecutive lookups use equal slices of all cores
// before the grouped core, they share the products of slices of the cores up to and including the grouped core. The
// first of several lookups that share products is called their head. Lookups do not share products that include a core
// after the grouped core.
struct Block {
  const Train& train;
  const uint32_t* lookups;
  int64_t count;
  float* scratch;
  int64_t num_heads = 0;
  int64_t head_of[kLookupsPerBlock];
  int64_t first_of_head[kLookupsPerBlock];

  Block(const Train& its_train, const uint32_t* its_lookups, int64_t its_count, float* its_scratch)
      : train(its_train), lookups(its_lookups), count(its_count), scratch(its_scratch) {
    for (int64_t k = 0; k < count; ++k) {
      bool is_new = k == 0;
      for (int64_t t = 0; t < train.grouped && !is_new; ++t) {
        is_new = train.digits[t][lookups[k]] != train.digits[t][lookups[k - 1]];
      }
      if (is_new) first_of_head[num_heads++] = k;
      head_of[k] = num_heads - 1;
    }
  }

  bool has_heads(int64_t t) const { return t <= train.grouped; }
  int64_t num_products(int64_t t) const { return has_heads(t) ? num_heads : count; }
  int64_t lookup_of(int64_t t, int64_t k) const { return has_heads(t) ? first_of_head[k] : k; }
  // Index k' such that product(t, k) is product(t - 1, k') times a slice of core t.
  int64_t before(int64_t t, int64_t k) const { return has_heads(t - 1) && !has_heads(t) ? head_of[k] : k; }

  const float* slice(int64_t t, int64_t k) const {
    return train.cores[t] + train.digits[t][lookups[lookup_of(t, k)]] * train.size[t];
  }
  // Products of slices of the cores 0 to t: `num_products(t)` products of `train.product[t]` numbers each. The products
  // for all t are at the beginning of the scratch memory.
  float* products(int64_t t) const {
    float* at = scratch;
    for (int64_t earlier = 0; earlier < t; ++earlier) at += kLookupsPerBlock * train.product[earlier];
    return at;
  }
  // The k-th product of slices of the cores 0 to t. If `t` is 0, returns the address of a slice of core 0, and not of a
  // copy in the scratch memory.
  const float* product(int64_t t, int64_t k) const {
    return t == 0 ? slice(0, k) : products(t) + k * train.product[t];
  }
};

void rows(const Train& train, const uint32_t* lookups, int64_t count, float* scratch, float* made) {
  const Block block(train, lookups, count, scratch);
  for (int64_t t = 1; t < train.num_cores; ++t) {
    const int64_t left = train.left[t], width = train.columns[t] * train.right[t], num_rows = train.rows[t];
    float* const out = t + 1 < train.num_cores ? block.products(t) : made;
    if (t == train.grouped) {  // one matrix product handles the whole block
      float* const stacked = block.products(t - 1);
      for (int64_t k = 0; t == 1 && k < block.num_heads; ++k) {
        memcpy(stacked + k * train.size[0], block.slice(0, k), 4 * train.size[0]);
      }
      multiply(block.num_heads * num_rows, width, left, {stacked, left, 1}, block.slice(t, 0), out, false);
      continue;
    }
    for (int64_t k = 0; k < block.num_products(t); ++k) {
      const float* const before = block.product(t - 1, block.before(t, k));
      multiply(num_rows, width, left, {before, left, 1}, block.slice(t, k), out + k * train.product[t], false);
    }
  }
}

void pull(const Train& train, const uint32_t* lookups, int64_t count, const float* d_rows, const float* transposed,
          float* d_grouped, float* const* d_slices, bool* is_head, float* scratch) {
  const Block block(train, lookups, count, scratch);
  int64_t most = 0;
  for (int64_t t = 0; t < train.num_cores; ++t) most = train.product[t] > most ? train.product[t] : most;
  float* spare[2];
  spare[0] = block.products(train.num_cores);
  spare[1] = spare[0] + kLookupsPerBlock * most;
  float* const swapped = spare[1] + kLookupsPerBlock * most;
  const float* d_product = d_rows;  // [num_products(t), product[t]]
  for (int64_t t = train.num_cores - 1; t > 0; --t) {
    const int64_t left = train.left[t], width = train.columns[t] * train.right[t], num_rows = train.rows[t];
    float* const d_before = spare[t % 2];
    if (t == train.grouped) {
      multiply(left, width, block.num_heads * num_rows, {block.products(t - 1), 1, left}, d_product, d_grouped, true);
      multiply(block.num_heads * num_rows, left, width, {d_product, width, 1}, transposed, d_before, false);
      d_product = d_before;
      continue;
    }
    for (int64_t k = 0; k < block.num_products(t); ++k) {
      const int64_t from = block.before(t, k), lookup = block.lookup_of(t, k);
      const float* const d_one = d_product + k * train.product[t];
      multiply(left, width, num_rows, {block.product(t - 1, from), 1, left}, d_one, d_slices[t] + lookup * train.size[t],
               false);
      transpose(block.slice(t, k), left, width, swapped);
      multiply(num_rows, left, width, {d_one, width, 1}, swapped, d_before + from * train.product[t - 1],
               k > 0 && block.before(t, k - 1) == from);
    }
    d_product = d_before;
  }
  for (int64_t k = 0; k < count; ++k) is_head[k] = false;
  for (int64_t h = 0; h < block.num_heads; ++h) {
    const float* const d_slice = d_product + h * train.size[0];
    is_head[block.first_of_head[h]] = true;
    if (train.grouped == 0) {
      add(d_slice, 1.0f, train.size[0], d_grouped);
    } else {
      memcpy(d_slices[0] + block.first_of_head[h] * train.size[0], d_slice, 4 * train.size[0]);
    }
  }
}

}  // namespace

const TrainKernels kTrainKernels = {RSEMBED_STRING(RSEMBED_ISA), rows, pull, transpose, add, dot};

}  // namespace RSEMBED_ISA
}  // namespace rsembed
