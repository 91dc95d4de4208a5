// What the handlers receive from XLA, read and checked as far as memory safety needs.
#pragma once

#include <algorithm>
#include <cstdint>
#include <new>
#include <string>
#include <vector>

#include "row_kernels.h"
#include "xla/ffi/api/ffi.h"

namespace rsembed {

namespace ffi = xla::ffi;

constexpr int32_t kNoRow = 2147483647;  // NO_ROW of rsembed/kernels/contract.py

// Numbers of a call may be anything, so sums and products of them are made here, where none of them wraps around.

// The product of two sizes, or a size that no buffer has.
inline int64_t Times(int64_t a, int64_t b) {
  int64_t product;
  return __builtin_mul_overflow(a, b, &product) ? INT64_MAX : product;
}

// Whether [first, first + count) lies in [0, size).
inline bool LiesIn(int64_t first, int64_t count, int64_t size) {
  return first >= 0 && count >= 0 && count <= size && first <= size - count;
}

// Whether `count` vectors of `dim` numbers lie in an array of `size`, the first at `first` and others `stride` apart.
inline bool VectorsLieIn(int64_t first, int64_t count, int64_t stride, int64_t dim, int64_t size) {
  int64_t length;  // from the first number to behind the last
  const bool wraps = __builtin_mul_overflow(count - 1, stride, &length) || __builtin_add_overflow(length, dim, &length);
  return stride >= 0 && !wraps && LiesIn(first, length, size);
}

// Reads buffers one after the other and keeps the first complaint; what is read after one must not be used.
class Reader {
 public:
  explicit Reader(ffi::RemainingArgs args) : args_(args) {}

  void* Next(const char* what, ffi::DataType type, int64_t* count) {
    const auto buffer = args_.get<ffi::AnyBuffer>(at_++);
    *count = 0;
    if (!buffer.has_value()) return Fail(std::string("missing ") + what);
    if (buffer->element_type() != type) return Fail(std::string("wrong element type of ") + what);
    *count = buffer->element_count();
    return buffer->untyped_data();
  }

  void* Next(const char* what, ffi::DataType type, int64_t expected_count, bool or_more = false) {
    int64_t count;
    void* data = Next(what, type, &count);
    if (count < expected_count || (count > expected_count && !or_more)) Fail(std::string("wrong size of ") + what);
    return data;
  }

  std::vector<Segment> Segments(ffi::Span<const int32_t> layout, int64_t num_rows, int64_t dim, bool with_gradients) {
    std::vector<Segment> segments;
    int64_t num_entries = 0, num_outputs = 0;
    for (const int32_t flags : layout) {
      Segment s = {};
      s.first_entry = num_entries;
      s.first_output = num_outputs;
      s.combiner = static_cast<Combiner>(flags & 3);
      s.rows = static_cast<int32_t*>(Next("rows", ffi::S32, &s.num_entries));
      s.num_outputs = s.num_entries;
      if (flags & 4) {
        s.offsets = static_cast<int32_t*>(Next("offsets", ffi::S32, &s.num_outputs));
        if (--s.num_outputs < 0) Fail("offsets must not be empty");
      }
      s.num_rows = num_rows;
      s.output_stride = dim;
      if (flags & 8) s.weights = static_cast<float*>(Next("weights", ffi::F32, s.num_entries));
      if (with_gradients) s.d_output = static_cast<float*>(Next("d_output", ffi::F32, Times(s.num_outputs, dim)));
      num_entries += s.num_entries;
      num_outputs += s.num_outputs;
      segments.push_back(s);
    }
    if (std::max(num_entries, num_outputs) > kNoRow) Fail("too many entries for one call");
    return segments;
  }

