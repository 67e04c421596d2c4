// Metal's functions as declarations, for lint.py: nothing here runs.
//
// Math takes operands of one type and gives that type, so that min(int, uint) is the
// ambiguity that it is in Metal. Atomics take the address space of their object, and
// those on floats add, subtract and exchange only. A simdgroup_matrix is loaded from
// and stored to elements of its own type, in device or threadgroup memory.
//
// MLX's utilities, which every kernel gets, stand at the end as declarations: their own
// text overloads on address spaces in ways that clcpp does not take.
#pragma once
#include "types.h"

// Names that clang declares for OpenCL by itself.
#define atomic_int metal_atomic_int
#define atomic_uint metal_atomic_uint
#define atomic_float metal_atomic_float
#define atomic_ulong metal_atomic_ulong
#define memory_order metal_memory_order
#define memory_order_relaxed metal_memory_order_relaxed
#define memory_order_seq_cst metal_memory_order_seq_cst

namespace metal {

#define FUNCTION1(name)              \
  float name(float);                 \
  half name(half);                   \
  bfloat name(bfloat);               \
  template <int N>                   \
  vec<float, N> name(vec<float, N>); \
  template <int N>                   \
  vec<half, N> name(vec<half, N>);
#define FUNCTION2(name)        \
  float name(float, float);    \
  half name(half, half);       \
  bfloat name(bfloat, bfloat); \
  template <class T, int N>    \
  vec<T, N> name(vec<T, N>, vec<T, N>);
#define FUNCTION3(name)                \
  float name(float, float, float);     \
  half name(half, half, half);         \
  bfloat name(bfloat, bfloat, bfloat); \
  template <class T, int N>            \
  vec<T, N> name(vec<T, N>, vec<T, N>, vec<T, N>);
#define INTEGER1(name) \
  template <class T>   \
  enable_if_t<is_integral_v<T>, T> name(T);
#define INTEGER2(name)         \
  int name(int, int);          \
  uint name(uint, uint);       \
  short name(short, short);    \
  ushort name(ushort, ushort); \
  long name(long, long);       \
  ulong name(ulong, ulong);    \
  char name(char, char);       \
  uchar name(uchar, uchar);
// clang-format off
#define FUNCTIONS                                                                  \
  FUNCTION1(exp) FUNCTION1(exp2) FUNCTION1(exp10) FUNCTION1(log) FUNCTION1(log2)   \
  FUNCTION1(log10) FUNCTION1(sqrt) FUNCTION1(rsqrt) FUNCTION1(sin) FUNCTION1(cos)  \
  FUNCTION1(tan) FUNCTION1(asin) FUNCTION1(acos) FUNCTION1(atan) FUNCTION1(sinh)   \
  FUNCTION1(cosh) FUNCTION1(tanh) FUNCTION1(asinh) FUNCTION1(acosh)                \
  FUNCTION1(atanh) FUNCTION1(ceil) FUNCTION1(floor) FUNCTION1(rint)                \
  FUNCTION1(round) FUNCTION1(trunc) FUNCTION1(fabs) FUNCTION1(fract)               \
  FUNCTION1(saturate) FUNCTION2(pow) FUNCTION2(powr) FUNCTION2(atan2)              \
  FUNCTION2(fmod) FUNCTION2(divide) FUNCTION2(copysign)
FUNCTIONS
namespace precise { FUNCTIONS }
namespace fast { FUNCTIONS }
FUNCTION1(sign) FUNCTION1(abs) INTEGER1(abs)
FUNCTION2(max) INTEGER2(max) FUNCTION2(min) INTEGER2(min)
FUNCTION2(fmax) FUNCTION2(fmin) FUNCTION2(step) INTEGER2(mulhi) INTEGER2(absdiff)
FUNCTION3(fma) FUNCTION3(mix) FUNCTION3(clamp)
INTEGER1(popcount) INTEGER1(clz) INTEGER1(ctz) INTEGER1(reverse_bits)
// clang-format on
#undef FUNCTIONS
#undef FUNCTION1
#undef FUNCTION2
#undef FUNCTION3
#undef INTEGER1
#undef INTEGER2
                int clamp(int, int, int);
uint clamp(uint, uint, uint);
template <class T>
enable_if_t<is_integral_v<T>, T> rotate(T, T);
template <class T>
enable_if_t<is_integral_v<T>, T> extract_bits(T, uint, uint);
template <class T>
enable_if_t<is_integral_v<T>, T> insert_bits(T, T, uint, uint);
template <class T>
enable_if_t<is_floating_point_v<T>, bool> isnan(T);
template <class T>
enable_if_t<is_floating_point_v<T>, bool> isinf(T);
template <class T>
enable_if_t<is_floating_point_v<T>, bool> isfinite(T);
template <class T>
enable_if_t<is_arithmetic_v<T>, T> select(T, T, bool);
template <class T, int N>
vec<T, N> select(vec<T, N>, vec<T, N>, vec<bool, N>);
template <class T, int N>
T dot(vec<T, N>, vec<T, N>);
template <class T, int N>
T length(vec<T, N>);
template <class T, int N>
bool any(vec<T, N>);
template <class T, int N>
bool all(vec<T, N>);
template <class T>
vec<T, 3> cross(vec<T, 3>, vec<T, 3>);

enum class mem_flags : uint {
  mem_none = 0,
  mem_device = 1,
  mem_threadgroup = 2,
  mem_texture = 4
};
constexpr mem_flags operator|(mem_flags a, mem_flags b) {
  return mem_flags(uint(a) | uint(b));
}
enum memory_order { memory_order_relaxed, memory_order_seq_cst };
enum thread_scope { thread_scope_device, thread_scope_system };
void threadgroup_barrier(mem_flags);
void simdgroup_barrier(mem_flags);
void atomic_thread_fence(mem_flags, memory_order, thread_scope);

template <class T>
struct atomic {
  T value;
  atomic() = default;

