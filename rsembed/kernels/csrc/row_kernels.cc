// This file is compiled once per instruction set (-DRSEMBED_ISA=baseline, avx2 or avx512), see row_kernels.h.
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
#define RSEMBED_STRING_OF(name) #name
#define RSEMBED_STRING(name) RSEMBED_STRING_OF(name)

namespace rsembed {
namespace RSEMBED_ISA {

// `row_bits` is defined in random_bits.cc, `pair_products` and `pull_pairs` in pairs.cc.
void row_bits(const TableKeys&, const uint32_t* const*, int64_t, int64_t, int64_t, int64_t, uint32_t*);
void pair_products(const float*, int64_t, int64_t, int64_t, int64_t, float*);
void pull_pairs(const float*, const float*, int64_t, int64_t, int64_t, int64_t, float*);

namespace {

#include "vectors.h"

constexpr int64_t kLineBytes = 64;

// Inlining is necessary, because GCC removes calls of functions that only prefetch and so have no effect on results.
#define RSEMBED_PREFETCHING __attribute__((always_inline)) inline

// Prefetches `bytes` bytes, or kLeast bytes if kLeast is larger. kLeast is a constant, so the compiler unrolls the loop
// over the first kLeast bytes.
template <int kForWriting, int64_t kLeast = 0>
RSEMBED_PREFETCHING void prefetch(const void* from, int64_t bytes) {
  const char* line = static_cast<const char*>(from);
#pragma GCC unroll 16
  for (int64_t at = 0; at < kLeast; at += kLineBytes) __builtin_prefetch(line + at, kForWriting);
  constexpr int64_t kRest = (kLeast + kLineBytes - 1) / kLineBytes * kLineBytes;
  for (int64_t at = kRest; at < bytes; at += kLineBytes) __builtin_prefetch(line + at, kForWriting);
}

// --- sums of rows ---------------------------------------------------------------------------------------------------
//
// A Source provides the addends of a sum of rows: row(i) is the address of addend i, or null to skip the addend,
// gain(i) is its factor, and prefetch(i) prefetches an addend some distance after i. Every column is summed in the
// order of the addends, so the bits do not depend on threads or blocks.

template <int kVectors, bool kPrefetch, typename Source>
inline void sum_panel(const Source& source, int64_t first, int64_t last, int64_t column, float scale, float* out) {
  Floats sum[kVectors] = {};
  for (int64_t i = first; i < last; ++i) {
    if (kPrefetch) source.template prefetch<kVectors * kLanes>(i);
    const auto* row = source.row(i);
    if (row == nullptr) continue;
    if (Source::kHasGains) {
      const Floats gain = broadcast(source.gain(i));
      for (int k = 0; k < kVectors; ++k) sum[k] += gain * load(row + column + k * kLanes);
    } else {
      for (int k = 0; k < kVectors; ++k) sum[k] += load(row + column + k * kLanes);
    }
  }
  for (int k = 0; k < kVectors; ++k) store(out + column + k * kLanes, sum[k] * scale);
}

template <typename Source>
inline void sum_tail(const Source& source, int64_t first, int64_t last, int64_t column, int64_t count, float scale,
                     float* out) {
  Floats sum = {};
  for (int64_t i = first; i < last; ++i) {
    if (column == 0) source.template prefetch<0>(i);
    const auto* row = source.row(i);
    if (row != nullptr) sum += source.gain(i) * load_tail(row + column, count);
  }
  store_tail(out + column, sum * scale, count);
}

// Sums rows one panel after the other. A panel has kVectors * kLanes columns of all rows, and kVectors is at most 8, so
// that the sums of a panel stay in registers. The first panel loads the rows into the first-level cache, and the later
// panels read them from there.
template <int kVectors, typename Source>
inline void sum_panels(const Source& source, int64_t first, int64_t last, int64_t dim, float scale, float* out,
                       int64_t& column) {
  for (; column + kVectors * kLanes <= dim; column += kVectors * kLanes) {
    if (column == 0) {
      sum_panel<kVectors, true>(source, first, last, column, scale, out);
    } else {
      sum_panel<kVectors, false>(source, first, last, column, scale, out);
    }
  }
}

template <typename Source>
inline void sum_rows(const Source& source, int64_t first, int64_t last, int64_t dim, float scale, float* out) {
  int64_t column = 0;
  sum_panels<8>(source, first, last, dim, scale, out, column);
  sum_panels<4>(source, first, last, dim, scale, out, column);
  sum_panels<2>(source, first, last, dim, scale, out, column);
  sum_panels<1>(source, first, last, dim, scale, out, column);
  if (column < dim) sum_tail(source, first, last, column, dim - column, scale, out);
}

// --- lookup ---------------------------------------------------------------------------------------------------------

inline int64_t clamp(int64_t x, int64_t low, int64_t high) { return x < low ? low : x > high ? high : x; }

// Prefetch distance, in rows. Most rows of a large table are in no cache of the processor. With a long prefetch
// distance, the loads of many rows from memory overlap. `bytes` is at most half the size of a first-level cache.
inline int64_t rows_ahead(int64_t row_bytes, int64_t bytes, int64_t least, int64_t most) {
  return row_bytes == 0 ? 0 : clamp(bytes / row_bytes, least, most);
}

template <typename T, bool kWeighted>
struct TableRows {
  static constexpr bool kHasGains = kWeighted;
  const T* table;
  const int32_t* rows;
  const float* weights;
  int64_t num_entries;
  uint32_t num_rows;
  int64_t dim;
  int64_t entries_ahead;
  float factor = 1.0f;

