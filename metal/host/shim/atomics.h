// Barriers and atomics.
//
// An atomic tells the runtime first: it is counted, checked for races against plain
// accesses and, in random order, a point where another thread may run. The operation
// itself is a relaxed host atomic, right also when threadgroups share several OS
// threads.
//
// As in Metal, minimum, maximum and the bit operations exist for integers only, and no
// atomic narrower than 32 bits exists but bool: a kernel that asks for one does not
// compile. The weak exchange may fail for no reason, and does so at random in checked
// launches and in random order.
#pragma once
#include "vectors.h"
#include "../runtime/interface.h"

namespace metal {
enum class mem_flags : uint {
  mem_none = 0,
  mem_device = 1,
  mem_threadgroup = 2,
  mem_texture = 4,
  mem_threadgroup_imageblock = 8,
  mem_object_data = 16
};
constexpr mem_flags operator|(mem_flags a, mem_flags b) {
  return mem_flags(uint(a) | uint(b));
}
enum memory_order {
  memory_order_relaxed,
  memory_order_acquire,
  memory_order_release,
  memory_order_acq_rel,
  memory_order_seq_cst
};
enum thread_scope {
  thread_scope_thread,
  thread_scope_simdgroup,
  thread_scope_threadgroup,
  thread_scope_device,
  thread_scope_system
};
METAL_FUNC void threadgroup_barrier(mem_flags f) { mtl_threadgroup_barrier(uint(f)); }
METAL_FUNC void threadgroup_barrier(mem_flags f, thread_scope) {
  mtl_threadgroup_barrier(uint(f));
}
METAL_FUNC void simdgroup_barrier(mem_flags f) { mtl_simdgroup_barrier(uint(f)); }
METAL_FUNC void simdgroup_barrier(mem_flags f, thread_scope) {
  mtl_simdgroup_barrier(uint(f));
}
METAL_FUNC void atomic_thread_fence(mem_flags, memory_order = memory_order_seq_cst,
                                    thread_scope = thread_scope_device) {
  __atomic_thread_fence(__ATOMIC_SEQ_CST);
}

template <class T>
struct atomic {
  static_assert(sizeof(T) == 4 || is_same_v<T, ulong> || is_same_v<T, bool>,
                "Metal has no atomic of this type");
  T value;
};
template <class T>
using _atomic = atomic<T>;
using atomic_int = atomic<int>;
using atomic_uint = atomic<uint>;
using atomic_float = atomic<float>;
using atomic_bool = atomic<bool>;
using atomic_ulong = atomic<ulong>;

// The host's atomic operations work on integers: the same bytes, seen as one.
template <class T>
using atomic_bits_t =
    std::conditional_t<sizeof(T) == 8, ulong,
                       std::conditional_t<sizeof(T) == 4, uint, uchar>>;
template <class T>
METAL_FUNC volatile atomic_bits_t<T>* bits_of(const volatile atomic<T>* object) {
  return reinterpret_cast<volatile atomic_bits_t<T>*>(const_cast<atomic<T>*>(object));
}
template <class T>
METAL_FUNC T from_bits(atomic_bits_t<T> bits) {
  return as_type<T>(bits);
}
template <class T>
METAL_FUNC atomic_bits_t<T> to_bits(T x) {
  return as_type<atomic_bits_t<T>>(x);
}

template <class T>
METAL_FUNC T atomic_load_explicit(const volatile atomic<T>* object, memory_order) {
  mtl_atomic(object, sizeof(T), kAtomicLoad);
  return from_bits<T>(__atomic_load_n(bits_of(object), __ATOMIC_RELAXED));
}
template <class T, class U>
METAL_FUNC void atomic_store_explicit(volatile atomic<T>* object, U x, memory_order) {
  mtl_atomic(object, sizeof(T), kAtomicStore);
  __atomic_store_n(bits_of(object), to_bits<T>(T(x)), __ATOMIC_RELAXED);
}
template <class T, class U>
METAL_FUNC T atomic_exchange_explicit(volatile atomic<T>* object, U x, memory_order) {
  mtl_atomic(object, sizeof(T), kAtomicUpdate);
  return from_bits<T>(
      __atomic_exchange_n(bits_of(object), to_bits<T>(T(x)), __ATOMIC_RELAXED));
}
template <class T, class U>
METAL_FUNC bool atomic_compare_exchange_weak_explicit(volatile atomic<T>* object,
                                                      T* expected, U desired,
                                                      memory_order, memory_order) {
  mtl_atomic(object, sizeof(T), kAtomicUpdate);
  auto bits = to_bits<T>(*expected);
  bool done =
      !mtl_exchange_fails() &&
      __atomic_compare_exchange_n(bits_of(object), &bits, to_bits<T>(T(desired)), false,
                                  __ATOMIC_RELAXED, __ATOMIC_RELAXED);
  if (!done)
    *expected = from_bits<T>(__atomic_load_n(bits_of(object), __ATOMIC_RELAXED));
  return done;
}

template <class T, class F>
METAL_FUNC T atomic_update(volatile atomic<T>* object, F f) {
  mtl_atomic(object, sizeof(T), kAtomicUpdate);
  auto bits = __atomic_load_n(bits_of(object), __ATOMIC_RELAXED);
  while (!__atomic_compare_exchange_n(bits_of(object), &bits,
                                      to_bits<T>(f(from_bits<T>(bits))), true,
                                      __ATOMIC_RELAXED, __ATOMIC_RELAXED)) {
  }
  return from_bits<T>(bits);
}
#define UPDATE(name, condition, expression)                                    \
  template <class T, class U>                                                  \
    requires(condition)                                                        \
  METAL_FUNC T atomic_fetch_##name##_explicit(volatile atomic<T>* object, U x, \
                                              memory_order) {                  \
    return atomic_update(object, [b = T(x)](T a) { return T(expression); });   \
  }
// clang-format off
UPDATE(add, sizeof(T) == 4, a + b)
UPDATE(sub, sizeof(T) == 4, a - b)
UPDATE(and, is_integral_v<T> && sizeof(T) == 4, a & b)
UPDATE(or, is_integral_v<T> && sizeof(T) == 4, a | b)
UPDATE(xor, is_integral_v<T> && sizeof(T) == 4, a ^ b)
UPDATE(min, is_integral_v<T> && sizeof(T) == 4, a < b ? a : b)
UPDATE(max, is_integral_v<T> && sizeof(T) == 4, a > b ? a : b)
// clang-format on
#undef UPDATE
// All that a 64-bit atomic can do.
template <class U>
METAL_FUNC void atomic_min_explicit(volatile atomic_ulong* object, U x, memory_order) {
  atomic_update(object, [b = ulong(x)](ulong a) { return a < b ? a : b; });
}
template <class U>
METAL_FUNC void atomic_max_explicit(volatile atomic_ulong* object, U x, memory_order) {
  atomic_update(object, [b = ulong(x)](ulong a) { return a > b ? a : b; });
}

}  // namespace metal
