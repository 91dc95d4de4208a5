// XLA FFI handlers of the kernels, and the choice of the instruction set.
//
// A handler takes a variable number of buffers, so one call handles any number of features. The buffers hold the ids,
// offsets and weights of lists, the gradients of outputs, and tables. The attributes `lists` and `segments` describe
// the buffers, see Reader in arguments.h. Only rsembed/kernels/native.py calls the handlers of this file, and native.py
// checks the arguments. The handlers check only what memory safety needs.

#include <sys/mman.h>
#if defined(__linux__)
#include <malloc.h>
#endif

#include <algorithm>
#include <cstdint>
#include <cstdlib>
#include <cstring>
#include <numeric>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include "arguments.h"
#include "parallel.h"
#include "row_kernels.h"
#include "sorting.h"
#include "xla/ffi/api/ffi.h"

namespace rsembed {

// Returns the kernels for the best instruction set of this processor. The environment variable RSEMBED_ISA, set to
// baseline or avx2, limits the instruction set, to compare speed or to reproduce the bits of an older machine.
const RowKernels& BestRowKernels() {
  static const RowKernels& kernels = []() -> const RowKernels& {
#if defined(RSEMBED_HAS_X86_ISAS)
    const char* wish = std::getenv("RSEMBED_ISA");
    const std::string_view limit = wish == nullptr ? "" : wish;
    if (limit == "baseline") return baseline::kRowKernels;
    const bool has_avx2 = __builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma") &&
                          __builtin_cpu_supports("f16c");
    const bool has_avx512 = __builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") &&
                            __builtin_cpu_supports("avx512dq") && __builtin_cpu_supports("avx512vl");
    if (has_avx2 && has_avx512 && limit != "avx2") return avx512::kRowKernels;
    if (has_avx2) return avx2::kRowKernels;
#endif
    return baseline::kRowKernels;
  }();
  return kernels;
}

namespace {

constexpr int64_t kBlockBytes = 128 << 10;
constexpr int64_t kItemsPerBlock = 1024;
constexpr int64_t kStreamedBytes = 8 << 20;  // an output of this size does not fit in the caches of one core

constexpr uintptr_t kHugePageBytes = 2 << 20;

// Requests huge pages for the memory [data, data + bytes). If `now` is true, the system immediately replaces even pages
// in use by huge pages.
bool AdviseHugePages(void* data, size_t bytes, bool now) {
#if defined(MADV_HUGEPAGE)
  const uintptr_t begin = (reinterpret_cast<uintptr_t>(data) + kHugePageBytes - 1) & ~(kHugePageBytes - 1);
  const uintptr_t end = (reinterpret_cast<uintptr_t>(data) + bytes) & ~(kHugePageBytes - 1);
  if (begin >= end) return false;
  void* const interior = reinterpret_cast<void*>(begin);
  if (madvise(interior, end - begin, MADV_HUGEPAGE) != 0) return false;
  constexpr int kCollapse = 25;  // MADV_COLLAPSE of Linux 6.1, which older headers do not define
  return !now || madvise(interior, end - begin, kCollapse) == 0;
#else
  return false;
#endif
}

// Pools the rows that every segment reads from its table, and writes the pooled rows to the segment's output.
void PoolSegments(ffi::ThreadPool pool, const std::vector<Table>& tables, std::vector<Segment>& segments) {
  int64_t num_outputs = 0;
  // Numbers of bytes are doubles, because a table without rows can have so many columns that int64 would overflow.
  double num_bytes = 0.0, output_bytes = 0.0;
  for (const Segment& segment : segments) {
    const double row_bytes = 4.0 * static_cast<double>(tables[segment.table].dim);
    num_outputs += segment.num_outputs;
    num_bytes += row_bytes * static_cast<double>(segment.num_entries + segment.num_outputs);
    output_bytes += row_bytes * static_cast<double>(segment.num_outputs);
  }
  for (Segment& segment : segments) segment.streams_copies = output_bytes >= kStreamedBytes;
  const double most_blocks = std::max(1.0, static_cast<double>(num_outputs));
  const int64_t num_blocks = static_cast<int64_t>(std::clamp(num_bytes / (4 * kBlockBytes), 1.0, most_blocks));
  const int64_t outputs_per_block = std::max<int64_t>((num_outputs + num_blocks - 1) / num_blocks, 1);
  Workers(pool).ForEachRange(num_outputs, outputs_per_block, [&](int64_t first, int64_t last) {
    ForEachPart<&Segment::first_output, &Segment::num_outputs>(
        segments, first, last, [&](const Segment& segment, int64_t begin, int64_t end) {
          const Table& table = tables[segment.table];
          BestRowKernels().pool[table.type](table, segment, begin, end);
        });
  });
}

using Numbers = ffi::Span<const int64_t>;

ffi::Error Lookup(ffi::ThreadPool pool, ffi::RemainingArgs args, ffi::RemainingRets rets, Numbers forms,
                  Numbers numbers) {
  Reader reader(args);
  const std::vector<List> lists = reader.Lists(forms);
  const std::vector<Table> tables = reader.Tables();
  std::vector<Output> outputs;
  for (size_t k = 0; k < rets.size() && !reader.Failed(); ++k) {
    auto output = rets.get<ffi::AnyBuffer>(k);
    if (!output.has_value() || (*output)->element_type() != ffi::F32) {
      reader.Fail("outputs are float32");
      break;
    }
    outputs.push_back({static_cast<float*>((*output)->untyped_data()), static_cast<int64_t>((*output)->element_count())});
  }
  if (reader.Failed()) return reader.Complaint();
  std::vector<Segment> segments = reader.Segments(numbers, lists, tables, outputs, false);
  if (reader.Failed()) return reader.Complaint();
  std::vector<int64_t> num_written(outputs.size(), 0);
  for (size_t k = 0; k < segments.size(); ++k) {
    const int64_t output = numbers[10 * k + 7];
    num_written[output] += Times(segments[k].num_outputs, tables[segments[k].table].dim);
  }
  for (size_t k = 0; k < outputs.size(); ++k) {
    // An output of kStreamedBytes bytes or more can be in newly allocated memory, for which the system has not provided
    // pages yet. Page faults take less time with huge pages.
    if (outputs[k].size * 4 >= kStreamedBytes) AdviseHugePages(outputs[k].data, outputs[k].size * 4, false);
    // Zeros are needed where no segment writes to an output. With combiner `none`, no segment writes vectors of entries
    // that the output's segments do not read, or the last columns of rows that are shorter than the longest row.
    if (num_written[k] < outputs[k].size) std::fill(outputs[k].data, outputs[k].data + outputs[k].size, 0.0f);
  }
  PoolSegments(pool, tables, segments);
  return ffi::Error::Success();
}

// Computes the gradient of the weight of every id, for every list. The gradient is 0 for an id that contributes
// nothing.
ffi::Error WeightGradients(ffi::ThreadPool pool, ffi::RemainingArgs args, ffi::RemainingRets rets, Numbers forms,
                           Numbers numbers, int64_t num_outputs) {
  Reader reader(args);
  const std::vector<List> lists = reader.Lists(forms);
  const std::vector<Output> outputs = reader.Gradients(num_outputs);
  const std::vector<Table> tables = reader.Tables();
  if (reader.Failed()) return reader.Complaint();
  std::vector<Segment> segments = reader.Segments(numbers, lists, tables, outputs, true);
  std::vector<float*> d_weights;
  for (size_t k = 0; k < lists.size(); ++k) {
    auto result = rets.get<ffi::BufferR1<ffi::F32>>(k);
    if (!result.has_value() || static_cast<int64_t>((*result)->element_count()) != lists[k].num_ids) {
      reader.Fail("wrong size of the gradients");
      break;
    }
    d_weights.push_back((*result)->typed_data());
    std::fill(d_weights[k], d_weights[k] + lists[k].num_ids, 0.0f);
  }
  if (reader.Failed()) return reader.Complaint();
  int64_t num_vectors = 0;
  for (Segment& segment : segments) {
    segment.d_weights = d_weights[segment.list] + segment.first_id;
    num_vectors += segment.num_outputs;
  }
  Workers(pool).ForEachRange(num_vectors, kItemsPerBlock, [&](int64_t first, int64_t last) {
    ForEachPart<&Segment::first_output, &Segment::num_outputs>(
        segments, first, last, [&](const Segment& segment, int64_t begin, int64_t end) {
          const Table& table = tables[segment.table];
          BestRowKernels().weight_gradients[table.type](table, segment, begin, end);
        });
  });
  return ffi::Error::Success();
}

// Number of entries of all lists, which is also the maximum number of rows that have a gradient.
int64_t NumEntries(const std::vector<List>& lists) {
  int64_t num_entries = 0;
  for (const List& list : lists) num_entries += list.num_ids;
  return num_entries;
}

using GradientRows = ffi::Result<ffi::BufferR1<ffi::S32>>;
using GradientValues = ffi::Result<ffi::BufferR2<ffi::F32>>;

// Computes the distinct rows of a call and their gradients. `reader` is the reader that returned `segments`.
// `num_entries` is the number of entries of all lists.
ffi::Error CombineSegments(ffi::ThreadPool pool, Reader& reader, const std::vector<Segment>& segments,
                           int64_t num_entries, int64_t num_rows, GradientRows out_rows, GradientValues out_gradients) {
  const int64_t capacity = out_gradients->dimensions()[0], dim = out_gradients->dimensions()[1];
  if (num_rows < 0 || num_rows > kNoRow) reader.Fail("num_rows does not fit");
  if (capacity != std::min(num_entries, num_rows) || static_cast<int64_t>(out_rows->element_count()) != capacity) {
    reader.Fail("wrong capacity");
  }
  if (reader.Failed()) return reader.Complaint();
  if (capacity * dim * 4 >= kStreamedBytes) AdviseHugePages(out_gradients->typed_data(), capacity * dim * 4, false);
  return WithMemory([&] {
    Workers workers(pool);
    const SortedSegments sorted(workers, BestRowKernels(), segments, num_rows, dim);
    const SortedEntries entries = sorted.entries();
    const int64_t num_blocks = (entries.num_items + kItemsPerBlock - 1) / kItemsPerBlock;
    std::vector<int64_t> first_group(num_blocks + 1, 0);
    workers.ForEachRange(entries.num_items, kItemsPerBlock, [&](int64_t first, int64_t last) {
      int64_t num_groups = 0;
      for (int64_t i = first; i < last; ++i) {
        num_groups += i == 0 || entries.items[i].row != entries.items[i - 1].row;
      }
      first_group[first / kItemsPerBlock + 1] = num_groups;
    });
    for (int64_t block = 0; block < num_blocks; ++block) first_group[block + 1] += first_group[block];
    workers.ForEachRange(entries.num_items, kItemsPerBlock, [&](int64_t first, int64_t last) {
      const int64_t group = first_group[first / kItemsPerBlock];
      BestRowKernels().sum_groups(entries, first, last, out_rows->typed_data() + group,
                           out_gradients->typed_data() + group * dim);
    });
    const int64_t num_groups = first_group[num_blocks];
    workers.ForEachRange(capacity - num_groups, kItemsPerBlock, [&](int64_t first, int64_t last) {
      std::fill(out_rows->typed_data() + num_groups + first, out_rows->typed_data() + num_groups + last, kNoRow);
      std::fill(out_gradients->typed_data() + (num_groups + first) * dim,
                out_gradients->typed_data() + (num_groups + last) * dim, 0.0f);
    });
  });
}

// A table without values, for code that needs only the sizes of the table.
Table TableOfSize(int64_t num_rows, int64_t dim) {
  Table table = {};
  table.num_rows = num_rows;
  table.dim = dim;
  return table;
}

ffi::Error RowGradients(ffi::ThreadPool pool, ffi::RemainingArgs args, GradientRows rows, GradientValues gradients,
                        Numbers forms, Numbers numbers, int64_t num_outputs, int64_t num_rows) {
  Reader reader(args);
  const std::vector<List> lists = reader.Lists(forms);
  const std::vector<Output> outputs = reader.Gradients(num_outputs);
  const Table table = TableOfSize(num_rows, gradients->dimensions()[1]);
  const std::vector<Segment> segments = reader.Segments(numbers, lists, {table}, outputs, true);
  return CombineSegments(pool, reader, segments, NumEntries(lists), num_rows, rows, gradients);
}

// Computes the sum of the squares of all row gradients, without writing the gradients. The result does not depend on
// the number of threads.
ffi::Error SquaredNorm(ffi::ThreadPool pool, ffi::RemainingArgs args, ffi::Result<ffi::BufferR0<ffi::F32>> out,
                       Numbers forms, Numbers numbers, int64_t num_outputs, int64_t num_rows, int64_t dim) {
  Reader reader(args);
  const std::vector<List> lists = reader.Lists(forms);
  const std::vector<Output> outputs = reader.Gradients(num_outputs);
  const std::vector<Segment> segments =
      reader.Segments(numbers, lists, {TableOfSize(num_rows, dim)}, outputs, true);
  if (num_rows < 0 || num_rows > kNoRow) reader.Fail("num_rows does not fit");
  if (reader.Failed()) return reader.Complaint();
  return WithMemory([&] {
    Workers workers(pool);
    const SortedSegments sorted(workers, BestRowKernels(), segments, num_rows, dim);
    const SortedEntries entries = sorted.entries();
    std::vector<double> of_block((entries.num_items + kItemsPerBlock - 1) / kItemsPerBlock);
    workers.ForEachRange(entries.num_items, kItemsPerBlock, [&](int64_t first, int64_t last) {
      of_block[first / kItemsPerBlock] = BestRowKernels().square_groups(entries, first, last);
    });
    *out->typed_data() = static_cast<float>(std::accumulate(of_block.begin(), of_block.end(), 0.0));
  });
}

constexpr int kNumSlots[kNumRules] = {0, 1, 1, 2};
constexpr int kNumHyperparameters[kNumRules] = {1, 2, 2, 4};

// Returns the table that holds `values`, and reads the hyperparameters and slots of the table from the next buffers.
// XLA aliases table and slots with the results, so handlers update them in place.
Table ReadTable(Reader& reader, ffi::AnyBuffer values, ffi::RemainingRets rets, int64_t rule) {
  Table table = reader.TableOf(values);
  if (rule < 0 || rule >= kNumRules) reader.Fail("unknown rule");
  if (reader.Failed()) return table;
  table.slot_width = rule == kRowWiseAdagrad ? 1 : table.dim;
  table.hyper = static_cast<float*>(reader.Next("hyperparameters", ffi::F32, kNumHyperparameters[rule], true));
  for (int k = 0; k < kNumSlots[rule]; ++k) {
    table.slots[k] = static_cast<float*>(reader.Next("slot", ffi::F32, Times(table.num_rows, table.slot_width)));
  }
  for (int k = 0; k <= kNumSlots[rule]; ++k) {
    auto result = rets.get<ffi::AnyBuffer>(k);
    const void* operand = k == 0 ? table.values : table.slots[k - 1];
    if (!result.has_value() || (*result)->untyped_data() != operand) reader.Fail("results must alias table and slots");
  }
  return table;
}

ffi::Error StepSegments(ffi::ThreadPool pool, const Table& table, const std::vector<Segment>& segments, int64_t rule) {
  return WithMemory([&] {
    Workers workers(pool);
    const SortedSegments sorted(workers, BestRowKernels(), segments, table.num_rows, table.dim);
    const SortedEntries entries = sorted.entries();
    const auto update_groups = BestRowKernels().update_groups[table.type][rule];
    workers.ForEachRange(entries.num_items, kItemsPerBlock, [&](int64_t first, int64_t last) {
      update_groups(table, entries, first, last);
    });
  });
}

ffi::Error Update(ffi::ThreadPool pool, ffi::AnyBuffer values, ffi::RemainingArgs args, ffi::RemainingRets rets,
                  Numbers forms, Numbers numbers, int64_t num_outputs, int64_t rule) {
  Reader reader(args);
  const Table table = ReadTable(reader, values, rets, rule);
  const std::vector<List> lists = reader.Lists(forms);
  const std::vector<Output> outputs = reader.Gradients(num_outputs);
  if (reader.Failed()) return reader.Complaint();
  const std::vector<Segment> segments = reader.Segments(numbers, lists, {table}, outputs, true);
  return reader.Failed() ? reader.Complaint() : StepSegments(pool, table, segments, rule);
}

ffi::Error ApplyRows(ffi::ThreadPool pool, ffi::AnyBuffer values, ffi::RemainingArgs args, ffi::RemainingRets rets,
                     int64_t rule) {
  Reader reader(args);
  const Table table = ReadTable(reader, values, rets, rule);
  int64_t num_rows = 0;
  const auto* rows = static_cast<int32_t*>(reader.Next("rows", ffi::S32, &num_rows));
  const auto* gradients = static_cast<float*>(reader.Next("gradients", ffi::F32, Times(num_rows, table.dim)));
  if (reader.Failed()) return reader.Complaint();
  const auto step_rows = BestRowKernels().step_rows[table.type][rule];
  Workers(pool).ForEachRange(num_rows, kItemsPerBlock, [&](int64_t first, int64_t last) {
    step_rows(table, rows, gradients, first, last);
  });
  return ffi::Error::Success();
}

// Implements `rsembed_gather_rows`. Item i of list k in `rets` is row `rows[i]` of array k in `args`. The arrays may
// have any dtypes. If a row number is outside the array, the item is set to the value of `missing` in an int32 list,
// and to zero in other lists.
ffi::Error GatherRows(ffi::ThreadPool pool, ffi::BufferR1<ffi::S32> rows, ffi::RemainingArgs args,
                      ffi::RemainingRets rets, int64_t missing) {
  Workers workers(pool);
  const int64_t count = rows.element_count();
  for (size_t k = 0; k < rets.size(); ++k) {
    const auto array = args.get<ffi::AnyBuffer>(k);
    auto list = rets.get<ffi::AnyBuffer>(k);
    if (!array.has_value() || !list.has_value()) {
      return ffi::Error::InvalidArgument("rsembed: an array has no list of rows");
    }
    const int64_t num_rows = NumRows(*array), row_bytes = RowBytes(**list);
    if (NumRows(**list) != count || (count > 0 && num_rows > 0 && RowBytes(*array) != row_bytes)) {
      return ffi::Error::InvalidArgument("rsembed: rows and their array differ in size");
    }
    if (row_bytes == 0) continue;  // an empty array can have a null address
    const char* const in_array = static_cast<const char*>(array->untyped_data());
    char* const in_list = static_cast<char*>((*list)->untyped_data());
    const int64_t rows_per_block = std::max<int64_t>(kBlockBytes / row_bytes, 1);
    const int32_t filler = array->element_type() == ffi::S32 ? static_cast<int32_t>(missing) : 0;
    workers.ForEachRange(count, rows_per_block, [&](int64_t first, int64_t last) {
      for (int64_t i = first; i < last; ++i) {
        const int64_t row = rows.typed_data()[i];
        char* const item = in_list + i * row_bytes;
        if (row >= 0 && row < num_rows) std::memcpy(item, in_array + row * row_bytes, row_bytes);
        else if (filler == 0) std::memset(item, 0, row_bytes);
        else std::fill_n(reinterpret_cast<int32_t*>(item), row_bytes / 4, filler);
      }
    });
  }
  return ffi::Error::Success();
}

// Computes `scatter_into` of rsembed/kernels/reference.py: copies item i of each list to row `rows[i]` of an array of
// table `table`. `args` has the arrays of every table, one table after the other, and then the lists, as many as a
// table has arrays. `rets` has the same buffers as the arrays in `args`, which are updated in place. If an item is
// longer than a row, only the first bytes of the item are copied. The rows must be distinct, and row numbers outside
// the array are skipped.
ffi::Error ScatterInto(ffi::ThreadPool pool, ffi::BufferR0<ffi::S32> table, ffi::BufferR1<ffi::S32> rows,
                       ffi::RemainingArgs args, ffi::RemainingRets rets) {
  Workers workers(pool);
  const int64_t count = rows.element_count();
  const size_t num_lists = args.size() - rets.size();
  const size_t num_tables = num_lists == 0 ? 0 : rets.size() / num_lists;
  const int64_t index = *table.typed_data();
  if (num_tables * num_lists != rets.size()) {
    return ffi::Error::InvalidArgument("rsembed: tables differ in their number of arrays");
  }
  for (size_t k = 0; k < rets.size(); ++k) {
    const auto array = args.get<ffi::AnyBuffer>(k);
    auto result = rets.get<ffi::AnyBuffer>(k);
    const auto list = args.get<ffi::AnyBuffer>(rets.size() + k % num_lists);
    if (!array.has_value() || !result.has_value() || !list.has_value()) {
      return ffi::Error::InvalidArgument("rsembed: an array has no list of rows");
    }
    if (array->untyped_data() != (*result)->untyped_data()) {
      return ffi::Error::InvalidArgument("rsembed: results must alias the arrays");
    }
    if (static_cast<int64_t>(k / num_lists) != index) continue;
    const int64_t num_rows = NumRows(*array), row_bytes = RowBytes(*array), item_bytes = RowBytes(*list);
    if (NumRows(*list) != count || (count > 0 && num_rows > 0 && row_bytes > item_bytes)) {
      return ffi::Error::InvalidArgument("rsembed: rows and their array differ in size");
    }
    if (row_bytes == 0) continue;  // an empty array can have a null address
    char* const in_array = static_cast<char*>((*result)->untyped_data());
    const char* const in_list = static_cast<const char*>(list->untyped_data());
    const int64_t rows_per_block = std::max<int64_t>(kBlockBytes / row_bytes, 1);
    workers.ForEachRange(count, rows_per_block, [&](int64_t first, int64_t last) {
      for (int64_t i = first; i < last; ++i) {
        const int64_t row = rows.typed_data()[i];
        if (row >= 0 && row < num_rows) std::memcpy(in_array + row * row_bytes, in_list + i * item_bytes, row_bytes);
      }
    });
  }
  return ffi::Error::Success();
}

// Allocates an array on huge pages. If `fill` is true, the low bytes of `pattern` are the value of every element.
ffi::Error Allocate(ffi::ThreadPool pool, ffi::Result<ffi::AnyBuffer> out, int64_t pattern, bool fill) {
  const int64_t bytes = out->size_bytes(), width = bytes == 0 ? 1 : bytes / out->element_count();
  if (width > 8) return ffi::Error::InvalidArgument("rsembed: elements have at most 8 bytes");
  AdviseHugePages(out->untyped_data(), bytes, false);
  if (!fill) return ffi::Error::Success();
  char unit[8];
  for (int64_t k = 0; k < 8; ++k) unit[k] = reinterpret_cast<const char*>(&pattern)[k % width];
  char* const data = static_cast<char*>(out->untyped_data());
  Workers(pool).ForEachRange(bytes, 2 * kHugePageBytes, [&](int64_t first, int64_t last) {
    for (; first + 8 <= last; first += 8) std::memcpy(data + first, unit, 8);
    std::memcpy(data + first, unit, last - first);
  });
  return ffi::Error::Success();
}

using Any = ffi::AnyBuffer;
using Int32s = ffi::BufferR1<ffi::S32>;
using Float = ffi::BufferR0<ffi::F32>;
using Floats2D = ffi::BufferR2<ffi::F32>;

auto Bind() { return ffi::Ffi::Bind().Ctx<ffi::ThreadPool>(); }
auto BindLists() { return Bind().Arg<Any>().RemainingArgs().RemainingRets(); }
template <typename Binding>
auto BindCall(Binding&& binding) {
  return std::move(binding).template Attr<Numbers>("lists").template Attr<Numbers>("segments");
}

}  // namespace

// Only functions with default visibility are exported, so symbols of the library cannot clash with symbols of jaxlib.
#pragma GCC visibility push(default)

XLA_FFI_DEFINE_HANDLER_SYMBOL(rsembed_lookup, Lookup, BindCall(Bind().RemainingArgs().RemainingRets()));

XLA_FFI_DEFINE_HANDLER_SYMBOL(rsembed_weight_gradients, WeightGradients,
                              BindCall(Bind().RemainingArgs().RemainingRets()).Attr<int64_t>("num_outputs"));

XLA_FFI_DEFINE_HANDLER_SYMBOL(
    rsembed_row_gradients, RowGradients,
    BindCall(Bind().RemainingArgs().Ret<Int32s>().Ret<Floats2D>()).Attr<int64_t>("num_outputs").Attr<int64_t>("num_rows"));

XLA_FFI_DEFINE_HANDLER_SYMBOL(rsembed_squared_norm, SquaredNorm,
                              BindCall(Bind().RemainingArgs().Ret<Float>())
                                  .Attr<int64_t>("num_outputs")
                                  .Attr<int64_t>("num_rows")
                                  .Attr<int64_t>("dim"));

XLA_FFI_DEFINE_HANDLER_SYMBOL(rsembed_update, Update,
                              BindCall(BindLists()).Attr<int64_t>("num_outputs").Attr<int64_t>("rule"));

XLA_FFI_DEFINE_HANDLER_SYMBOL(rsembed_apply_rows, ApplyRows, BindLists().Attr<int64_t>("rule"));

XLA_FFI_DEFINE_HANDLER_SYMBOL(rsembed_gather_rows, GatherRows,
                              Bind().Arg<Int32s>().RemainingArgs().RemainingRets().Attr<int64_t>("missing"));

XLA_FFI_DEFINE_HANDLER_SYMBOL(rsembed_scatter_into, ScatterInto,
                              Bind().Arg<ffi::BufferR0<ffi::S32>>().Arg<Int32s>().RemainingArgs().RemainingRets());

XLA_FFI_DEFINE_HANDLER_SYMBOL(rsembed_allocate, Allocate,
                              Bind().Ret<Any>().Attr<int64_t>("pattern").Attr<bool>("fill"));

extern "C" const char* rsembed_instruction_set() { return BestRowKernels().name; }

extern "C" int64_t rsembed_num_cores() { return NumCores(); }

extern "C" bool rsembed_advise_huge_pages(void* data, size_t bytes) { return AdviseHugePages(data, bytes, true); }

// Makes the allocator keep freed memory for later results, up to `bytes` bytes at the end of a heap. By default, the
// allocator returns freed memory to the system after every call, and the system has to zero every new page of the next
// call in a page fault. Threads other than the main thread have heaps of 64 MB. The allocator returns an empty heap to
// the system if the previous heap has M_TOP_PAD bytes free. With M_TOP_PAD equal to the size of a heap, the allocator
// keeps empty heaps.
extern "C" bool rsembed_keep_freed_memory([[maybe_unused]] size_t bytes) {
#if defined(M_TRIM_THRESHOLD) && defined(M_MMAP_THRESHOLD) && defined(M_TOP_PAD)
  // Size of a thread's heap. Older versions of glibc accept at most half the size of a heap as M_MMAP_THRESHOLD.
  constexpr int kMostOfOneResult = 64 << 20;
  return (mallopt(M_MMAP_THRESHOLD, kMostOfOneResult) != 0 || mallopt(M_MMAP_THRESHOLD, kMostOfOneResult / 2) != 0) &&
         mallopt(M_TOP_PAD, kMostOfOneResult) != 0 && mallopt(M_TRIM_THRESHOLD, static_cast<int>(bytes)) != 0;
#else
  return false;
#endif
}

#pragma GCC visibility pop

}  // namespace rsembed
