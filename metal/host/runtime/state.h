// What the runtime knows while a launch is in progress.
//
// A Launch is one dispatch. Its threadgroups are run one at a time by a Worker, an OS
// thread with 1024 fibers, one per GPU thread. A Thread is UNSTARTED until first chosen
// and owns a fiber (a stack) only from then until it ends; fibers are reused, so a
// kernel without barriers runs its threads on one stack, one after the other.
//
// A Simdgroup is five bit masks over its 32 lanes. The lanes that stand in `waiting`
// have called a collective; it runs when they are all the lanes still alive.
#pragma once
#include <atomic>
#include <map>
#include <string>
#include <unordered_map>
#include <utility>
#include <vector>

#include "interface.h"

namespace mtlhost {

constexpr size_t kStackBytes = 128 * 1024;
constexpr size_t kBelowStacks = 64 << 20;
constexpr int kMaxThreads = 1024, kMaxSimdgroups = 32;
constexpr size_t kArenaBytes = 1 << 20;            // threadgroup memory and red zones
constexpr size_t kThreadgroupMemoryLimit = 32768;  // of every Apple GPU
constexpr size_t kRedZone = 256, kDeviceRedZone = 4096;
constexpr size_t kLineBytes = 128;  // of an Apple GPU's caches
constexpr uint32_t kDeviceFlag = 1, kThreadgroupFlag = 2;  // of metal::mem_flags

struct Fiber {
  void* stack_pointer = nullptr;
  char* top = nullptr;
};

enum class Status : uint8_t {
  kUnstarted,
  kReady,
  kRunning,
  kAtCollective,
  kAtBarrier,
  kDone
};

struct alignas(64) Thread {
  Fiber* fiber;
  const void* site;  // return address of the call that it waits in
  Combine combine;
  void* argument;
  uint64_t flop;
  ThreadState* state;
  uint32_t barrier_flags;
  Status status;
  uint8_t lanes;  // what its collective needs
};

struct Simdgroup {
  uint32_t all, unstarted, ready, waiting, at_barrier, done;
  uint32_t epoch;    // simdgroup_barriers over threadgroup memory so far
  const void* site;  // of the waiting lanes, unless `mixed`
  bool mixed;        // lanes wait at different calls
  bool needs_all;    // some waiting lane needs all 32
};

struct Variable {  // of threadgroup memory
  const void* key;
  size_t offset, size;
  const char* name;
};

struct Fault {
  std::string kind;
  const void* site;
  std::string message;
  uint64_t times;
};

// Per byte of threadgroup memory: the last writer and one reader, each with the
// epochs of the barriers that order it.
struct ThreadgroupShadow {
  uint32_t writer, write_epoch, write_simd_epoch;
  uint32_t reader, read_epoch, read_simd_epoch;
  uint8_t many_readers, written, by_atomic;
};

struct DeviceBuffer {
  char* begin = nullptr;
  uint64_t size = 0;
  bool output = false;
  uint64_t read_bytes = 0, written_bytes = 0, atomics = 0;
  uint64_t read_lines = 0, read_line_bytes = 0;
  uint64_t written_lines = 0, written_line_bytes = 0;
};

// Bytes of a line that a simdgroup asked for in this step, a bit each.
struct LineUse {
  DeviceBuffer* buffer = nullptr;
  uint64_t asked[2] = {0, 0};
};

// A copy of all buffers with red zones between them, and the shadow of each byte.
struct DeviceArena {
  char* data = nullptr;
  size_t size = 0;
  uint8_t* state = nullptr;    // per byte, bits of ByteState
  uint64_t* writer = nullptr;  // per 4 bytes: thread + 1 : 32, epoch : 27, atomic, mask
  uint64_t* reader = nullptr;
  std::vector<DeviceBuffer> buffers;
};
enum ByteState : uint8_t {
  kAddressable = 1,
  kWritten = 2,
  kWrittenHere = 4,
  kReadHere = 8
};

struct Launch {
  Invoke invoke;
  LaunchOptions options;
  const Buffer* described;
  std::vector<void*> buffers;  // what the kernel gets
  U3 groups{0, 0, 0};
  uint64_t group_count = 0;
  std::vector<uint32_t> group_order;  // a permutation, when the order is random
  std::atomic<uint64_t> next_group{0};
  std::atomic<bool> stop{false};
  DeviceArena arena;
  std::vector<Fault> faults;
  std::map<std::pair<std::string, const void*>, size_t> fault_index;
};

struct Worker {
  Launch* launch = nullptr;
  char* stacks = nullptr;
  std::vector<Fiber> fibers;
  std::vector<Fiber*> free_fibers;
  int used_fibers = 0;
  void* main_stack = nullptr;
  Thread threads[kMaxThreads];
  ThreadState states[kMaxThreads];
  Simdgroup simdgroups[kMaxSimdgroups];
  int thread_count = 0, simdgroup_count = 0;
  int current_simdgroup = 0, done = 0, at_barrier = 0;
  uint32_t runnable = 0;  // a bit per simdgroup
  Thread* current = nullptr;
  uint32_t threadgroup_epoch = 0, device_epoch = 0;
  uint64_t group = 0;
  std::vector<Variable> variables;
  size_t arena_used = 0, memory_used = 0;
  char* arena = nullptr;
  std::vector<ThreadgroupShadow> shadow;
  Fault fatal;
  bool failed = false;
  uint64_t random_state = 1;
  Counts counts{};
  std::vector<char> signal_stack = std::vector<char>(64 << 10);
  const void* states_of = nullptr;  // the launch and group shape that `states` holds
  U3 states_shape{0, 0, 0};
  // By simdgroup; reads, then writes.
  std::unordered_map<size_t, LineUse> lines[kMaxSimdgroups][2];

