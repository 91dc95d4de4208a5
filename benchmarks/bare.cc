// Loops over the ids of a benchmark with nothing around them: what the memory of a machine gives to any implementation.
//
//     bare IDS TABLES ROWS DIM BATCH IDS_PER_BAG
//
// IDS is a file of int32 `[batches, tables, batch, ids per bag]`; DIM is a multiple of 64. Prints milliseconds, median and
// best, at the best of some prefetch distances, on all cores: of a pooled lookup; and of the rest of a step (sums of the
// gradients of equal rows, then each row once), by SGD and by row-wise Adagrad, over entries that were sorted before the
// clock started.
#include <sched.h>
#include <sys/mman.h>

#include <algorithm>
#include <atomic>
#include <chrono>
#include <cmath>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <functional>
#include <numeric>
#include <thread>
#include <vector>

namespace {

typedef float Floats __attribute__((vector_size(32)));
constexpr int kPanel = 64, kVectors = kPanel / 8, kRounds = 4, kResults = 4;

// The cores that this process may run on.
int64_t NumCores() {
  cpu_set_t granted;
  return sched_getaffinity(0, sizeof(granted), &granted) == 0 ? CPU_COUNT(&granted) : 1;
}

// Threads that wait for work without sleeping.
class Team {
 public:
  Team() : size_(NumCores()) {
    for (int64_t k = 1; k < size_; ++k) threads_.emplace_back([this, k] { Serve(k); });
  }
  ~Team() {
    Run(nullptr);
    for (std::thread& thread : threads_) thread.join();
  }

  int64_t size() const { return size_; }

  void Run(std::function<void(int64_t)> job) {
    job_ = std::move(job);
    num_busy_ = size_ - 1;
    ++num_jobs_;
    if (job_) job_(0);
    while (num_busy_ > 0) {
    }
  }

 private:
  void Serve(int64_t number) {
    for (int64_t seen = 0;;) {
      while (num_jobs_ == seen) {
      }
      ++seen;
      const bool is_last = !job_;
      if (!is_last) job_(number);
      --num_busy_;
      if (is_last) return;
    }
  }

  const int64_t size_;
  std::function<void(int64_t)> job_;
  std::atomic<int64_t> num_jobs_{0}, num_busy_{0};
  std::vector<std::thread> threads_;
};

void Prefetch(const float* row, int64_t dim) {
  for (int64_t at = 0; at < dim; at += 16) __builtin_prefetch(row + at);
}

struct Sum {
  Floats lanes[kVectors] = {};
  void Add(const float* from) {
    for (int k = 0; k < kVectors; ++k) lanes[k] += reinterpret_cast<const Floats*>(from)[k];
  }
};

float* HugePages(int64_t count) {
  constexpr int64_t kPage = 2 << 20;
  const int64_t bytes = (4 * count + kPage) / kPage * kPage;
  float* const data = static_cast<float*>(aligned_alloc(kPage, bytes));
  if (data == nullptr) exit(1);
  madvise(data, bytes, MADV_HUGEPAGE);
  std::fill_n(data, count, 1.0f);
  return data;
}

void Report(const char* what, int64_t num_batches, const std::function<void(int64_t batch, int64_t ahead)>& run) {
  double median = 1e9, best = 1e9;
  for (int64_t ahead : {4, 8, 16, 24, 32, 64, 96}) {
    std::vector<double> times;
    for (int64_t k = 0; k < kRounds * num_batches; ++k) {
      const auto start = std::chrono::steady_clock::now();
      run(k % num_batches, ahead);
      times.push_back(1e3 * std::chrono::duration<double>(std::chrono::steady_clock::now() - start).count());
    }
    std::sort(times.begin(), times.end());
    median = std::min(median, times[times.size() / 2]);
    best = std::min(best, times[0]);
  }
  printf("%s %.2f %.2f\n", what, median, best);
}

}  // namespace

