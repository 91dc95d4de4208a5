// Sorts the entries of all segments by row. All work is on integers, so results are equal on every instruction set.
#pragma once

#include <algorithm>
#include <cstdint>
#include <memory>
#include <vector>

#include "parallel.h"
#include "row_kernels.h"

namespace rsembed {

// Array with uninitialised elements, unlike a new std::vector, which is filled with zeros.
template <typename T>
class Scratch {
 public:
  explicit Scratch(int64_t size) : data_(new T[std::max<int64_t>(size, 1)]) {}
  T* get() const { return data_.get(); }
  T& operator[](int64_t i) const { return data_[i]; }

 private:
  std::unique_ptr<T[]> data_;
};

// Stable radix sort of items by row, least significant digit first. Every pass counts and moves chunks of items in
// parallel, so the work is balanced even if most rows are equal. The result of a stable sort does not depend on the
// number of chunks. The number of chunks is only large enough to keep the threads busy, because each chunk has
// counters, and reading the counters of many chunks takes longer than moving the items.
class RowSort {
 public:
  // `emit(first, last, items)` writes the items of entries [first, last), and returns the number of items. The field
  // `row` of every item must be less than `num_rows`.
  template <typename Emit>
  RowSort(Workers& workers, int64_t num_entries, int64_t num_rows, const Emit& emit)
      : items_(num_entries), spare_(num_entries) {
    const int64_t num_threads = workers.num_threads();
    const int64_t max_chunks = num_threads == 1 ? 1 : kChunksPerThread * num_threads;
    const int64_t num_chunks = std::clamp<int64_t>(num_entries / kEntriesPerChunk, 1, max_chunks);
    chunk_size_ = std::max<int64_t>((num_entries + num_chunks - 1) / num_chunks, 1);
    int row_bits = 1;
    while ((int64_t{1} << row_bits) < num_rows) ++row_bits;
    // A small number of entries is sorted faster with short digits, which need more passes but fewer counters per pass.
    const int max_digit_bits = num_entries < 2048 ? 7 : num_entries < 16384 ? 10 : 12;
    const int num_passes = (row_bits + max_digit_bits - 1) / max_digit_bits;
    digit_bits_ = (row_bits + num_passes - 1) / num_passes;
    counts_ = std::vector<uint32_t>(num_chunks << digit_bits_);

    // Before the first pass, the items of a chunk begin at the position of its first entry, so there can be gaps
    // between the items of two chunks.
    std::vector<int64_t> chunk_items(num_chunks);
    workers.ForEachBlock(num_chunks, [&](int64_t chunk) {
      const int64_t first = std::min(chunk * chunk_size_, num_entries);
      const int64_t last = std::min(first + chunk_size_, num_entries);
      chunk_items[chunk] = emit(first, last, &items_[first]);
      Count(chunk, first, first + chunk_items[chunk], 0);
    });
    for (int pass = 0; pass < num_passes; ++pass) {
      const int shift = pass * digit_bits_;
      if (pass > 0) {
        workers.ForEachBlock(num_chunks, [&](int64_t chunk) {
          const int64_t first = std::min(chunk * chunk_size_, num_items_);
          chunk_items[chunk] = std::min(first + chunk_size_, num_items_) - first;
          Count(chunk, first, first + chunk_items[chunk], shift);
        });
      }
      TurnCountsIntoPlaces(num_chunks);
      workers.ForEachBlock(num_chunks, [&](int64_t chunk) {
        const int64_t first = std::min(chunk * chunk_size_, num_entries);
        Move(chunk, first, first + chunk_items[chunk], shift);
      });
      std::swap(items_, spare_);
    }
  }

  const Item* items() const { return items_.get(); }
  int64_t num_items() const { return num_items_; }

 private:
  static constexpr int64_t kEntriesPerChunk = 4096;
  static constexpr int64_t kChunksPerThread = 2;

  uint32_t Digit(const Item& item, int shift) const { return (item.row >> shift) & ((1u << digit_bits_) - 1); }

  void Count(int64_t chunk, int64_t first, int64_t last, int shift) {
    uint32_t* counts = &counts_[chunk << digit_bits_];
    std::fill_n(counts, int64_t{1} << digit_bits_, 0);
    for (int64_t i = first; i < last; ++i) ++counts[Digit(items_[i], shift)];
  }

  void TurnCountsIntoPlaces(int64_t num_chunks) {
    uint32_t place = 0;
    for (int64_t digit = 0; digit < int64_t{1} << digit_bits_; ++digit) {
      for (int64_t chunk = 0; chunk < num_chunks; ++chunk) {
        uint32_t& count = counts_[(chunk << digit_bits_) + digit];
        const uint32_t next = place + count;
        count = place;
        place = next;
      }
    }
    num_items_ = place;
  }

  void Move(int64_t chunk, int64_t first, int64_t last, int shift) {
    uint32_t* places = &counts_[chunk << digit_bits_];
    for (int64_t i = first; i < last; ++i) spare_[places[Digit(items_[i], shift)]++] = items_[i];
  }

