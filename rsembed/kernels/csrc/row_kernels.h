// Floating-point loops over embedding rows, compiled once per instruction set and selected at run time.
//
// Only plain structs are allowed in this header. An inline function or a template in this header would be compiled once
// per instruction set. If a function is compiled once per instruction set under one name, the linker keeps only one
// copy, perhaps the copy with AVX-512 instructions, which cannot run on a machine without AVX-512.
#pragma once

#include <cstdint>

namespace rsembed {

enum ElementType { kFloat32, kBFloat16, kFloat16, kNumElementTypes };
enum Rule { kSGD, kAdagrad, kRowWiseAdagrad, kAdam, kNumRules };
enum Combiner { kSum, kMean, kSqrtN, kMeanByCount };

// Entries (ids with weights) of one feature, and the bags that they are pooled into. Output b pools the entries from
// offsets[b] up to offsets[b + 1]. Without offsets, every output pools `width` entries. Kernels must not trust rows and
// offsets, which can have any value.
struct Segment {
  const int32_t* rows;
  int64_t first_id;        // position of the segment's first entry in its list; offsets are positions in this list
  const int32_t* offsets;  // null: every output pools `width` entries
  int64_t width;
  const float* weights;    // null: all weights are 1
  int64_t num_entries;
  int64_t num_outputs;
  Combiner combiner;
  int64_t table;           // row 0 of the segment is row `first_row` of this table
  int64_t first_row;
  int64_t num_rows;
  float* output;           // a lookup writes num_outputs vectors of dim numbers, output_stride numbers apart
  const float* d_output;   // gradients of the outputs, in the layout of `output`
  int64_t output_stride;
  bool streams_copies;     // whether all outputs together are too large for a cache
  float* d_weights;        // gradients of the weights, one per entry
  int64_t list;            // index of the list that the entries are in
  int64_t first_entry;     // index of this segment's first entry among the entries of all segments
  int64_t first_output;    // index of this segment's first output among the outputs of all segments
};

// A table, its optimizer slots and the hyperparameters of its rule. Slots are float32, with `slot_width` numbers per
// row.
struct Table {
  void* values;
  ElementType type;
  float* slots[2];
  int64_t slot_width;
  const float* hyper;
  int64_t num_rows;
  int64_t dim;
};

// Item to sort: the row of an entry, and an index that leads to the gradient of the entry, see SortedEntries.
struct Item {
  uint32_t row;
  uint32_t source;
};

struct GainedSource {
  const float* d_output;
  float gain;
};

// Valid entries in the order of their rows. Entries with equal rows stay in the order of the call. If every gain is 1,
// the `source` of an item is the index of an output in `d_outputs`. If gains differ from 1, the `source` of an item is
// the index of an entry in `gained`.
struct SortedEntries {
  const Item* items;
  int64_t num_items;
  const float* const* d_outputs;
  const GainedSource* gained;  // null: every gain is 1
  int64_t dim;
};

// PRNG keys of tables, two words per key, and the table of each row. If `table` is null, all rows use the first key.
struct TableKeys {
  const uint32_t* keys;
  int64_t count;
  const int32_t* table;
};

// The kernels for one instruction set. Every kernel works on a range, and calls with disjoint ranges can run in
// parallel. A function over sorted entries handles the groups of equal rows that *begin* in its range. If a group
// begins in the range and ends after the range, the function reads entries after the range.
struct RowKernels {
  const char* name;
  void (*pool[kNumElementTypes])(const Table&, const Segment&, int64_t first_output, int64_t last_output);
  // Computes the factor of every output: 1 for sums, 0 if the divisor is 0, and else the reciprocal of the divisor.
  void (*bag_scales)(const Segment&, int64_t first_output, int64_t last_output, float* scales);
  void (*weight_gradients[kNumElementTypes])(const Table&, const Segment&, int64_t first_output, int64_t last_output);
  void (*sum_groups)(const SortedEntries&, int64_t first, int64_t last, int32_t* rows, float* gradients);
  double (*square_groups)(const SortedEntries&, int64_t first, int64_t last);  // sum of the squares of all gradients
  void (*update_groups[kNumElementTypes][kNumRules])(const Table&, const SortedEntries&, int64_t first, int64_t last);
  void (*step_rows[kNumElementTypes][kNumRules])(const Table&, const int32_t* rows, const float* gradients,
                                                 int64_t first, int64_t last);
  // Computes random bits `[rows, dim]`. The lanes are the 32-bit words that identify a row of a table.
  void (*row_bits)(const TableKeys& from, const uint32_t* const* lanes, int64_t num_lanes, int64_t dim, int64_t first,
                   int64_t last, uint32_t* bits);
  // `pair_products` computes the dot products of all pairs of a sample's `n` vectors. `pull_pairs` computes the
  // gradient of the vectors from the gradient of the products.
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

const RowKernels& BestRowKernels();  // kernels for the best instruction set of this processor, see ffi.cc

}  // namespace rsembed
