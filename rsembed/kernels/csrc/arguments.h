// Reads the arguments that XLA passes to handlers, and checks everything that memory safety depends on.
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

// Sizes and indices in a call are not trusted, so the functions below add and multiply them without overflow.

// Product of two sizes, or INT64_MAX on overflow, which is more than the size of any buffer.
inline int64_t Times(int64_t a, int64_t b) {
  int64_t product;
  return __builtin_mul_overflow(a, b, &product) ? INT64_MAX : product;
}

// Whether [first, first + count) is inside [0, size).
inline bool LiesIn(int64_t first, int64_t count, int64_t size) {
  return first >= 0 && count >= 0 && count <= size && first <= size - count;
}

// Whether `count` vectors of `dim` numbers are inside an array of `size` numbers. The first vector starts at `first`,
// and the starts of consecutive vectors are `stride` numbers apart.
inline bool VectorsLieIn(int64_t first, int64_t count, int64_t stride, int64_t dim, int64_t size) {
  int64_t length;  // numbers from the start of the first vector to the end of the last vector
  const bool wraps = __builtin_mul_overflow(count - 1, stride, &length) || __builtin_add_overflow(length, dim, &length);
  return stride >= 0 && dim >= 0 && !wraps && LiesIn(first, length, size);
}

// A list of ids with their bags, see IdList in rsembed/kernels/contract.py.
struct List {
  const int32_t* ids;
  const int32_t* offsets;  // null: every bag has `width` entries
  const float* weights;    // null: all weights are 1
  int64_t num_ids, num_bags, width;
};

// Returns the index of the first entry of bag number `bag`, limited to the range from 0 to the number of ids. If `bag`
// is the number of bags, returns the end of the last bag.
inline int64_t FirstEntry(const List& list, int64_t bag) {
  return list.offsets == nullptr ? bag * list.width : std::clamp<int64_t>(list.offsets[bag], 0, list.num_ids);
}

// An output of a call, or the gradient of an output.
struct Output {
  float* data;
  int64_t size;
};

// Whether two segments share an entry, because they share a bag or because offsets decrease.
inline bool ShareEntries(const std::vector<Segment>& segments) {
  struct Range {
    int64_t list, first, last;
  };
  std::vector<Range> ranges;
  for (const Segment& segment : segments) {
    if (segment.num_entries > 0) {
      ranges.push_back({segment.list, segment.first_id, segment.first_id + segment.num_entries});
    }
  }
  std::sort(ranges.begin(), ranges.end(), [](const Range& a, const Range& b) {
    return a.list != b.list ? a.list < b.list : a.first < b.first;
  });
  for (size_t k = 1; k < ranges.size(); ++k) {
    if (ranges[k].list == ranges[k - 1].list && ranges[k].first < ranges[k - 1].last) return true;
  }
  return false;
}

