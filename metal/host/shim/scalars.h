// Metal's scalar types, constants and type traits, in C++20.
//
// half and bfloat are clang's own _Float16 and __bf16. compile.py turns excess
// precision off, so that each operation rounds to the type, as on the GPU, instead of
// at the end of an expression. Before clang 17 __bf16 had no arithmetic; a small struct
// that rounds through float stands in for it there.
#pragma once
#include <bit>
#include <cfloat>
#include <climits>
#include <cmath>
#include <cstddef>
#include <cstdint>
#include <cstring>
#include <limits>
#include <type_traits>
#include <utility>

using uchar = unsigned char;
using ushort = unsigned short;
using uint = unsigned int;
using ulong = unsigned long;
using half = _Float16;

#if __clang_major__ >= 17 || (defined(__apple_build_version__) && __clang_major__ >= 16)
using bfloat = __bf16;
#else
struct bfloat {
  uint16_t bits;
  bfloat() = default;
  template <class T>
    requires(std::is_arithmetic_v<T> || std::is_same_v<T, half>)
  constexpr bfloat(T x) : bits(round(float(x))) {}
  static constexpr uint16_t round(float x) {
    auto u = std::bit_cast<uint32_t>(x);
    bool nan = (u & 0x7fffffff) > 0x7f800000;
    return uint16_t(nan ? (u >> 16) | 0x40 : (u + 0x7fff + ((u >> 16) & 1)) >> 16);
  }
  constexpr operator float() const {
    return std::bit_cast<float>(uint32_t(bits) << 16);
  }
  constexpr bfloat& operator+=(float x) { return *this = float(*this) + x; }
  constexpr bfloat& operator-=(float x) { return *this = float(*this) - x; }
  constexpr bfloat& operator*=(float x) { return *this = float(*this) * x; }
  constexpr bfloat& operator/=(float x) { return *this = float(*this) / x; }
};
// With another bfloat or an integer the result is a bfloat, with a float a float.
template <class T>
using bfloat_result = std::conditional_t<std::is_integral_v<T>, bfloat, float>;
#define BFLOAT_OPERATOR(op)                                                         \
  constexpr bfloat operator op(bfloat a, bfloat b) { return float(a) op float(b); } \
  template <class T>                                                                \
    requires(std::is_arithmetic_v<T>)                                               \
  constexpr auto operator op(bfloat a, T b) {                                       \
    return bfloat_result<T>(float(a) op float(b));                                  \
  }                                                                                 \
  template <class T>                                                                \
    requires(std::is_arithmetic_v<T>)                                               \
  constexpr auto operator op(T a, bfloat b) {                                       \
    return bfloat_result<T>(float(a) op float(b));                                  \
  }
BFLOAT_OPERATOR(+)
BFLOAT_OPERATOR(-)
BFLOAT_OPERATOR(*)
BFLOAT_OPERATOR(/)
#undef BFLOAT_OPERATOR
#endif

constexpr half operator""h(long double x) { return half(x); }
constexpr half operator"" H(long double x) { return half(x); }
constexpr bfloat operator"" bf(long double x) { return bfloat(float(x)); }
constexpr bfloat operator"" BF(long double x) { return bfloat(float(x)); }

#define METAL_FUNC inline __attribute__((always_inline))
#ifndef INFINITY
#define INFINITY __builtin_inff()
#endif
#ifndef NAN
#define NAN __builtin_nanf("")
#endif
#ifndef MAXFLOAT
#define MAXFLOAT FLT_MAX
#endif
#define M_PI_F 3.14159274101257324219f
#define M_PI_H half(3.14159265f)
#define M_2_SQRTPI_F 1.12837922573089599609f
#define M_SQRT1_2_F 0.707106769084930419922f
#define M_SQRT2_F 1.41421353816986083984f
#define M_LN2_F 0.693147182464599609375f
#define M_LOG2E_F 1.44269502162933349609f
#define M_E_F 2.71828174591064453125f
#define HALF_MAX half(65504.0f)
#define HALF_MIN half(6.103515625e-5f)

namespace metal {
using std::bool_constant;
using std::conditional;
using std::conditional_t;
using std::decay_t;
using std::declval;
using std::enable_if;
using std::enable_if_t;
using std::false_type;
using std::index_sequence;
using std::integral_constant;
using std::is_base_of_v;
using std::is_const_v;
using std::is_convertible;
using std::is_convertible_v;
using std::is_enum_v;
using std::is_integral;
using std::is_integral_v;
using std::is_pointer_v;
using std::is_reference_v;
using std::is_same;
using std::is_same_v;
using std::is_trivially_copyable_v;
using std::is_unsigned;
using std::is_unsigned_v;
using std::is_void_v;
using std::make_index_sequence;
using std::make_signed_t;
using std::make_unsigned_t;
using std::ptrdiff_t;
using std::remove_const_t;
using std::remove_cv;
using std::remove_cv_t;
using std::remove_pointer_t;
using std::remove_reference;
using std::remove_reference_t;
using std::size_t;
using std::true_type;
using std::void_t;
template <class T>
using remove_addrspace_t = T;  // there is one address space here; lint checks them
template <class... B>
struct _disjunction : std::disjunction<B...> {};
template <class... B>
struct _conjunction : std::conjunction<B...> {};
template <class T>
struct is_floating_point : bool_constant<std::is_floating_point_v<T> ||
                                         is_same_v<T, half> || is_same_v<T, bfloat>> {};
template <class T>
constexpr bool is_floating_point_v = is_floating_point<remove_cv_t<T>>::value;
template <class T>
struct is_arithmetic : bool_constant<is_floating_point_v<T> || is_integral_v<T>> {};
template <class T>
constexpr bool is_arithmetic_v = is_arithmetic<T>::value;
template <class T>
struct is_signed : bool_constant<is_floating_point_v<T> || std::is_signed_v<T>> {};
template <class T>
constexpr bool is_signed_v = is_signed<T>::value;
template <class T>
constexpr bool is_scalar_v = is_arithmetic_v<T>;

template <class T>
struct numeric_limits : std::numeric_limits<T> {};
template <class T>
struct short_float_limits {
  static constexpr bool is_specialized = true, is_signed = true, is_integer = false;
  static constexpr bool has_infinity = true;
  static constexpr T infinity() { return T(__builtin_inff()); }
  static constexpr T quiet_NaN() { return T(__builtin_nanf("")); }
};
template <>
struct numeric_limits<half> : short_float_limits<half> {
  static constexpr int digits = 11, digits10 = 3, max_exponent = 16, min_exponent = -13;
  static constexpr half max() { return half(65504.0f); }
  static constexpr half lowest() { return half(-65504.0f); }
  static constexpr half min() { return half(6.103515625e-5f); }
  static constexpr half denorm_min() { return half(5.9604645e-8f); }
  static constexpr half epsilon() { return half(9.765625e-4f); }
};
template <>
struct numeric_limits<bfloat> : short_float_limits<bfloat> {
  static constexpr int digits = 8, digits10 = 2, max_exponent = 128,
                       min_exponent = -125;
  static constexpr bfloat max() { return bfloat(3.38953139e38f); }
  static constexpr bfloat lowest() { return bfloat(-3.38953139e38f); }
  static constexpr bfloat min() { return bfloat(1.17549435e-38f); }
  static constexpr bfloat epsilon() { return bfloat(7.8125e-3f); }
};
}  // namespace metal
