// XLA FFI handler that sorts the entries of preprocessed SparseCore batches by sample.
//
// The handler computes `entries_by_sample` of rsembed/kernels/ids.py, which describes the buffers. The SparseCores of a
// device share no samples, so threads count and write the entries of different SparseCores in parallel.

#include <algorithm>
#include <cstdint>
#include <numeric>
#include <vector>

#include "arguments.h"
#include "parallel.h"
#include "xla/ffi/api/ffi.h"

namespace rsembed {
namespace {

constexpr int64_t kAlignment = 8;  // ALIGNMENT of ids.py
constexpr size_t kNumNumbers = 5;  // how many numbers of the attribute `stacks` describe one stack

struct Stack {
  const int32_t *row_pointers, *ids, *samples;
  const float* gains;
  int64_t num_places, num_blocks, num_cores, num_shards, rows_per_shard, samples_per_core;
  int64_t num_minibatches;  // 1 without minibatches
  bool has_minibatches;
  int32_t *rows, *offsets;
  float* gains_by_sample;

  int64_t num_samples() const { return num_cores * samples_per_core; }

  // Calls body(first row of the shard, position, sample) for every entry of a SparseCore, in buffer order.
  template <typename Body>
  void ForEachEntry(int64_t core, const Body& body) const {
    const int64_t width = std::max(num_shards, kAlignment);
    const int64_t first_place = has_minibatches ? 0 : num_places / num_cores * core;
    const int64_t num_own = has_minibatches ? num_places : num_places / num_cores;
    for (int64_t block = core * num_minibatches; block < std::min((core + 1) * num_minibatches, num_blocks); ++block) {
      const int32_t* const ends = row_pointers + block * width;
      const bool is_first = !has_minibatches || block == 0;
      int64_t before = is_first ? 0 : ends[num_shards - 1 - width];
      for (int64_t shard = 0; shard < num_shards; ++shard) {
        const int64_t begin = std::clamp<int64_t>((before + kAlignment - 1) / kAlignment * kAlignment, 0, num_own);
        const int64_t end = std::clamp<int64_t>(ends[shard], begin, num_own);
        before = ends[shard];
        const uint32_t first_row = static_cast<uint32_t>(shard * rows_per_shard);
        for (int64_t place = first_place + begin; place < first_place + end; ++place) {
          if (static_cast<uint32_t>(samples[place]) < static_cast<uint64_t>(samples_per_core)) {
            body(first_row, place, samples[place]);
          }
        }
      }
    }
  }
};

// Sorts the entries of a sample by row. Without minibatches, the entries of a sample are already sorted.
void SortByRow(int32_t* rows, float* gains, int64_t count, std::vector<int32_t>& order, std::vector<float>& spare) {
  if (std::is_sorted(rows, rows + count)) return;
  order.resize(count);
  std::iota(order.begin(), order.end(), 0);
  std::stable_sort(order.begin(), order.end(), [&](int32_t a, int32_t b) { return rows[a] < rows[b]; });
  spare.assign(gains, gains + count);
  for (int64_t i = 0; i < count; ++i) gains[i] = spare[order[i]];
  std::sort(rows, rows + count);
}

void Count(const Stack& stack, int64_t core) {
  int32_t* const counts = stack.offsets + core * stack.samples_per_core;
  std::fill(counts, counts + stack.samples_per_core, 0);
  stack.ForEachEntry(core, [&](uint32_t, int64_t, int32_t sample) { ++counts[sample]; });
}

// Turns counts into offsets, and writes padding after the last entry. Returns false if row pointers overlap, so that
// more entries are counted than the buffers hold.
bool Accumulate(const Stack& stack) {
  int64_t first = 0;
  for (int64_t sample = 0; sample < stack.num_samples(); ++sample) {
    const int32_t count = stack.offsets[sample];
    stack.offsets[sample] = static_cast<int32_t>(first);
    first += count;
    if (first > stack.num_places) return false;
  }
  stack.offsets[stack.num_samples()] = static_cast<int32_t>(first);
  std::fill(stack.rows + first, stack.rows + stack.num_places, kNoRow);
  std::fill(stack.gains_by_sample + first, stack.gains_by_sample + stack.num_places, 0.0f);
  return true;
}

void Write(const Stack& stack, int64_t core) {
  const int32_t* const offsets = stack.offsets + core * stack.samples_per_core;
  std::vector<int32_t> cursors(offsets, offsets + stack.samples_per_core);
  stack.ForEachEntry(core, [&](uint32_t first_row, int64_t place, int32_t sample) {
    const int32_t at = cursors[sample]++;
    stack.rows[at] = static_cast<int32_t>(first_row + static_cast<uint32_t>(stack.ids[place]));
    stack.gains_by_sample[at] = stack.gains[place];
  });
  if (!stack.has_minibatches) return;
  std::vector<int32_t> order;
  std::vector<float> spare;
  for (int64_t sample = 0; sample < stack.samples_per_core; ++sample) {
    const int32_t first = offsets[sample];
    SortByRow(stack.rows + first, stack.gains_by_sample + first, cursors[sample] - first, order, spare);
  }
}

bool ReadStack(Reader& reader, const ffi::RemainingRets& rets, size_t first_result, const int64_t* numbers,
               Stack& stack) {
  stack.num_cores = numbers[0], stack.num_shards = numbers[1], stack.rows_per_shard = numbers[2];
  stack.samples_per_core = numbers[3], stack.has_minibatches = numbers[4] != 0;
  int64_t num_pointers;
  stack.row_pointers = static_cast<int32_t*>(reader.Next("row pointers", ffi::S32, &num_pointers));
  stack.ids = static_cast<int32_t*>(reader.Next("embedding ids", ffi::S32, &stack.num_places));
  stack.samples = static_cast<int32_t*>(reader.Next("sample ids", ffi::S32, stack.num_places));
  stack.gains = static_cast<float*>(reader.Next("gains", ffi::F32, stack.num_places));
  const int64_t least = std::min({stack.num_cores, stack.num_shards, stack.rows_per_shard});
  if (least < 1 || stack.samples_per_core < 0 || Times(stack.num_shards, stack.rows_per_shard) > kNoRow ||
      Times(stack.num_cores, stack.samples_per_core) >= kNoRow || stack.num_places > kNoRow) {
    reader.Fail("unreadable stacks");
    return false;
  }
  stack.num_blocks = num_pointers / std::max(stack.num_shards, kAlignment);
  stack.num_minibatches = 1;
  if (stack.has_minibatches) {
    const int32_t* const number = static_cast<int32_t*>(reader.Next("num_minibatches", ffi::S32, int64_t{1}));
    if (reader.Failed()) return false;
    stack.num_minibatches = std::clamp<int64_t>(*number, 0, stack.num_blocks);
  }
  auto rows = rets.get<ffi::BufferR1<ffi::S32>>(first_result);
  auto offsets = rets.get<ffi::BufferR1<ffi::S32>>(first_result + 1);
  auto gains = rets.get<ffi::BufferR1<ffi::F32>>(first_result + 2);
  if (!rows.has_value() || !offsets.has_value() || !gains.has_value() ||
      static_cast<int64_t>((*rows)->element_count()) != stack.num_places ||
      static_cast<int64_t>((*gains)->element_count()) != stack.num_places ||
      static_cast<int64_t>((*offsets)->element_count()) != stack.num_samples() + 1) {
    reader.Fail("wrong size of entries");
    return false;
  }
  stack.rows = (*rows)->typed_data();
  stack.offsets = (*offsets)->typed_data();
  stack.gains_by_sample = (*gains)->typed_data();
  return !reader.Failed();
}

ffi::Error EntriesBySample(ffi::ThreadPool pool, ffi::RemainingArgs args, ffi::RemainingRets rets,
                           ffi::Span<const int64_t> numbers) {
  Reader reader(args);
  const size_t num_stacks = numbers.size() / kNumNumbers;
  if (numbers.size() % kNumNumbers != 0 || rets.size() != 3 * num_stacks) reader.Fail("unreadable stacks");
  const ffi::Error error = WithMemory([&] {
    struct Core {
      const Stack* stack;
      int64_t number;
    };
    std::vector<Stack> stacks(reader.Failed() ? 0 : num_stacks);
    std::vector<Core> cores;
    for (size_t k = 0; k < stacks.size(); ++k) {
      if (!ReadStack(reader, rets, 3 * k, numbers.begin() + kNumNumbers * k, stacks[k])) break;
      for (int64_t core = 0; core < stacks[k].num_cores; ++core) cores.push_back({&stacks[k], core});
    }
    if (reader.Failed()) return;
    Workers workers(pool);
    const int64_t num_cores = static_cast<int64_t>(cores.size());
    workers.ForEachBlock(num_cores, [&](int64_t k) { Count(*cores[k].stack, cores[k].number); });
    for (const Stack& stack : stacks) {
      if (!Accumulate(stack)) return static_cast<void>(reader.Fail("row pointers overlap"));
    }
    workers.ForEachBlock(num_cores, [&](int64_t k) { Write(*cores[k].stack, cores[k].number); });
  });
  return reader.Failed() ? reader.Complaint() : error;
}

}  // namespace

#pragma GCC visibility push(default)

XLA_FFI_DEFINE_HANDLER_SYMBOL(
    rsembed_entries_by_sample, EntriesBySample,
    ffi::Ffi::Bind().Ctx<ffi::ThreadPool>().RemainingArgs().RemainingRets().Attr<ffi::Span<const int64_t>>("stacks"));

#pragma GCC visibility pop

}  // namespace rsembed
