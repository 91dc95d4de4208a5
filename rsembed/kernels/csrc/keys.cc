// Telling entries apart, and remembering where their rows are: XLA FFI handlers for keys.
//
// Whole numbers only: every result follows from the arguments, whatever threads share the work and whatever their
// instruction set is. rsembed/kernels/native.py is the only caller; it checks values, the handlers check what memory
// safety needs. rsembed/kernels/keyed.py says what a table of keys means.

#include <algorithm>
#include <atomic>
#include <cstdint>
#include <limits>
#include <memory>
#include <string>
#include <vector>

#include "arguments.h"
#include "parallel.h"
#include "row_kernels.h"
#include "sorting.h"
#include "xla/ffi/api/ffi.h"

namespace rsembed {
namespace {

constexpr int64_t kEntriesPerTask = 4096;
constexpr int64_t kBitsPerTask = 1 << 14;
constexpr int64_t kAhead = 16;  // keys between asking for memory and reading it
constexpr int32_t kEmpty = -1, kDeleted = -2;  // of rsembed/kernels/keyed.py, as is Mix

using Int32s = ffi::BufferR1<ffi::S32>;
using Words = ffi::BufferR1<ffi::U32>;
using Marks = ffi::BufferR1<ffi::PRED>;
using LanePairs = ffi::BufferR2<ffi::U32>;
using Int32Result = ffi::Result<Int32s>;
using CountResult = ffi::Result<ffi::BufferR0<ffi::S32>>;

uint32_t Mix(uint32_t high, uint32_t low) {
  uint32_t h = low ^ (high * 0x9E3779B1u);
  h = (h ^ (h >> 16)) * 0x85EBCA6Bu;
  h = (h ^ (h >> 13)) * 0xC2B2AE35u;
  return h ^ (h >> 16);
}

// The first complaint about what a handler was given.
class Checks {
 public:
  void Need(bool is_met, const char* complaint) {
    if (!is_met && complaint_ == nullptr) complaint_ = complaint;
  }
  bool Failed() const { return complaint_ != nullptr; }
  ffi::Error Complaint() const { return ffi::Error::InvalidArgument(std::string("rsembed: ") + complaint_); }

 private:
  const char* complaint_ = nullptr;
};

template <typename Buffer>
int64_t Size(Buffer& buffer) {
  return static_cast<int64_t>(buffer.element_count());
}

// The keys of a call.
struct Keys {
  const uint32_t* high;
  const uint32_t* low;
  const bool* is_key;
  int64_t count;

  Keys(Checks& checks, const Words& high_lane, const Words& low_lane, const Marks& marks)
      : high(high_lane.typed_data()), low(low_lane.typed_data()), is_key(marks.typed_data()), count(Size(marks)) {
    checks.Need(Size(high_lane) == count && Size(low_lane) == count && count <= kNoRow, "wrong number of keys");
  }

  uint32_t Home(int64_t i) const { return Mix(high[i], low[i]); }
};

// The slots of a table of keys; their number is a power of two.
struct Slots {
  uint32_t* lanes;
  int32_t* rows;
  int64_t count;

  Slots(Checks& checks, const LanePairs& lane_pairs, const Int32s& row_of)
      : lanes(lane_pairs.typed_data()), rows(row_of.typed_data()), count(Size(row_of)) {
    checks.Need(lane_pairs.dimensions()[0] == count && lane_pairs.dimensions()[1] == 2 && count >= 1 &&
                    (count & (count - 1)) == 0 && count <= kNoRow,
                "a table of keys has a power of two of slots, and two lanes in each");
  }

