// Products of tensor-train slices, built once per instruction set like the row kernels.
//
// Only plain structs live here, for the reason given in row_kernels.h.
#pragma once

#include <cstdint>

namespace rsembed {

constexpr int64_t kMaxCores = 16;
constexpr int64_t kLookupsPerBlock = 12;

// A train and the slices that every lookup takes. Slice `digit` of core t is `[left, columns, right]` in C order.
struct Train {
  int64_t num_cores;
  int64_t grouped;  // the core with the largest slices, of which all lookups of a block take the same one
  int64_t dim;
  const float* cores[kMaxCores];
  const int32_t* digits[kMaxCores];
  int64_t num_digits[kMaxCores];
  int64_t left[kMaxCores];
  int64_t columns[kMaxCores];
  int64_t right[kMaxCores];
  int64_t size[kMaxCores];     // of a slice
  int64_t rows[kMaxCores];     // of the product of the slices before core t, `[rows, left]`
  int64_t product[kMaxCores];  // size of the product of the slices up to core t
};

// Work space of one block, in numbers.
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
  // Rows `[count, dim]` of the lookups whose numbers are given. No two of them may take the same slices of all cores.
  void (*rows)(const Train&, const uint32_t* lookups, int64_t count, float* scratch, float* made);
  // From the gradients of the rows: adds to the gradient of the slice that they share, and writes those of the other
  // slices, `[count, size]` of every core; of the cores before the grouped one only where `is_head`, for all lookups that
  // follow with the same slices of these. `rows` must have been called with the same `scratch`.
  void (*pull)(const Train&, const uint32_t* lookups, int64_t count, const float* d_rows, const float* transposed,
               float* d_grouped, float* const* d_slices, bool* is_head, float* scratch);
  // The slice `[left, columns * right]` with its axes swapped.
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