  // As an unsigned number, a negative row is out of range.
  const T* row(int64_t i) const {
    const bool contributes = static_cast<uint32_t>(rows[i]) < num_rows && (!kWeighted || weights[i] != 0.0f);
    return contributes ? table + rows[i] * dim : nullptr;
  }
  float gain(int64_t i) const { return kWeighted ? weights[i] * factor : 1.0f; }
  template <int64_t kColumns>
  RSEMBED_PREFETCHING void prefetch(int64_t i) const {
    const int64_t ahead = i + entries_ahead;
    if (ahead < num_entries && static_cast<uint32_t>(rows[ahead]) < num_rows) {
      RSEMBED_ISA::prefetch<0, kColumns * sizeof(T)>(table + rows[ahead] * dim, dim * sizeof(T));
    }
  }
};

struct EntryRange {
  int64_t first;
  int64_t last;
};

inline EntryRange bag_entries(const Segment& segment, int64_t output) {
  if (segment.offsets == nullptr) return {output * segment.width, (output + 1) * segment.width};
  const int64_t first = clamp(segment.offsets[output] - segment.first_id, 0, segment.num_entries);
  return {first, clamp(segment.offsets[output + 1] - segment.first_id, first, segment.num_entries)};
}

// Two factors that scale a bag: every weight is multiplied by `before`, and the sum of the rows by `after`.
struct BagScale {
  float before;
  float after;
};

// Scale of a bag with very large or very small weights. `before` is a power of two that scales the largest weight to
// about 1, so that sums and squares of weights neither overflow nor underflow, as in `_inverse_magnitudes` of
// kernels/reference.py.
__attribute__((noinline)) BagScale bag_scale_of_extremes(const Segment& segment, EntryRange bag) {
  const auto weight_of = [&](int64_t i) {
    const bool is_listed = static_cast<uint32_t>(segment.rows[i]) < static_cast<uint32_t>(segment.num_rows);
    return is_listed ? segment.weights[i] : 0.0f;
  };
  float largest = 0.0f;
  for (int64_t i = bag.first; i < bag.last; ++i) {
    const float magnitude = __builtin_fabsf(weight_of(i));
    if (!(magnitude <= largest)) largest = magnitude;
  }
  uint32_t bits;
  memcpy(&bits, &largest, sizeof(bits));
  const uint32_t exponent = static_cast<uint32_t>(clamp(bits >> 23, 1, 253));
  bits = (254 - exponent) << 23;
  float inverse;
  memcpy(&inverse, &bits, sizeof(inverse));
  float total = 0.0f;
  for (int64_t i = bag.first; i < bag.last; ++i) {
    const float weight = weight_of(i) * inverse;
    total += segment.combiner == kSqrtN ? weight * weight : weight;
  }
  const float divisor = segment.combiner == kSqrtN ? __builtin_sqrtf(total) : total;
  return {inverse, divisor == 0.0f ? 0.0f : 1.0f / divisor};
}

inline BagScale bag_scale(const Segment& segment, EntryRange bag) {
  if (segment.combiner == kSum) return {1.0f, 1.0f};
  const bool counts = segment.weights == nullptr || segment.combiner == kMeanByCount;
  float total = 0.0f;
  for (int64_t i = bag.first; i < bag.last; ++i) {
    if (static_cast<uint32_t>(segment.rows[i]) >= static_cast<uint32_t>(segment.num_rows)) continue;
    const float weight = counts ? 1.0f : segment.weights[i];
    total += segment.combiner == kSqrtN ? weight * weight : weight;
  }
  if (!counts) {
    const float magnitude = __builtin_fabsf(total);
    if (!(magnitude > 1e-30f && magnitude < 1e30f)) return bag_scale_of_extremes(segment, bag);
  }
  const float divisor = segment.combiner == kSqrtN ? __builtin_sqrtf(total) : total;
  return {1.0f, divisor == 0.0f ? 0.0f : 1.0f / divisor};
}

// Computes the factor of each bag, see row_kernels.h. The factor of a bag becomes NaN if the weights are so large that
// the factor is not a normal float, because a factor of zero would hide the error.
void bag_scales(const Segment& segment, int64_t first_output, int64_t last_output, float* scales) {
  for (int64_t output = first_output; output < last_output; ++output) {
    const BagScale scale = bag_scale(segment, bag_entries(segment, output));
    const float factor = scale.before * scale.after;
    const bool is_lost = scale.after != 0.0f && !(__builtin_fabsf(factor) >= 0x1p-126f);
    *scales++ = is_lost ? __builtin_nanf("") : factor;
  }
}

template <typename T>
inline const T* rows_of(const Table& table, const Segment& segment) {
  return static_cast<const T*>(table.values) + segment.first_row * table.dim;
}

template <typename T>
inline bool stream_copy(const T* row, int64_t dim, float* to) {
  const bool is_aligned = dim % kLanes == 0 && reinterpret_cast<uintptr_t>(to) % sizeof(Floats) == 0;
  if (row == nullptr || !is_aligned) return false;
  for (int64_t at = 0; at < dim; at += kLanes) stream(to + at, load(row + at));
  return true;
}

template <typename T, bool kWeighted>
void pool_segment(const Table& table, const Segment& segment, int64_t first_output, int64_t last_output) {
  const uint32_t num_rows = static_cast<uint32_t>(segment.num_rows);
  const int64_t row_bytes = table.dim * static_cast<int64_t>(sizeof(T));
  const int64_t entries_ahead = rows_ahead(row_bytes, 16 << 10, 1, 64);
  TableRows<T, kWeighted> source = {rows_of<T>(table, segment), segment.rows, segment.weights,
                                          segment.num_entries, num_rows, table.dim, entries_ahead};
  for (int64_t output = first_output; output < last_output; ++output) {
    EntryRange bag = bag_entries(segment, output);
    const BagScale scale = bag_scale(segment, bag);
    source.factor = scale.before;
    if (scale.after == 0.0f) bag.last = bag.first;  // rows that do not contribute can hold NaN
    float* const to = segment.output + output * segment.output_stride;
    if (!kWeighted && segment.streams_copies && bag.last == bag.first + 1) {
      source.template prefetch<0>(bag.first);
      if (stream_copy(source.row(bag.first), table.dim, to)) continue;
    }
    sum_rows(source, bag.first, bag.last, table.dim, scale.after, to);
  }
}

template <typename T>
void pool(const Table& table, const Segment& segment, int64_t first_output, int64_t last_output) {
  const auto pool_it = segment.weights == nullptr ? pool_segment<T, false> : pool_segment<T, true>;
  pool_it(table, segment, first_output, last_output);
}

// --- gradients of weights --------------------------------------------------------------------------------------------

template <typename T>
void weight_gradients(const Table& table, const Segment& segment, int64_t first_output, int64_t last_output) {
  const T* const values = rows_of<T>(table, segment);
  for (int64_t output = first_output; output < last_output; ++output) {
    const EntryRange bag = bag_entries(segment, output);
    const BagScale of_bag = bag_scale(segment, bag);
    const float scale = of_bag.before * of_bag.after;
    const float* const d_output = segment.d_output + output * segment.output_stride;
    for (int64_t i = bag.first; i < bag.last; ++i) {
      if (static_cast<uint32_t>(segment.rows[i]) >= static_cast<uint32_t>(segment.num_rows)) continue;
      segment.d_weights[i] = scale * dot(values + segment.rows[i] * table.dim, d_output, table.dim);
    }
  }
}

// --- row gradients --------------------------------------------------------------------------------------------------

// Prefetch distance of an optimizer step, in rows. For every row, an optimizer step reads the gradient, the row and its
// slots.
inline int64_t steps_ahead(int64_t dim) { return rows_ahead(dim * sizeof(float), 4 << 10, 8, 24); }

template <bool kGained>
struct OutputGradients {
  static constexpr bool kHasGains = kGained;
  const SortedEntries& entries;
  int64_t items_ahead = steps_ahead(entries.dim);

