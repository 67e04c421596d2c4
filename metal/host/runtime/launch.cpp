// One dispatch: buffers in, threadgroups run, buffers and report out.
//
// A checked launch runs on one OS thread in the arena of buffers.cpp. A fast launch may
// share its threadgroups among several OS threads and runs on copies of its buffers
// that end at unmapped pages (inputs are read-only there too), so that most accesses
// out of bounds trap.
//
// A trap inside a kernel ends the launch, not the process: the signal handler leaves
// the fiber for good by switching to the worker's own stack.
#include <signal.h>
#include <sys/mman.h>
#include <ucontext.h>

#include <algorithm>
#include <chrono>
#include <cstdio>
#include <cstring>
#include <memory>
#include <mutex>
#include <numeric>
#include <thread>

#include "state.h"

namespace mtlhost {

constinit thread_local Worker* worker = nullptr;

namespace {

// Buffers of a fast launch, each between two runs of unmapped pages.
class GuardedBuffers {
 public:
  GuardedBuffers(Launch& launch, Buffer* buffers, int count)
      : buffers_(buffers), maps_(count) {
    for (int i = 0; i < count; ++i) {
      const Buffer& b = buffers[i];
      size_t body = b.size ? (b.start + b.size + kPage - 1) / kPage * kPage : 0;
      maps_[i].size = body + 2 * kGuard;
      maps_[i].begin =
          static_cast<char*>(mmap(nullptr, maps_[i].size, PROT_NONE,
                                  MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0));
      char* inside = maps_[i].begin + kGuard;
      if (body) mprotect(inside, body, PROT_READ | PROT_WRITE);
      size_t before = body ? (body - b.start - b.size) / 16 * 16 + b.start : 0;
      maps_[i].data = inside + before;
      memcpy(maps_[i].data, b.data, b.size);
      if (body && !(b.flags & kOutput)) mprotect(inside, body, PROT_READ);
      launch.buffers[i] = maps_[i].data;
    }
  }
  ~GuardedBuffers() {
    for (size_t i = 0; i < maps_.size(); ++i) {
      if (buffers_[i].flags & kOutput)
        memcpy(buffers_[i].data, maps_[i].data, buffers_[i].size);
      munmap(maps_[i].begin, maps_[i].size);
    }
  }

 private:
  // Wide enough that a stray 32-bit index cannot jump over it; it costs addresses only.
  static constexpr size_t kPage = 16384, kGuard = size_t(1) << 33;
  struct Map {
    char *begin, *data;
    size_t size;
  };
  Buffer* buffers_;
  std::vector<Map> maps_;
};

// While any launch runs, traps come to us first.
class TrapHandlers {
 public:
  TrapHandlers() {
    std::lock_guard<std::mutex> lock(mutex_);
    if (users_++) return;
    struct sigaction action{};
    action.sa_sigaction = handle;
    action.sa_flags = SA_SIGINFO | SA_ONSTACK | SA_NODEFER;
    for (int i = 0; i < 3; ++i) sigaction(kSignals[i], &action, &before_[i]);
  }
  ~TrapHandlers() {
    std::lock_guard<std::mutex> lock(mutex_);
    if (!--users_) restore();
  }

 private:
  static constexpr int kSignals[3] = {SIGSEGV, SIGBUS, SIGFPE};
  static inline std::mutex mutex_;
  static inline int users_ = 0;
  static inline struct sigaction before_[3];

  static void restore() {
    for (int i = 0; i < 3; ++i) sigaction(kSignals[i], &before_[i], nullptr);
  }
  static void handle(int signal, siginfo_t* info, void* context) {
    Worker* w = worker;
    if (!w || !w->current) return restore();  // not in a kernel: trap again, unhandled
    auto* machine = &static_cast<ucontext_t*>(context)->uc_mcontext;
#if defined(__APPLE__) && defined(__aarch64__)
    auto pc = (const char*)(*machine)->__ss.__pc;
#elif defined(__APPLE__)
    auto pc = (const char*)(*machine)->__ss.__rip;
#elif defined(__aarch64__)
    auto pc = (const char*)machine->pc;
#else
    auto pc = (const char*)machine->gregs[REG_RIP];
#endif
    const char* kind = signal == SIGFPE               ? "integer division by zero"
                       : w->owns_stack(info->si_addr) ? "thread stack overflow"
                                                      : "memory access out of bounds";
    std::string message = describe(*w->current);
    if (signal != SIGFPE) message = format("address %p, ", info->si_addr) + message;
    fail(w, kind, pc + 1, message);
  }
};

void run_threadgroups(Worker* w, Launch* launch) {
  Worker* outer = std::exchange(worker, w);
  stack_t stack{}, before{};
  stack.ss_sp = w->signal_stack.data();
  stack.ss_size = w->signal_stack.size();
  sigaltstack(&stack, &before);
  w->launch = launch;
  w->failed = false;
  w->counts = {};
  w->states_of = nullptr;
  while (!launch->stop) {
    uint64_t i = launch->next_group++;
    if (i >= launch->group_count) break;
    if (launch->options.order == kReverse) i = launch->group_count - 1 - i;
    if (!launch->group_order.empty()) i = launch->group_order[i];
    run_threadgroup(w, i);
  }
  sigaltstack(&before, nullptr);
  worker = outer;
}

using Pool = std::vector<std::unique_ptr<Worker>>;

// Workers that no launch uses, for the next one of any thread: stacks take thousands of
// mappings, and MLX's stream threads never end. Never freed: stream threads may still run at exit.
class Pools {
 public:
  Pool take() {
    std::lock_guard<std::mutex> lock(mutex_);
    if (idle_.empty()) return {};
    Pool pool = std::move(idle_.back());
    idle_.pop_back();
    return pool;
  }
  void give(Pool pool) {
    std::lock_guard<std::mutex> lock(mutex_);
    idle_.push_back(std::move(pool));
  }

