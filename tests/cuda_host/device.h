// CUDA's words on the CPU: a block is a thread of the system, its threads are fibers,
// which change at barriers and at what a warp does together.
//
// Enough to run kernels of coordinates, tables and norms, their waiting for other
// blocks included. There is no memory model here but the host's, and no tensor core.

#pragma once
#include <sched.h>

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <cstring>
#include <type_traits>

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

// Where the thread that runs is: in its block, and its block in the grid.
struct Block { int index, threads, blocks, across, blocks_across, at; };
extern __thread Block* block;

// What runs the threads is compiled once, in runtime.cpp. grid: blocks along x and y,
// then threads of each. at_once: blocks run side by side and may wait for each other;
// else one after another.
void launch(const int* grid, bool at_once, void (*body)(const void*), const void* given);
void meet_block();
const uint64_t* meet_warp(uint64_t value);  // those that the lanes of this warp bring
unsigned char* dynamic_bytes();

constexpr int DYNAMIC = 96 << 10;

inline auto& dynamic_memory() {
  return *reinterpret_cast<unsigned char(*)[DYNAMIC]>(dynamic_bytes());
}

template <typename F>
void launch(const int* grid, bool at_once, const F& body) {
  launch(grid, at_once, [](const void* f) { (*(const F*)f)(); }, &body);
}

template <typename F>
void launch(int blocks, int threads, const F& body) {
  const int grid[] = {blocks, 1, threads, 1};
  launch(grid, true, body);
}

template <typename T>
const uint64_t* gather(T value) {
  uint64_t bits = 0;
  std::memcpy(&bits, &value, sizeof(T));
  return meet_warp(bits);
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

inline void __syncthreads() { emulated::meet_block(); }
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