  const float* row(int64_t i) const {
    const uint32_t source = entries.items[i].source;
    return kGained ? entries.gained[source].d_output : entries.d_outputs[source];
  }
  float gain(int64_t i) const { return kGained ? entries.gained[entries.items[i].source].gain : 1.0f; }
  template <int64_t kColumns>
  RSEMBED_PREFETCHING void prefetch(int64_t i) const {
    if (i + items_ahead < entries.num_items) {
      RSEMBED_ISA::prefetch<0, kColumns * sizeof(float)>(row(i + items_ahead), entries.dim * sizeof(float));
    }
  }
};

inline int64_t group_end(const SortedEntries& entries, int64_t first) {
  int64_t last = first + 1;
  while (last < entries.num_items && entries.items[last].row == entries.items[first].row) ++last;
  return last;
}

// Calls body(row, first, last) for every group of equal rows that begins in [first, last).
template <typename Body>
inline void for_groups(const SortedEntries& entries, int64_t first, int64_t last, const Body& body) {
  while (first < last && first > 0 && entries.items[first].row == entries.items[first - 1].row) ++first;
  while (first < last) {
    const int64_t end = group_end(entries, first);
    body(entries.items[first].row, first, end);
    first = end;
  }
}

template <bool kGained>
void sum_groups_of(const SortedEntries& entries, int64_t first, int64_t last, int32_t* rows, float* gradients) {
  const OutputGradients<kGained> source = {entries};
  for_groups(entries, first, last, [&](uint32_t row, int64_t begin, int64_t end) {
    sum_rows(source, begin, end, entries.dim, 1.0f, gradients);
    gradients += entries.dim;
    *rows++ = static_cast<int32_t>(row);
  });
}

void sum_groups(const SortedEntries& entries, int64_t first, int64_t last, int32_t* rows, float* gradients) {
  const auto sum_them = entries.gained == nullptr ? sum_groups_of<false> : sum_groups_of<true>;
  sum_them(entries, first, last, rows, gradients);
}

template <bool kGained>
double square_groups_of(const SortedEntries& entries, int64_t first, int64_t last, float* sum) {
  const OutputGradients<kGained> source = {entries};
  double total = 0.0;
  for_groups(entries, first, last, [&](uint32_t, int64_t begin, int64_t end) {
    const float* gradient = sum;
    if (!kGained && end == begin + 1) {
      source.template prefetch<0>(begin);
      gradient = source.row(begin);
    } else {
      sum_rows(source, begin, end, entries.dim, 1.0f, sum);
    }
    total += dot(gradient, gradient, entries.dim);
  });
  return total;
}

double square_groups(const SortedEntries& entries, int64_t first, int64_t last) {
  const RowsInUse sum(1, entries.dim);
  const auto square_them = entries.gained == nullptr ? square_groups_of<false> : square_groups_of<true>;
  return square_them(entries, first, last, sum.get());
}

// --- optimizer rules ------------------------------------------------------------------------------------------------
//
// The file rsembed/optimizers/rules.py defines the formulas, and the order of the hyperparameters in `hyper`.

// Calls body(column, get, put) for the columns of a row, one vector at a time. `get` loads a vector from an address,
// and `put` stores a vector to an address. If fewer columns remain than a vector has lanes, `get` and `put` move only
// the remaining columns.
template <typename Body>
inline void for_columns(int64_t dim, const Body& body) {
  int64_t column = 0;
  for (; column + kLanes <= dim; column += kLanes) {
    body(column, [](auto* from) { return load(from); }, [](auto* to, Floats x) { store(to, x); });
  }
  if (column < dim) {
    const int64_t count = dim - column;
    body(column, [count](auto* from) { return load_tail(from, count); },
         [count](auto* to, Floats x) { store_tail(to, x, count); });
  }
}

template <typename T, Rule kRule>
inline void step_row(T* row, float* const slots[2], const float* gradient, int64_t dim, const float* hyper) {
  const float lr = hyper[0];
  if (kRule == kSGD) {
    for_columns(dim, [&](int64_t at, auto get, auto put) { put(row + at, get(row + at) - lr * get(gradient + at)); });
  } else if (kRule == kAdagrad) {
    const float epsilon = hyper[1];
    for_columns(dim, [&](int64_t at, auto get, auto put) {
      const Floats g = get(gradient + at), sum = get(slots[0] + at) + g * g;
      const Words positive = (Words)(sum > 0.0f);
      const Floats safe = as_floats(select(positive, as_words(sum), as_words(broadcast(1.0f))));
      const Floats root = square_root(safe) + epsilon;
      put(slots[0] + at, sum);
      put(row + at, get(row + at) - as_floats(positive & as_words(lr * g / root)));
    });
  } else if (kRule == kRowWiseAdagrad) {
    Floats squares = {};
    for_columns(dim, [&](int64_t at, auto get, auto) { squares += get(gradient + at) * get(gradient + at); });
    slots[0][0] += sum_of_lanes(squares) * (1.0f / static_cast<float>(dim));
    const float rate = lr / (__builtin_sqrtf(slots[0][0]) + hyper[1]);
    for_columns(dim, [&](int64_t at, auto get, auto put) { put(row + at, get(row + at) - rate * get(gradient + at)); });
  } else {
    const float one_minus_beta_1 = 1.0f - hyper[1], one_minus_beta_2 = 1.0f - hyper[2], epsilon = hyper[3];
    for_columns(dim, [&](int64_t at, auto get, auto put) {
      const Floats g = get(gradient + at), old_momentum = get(slots[0] + at), old_velocity = get(slots[1] + at);
      const Floats momentum = old_momentum + one_minus_beta_1 * (g - old_momentum);
      const Floats velocity = old_velocity + one_minus_beta_2 * (g * g - old_velocity);
      put(slots[0] + at, momentum);
      put(slots[1] + at, velocity);
      put(row + at, get(row + at) - lr * momentum / (square_root(velocity) + epsilon));
    });
  }
}

template <Rule kRule>
constexpr int num_slots() {
  return kRule == kSGD ? 0 : kRule == kAdam ? 2 : 1;
}

template <typename T, Rule kRule>
inline void step_table_row(const Table& table, uint32_t row, const float* gradient) {
  float* slots[2] = {nullptr, nullptr};
  for (int k = 0; k < num_slots<kRule>(); ++k) slots[k] = table.slots[k] + row * table.slot_width;
  step_row<T, kRule>(static_cast<T*>(table.values) + row * table.dim, slots, gradient, table.dim, table.hyper);
}

template <typename T, Rule kRule>
RSEMBED_PREFETCHING void prefetch_table_row(const Table& table, uint32_t row) {
  prefetch<1>(static_cast<T*>(table.values) + row * table.dim, table.dim * sizeof(T));
  for (int k = 0; k < num_slots<kRule>(); ++k) {
    prefetch<1>(table.slots[k] + row * table.slot_width, table.slot_width * sizeof(float));
  }
}

// Row-wise Adagrad for several rows at once, with the same bits as `step_row`. Within one row, the division has to wait
// for the square root, and the square root has to wait for the sum. Different rows are independent, so the processor
// can compute them in parallel.
constexpr int kRowsTogether = 4;

template <typename T>
inline void step_rows_together(T* const rows[], float* const slots[], const float* const gradients[], int64_t dim,
                               const float* hyper) {
  Floats squares[kRowsTogether] = {};
  for_columns(dim, [&](int64_t at, auto get, auto) {
    for (int k = 0; k < kRowsTogether; ++k) squares[k] += get(gradients[k] + at) * get(gradients[k] + at);
  });
  float rates[kRowsTogether];
  for (int k = 0; k < kRowsTogether; ++k) {
    slots[k][0] += sum_of_lanes(squares[k]) * (1.0f / static_cast<float>(dim));
    rates[k] = hyper[0] / (__builtin_sqrtf(slots[k][0]) + hyper[1]);
  }
  for_columns(dim, [&](int64_t at, auto get, auto put) {
    for (int k = 0; k < kRowsTogether; ++k) put(rows[k] + at, get(rows[k] + at) - rates[k] * get(gradients[k] + at));
  });
}

// Applies one optimizer step to distinct rows. For row-wise Adagrad, `step` collects rows until kRowsTogether rows can
// be updated at once, and `finish` updates the remaining rows. For every rule except row-wise Adagrad, each call of
// `step` updates its row immediately.
template <typename T, Rule kRule>
class Stepper {
 public:
  explicit Stepper(const Table& table) : table_(table) {}