  // One segment per block of a jagged batch: ids, offsets and weights are those of all blocks together. The numbers of
  // a block are those of Block in rsembed/kernels/contract.py, in its order, and where its vectors lie in the output.
  // The output is null in a call that only has its gradient.
  std::vector<Segment> Blocks(ffi::Span<const int64_t> blocks, int64_t combiner, bool has_weights,
                              const std::vector<Table>& tables, float* output, int64_t output_size,
                              bool with_gradients) {
    constexpr size_t kNumbers = 7;
    std::vector<Segment> segments;
    Segment all = {};
    int64_t num_offsets = 0, num_entries = 0, num_outputs = 0;
    all.rows = static_cast<int32_t*>(Next("ids", ffi::S32, &all.num_entries));
    all.offsets = static_cast<int32_t*>(Next("offsets", ffi::S32, &num_offsets));
    num_ids_ = all.num_entries;
    if (has_weights) all.weights = static_cast<float*>(Next("weights", ffi::F32, all.num_entries));
    if (with_gradients) all.d_output = static_cast<float*>(Next("d_output", ffi::F32, output_size));
    if (blocks.size() % kNumbers != 0 || combiner > kMeanByCount) Fail("unreadable blocks");
    for (size_t at = 0; at + kNumbers <= blocks.size() && !Failed(); at += kNumbers) {
      const int64_t* const block = blocks.begin() + at;
      const int64_t first_bag = block[0], num_bags = block[1];
      if (!LiesIn(first_bag, num_bags, num_offsets - 1)) Fail("blocks lie outside the offsets");
      const bool has_table = block[2] >= 0 && block[2] < static_cast<int64_t>(tables.size());
      if (!has_table || !LiesIn(block[3], block[4], tables[block[2]].num_rows)) Fail("blocks lie outside the tables");
      if (Failed()) break;
      const auto clamped = [&](int64_t bag) { return std::clamp<int64_t>(all.offsets[bag], 0, all.num_entries); };
      const int64_t first_entry = clamped(first_bag), last_entry = clamped(first_bag + num_bags);
      Segment s = all;
      s.num_entries = std::max<int64_t>(last_entry - first_entry, 0);
      s.rows += first_entry;
      s.offsets += first_bag;
      s.first_id = first_entry;
      if (s.weights != nullptr) s.weights += first_entry;
      s.combiner = static_cast<Combiner>(std::max<int64_t>(combiner, 0));
      s.num_outputs = num_bags;
      s.table = block[2];
      s.first_row = block[3];
      s.num_rows = block[4];
      s.output_stride = block[6];
      int64_t first_number = block[5], skipped = 0;
      if (combiner < 0) {  // every entry has a vector of its own, which lies where the entry does
        s.offsets = nullptr;
        s.num_outputs = s.num_entries;
        skipped = Times(first_entry, s.output_stride);
      }
      if (s.num_outputs > 0) {  // else it has no place in the output
        const bool wraps = __builtin_add_overflow(first_number, skipped, &first_number);
        if (wraps || !VectorsLieIn(first_number, s.num_outputs, s.output_stride, tables[s.table].dim, output_size)) {
          Fail("blocks lie outside the output");
          break;
        }
        if (output != nullptr) s.output = output + first_number;
        if (with_gradients) s.d_output = all.d_output + first_number;
      }
      s.first_entry = num_entries;
      s.first_output = num_outputs;
      num_entries += s.num_entries;
      num_outputs += s.num_outputs;
      segments.push_back(s);
    }
    // Falling offsets would make blocks share entries, and promise more rows than the caller has room for.
    if (num_entries > all.num_entries) Fail("offsets must not fall");
    if (std::max(num_entries, num_outputs) > kNoRow) Fail("too many entries for one call");
    return segments;
  }

  // The last `count` buffers, which follow `first` others.
  std::vector<Table> TablesBehind(int64_t first, int64_t count) {
    std::vector<Table> tables;
    for (int64_t k = 0; k < count && !Failed(); ++k) {
      const auto buffer = args_.get<ffi::AnyBuffer>(first + k);
      if (!buffer.has_value()) {
        Fail("missing table");
      } else {
        tables.push_back(TableOf(*buffer));
      }
    }
    return tables;
  }

  Table TableOf(ffi::AnyBuffer buffer) {
    Table table = {};
    const ffi::DataType type = buffer.element_type();
    if (type != ffi::F32 && type != ffi::BF16 && type != ffi::F16) Fail("tables are float32, bfloat16 or float16");
    if (buffer.dimensions().size() != 2) {
      Fail("a table has two axes");
      return table;
    }
    table.type = type == ffi::BF16 ? kBFloat16 : type == ffi::F16 ? kFloat16 : kFloat32;
    table.values = buffer.untyped_data();
    table.num_rows = buffer.dimensions()[0];
    table.dim = buffer.dimensions()[1];
    return table;
  }

  // Ids of the jagged batch that Blocks has read.
  int64_t num_ids() const { return num_ids_; }

  void* Fail(const std::string& complaint) {
    if (complaint_.empty()) complaint_ = complaint;
    return nullptr;
  }
  bool Failed() const { return !complaint_.empty(); }
  ffi::Error Complaint() const { return ffi::Error::InvalidArgument("rsembed: " + complaint_); }

 private:
  ffi::RemainingArgs args_;
  size_t at_ = 0;
  int64_t num_ids_ = 0;
  std::string complaint_;
};

// Memory is the only thing that can run out while sorting.
template <typename Body>
ffi::Error WithMemory(const Body& body) {
  try {
    body();
    return ffi::Error::Success();
  } catch (const std::bad_alloc&) {
    return ffi::Error(ffi::ErrorCode::kResourceExhausted, "rsembed: no memory for the entries of this call");
  }
}

inline int64_t NumRows(ffi::AnyBuffer buffer) { return buffer.dimensions().size() > 0 ? buffer.dimensions()[0] : 0; }

inline int64_t RowBytes(ffi::AnyBuffer buffer) {
  return NumRows(buffer) == 0 ? 0 : static_cast<int64_t>(buffer.size_bytes()) / NumRows(buffer);
}

}  // namespace rsembed