// Reads the buffers of a call in order, and keeps the first error. Values that are read after an error must not be
// used.
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

  // Reads the lists of ids of a call. `forms` has three numbers per list: flags (1: the list has offsets, 2: it has
  // weights), the number of bags, and the number of entries per bag if there are no offsets. The ids, offsets and
  // weights of a list are consecutive buffers.
  std::vector<List> Lists(ffi::Span<const int64_t> forms) {
    std::vector<List> lists;
    if (forms.size() % 3 != 0) Fail("unreadable lists");
    for (size_t at = 0; at + 3 <= forms.size() && !Failed(); at += 3) {
      const int64_t flags = forms[at];
      List list = {};
      list.num_bags = forms[at + 1];
      list.width = forms[at + 2];
      list.ids = static_cast<int32_t*>(Next("ids", ffi::S32, &list.num_ids));
      if (flags & 1) {
        int64_t num_offsets = 0;
        list.offsets = static_cast<int32_t*>(Next("offsets", ffi::S32, &num_offsets));
        if (num_offsets < 1 || num_offsets - 1 != list.num_bags) Fail("wrong number of offsets");
        list.width = 0;  // lists with offsets do not use `width`
      } else if (list.num_bags < 0 || list.width < 0 || Times(list.num_bags, list.width) != list.num_ids) {
        Fail("bags of one length do not fill their list");
      }
      if (flags & 2) list.weights = static_cast<float*>(Next("weights", ffi::F32, list.num_ids));
      // Bags without entries take no memory, so there can be any number of them.
      if (std::max(list.num_ids, list.num_bags) > kNoRow) Fail("too many entries for one call");
      lists.push_back(list);
    }
    return lists;
  }

  // Reads the next `count` buffers, which are gradients of outputs.
  std::vector<Output> Gradients(int64_t count) {
    std::vector<Output> outputs;
    for (int64_t k = 0; k < count && !Failed(); ++k) {
      Output output = {};
      output.data = static_cast<float*>(Next("gradient of an output", ffi::F32, &output.size));
      outputs.push_back(output);
    }
    return outputs;
  }

  // Reads the segments of a call (the parts of lists that features read). `numbers` has ten numbers per segment: the
  // seven fields of Segment in rsembed/kernels/contract.py, in order, and then the three fields of Place in the same
  // file. Combiner -1 stands for `none`. If `with_gradients` is true, `outputs` holds the gradients of outputs, which
  // kernels only read.
  std::vector<Segment> Segments(ffi::Span<const int64_t> numbers, const std::vector<List>& lists,
                                const std::vector<Table>& tables, const std::vector<Output>& outputs,
                                bool with_gradients) {
    constexpr size_t kNumbers = 10;
    std::vector<Segment> segments;
    int64_t num_entries = 0, num_outputs = 0;
    const auto is_number_of = [](int64_t number, const auto& array) {
      return number >= 0 && number < static_cast<int64_t>(array.size());
    };
    if (numbers.size() % kNumbers != 0) Fail("unreadable segments");
    for (size_t at = 0; at + kNumbers <= numbers.size() && !Failed(); at += kNumbers) {
      const int64_t* const own = numbers.begin() + at;
      const int64_t first_bag = own[1], num_bags = own[2], combiner = own[3];
      if (!is_number_of(own[0], lists) || !is_number_of(own[4], tables) || !is_number_of(own[7], outputs)) {
        Fail("a segment lies outside the call");
        break;
      }
      const List& list = lists[own[0]];
      const Table& table = tables[own[4]];
      const Output& output = outputs[own[7]];
      if (!LiesIn(first_bag, num_bags, list.num_bags)) Fail("segments lie outside the bags");
      if (!LiesIn(own[5], own[6], table.num_rows)) Fail("segments lie outside the tables");
      if (combiner < -1 || combiner > kMeanByCount) Fail("unknown combiner");
      if (Failed()) break;
      const int64_t first_entry = FirstEntry(list, first_bag), last_entry = FirstEntry(list, first_bag + num_bags);
      Segment s = {};
      s.rows = list.ids + first_entry;
      s.first_id = first_entry;
      s.num_entries = std::max<int64_t>(last_entry - first_entry, 0);
      s.list = own[0];
      if (list.offsets != nullptr) s.offsets = list.offsets + first_bag;
      if (list.weights != nullptr) s.weights = list.weights + first_entry;
      s.width = list.width;
      s.num_outputs = num_bags;
      s.combiner = static_cast<Combiner>(std::max<int64_t>(combiner, 0));
      s.table = own[4];
      s.first_row = own[5];
      s.num_rows = own[6];
      s.output_stride = own[9];
      int64_t first_number = own[8], skipped = 0;
      if (combiner < 0) {  // every entry has a vector, in the order of the list
        s.offsets = nullptr;
        s.width = 1;
        s.num_outputs = s.num_entries;
        skipped = Times(first_entry, s.output_stride);
      }
      if (s.num_outputs > 0) {  // a segment without outputs writes nothing
        const bool wraps = __builtin_add_overflow(first_number, skipped, &first_number);
        if (wraps || !VectorsLieIn(first_number, s.num_outputs, s.output_stride, table.dim, output.size)) {
          Fail("segments lie outside the output");
          break;
        }
        if (with_gradients) {
          s.d_output = output.data + first_number;
        } else {
          s.output = output.data + first_number;
        }
      }
      s.first_entry = num_entries;
      s.first_output = num_outputs;
      num_entries += s.num_entries;
      num_outputs += s.num_outputs;
      segments.push_back(s);
    }
    // If two segments shared entries, results would exceed the caller's buffers, and two threads would write the same
    // outputs.
    if (ShareEntries(segments)) Fail("offsets must not fall, nor segments share bags");
    if (std::max(num_entries, num_outputs) > kNoRow) Fail("too many entries for one call");
    return segments;
  }

  // Reads all remaining buffers as tables.
  std::vector<Table> Tables() {
    std::vector<Table> tables;
    while (at_ < args_.size() && !Failed()) {
      const auto buffer = args_.get<ffi::AnyBuffer>(at_++);
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

  void* Fail(const std::string& complaint) {
    if (complaint_.empty()) complaint_ = complaint;
    return nullptr;
  }
  bool Failed() const { return !complaint_.empty(); }
  ffi::Error Complaint() const { return ffi::Error::InvalidArgument("rsembed: " + complaint_); }

 private:
  ffi::RemainingArgs args_;
  size_t at_ = 0;
  std::string complaint_;
};

// Runs `body`. If memory runs out, returns an error instead of throwing std::bad_alloc.
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
