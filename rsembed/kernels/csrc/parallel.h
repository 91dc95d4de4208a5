// Runs the blocks of a computation on XLA's thread pool.
#pragma once

#include <algorithm>
#include <atomic>
#include <condition_variable>
#include <cstdint>
#include <memory>
#include <mutex>
#include <new>
#include <thread>

#if defined(__x86_64__)
#include <immintrin.h>
#endif
#if defined(__linux__)
#include <sched.h>
#endif

#include "xla/ffi/api/ffi.h"

namespace rsembed {

// Floating-point mode of a thread. Each thread has a setting that flushes subnormals to zero, but results must not
// depend on which thread runs a block.
class FloatingPointMode {
 public:
#if defined(__x86_64__)
  FloatingPointMode() : control_(_mm_getcsr()) {}
  void Set() const { _mm_setcsr(control_); }

 private:
  unsigned control_;
#else
  void Set() const {}
#endif
};

// Number of CPU cores granted to this process, read once. A container, a batch system or taskset can grant fewer cores
// than the machine has. If there were more threads than granted cores, spinning threads would take time from working
// threads.
inline int64_t NumCores() {
  static const int64_t num_cores = [] {
#if defined(__linux__)
    cpu_set_t granted;
    if (sched_getaffinity(0, sizeof(granted), &granted) == 0) return std::max(1, CPU_COUNT(&granted));
#endif
    return std::max(1, static_cast<int>(std::thread::hardware_concurrency()));
  }();
  return num_cores;
}

// Runs the blocks of a call on the calling thread and on helper threads of the pool. The calling thread waits only for
// blocks that other threads have begun, and never for a thread to start, so the call cannot block if the pool is busy
// or has a single thread. After a call of ForEachBlock, helper threads spin for a short time, because the next call
// often begins microseconds later and waking a thread takes longer.
class Workers {
 public:
  explicit Workers(xla::ffi::ThreadPool pool) : pool_(pool), crew_(std::make_shared<Crew>()) {
    // With many devices, XLA's pool can have more threads than there are cores. Using more threads than cores only
    // makes a call slower.
    num_threads_ = std::clamp<int64_t>(pool_.num_threads(), 1, NumCores());
  }
  Workers(const Workers&) = delete;
  ~Workers() { crew_->is_dismissed.store(true, std::memory_order_release); }

  int64_t num_threads() const { return num_threads_; }

  template <typename Body>
  void ForEachBlock(int64_t num_blocks, const Body& body) {
    const int64_t num_helpers = std::min(num_threads_, num_blocks) - 1;
    if (num_helpers <= 0) {
      for (int64_t block = 0; block < num_blocks; ++block) body(block);
      return;
    }
    auto job = std::make_shared<Job>();
    job->num_blocks = num_blocks;
    job->body = &body;
    job->run = [](const void* b, int64_t block) { (*static_cast<const Body*>(b))(block); };
    crew_->Offer(job);
    for (int64_t present = crew_->num_members.load(); present < num_helpers; ++present) {
      crew_->num_members.fetch_add(1);
      pool_.Schedule([crew = crew_] { crew->Serve(); });
    }
    job->Work();
    job->WaitForOthers();
    if (job->is_out_of_memory.load(std::memory_order_relaxed)) throw std::bad_alloc();
  }

  // Calls body(first, last) for ranges of at most `block_size` numbers.
  template <typename Body>
  void ForEachRange(int64_t count, int64_t block_size, const Body& body) {
    ForEachBlock((count + block_size - 1) / block_size, [&](int64_t block) {
      body(block * block_size, std::min(count, (block + 1) * block_size));
    });
  }

 private:
  static void Pause() {
#if defined(__x86_64__)
    _mm_pause();
#endif
  }

  // Progress of one call of ForEachBlock, shared by the calling thread and its helper threads. A helper thread that
  // starts after ForEachBlock has returned reads only this struct, because all blocks are done.
  struct Job {
    std::atomic<int64_t> next{0};
    std::atomic<int64_t> num_done{0};
    std::atomic<bool> is_out_of_memory{false};  // the caller throws the error, because a helper must not throw
    int64_t num_blocks;
    const void* body;
    void (*run)(const void*, int64_t);
    FloatingPointMode mode;
    std::mutex mutex;
    std::condition_variable all_done;

    void Work() {
      for (int64_t block; (block = next.fetch_add(1, std::memory_order_relaxed)) < num_blocks;) {
        try {
          run(body, block);
        } catch (const std::bad_alloc&) {
          is_out_of_memory.store(true, std::memory_order_relaxed);
        }
        if (num_done.fetch_add(1, std::memory_order_acq_rel) + 1 == num_blocks) {
          std::lock_guard<std::mutex> lock(mutex);
          all_done.notify_one();
        }
      }
    }

    void Help() {
      const FloatingPointMode own;
      mode.Set();
      Work();
      own.Set();
    }

    bool IsDone() const { return num_done.load(std::memory_order_acquire) == num_blocks; }

    void WaitForOthers() {
      // Spin before sleeping, because a block takes microseconds, and sleeping and waking up takes longer.
      for (int spin = 0; spin < 4096 && !IsDone(); ++spin) Pause();
      if (IsDone()) return;
      std::unique_lock<std::mutex> lock(mutex);
      all_done.wait(lock, [this] { return IsDone(); });
    }
  };

  // The threads of the pool that help with one parallel loop. They can run after the loop has returned, so a Crew can
  // outlive its loop.
  struct Crew {
    std::atomic<int64_t> num_members{0};  // helpers that run, or that the pool has yet to start
    std::atomic<int64_t> num_jobs{0};
    std::atomic<bool> is_dismissed{false};
    std::mutex mutex;
    std::shared_ptr<Job> job;

    void Offer(const std::shared_ptr<Job>& next) {
      std::lock_guard<std::mutex> lock(mutex);
      job = next;
      num_jobs.fetch_add(1, std::memory_order_release);
    }

    void Serve() {
      int64_t num_seen = 0;
      for (int spin = 0; spin < 1024 && !is_dismissed.load(std::memory_order_acquire); ++spin) {
        if (num_jobs.load(std::memory_order_acquire) == num_seen) {
          Pause();
          continue;
        }
        std::shared_ptr<Job> current;
        {
          std::lock_guard<std::mutex> lock(mutex);
          current = job;
          num_seen = num_jobs.load(std::memory_order_relaxed);
        }
        current->Help();
        spin = 0;
      }
      num_members.fetch_sub(1);
    }
  };

  xla::ffi::ThreadPool pool_;
  std::shared_ptr<Crew> crew_;
  int64_t num_threads_;
};

}  // namespace rsembed
