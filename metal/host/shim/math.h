// Metal's math, common, relational, geometric and integer functions.
//
// Each is a function of scalars, lifted to vectors. half and bfloat are computed in
// float (fma in double) and rounded once, as the GPU does; results agree with Metal's
// precise math to the last bit or two, never exactly by promise. metal::fast and
// metal::precise are the same here.
//
// min, max and clamp take operands of one type or of types that C++ would convert; lint
// finds the calls that Metal calls ambiguous.
#pragma once
#include "vectors.h"

namespace metal {

// The type of a function of an A and a B: floating point wins over integers, float over
// half and bfloat.
template <class A, class B>
struct common {
  static constexpr bool a_floats = is_floating_point_v<A>;
  static constexpr bool b_floats = is_floating_point_v<B>;
  using type = std::conditional_t<
      is_same_v<A, B>, A,
      std::conditional_t<
          a_floats != b_floats, std::conditional_t<a_floats, A, B>,
          std::conditional_t<a_floats, float, decltype(declval<A>() + declval<B>())>>>;
};
template <class A, class B>
using common_t = typename common<A, B>::type;
template <class T>
using floating_t = std::conditional_t<is_floating_point_v<T>, T, float>;

// One operand, computed in float as `v`.
#define FUNCTION(name, expression)                                 \
  template <class A>                                               \
    requires(VectorLike<A> || ScalarLike<A>)                       \
  METAL_FUNC auto name(const A& a) {                               \
    return lift(                                                   \
        [](auto x) {                                               \
          float v = float(x);                                      \
          return static_cast<floating_t<decltype(x)>>(expression); \
        },                                                         \
        a);                                                        \
  }
// Two operands, computed in float as `u` and `v`.
#define FUNCTION2(name, expression)                                           \
  template <class A, class B>                                                 \
  METAL_FUNC auto name(const A& a, const B& b) {                              \
    return lift(                                                              \
        [](auto x, auto y) {                                                  \
          float u = float(x), v = float(y);                                   \
          return static_cast<common_t<decltype(x), decltype(y)>>(expression); \
        },                                                                    \
        a, b);                                                                \
  }
// clang-format off
#define FUNCTIONS                                                            \
  FUNCTION(exp, std::exp(v))           FUNCTION(exp2, std::exp2(v))          \
  FUNCTION(exp10, std::pow(10.0f, v))  FUNCTION(log, std::log(v))            \
  FUNCTION(log2, std::log2(v))         FUNCTION(log10, std::log10(v))        \
  FUNCTION(sqrt, std::sqrt(v))         FUNCTION(rsqrt, 1 / std::sqrt(v))     \
  FUNCTION(sin, std::sin(v))           FUNCTION(cos, std::cos(v))            \
  FUNCTION(tan, std::tan(v))           FUNCTION(asin, std::asin(v))          \
  FUNCTION(acos, std::acos(v))         FUNCTION(atan, std::atan(v))          \
  FUNCTION(sinh, std::sinh(v))         FUNCTION(cosh, std::cosh(v))          \
  FUNCTION(tanh, std::tanh(v))         FUNCTION(asinh, std::asinh(v))        \
  FUNCTION(acosh, std::acosh(v))       FUNCTION(atanh, std::atanh(v))        \
  FUNCTION(ceil, std::ceil(v))         FUNCTION(floor, std::floor(v))        \
  FUNCTION(rint, std::nearbyint(v))    FUNCTION(round, std::round(v))        \
  FUNCTION(trunc, std::trunc(v))       FUNCTION(fabs, std::fabs(v))          \
  FUNCTION(sinpi, std::sin(v * M_PI_F)) FUNCTION(cospi, std::cos(v * M_PI_F)) \
  FUNCTION(fract, v - std::floor(v))                                         \
  FUNCTION(saturate, v < 0 ? 0 : v > 1 ? 1 : v)                              \
  FUNCTION2(pow, std::pow(u, v))       FUNCTION2(powr, std::pow(u, v))       \
  FUNCTION2(atan2, std::atan2(u, v))   FUNCTION2(fmod, std::fmod(u, v))      \
  FUNCTION2(divide, u / v)             FUNCTION2(copysign, std::copysign(u, v))
// clang-format on
FUNCTIONS
namespace precise {
FUNCTIONS
}
namespace fast {
FUNCTIONS
}
#undef FUNCTIONS
#undef FUNCTION2
#undef FUNCTION

// A function whose body speaks of the operands themselves, x, y and z; x is a T.
#define LIFTED1(name, ...)                        \
  template <class A>                              \
  METAL_FUNC constexpr auto name(const A& a) {    \
    return lift(                                  \
        [](auto x) {                              \
          using T [[maybe_unused]] = decltype(x); \
          __VA_ARGS__                             \
        },                                        \
        a);                                       \
  }
#define LIFTED2(name, ...)                                                  \
  template <class A, class B>                                               \
  METAL_FUNC constexpr auto name(const A& a, const B& b) {                  \
    return lift(                                                            \
        [](auto x, auto y) {                                                \
          using T [[maybe_unused]] = decltype(x);                           \
          using Both [[maybe_unused]] = common_t<decltype(x), decltype(y)>; \
          __VA_ARGS__                                                       \
        },                                                                  \
        a, b);                                                              \
  }
#define LIFTED3(name, ...)                                             \
  template <class A, class B, class C>                                 \
  METAL_FUNC constexpr auto name(const A& a, const B& b, const C& c) { \
    return lift(                                                       \
        [](auto x, auto y, auto z) {                                   \
          using T [[maybe_unused]] = decltype(x);                      \
          __VA_ARGS__                                                  \
        },                                                             \
        a, b, c);                                                      \
  }
// clang-format off
LIFTED1(abs, return static_cast<T>(x < T(0) ? -x : x == T(0) ? T(0) : x);)
LIFTED1(sign, return x > T(0) ? T(1) : x < T(0) ? T(-1) : T(0);)
LIFTED2(max, Both u = static_cast<Both>(x), v = static_cast<Both>(y);
             return v > u || u != u ? v : u;)
LIFTED2(min, Both u = static_cast<Both>(x), v = static_cast<Both>(y);
             return v < u || u != u ? v : u;)
LIFTED2(fmax, return metal::max(x, y);)
LIFTED2(fmin, return metal::min(x, y);)
LIFTED3(max3, return metal::max(x, metal::max(y, z));)
LIFTED3(min3, return metal::min(x, metal::min(y, z));)
LIFTED3(clamp, return metal::min(metal::max(x, y), z);)
LIFTED2(step, return static_cast<decltype(y)>(y < x ? 0 : 1);)
LIFTED2(ldexp, return static_cast<T>(std::ldexp(float(x), int(y)));)
LIFTED3(select, return z ? static_cast<T>(y) : x;)
LIFTED1(isnan, return x != x;)
LIFTED1(isinf, return float(x) == INFINITY || float(x) == -INFINITY;)
LIFTED1(isfinite, return x - x == T(0);)
LIFTED1(signbit, return std::signbit(float(x));)
// A half's sum of products is exact in double: one rounding, as in hardware.
LIFTED3(fma, if constexpr (is_same_v<T, float>) return std::fma(x, float(y), float(z));
             else return static_cast<T>(std::fma(double(x), double(y), double(z)));)

LIFTED1(popcount, return T(std::popcount(make_unsigned_t<T>(x)));)
LIFTED1(clz, return T(std::countl_zero(make_unsigned_t<T>(x)));)
LIFTED1(ctz, return T(std::countr_zero(make_unsigned_t<T>(x)));)
LIFTED2(rotate, return T(std::rotl(make_unsigned_t<T>(x), int(y)));)
LIFTED2(absdiff, return x > y ? x - y : y - x;)
LIFTED1(reverse_bits, T r = 0;
        for (unsigned i = 0; i < 8 * sizeof(T); ++i) r = T((r << 1) | ((x >> i) & 1));
        return r;)
LIFTED2(mulhi, using Wide = std::conditional_t<std::is_signed_v<T>, __int128,
                                               unsigned __int128>;
        return T(Wide(x) * Wide(y) >> 8 * sizeof(T));)
// clang-format on
#undef LIFTED1
#undef LIFTED2
#undef LIFTED3

template <class A>
METAL_FUNC constexpr auto extract_bits(const A& a, uint offset, uint bits) {
  return lift(
      [=](auto x) {
        using T = decltype(x);
        uint size = 8 * sizeof(T);
        return bits ? T(T(x << (size - offset - bits)) >> (size - bits)) : T(0);
      },
      a);
}
template <class A>
METAL_FUNC constexpr A insert_bits(const A& base, const A& insert, uint offset,
                                   uint bits) {
  A ones = bits >= 8 * sizeof(A) ? ~A(0) : A((A(1) << bits) - 1);
  A mask = A(ones << offset);
  return A((base & ~mask) | ((insert << offset) & mask));
}

template <class A, class B, class C>
METAL_FUNC auto mix(const A& a, const B& b, const C& t) {
  return a + (b - a) * t;
}
template <VectorLike A>
METAL_FUNC bool any(const A& a) {
  bool r = false;
  for (int i = 0; i < vector_size<A>; ++i) r |= bool(a[i]);
  return r;
}
template <VectorLike A>
METAL_FUNC bool all(const A& a) {
  bool r = true;
  for (int i = 0; i < vector_size<A>; ++i) r &= bool(a[i]);
  return r;
}
template <VectorLike A, VectorLike B>
METAL_FUNC auto dot(const A& a, const B& b) {
  element_t<A> r(0);
  for (int i = 0; i < vector_size<A>; ++i)
    r = static_cast<element_t<A>>(r + a[i] * b[i]);
  return r;
}
template <class A>
METAL_FUNC auto length_squared(const A& a) {
  return dot(a, a);
}
template <class A>
METAL_FUNC auto length(const A& a) {
  return metal::sqrt(dot(a, a));
}
template <class A, class B>
METAL_FUNC auto distance(const A& a, const B& b) {
  return length(a - b);
}
template <class A>
METAL_FUNC auto normalize(const A& a) {
  return a * metal::rsqrt(dot(a, a));
}
template <class A, class B>
METAL_FUNC vec<element_t<A>, 3> cross(const A& a, const B& b) {
  return {a[1] * b[2] - a[2] * b[1], a[2] * b[0] - a[0] * b[2],
          a[0] * b[1] - a[1] * b[0]};
}

}  // namespace metal
