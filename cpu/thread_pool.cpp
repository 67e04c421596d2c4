// The pool: workers that sleep, a list of open jobs, and a caller that works on its own job too.
#include "thread_pool.h"

#include <algorithm>
#include <atomic>
#include <condition_variable>
#include <cstdlib>
#include <exception>
#include <list>
#include <memory>
#include <mutex>
#include <thread>
#include <vector>

#include "memory.h"

namespace lattice {
namespace {

int default_threads() {
  if (const char* text = std::getenv("MLX_LATTICE_THREADS")) {
    int n = std::atoi(text);
    if (n > 0) return n;
  }
  return int(std::max(1u, std::thread::hardware_concurrency()));
}

std::atomic<int>& thread_count() {
  static std::atomic<int> count{default_threads()};
  return count;
}

struct Job {
  const std::function<void(int64_t)>& unit;
  int64_t units;
  int helpers_wanted;
  std::atomic<int64_t> next{0};
  int helpers_inside = 0;
  std::exception_ptr error{};

  void work(std::mutex& mutex) {
    for (int64_t u; (u = next.fetch_add(1, std::memory_order_relaxed)) < units;) {
      try {
        unit(u);
      } catch (...) {
        std::lock_guard lock(mutex);
        if (!error) error = std::current_exception();
        next.store(units);
      }
    }
  }
};

class Pool {
 public:
  void work(int64_t units, int threads, const std::function<void(int64_t)>& unit) {
    Job job{unit, units, threads - 1};
    std::unique_lock lock(mutex_);
    while (int(workers_.size()) < threads - 1) workers_.emplace_back([this] { loop(); });
    jobs_.push_back(&job);
    lock.unlock();
    for (int i = 0; i < threads - 1; ++i) wake_.notify_one();
    job.work(mutex_);
    lock.lock();
    jobs_.remove(&job);
    left_.wait(lock, [&] { return job.helpers_inside == 0; });
    if (job.error) std::rethrow_exception(job.error);
  }

 private:
  void loop() {
    std::unique_lock lock(mutex_);
    for (;;) {
      auto open = std::find_if(jobs_.begin(), jobs_.end(), [](Job* j) {
        return j->helpers_wanted > 0 && j->next.load(std::memory_order_relaxed) < j->units;
      });
      if (open == jobs_.end()) {
        wake_.wait(lock);
        continue;
      }
      Job* job = *open;
      --job->helpers_wanted;
      ++job->helpers_inside;
      lock.unlock();
      job->work(mutex_);
      lock.lock();
      if (--job->helpers_inside == 0) left_.notify_all();
    }
  }

  std::mutex mutex_;
  std::condition_variable wake_, left_;
  std::list<Job*> jobs_;
  std::vector<std::thread> workers_;
};

// Never destroyed: workers must not be joined from static destructors while the interpreter shuts down.
Pool& pool() {
  static auto* instance = new Pool;
  return *instance;
}

struct Buffer {
  void* data = nullptr;
  size_t bytes = 0;
  ~Buffer() { free_aligned(data); }
};

}  // namespace

int num_threads() { return thread_count(); }
void set_num_threads(int n) { thread_count() = n > 0 ? n : default_threads(); }

void parallel_for(int64_t units, const std::function<void(int64_t)>& unit) {
  int threads = int(std::min<int64_t>(num_threads(), units));
  if (threads <= 1) {
    for (int64_t u = 0; u < units; ++u) unit(u);
    return;
  }
  pool().work(units, threads, unit);
}

void parallel_range(int64_t n, int64_t grain, const std::function<void(int64_t, int64_t)>& range) {
  if (n <= 0) return;
  int64_t pieces = std::clamp<int64_t>(n / std::max<int64_t>(grain, 1), 1, 4 * num_threads());
  parallel_for(pieces, [&](int64_t p) { range(n * p / pieces, n * (p + 1) / pieces); });
}

void* scratch_bytes(int slot, size_t bytes) {
  constexpr int slots = 8;
  static thread_local Buffer buffers[slots];
  Buffer& b = buffers[slot];
  if (b.bytes < bytes) {
    free_aligned(b.data);
    b.data = nullptr;
    b.bytes = 0;
    b.data = aligned_bytes(bytes);
    b.bytes = bytes;
  }
  return b.data;
}

}  // namespace lattice
