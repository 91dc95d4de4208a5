// Products of tensor-train slices, compiled once per instruction set like the row kernels.
//
// Only plain structs are allowed here, for the reason in row_kernels.h.
#pragma once

#include <cstdint>

namespace rsembed {

constexpr int64_t kMaxCores = 16;
constexpr int64_t kLookupsPerBlock = 12;

// A tensor train and the slices of every lookup. Slice `digit` of core t is `[left, columns, right]` in C order.
struct Train {
  int64_t num_cores;
  int64_t grouped;  // core with the largest slices; all lookups of a block use the same slice of it
  int64_t dim;
  const float* cores[kMaxCores];
  const int32_t* digits[kMaxCores];
  int64_t num_digits[kMaxCores];
  int64_t left[kMaxCores];
  int64_t columns[kMaxCores];
  int64_t right[kMaxCores];
  int64_t size[kMaxCores];     // size of a slice
  int64_t rows[kMaxCores];     // rows of the product of the slices before core t, `[rows, left]`
  int64_t product[kMaxCores];  // size of the product of the slices up to core t
};

// Size of the work space of one block, in numbers.
inline int64_t ScratchSize(const Train& train) {
  int64_t products = 0, most = 0, slices = 0;
  for (int64_t t = 0; t < train.num_cores; ++t) {
    products += train.product[t];
    if (train.product[t] > most) most = train.product[t];
    if (train.size[t] > slices) slices = train.size[t];
  }
  return kLookupsPerBlock * (products + 2 * most) + slices;
}

struct TrainKernels {
  const char* name;
  // Computes rows `[count, dim]` of `count` lookups. No two of these lookups may use the same slices of all cores.
  void (*rows)(const Train&, const uint32_t* lookups, int64_t count, float* scratch, float* made);
  // Backward pass of `rows`. Adds the gradient of the slice that all lookups share to `d_grouped`, and writes the
  // gradients of the other slices to `d_slices`, `[count, size]` for every core. For cores before the grouped one it
  // writes only at heads, which include the lookups after them with the same slices. `rows` must have been called with
  // the same `scratch`.
  void (*pull)(const Train&, const uint32_t* lookups, int64_t count, const float* d_rows, const float* transposed,
               float* d_grouped, float* const* d_slices, bool* is_head, float* scratch);
  // Writes the slice `[left, columns * right]` with swapped axes to `out`.
  void (*transpose)(const float* slice, int64_t left, int64_t width, float* out);
  void (*add)(const float* from, float gain, int64_t count, float* to);
  float (*dot)(const float* a, const float* b, int64_t count);
};

namespace baseline {
extern const TrainKernels kTrainKernels;
}
namespace avx2 {
extern const TrainKernels kTrainKernels;
}
namespace avx512 {
extern const TrainKernels kTrainKernels;
}

}  // namespace rsembed
