// XLA FFI handlers for hash tables from keys to rows.
//
// All work is on integers, so a result depends neither on the number of threads nor on the instruction set.
// Only rsembed/kernels/native.py calls the handlers of this file, and native.py checks the arguments. The handlers
// check only what memory safety needs. The file rsembed/kernels/keyed.py defines the hash table.

#include <algorithm>
#include <atomic>
#include <cstdint>
#include <vector>

#include "arguments.h"
#include "keys.h"
#include "parallel.h"
#include "row_kernels.h"
#include "xla/ffi/api/ffi.h"

namespace rsembed {
namespace {

constexpr int64_t kEntriesPerTask = 4096;
constexpr int64_t kBitsPerTask = 1 << 14;
constexpr int64_t kAhead = 16;  // number of keys between the prefetch of a slot and the use of the slot

// Slots of several hash tables, concatenated. Each table has the same number of slots, a power of two.
struct Slots {
  uint32_t* lanes;
  int32_t* rows;
  int64_t count = 0;  // number of slots of one table

  Slots(Checks& checks, const LanePairs& lane_pairs, const Int32s& row_of, int64_t num_tables)
      : lanes(lane_pairs.typed_data()), rows(row_of.typed_data()) {
    const int64_t of_all = Size(row_of);
    checks.Need(num_tables >= 1 && num_tables <= of_all && of_all % num_tables == 0, "tables of keys are equally large");
    if (checks.Failed()) return;
    count = of_all / num_tables;
    checks.Need(lane_pairs.dimensions()[0] == of_all && lane_pairs.dimensions()[1] == 2 && of_all <= kNoRow &&
                    (count & (count - 1)) == 0,
                "a table of keys has a power of two of slots, and two lanes in each");
  }

