// The contract between a compiled kernel, the host runtime and their callers.
//
// A kernel library (MSL compiled as C++ against shim/) exports `mtl_kernels`, one
// KernelEntry per kernel, and calls the `mtl_*` functions below for everything that
// needs the other threads of its group. The callers (launch.py through ctypes, lazy.cpp
// as an MLX primitive) fill in Buffers and a LaunchOptions and call `mtl_launch`.
//
// launch.py mirrors these structs field by field: change both together.
//
// The functions are `convergent, nomerge`: the return address of a call identifies the
// operation, so the compiler may neither merge two calls nor move one across a branch.
#pragma once
#include <cstddef>
#include <cstdint>

namespace mtlhost {

struct U3 {
  uint32_t x, y, z;
};

// All that a kernel can ask for through [[attributes]].
struct ThreadState {
  U3 thread_position_in_grid, thread_position_in_threadgroup;
  U3 threadgroup_position_in_grid, threads_per_grid, threads_per_threadgroup;
  U3 dispatch_threads_per_threadgroup, threadgroups_per_grid, grid_origin, grid_size;
  uint32_t thread_index_in_threadgroup, thread_index_in_simdgroup;
  uint32_t simdgroup_index_in_threadgroup, simdgroups_per_threadgroup;
  uint32_t dispatch_simdgroups_per_threadgroup, threads_per_simdgroup;
  uint32_t thread_execution_width, quadgroup_index_in_threadgroup;
  uint32_t thread_index_in_quadgroup, quadgroups_per_threadgroup;
  uint32_t dispatch_quadgroups_per_threadgroup;
};

using Invoke = void (*)(void** buffers, const ThreadState& thread);

struct KernelEntry {
  const char* name;
  Invoke invoke;
};

struct FunctionConstant {
  int id;
  void* address;
  size_t size;
};

enum : uint32_t { kOutput = 1, kInitialised = 2 };
constexpr uint64_t kBufferAlign = 256;  // of what an allocator returns

struct Buffer {
  void* data;
  uint64_t size;
  const char* name;
  uint64_t flags;
  uint64_t start;  // of a view in its array: bytes, below kBufferAlign
  // Filled in by a checked launch.
  uint64_t read_bytes, written_bytes, atomics;
  uint64_t distinct_read_bytes, distinct_written_bytes;
  // Filled in by a counted launch.
  uint64_t read_lines, read_line_bytes, written_lines, written_line_bytes;
};

enum Order : uint32_t { kForward, kReverse, kRandom };

struct LaunchOptions {
  U3 grid, threadgroup;  // as dispatchThreads: threads in all, threads of a group
  uint32_t order, seed;
  uint32_t workers;  // OS threads that share the threadgroups (fast builds only)
  uint32_t checked;  // Checked: the kernel was built with memory hooks
};

// Counted: it was built with counters of arithmetic and matrix accesses besides.
enum Checked : uint32_t { kUnchecked, kChecked, kCounted };

struct Counts {
  uint64_t threadgroups, threads, barriers, simdgroup_barriers, collectives;
  uint64_t matrix_flop, threadgroup_memory;
  uint64_t device_read_bytes, device_written_bytes, device_atomics;
  uint64_t threadgroup_read_bytes, threadgroup_written_bytes, threadgroup_atomics;
  uint64_t matrix_loads, matrix_stores;
  uint64_t divisions32, divisions64, multiplications32, multiplications64;
  uint64_t conversions;
  double seconds;
};

// What a collective needs: every lane that is still alive, or all 32 lanes.
enum Lanes : uint32_t { kActiveLanes = 0, kAllLanes = 1, kLiveLanes = 2 };

using Combine = void (*)(void** lanes, uint32_t mask);

}  // namespace mtlhost

#define MTL_CONVERGENT __attribute__((convergent, nomerge))
extern "C" {
const mtlhost::ThreadState* mtl_thread();
// Runs `combine` once, over the arguments of the lanes that meet at this call.
// `flop` is counted once per simdgroup.
MTL_CONVERGENT void mtl_collective(mtlhost::Combine combine, void* argument,
                                   uint32_t lanes, uint64_t flop);
MTL_CONVERGENT void mtl_threadgroup_barrier(uint32_t flags);
MTL_CONVERGENT void mtl_simdgroup_barrier(uint32_t flags);
void* mtl_threadgroup_variable(const void* key, size_t size, size_t align,
                               const char* name);
enum { kAtomicLoad, kAtomicStore, kAtomicUpdate };
void mtl_atomic(const volatile void* address, uint32_t size, uint32_t kind);
// A lane of simdgroup_load or simdgroup_store; counted once per simdgroup.
void mtl_matrix_access(uint32_t store);
// What one thread divides, multiplies and converts in a block: arithmetic.py calls it.
void mtl_arithmetic(uint32_t divisions32, uint32_t divisions64,
                    uint32_t multiplications32, uint32_t multiplications64,
                    uint32_t conversions);
int mtl_exchange_fails();  // a weak compare-and-swap may fail for no reason

// Tool that turns an address into a source line: `command -e library address`.
void mtl_set_symbolizer(const char* command);
// Returns the number of faults; `report` gets one line for each, fields separated by
// tabs: kind, place, times seen, message. A fault of the first kind "fatal" ended the
// launch early.
int mtl_launch(mtlhost::Invoke, mtlhost::Buffer*, int count,
               const mtlhost::LaunchOptions*, mtlhost::Counts*, char* report,
               size_t report_size);
}
