// Metal's types as declarations, for lint.py: nothing here runs.
//
// clang's C++ for OpenCL (-x clcpp) has the address spaces that Metal has: device is
// __global, threadgroup __local, constant __constant, thread __private. With types and
// functions declared as Metal has them, no more and no less convertible, clang finds
// what the shim, with its one address space and C++'s conversions, lets through.
//
// bfloat converts to float by itself and from nothing; vectors convert to no other
// vector; a reference or pointer belongs to one address space.
#pragma once
#pragma OPENCL EXTENSION cl_khr_fp16 : enable

typedef unsigned char uchar;
typedef unsigned short ushort;
typedef unsigned int uint;
typedef unsigned long ulong;
typedef signed char int8_t;
typedef short int16_t;
typedef int int32_t;
typedef long int64_t;
typedef uchar uint8_t;
typedef ushort uint16_t;
typedef uint uint32_t;
typedef ulong uint64_t;
typedef ulong size_t;
typedef long ptrdiff_t;

#define device __global
#define constant __constant
#define threadgroup __local
#define thread __private
#define METAL_FUNC inline __attribute__((always_inline))
#define INFINITY __builtin_inff()
#define NAN __builtin_nanf("")
#define EACH_SPACE(M) M(__private) M(__global) M(__local)

struct bfloat {
  ushort bits;
  bfloat() = default;
  bfloat(const bfloat&) = default;
  bfloat(const __constant bfloat&);
  bfloat& operator=(const bfloat&) = default;
  explicit bfloat(float);
  explicit bfloat(half);
  explicit bfloat(int);
  explicit bfloat(uint);
  explicit bfloat(long);
  explicit bfloat(ulong);
  explicit bfloat(short);
  explicit bfloat(ushort);
  explicit bfloat(char);
  explicit bfloat(uchar);
  explicit bfloat(bool);
  operator float() const;
  operator float() const __constant;
};
bfloat operator+(bfloat, bfloat);
bfloat operator-(bfloat, bfloat);
bfloat operator*(bfloat, bfloat);
bfloat operator/(bfloat, bfloat);
bfloat operator-(bfloat);
#define BFLOAT_ASSIGN(space)                      \
  space bfloat& operator+=(space bfloat&, float); \
  space bfloat& operator-=(space bfloat&, float); \
  space bfloat& operator*=(space bfloat&, float); \
  space bfloat& operator/=(space bfloat&, float);
EACH_SPACE(BFLOAT_ASSIGN)
#undef BFLOAT_ASSIGN