  Scratch<Item> items_, spare_;
  std::vector<uint32_t> counts_;
  int64_t chunk_size_ = 0;
  int64_t num_items_ = 0;
  int digit_bits_ = 0;
};

// Splits entries (or outputs) [first, last) of the call by segment, and calls body(segment, begin, end) for each part.
// `begin` and `end` are relative to the segment's first entry (or output).
template <auto kFirst, auto kCount, typename Segment, typename Body>
void ForEachPart(const std::vector<Segment>& segments, int64_t first, int64_t last, const Body& body) {
  for (const Segment& segment : segments) {
    const int64_t begin = std::max<int64_t>(first - segment.*kFirst, 0);
    const int64_t end = std::min(last - segment.*kFirst, segment.*kCount);
    if (begin < end) body(segment, begin, end);
  }
}

// Entries of a call that contribute to the gradients of rows, sorted by row, and the output gradient of each entry.
class SortedSegments {
 public:
  SortedSegments(Workers& workers, const RowKernels& kernels, const std::vector<Segment>& segments, int64_t num_rows,
                 int64_t dim)
      : totals_(segments),
        d_outputs_(totals_.num_outputs),
        scales_(totals_.has_gains ? totals_.num_outputs : 0),
        gained_(totals_.has_gains ? totals_.num_entries : 0),
        dim_(dim) {
    workers.ForEachRange(totals_.num_outputs, 4096, [&](int64_t first, int64_t last) {
      ForEachPart<&Segment::first_output, &Segment::num_outputs>(
          segments, first, last, [&](const Segment& segment, int64_t begin, int64_t end) {
            for (int64_t output = begin; output < end; ++output) {
              d_outputs_[segment.first_output + output] = segment.d_output + output * segment.output_stride;
            }
            if (totals_.has_gains) {
              kernels.bag_scales(segment, begin, end, &scales_[segment.first_output + begin]);
            }
          });
    });
    const auto emit = [&](int64_t first, int64_t last, Item* items) {
      Item* const begin = items;
      ForEachPart<&Segment::first_entry, &Segment::num_entries>(
          segments, first, last, [&](const Segment& segment, int64_t from, int64_t to) {
            items = Emit(segment, from, to, items);
          });
      return items - begin;
    };
    sort_ = std::make_unique<RowSort>(workers, totals_.num_entries, num_rows, emit);
  }

  SortedEntries entries() const {
    return {sort_->items(), sort_->num_items(), d_outputs_.get(), totals_.has_gains ? gained_.get() : nullptr, dim_};
  }

 private:
  struct Totals {
    int64_t num_entries = 0, num_outputs = 0;
    bool has_gains = false;  // whether a gain can differ from 1

    explicit Totals(const std::vector<Segment>& segments) {
      for (const Segment& segment : segments) {
        num_entries += segment.num_entries;
        num_outputs += segment.num_outputs;
        has_gains |= segment.weights != nullptr || segment.combiner != kSum;
      }
    }
  };

  // Writes the items of entries [entry, last_entry) of a segment to `items`, and returns the position after the last
  // item. Each entry has at most one item, even if the offsets are invalid, so no item is written outside the array.
  Item* Emit(const Segment& segment, int64_t entry, int64_t last_entry, Item* items) const {
    if (segment.offsets == nullptr) {
      for (int64_t output = entry / std::max<int64_t>(segment.width, 1); entry < last_entry; ++output) {
        const int64_t stop = std::min(last_entry, (output + 1) * segment.width);
        for (; entry < stop; ++entry) items = EmitOne(segment, entry, output, items);
      }
      return items;
    }
    const int32_t* const ends = segment.offsets + segment.num_outputs + 1;
    const int64_t base = segment.first_id;
    int64_t output = std::upper_bound(segment.offsets, ends, entry + base) - segment.offsets - 1;
    while (entry < last_entry) {
      while (output < segment.num_outputs && segment.offsets[output + 1] <= entry + base) ++output;
      if (output >= segment.num_outputs) break;
      const int64_t stop = std::min<int64_t>(last_entry, segment.offsets[output + 1] - base);
      if (output < 0) entry = stop;  // skip entries before the first bag
      for (; entry < stop; ++entry) items = EmitOne(segment, entry, output, items);
    }
    return items;
  }

  Item* EmitOne(const Segment& segment, int64_t entry, int64_t output, Item* items) const {
    // As an unsigned number, a negative row is out of range.
    uint32_t row = static_cast<uint32_t>(segment.rows[entry]);
    if (row >= static_cast<uint32_t>(segment.num_rows)) return items;
    row += static_cast<uint32_t>(segment.first_row);
    const int64_t call_output = segment.first_output + output;
    if (!totals_.has_gains) {
      *items = {row, static_cast<uint32_t>(call_output)};
    } else {
      const float weight = segment.weights == nullptr ? 1.0f : segment.weights[entry];
      gained_[segment.first_entry + entry] = {d_outputs_[call_output], weight * scales_[call_output]};
      *items = {row, static_cast<uint32_t>(segment.first_entry + entry)};
    }
    return items + 1;
  }

  const Totals totals_;
  const Scratch<const float*> d_outputs_;
  const Scratch<float> scales_;
  const Scratch<GainedSource> gained_;
  const int64_t dim_;
  std::unique_ptr<RowSort> sort_;
};

}  // namespace rsembed