  // Number of rows that were passed to `step` but have not been updated yet.
  int num_waiting() const { return num_waiting_; }

  void step(uint32_t row, const float* gradient) {
    if (kRule != kRowWiseAdagrad) return step_table_row<T, kRule>(table_, row, gradient);
    waiting_[num_waiting_] = row;
    gradients_[num_waiting_] = gradient;
    if (++num_waiting_ < kRowsTogether) return;
    T* rows[kRowsTogether];
    float* slots[kRowsTogether];
    for (int k = 0; k < kRowsTogether; ++k) {
      rows[k] = static_cast<T*>(table_.values) + waiting_[k] * table_.dim;
      slots[k] = table_.slots[0] + waiting_[k] * table_.slot_width;
    }
    step_rows_together(rows, slots, gradients_, table_.dim, table_.hyper);
    num_waiting_ = 0;
  }

  void finish() {
    for (int k = 0; k < num_waiting_; ++k) step_table_row<T, kRule>(table_, waiting_[k], gradients_[k]);
    num_waiting_ = 0;
  }

 private:
  const Table& table_;
  uint32_t waiting_[kRowsTogether];
  const float* gradients_[kRowsTogether];
  int num_waiting_ = 0;
};

template <typename T, Rule kRule, bool kGained>
void update_groups_of(const Table& table, const SortedEntries& entries, int64_t first, int64_t last, float* sums) {
  const OutputGradients<kGained> source = {entries};
  Stepper<T, kRule> stepper(table);
  int64_t ahead = first;
  for_groups(entries, first, last, [&](uint32_t row, int64_t begin, int64_t end) {
    const int64_t want = clamp(end + source.items_ahead, 0, entries.num_items);
    for (ahead = ahead < begin ? begin : ahead; ahead < want; ++ahead) {
      const uint32_t next = entries.items[ahead].row;
      if (ahead == 0 || next != entries.items[ahead - 1].row) prefetch_table_row<T, kRule>(table, next);
    }
    if (!kGained && end == begin + 1) {  // most rows of a batch occur once and need no sum
      source.template prefetch<0>(begin);
      stepper.step(row, source.row(begin));
    } else {
      float* const sum = sums + stepper.num_waiting() * table.dim;
      sum_rows(source, begin, end, table.dim, 1.0f, sum);
      stepper.step(row, sum);
    }
  });
  stepper.finish();
}

template <typename T, Rule kRule>
void update_groups(const Table& table, const SortedEntries& entries, int64_t first, int64_t last) {
  const RowsInUse sums(kRowsTogether, table.dim);
  const auto update_them =
      entries.gained == nullptr ? update_groups_of<T, kRule, false> : update_groups_of<T, kRule, true>;
  update_them(table, entries, first, last, sums.get());
}

template <typename T, Rule kRule>
void step_rows(const Table& table, const int32_t* rows, const float* gradients, int64_t first, int64_t last) {
  const uint32_t num_rows = static_cast<uint32_t>(table.num_rows);
  const int64_t ahead = steps_ahead(table.dim);
  Stepper<T, kRule> stepper(table);
  for (int64_t i = first; i < last; ++i) {
    if (i + ahead < last && static_cast<uint32_t>(rows[i + ahead]) < num_rows) {
      prefetch_table_row<T, kRule>(table, rows[i + ahead]);
    }
    if (static_cast<uint32_t>(rows[i]) < num_rows) stepper.step(rows[i], gradients + i * table.dim);
  }
  stepper.finish();
}

}  // namespace

#define RSEMBED_BY_RULE(function, T) \
  { function<T, kSGD>, function<T, kAdagrad>, function<T, kRowWiseAdagrad>, function<T, kAdam> }
#define RSEMBED_BY_TYPE_AND_RULE(function) \
  { RSEMBED_BY_RULE(function, float), RSEMBED_BY_RULE(function, BFloat16), RSEMBED_BY_RULE(function, Float16) }

extern const RowKernels kRowKernels;
const RowKernels kRowKernels = {
    RSEMBED_STRING(RSEMBED_ISA),
    {pool<float>, pool<BFloat16>, pool<Float16>},
    bag_scales,
    {weight_gradients<float>, weight_gradients<BFloat16>, weight_gradients<Float16>},
    sum_groups,
    square_groups,
    RSEMBED_BY_TYPE_AND_RULE(update_groups),
    RSEMBED_BY_TYPE_AND_RULE(step_rows),
    row_bits,
    pair_products,
    pull_pairs,
};

}  // namespace RSEMBED_ISA
}  // namespace rsembed
