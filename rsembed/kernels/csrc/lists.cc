// XLA FFI handlers that turn ids into row numbers, count ids, list marked entries, take free rows, and fill the blocks
// that devices exchange.
//
// One call of a handler handles all features and lists. From plain JAX, XLA compiles an operation for every feature,
// and several operations for every list. Each handler returns the same results as the function with its name in
// rsembed/kernels/ids.py or keyed.py.

#include <algorithm>
#include <cstdint>
#include <cstring>
#include <initializer_list>
#include <utility>
#include <vector>

#include "arguments.h"
#include "parallel.h"
#include "sorting.h"
#include "xla/ffi/api/ffi.h"

namespace rsembed {
namespace {

constexpr int64_t kIdsPerTask = 1 << 14;
constexpr int64_t kBytesPerTask = 1 << 16;
constexpr int32_t kPadId = -1;  // PAD_ID of rsembed/bags.py

// Whether all `numbers` are between 0 and kNoRow. If one size of an array is 0, its other sizes can have any value, and
// their product could overflow if `AreSizes` did not limit them.
bool AreSizes(std::initializer_list<int64_t> numbers) {
  return std::all_of(numbers.begin(), numbers.end(), [](int64_t size) { return size >= 0 && size <= kNoRow; });
}

// Position of a table in the shards of its stack, see rsembed/places.py, and the vocabulary size of the table. The
// numbers are unsigned, because signed overflow is undefined.
struct Place {
  uint64_t owner, first, rotation, num_ids;
};

// Consecutive ids of one list that select rows of one table. `first_entry` is the number of ids in all parts before
// this part, and `begin` the number of ids before this part in the same list.
struct Part {
  const int32_t* ids;
  int64_t first_entry, num_entries;
  Place place;
  int32_t* rows;
  int64_t begin;
};

// Computes the rows of the ids `begin` to `end - 1` of a part, and writes them to `part.rows`. Ids are compared as
// unsigned numbers, so a negative id is outside every table.
void WriteRows(const Part& part, uint64_t spread, uint64_t rows_per_shard, int64_t begin, int64_t end) {
  const Place& place = part.place;
  const uint32_t num_ids = static_cast<uint32_t>(place.num_ids);
  const uint64_t phase = place.first + place.rotation;
  const uint32_t first_row = static_cast<uint32_t>(place.owner * rows_per_shard + place.first);
  for (int64_t i = begin; i < end; ++i) {
    const uint32_t id = static_cast<uint32_t>(part.ids[i]);
    uint32_t row = id + first_row;
    if (spread > 1) {
      const uint64_t shard = place.owner + (id + phase) % spread;
      row = static_cast<uint32_t>(shard * rows_per_shard + (place.first + id) / spread);
    }
    part.rows[i] = id < num_ids ? static_cast<int32_t>(row) : kNoRow;
  }
}

// Splits a list into parts: one part for the ids of each segment, and one part for each range of ids that no segment
// reads. Ids that no segment reads get kNoRow.
void AddParts(const List& list, std::vector<Part> segments, int32_t* rows, std::vector<Part>* parts) {
  std::sort(segments.begin(), segments.end(), [](const Part& a, const Part& b) { return a.begin < b.begin; });
  int64_t done = 0;
  const auto add = [&](int64_t begin, int64_t end, Place place) {
    if (end <= begin) return;
    const int64_t first_entry = parts->empty() ? 0 : parts->back().first_entry + parts->back().num_entries;
    parts->push_back({list.ids + begin, first_entry, end - begin, place, rows + begin, begin});
  };
  for (const Part& segment : segments) {
    const int64_t end = segment.begin + segment.num_entries;
    add(done, segment.begin, Place{});
    add(std::max(done, segment.begin), end, segment.place);
    done = std::max(done, end);
  }
  add(done, list.num_ids, Place{});
}

// Computes the row of every id. `places` has seven numbers per segment: list, first bag, number of bags, the three
// fields of a Place of rsembed/places.py, and the vocabulary size of the table.
ffi::Error RowsOfIds(ffi::ThreadPool pool, ffi::RemainingArgs args, ffi::RemainingRets rets,
                     ffi::Span<const int64_t> forms, ffi::Span<const int64_t> places, int64_t spread,
                     int64_t rows_per_shard) {
  constexpr size_t kNumbers = 7;
  Reader reader(args);
  const std::vector<List> lists = reader.Lists(forms);
  if (places.size() % kNumbers != 0 || rets.size() != lists.size() || spread < 1) reader.Fail("unreadable places");
  std::vector<std::vector<Part>> segments(lists.size());
  for (size_t at = 0; at + kNumbers <= places.size() && !reader.Failed(); at += kNumbers) {
    const int64_t* const own = places.begin() + at;
    if (own[0] < 0 || own[0] >= static_cast<int64_t>(lists.size())) {
      reader.Fail("a segment lies outside the call");
      break;
    }
    const List& list = lists[own[0]];
    if (!LiesIn(own[1], own[2], list.num_bags)) {
      reader.Fail("segments lie outside the bags");
      break;
    }
    Part part = {};
    part.begin = FirstEntry(list, own[1]);
    part.num_entries = std::max<int64_t>(FirstEntry(list, own[1] + own[2]) - part.begin, 0);
    const auto number = [&](size_t k) { return static_cast<uint64_t>(own[k]); };
    part.place = {number(3), number(4), number(5), number(6)};
    segments[own[0]].push_back(part);
  }
  std::vector<Part> parts;
  for (size_t k = 0; k < lists.size() && !reader.Failed(); ++k) {
    auto rows = rets.get<ffi::BufferR1<ffi::S32>>(k);
    if (!rows.has_value() || static_cast<int64_t>((*rows)->element_count()) != lists[k].num_ids) {
      reader.Fail("wrong size of rows");
      break;
    }
    AddParts(lists[k], std::move(segments[k]), (*rows)->typed_data(), &parts);
  }
  if (reader.Failed()) return reader.Complaint();
  const int64_t num_entries = parts.empty() ? 0 : parts.back().first_entry + parts.back().num_entries;
  Workers(pool).ForEachRange(num_entries, kIdsPerTask, [&](int64_t first, int64_t last) {
    ForEachPart<&Part::first_entry, &Part::num_entries>(
        parts, first, last, [&](const Part& part, int64_t begin, int64_t end) {
          WriteRows(part, spread, rows_per_shard, begin, end);
        });
  });
  return ffi::Error::Success();
}

// Counts the ids inside and outside the table of every feature. Padding, and entries outside all bags, are not counted.
ffi::Error CountIds(ffi::ThreadPool pool, ffi::RemainingArgs args, ffi::RemainingRets rets,
                    ffi::Span<const int64_t> sizes) {
  Reader reader(args);
  if (args.size() != 2 * sizes.size() || rets.size() != 2 * sizes.size()) reader.Fail("unreadable sizes");
  std::vector<Part> features;
  std::vector<int32_t*> counts;
  for (size_t k = 0; k < sizes.size() && !reader.Failed(); ++k) {
    Part feature = {};
    int64_t num_offsets;
    feature.ids = static_cast<int32_t*>(reader.Next("ids", ffi::S32, &feature.num_entries));
    const int32_t* const offsets = static_cast<int32_t*>(reader.Next("offsets", ffi::S32, &num_offsets));
    if (num_offsets < 1) reader.Fail("offsets must not be empty");
    if (reader.Failed()) break;
    const int64_t first = std::clamp<int64_t>(offsets[0], 0, feature.num_entries);
    feature.num_entries = std::clamp<int64_t>(offsets[num_offsets - 1], first, feature.num_entries) - first;
    feature.ids += first;
    feature.place.num_ids = sizes[k];
    features.push_back(feature);
    for (size_t result = 2 * k; result < 2 * k + 2; ++result) {
      auto count = rets.get<ffi::BufferR0<ffi::S32>>(result);
      if (!count.has_value()) {
        reader.Fail("wrong type of a count");
        break;
      }
      counts.push_back((*count)->typed_data());
    }
  }
  if (reader.Failed()) return reader.Complaint();
  Workers(pool).ForEachBlock(static_cast<int64_t>(features.size()), [&](int64_t k) {
    const Part& feature = features[k];
    int32_t num_inside = 0, num_padding = 0;
    for (int64_t i = 0; i < feature.num_entries; ++i) {
      num_inside += static_cast<uint32_t>(feature.ids[i]) < static_cast<uint32_t>(feature.place.num_ids);
      num_padding += feature.ids[i] == kPadId;
    }
    *counts[2 * k] = num_inside;
    *counts[2 * k + 1] = static_cast<int32_t>(feature.num_entries) - num_inside - num_padding;
  });
  return ffi::Error::Success();
}

// Computes the positions of the marks in ascending order, padded with kNoRow, and the number of all marks.
ffi::Error Compact(ffi::ThreadPool pool, ffi::BufferR1<ffi::PRED> marks, ffi::Result<ffi::BufferR1<ffi::S32>> places,
                   ffi::Result<ffi::BufferR0<ffi::S32>> num_marked) {
  const bool* const is_marked = marks.typed_data();
  const int64_t count = marks.element_count(), size = places->element_count();
  if (!AreSizes({count, size})) return ffi::Error::InvalidArgument("rsembed: too many marks");
  return WithMemory([&] {
    Workers workers(pool);
    std::vector<int64_t> first_place((count + kIdsPerTask - 1) / kIdsPerTask + 1, 0);
    workers.ForEachRange(count, kIdsPerTask, [&](int64_t first, int64_t last) {
      int64_t num = 0;
      for (int64_t i = first; i < last; ++i) num += is_marked[i];
      first_place[first / kIdsPerTask + 1] = num;
    });
    for (size_t task = 1; task < first_place.size(); ++task) first_place[task] += first_place[task - 1];
    workers.ForEachRange(count, kIdsPerTask, [&](int64_t first, int64_t last) {
      int64_t place = first_place[first / kIdsPerTask];
      for (int64_t i = first; i < last && place < size; ++i) {
        if (is_marked[i]) places->typed_data()[place++] = static_cast<int32_t>(i);
      }
    });
    const int64_t num = first_place.back();
    std::fill(places->typed_data() + std::min(num, size), places->typed_data() + size, kNoRow);
    num_marked->typed_data()[0] = static_cast<int32_t>(num);
  });
}

// Every entry that needs a row gets the last row from the list of free rows of its table. An entry gets kNoRow if its
// table has no free row left. For each table, returns the number of rows that remain free and the number of entries
// that needed a row but got none. If `tables` is empty, there is one table for all entries.
ffi::Error TakeRows(ffi::BufferR1<ffi::S32> free, ffi::BufferR1<ffi::S32> num_free, ffi::BufferR1<ffi::PRED> wants,
                    ffi::BufferR1<ffi::S32> tables, ffi::Result<ffi::BufferR1<ffi::S32>> rows,
                    ffi::Result<ffi::BufferR1<ffi::S32>> num_left, ffi::Result<ffi::BufferR1<ffi::S32>> num_without) {
  const int64_t count = wants.element_count(), num_tables = num_free.element_count();
  const int64_t num_rows = free.element_count(), num_listed = tables.element_count();
  if (!AreSizes({count, num_rows}) || num_tables < 1 || num_rows % num_tables != 0 ||
      static_cast<int64_t>(num_left->element_count()) != num_tables ||
      static_cast<int64_t>(num_without->element_count()) != num_tables || (num_listed != 0 && num_listed != count) ||
      static_cast<int64_t>(rows->element_count()) != count) {
    return ffi::Error::InvalidArgument("rsembed: wrong size of rows or of a count");
  }
  const int64_t rows_per_table = num_rows / num_tables;
  int32_t* const left = num_left->typed_data();
  int32_t* const without = num_without->typed_data();
  for (int64_t t = 0; t < num_tables; ++t) {
    left[t] = static_cast<int32_t>(std::clamp<int64_t>(num_free.typed_data()[t], 0, rows_per_table));
    without[t] = 0;
  }
  for (int64_t i = 0; i < count; ++i) {
    const int64_t t = num_listed == 0 ? 0 : tables.typed_data()[i];
    rows->typed_data()[i] = kNoRow;
    if (!wants.typed_data()[i] || t < 0 || t >= num_tables) continue;
    if (left[t] > 0) {
      const int64_t first = t * rows_per_table;
      rows->typed_data()[i] = static_cast<int32_t>(first + free.typed_data()[first + --left[t]]);
    } else {
      ++without[t];
    }
  }
  return ffi::Error::Success();
}

// Puts the blocks of several arrays side by side: for each device, the block of the first array, then of the second,
// and so on. If `gathers` is false, each buffer in `args` has the blocks of one array. If `gathers` is true, `args` has
// two buffers per array, first the row numbers to gather, then the array. A row number outside the array is padding,
// for which the block gets kNoRow if the array is int32, else zeros.
ffi::Error PackBlocks(ffi::ThreadPool pool, ffi::RemainingArgs args, ffi::Result<ffi::AnyBuffer> packed, bool gathers) {
  const auto sizes = packed->dimensions();
  if (sizes.size() < 2 || !AreSizes({sizes[0], sizes[1]})) {
    return ffi::Error::InvalidArgument("rsembed: unreadable blocks");
  }
  const int64_t num_devices = sizes[0], num_places = sizes[1], num_blocks = num_devices * num_places;
  if (num_blocks == 0) return ffi::Error::Success();
  const int64_t row_bytes = static_cast<int64_t>(packed->size_bytes()) / num_blocks;
  const size_t step = gathers ? 2 : 1;
  int64_t first_place = 0;
  Workers workers(pool);
  for (size_t k = 0; k < args.size(); k += step) {
    const auto list = args.get<ffi::AnyBuffer>(k), array = args.get<ffi::AnyBuffer>(k + step - 1);
    if (!list.has_value() || !array.has_value() || list->dimensions().size() < 2 || list->dimensions()[0] != num_devices ||
        (gathers && (list->element_type() != ffi::S32 || list->dimensions().size() != 2))) {
      return ffi::Error::InvalidArgument("rsembed: unreadable blocks");
    }
    const int64_t capacity = list->dimensions()[1], num_rows = NumRows(*array);
    const int64_t count = gathers ? num_rows : num_devices * capacity;
    if (!AreSizes({capacity, num_rows, row_bytes}) || first_place + capacity > num_places ||
        static_cast<int64_t>(array->size_bytes()) != count * row_bytes) {
      return ffi::Error::InvalidArgument("rsembed: blocks and rows differ in size");
    }
    const int32_t* const rows = gathers ? static_cast<const int32_t*>(list->untyped_data()) : nullptr;
    const char* const source = static_cast<const char*>(array->untyped_data());
    const bool are_rows = array->element_type() == ffi::S32;
    char* const first_block = static_cast<char*>(packed->untyped_data()) + first_place * row_bytes;
    first_place += capacity;
    if (row_bytes == 0) continue;  // an empty array can have a null address
    workers.ForEachRange(num_devices * capacity, std::max<int64_t>(kBytesPerTask / row_bytes, 1),
                         [&](int64_t first, int64_t last) {
      for (int64_t i = first; i < last; ++i) {
        char* const place = first_block + (i / capacity * num_places + i % capacity) * row_bytes;
        const int64_t row = rows == nullptr ? i : rows[i];
        if (rows == nullptr || (row >= 0 && row < num_rows)) std::memcpy(place, source + row * row_bytes, row_bytes);
        else if (are_rows) std::fill_n(reinterpret_cast<int32_t*>(place), row_bytes / 4, kNoRow);
        else std::memset(place, 0, row_bytes);
      }
    });
  }
  if (first_place != num_places) return ffi::Error::InvalidArgument("rsembed: blocks and rows differ in size");
  return ffi::Error::Success();
}

// Splits the result of `pack_blocks` into the blocks of each array.
ffi::Error UnpackBlocks(ffi::ThreadPool pool, ffi::AnyBuffer packed, ffi::RemainingRets rets) {
  const auto sizes = packed.dimensions();
  if (sizes.size() < 2 || !AreSizes({sizes[0], sizes[1]})) {
    return ffi::Error::InvalidArgument("rsembed: unreadable blocks");
  }
  const int64_t num_devices = sizes[0], num_places = sizes[1], num_blocks = num_devices * num_places;
  if (num_blocks == 0) return ffi::Error::Success();
  const int64_t row_bytes = static_cast<int64_t>(packed.size_bytes()) / num_blocks;
  int64_t first_place = 0;
  Workers workers(pool);
  for (size_t k = 0; k < rets.size(); ++k) {
    auto blocks = rets.get<ffi::AnyBuffer>(k);
    if (!blocks.has_value() || (*blocks)->dimensions().size() < 2 || (*blocks)->dimensions()[0] != num_devices) {
      return ffi::Error::InvalidArgument("rsembed: unreadable blocks");
    }
    const int64_t capacity = (*blocks)->dimensions()[1];
    if (!AreSizes({capacity, row_bytes}) || first_place + capacity > num_places ||
        static_cast<int64_t>((*blocks)->size_bytes()) != num_devices * capacity * row_bytes) {
      return ffi::Error::InvalidArgument("rsembed: blocks and rows differ in size");
    }
    const char* const first_block = static_cast<const char*>(packed.untyped_data()) + first_place * row_bytes;
    char* const out = static_cast<char*>((*blocks)->untyped_data());
    first_place += capacity;
    if (row_bytes * capacity == 0) continue;
    workers.ForEachBlock(num_devices, [&](int64_t device) {
      const char* const own = first_block + device * num_places * row_bytes;
      std::memcpy(out + device * capacity * row_bytes, own, capacity * row_bytes);
    });
  }
  if (first_place != num_places) return ffi::Error::InvalidArgument("rsembed: blocks and rows differ in size");
  return ffi::Error::Success();
}

// Entries that a device sends to their owners, see Queue in rsembed/kernels/ids.py.
struct Queue {
  const int32_t* offsets;
  const int32_t* cursor;
  std::vector<const uint32_t*> lanes;
  std::vector<uint32_t> signs;  // per lane, bit to flip so that negative words sort first: 2^31 for int32, else 0
  int64_t num_owners, num_entries, capacity;

