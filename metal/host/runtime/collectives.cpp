// What a running kernel calls: collectives, barriers, threadgroup memory and atomics.
//
// A thread that calls a collective records the call's return address, its argument and
// its needs, and gives way to the others; the lanes that wait at one address form the
// operation. The last lane to arrive completes it and goes on without a switch.
//
// Threadgroup memory comes from an arena. A variable is found by the address of a
// static in the kernel, so that every thread of the group gets the same bytes. They
// start out as 0xAF, since Metal promises nothing: large as integers, tiny as floats.
#include <algorithm>
#include <cstring>

#include "state.h"

using namespace mtlhost;

#define CALLER __builtin_return_address(0)

static void arrive(Worker* w, Thread* t, const void* site, Combine combine,
                   void* argument, uint32_t lanes, uint64_t flop) {
  int group = w->simdgroup_of(t);
  Simdgroup& s = w->simdgroups[group];
  t->site = site;
  t->combine = combine;
  t->argument = argument;
  t->lanes = uint8_t(lanes);
  t->flop = flop;
  t->status = Status::kAtCollective;
  if (!s.waiting) {
    s.site = site;
    s.mixed = s.needs_all = false;
  }
  s.mixed |= site != s.site;
  s.needs_all |= lanes == kAllLanes;
  s.waiting |= w->lane_bit(t);
  bool last =
      s.waiting == (s.all & ~s.done) && !s.mixed && !(s.needs_all && ~s.waiting);
  if (last && w->launch->options.order != kRandom) {
    complete(w, group, s.waiting);
    s.ready &= ~w->lane_bit(t);
    if (!s.ready) w->runnable &= ~(1u << group);
    t->status = Status::kRunning;
    return;
  }
  reschedule(w);
}

namespace {
struct SimdgroupBarrier {
  Worker* worker;
  int simdgroup;
  uint32_t flags;
};
}  // namespace

static void pass_simdgroup_barrier(void** lanes, uint32_t mask) {
  auto* b = static_cast<SimdgroupBarrier*>(lanes[__builtin_ctz(mask)]);
  if (b->flags & kThreadgroupFlag) b->worker->simdgroups[b->simdgroup].epoch++;
  b->worker->counts.simdgroup_barriers++;
  b->worker->counts.collectives--;
}

extern "C" {

const ThreadState* mtl_thread() { return worker->current->state; }

__attribute__((noinline)) void mtl_collective(Combine combine, void* argument,
                                              uint32_t lanes, uint64_t flop) {
  arrive(worker, worker->current, CALLER, combine, argument, lanes, flop);
}

__attribute__((noinline)) void mtl_simdgroup_barrier(uint32_t flags) {
  Worker* w = worker;
  SimdgroupBarrier b{w, w->simdgroup_of(w->current), flags};
  arrive(w, w->current, CALLER, pass_simdgroup_barrier, &b, kLiveLanes, 0);
}

__attribute__((noinline)) void mtl_threadgroup_barrier(uint32_t flags) {
  Worker* w = worker;
  Thread* t = w->current;
  t->site = CALLER;
  t->barrier_flags = flags;
  t->status = Status::kAtBarrier;
  w->simdgroups[w->simdgroup_of(t)].at_barrier |= w->lane_bit(t);
  w->at_barrier++;
  reschedule(w);
}

void* mtl_threadgroup_variable(const void* key, size_t size, size_t align,
                               const char* name) {
  Worker* w = worker;
  for (auto& v : w->variables)
    if (v.key == key) return w->arena + v.offset;
  align = std::max<size_t>(align, 16);
  size_t offset = (w->arena_used + align - 1) / align * align;
  w->memory_used = (w->memory_used + align - 1) / align * align + size;
  if (w->memory_used > kThreadgroupMemoryLimit)
    fail(w, "too much threadgroup memory", CALLER,
         format("'%s' brings it to %zu bytes; Apple GPUs have %zu", name,
                w->memory_used, kThreadgroupMemoryLimit));
  w->counts.threadgroup_memory =
      std::max<uint64_t>(w->counts.threadgroup_memory, w->memory_used);
  w->variables.push_back({key, offset, size, name});
  bool checked = w->launch->options.checked;
  w->arena_used = offset + size + (checked ? kRedZone : 0);
  memset(w->arena + offset, 0xAF, size);
  if (checked) {
    w->shadow.resize(kArenaBytes);
    std::fill_n(&w->shadow[offset], size, ThreadgroupShadow{});
  }
  return w->arena + offset;
}

__attribute__((noinline)) void mtl_atomic(const volatile void* address, uint32_t size,
                                          uint32_t kind) {
  Worker* w = worker;
  auto p = const_cast<const void*>(address);
  bool local = size_t((const char*)p - w->arena) < kArenaBytes;
  (local ? w->counts.threadgroup_atomics : w->counts.device_atomics)++;
  if (kind != kAtomicStore) access(p, size, false, true, CALLER);
  if (kind != kAtomicLoad) access(p, size, true, true, CALLER);
  // Another thread may always come in between two atomics.
  if (w->launch->options.order == kRandom && random_bits(w) % 4 == 0) {
    Thread* t = w->current;
    t->status = Status::kReady;
    set_ready(w, w->simdgroup_of(t), w->lane_bit(t));
    reschedule(w);
  }
}

void mtl_matrix_access(uint32_t store) {
  Worker* w = worker;
  if (w->index(w->current) & 31) return;
  (store ? w->counts.matrix_stores : w->counts.matrix_loads)++;
}

void mtl_arithmetic(uint32_t divisions32, uint32_t divisions64,
                    uint32_t multiplications32, uint32_t multiplications64,
                    uint32_t conversions) {
  Counts& c = worker->counts;
  c.divisions32 += divisions32;
  c.divisions64 += divisions64;
  c.multiplications32 += multiplications32;
  c.multiplications64 += multiplications64;
  c.conversions += conversions;
}

// In any order of threads, or a kernel could pass because nobody came in between.
int mtl_exchange_fails() {
  Worker* w = worker;
  const LaunchOptions& options = w->launch->options;
  bool may_fail = options.checked || options.order == kRandom;
  return may_fail && random_bits(w) % 4 == 0;
}

}  // extern "C"
