// The scheduler: which GPU thread runs next, and what happens when none can.
//
// Forward and reverse order run a simdgroup until all its lanes wait; random order
// draws simdgroup and lane anew at every switch, from a seed, so that a kernel that
// leans on an order nobody promised gives itself away and the run can be repeated.
//
// When no thread can run: either all wait at a threadgroup_barrier, which then opens;
// or some lanes of a simdgroup wait in a collective that the others will not reach,
// which runs with the lanes present (structured code reconverges at the lowest call
// first); or the kernel's control flow diverges around something that forbids it.
#if defined(__BMI2__)
#include <immintrin.h>
#endif

#include <algorithm>

#include "state.h"

namespace mtlhost {

uint32_t random_bits(Worker* w) {
  auto& s = w->random_state;
  s ^= s << 13;
  s ^= s >> 7;
  s ^= s << 17;
  return uint32_t(s >> 32);
}

int pick(Worker* w, uint32_t mask) {
  if (w->launch->options.order == kReverse) return 31 - __builtin_clz(mask);
  if (w->launch->options.order == kRandom) {
    int k = random_bits(w) % __builtin_popcount(mask);
#if defined(__BMI2__)
    mask = _pdep_u32(1u << k, mask);  // the k-th bit that is set
#else
    for (; k; --k) mask &= mask - 1;
#endif
  }
  return __builtin_ctz(mask);
}

void set_ready(Worker* w, int simdgroup, uint32_t lanes) {
  w->simdgroups[simdgroup].ready |= lanes;
  w->runnable |= 1u << simdgroup;
}

static Thread& lane(Worker* w, int simdgroup, int i) {
  return w->threads[simdgroup * 32 + i];
}

void complete(Worker* w, int simdgroup, uint32_t lanes) {
  Simdgroup& s = w->simdgroups[simdgroup];
  void* arguments[32];
  for (int i = 0; i < 32; ++i) arguments[i] = lane(w, simdgroup, i).argument;
  Thread& first = lane(w, simdgroup, __builtin_ctz(lanes));
  w->counts.collectives++;
  w->counts.matrix_flop += first.flop;
  first.combine(arguments, lanes);
  s.waiting &= ~lanes;
  s.mixed = s.needs_all = false;
  if (s.waiting) {
    s.site = lane(w, simdgroup, __builtin_ctz(s.waiting)).site;
    for (uint32_t m = s.waiting; m; m &= m - 1) {
      Thread& other = lane(w, simdgroup, __builtin_ctz(m));
      s.mixed |= other.site != s.site;
      s.needs_all |= other.lanes == kAllLanes;
    }
  }
  set_ready(w, simdgroup, lanes);
}

static bool can_complete(const Simdgroup& s) {
  return s.waiting && s.waiting == (s.all & ~s.done) && !s.mixed &&
         !(s.needs_all && s.waiting != ~0u);
}

// One barrier of the source may stand at several addresses (inlined, in instances of
// one template that simdgroups choose between, as MLX's own kernels do): lines decide.
static void require_one_barrier(Worker* w, const Thread& a, const Thread& b) {
  if (place(a.site) == place(b.site)) return;
  fail(w, "barrier divergence", b.site,
       describe(b) + " waits here, but " + describe(a) +
           " waits at the threadgroup_barrier of " + place(a.site));
}

// All live threads wait at a threadgroup_barrier.
static void open_barrier(Worker* w) {
  const Thread *first = nullptr, *exited = nullptr;
  uint32_t flags = ~0u;
  for (int i = 0; i < w->thread_count; ++i) {
    Thread& t = w->threads[i];
    if (t.status == Status::kDone) {
      exited = &t;
      continue;
    }
    if (first && t.site != first->site && w->launch->options.checked)
      require_one_barrier(w, *first, t);
    if (!first) first = &t;
    flags &= t.barrier_flags;
  }
  if (exited)
    fail(w, "barrier divergence", first->site,
         describe(*exited) + " has ended, but " + describe(*first) + " waits here");
  w->counts.barriers++;
  end_step(w);
  w->threadgroup_epoch += (flags & kThreadgroupFlag) != 0;
  w->device_epoch += (flags & kDeviceFlag) != 0;
  w->at_barrier = 0;
  for (int i = 0; i < w->simdgroup_count; ++i)
    if (uint32_t lanes = std::exchange(w->simdgroups[i].at_barrier, 0))
      set_ready(w, i, lanes);
  w->current_simdgroup = pick(w, w->runnable);
}

// Runs one collective with only some of the lanes; false where no lane waits in one.
static bool complete_partially(Worker* w) {
  for (int i = 0; i < w->simdgroup_count; ++i) {
    Simdgroup& s = w->simdgroups[i];
    const void* lowest = nullptr;
    uint32_t lanes = 0;
    for (uint32_t m = s.waiting; m; m &= m - 1) {
      int l = __builtin_ctz(m);
      const void* site = lane(w, i, l).site;
      if (!lanes || site < lowest) lowest = site, lanes = 0;
      if (site == lowest) lanes |= 1u << l;
    }
    if (!lanes) continue;
    Thread& t = lane(w, i, __builtin_ctz(lanes));
    if (t.lanes == kAllLanes || (t.lanes == kLiveLanes && lanes != (s.all & ~s.done)))
      fail(w, "divergent simdgroup operation", lowest,
           format("needs all lanes, but only those of mask %08x arrive, ", lanes) +
               describe(t) +
               (s.at_barrier ? "; other lanes wait at a threadgroup_barrier"
                : s.done     ? "; other lanes have ended"
                             : "; other lanes wait elsewhere"));
    complete(w, i, lanes);
    return true;
  }
  return false;
}

// The thread to run, or null when the threadgroup has ended.
Thread* next_thread(Worker* w) {
  bool random = w->launch->options.order == kRandom;
  for (;;) {
    if (can_complete(w->simdgroups[w->current_simdgroup]))
      complete(w, w->current_simdgroup, w->simdgroups[w->current_simdgroup].waiting);
    if (random && w->runnable) w->current_simdgroup = pick(w, w->runnable);
    Simdgroup& s = w->simdgroups[w->current_simdgroup];
    if (uint32_t lanes = s.ready | s.unstarted) {
      // A started thread holds a stack: in a fixed order, end it first.
      int l = pick(w, random || !s.ready ? lanes : s.ready);
      s.ready &= ~(1u << l);
      s.unstarted &= ~(1u << l);
      if (!(s.ready | s.unstarted)) w->runnable &= ~(1u << w->current_simdgroup);
      return &lane(w, w->current_simdgroup, l);
    }
    if (w->runnable)
      w->current_simdgroup = pick(w, w->runnable);
    else if (w->done == w->thread_count)
      return nullptr;
    else if (w->at_barrier == w->thread_count - w->done)
      open_barrier(w);
    else if (!complete_partially(w))
      fail(w, "deadlock", nullptr, "no thread of the threadgroup can run");
  }
}

// The current thread waits, or is ready again: run others until it is chosen.
void reschedule(Worker* w) {
  Thread* t = w->current;
  Thread* next = next_thread(w);
  if (next == t) {
    t->status = Status::kRunning;
    return;
  }
  if (!next->fiber) next->fiber = take_fiber(w);
  w->current = next;
  next->status = Status::kRunning;
  switch_stack(&t->fiber->stack_pointer, next->fiber->stack_pointer);
}

// The part of the thread states that depends only on the shape of the threadgroup.
static void fill_states(Worker* w, U3 shape) {
  Launch& launch = *w->launch;
  const U3 &grid = launch.options.grid, &full = launch.options.threadgroup;
  if (w->states_of == &launch && w->states_shape.x == shape.x &&
      w->states_shape.y == shape.y && w->states_shape.z == shape.z)
    return;
  w->states_of = &launch;
  w->states_shape = shape;
  uint32_t simdgroups = (full.x * full.y * full.z + 31) / 32;
  for (uint32_t i = 0; i < uint32_t(w->thread_count); ++i) {
    ThreadState& s = w->states[i];
    w->threads[i].state = &s;
    s.thread_position_in_threadgroup = {i % shape.x, i / shape.x % shape.y,
                                        i / shape.x / shape.y};
    s.threads_per_grid = s.grid_size = grid;
    s.grid_origin = {0, 0, 0};
    s.threads_per_threadgroup = shape;
    s.dispatch_threads_per_threadgroup = full;
    s.threadgroups_per_grid = launch.groups;
    s.thread_index_in_threadgroup = i;
    s.thread_index_in_simdgroup = i & 31;
    s.simdgroup_index_in_threadgroup = i >> 5;
    s.simdgroups_per_threadgroup = w->simdgroup_count;
    s.dispatch_simdgroups_per_threadgroup = simdgroups;
    s.threads_per_simdgroup = s.thread_execution_width = 32;
    s.quadgroup_index_in_threadgroup = i >> 2;
    s.thread_index_in_quadgroup = i & 3;
    s.quadgroups_per_threadgroup = (w->thread_count + 3) / 4;
    s.dispatch_quadgroups_per_threadgroup = simdgroups * 8;
  }
}

void run_threadgroup(Worker* w, uint64_t group) {
  Launch& launch = *w->launch;
  const U3 &grid = launch.options.grid, &full = launch.options.threadgroup;
  U3 at{uint32_t(group % launch.groups.x),
        uint32_t(group / launch.groups.x % launch.groups.y),
        uint32_t(group / launch.groups.x / launch.groups.y)};
  // dispatchThreads makes the groups at the far edges smaller.
  U3 shape{std::min(full.x, grid.x - at.x * full.x),
           std::min(full.y, grid.y - at.y * full.y),
           std::min(full.z, grid.z - at.z * full.z)};
  w->thread_count = shape.x * shape.y * shape.z;
  w->simdgroup_count = (w->thread_count + 31) / 32;
  w->done = w->at_barrier = w->current_simdgroup = 0;
  w->runnable = 0;
  w->threadgroup_epoch = w->device_epoch = 1;
  w->group = group;
  w->variables.clear();
  w->arena_used = kRedZone;
  w->memory_used = 0;
  fill_states(w, shape);
  for (int i = 0; i < w->thread_count; ++i) {
    ThreadState& s = w->states[i];
    const U3& p = s.thread_position_in_threadgroup;
    s.thread_position_in_grid = {at.x * full.x + p.x, at.y * full.y + p.y,
                                 at.z * full.z + p.z};
    s.threadgroup_position_in_grid = at;
    w->threads[i].status = Status::kUnstarted;
    w->threads[i].fiber = nullptr;
  }
  for (int i = 0; i < w->simdgroup_count; ++i) {
    int lanes = std::min(32, w->thread_count - i * 32);
    uint32_t mask = lanes == 32 ? ~0u : (1u << lanes) - 1;
    w->simdgroups[i] = {mask, mask, 0, 0, 0, 0, 1, nullptr, false, false};
    w->runnable |= 1u << i;
  }
  w->current_simdgroup = pick(w, w->runnable);
  Thread* first = next_thread(w);
  first->fiber = take_fiber(w);
  w->current = first;
  switch_stack(&w->main_stack, first->fiber->stack_pointer);
  w->current = nullptr;
  if (w->failed) {  // its fibers stopped half way
    w->free_fibers.clear();
    w->used_fibers = 0;
  }
  end_step(w);
  w->counts.threadgroups++;
  w->counts.threads += w->thread_count;
}

}  // namespace mtlhost
