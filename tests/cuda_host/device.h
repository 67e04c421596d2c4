// CUDA's words on the CPU: a block is a thread of the system, its threads are fibers,
// which change at barriers and at what a warp does together.
//
// Enough to run kernels of coordinates, tables and norms, their waiting for other
// blocks included. There is no memory model here but the host's, and no tensor core.

#pragma once
#include <sched.h>
#include <setjmp.h>
#include <ucontext.h>

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <cstring>
#include <functional>
#include <memory>
#include <thread>
#include <type_traits>
#include <vector>

#include "halves.h"

using std::max;
using std::min;

#define __global__
#define __launch_bounds__(...)
#define __device__
#define __forceinline__ inline
#define __noinline__
#define __align__(n) __attribute__((aligned(n)))
#define __shared__ static thread_local

namespace cuda::std {
using ::std::bool_constant;
using ::std::false_type;
using ::std::true_type;
}  // namespace cuda::std

struct int2 { int x, y; };
struct int4 { int x, y, z, w; };
struct uint2 { unsigned x, y; };
struct alignas(16) uint4 { unsigned x, y, z, w; };
struct float2 { float x, y; };
struct alignas(16) float4 { float x, y, z, w; };
inline int2 make_int2(int x, int y) { return {x, y}; }
inline uint4 make_uint4(unsigned x, unsigned y, unsigned z, unsigned w) {
  return {x, y, z, w};
}
inline float2 make_float2(float x, float y) { return {x, y}; }
inline float4 make_float4(float x, float y, float z, float w) { return {x, y, z, w}; }

namespace emulated {

constexpr int STACK = 64 << 10, DYNAMIC = 96 << 10;

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

struct Block {
  int index, threads, blocks, across, blocks_across, at = 0;
  const std::function<void()>* body;
  std::vector<Fiber> fibers;
  std::vector<Warp> warps;
  Meeting meeting;
  jmp_buf scheduler;
};

inline thread_local Block* block = nullptr;

inline auto& dynamic_memory() {
  alignas(128) static thread_local unsigned char memory[DYNAMIC];
  return memory;
}

// Unlike swapcontext, jumps make no system call.
inline void pause(Fiber& fiber) {
  if (!_setjmp(fiber.here)) _longjmp(block->scheduler, 1);
}

__attribute__((noinline)) inline void resume(Fiber& fiber) {
  if (_setjmp(block->scheduler)) return;
  if (fiber.begun) _longjmp(fiber.here, 1);
  fiber.begun = true;
  setcontext(&fiber.context);
}

inline void meet(Meeting& meeting) {
  Fiber& fiber = block->fibers[block->at];
  const int round = meeting.round;
  if (++meeting.come == meeting.members) {
    meeting.come = 0, ++meeting.round;
    return;
  }
  fiber.awaits = &meeting, fiber.round = round;
  pause(fiber);
}

inline void leave(Meeting& meeting) {
  if (--meeting.members > 0 && meeting.come == meeting.members) {
    meeting.come = 0, ++meeting.round;
  }
}

inline void run_fiber() {
  (*block->body)();
  Fiber& fiber = block->fibers[block->at];
  fiber.done = true;
  leave(block->meeting);
  leave(block->warps[block->at / 32].meeting);
  pause(fiber);
}

// across: threads of the block, and blocks, along x.
inline void run_block(int index, int blocks, int threads, int across, int blocks_across,
                      const std::function<void()>& body) {
  Block own{index, threads, blocks, across, blocks_across};
  own.body = &body;
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
      own.at = index % 2 ? threads - 1 - turn : turn;
      Fiber& fiber = own.fibers[own.at];
      if (fiber.done || (fiber.awaits && fiber.awaits->round == fiber.round)) continue;
      fiber.awaits = nullptr;
      resume(fiber);
      left -= fiber.done;
    }
  }
}

// Runs a kernel. grid: blocks along x and y, then threads of each. at_once: blocks run
// side by side and may wait for each other; else one after another.
inline void launch(const int* grid, bool at_once, const std::function<void()>& body) {
  const int blocks = grid[0] * grid[1], threads = grid[2] * grid[3];
  std::vector<std::thread> running;
  for (int i = 0; i < blocks; ++i) {
    running.emplace_back(run_block, i, blocks, threads, grid[2], grid[0], body);
    if (!at_once) running.back().join(), running.clear();
  }
  for (auto& each : running) each.join();
}

inline void launch(int blocks, int threads, const std::function<void()>& body) {
  const int grid[] = {blocks, 1, threads, 1};
  launch(grid, true, body);
}

// The values that the lanes of this warp bring.
template <typename T>
const uint64_t* gather(T value) {
  Warp& warp = block->warps[block->at / 32];
  uint64_t* values = warp.values[warp.meeting.round & 1];
  values[block->at % 32] = 0;
  std::memcpy(values + block->at % 32, &value, sizeof(T));
  meet(warp.meeting);
  return values;
}

template <typename T>
T lane_of(const uint64_t* values, int lane) {
  T value;
  std::memcpy(&value, values + lane, sizeof(T));
  return value;
}

struct Index { unsigned x, y; };

inline Index at(int place, int across) {
  return {(unsigned)(place % across), (unsigned)(place / across)};
}

}  // namespace emulated

