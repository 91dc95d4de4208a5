// This file is compiled once per instruction set (-DRSEMBED_ISA=baseline, avx2 or avx512), see row_kernels.h.
//
// Random bits of rows, the same bits that jax.random draws. The lanes (32-bit words) of a row are folded into a PRNG
// key one after the other. The random bits of a row are the column indices, encrypted with the key of the row.
//
// Source: Threefry-2x32 with 20 rounds, Salmon et al., Parallel random numbers: as easy as 1, 2, 3 (2011).
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

template <int kDistance>
inline Words rotated(Words x) { return x << kDistance | x >> (32 - kDistance); }

// One Threefry round of kBlocks independent blocks. Each round of a block needs the result of the block's previous
// round. Different blocks are independent, so the processor can compute rounds of several blocks in parallel.
template <int kBlocks, int kDistance>
inline void threefry_round(Words* x, Words* y) {
  for (int k = 0; k < kBlocks; ++k) {
    x[k] += y[k];
    y[k] = rotated<kDistance>(y[k]) ^ x[k];
  }
}

template <int kBlocks>
inline void threefry(Words first, Words second, Words* x, Words* y) {
  const Words schedule[3] = {first, second, first ^ second ^ 0x1BD11BDAu};
  for (int k = 0; k < kBlocks; ++k) {
    x[k] += schedule[0];
    y[k] += schedule[1];
  }
  for (uint32_t group = 0; group < 5; ++group) {
    if (group % 2 == 0) {
      threefry_round<kBlocks, 13>(x, y);
      threefry_round<kBlocks, 15>(x, y);
      threefry_round<kBlocks, 26>(x, y);
      threefry_round<kBlocks, 6>(x, y);
    } else {
      threefry_round<kBlocks, 17>(x, y);
      threefry_round<kBlocks, 29>(x, y);
      threefry_round<kBlocks, 16>(x, y);
      threefry_round<kBlocks, 24>(x, y);
    }
    for (int k = 0; k < kBlocks; ++k) {
      x[k] += schedule[(group + 1) % 3];
      y[k] += schedule[(group + 2) % 3] + (group + 1);
    }
  }
}

// PRNG keys of kLanes rows. The two words of a key are in `first` and `second`.
struct RowKeys {
  uint32_t first[kLanes], second[kLanes];
};

inline RowKeys fold(const TableKeys& from, const uint32_t* const* lanes, int64_t num_lanes, int64_t row, int64_t count) {
  Words first = Words{} + from.keys[0], second = Words{} + from.keys[1];
  for (int64_t k = 0; from.table != nullptr && k < count; ++k) {
    const int64_t table = from.table[row + k];
    const uint32_t* const own = from.keys + 2 * (table < 0 ? 0 : table < from.count ? table : from.count - 1);
    first[k] = own[0];
    second[k] = own[1];
  }
  for (int64_t k = 0; k < num_lanes; ++k) {
    Words zero = {}, number = {};
    memcpy(&number, lanes[k] + row, count * sizeof(uint32_t));
    threefry<1>(first, second, &zero, &number);
    first = zero;
    second = number;
  }
  RowKeys keys;
  memcpy(keys.first, &first, sizeof(first));
  memcpy(keys.second, &second, sizeof(second));
  return keys;
}

constexpr uint32_t kNumbers[16] = {0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15};

template <int kBlocks>
inline void draw(uint32_t first, uint32_t second, int64_t column, int64_t count, uint32_t* out) {
  Words x[kBlocks] = {}, y[kBlocks] = {}, drawn[kBlocks], numbers;
  memcpy(&numbers, kNumbers, sizeof(numbers));
  for (int k = 0; k < kBlocks; ++k) y[k] = numbers + static_cast<uint32_t>(column + k * kLanes);
  threefry<kBlocks>(Words{} + first, Words{} + second, x, y);
  for (int k = 0; k < kBlocks; ++k) drawn[k] = x[k] ^ y[k];
  memcpy(out + column, drawn, count * sizeof(uint32_t));
}

}  // namespace

void row_bits(const TableKeys& from, const uint32_t* const* lanes, int64_t num_lanes, int64_t dim, int64_t first,
              int64_t last, uint32_t* bits) {
  constexpr int kTogether = 4;
  for (int64_t row = first; row < last; row += kLanes) {
    const int64_t count = last - row < kLanes ? last - row : kLanes;
    const RowKeys own = fold(from, lanes, num_lanes, row, count);
    for (int64_t k = 0; k < count; ++k) {
      uint32_t* const out = bits + (row + k) * dim;
      int64_t column = 0;
      for (; column + kTogether * kLanes <= dim; column += kTogether * kLanes) {
        draw<kTogether>(own.first[k], own.second[k], column, kTogether * kLanes, out);
      }
      for (; column < dim; column += kLanes) {
        draw<1>(own.first[k], own.second[k], column, dim - column < kLanes ? dim - column : kLanes, out);
      }
    }
  }
}

}  // namespace RSEMBED_ISA
}  // namespace rsembed