int main(int argc, char** argv) {
  if (argc != 7) return 2;
  const int64_t tables = atoll(argv[2]), rows = atoll(argv[3]), dim = atoll(argv[4]), length = atoll(argv[6]);
  const int64_t bags = tables * atoll(argv[5]), entries = bags * length;
  std::vector<std::vector<uint32_t>> batches, sorted_rows, sorted_bags;
  FILE* const file = fopen(argv[1], "rb");
  for (std::vector<int32_t> ids(entries); file && fread(ids.data(), 4, entries, file) == size_t(entries);) {
    std::vector<uint32_t> batch(entries), order(entries);
    for (int64_t i = 0; i < entries; ++i) batch[i] = i / (entries / tables) * rows + ids[i];
    std::iota(order.begin(), order.end(), 0);
    std::stable_sort(order.begin(), order.end(), [&](uint32_t a, uint32_t b) { return batch[a] < batch[b]; });
    sorted_rows.emplace_back();
    sorted_bags.emplace_back();
    for (uint32_t entry : order) {
      sorted_rows.back().push_back(batch[entry]);
      sorted_bags.back().push_back(entry / length);
    }
    batches.push_back(std::move(batch));
  }
  if (batches.empty()) return 2;
  float* const table = HugePages(tables * rows * dim);
  // Results of calls that follow each other lie in different places: between them training computes other things, and no
  // framework gives a result the place of the last one, still in the caches.
  float* const results = HugePages(kResults * bags * dim);
  float* const output = results;
  float* const state = HugePages(tables * rows);
  Team team;

  Report("lookup", batches.size(), [&](int64_t number, int64_t ahead) {
    const uint32_t* const ids = batches[number].data();
    float* const result = results + number % kResults * bags * dim;
    team.Run([&, ids, result](int64_t thread) {
      for (int64_t bag = thread * bags / team.size(); bag < (thread + 1) * bags / team.size(); ++bag) {
        for (int64_t column = 0; column < dim; column += kPanel) {
          Sum sum;
          for (int64_t i = bag * length; i < (bag + 1) * length; ++i) {
            if (column == 0 && i + ahead < entries) Prefetch(table + ids[i + ahead] * dim, dim);
            sum.Add(table + ids[i] * dim + column);
          }
          for (int k = 0; k < kVectors; ++k) reinterpret_cast<Floats*>(result + bag * dim + column)[k] = sum.lanes[k];
        }
      }
    });
  });
  // Sums the gradients of equal rows, panel by panel, and hands each row with its sum to `step`.
  const auto update = [&](const char* what, const auto& step) {
    Report(what, batches.size(), [&](int64_t number, int64_t ahead) {
      const uint32_t *const ids = sorted_rows[number].data(), *const bag = sorted_bags[number].data();
      const auto begins = [&](int64_t i) { return i == 0 || i == entries || ids[i] != ids[i - 1]; };
      team.Run([&](int64_t thread) {
        int64_t first = thread * entries / team.size(), end = (thread + 1) * entries / team.size();
        while (!begins(first)) ++first;
        while (!begins(end)) ++end;
        std::vector<Sum> sums(dim / kPanel);
        for (int64_t last = first; first < end; first = last) {
          for (int64_t panel = 0; panel < dim / kPanel; ++panel) {
            Sum sum;
            last = first;
            do {
              if (panel == 0 && last + ahead < entries) {
                if (begins(last + ahead)) {
                  Prefetch(table + ids[last + ahead] * dim, dim);
                  __builtin_prefetch(state + ids[last + ahead]);
                }
                Prefetch(output + bag[last + ahead] * dim, dim);
              }
              sum.Add(output + bag[last] * dim + panel * kPanel);
            } while (!begins(++last));
            sums[panel] = sum;
          }
          step(ids[first], sums);
        }
      });
    });
  };
  const auto step_row = [&](uint32_t row, const std::vector<Sum>& sums, float rate) {
    Floats* const values = reinterpret_cast<Floats*>(table + row * dim);
    for (size_t panel = 0; panel < sums.size(); ++panel) {
      for (int k = 0; k < kVectors; ++k) values[panel * kVectors + k] -= rate * sums[panel].lanes[k];
    }
  };
  update("SGD", [&](uint32_t row, const std::vector<Sum>& sums) { step_row(row, sums, 1e-9f); });
  update("Adagrad", [&](uint32_t row, const std::vector<Sum>& sums) {
    Floats squares = {};
    for (const Sum& sum : sums) {
      for (const Floats& lanes : sum.lanes) squares += lanes * lanes;
    }
    float total = 0.0f;
    for (int lane = 0; lane < 8; ++lane) total += squares[lane];
    state[row] += total / static_cast<float>(dim);
    step_row(row, sums, 1e-9f / (std::sqrt(state[row]) + 1e-8f));
  });
}
