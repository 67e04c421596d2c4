// Metal's vector types: vec<T, N> and the packed forms, with swizzles.
//
// A swizzle (v.xy, v.wzyx) is a proxy that lies in the same union as the components: it
// converts to a vector when read and scatters when assigned. The common swizzles are
// spelled out; add one where a kernel needs it.
//
// Operators work on any mix of vectors, swizzles and scalars whose sizes agree; the
// result has the vector's element type and each element is rounded to it.
//
// `lift` is how math.h turns a function of scalars into one of vectors.
#pragma once
#include "scalars.h"

namespace metal {

template <class T, int N>
struct vec;

template <class T, int Stored, int... I>
struct swizzle {
  static constexpr int size = sizeof...(I);
  T elements[Stored];  // of the vector that it is a part of

  swizzle() = default;
  constexpr swizzle(const swizzle&) = default;
  constexpr operator vec<T, size>() const { return vec<T, size>(elements[I]...); }
  constexpr T operator[](int i) const {
    constexpr int index[] = {I...};
    return elements[index[i]];
  }
  constexpr swizzle& operator=(const vec<T, size>& v) {
    int k = 0;
    ((elements[I] = v[k++]), ...);
    return *this;
  }
  constexpr swizzle& operator=(const swizzle& o) { return *this = vec<T, size>(o); }
  constexpr swizzle& operator=(T x) { return *this = vec<T, size>(x); }
#define ASSIGN(op, assign_op)                         \
  template <class U>                                  \
  constexpr swizzle& operator assign_op(const U& u) { \
    return *this = vec<T, size>(*this) op u;          \
  }
  // clang-format off
  ASSIGN(+, +=) ASSIGN(-, -=) ASSIGN(*, *=) ASSIGN(/, /=)
  // clang-format on
#undef ASSIGN
};

// The components of a vector by name, and room for the swizzles. MLX keeps matrix
// fragments in vectors of 8 and 16, which have no names.
template <class T, int N>
struct alignas(N * sizeof(T)) components {
  T d[N];
};
#define COPIES(N)                                        \
  components() = default;                                \
  components(const components&) = default;               \
  constexpr components& operator=(const components& o) { \
    for (int i = 0; i < N; ++i) d[i] = o.d[i];           \
    return *this;                                        \
  }
// clang-format off
#define S(name, ...) swizzle<T, 2, __VA_ARGS__> name
template <class T>
struct alignas(2 * sizeof(T)) components<T, 2> {
  union {
    T d[2];
    struct { T x, y; };
    struct { T r, g; };
    S(xx, 0, 0); S(xy, 0, 1); S(yx, 1, 0); S(yy, 1, 1);
  };
  COPIES(2)
};
#undef S
#define SWIZZLES_OF_XYZ                                                            \
  S(xx, 0, 0); S(xy, 0, 1); S(xz, 0, 2); S(yx, 1, 0); S(yy, 1, 1); S(yz, 1, 2);    \
  S(zx, 2, 0); S(zy, 2, 1); S(zz, 2, 2); S(rg, 0, 1); S(gb, 1, 2);                 \
  S(xyz, 0, 1, 2); S(xzy, 0, 2, 1); S(yxz, 1, 0, 2); S(yzx, 1, 2, 0);              \
  S(zxy, 2, 0, 1); S(zyx, 2, 1, 0); S(xxx, 0, 0, 0); S(yyy, 1, 1, 1);              \
  S(zzz, 2, 2, 2); S(rgb, 0, 1, 2)
#define S(name, ...) swizzle<T, 3, __VA_ARGS__> name
template <class T>
struct alignas(4 * sizeof(T)) components<T, 3> {
  union {
    T d[3];
    struct { T x, y, z; };
    struct { T r, g, b; };
    SWIZZLES_OF_XYZ;
  };
  COPIES(3)
};
#undef S
#define S(name, ...) swizzle<T, 4, __VA_ARGS__> name
template <class T>
struct alignas(4 * sizeof(T)) components<T, 4> {
  union {
    T d[4];
    struct { T x, y, z, w; };
    struct { T r, g, b, a; };
    SWIZZLES_OF_XYZ;
    S(xw, 0, 3); S(yw, 1, 3); S(zw, 2, 3); S(wx, 3, 0); S(wy, 3, 1); S(wz, 3, 2);
    S(ww, 3, 3); S(ba, 2, 3);
    S(yzw, 1, 2, 3); S(xyw, 0, 1, 3); S(xzw, 0, 2, 3); S(www, 3, 3, 3);
    S(xyzw, 0, 1, 2, 3); S(wzyx, 3, 2, 1, 0); S(yxwz, 1, 0, 3, 2);
    S(zwxy, 2, 3, 0, 1); S(yzwx, 1, 2, 3, 0); S(xxxx, 0, 0, 0, 0);
    S(yyyy, 1, 1, 1, 1); S(zzzz, 2, 2, 2, 2); S(wwww, 3, 3, 3, 3);
    S(rgba, 0, 1, 2, 3);
  };
  COPIES(4)
};
#undef S
#undef SWIZZLES_OF_XYZ
#undef COPIES
// clang-format on

template <class T, int N>
struct packed_vec;

// What an operand is made of: `size` is 0 for a scalar.
template <class X>
struct operand {
  static constexpr int size = 0;
  using type = X;
};
template <class T, int N>
struct operand<vec<T, N>> {
  static constexpr int size = N;
  using type = T;
};
template <class T, int N>
struct operand<packed_vec<T, N>> : operand<vec<T, N>> {};
template <class T, int Stored, int... I>
struct operand<swizzle<T, Stored, I...>> : operand<vec<T, sizeof...(I)>> {};
template <class X>
constexpr int vector_size = operand<remove_cv_t<remove_reference_t<X>>>::size;
template <class X>
constexpr int element_count = vector_size<X> ? vector_size<X> : 1;
template <class X>
using element_t = typename operand<remove_cv_t<remove_reference_t<X>>>::type;
template <class X>
concept VectorLike = (vector_size<X> > 0);
template <class X>
concept ScalarLike = is_arithmetic_v<remove_cv_t<remove_reference_t<X>>> ||
                     std::is_enum_v<remove_cv_t<remove_reference_t<X>>>;

template <class X>
constexpr auto element(const X& x, int i) {
  if constexpr (vector_size<X> > 0)
    return x[i];
  else
    return x;
}

template <class T, int N>
struct vec : components<T, N> {
  using components<T, N>::d;
  using value_type = T;

