// The last part of the shim: global names, the launch glue and the keywords.
//
// Bind<kernel, parameters...>::call is what the runtime calls for each thread. It turns
// the buffer table and the thread's state into the kernel's arguments; rewrite.py names
// each parameter by kind and index, read off its [[attribute]].
//
// Address spaces vanish (lint checks them), so `device`, `constant`, `thread` and
// `threadgroup` become empty macros. No host header may be included after this file.
#pragma once
#include "atomics.h"
#include "matrix.h"
#include "tensorops.h"

#define VECTOR_NAMES(T)                          \
  using T##2 = metal::vec<T, 2>;                 \
  using T##3 = metal::vec<T, 3>;                 \
  using T##4 = metal::vec<T, 4>;                 \
  using packed_##T##2 = metal::packed_vec<T, 2>; \
  using packed_##T##3 = metal::packed_vec<T, 3>; \
  using packed_##T##4 = metal::packed_vec<T, 4>;
VECTOR_NAMES(char)
VECTOR_NAMES(uchar)
VECTOR_NAMES(short)
VECTOR_NAMES(ushort)
VECTOR_NAMES(int)
VECTOR_NAMES(uint)
VECTOR_NAMES(long)
VECTOR_NAMES(ulong)
VECTOR_NAMES(half)
VECTOR_NAMES(bfloat)
VECTOR_NAMES(float)
#undef VECTOR_NAMES
using bool2 = metal::vec<bool, 2>;
using bool3 = metal::vec<bool, 3>;
using bool4 = metal::vec<bool, 4>;
using metal::as_type;

namespace mtlhost {

template <class A>
METAL_FUNC A attribute(U3 x) {
  constexpr int n = metal::vector_size<A>;
  if constexpr (n == 0)
    return A(x.x);
  else if constexpr (n == 2)
    return A(x.x, x.y);
  else
    return A(x.x, x.y, x.z);
}
template <class A>
METAL_FUNC A attribute(uint32_t x) {
  return A(x);
}

// Parameter i < 1000 is buffer i; the others are attributes of the thread.
template <class A, int Index>
METAL_FUNC A argument(void** buffers, const ThreadState& thread) {
  if constexpr (Index < 1000) {
    if constexpr (std::is_pointer_v<A>)
      return reinterpret_cast<A>(buffers[Index]);
    else
      return *reinterpret_cast<std::remove_reference_t<A>*>(buffers[Index]);
  }
#define ATTRIBUTE(index, name) \
  if constexpr (Index == index) return attribute<A>(thread.name);
  ATTRIBUTE(1000, thread_position_in_grid)
  ATTRIBUTE(1001, thread_position_in_threadgroup)
  ATTRIBUTE(1002, threadgroup_position_in_grid)
  ATTRIBUTE(1003, threads_per_grid)
  ATTRIBUTE(1004, threads_per_threadgroup)
  ATTRIBUTE(1005, dispatch_threads_per_threadgroup)
  ATTRIBUTE(1006, threadgroups_per_grid)
  ATTRIBUTE(1007, grid_origin)
  ATTRIBUTE(1008, grid_size)
  ATTRIBUTE(1009, thread_index_in_threadgroup)
  ATTRIBUTE(1010, thread_index_in_simdgroup)
  ATTRIBUTE(1011, simdgroup_index_in_threadgroup)
  ATTRIBUTE(1012, simdgroups_per_threadgroup)
  ATTRIBUTE(1013, dispatch_simdgroups_per_threadgroup)
  ATTRIBUTE(1014, threads_per_simdgroup)
  ATTRIBUTE(1015, thread_execution_width)
  ATTRIBUTE(1016, quadgroup_index_in_threadgroup)
  ATTRIBUTE(1017, thread_index_in_quadgroup)
  ATTRIBUTE(1018, quadgroups_per_threadgroup)
  ATTRIBUTE(1019, dispatch_quadgroups_per_threadgroup)
#undef ATTRIBUTE
}

template <auto Kernel, int... Indices>
struct Bind;
template <class... A, void (*Kernel)(A...), int... Indices>
struct Bind<Kernel, Indices...> {
  static void call(void** buffers, const ThreadState& thread) {
    static_assert(sizeof...(A) == sizeof...(Indices));
    Kernel(argument<A, Indices>(buffers, thread)...);
  }
};

}  // namespace mtlhost

#define device
#define constant
#define thread
#define threadgroup
#define kernel
