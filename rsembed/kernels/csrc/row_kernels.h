// Floating-point loops over embedding rows, compiled once per instruction set and selected at run time.
//
// Only plain structs are allowed in this header. An inline function or a template would be compiled into each copy of
// row_kernels.cc. The linker would keep one of them, perhaps the AVX-512 one on a machine without AVX-512.
#pragma once

#include <cstdint>

namespace rsembed {

enum ElementType { kFloat32, kBFloat16, kFloat16, kNumElementTypes };
enum Rule { kSGD, kAdagrad, kRowWiseAdagrad, kAdam, kNumRules };
enum Combiner { kSum, kMean, kSqrtN, kMeanByCount };

// Entries (ids with weights) of one feature, and the bags that they are pooled into. Entries offsets[b] .. offsets[b +
// 1] form output b. Without offsets every output has `width` entries. Rows and offsets are not trusted: they can hold
// any number.
struct Segment {
  const int32_t* rows;
  int64_t first_id;        // index of the first entry in `offsets`
  const int32_t* offsets;  // null: `width` entries for each output
  int64_t width;
  const float* weights;    // null: ones
  int64_t num_entries;
  int64_t num_outputs;
  Combiner combiner;
  int64_t table;           // rows 0 .. num_rows - 1 of the segment are rows first_row .. of that table
  int64_t first_row;
  int64_t num_rows;
  float* output;           // lookup writes num_outputs vectors of dim numbers, output_stride apart
  const float* d_output;   // row gradients read vectors in the same layout
  int64_t output_stride;
  bool streams_copies;     // the whole output is too large to stay in a cache
  float* d_weights;        // gradients of the weights, one per entry
  int64_t list;            // index of the list that the entries are in
  int64_t first_entry;     // indices of this segment's first entry and output in the whole call
  int64_t first_output;
};

// A table, its slots and the hyperparameters of its rule. Slots are float32, `slot_width` numbers per row.
struct Table {
  void* values;
  ElementType type;
  float* slots[2];
  int64_t slot_width;
  const float* hyper;
  int64_t num_rows;
  int64_t dim;
};

// Item of the sort: the row of an entry and the source of its gradient.
struct Item {
  uint32_t row;
  uint32_t source;
};

struct GainedSource {
  const float* d_output;
  float gain;
};

// Valid entries in the order of their rows, equal rows in the order of their entries.
// If every gain is 1, `source` counts outputs and indexes `d_outputs`; else it counts entries and indexes `gained`.
struct SortedEntries {
  const Item* items;
  int64_t num_items;
  const float* const* d_outputs;
  const GainedSource* gained;  // null: every gain is 1
  int64_t dim;
};

// PRNG keys: two numbers per table, and the table of each row. If `table` is null, all rows belong to the first table.
struct TableKeys {
  const uint32_t* keys;
  int64_t count;
  const int32_t* table;
};

// Every function works on a range. Calls with disjoint ranges can run in parallel. Functions over sorted entries handle
// the groups of equal rows that *begin* in their range, and read past its end to finish the last group.
struct RowKernels {
  const char* name;
  void (*pool[kNumElementTypes])(const Table&, const Segment&, int64_t first_output, int64_t last_output);
  // Factors of the outputs' sums: 1, or the reciprocal of the divisor of mean and sqrtn; 0 if the divisor is 0.
  void (*bag_scales)(const Segment&, int64_t first_output, int64_t last_output, float* scales);
  void (*weight_gradients[kNumElementTypes])(const Table&, const Segment&, int64_t first_output, int64_t last_output);
  void (*sum_groups)(const SortedEntries&, int64_t first, int64_t last, int32_t* rows, float* gradients);
  double (*square_groups)(const SortedEntries&, int64_t first, int64_t last);  // squares of all gradients, added up
  void (*update_groups[kNumElementTypes][kNumRules])(const Table&, const SortedEntries&, int64_t first, int64_t last);
  void (*step_rows[kNumElementTypes][kNumRules])(const Table&, const int32_t* rows, const float* gradients,
                                                 int64_t first, int64_t last);
  // Computes random bits `[rows, dim]`. The lanes are the 32-bit words that identify a row of a table.
  void (*row_bits)(const TableKeys& from, const uint32_t* const* lanes, int64_t num_lanes, int64_t dim, int64_t first,
                   int64_t last, uint32_t* bits);
  // The first computes dot products of all pairs of a sample's `n` vectors, the second the gradient of the vectors.
  void (*pair_products)(const float* vectors, int64_t n, int64_t dim, int64_t first, int64_t last, float* products);
  void (*pull_pairs)(const float* vectors, const float* d_products, int64_t n, int64_t dim, int64_t first, int64_t last,
                     float* d_vectors);
};

namespace baseline {
extern const RowKernels kRowKernels;
}
namespace avx2 {
extern const RowKernels kRowKernels;
}
namespace avx512 {
extern const RowKernels kRowKernels;
}

const RowKernels& BestRowKernels();  // the best set that this processor supports, see ffi.cc

}  // namespace rsembed