  int64_t Place(uint32_t home, int64_t step) const { return (home + step) & (count - 1); }
  bool Holds(int64_t slot, uint32_t high, uint32_t low) const {
    return rows[slot] >= 0 && lanes[2 * slot] == high && lanes[2 * slot + 1] == low;
  }
  void Prefetch(int64_t slot) const {
    __builtin_prefetch(&rows[slot]);
    __builtin_prefetch(&lanes[2 * slot]);
  }
};

// What tells the entries of `distinct` apart: the owner, then lanes. Every field is reduced to the bits in which its
// values differ, and neighbours share a word of 32 bits, so that the sort has few digits.
class Fields {
 public:
  struct Field {
    const uint32_t* values;
    uint32_t sign;  // of a signed field: brings negative numbers before the others
    uint32_t least = std::numeric_limits<uint32_t>::max();
    uint32_t most = 0;
    int shift = 0;

    uint32_t Key(int64_t i) const { return values[i] ^ sign; }
  };

  std::vector<Field> fields;             // most significant first
  std::vector<std::vector<Field>> words;  // least significant first
  std::vector<int> bits;                  // of each word

  void Pack(Workers& workers, int64_t count, int64_t num_owners) {
    const int64_t num_tasks = (count + kEntriesPerTask - 1) / kEntriesPerTask;
    std::vector<std::vector<Field>> found(num_tasks, fields);
    workers.ForEachRange(count, kEntriesPerTask, [&](int64_t first, int64_t last) {
      for (Field& field : found[first / kEntriesPerTask]) {
        for (int64_t i = first; i < last; ++i) {
          if (OwnerOf(i) >= num_owners) continue;
          field.least = std::min(field.least, field.Key(i));
          field.most = std::max(field.most, field.Key(i));
        }
      }
    });
    for (int64_t k = static_cast<int64_t>(fields.size()) - 1; k >= 0; --k) {
      Field& field = fields[k];
      for (const std::vector<Field>& part : found) {
        field.least = std::min(field.least, part[k].least);
        field.most = std::max(field.most, part[k].most);
      }
      int width = 0;
      while (width < 32 && field.most > field.least && (field.most - field.least) >> width != 0) ++width;
      if (words.empty() || bits.back() + width > 32) {
        words.emplace_back();
        bits.push_back(0);
      }
      field.shift = bits.back();
      if (width == 0) continue;  // equal everywhere
      bits.back() += width;
      words.back().push_back(field);
    }
  }

  // The owner of an entry; a negative one is a huge one without its sign.
  uint32_t OwnerOf(int64_t i) const { return fields[0].values[i]; }

