// Partitions all stacks of a batch on the host, with the same results as rsembed/sparsecore/partitioner.py. The
// SparseCores are independent, so each of them is a task, and the result does not depend on the number of threads.
#include <algorithm>
#include <atomic>
#include <cstdint>
#include <new>
#include <system_error>
#include <thread>
#include <vector>

#include "partition_core.h"

namespace rsembed {
namespace {

struct Task {
  PartitionStack* stack;
  const std::vector<Group>* groups;
  int64_t core;
  bool has_weights, has_long_keys;
};

bool RunTask(const Task& task, bool drops_ids, WorkerMemory& memory) {
  const auto run = [&](auto item) {
    return CorePartitioner<decltype(item)>(*task.stack, *task.groups, task.core, drops_ids, memory).Run();
  };
  if (task.has_weights) return task.has_long_keys ? run(GainedItem<uint64_t>{}) : run(GainedItem<uint32_t>{});
  return task.has_long_keys ? run(Item<uint64_t>{}) : run(Item<uint32_t>{});
}

// Runs tasks on several threads until all tasks are done or one has failed.
class Job {
 public:
  Job(PartitionStack* stacks, int64_t num_stacks, bool drops_ids) : groups_(num_stacks), drops_ids_(drops_ids) {
    for (int64_t k = 0; k < num_stacks; ++k) {
      PartitionStack& stack = stacks[k];
      groups_[k] = GroupsOf(stack);
      bool has_weights = false, has_long_keys = false;
      for (int64_t f = 0; f < stack.num_features; ++f) has_weights |= stack.features[f].weights != nullptr;
      for (const Group& group : groups_[k]) has_long_keys |= group.key_bits() > 32;
      for (int64_t core = 0; core < stack.num_cores; ++core) {
        tasks_.push_back({&stack, &groups_[k], core, has_weights, has_long_keys});
      }
    }
  }

  PartitionStatus Run(int64_t num_threads) {
    std::vector<std::thread> helpers;
    const int64_t num_helpers = std::min<int64_t>(num_threads, tasks_.size()) - 1;
    try {
      for (int64_t k = 0; k < num_helpers; ++k) helpers.emplace_back([this] { Work(); });
    } catch (const std::system_error&) {
      // The system cannot start more threads, so the existing threads do the work.
    }
    Work();
    for (std::thread& helper : helpers) helper.join();
    return static_cast<PartitionStatus>(status_.load());
  }

 private:
  void Work() {
    try {
      WorkerMemory memory;
      for (size_t k; status_.load(std::memory_order_relaxed) == kPartitioned &&
                     (k = next_.fetch_add(1, std::memory_order_relaxed)) < tasks_.size();) {
        if (!RunTask(tasks_[k], drops_ids_, memory)) status_.store(kBadEntry);
      }
    } catch (const std::bad_alloc&) {
      status_.store(kOutOfMemory);
    }
  }

  std::vector<std::vector<Group>> groups_;
  std::vector<Task> tasks_;
  const bool drops_ids_;
  std::atomic<size_t> next_{0};
  std::atomic<int32_t> status_{kPartitioned};
};

}  // namespace
}  // namespace rsembed

// Fills the buffers and counts of all stacks. The result does not depend on the number of threads. If a partition
// exceeds a limit and ids may be dropped, only its entries within the limits are written. If a partition exceeds a
// limit and ids may not be dropped, none of its entries are written. `drops_something` of a stack becomes 1 if a
// partition of the stack exceeds a limit or does not fit in the buffer.
extern "C" __attribute__((visibility("default"))) int32_t rsembed_partition(rsembed::PartitionStack* stacks,
                                                                            int64_t num_stacks, int32_t drops_ids,
                                                                            int64_t num_threads) {
  try {
    return rsembed::Job(stacks, num_stacks, drops_ids != 0).Run(num_threads);
  } catch (const std::bad_alloc&) {
    return rsembed::kOutOfMemory;
  }
}
