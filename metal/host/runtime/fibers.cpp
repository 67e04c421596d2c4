// Fibers: the stacks on which GPU threads wait for each other.
//
// A switch saves the callee-saved registers on the old stack and pops them from the new
// one, about 12 ns; ucontext, which also saves the signal mask, costs twenty times
// that. A fiber runs kernel threads in a loop: when one ends and the next to run has
// not started, the same fiber takes it over without a switch.
//
// Stacks are reserved, not touched, until used, with an unmapped page below each, so
// that an overflow faults instead of corrupting a neighbour.
#include <sys/mman.h>

#include <cstdio>
#include <cstdlib>
#include <cstring>

#include "state.h"

#if defined(__APPLE__)
#define SYMBOL(name) "_" name
#else
#define SYMBOL(name) name
#endif

extern "C" void mtl_swap(void** save, void* to);
#if defined(__x86_64__)
asm(".text\n.globl " SYMBOL("mtl_swap") "\n" SYMBOL("mtl_swap") ":\n" R"(
  pushq %rbp
  pushq %rbx
  pushq %r12
  pushq %r13
  pushq %r14
  pushq %r15
  movq %rsp, (%rdi)
  movq %rsi, %rsp
  popq %r15
  popq %r14
  popq %r13
  popq %r12
  popq %rbx
  popq %rbp
  ret
)");
#elif defined(__aarch64__)
asm(".text\n.globl " SYMBOL("mtl_swap") "\n" SYMBOL("mtl_swap") ":\n" R"(
  sub sp, sp, #160
  stp x19, x20, [sp, #0]
  stp x21, x22, [sp, #16]
  stp x23, x24, [sp, #32]
  stp x25, x26, [sp, #48]
  stp x27, x28, [sp, #64]
  stp x29, x30, [sp, #80]
  stp d8, d9, [sp, #96]
  stp d10, d11, [sp, #112]
  stp d12, d13, [sp, #128]
  stp d14, d15, [sp, #144]
  mov x9, sp
  str x9, [x0]
  mov sp, x1
  ldp x19, x20, [sp, #0]
  ldp x21, x22, [sp, #16]
  ldp x23, x24, [sp, #32]
  ldp x25, x26, [sp, #48]
  ldp x27, x28, [sp, #64]
  ldp x29, x30, [sp, #80]
  ldp d8, d9, [sp, #96]
  ldp d10, d11, [sp, #112]
  ldp d12, d13, [sp, #128]
  ldp d14, d15, [sp, #144]
  add sp, sp, #160
  ret
)");
#else
#error "the host runtime knows x86-64 and arm64"
#endif

namespace mtlhost {

void switch_stack(void** save, void* to) { mtl_swap(save, to); }

static void run_threads() {
  Worker* w = worker;
  for (;;) {
    Thread* t = w->current;
    Fiber* fiber = t->fiber;
    t->status = Status::kRunning;
    w->launch->invoke(w->launch->buffers.data(), *t->state);
    t->status = Status::kDone;
    t->fiber = nullptr;
    w->done++;
    w->simdgroups[w->simdgroup_of(t)].done |= w->lane_bit(t);
    Thread* next = next_thread(w);
    w->current = next;
    if (next && !next->fiber) {
      next->fiber = fiber;
      continue;
    }
    w->free_fibers.push_back(fiber);
    if (next) next->status = Status::kRunning;
    switch_stack(&fiber->stack_pointer,
                 next ? next->fiber->stack_pointer : w->main_stack);
  }
}

static void prepare(Fiber* fiber) {
  void** sp = reinterpret_cast<void**>(fiber->top);
#if defined(__x86_64__)
  *--sp = nullptr;  // a function expects its stack 8 bytes off a multiple of 16
  *--sp = reinterpret_cast<void*>(&run_threads);
  for (int i = 0; i < 6; ++i) *--sp = nullptr;
#else
  sp -= 20;
  memset(sp, 0, 160);
  sp[11] = reinterpret_cast<void*>(&run_threads);  // the link register
#endif
  fiber->stack_pointer = sp;
}

Fiber* take_fiber(Worker* w) {
  if (!w->free_fibers.empty()) {
    Fiber* fiber = w->free_fibers.back();
    w->free_fibers.pop_back();
    return fiber;
  }
  Fiber* fiber = &w->fibers[w->used_fibers];
  // Equally aligned stacks would all compete for the same cache sets: stagger them.
  auto top = uintptr_t(w->stacks) + size_t(w->used_fibers + 1) * kStackBytes - 64 -
             w->used_fibers * 448 % 8192;
  fiber->top = reinterpret_cast<char*>(top & ~uintptr_t(63));
  w->used_fibers++;
  prepare(fiber);
  return fiber;
}

Worker* new_worker() {
  auto* w = new Worker;
  auto reserve = [](size_t size) {
    void* p = mmap(nullptr, size, PROT_READ | PROT_WRITE,
                   MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
    if (p == MAP_FAILED) {
      perror("mmap");
      abort();
    }
    return static_cast<char*>(p);
  };
  // What overflows the lowest stacks by more than a page still hits reserved addresses.
  char* below = reserve(kBelowStacks + kStackBytes * (kMaxThreads + 2));
  mprotect(below, kBelowStacks, PROT_NONE);
  w->stacks = below + kBelowStacks;
  for (int i = 0; i < kMaxThreads + 2; ++i)
    mprotect(w->stacks + i * kStackBytes, 4096, PROT_NONE);
  w->fibers.resize(kMaxThreads + 2);
  w->arena = reserve(kArenaBytes);
  return w;
}

}  // namespace mtlhost