namespace metal {

template <class T, T v>
struct integral_constant {
  static constexpr __constant T value = v;
  constexpr operator T() const { return v; }
};
template <bool B>
using bool_constant = integral_constant<bool, B>;
using true_type = bool_constant<true>;
using false_type = bool_constant<false>;
template <class A, class B>
struct is_same : false_type {};
template <class A>
struct is_same<A, A> : true_type {};
template <class A, class B>
constexpr __constant bool is_same_v = is_same<A, B>::value;
template <class F, class T>
constexpr __constant bool is_convertible_v = __is_convertible_to(F, T);
template <bool B, class T = void>
struct enable_if {};
template <class T>
struct enable_if<true, T> {
  using type = T;
};
template <bool B, class T = void>
using enable_if_t = typename enable_if<B, T>::type;
template <bool B, class T, class F>
struct conditional {
  using type = T;
};
template <class T, class F>
struct conditional<false, T, F> {
  using type = F;
};
template <bool B, class T, class F>
using conditional_t = typename conditional<B, T, F>::type;

template <class T>
struct unqualified {
  using type = T;
};
template <class T>
struct unqualified<const T> {
  using type = T;
};
#define UNQUALIFIED(space)            \
  template <class T>                  \
  struct unqualified<space T> {       \
    using type = T;                   \
  };                                  \
  template <class T>                  \
  struct unqualified<const space T> { \
    using type = T;                   \
  };
EACH_SPACE(UNQUALIFIED)
UNQUALIFIED(__constant)
#undef UNQUALIFIED
template <class T>
using remove_cv_t = typename unqualified<T>::type;
template <class T>
using remove_addrspace_t = remove_cv_t<T>;

template <class T>
struct kind {
  enum { integral = 0, floating = 0 };
};
#define INTEGRAL(T)                      \
  template <>                            \
  struct kind<T> {                       \
    enum { integral = 1, floating = 0 }; \
  };
#define FLOATING(T)                      \
  template <>                            \
  struct kind<T> {                       \
    enum { integral = 0, floating = 1 }; \
  };
// clang-format off
INTEGRAL(bool) INTEGRAL(char) INTEGRAL(uchar) INTEGRAL(signed char) INTEGRAL(short)
INTEGRAL(ushort) INTEGRAL(int) INTEGRAL(uint) INTEGRAL(long) INTEGRAL(ulong)
FLOATING(float) FLOATING(half) FLOATING(bfloat)
// clang-format on
#undef INTEGRAL
#undef FLOATING
            template <class T>
            constexpr __constant bool is_integral_v = kind<remove_cv_t<T>>::integral;
template <class T>
constexpr __constant bool is_floating_point_v = kind<remove_cv_t<T>>::floating;
template <class T>
constexpr __constant bool is_arithmetic_v = is_integral_v<T> || is_floating_point_v<T>;
template <class T>
struct is_integral : bool_constant<is_integral_v<T>> {};
template <class T>
struct is_floating_point : bool_constant<is_floating_point_v<T>> {};

template <class T>
struct numeric_limits {
  static constexpr T max();
  static constexpr T min();
  static constexpr T lowest();
  static constexpr T infinity();
  static constexpr T quiet_NaN();
  static constexpr T epsilon();
};

template <class T, int N>
struct vec;
template <class T, int N>
struct swizzle {
  operator vec<T, N>() const;
  operator vec<T, N>() const __constant;
  swizzle& operator=(vec<T, N>);
};
#define SWIZZLES_OF_XY swizzle<T, 2> xx, xy, yx, yy;
#define SWIZZLES_OF_XYZ                     \
  SWIZZLES_OF_XY                            \
  swizzle<T, 2> xz, yz, zx, zy, zz, rg, gb; \
  swizzle<T, 3> xyz, xzy, yxz, yzx, zxy, zyx, xxx, yyy, zzz, rgb;
// As large as Metal's, so that sizeof and as_type are.
template <class T, int N>
struct components {
  T elements[N];
};
template <class T>
struct components<T, 2> {
  union {
    struct {
      T x, y;
    };
    struct {
      T r, g;
    };
    SWIZZLES_OF_XY
  };
};
template <class T>
struct components<T, 3> {
  union {
    struct {
      T x, y, z;
    };
    struct {
      T r, g, b;
    };
    SWIZZLES_OF_XYZ
  };
};
template <class T>
struct components<T, 4> {
  union {
    struct {
      T x, y, z, w;
    };
    struct {
      T r, g, b, a;
    };
    SWIZZLES_OF_XYZ
    swizzle<T, 2> xw, yw, zw, wx, wy, wz, ww, ba;
    swizzle<T, 3> yzw, xyw, xzw, www;
    swizzle<T, 4> xyzw, wzyx, yxwz, zwxy, yzwx, xxxx, yyyy, zzzz, wwww, rgba;
  };
};

template <class X>
struct element_count {
  enum { n = 1 };
};
template <class T, int N>
struct element_count<vec<T, N>> {
  enum { n = N };
};
template <class T, int N>
struct element_count<swizzle<T, N>> {
  enum { n = N };
};
template <class... A>
struct total {
  enum { n = 0 };
};
template <class A, class... R>
struct total<A, R...> {
  enum { n = int(element_count<A>::n) + int(total<R...>::n) };
};

#define INDEX(space)              \
  space T& operator[](int) space; \
  const space T& operator[](int) const space;
template <class T, int N>
struct alignas(sizeof(T) * (N == 3 ? 4 : N)) vec : components<T, N> {
  vec() = default;
  vec(const vec&);
  vec(const __constant vec&);
  vec& operator=(const vec&) = default;
  template <class S, class = enable_if_t<is_arithmetic_v<S>>>
  vec(S);
  template <class U, class = enable_if_t<!is_same_v<U, T>>>
  explicit vec(vec<U, N>);
  template <class A, class B, class... R,
            class = enable_if_t<total<A, B, R...>::n == N>>
  vec(A, B, R...);
  EACH_SPACE(INDEX)
  const __constant T& operator[](int) const __constant;
};
template <class T, int N>
struct packed_vec {
  T d[N];
  packed_vec() = default;
  packed_vec(vec<T, N>);
  template <class A, class B, class... R,
            class = enable_if_t<total<A, B, R...>::n == N>>
  packed_vec(A, B, R...);
  operator vec<T, N>() const;
  operator vec<T, N>() const __constant;
  EACH_SPACE(INDEX)
};
#undef INDEX

// The operands that a binary operator takes, and what it gives.
template <class A, class B>
struct operands {};
template <class T, int N>
struct of {
  using type = vec<T, N>;
  using truth = vec<bool, N>;
};
template <bool B, class T, int N>
struct of_if {};
template <class T, int N>
struct of_if<true, T, N> : of<T, N> {};
template <class T, int N>
struct operands<vec<T, N>, vec<T, N>> : of<T, N> {};
template <class T, int N>
struct operands<vec<T, N>, swizzle<T, N>> : of<T, N> {};
template <class T, int N>
struct operands<swizzle<T, N>, vec<T, N>> : of<T, N> {};
template <class T, int N>
struct operands<swizzle<T, N>, swizzle<T, N>> : of<T, N> {};
template <class T, int N, class S>
struct operands<vec<T, N>, S> : of_if<is_arithmetic_v<S>, T, N> {};
template <class T, int N, class S>
struct operands<S, vec<T, N>> : of_if<is_arithmetic_v<S>, T, N> {};
template <class T, int N, class S>
struct operands<swizzle<T, N>, S> : of_if<is_arithmetic_v<S>, T, N> {};
template <class T, int N, class S>
struct operands<S, swizzle<T, N>> : of_if<is_arithmetic_v<S>, T, N> {};
#define BINARY(op, assign_op)                                                       \
  template <class A, class B>                                                       \
  typename operands<A, B>::type operator op(A, B);                                  \
  template <class T, int N, class B, class = typename operands<vec<T, N>, B>::type> \
  vec<T, N>& operator assign_op(vec<T, N>&, B);                                     \
  template <class T, int N, class B, class = typename operands<vec<T, N>, B>::type> \
  swizzle<T, N>& operator assign_op(swizzle<T, N>&, B);
#define COMPARISON(op)        \
  template <class A, class B> \
  typename operands<A, B>::truth operator op(A, B);
// clang-format off
BINARY(+, +=) BINARY(-, -=) BINARY(*, *=) BINARY(/, /=) BINARY(%, %=)
BINARY(&, &=) BINARY(|, |=) BINARY(^, ^=) BINARY(<<, <<=) BINARY(>>, >>=)
COMPARISON(==) COMPARISON(!=) COMPARISON(<) COMPARISON(>) COMPARISON(<=)
COMPARISON(>=) COMPARISON(&&) COMPARISON(||)
    // clang-format on
    template <class T, int N>
    vec<T, N> operator-(vec<T, N>);
template <class T, int N>
vec<T, N> operator~(vec<T, N>);
template <class T, int N>
vec<bool, N> operator!(vec<T, N>);
template <class To, class From, class = enable_if_t<sizeof(To) == sizeof(From)>>
To as_type(From);
template <class To, class T, int N, class = enable_if_t<sizeof(To) == sizeof(vec<T, N>)>>
To as_type(swizzle<T, N>);

}  // namespace metal

#define VECTOR_NAMES(T)                          \
  using T##2 = metal::vec<T, 2>;                 \
  using T##3 = metal::vec<T, 3>;                 \
  using T##4 = metal::vec<T, 4>;                 \
  using packed_##T##2 = metal::packed_vec<T, 2>; \
  using packed_##T##3 = metal::packed_vec<T, 3>; \
  using packed_##T##4 = metal::packed_vec<T, 4>;
// clang-format off
VECTOR_NAMES(char) VECTOR_NAMES(uchar) VECTOR_NAMES(short) VECTOR_NAMES(ushort)
VECTOR_NAMES(int) VECTOR_NAMES(uint) VECTOR_NAMES(long) VECTOR_NAMES(ulong)
VECTOR_NAMES(half) VECTOR_NAMES(bfloat) VECTOR_NAMES(float)
// clang-format on
#undef VECTOR_NAMES
            using bool2 = metal::vec<bool, 2>;
using bool3 = metal::vec<bool, 3>;
using bool4 = metal::vec<bool, 4>;
using metal::as_type;