 private:
  atomic(const atomic&);
};
// Of 64 bits there are a least and a greatest value alone.
template <class T>
constexpr __constant bool is_atomic_v = sizeof(T) <= 4;
using atomic_int = atomic<int>;
using atomic_uint = atomic<uint>;
using atomic_float = atomic<float>;
using atomic_bool = atomic<bool>;
using atomic_ulong = atomic<ulong>;
template <class T>
struct same {
  using type = T;
};
// Keeps the operand out of the deduction: it converts to the object's type.
template <class T>
using same_t = typename same<T>::type;
#define ATOMIC(space, name)                               \
  template <class T, class = enable_if_t<is_atomic_v<T>>> \
  T atomic_##name##_explicit(volatile space atomic<T>*, same_t<T>, memory_order);
#define INTEGER_ATOMIC(space, name)                                            \
  template <class T, class = enable_if_t<is_integral_v<T> && is_atomic_v<T>>> \
  T atomic_##name##_explicit(volatile space atomic<T>*, same_t<T>, memory_order);
#define ATOMICS(space)                                                                \
  template <class T, class = enable_if_t<is_atomic_v<T>>>                             \
  T atomic_load_explicit(const volatile space atomic<T>*, memory_order);              \
  template <class T, class = enable_if_t<is_atomic_v<T>>>                             \
  void atomic_store_explicit(volatile space atomic<T>*, same_t<T>, memory_order);     \
  template <class T, class = enable_if_t<is_atomic_v<T>>>                             \
  bool atomic_compare_exchange_weak_explicit(volatile space atomic<T>*, __private T*, \
                                             same_t<T>, memory_order, memory_order);  \
  ATOMIC(space, exchange)                                                             \
  ATOMIC(space, fetch_add)                                                            \
  ATOMIC(space, fetch_sub)                                                            \
  INTEGER_ATOMIC(space, fetch_and)                                                    \
  INTEGER_ATOMIC(space, fetch_or)                                                     \
  INTEGER_ATOMIC(space, fetch_xor)                                                    \
  INTEGER_ATOMIC(space, fetch_min)                                                    \
  INTEGER_ATOMIC(space, fetch_max)
ATOMICS(__global)
ATOMICS(__local)
void atomic_min_explicit(volatile __global atomic_ulong*, ulong, memory_order);
void atomic_max_explicit(volatile __global atomic_ulong*, ulong, memory_order);
#undef ATOMICS
#undef INTEGER_ATOMIC
#undef ATOMIC

// What passes between the lanes of a simdgroup.
template <class T>
struct lane {
  using type = T;
  using element = T;
};
template <class T, int N>
struct lane<vec<T, N>> {
  using type = vec<T, N>;
  using element = T;
};
// Of shuffles MLX's utilities have those of 64 bits and of bool.
template <class T>
struct number : lane<T> {
  using element = typename lane<T>::element;
  static_assert(!is_same_v<element, bool>, "a bool is no number between lanes");
  static_assert(is_arithmetic_v<element>, "only numbers pass between lanes");
  static_assert(sizeof(element) <= 4, "takes at most 32 bits a lane");
};
template <class T>
struct integer : number<T> {
  static_assert(is_integral_v<typename lane<T>::element>, "takes integers");
};
#define SIMD(kind, name)                  \
  template <class T>                      \
  typename kind<T>::type simd_##name(T);  \
  template <class T>                      \
  typename kind<T>::type quad_##name(T);
#define FROM_LANE(kind, name)                     \
  template <class T>                              \
  typename kind<T>::type simd_##name(T, ushort);  \
  template <class T>                              \
  typename kind<T>::type quad_##name(T, ushort);
// clang-format off
SIMD(number, sum) SIMD(number, product) SIMD(number, min) SIMD(number, max)
SIMD(integer, and) SIMD(integer, or) SIMD(integer, xor) SIMD(number, broadcast_first)
SIMD(number, prefix_exclusive_sum) SIMD(number, prefix_inclusive_sum)
SIMD(number, prefix_exclusive_product) SIMD(number, prefix_inclusive_product)
FROM_LANE(lane, shuffle) FROM_LANE(lane, shuffle_up) FROM_LANE(lane, shuffle_down)
FROM_LANE(number, shuffle_xor) FROM_LANE(number, broadcast)
FROM_LANE(number, shuffle_rotate_up) FROM_LANE(number, shuffle_rotate_down)
// clang-format on
#undef SIMD
#undef FROM_LANE
template <class T>
typename lane<T>::type simd_shuffle_and_fill_up(T, T, ushort);
template <class T>
typename number<T>::type simd_shuffle_and_fill_down(T, T, ushort);
struct simd_vote {
  typedef ulong vote_t;
  explicit operator ulong() const;
  bool all() const;
  bool any() const;
};
simd_vote simd_ballot(bool);
simd_vote simd_active_threads_mask();
bool simd_any(bool);
bool simd_all(bool);
bool simd_is_first();

template <class T, int R = 8, int C = 8>
struct simdgroup_matrix {
  static_assert(is_floating_point_v<T> && R == 8 && C == 8,
                "simdgroup matrices are 8 x 8, of half, bfloat or float");
  vec<T, 2> elements;  // the registers of a lane, for sizeof
  simdgroup_matrix() = default;
  explicit simdgroup_matrix(T);
  __private vec<T, 64>& thread_elements() __private;
};
using simdgroup_float8x8 = simdgroup_matrix<float>;
using simdgroup_half8x8 = simdgroup_matrix<half>;
using simdgroup_bfloat8x8 = simdgroup_matrix<bfloat>;
template <class T, int R, int C>
simdgroup_matrix<T, R, C> make_filled_simdgroup_matrix(T);
#define MATRIX(space)                                                               \
  template <class T>                                                                \
  void simdgroup_load(__private simdgroup_matrix<T>&, const space T*, ulong = 8,    \
                      vec<ulong, 2> = 0, bool = false);                             \
  template <class T>                                                                \
  void simdgroup_store(simdgroup_matrix<T>, space T*, ulong = 8, vec<ulong, 2> = 0, \
                       bool = false);
MATRIX(__global)
MATRIX(__local)
#undef MATRIX
template <class D, class A, class B, class C>
void simdgroup_multiply_accumulate(__private simdgroup_matrix<D>&, simdgroup_matrix<A>,
                                   simdgroup_matrix<B>, simdgroup_matrix<C>);
template <class D, class A, class B>
void simdgroup_multiply(__private simdgroup_matrix<D>&, simdgroup_matrix<A>,
                        simdgroup_matrix<B>);

}  // namespace metal
#include "tensor_ops.h"

using namespace metal;
typedef half float16_t;
typedef bfloat bfloat16_t;
template <typename IdxT = int64_t>
IdxT elem_to_loc(IdxT, constant const int* shape, constant const int64_t* strides, int);
template <typename U>
struct Limits {
  static constexpr constant U max = U(0), min = U(0);
  static constexpr constant U finite_max = U(0), finite_min = U(0);
};
template <typename T, typename U>
inline T ceildiv(T a, U b) {
  return (a + b - 1) / b;
}