#define threadIdx (emulated::at(emulated::block->at, emulated::block->across))
#define blockIdx (emulated::at(emulated::block->index, emulated::block->blocks_across))
#define blockDim (emulated::Index{(unsigned)emulated::block->across, \
                                  (unsigned)(emulated::block->threads / \
                                             emulated::block->across)})
#define gridDim (emulated::Index{(unsigned)emulated::block->blocks_across, \
                                 (unsigned)(emulated::block->blocks / \
                                            emulated::block->blocks_across)})

inline void __syncthreads() { emulated::meet(emulated::block->meeting); }
inline void __syncwarp() { emulated::gather(0); }
inline void __threadfence() { __atomic_thread_fence(__ATOMIC_SEQ_CST); }
inline void __nanosleep(unsigned) { sched_yield(); }

inline unsigned __ballot_sync(unsigned, bool vote) {
  const uint64_t* values = emulated::gather((unsigned)vote);
  unsigned votes = 0;
  for (int i = 0; i < 32; ++i) votes |= (unsigned)values[i] << i;
  return votes;
}
template <typename T>
T __shfl_sync(unsigned, T value, int lane) {
  return emulated::lane_of<T>(emulated::gather(value), lane & 31);
}
template <typename T>
T __shfl_up_sync(unsigned, T value, int by) {
  const int lane = emulated::block->at % 32;
  return emulated::lane_of<T>(emulated::gather(value), lane < by ? lane : lane - by);
}
template <typename T>
T __shfl_down_sync(unsigned, T value, int by) {
  const int lane = emulated::block->at % 32;
  return emulated::lane_of<T>(emulated::gather(value), lane + by > 31 ? lane : lane + by);
}
template <typename T>
T __shfl_xor_sync(unsigned, T value, int by) {
  const int lane = emulated::block->at % 32;
  return emulated::lane_of<T>(emulated::gather(value), lane ^ by);
}
inline int __reduce_min_sync(unsigned, int value) {
  const uint64_t* values = emulated::gather(value);
  for (int i = 0; i < 32; ++i) value = min(value, emulated::lane_of<int>(values, i));
  return value;
}
inline int __reduce_max_sync(unsigned, int value) {
  return ~__reduce_min_sync(~0u, ~value);
}

template <typename T> T __ldg(const T* from) { return *from; }
template <typename T> T __ldcg(const T* from) {
  T value;
  __atomic_load(from, &value, __ATOMIC_RELAXED);
  return value;
}
template <> inline int2 __ldcg(const int2* from) { return *from; }

template <typename T> T atomicAdd(T* to, T by) {
  return __atomic_fetch_add(to, by, __ATOMIC_RELAXED);
}
template <typename T> T atomicOr(T* to, T by) {
  return __atomic_fetch_or(to, by, __ATOMIC_RELAXED);
}
template <typename T> T atomicCAS(T* at, T expected, T value) {
  __atomic_compare_exchange_n(at, &expected, value, false, __ATOMIC_RELAXED,
                              __ATOMIC_RELAXED);
  return expected;
}
template <typename T> T atomicMin(T* at, T value) {
  T old = __atomic_load_n(at, __ATOMIC_RELAXED);
  while (value < old && !__atomic_compare_exchange_n(at, &old, value, false,
                                                     __ATOMIC_RELAXED, __ATOMIC_RELAXED)) {
  }
  return old;
}
template <typename T> T atomicMax(T* at, T value) {
  T old = __atomic_load_n(at, __ATOMIC_RELAXED);
  while (old < value && !__atomic_compare_exchange_n(at, &old, value, false,
                                                     __ATOMIC_RELAXED, __ATOMIC_RELAXED)) {
  }
  return old;
}

inline unsigned __reduce_or_sync(unsigned, unsigned value) {
  const uint64_t* values = emulated::gather(value);
  for (int i = 0; i < 32; ++i) value |= (unsigned)values[i];
  return value;
}
inline unsigned __funnelshift_r(unsigned low, unsigned high, unsigned by) {
  return ((uint64_t)high << 32 | low) >> (by & 31);
}
inline uint64_t __cvta_generic_to_shared(const void* at) { return (uint64_t)at; }
inline float __int_as_float(int bits) {
  float value;
  std::memcpy(&value, &bits, 4);
  return value;
}

inline unsigned __float_as_uint(float value) {
  unsigned bits;
  std::memcpy(&bits, &value, 4);
  return bits;
}
// Each rounded by itself: the compiler of the host, too, must not fuse them.
inline float __fmul_rn(volatile float a, volatile float b) { return a * b; }
inline float __fadd_rn(volatile float a, volatile float b) { return a + b; }
inline float __int2float_rn(int v) { return (float)v; }
inline unsigned __byte_perm(unsigned a, unsigned b, unsigned selector) {
  const uint64_t bytes = (uint64_t)b << 32 | a;
  unsigned made = 0;
  for (int i = 0; i < 4; ++i) {
    made |= (unsigned)(bytes >> 8 * (selector >> 4 * i & 7) & 0xff) << 8 * i;
  }
  return made;
}

inline int __clz(unsigned v) { return v ? __builtin_clz(v) : 32; }
inline int __popc(unsigned v) { return __builtin_popcount(v); }
inline float rsqrtf(float v) { return 1.0f / sqrtf(v); }
inline unsigned __umulhi(unsigned a, unsigned b) { return (uint64_t)a * b >> 32; }
