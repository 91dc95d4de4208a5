// XLA FFI handlers for lookups in tensor trains, and for the gradients of lookups.
//
// Lookups are sorted by their slice of the grouped core (the core with the largest slices), then by all other slices,
// so that equal rows are adjacent and computed once. Rows are computed tile by tile to limit the memory for rows. For
// each tile, threads compute the rows of the tile (in the backward pass, the gradients of slices) and then sum the
// outputs. One thread sums each output, in the order of the lookups, so the order of additions is fixed. Only
// rsembed/tt/cores.py calls the handlers of this file.

#include <algorithm>
#include <cstdint>
#include <new>
#include <string_view>
#include <utility>
#include <vector>

#include "arguments.h"
#include "parallel.h"
#include "sorting.h"
#include "train_kernels.h"
#include "xla/ffi/api/ffi.h"

extern "C" const char* rsembed_instruction_set();

namespace rsembed {
namespace {

constexpr int64_t kTileFloats = 1 << 20;
constexpr int64_t kUnitsPerTask = 32;
constexpr int64_t kSumsPerTask = 512;

const TrainKernels& Kernels() {
  static const TrainKernels& kernels = []() -> const TrainKernels& {
#if defined(RSEMBED_HAS_X86_ISAS)
    const std::string_view name = rsembed_instruction_set();
    if (name == "avx512") return avx512::kTrainKernels;
    if (name == "avx2") return avx2::kTrainKernels;
#endif
    return baseline::kTrainKernels;
  }();
  return kernels;
}

struct Call {
  Train train = {};
  const int32_t* bags;
  const float* gains;
  const float* d_pooled = nullptr;
  int64_t num_lookups = 0;
  int64_t num_bags = 0;
};

Call ReadCall(Reader& reader, ffi::Span<const int64_t> shapes, int64_t grouped, int64_t num_bags, bool has_gradient) {
  Call call;
  Train& train = call.train;
  train.num_cores = shapes.size() / 3;
  train.grouped = grouped;
  train.dim = 1;
  call.num_bags = num_bags;
  if (train.num_cores < 2 || train.num_cores > kMaxCores || grouped < 0 || grouped >= train.num_cores) {
    reader.Fail("unreadable train");
    return call;
  }
  for (int64_t t = 0; t < train.num_cores; ++t) {
    const int64_t* const shape = shapes.begin() + 3 * t;
    train.left[t] = shape[0];
    train.columns[t] = shape[1];
    train.right[t] = shape[2];
    const bool fits = shape[0] == (t == 0 ? 1 : shape[-1]) && (t < train.num_cores - 1 || shape[2] == 1);
    if (!fits || std::min({shape[0], shape[1], shape[2]}) < 1) reader.Fail("unreadable train");
    train.size[t] = Times(Times(shape[0], shape[1]), shape[2]);
    train.rows[t] = train.dim;
    train.dim = Times(train.dim, shape[1]);
    train.product[t] = Times(train.dim, shape[2]);
    if (std::max(train.size[t], train.product[t]) > kNoRow) {
      reader.Fail("slices and products have less than 2**31 numbers");
    }
    if (reader.Failed()) return call;
  }
  call.bags = static_cast<int32_t*>(reader.Next("bags", ffi::S32, &call.num_lookups));
  call.gains = static_cast<float*>(reader.Next("gains", ffi::F32, call.num_lookups));
  if (has_gradient) call.d_pooled = static_cast<float*>(reader.Next("d_pooled", ffi::F32, Times(num_bags, train.dim)));
  for (int64_t t = 0; t < train.num_cores; ++t) {
    int64_t count;
    train.digits[t] = static_cast<int32_t*>(reader.Next("digits", ffi::S32, call.num_lookups));
    train.cores[t] = static_cast<float*>(reader.Next("core", ffi::F32, &count));
    train.num_digits[t] = count / train.size[t];
    if (count % train.size[t] != 0 || train.num_digits[t] > kNoRow) reader.Fail("wrong size of core");
  }
  if (call.num_lookups > kNoRow) reader.Fail("too many lookups for one call");
  return call;
}

// Lookups that contribute to an output, in the order that the top of this file describes. Consecutive lookups of the
// same row form a unit.
struct Units {
  std::vector<uint32_t> lookups;   // the lookups of the first unit, then of the second unit, and so on
  std::vector<uint32_t> first;     // position of each unit's first lookup in `lookups`, then the number of lookups
  std::vector<uint32_t> examples;  // the first lookup of each unit