  vec() = default;
  vec(const vec&) = default;
  vec& operator=(const vec&) = default;
  constexpr vec(T x) : vec() {
    for (int i = 0; i < N; ++i) d[i] = x;
  }
  template <class S>
    requires(ScalarLike<S> && !is_same_v<S, T>)
  constexpr vec(S x) : vec(static_cast<T>(x)) {}
  template <VectorLike A>
    requires(vector_size<A> == N && !is_same_v<element_t<A>, T>)
  constexpr explicit vec(const A& a) : vec() {
    for (int i = 0; i < N; ++i) d[i] = static_cast<T>(a[i]);
  }
  // float4(a.xy, b, c): parts whose elements add up to N.
  template <class A, class B, class... R>
    requires(element_count<A> + (element_count<B> + ... + element_count<R>) == N)
  constexpr vec(const A& a, const B& b, const R&... rest) : vec() {
    int k = 0;
    auto put = [&](const auto& part) {
      for (int i = 0; i < element_count<decltype(part)>; ++i)
        d[k++] = static_cast<T>(element(part, i));
    };
    put(a);
    put(b);
    (put(rest), ...);
  }
  constexpr T& operator[](int i) { return d[i]; }
  constexpr const T& operator[](int i) const { return d[i]; }
#define ASSIGN(op, assign_op)                                       \
  template <class U>                                                \
  constexpr vec& operator assign_op(const U& u) {                   \
    for (int i = 0; i < N; ++i)                                     \
      d[i] = static_cast<T>(d[i] op static_cast<T>(element(u, i))); \
    return *this;                                                   \
  }
  // clang-format off
  ASSIGN(+, +=) ASSIGN(-, -=) ASSIGN(*, *=) ASSIGN(/, /=) ASSIGN(%, %=)
  ASSIGN(&, &=) ASSIGN(|, |=) ASSIGN(^, ^=) ASSIGN(<<, <<=) ASSIGN(>>, >>=)
  // clang-format on
#undef ASSIGN
};

template <class A, class B>
concept VectorOperands = (VectorLike<A> && (VectorLike<B> || ScalarLike<B>)) ||
                         (ScalarLike<A> && VectorLike<B>);
// The element type of the operand that is a vector, the first if both are.
template <class A, class B>
using common_element_t = element_t<std::conditional_t<VectorLike<A>, A, B>>;
template <class A, class B>
constexpr int common_size = VectorLike<A> ? vector_size<A> : vector_size<B>;

#define BINARY(op, Result)                                                \
  template <class A, class B>                                             \
    requires VectorOperands<A, B>                                         \
  constexpr auto operator op(const A& a, const B& b) {                    \
    using T = common_element_t<A, B>;                                     \
    vec<Result, common_size<A, B>> r;                                     \
    for (int i = 0; i < common_size<A, B>; ++i)                           \
      r.d[i] = static_cast<Result>(static_cast<T>(element(a, i))          \
                                       op static_cast<T>(element(b, i))); \
    return r;                                                             \
  }
#define UNARY(op, Result)                                                           \
  template <VectorLike A>                                                           \
  constexpr auto operator op(const A& a) {                                          \
    vec<Result, vector_size<A>> r;                                                  \
    for (int i = 0; i < vector_size<A>; ++i) r.d[i] = static_cast<Result>(op a[i]); \
    return r;                                                                       \
  }
// clang-format off
BINARY(+, T) BINARY(-, T) BINARY(*, T) BINARY(/, T) BINARY(%, T)
BINARY(&, T) BINARY(|, T) BINARY(^, T) BINARY(<<, T) BINARY(>>, T)
BINARY(==, bool) BINARY(!=, bool) BINARY(<, bool) BINARY(>, bool)
BINARY(<=, bool) BINARY(>=, bool) BINARY(&&, bool) BINARY(||, bool)
UNARY(-, element_t<A>) UNARY(~, element_t<A>) UNARY(!, bool)
// clang-format on
#undef BINARY
#undef UNARY

