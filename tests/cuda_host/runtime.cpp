// Runs a kernel's threads: the part of device.h that is compiled once for all kernels.
#include <setjmp.h>
#include <ucontext.h>

#include <memory>
#include <thread>
#include <vector>

#include "device.h"

namespace emulated {

__thread Block* block = nullptr;

namespace {

constexpr int STACK = 64 << 10;

struct Meeting {  // of fibers; each round is over when all have come
  int members = 0, come = 0, round = 0;
};

struct Warp {
  Meeting meeting;
  uint64_t values[2][32];
};

struct Fiber {
  ucontext_t context;  // of its start; from then on it goes on from `here`
  jmp_buf here;
  bool begun = false;
  std::unique_ptr<char[]> stack;
  const Meeting* awaits = nullptr;
  int round = 0;
  bool done = false;
};

struct Running : Block {
  void (*body)(const void*);
  const void* given;
  std::vector<Fiber> fibers;
  std::vector<Warp> warps;
  Meeting meeting;
  jmp_buf scheduler;

  Fiber& fiber() { return fibers[at]; }
  Warp& warp() { return warps[at / 32]; }
};

Running& running() { return *static_cast<Running*>(block); }

// Unlike swapcontext, jumps make no system call.
void pause(Fiber& fiber) {
  if (!_setjmp(fiber.here)) _longjmp(running().scheduler, 1);
}

__attribute__((noinline)) void resume(Fiber& fiber) {
  if (_setjmp(running().scheduler)) return;
  if (fiber.begun) _longjmp(fiber.here, 1);
  fiber.begun = true;
  setcontext(&fiber.context);
}

void meet(Meeting& meeting) {
  Fiber& fiber = running().fiber();
  const int round = meeting.round;
  if (++meeting.come == meeting.members) {
    meeting.come = 0, ++meeting.round;
    return;
  }
  fiber.awaits = &meeting, fiber.round = round;
  pause(fiber);
}

void leave(Meeting& meeting) {
  if (--meeting.members > 0 && meeting.come == meeting.members) {
    meeting.come = 0, ++meeting.round;
  }
}

void run_fiber() {
  Running& own = running();
  own.body(own.given);
  Fiber& fiber = own.fiber();
  fiber.done = true;
  leave(own.meeting);
  leave(own.warp().meeting);
  pause(fiber);
}

void run_block(Block place, void (*body)(const void*), const void* given) {
  const int threads = place.threads;
  Running own{place, body, given};
  own.fibers = std::vector<Fiber>(threads);
  own.warps = std::vector<Warp>((threads + 31) / 32);
  own.meeting.members = threads;
  for (auto& warp : own.warps) warp.meeting.members = 32;
  block = &own;
  for (auto& fiber : own.fibers) {
    getcontext(&fiber.context);
    fiber.stack.reset(new char[STACK]);
    fiber.context.uc_stack.ss_sp = fiber.stack.get();
    fiber.context.uc_stack.ss_size = STACK;
    fiber.context.uc_link = nullptr;
    makecontext(&fiber.context, run_fiber, 0);
  }
  for (int left = threads; left > 0;) {
    for (int turn = 0; turn < threads; ++turn) {
      // Every other block backwards: what one thread must not read before another has
      // written it is read so in one of them.
      own.at = place.index % 2 ? threads - 1 - turn : turn;
      Fiber& fiber = own.fiber();
      if (fiber.done || (fiber.awaits && fiber.awaits->round == fiber.round)) continue;
      fiber.awaits = nullptr;
      resume(fiber);
      left -= fiber.done;
    }
  }
}

}  // namespace

void launch(const int* grid, bool at_once, void (*body)(const void*), const void* given) {
  const int blocks = grid[0] * grid[1], threads = grid[2] * grid[3];
  std::vector<std::thread> all;
  for (int i = 0; i < blocks; ++i) {
    const Block place{i, threads, blocks, grid[2], grid[0], 0};
    all.emplace_back(run_block, place, body, given);
    if (!at_once) all.back().join(), all.clear();
  }
  for (auto& each : all) each.join();
}

void meet_block() { meet(running().meeting); }

const uint64_t* meet_warp(uint64_t value) {
  Warp& warp = running().warp();
  uint64_t* values = warp.values[warp.meeting.round & 1];
  values[block->at % 32] = value;
  meet(warp.meeting);
  return values;
}

unsigned char* dynamic_bytes() {
  alignas(128) static thread_local unsigned char memory[DYNAMIC];
  return memory;
}

}  // namespace emulated