  int64_t size() const { return static_cast<int64_t>(examples.size()); }
};

Units MakeUnits(Workers& workers, const Call& call) {
  const Train& train = call.train;
  const int32_t* const group_of = train.digits[train.grouped];
  const RowSort sort(workers, call.num_lookups, train.num_digits[train.grouped],
                     [&](int64_t first, int64_t last, Item* items) {
                       int64_t count = 0;
                       for (int64_t i = first; i < last; ++i) {
                         bool contributes = call.bags[i] >= 0 && call.bags[i] < call.num_bags;
                         for (int64_t t = 0; t < train.num_cores && contributes; ++t) {
                           contributes = train.digits[t][i] >= 0 && train.digits[t][i] < train.num_digits[t];
                         }
                         if (contributes) {
                           items[count++] = {static_cast<uint32_t>(group_of[i]), static_cast<uint32_t>(i)};
                         }
                       }
                       return count;
                     });
  struct Keyed {
    uint64_t row;
    uint32_t lookup;
  };
  const int64_t count = sort.num_items();
  const Scratch<Keyed> keyed(count);
  workers.ForEachRange(count, 2048, [&](int64_t first, int64_t last) {
    // A group has all lookups that use the same slice of the grouped core. Sort each group that begins in [first,
    // last).
    const auto begins = [&](int64_t i) { return i == 0 || sort.items()[i].row != sort.items()[i - 1].row; };
    while (first < last && !begins(first)) ++first;
    while (first < last) {
      int64_t end = first;
      do {
        const uint32_t lookup = sort.items()[end].source;
        uint64_t row = 0;  // overflows in trains of more than 2^64 rows, so the loop below also compares slices
        for (int64_t t = 0; t < train.num_cores; ++t) {
          if (t != train.grouped) row = row * train.num_digits[t] + train.digits[t][lookup];
        }
        keyed[end++] = {row, lookup};
      } while (end < count && !begins(end));
      std::sort(&keyed[first], &keyed[first] + (end - first), [](const Keyed& a, const Keyed& b) {
        return a.row != b.row ? a.row < b.row : a.lookup < b.lookup;
      });
      first = end;
    }
  });
  Units units;
  units.lookups.resize(count);
  for (int64_t i = 0; i < count; ++i) {
    const uint32_t lookup = keyed[i].lookup;
    units.lookups[i] = lookup;
    bool is_new = i == 0 || keyed[i].row != keyed[i - 1].row;
    for (int64_t t = 0; t < train.num_cores && !is_new; ++t) {
      is_new = train.digits[t][lookup] != train.digits[t][units.lookups[i - 1]];
    }
    if (is_new) {
      units.first.push_back(static_cast<uint32_t>(i));
      units.examples.push_back(lookup);
    }
  }
  units.first.push_back(static_cast<uint32_t>(count));
  return units;
}

// Splits units [begin, end) into blocks, and calls body(first, last) for each block. The units of a block use the same
// slice of the grouped core, and a block has at most `most` units.
template <typename Body>
void ForEachSharedSlice(const Train& train, const Units& units, int64_t begin, int64_t end, int64_t most,
                        const Body& body) {
  const int32_t* const digits = train.digits[train.grouped];
  for (int64_t first = begin; first < end;) {
    int64_t last = first + 1;
    const int32_t digit = digits[units.examples[first]];
    while (last < end && last - first < most && digits[units.examples[last]] == digit) ++last;
    body(first, last);
    first = last;
  }
}

// Multiplies the vector of each entry by the gain of the entry, and adds the product to a row of `out`, in the order of
// the entries. Vectors and rows have `size` numbers. `emit(first, last, items)` writes the row and the index of each
// entry in [first, last) that has a row. `term(entry)` returns the vector and the gain of an entry.
template <typename Emit, typename Term>
void AddToRows(Workers& workers, int64_t num_entries, int64_t num_rows, int64_t size, float* out, const Emit& emit,
               const Term& term) {
  const RowSort sort(workers, num_entries, num_rows, emit);
  const Item* const items = sort.items();
  const int64_t count = sort.num_items();
  workers.ForEachRange(count, kSumsPerTask, [&](int64_t first, int64_t last) {
    // A task handles each row of `out` if the first item of the row is in [first, last).
    const auto begins = [&](int64_t i) { return i == 0 || items[i].row != items[i - 1].row; };
    while (first < last && !begins(first)) ++first;
    for (int64_t i = first; i < last || (i > first && i < count && !begins(i)); ++i) {
      const auto [vector, gain] = term(items[i].source);
      Kernels().add(vector, gain, size, out + int64_t{items[i].row} * size);
    }
  });
}

void Clear(Workers& workers, float* data, int64_t count) {
  workers.ForEachRange(count, 1 << 16, [&](int64_t first, int64_t last) { std::fill(data + first, data + last, 0.0f); });
}

ffi::Error Rows(ffi::ThreadPool pool, ffi::RemainingArgs args, ffi::Result<ffi::BufferR2<ffi::F32>> out,
                ffi::Span<const int64_t> slice_shapes, int64_t grouped) {
  Reader reader(args);
  const Call call = ReadCall(reader, slice_shapes, grouped, out->dimensions()[0], false);
  const Train& train = call.train;
  if (!reader.Failed() && static_cast<int64_t>(out->dimensions()[1]) != train.dim) reader.Fail("wrong size of output");
  if (reader.Failed()) return reader.Complaint();
  return WithMemory([&] {
    Workers workers(pool);
    Clear(workers, out->typed_data(), out->element_count());
    const Units units = MakeUnits(workers, call);
    if (units.size() == 0) return;
    const int64_t tile = std::clamp<int64_t>(kTileFloats / train.dim, 1, units.size());
    const Scratch<float> made(tile * train.dim);
    const Scratch<uint32_t> unit_of(units.lookups.size());  // for each lookup of a tile, the index of its unit
    for (int64_t begin = 0; begin < units.size(); begin += tile) {
      const int64_t end = std::min(begin + tile, units.size());
      workers.ForEachRange(end - begin, 4 * kUnitsPerTask, [&](int64_t from, int64_t to) {
        const Scratch<float> scratch(ScratchSize(train));
        ForEachSharedSlice(train, units, begin + from, begin + to, kLookupsPerBlock, [&](int64_t first, int64_t last) {
          Kernels().rows(train, &units.examples[first], last - first, scratch.get(), &made[(first - begin) * train.dim]);
        });
      });
      const int64_t first_lookup = units.first[begin], num_lookups = units.first[end] - first_lookup;
      const auto bags = [&](int64_t first, int64_t last, Item* items) {
        const auto after = std::upper_bound(units.first.begin(), units.first.end(), first_lookup + first);
        int64_t unit = after - units.first.begin() - 1;
        for (int64_t i = first; i < last; ++i) {
          while (units.first[unit + 1] <= first_lookup + i) ++unit;
          unit_of[i] = static_cast<uint32_t>(unit);
          *items++ = {static_cast<uint32_t>(call.bags[units.lookups[first_lookup + i]]), static_cast<uint32_t>(i)};
        }
        return last - first;
      };
      AddToRows(workers, num_lookups, call.num_bags, train.dim, out->typed_data(), bags, [&](int64_t i) {
        return std::pair(&made[(unit_of[i] - begin) * train.dim], call.gains[units.lookups[first_lookup + i]]);
      });
    }
  });
}

// Computes the gradients of the cores and, as the last result, the gradients of the gains (the weights of the lookups).
ffi::Error Pull(ffi::ThreadPool pool, ffi::RemainingArgs args, ffi::RemainingRets rets,
                ffi::Span<const int64_t> slice_shapes, int64_t grouped, int64_t num_bags) {
  Reader reader(args);
  const Call call = ReadCall(reader, slice_shapes, grouped, num_bags, true);
  const Train& train = call.train;
  float* outputs[kMaxCores + 1];
  for (int64_t t = 0; t <= train.num_cores && !reader.Failed(); ++t) {
    auto result = rets.get<ffi::AnyBuffer>(t);
    const int64_t wanted = t == train.num_cores ? call.num_lookups : Times(train.num_digits[t], train.size[t]);
    if (!result.has_value() || static_cast<int64_t>((*result)->element_count()) != wanted) {
      reader.Fail("wrong size of gradients");
    } else {
      outputs[t] = static_cast<float*>((*result)->untyped_data());
    }
  }
  if (reader.Failed()) return reader.Complaint();
  return WithMemory([&] {
    Workers workers(pool);
    for (int64_t t = 0; t < train.num_cores; ++t) Clear(workers, outputs[t], train.num_digits[t] * train.size[t]);
    float* const d_gains = outputs[train.num_cores];
    Clear(workers, d_gains, call.num_lookups);
    const Units units = MakeUnits(workers, call);
    if (units.size() == 0) return;
    int64_t floats = 0;
    for (int64_t t = 0; t < train.num_cores; ++t) floats += t == grouped ? 0 : train.size[t];
    const int64_t tile = std::clamp<int64_t>(kTileFloats / floats, 1, units.size());
    const Scratch<float> made(tile * floats);
    const Scratch<bool> is_head(tile);
    float* d_slices[kMaxCores] = {};
    for (int64_t t = 0, before = 0; t < train.num_cores; ++t) {
      if (t == grouped) continue;
      d_slices[t] = made.get() + tile * before;
      before += train.size[t];
    }
    const int64_t left = train.left[grouped], width = train.columns[grouped] * train.right[grouped], dim = train.dim;
    const int32_t* const group_of = train.digits[grouped];
    for (int64_t begin = 0; begin < units.size(); begin += tile) {
      const int64_t end = std::min(begin + tile, units.size());
      // A group has all units that use the same slice of the grouped core. A task handles each group that begins in the
      // task's range of units, and adds the gradient of the group's slice to the output. For every core except the
      // grouped core, a task writes the gradients of single slices to `d_slices`. `AddToRows` sums the gradients in
      // `d_slices` after all tasks.
      workers.ForEachRange(end - begin, kUnitsPerTask, [&](int64_t from, int64_t to) {
        const auto begins = [&](int64_t unit) {
          return unit == begin || group_of[units.examples[unit]] != group_of[units.examples[unit - 1]];
        };
        int64_t mine = begin + from, limit = begin + to;
        while (mine < limit && !begins(mine)) ++mine;
        if (mine == limit) return;
        while (limit < end && !begins(limit)) ++limit;
        const Scratch<float> scratch(ScratchSize(train)), transposed(train.size[grouped]);
        const Scratch<float> rows(kLookupsPerBlock * dim), d_rows(kLookupsPerBlock * dim);
        ForEachSharedSlice(train, units, mine, limit, units.size(), [&](int64_t group, int64_t group_end) {
          const int64_t digit = group_of[units.examples[group]];
          Kernels().transpose(train.cores[grouped] + digit * train.size[grouped], left, width, transposed.get());
          for (int64_t first = group; first < group_end; first += kLookupsPerBlock) {
            const int64_t count = std::min(kLookupsPerBlock, group_end - first);
            Kernels().rows(train, &units.examples[first], count, scratch.get(), rows.get());
            std::fill_n(d_rows.get(), count * dim, 0.0f);
            for (int64_t k = 0; k < count; ++k) {
              for (uint32_t i = units.first[first + k]; i < units.first[first + k + 1]; ++i) {
                const uint32_t lookup = units.lookups[i];
                const float* const d_bag = call.d_pooled + int64_t{call.bags[lookup]} * dim;
                d_gains[lookup] = Kernels().dot(&rows[k * dim], d_bag, dim);
                Kernels().add(d_bag, call.gains[lookup], dim, &d_rows[k * dim]);
              }
            }
            float* d_here[kMaxCores];
            for (int64_t t = 0; t < train.num_cores; ++t) {
              d_here[t] = t == grouped ? nullptr : d_slices[t] + (first - begin) * train.size[t];
            }
            Kernels().pull(train, &units.examples[first], count, d_rows.get(), transposed.get(),
                           outputs[grouped] + digit * train.size[grouped], d_here, &is_head[first - begin],
                           scratch.get());
          }
        });
      });
      for (int64_t t = 0; t < train.num_cores; ++t) {
        if (t == grouped) continue;
        const auto digits = [&](int64_t first, int64_t last, Item* items) {
          Item* const start = items;
          for (int64_t k = first; k < last; ++k) {
            if (t < grouped && !is_head[k]) continue;
            *items++ = {static_cast<uint32_t>(train.digits[t][units.examples[begin + k]]), static_cast<uint32_t>(k)};
          }
          return items - start;
        };
        AddToRows(workers, end - begin, train.num_digits[t], train.size[t], outputs[t], digits,
                  [&](int64_t k) { return std::pair(d_slices[t] + k * train.size[t], 1.0f); });
      }
    }
  });
}

}  // namespace

#pragma GCC visibility push(default)

XLA_FFI_DEFINE_HANDLER_SYMBOL(rsembed_train_rows, Rows,
                              ffi::Ffi::Bind()
                                  .Ctx<ffi::ThreadPool>()
                                  .RemainingArgs()
                                  .Ret<ffi::BufferR2<ffi::F32>>()
                                  .Attr<ffi::Span<const int64_t>>("slice_shapes")
                                  .Attr<int64_t>("grouped"));

XLA_FFI_DEFINE_HANDLER_SYMBOL(rsembed_train_pull, Pull,
                              ffi::Ffi::Bind()
                                  .Ctx<ffi::ThreadPool>()
                                  .RemainingArgs()
                                  .RemainingRets()
                                  .Attr<ffi::Span<const int64_t>>("slice_shapes")
                                  .Attr<int64_t>("grouped")
                                  .Attr<int64_t>("num_bags"));

#pragma GCC visibility pop

}  // namespace rsembed
