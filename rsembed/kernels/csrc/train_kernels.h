// Kernels that multiply slices of tensor trains, compiled once per instruction set, like the row kernels.
//
// Only plain structs are allowed in this header. row_kernels.h explains why.
#pragma once

#include <cstdint>

namespace rsembed {

constexpr int64_t kMaxCores = 16;
constexpr int64_t kLookupsPerBlock = 12;

// A tensor train, and the slices of its cores that each lookup reads. Each slice of core t is `[left, columns, right]`
// in C order. `digits[t]` has, for each lookup, the index of a slice of core t.
struct Train {
  int64_t num_cores;
  int64_t grouped;  // core with the largest slices; all lookups of a block use the same slice of this core
  int64_t dim;
  const float* cores[kMaxCores];
  const int32_t* digits[kMaxCores];
  int64_t num_digits[kMaxCores];
  int64_t left[kMaxCores];
  int64_t columns[kMaxCores];
  int64_t right[kMaxCores];
  int64_t size[kMaxCores];     // numbers in a slice of core t
  int64_t rows[kMaxCores];     // the product of slices of all cores before core t is `[rows, left]`
  int64_t product[kMaxCores];  // numbers in a product of slices of the cores 0 to t
};

// Number of floats in the scratch memory for one block of lookups.
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
  // Computes rows `[count, dim]` of `count` lookups. The lookups must read distinct rows.
  void (*rows)(const Train&, const uint32_t* lookups, int64_t count, float* scratch, float* made);
  // Backward pass of `rows`. Before `pull`, `rows` must be called with the same lookups and the same `scratch`. All
  // lookups use the same slice of core `grouped`, and the gradient of this slice is added to `d_grouped`. The gradients
  // of the slices of all cores except `grouped` are written to `d_slices`, `[count, size]` for every core. If
  // consecutive lookups share their slices of all cores before core `grouped`, the gradients of the shared slices are
  // summed. `d_slices` holds the sum at the first lookup that shares the slices, and `is_head` becomes true only for
  // the first lookup.
  void (*pull)(const Train&, const uint32_t* lookups, int64_t count, const float* d_rows, const float* transposed,
               float* d_grouped, float* const* d_slices, bool* is_head, float* scratch);
  // Writes the transpose of a slice `[left, columns * right]` to `out`.
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