  int index(const Thread* t) const { return int(t - threads); }
  int simdgroup_of(const Thread* t) const { return index(t) >> 5; }
  uint32_t lane_bit(const Thread* t) const { return 1u << (index(t) & 31); }
  bool owns_stack(const void* p) const {
    size_t size = kBelowStacks + kStackBytes * (kMaxThreads + 2);
    return size_t((const char*)p - (stacks - kBelowStacks)) < size;
  }
};

// The worker of this OS thread; null outside a launch.
extern constinit __attribute__((tls_model("initial-exec"))) thread_local Worker* worker;

// faults.cpp
std::string format(const char* pattern, ...) __attribute__((format(printf, 1, 2)));
std::string describe(const Thread&);
std::string place(const void* site);  // "conv.metal:31", or "" without debug lines
bool seen(Worker*, const char* kind, const void* site);  // counts it again if so
void fault(Worker*, const char* kind, const void* site, std::string message);
[[noreturn]] void fail(Worker*, const char* kind, const void* site,
                       std::string message);

// lines.cpp
void note_line(Worker*, DeviceBuffer*, size_t offset, unsigned size, bool write);
void end_step(Worker*);

// fibers.cpp
Worker* new_worker();
Fiber* take_fiber(Worker*);
void switch_stack(void** save, void* to);

// schedule.cpp
uint32_t random_bits(Worker*);
int pick(Worker*, uint32_t mask);
void set_ready(Worker*, int simdgroup, uint32_t lanes);
Thread* next_thread(Worker*);
void complete(Worker*, int simdgroup, uint32_t lanes);
void reschedule(Worker*);
void run_threadgroup(Worker*, uint64_t group);

// shadow_*.cpp: what checked kernels read and write
void device_access(Worker*, size_t offset, unsigned size, bool write, bool atomic,
                   const void* site);
void threadgroup_access(Worker*, size_t offset, unsigned size, bool write, bool atomic,
                        const void* site);
// hooks.cpp
void shared_access(Worker*, const void* address, unsigned size, bool write, bool atomic,
                   const void* site);

// Most accesses are to the thread's own stack: nothing is saved for them.
inline void access(const void* address, unsigned size, bool write, bool atomic,
                   const void* site) {
  Worker* w = worker;
  if (!w || w->owns_stack(address)) return;
  shared_access(w, address, size, write, atomic, site);
}

// buffers.cpp
void map_arena(Launch&, Buffer*, int count);
void unmap_arena(Launch&, Buffer*, int count);

}  // namespace mtlhost