  int64_t Place(const Keys& keys, int64_t i, int64_t step) const {
    return keys.TableOf(i) * count + ((keys.Storage(i) + step) & (count - 1));
  }
  bool Holds(int64_t slot, uint32_t high, uint32_t low) const {
    return rows[slot] >= 0 && lanes[2 * slot] == high && lanes[2 * slot + 1] == low;
  }
  void Prefetch(int64_t slot) const {
    __builtin_prefetch(&rows[slot]);
    __builtin_prefetch(&lanes[2 * slot]);
  }
};

// Finds the slot and row of every key (kNoRow for padding and for keys that are not in their tables), and counts the
// keys that are not in their tables.
ffi::Error FindKeys(ffi::ThreadPool pool, LanePairs lanes, Int32s rows, Words high, Words low,
                    Marks is_key, Int32s tables, Int32Result out_slots, Int32Result out_rows, CountResult num_absent,
                    int64_t num_tables) {
  Checks checks;
  const Keys keys(checks, high, low, is_key, tables);
  const Slots slots(checks, lanes, rows, num_tables);
  checks.Need(Size(*out_slots) == keys.count && Size(*out_rows) == keys.count, "wrong size of a result");
  if (checks.Failed()) return checks.Complaint();
  std::atomic<int32_t> num_absent_by_now = 0;
  Workers(pool).ForEachRange(keys.count, kEntriesPerTask / 4, [&](int64_t first, int64_t last) {
    int32_t num_absent_here = 0;
    for (int64_t i = first; i < last + kAhead; ++i) {
      if (i < last && keys.IsIn(i, num_tables)) slots.Prefetch(slots.Place(keys, i, 0));
      const int64_t now = i - kAhead;
      if (now < first) continue;
      int32_t found = kNoRow;
      for (int64_t step = 0; keys.IsIn(now, num_tables) && step < slots.count; ++step) {
        const int64_t slot = slots.Place(keys, now, step);
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

// Inserts distinct keys that are not yet in their tables, in place. In each round, every key without a slot checks one
// slot, in the order of the call, so a free slot goes to the first key that reaches it.
ffi::Error InsertKeys(LanePairs lanes, Int32s rows, Int32s num_keys, Int32s num_deleted, Words high,
                      Words low, Marks is_key, Int32s tables, Int32s new_rows, ffi::Result<LanePairs> out_lanes,
                      Int32Result out_rows, Int32Result out_num_keys, Int32Result out_num_deleted) {
  Checks checks;
  const int64_t num_tables = Size(num_keys);
  const Keys keys(checks, high, low, is_key, tables);
  const Slots slots(checks, lanes, rows, num_tables);
  checks.Need(Size(new_rows) == keys.count, "wrong number of rows");
  checks.Need(Size(num_deleted) == num_tables, "wrong size of a count");
  checks.Need(out_lanes->typed_data() == slots.lanes && out_rows->typed_data() == slots.rows &&
                  out_num_keys->typed_data() == num_keys.typed_data() &&
                  out_num_deleted->typed_data() == num_deleted.typed_data(),
              "results must alias the table");
  if (checks.Failed()) return checks.Complaint();
  return WithMemory([&] {
    int32_t* const held = num_keys.typed_data();
    int32_t* const deleted = num_deleted.typed_data();
    std::vector<int64_t> room(num_tables);
    for (int64_t t = 0; t < num_tables; ++t) room[t] = slots.count * 3 / 4 - held[t] - deleted[t];
    std::vector<uint32_t> seekers;
    for (int64_t i = 0; i < keys.count; ++i) {
      if (!keys.IsIn(i, num_tables) || room[keys.TableOf(i)] <= 0) continue;
      seekers.push_back(static_cast<uint32_t>(i));
      --room[keys.TableOf(i)];
      held[keys.TableOf(i)] = static_cast<int32_t>(int64_t{held[keys.TableOf(i)]} + 1);
    }
    for (int64_t step = 0; !seekers.empty() && step < slots.count; ++step) {
      size_t num_left = 0;
      for (size_t k = 0; k < seekers.size(); ++k) {
        if (k + kAhead < seekers.size()) slots.Prefetch(slots.Place(keys, seekers[k + kAhead], step));
        const uint32_t i = seekers[k];
        const int64_t slot = slots.Place(keys, i, step);
        const int32_t state = slots.rows[slot];
        if (state != kEmpty && state != kDeleted) {
          seekers[num_left++] = i;
          continue;
        }
        int32_t& own_deleted = deleted[keys.TableOf(i)];
        own_deleted = static_cast<int32_t>(int64_t{own_deleted} - (state == kDeleted));
        slots.rows[slot] = new_rows.typed_data()[i];
        slots.lanes[2 * slot] = keys.high[i];
        slots.lanes[2 * slot + 1] = keys.low[i];
      }
      seekers.resize(num_left);
    }
  });
}

// Updates the last-used steps and the use counts of `rows` in place. Rows may repeat.
ffi::Error CountUses(ffi::ThreadPool pool, Int32s last_step, Int32s counts, Int32s rows, ffi::BufferR0<ffi::S32> step,
                     Int32s occurrences, Int32Result out_last_step, Int32Result out_counts) {
  constexpr int64_t kMostShares = 4, kRowsPerLine = 16;  // a task updates one share of the rows, but reads all entries
  const int64_t num_rows = Size(counts), num_entries = Size(rows);
  Checks checks;
  checks.Need(Size(last_step) == num_rows && Size(occurrences) == num_entries, "wrong size of a lane");
  checks.Need(out_last_step->typed_data() == last_step.typed_data() && out_counts->typed_data() == counts.typed_data(),
              "results must alias the lanes");
  if (checks.Failed()) return checks.Complaint();
  const int32_t now = step.typed_data()[0];
  Workers workers(pool);
  int64_t num_shares = 1;  // a power of two, so that a mask gives the share of a row
  const int64_t most_shares = num_entries < kEntriesPerTask ? 1 : std::min(workers.num_threads(), kMostShares);
  while (2 * num_shares <= most_shares) num_shares *= 2;
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

// Computes random bits of rows. The key of a row is derived from one key for all rows, or from the key of its table.
ffi::Error RowBits(ffi::ThreadPool pool, LanePairs key, Int32s tables, ffi::RemainingArgs args,
                   ffi::Result<LanePairs> bits) {
  const int64_t num_rows = bits->dimensions()[0], dim = bits->dimensions()[1];
  Reader reader(args);
  std::vector<const uint32_t*> lanes;
  for (size_t k = 0; k < args.size(); ++k) {
    lanes.push_back(static_cast<uint32_t*>(reader.Next("lane", ffi::U32, num_rows)));
  }
  const int64_t num_keys = key.dimensions()[0];
  if (num_keys < 1 || key.dimensions()[1] != 2) reader.Fail("wrong size of key");
  if (Size(tables) != 0 && Size(tables) != num_rows) reader.Fail("wrong number of tables");
  if (dim > int64_t{UINT32_MAX}) reader.Fail("too many columns");
  if (reader.Failed()) return reader.Complaint();
  if (dim == 0) return ffi::Error::Success();  // rows without columns take no memory, so there can be any number
  const int64_t rows_per_task = std::max<int64_t>(kBitsPerTask / dim, 1);
  const auto row_bits = BestRowKernels().row_bits;
  const TableKeys keys{key.typed_data(), num_keys, Size(tables) == 0 ? nullptr : tables.typed_data()};
  Workers(pool).ForEachRange(num_rows, rows_per_task, [&](int64_t first, int64_t last) {
    row_bits(keys, lanes.data(), lanes.size(), dim, first, last, bits->typed_data());
  });
  return ffi::Error::Success();
}

auto Bind() { return ffi::Ffi::Bind().Ctx<ffi::ThreadPool>(); }

}  // namespace

#pragma GCC visibility push(default)

XLA_FFI_DEFINE_HANDLER_SYMBOL(rsembed_find_keys, FindKeys,
                              Bind()
                                  .Arg<LanePairs>()
                                  .Arg<Int32s>()
                                  .Arg<Words>()
                                  .Arg<Words>()
                                  .Arg<Marks>()
                                  .Arg<Int32s>()
                                  .Ret<Int32s>()
                                  .Ret<Int32s>()
                                  .Ret<ffi::BufferR0<ffi::S32>>()
                                  .Attr<int64_t>("num_tables"));

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
                              Bind().Arg<LanePairs>().Arg<Int32s>().RemainingArgs().Ret<LanePairs>());

#pragma GCC visibility pop

}  // namespace rsembed