    // Elements in memory without padding: a packed_float3 has 12 bytes, a float3 16.
    template <class T, int N>
    struct packed_vec {
  T d[N];
  packed_vec() = default;
  constexpr packed_vec(const vec<T, N>& v) {
    for (int i = 0; i < N; ++i) d[i] = v[i];
  }
  template <class... A>
    requires(sizeof...(A) == N)
  constexpr packed_vec(A... a) : d{T(a)...} {}
  constexpr operator vec<T, N>() const {
    vec<T, N> r;
    for (int i = 0; i < N; ++i) r[i] = d[i];
    return r;
  }
  constexpr T& operator[](int i) { return d[i]; }
  constexpr const T& operator[](int i) const { return d[i]; }
};

// A function of scalars, applied to each element where any operand is a vector.
template <class F, class A, class... R>
constexpr auto lift(F f, const A& a, const R&... rest) {
  if constexpr (VectorLike<A> || (... || VectorLike<R>)) {
    constexpr int sizes[] = {vector_size<A>, vector_size<R>...};
    constexpr int n = [&] {
      int most = 0;
      for (int s : sizes) most = s > most ? s : most;
      return most;
    }();
    vec<decltype(f(element(a, 0), element(rest, 0)...)), n> r;
    for (int i = 0; i < n; ++i) r.d[i] = f(element(a, i), element(rest, i)...);
    return r;
  } else {
    return f(a, rest...);
  }
}

template <class To, class From>
METAL_FUNC To as_type(const From& x) {
  static_assert(sizeof(To) == sizeof(From), "as_type needs types of one size");
  To y;
  __builtin_memcpy(&y, &x, sizeof y);
  return y;
}

}  // namespace metal