 private:
  std::mutex mutex_;
  std::vector<Pool> idle_;
};

void run_on_workers(Launch& launch, Counts& total) {
  static auto* pools = new Pools;
  Pool pool = pools->take();
  size_t count = launch.options.checked ? 1 : std::max(1u, launch.options.workers);
  while (pool.size() < count) pool.emplace_back(new_worker());
  for (size_t i = 0; i < count; ++i)
    pool[i]->random_state =
        0x9E3779B97F4A7C15ull * (uint64_t(launch.options.seed) * 64 + i + 1) | 1;
  if (launch.options.order == kRandom) {
    auto& order = launch.group_order;
    order.resize(launch.group_count);
    std::iota(order.begin(), order.end(), 0u);
    for (size_t i = order.size(); i > 1; --i)
      std::swap(order[i - 1], order[random_bits(pool[0].get()) % i]);
  }
  std::vector<std::thread> others;
  for (size_t i = 1; i < count; ++i)
    others.emplace_back(run_threadgroups, pool[i].get(), &launch);
  run_threadgroups(pool[0].get(), &launch);
  for (auto& thread : others) thread.join();
  for (size_t i = 0; i < count; ++i) {
    const Counts& c = pool[i]->counts;
    total.threadgroups += c.threadgroups;
    total.threads += c.threads;
    total.barriers += c.barriers;
    total.simdgroup_barriers += c.simdgroup_barriers;
    total.collectives += c.collectives;
    total.matrix_flop += c.matrix_flop;
    total.threadgroup_memory = std::max(total.threadgroup_memory, c.threadgroup_memory);
    total.device_read_bytes += c.device_read_bytes;
    total.device_written_bytes += c.device_written_bytes;
    total.device_atomics += c.device_atomics;
    total.threadgroup_read_bytes += c.threadgroup_read_bytes;
    total.threadgroup_written_bytes += c.threadgroup_written_bytes;
    total.threadgroup_atomics += c.threadgroup_atomics;
    total.matrix_loads += c.matrix_loads;
    total.matrix_stores += c.matrix_stores;
    total.divisions32 += c.divisions32;
    total.divisions64 += c.divisions64;
    total.multiplications32 += c.multiplications32;
    total.multiplications64 += c.multiplications64;
    total.conversions += c.conversions;
    if (pool[i]->failed) launch.faults.push_back(pool[i]->fatal);
  }
  pools->give(std::move(pool));
}

}  // namespace
}  // namespace mtlhost

using namespace mtlhost;

extern "C" int mtl_launch(Invoke invoke, Buffer* buffers, int count,
                          const LaunchOptions* options, Counts* counts, char* report,
                          size_t report_size) {
  auto start = std::chrono::steady_clock::now();
  Launch launch;
  launch.invoke = invoke;
  launch.options = *options;
  launch.described = buffers;
  const U3& grid = options->grid;
  U3& group = launch.options.threadgroup;
  group = {std::min(group.x, grid.x), std::min(group.y, grid.y),
           std::min(group.z, grid.z)};
  *counts = {};
  if (uint64_t(group.x) * group.y * group.z > kMaxThreads) {
    launch.faults.push_back({"threadgroup too large", nullptr,
                             format("%u x %u x %u threads; Metal allows %d", group.x,
                                    group.y, group.z, kMaxThreads),
                             1});
  } else {
    if (grid.x && grid.y && grid.z)
      launch.groups = {(grid.x + group.x - 1) / group.x,
                       (grid.y + group.y - 1) / group.y,
                       (grid.z + group.z - 1) / group.z};
    launch.group_count = uint64_t(launch.groups.x) * launch.groups.y * launch.groups.z;
    launch.buffers.resize(count);
    TrapHandlers handlers;
    if (options->checked) {
      map_arena(launch, buffers, count);
      run_on_workers(launch, *counts);
      unmap_arena(launch, buffers, count);
    } else {
      GuardedBuffers guarded(launch, buffers, count);
      run_on_workers(launch, *counts);
    }
  }
  std::string text;
  for (auto& f : launch.faults)
    text += f.kind + "\t" + place(f.site) + format("\t%lu\t", (unsigned long)f.times) +
            f.message + "\n";
  snprintf(report, report_size, "%s", text.c_str());
  counts->seconds =
      std::chrono::duration<double>(std::chrono::steady_clock::now() - start).count();
  return int(launch.faults.size());
}