  // Returns the range [first, last) of the entries that still have to be sent to `owner`.
  std::pair<int64_t, int64_t> Next(int64_t owner) const {
    const int64_t last = std::clamp<int64_t>(offsets[owner + 1], 0, num_entries);
    return {std::clamp<int64_t>(int64_t{offsets[owner]} + cursor[owner], 0, last), last};
  }
  uint32_t Word(size_t level, int64_t entry) const {
    const size_t lane = std::min(level, lanes.size() - 1);
    return lanes[lane][entry] ^ signs[lane];
  }
};

bool ReadQueues(const ffi::RemainingArgs& args, ffi::Span<const int64_t> num_lanes, ffi::Span<const int64_t> capacities,
                int64_t num_owners, std::vector<Queue>& queues) {
  size_t next = 0;
  const auto words = [&](int64_t least, int64_t most, uint32_t* sign, int64_t* count) -> const uint32_t* {
    *count = -1;
    if (next >= args.size()) return nullptr;
    const auto array = args.get<ffi::AnyBuffer>(next++);
    if (!array.has_value() || array->dimensions().size() != 1) return nullptr;
    const ffi::DataType type = array->element_type();
    *count = array->element_count();
    *sign = type == ffi::S32 ? 1u << 31 : 0;
    const bool is_read = (type == ffi::S32 || type == ffi::U32) && *count >= least && *count <= most;
    return is_read ? static_cast<const uint32_t*>(array->untyped_data()) : nullptr;
  };
  if (num_lanes.size() != capacities.size() || !AreSizes({num_owners + 1})) return false;
  for (size_t k = 0; k < num_lanes.size(); ++k) {
    Queue queue = {};
    uint32_t sign = 0;
    int64_t count = 0;
    queue.num_owners = num_owners;
    queue.capacity = capacities[k];
    queue.offsets = reinterpret_cast<const int32_t*>(words(num_owners + 1, num_owners + 1, &sign, &count));
    queue.cursor = reinterpret_cast<const int32_t*>(words(num_owners, num_owners, &sign, &count));
    if (queue.offsets == nullptr || queue.cursor == nullptr || num_lanes[k] < 1 ||
        !AreSizes({num_lanes[k], queue.capacity})) {
      return false;
    }
    for (int64_t lane = 0; lane < num_lanes[k]; ++lane) {
      const uint32_t* const values = words(0, kNoRow, &sign, &count);
      if (lane > 0 && count != queue.num_entries) return false;
      if (values == nullptr && count != 0) return false;
      queue.num_entries = count;
      queue.lanes.push_back(values);
      queue.signs.push_back(sign);
    }
    queues.push_back(std::move(queue));
  }
  return next == args.size();
}

// Computes for every queue and owner whether all remaining entries fit in this exchange round, as 1 or 0, and the lanes
// (32-bit words that identify an entry) of the first entry that does not fit.
ffi::Error BlockEnds(ffi::RemainingArgs args, ffi::Result<ffi::BufferR2<ffi::S32>> fit,
                     ffi::Result<ffi::BufferR3<ffi::U32>> behind, ffi::Span<const int64_t> num_lanes,
                     ffi::Span<const int64_t> capacities) {
  const int64_t num_queues = fit->dimensions()[0], num_owners = fit->dimensions()[1];
  const int64_t num_levels = behind->dimensions()[0];
  std::vector<Queue> queues;
  if (num_levels > static_cast<int64_t>(args.size()) || !ReadQueues(args, num_lanes, capacities, num_owners, queues) ||
      static_cast<int64_t>(queues.size()) != num_queues || behind->dimensions()[1] != num_queues ||
      behind->dimensions()[2] != num_owners) {
    return ffi::Error::InvalidArgument("rsembed: unreadable queues");
  }
  for (int64_t k = 0; k < num_queues; ++k) {
    for (int64_t owner = 0; owner < num_owners; ++owner) {
      const auto [first, last] = queues[k].Next(owner);
      const bool all_fit = last - first <= queues[k].capacity;
      fit->typed_data()[k * num_owners + owner] = all_fit;
      for (int64_t level = 0; level < num_levels; ++level) {
        behind->typed_data()[(level * num_queues + k) * num_owners + owner] =
            all_fit ? 0 : queues[k].Word(level, first + queues[k].capacity);
      }
    }
  }
  return ffi::Error::Success();
}

// Computes the entries to send in this exchange round: the next entries for every owner, up to the capacity. If `fit`
// is 0 for an owner, at least one device has too many remaining entries for this owner. For an owner with `fit` 0,
// `cuts` has the lanes of the smallest entry of all devices that does not fit in this round. Only entries with smaller
// lanes than `cuts` are sent to an owner with `fit` 0.
ffi::Error RoundPlaces(ffi::BufferR2<ffi::S32> fit, ffi::BufferR3<ffi::U32> cuts, ffi::RemainingArgs args,
                       ffi::Result<ffi::BufferR0<ffi::PRED>> are_left, ffi::RemainingRets rets,
                       ffi::Span<const int64_t> num_lanes, ffi::Span<const int64_t> capacities) {
  const int64_t num_queues = fit.dimensions()[0], num_owners = fit.dimensions()[1], num_levels = cuts.dimensions()[0];
  std::vector<Queue> queues;
  if (num_levels > static_cast<int64_t>(args.size()) || !ReadQueues(args, num_lanes, capacities, num_owners, queues) ||
      static_cast<int64_t>(queues.size()) != num_queues || cuts.dimensions()[1] != num_queues ||
      cuts.dimensions()[2] != num_owners || rets.size() != 2 * queues.size()) {
    return ffi::Error::InvalidArgument("rsembed: unreadable queues");
  }
  bool any_left = false;
  for (int64_t k = 0; k < num_queues; ++k) {
    const Queue& queue = queues[k];
    auto places = rets.get<ffi::BufferR2<ffi::S32>>(2 * k);
    auto cursor = rets.get<ffi::BufferR1<ffi::S32>>(2 * k + 1);
    if (!places.has_value() || !cursor.has_value() || (*places)->dimensions()[0] != num_owners ||
        (*places)->dimensions()[1] != queue.capacity || static_cast<int64_t>((*cursor)->element_count()) != num_owners) {
      return ffi::Error::InvalidArgument("rsembed: wrong size of places");
    }
    for (int64_t owner = 0; owner < num_owners; ++owner) {
      const auto [first, last] = queue.Next(owner);
      const auto is_before_cut = [&](int64_t entry) {
        for (int64_t level = 0; level < std::min<int64_t>(num_levels, queue.lanes.size()); ++level) {
          const uint32_t word = queue.Word(level, entry);
          const uint32_t cut = cuts.typed_data()[(level * num_queues + k) * num_owners + owner];
          if (word != cut) return word < cut;
        }
        return false;
      };
      const bool has_cut = fit.typed_data()[k * num_owners + owner] == 0;
      int64_t num = std::min(queue.capacity, last - first);
      while (has_cut && num > 0 && !is_before_cut(first + num - 1)) --num;
      int32_t* const own = (*places)->typed_data() + owner * queue.capacity;
      for (int64_t i = 0; i < queue.capacity; ++i) own[i] = i < num ? static_cast<int32_t>(first + i) : kNoRow;
      (*cursor)->typed_data()[owner] = static_cast<int32_t>(queue.cursor[owner] + num);
      any_left = any_left || first + num < last;
    }
  }
  are_left->typed_data()[0] = any_left;
  return ffi::Error::Success();
}

auto BindLists() { return ffi::Ffi::Bind().Ctx<ffi::ThreadPool>().RemainingArgs().RemainingRets(); }

}  // namespace

#pragma GCC visibility push(default)

XLA_FFI_DEFINE_HANDLER_SYMBOL(
    rsembed_rows_of_ids, RowsOfIds,
    BindLists()
        .Attr<ffi::Span<const int64_t>>("lists")
        .Attr<ffi::Span<const int64_t>>("places")
        .Attr<int64_t>("spread")
        .Attr<int64_t>("rows_per_shard"));

XLA_FFI_DEFINE_HANDLER_SYMBOL(rsembed_count_ids, CountIds, BindLists().Attr<ffi::Span<const int64_t>>("sizes"));

XLA_FFI_DEFINE_HANDLER_SYMBOL(rsembed_compact, Compact,
                              ffi::Ffi::Bind()
                                  .Ctx<ffi::ThreadPool>()
                                  .Arg<ffi::BufferR1<ffi::PRED>>()
                                  .Ret<ffi::BufferR1<ffi::S32>>()
                                  .Ret<ffi::BufferR0<ffi::S32>>());

XLA_FFI_DEFINE_HANDLER_SYMBOL(rsembed_take_rows, TakeRows,
                              ffi::Ffi::Bind()
                                  .Arg<ffi::BufferR1<ffi::S32>>()
                                  .Arg<ffi::BufferR1<ffi::S32>>()
                                  .Arg<ffi::BufferR1<ffi::PRED>>()
                                  .Arg<ffi::BufferR1<ffi::S32>>()
                                  .Ret<ffi::BufferR1<ffi::S32>>()
                                  .Ret<ffi::BufferR1<ffi::S32>>()
                                  .Ret<ffi::BufferR1<ffi::S32>>());

XLA_FFI_DEFINE_HANDLER_SYMBOL(
    rsembed_pack_blocks, PackBlocks,
    ffi::Ffi::Bind().Ctx<ffi::ThreadPool>().RemainingArgs().Ret<ffi::AnyBuffer>().Attr<bool>("gathers"));

XLA_FFI_DEFINE_HANDLER_SYMBOL(rsembed_unpack_blocks, UnpackBlocks,
                              ffi::Ffi::Bind().Ctx<ffi::ThreadPool>().Arg<ffi::AnyBuffer>().RemainingRets());

XLA_FFI_DEFINE_HANDLER_SYMBOL(rsembed_block_ends, BlockEnds,
                              ffi::Ffi::Bind()
                                  .RemainingArgs()
                                  .Ret<ffi::BufferR2<ffi::S32>>()
                                  .Ret<ffi::BufferR3<ffi::U32>>()
                                  .Attr<ffi::Span<const int64_t>>("num_lanes")
                                  .Attr<ffi::Span<const int64_t>>("capacities"));

XLA_FFI_DEFINE_HANDLER_SYMBOL(rsembed_round_places, RoundPlaces,
                              ffi::Ffi::Bind()
                                  .Arg<ffi::BufferR2<ffi::S32>>()
                                  .Arg<ffi::BufferR3<ffi::U32>>()
                                  .RemainingArgs()
                                  .Ret<ffi::BufferR0<ffi::PRED>>()
                                  .RemainingRets()
                                  .Attr<ffi::Span<const int64_t>>("num_lanes")
                                  .Attr<ffi::Span<const int64_t>>("capacities"));

#pragma GCC visibility pop

}  // namespace rsembed
