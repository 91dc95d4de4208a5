// XLA FFI handlers that find the distinct entries of a batch, by owner and lanes, or by key.
//
// All work is on integers, so a result depends neither on the number of threads nor on the instruction set.
// Only rsembed/kernels/native.py calls the handlers of this file, and native.py checks the arguments. The handlers
// check only what memory safety needs.

#include <algorithm>
#include <cstdint>
#include <limits>
#include <memory>
#include <vector>

#include "arguments.h"
#include "keys.h"
#include "parallel.h"
#include "row_kernels.h"
#include "sorting.h"
#include "xla/ffi/api/ffi.h"

namespace rsembed {
namespace {

constexpr int64_t kEntriesPerTask = 4096;

// Sort keys for the entries of `Distinct`. The fields of a key are the owner of an entry and its lanes (32-bit words).
// A key has as few bits as possible, so that the sort has few digits: a field keeps only the bits in which its values
// differ, and several fields can share a word of 32 bits.
class Fields {
 public:
  struct Field {
    const uint32_t* values;
    uint32_t sign;  // bit to flip in every value so that negative numbers sort first: 2^31 for int32 fields, else 0
    uint32_t least = std::numeric_limits<uint32_t>::max();
    uint32_t most = 0;
    int shift = 0;

    uint32_t Key(int64_t i) const { return values[i] ^ sign; }
  };

  std::vector<Field> fields;             // most significant first
  std::vector<std::vector<Field>> words;  // least significant first
  std::vector<int> bits;                  // number of bits of each word

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
      if (width == 0) continue;  // all values of this field are equal
      bits.back() += width;
      words.back().push_back(field);
    }
  }

  // Index of the device that owns entry `i`. Padding has a negative owner, which as an unsigned number is out of range.
  uint32_t OwnerOf(int64_t i) const { return fields[0].values[i]; }

  uint32_t Word(size_t number, int64_t i) const {
    uint32_t word = 0;
    for (const Field& field : words[number]) word |= (field.Key(i) - field.least) << field.shift;
    return word;
  }
};

// Computes `distinct` of rsembed/kernels/keyed.py: sorts entries by owner and lanes, stably.
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
    // The items are sorted by entry, so the first items of a task may belong to the last entry of an earlier task.
    // `num_carried` has, for each task, the number of items that belong to an earlier task's last entry.
    std::vector<int32_t> num_carried(num_tasks, 0);
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
          // The offset of an owner without entries is the offset of the next owner.
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

// Computes `unique_keys` of rsembed/kernels/keyed.py: distinct keys in the order of their first occurrence. Keys are
// split by their hashes into parts, and stay in order within a part. Each part has a small hash table of its keys.
ffi::Error UniqueKeys(ffi::ThreadPool pool, Words high, Words low, Marks is_key, Int32s tables,
                      Int32s occurrences, Int32Result out_entry_of, Int32Result out_first_of, Int32Result out_counts) {
  constexpr int kPartBits = 6;
  Checks checks;
  const Keys keys(checks, high, low, is_key, tables);
  checks.Need(Size(occurrences) == keys.count, "wrong size of a lane");
  checks.Need(Size(*out_entry_of) == keys.count && Size(*out_first_of) == keys.count && Size(*out_counts) == keys.count,
              "wrong size of a result");
  if (checks.Failed()) return checks.Complaint();
  int32_t* const entry_of = out_entry_of->typed_data();  // until the last pass: position of the first occurrence
  int32_t* const first_of = out_first_of->typed_data();
  int32_t* const counts = out_counts->typed_data();
  return WithMemory([&] {
    Workers workers(pool);
    const int part_bits = keys.count < kEntriesPerTask ? 0 : kPartBits;
    const RowSort sort(workers, keys.count, int64_t{1} << part_bits, [&](int64_t first, int64_t last, Item* items) {
      Item* const begin = items;
      for (int64_t i = first; i < last; ++i) {
        entry_of[i] = kNoRow;
        if (keys.is_key[i]) *items++ = {keys.HomeOfAll(i) >> (31 - part_bits) >> 1, static_cast<uint32_t>(i)};
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
        int64_t slot = keys.HomeOfAll(i) & (size - 1);
        while (slots[slot] != kEmpty && !keys.AreEqual(i, slots[slot])) {
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

auto Bind() { return ffi::Ffi::Bind().Ctx<ffi::ThreadPool>(); }

}  // namespace

#pragma GCC visibility push(default)

XLA_FFI_DEFINE_HANDLER_SYMBOL(
    rsembed_distinct, Distinct,
    Bind().Arg<Int32s>().RemainingArgs().Ret<Int32s>().Ret<Int32s>().Ret<Int32s>().Ret<Int32s>().RemainingRets());

XLA_FFI_DEFINE_HANDLER_SYMBOL(
    rsembed_unique_keys, UniqueKeys,
    Bind().Arg<Words>().Arg<Words>().Arg<Marks>().Arg<Int32s>().Arg<Int32s>().Ret<Int32s>().Ret<Int32s>().Ret<Int32s>());

#pragma GCC visibility pop

}  // namespace rsembed