  uint32_t Word(size_t number, int64_t i) const {
    uint32_t word = 0;
    for (const Field& field : words[number]) word |= (field.Key(i) - field.least) << field.shift;
    return word;
  }
};

// Entries in the order of their owners and lanes, equal ones in theirs; see rsembed/kernels/reference.py.
ffi::Error Distinct(ffi::ThreadPool pool, Int32s owners, ffi::RemainingArgs lanes, Int32Result entry_of,
                    Int32Result first_of, Int32Result offsets, Int32Result counts, ffi::RemainingRets out_lanes) {
  const int64_t count = Size(owners), num_owners = Size(*offsets) - 1;
  Checks checks;
  checks.Need(num_owners >= 0 && count <= kNoRow && Size(*entry_of) == count && Size(*first_of) == count &&
                  Size(*counts) == count,
              "wrong size of a result");
  checks.Need(out_lanes.size() == lanes.size(), "wrong number of lanes");
  Fields fields;
  fields.fields.push_back({reinterpret_cast<const uint32_t*>(owners.typed_data()), 0});
  std::vector<uint32_t*> outputs;
  for (size_t k = 0; k < lanes.size() && !checks.Failed(); ++k) {
    const auto lane = lanes.get<ffi::AnyBuffer>(k);
    auto output = out_lanes.get<ffi::AnyBuffer>(k);
    checks.Need(lane.has_value() && output.has_value(), "missing lane");
    if (checks.Failed()) break;
    const ffi::DataType type = lane->element_type();
    checks.Need((type == ffi::S32 || type == ffi::U32) && (*output)->element_type() == type, "wrong type of a lane");
    checks.Need(Size(*lane) == count && Size(**output) == count, "wrong size of a lane");
    fields.fields.push_back({static_cast<const uint32_t*>(lane->untyped_data()), type == ffi::S32 ? 1u << 31 : 0});
    outputs.push_back(static_cast<uint32_t*>((*output)->untyped_data()));
  }
  if (checks.Failed()) return checks.Complaint();
  return WithMemory([&] {
    Workers workers(pool);
    fields.Pack(workers, count, num_owners);
    std::unique_ptr<RowSort> sort;
    for (size_t word = 0; word < fields.words.size(); ++word) {
      const std::unique_ptr<RowSort> before = std::move(sort);
      const auto emit = [&](int64_t first, int64_t last, Item* items) {
        Item* const begin = items;
        for (int64_t i = first; i < last; ++i) {
          const uint32_t source = before == nullptr ? static_cast<uint32_t>(i) : before->items()[i].source;
          if (before == nullptr && fields.OwnerOf(i) >= num_owners) {
            entry_of->typed_data()[i] = kNoRow;
          } else {
            *items++ = {fields.Word(word, source), source};
          }
        }
        return items - begin;
      };
      const int64_t num_left = before == nullptr ? count : before->num_items();
      sort = std::make_unique<RowSort>(workers, num_left, int64_t{1} << fields.bits[word], emit);
    }
    const Item* const items = sort->items();
    const int64_t num_items = sort->num_items();
    const auto is_first = [&](int64_t i) {
      if (i == 0 || items[i].row != items[i - 1].row) return true;
      for (size_t word = 0; word + 1 < fields.words.size(); ++word) {
        if (fields.Word(word, items[i].source) != fields.Word(word, items[i - 1].source)) return true;
      }
      return false;
    };
    const int64_t num_tasks = (num_items + kEntriesPerTask - 1) / kEntriesPerTask;
    std::vector<int64_t> first_entry(num_tasks + 1, 0);
    workers.ForEachRange(num_items, kEntriesPerTask, [&](int64_t first, int64_t last) {
      int64_t num_entries = 0;
      for (int64_t i = first; i < last; ++i) num_entries += is_first(i);
      first_entry[first / kEntriesPerTask + 1] = num_entries;
    });
    for (int64_t task = 0; task < num_tasks; ++task) first_entry[task + 1] += first_entry[task];
    const int64_t num_entries = first_entry[num_tasks];
    std::vector<int32_t> num_carried(num_tasks, 0);  // occurrences at a task's start, of the entry of the task before
    workers.ForEachRange(num_items, kEntriesPerTask, [&](int64_t first, int64_t last) {
      int64_t entry = first_entry[first / kEntriesPerTask] - 1;
      int32_t* num_occurrences = &num_carried[first / kEntriesPerTask];
      for (int64_t i = first; i < last; ++i) {
        const uint32_t source = items[i].source;
        if (is_first(i)) {
          ++entry;
          num_occurrences = &counts->typed_data()[entry];
          *num_occurrences = 0;
          first_of->typed_data()[entry] = static_cast<int32_t>(source);
          for (size_t k = 0; k < outputs.size(); ++k) outputs[k][entry] = fields.fields[k + 1].values[source];
          // Owners without entries begin where the next one's do.
          const int64_t owner = fields.OwnerOf(source);
          int64_t d = i == 0 ? 0 : int64_t{fields.OwnerOf(items[i - 1].source)} + 1;
          for (; d <= owner; ++d) offsets->typed_data()[d] = static_cast<int32_t>(entry);
        }
        entry_of->typed_data()[source] = static_cast<int32_t>(entry);
        ++*num_occurrences;
      }
    });
    for (int64_t task = 1; task < num_tasks; ++task) {
      if (num_carried[task] > 0) counts->typed_data()[first_entry[task] - 1] += num_carried[task];
    }
    int64_t d = num_items == 0 ? 0 : int64_t{fields.OwnerOf(items[num_items - 1].source)} + 1;
    for (; d <= num_owners; ++d) offsets->typed_data()[d] = static_cast<int32_t>(num_entries);
    workers.ForEachRange(count - num_entries, 8 * kEntriesPerTask, [&](int64_t first, int64_t last) {
      std::fill(first_of->typed_data() + num_entries + first, first_of->typed_data() + num_entries + last, kNoRow);
      std::fill(counts->typed_data() + num_entries + first, counts->typed_data() + num_entries + last, 0);
      for (uint32_t* output : outputs) std::fill(output + num_entries + first, output + num_entries + last, 0);
    });
  });
}

// Distinct keys in the order of their first occurrence; see rsembed/kernels/keyed.py. Keys are dealt out by their hash,
// in order, and every part meets its own in a table that is as large as they need.
ffi::Error UniqueKeys(ffi::ThreadPool pool, Words high, Words low, Marks is_key, Int32s occurrences,
                      Int32Result out_entry_of, Int32Result out_first_of, Int32Result out_counts) {
  constexpr int kPartBits = 6;
  Checks checks;
  const Keys keys(checks, high, low, is_key);
  checks.Need(Size(occurrences) == keys.count, "wrong size of a lane");
  checks.Need(Size(*out_entry_of) == keys.count && Size(*out_first_of) == keys.count && Size(*out_counts) == keys.count,
              "wrong size of a result");
  if (checks.Failed()) return checks.Complaint();
  int32_t* const entry_of = out_entry_of->typed_data();  // at first the position of the key's first occurrence
  int32_t* const first_of = out_first_of->typed_data();
  int32_t* const counts = out_counts->typed_data();
  return WithMemory([&] {
    Workers workers(pool);
    const int part_bits = keys.count < kEntriesPerTask ? 0 : kPartBits;
    const RowSort sort(workers, keys.count, int64_t{1} << part_bits, [&](int64_t first, int64_t last, Item* items) {
      Item* const begin = items;
      for (int64_t i = first; i < last; ++i) {
        entry_of[i] = kNoRow;
        if (keys.is_key[i]) *items++ = {keys.Home(i) >> (31 - part_bits) >> 1, static_cast<uint32_t>(i)};
      }
      return items - begin;
    });
    const Scratch<int32_t> tables(4 * sort.num_items()), totals(keys.count), entries(keys.count);
    const Item* const end = sort.items() + sort.num_items();
    workers.ForEachBlock(int64_t{1} << part_bits, [&](int64_t part) {
      const auto is_before = [](const Item& item, int64_t row) { return item.row < row; };
      const Item* const first = std::lower_bound(sort.items(), end, part, is_before);
      const Item* const last = std::lower_bound(first, end, part + 1, is_before);
      if (first == last) return;
      int64_t size = 1;
      while (size < 2 * (last - first)) size *= 2;
      int32_t* const slots = tables.get() + 4 * (first - sort.items());
      std::fill(slots, slots + size, kEmpty);
      for (const Item* item = first; item < last; ++item) {
        const int64_t i = item->source;
        int64_t slot = keys.Home(i) & (size - 1);
        while (slots[slot] != kEmpty && (keys.low[slots[slot]] != keys.low[i] || keys.high[slots[slot]] != keys.high[i])) {
          slot = (slot + 1) & (size - 1);
        }
        if (slots[slot] == kEmpty) {
          slots[slot] = static_cast<int32_t>(i);
          totals.get()[i] = 0;
        }
        entry_of[i] = slots[slot];
        int32_t& total = totals.get()[slots[slot]];
        total = static_cast<int32_t>(std::min<int64_t>(int64_t{total} + occurrences.typed_data()[i], kNoRow));
      }
    });
    const int64_t num_tasks = (keys.count + kEntriesPerTask - 1) / kEntriesPerTask;
    std::vector<int64_t> first_entry(num_tasks + 1, 0);
    workers.ForEachRange(keys.count, kEntriesPerTask, [&](int64_t first, int64_t last) {
      int64_t num_entries = 0;
      for (int64_t i = first; i < last; ++i) num_entries += entry_of[i] == i;
      first_entry[first / kEntriesPerTask + 1] = num_entries;
    });
    for (int64_t task = 0; task < num_tasks; ++task) first_entry[task + 1] += first_entry[task];
    workers.ForEachRange(keys.count, kEntriesPerTask, [&](int64_t first, int64_t last) {
      int64_t entry = first_entry[first / kEntriesPerTask];
      for (int64_t i = first; i < last; ++i) {
        if (entry_of[i] != i) continue;
        entries.get()[i] = static_cast<int32_t>(entry);
        first_of[entry] = static_cast<int32_t>(i);
        counts[entry++] = totals.get()[i];
      }
    });
    const int64_t num_entries = first_entry[num_tasks];
    workers.ForEachRange(keys.count, kEntriesPerTask, [&](int64_t first, int64_t last) {
      for (int64_t i = first; i < last; ++i) {
        if (entry_of[i] != kNoRow) entry_of[i] = entries.get()[entry_of[i]];
        if (i < num_entries) continue;
        first_of[i] = kNoRow;
        counts[i] = 0;
      }
    });
  });
}

// The slot and the row of every key, kNoRow for absent keys and padding; and how many are absent.
ffi::Error FindKeys(ffi::ThreadPool pool, LanePairs lanes, Int32s rows, Words high, Words low,
                    Marks is_key, Int32Result out_slots, Int32Result out_rows, CountResult num_absent) {
  Checks checks;
  const Keys keys(checks, high, low, is_key);
  const Slots slots(checks, lanes, rows);
  checks.Need(Size(*out_slots) == keys.count && Size(*out_rows) == keys.count, "wrong size of a result");
  if (checks.Failed()) return checks.Complaint();
  std::atomic<int32_t> num_absent_by_now = 0;
  Workers(pool).ForEachRange(keys.count, kEntriesPerTask / 4, [&](int64_t first, int64_t last) {
    int32_t num_absent_here = 0;
    for (int64_t i = first; i < last + kAhead; ++i) {
      if (i < last) slots.Prefetch(slots.Place(keys.Home(i), 0));
      const int64_t now = i - kAhead;
      if (now < first) continue;
      int32_t found = kNoRow;
      for (int64_t step = 0; keys.is_key[now] && step < slots.count; ++step) {
        const int64_t slot = slots.Place(keys.Home(now), step);
        if (slots.Holds(slot, keys.high[now], keys.low[now])) found = static_cast<int32_t>(slot);
        if (found != kNoRow || slots.rows[slot] == kEmpty) break;
      }
      out_slots->typed_data()[now] = found;
      out_rows->typed_data()[now] = found == kNoRow ? kNoRow : slots.rows[found];
      num_absent_here += keys.is_key[now] && found == kNoRow;
    }
    num_absent_by_now += num_absent_here;
  });
  num_absent->typed_data()[0] = num_absent_by_now;
  return ffi::Error::Success();
}

// Distinct, absent keys into the table where it lies. In a round every key that still searches looks at one slot, in
// the order of the call, so that the first of those that meet at a free slot gets it.
ffi::Error InsertKeys(LanePairs lanes, Int32s rows, Int32s num_keys, Int32s num_deleted, Words high,
                      Words low, Marks is_key, Int32s new_rows, ffi::Result<LanePairs> out_lanes,
                      Int32Result out_rows, Int32Result out_num_keys, Int32Result out_num_deleted) {
  Checks checks;
  const Keys keys(checks, high, low, is_key);
  const Slots slots(checks, lanes, rows);
  checks.Need(Size(new_rows) == keys.count, "wrong number of rows");
  checks.Need(Size(num_keys) == 1 && Size(num_deleted) == 1, "wrong size of a count");
  checks.Need(out_lanes->typed_data() == slots.lanes && out_rows->typed_data() == slots.rows &&
                  out_num_keys->typed_data() == num_keys.typed_data() &&
                  out_num_deleted->typed_data() == num_deleted.typed_data(),
              "results must alias the table");
  if (checks.Failed()) return checks.Complaint();
  return WithMemory([&] {
    int32_t& held = num_keys.typed_data()[0];
    int32_t& deleted = num_deleted.typed_data()[0];
    int64_t room = slots.count * 3 / 4 - held - deleted;
    std::vector<uint32_t> seekers;
    for (int64_t i = 0; i < keys.count && room > 0; ++i) {
      if (!keys.is_key[i]) continue;
      seekers.push_back(static_cast<uint32_t>(i));
      --room;
    }
    held = static_cast<int32_t>(int64_t{held} + static_cast<int64_t>(seekers.size()));
    for (int64_t step = 0; !seekers.empty() && step < slots.count; ++step) {
      size_t num_left = 0;
      for (size_t k = 0; k < seekers.size(); ++k) {
        if (k + kAhead < seekers.size()) slots.Prefetch(slots.Place(keys.Home(seekers[k + kAhead]), step));
        const uint32_t i = seekers[k];
        const int64_t slot = slots.Place(keys.Home(i), step);
        const int32_t state = slots.rows[slot];
        if (state != kEmpty && state != kDeleted) {
          seekers[num_left++] = i;
          continue;
        }
        deleted = static_cast<int32_t>(int64_t{deleted} - (state == kDeleted));
        slots.rows[slot] = new_rows.typed_data()[i];
        slots.lanes[2 * slot] = keys.high[i];
        slots.lanes[2 * slot + 1] = keys.low[i];
      }
      seekers.resize(num_left);
    }
  });
}

// Notes where they lie that a step used rows, which may repeat, and how often.
ffi::Error CountUses(ffi::ThreadPool pool, Int32s last_step, Int32s counts, Int32s rows, ffi::BufferR0<ffi::S32> step,
                     Int32s occurrences, Int32Result out_last_step, Int32Result out_counts) {
  constexpr int64_t kMostShares = 4, kRowsPerLine = 16;  // every share of the rows reads all entries
  const int64_t num_rows = Size(counts), num_entries = Size(rows);
  Checks checks;
  checks.Need(Size(last_step) == num_rows && Size(occurrences) == num_entries, "wrong size of a lane");
  checks.Need(out_last_step->typed_data() == last_step.typed_data() && out_counts->typed_data() == counts.typed_data(),
              "results must alias the lanes");
  if (checks.Failed()) return checks.Complaint();
  const int32_t now = step.typed_data()[0];
  Workers workers(pool);
  int64_t num_shares = 1;  // a power of two, since a division for every entry would take longer than the rest
  while (num_entries >= kEntriesPerTask && 2 * num_shares <= std::min(workers.num_threads(), kMostShares)) num_shares *= 2;
  const int64_t ahead = kAhead * num_shares;
  workers.ForEachBlock(num_shares, [&](int64_t share) {
    const auto is_own = [&](int64_t row) {
      return row >= 0 && row < num_rows && (row / kRowsPerLine & (num_shares - 1)) == share;
    };
    for (int64_t i = -ahead; i < num_entries; ++i) {
      if (i + ahead < num_entries && is_own(rows.typed_data()[i + ahead])) {
        __builtin_prefetch(&counts.typed_data()[rows.typed_data()[i + ahead]], 1);
        __builtin_prefetch(&last_step.typed_data()[rows.typed_data()[i + ahead]], 1);
      }
      if (i < 0 || !is_own(rows.typed_data()[i])) continue;
      int32_t& count = counts.typed_data()[rows.typed_data()[i]];
      count = static_cast<int32_t>(std::min<int64_t>(int64_t{count} + occurrences.typed_data()[i], kNoRow));
      last_step.typed_data()[rows.typed_data()[i]] = now;
    }
  });
  return ffi::Error::Success();
}

// Random bits of rows, each from a key of its own.
ffi::Error RowBits(ffi::ThreadPool pool, ffi::BufferR1<ffi::U32> key, ffi::RemainingArgs args,
                   ffi::Result<ffi::BufferR2<ffi::U32>> bits) {
  const int64_t num_rows = bits->dimensions()[0], dim = bits->dimensions()[1];
  Reader reader(args);
  std::vector<const uint32_t*> lanes;
  for (size_t k = 0; k < args.size(); ++k) {
    lanes.push_back(static_cast<uint32_t*>(reader.Next("lane", ffi::U32, num_rows)));
  }
  if (key.element_count() != 2) reader.Fail("wrong size of key");
  if (dim > int64_t{UINT32_MAX}) reader.Fail("too many columns");
  if (reader.Failed()) return reader.Complaint();
  if (dim == 0) return ffi::Error::Success();  // of rows that take no memory there may be any number
  const int64_t rows_per_task = std::max<int64_t>(kBitsPerTask / dim, 1);
  const auto row_bits = BestRowKernels().row_bits;
  Workers(pool).ForEachRange(num_rows, rows_per_task, [&](int64_t first, int64_t last) {
    row_bits(key.typed_data(), lanes.data(), lanes.size(), dim, first, last, bits->typed_data());
  });
  return ffi::Error::Success();
}

auto Bind() { return ffi::Ffi::Bind().Ctx<ffi::ThreadPool>(); }

}  // namespace

#pragma GCC visibility push(default)

XLA_FFI_DEFINE_HANDLER_SYMBOL(
    rsembed_distinct, Distinct,
    Bind().Arg<Int32s>().RemainingArgs().Ret<Int32s>().Ret<Int32s>().Ret<Int32s>().Ret<Int32s>().RemainingRets());

XLA_FFI_DEFINE_HANDLER_SYMBOL(
    rsembed_unique_keys, UniqueKeys,
    Bind().Arg<Words>().Arg<Words>().Arg<Marks>().Arg<Int32s>().Ret<Int32s>().Ret<Int32s>().Ret<Int32s>());

XLA_FFI_DEFINE_HANDLER_SYMBOL(rsembed_find_keys, FindKeys,
                              Bind()
                                  .Arg<LanePairs>()
                                  .Arg<Int32s>()
                                  .Arg<Words>()
                                  .Arg<Words>()
                                  .Arg<Marks>()
                                  .Ret<Int32s>()
                                  .Ret<Int32s>()
                                  .Ret<ffi::BufferR0<ffi::S32>>());

XLA_FFI_DEFINE_HANDLER_SYMBOL(rsembed_insert_keys, InsertKeys,
                              ffi::Ffi::Bind()
                                  .Arg<LanePairs>()
                                  .Arg<Int32s>()
                                  .Arg<Int32s>()
                                  .Arg<Int32s>()
                                  .Arg<Words>()
                                  .Arg<Words>()
                                  .Arg<Marks>()
                                  .Arg<Int32s>()
                                  .Ret<LanePairs>()
                                  .Ret<Int32s>()
                                  .Ret<Int32s>()
                                  .Ret<Int32s>());

XLA_FFI_DEFINE_HANDLER_SYMBOL(rsembed_count_uses, CountUses,
                              Bind()
                                  .Arg<Int32s>()
                                  .Arg<Int32s>()
                                  .Arg<Int32s>()
                                  .Arg<ffi::BufferR0<ffi::S32>>()
                                  .Arg<Int32s>()
                                  .Ret<Int32s>()
                                  .Ret<Int32s>());

XLA_FFI_DEFINE_HANDLER_SYMBOL(rsembed_row_bits, RowBits,
                              Bind().Arg<ffi::BufferR1<ffi::U32>>().RemainingArgs().Ret<ffi::BufferR2<ffi::U32>>());

#pragma GCC visibility pop

}  // namespace rsembed
