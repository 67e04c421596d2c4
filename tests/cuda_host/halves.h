// CUDA's halves on the CPU.

#pragma once
#include <cstdint>
#include <cstring>

using __half = _Float16;

struct __nv_bfloat16 {
  uint16_t bits;

  __nv_bfloat16() = default;
  explicit __nv_bfloat16(float value) {
    uint32_t whole;
    std::memcpy(&whole, &value, 4);
    // To the nearest, of two to the even one; a NaN stays one.
    bits = value != value ? 0x7fc0 : (whole + 0x7fff + (whole >> 16 & 1)) >> 16;
  }
  operator float() const {
    const uint32_t whole = (uint32_t)bits << 16;
    float value;
    std::memcpy(&value, &whole, 4);
    return value;
  }
};

struct __half2 { __half x, y; };
struct __nv_bfloat162 { __nv_bfloat16 x, y; };
inline __half2 __floats2half2_rn(float x, float y) { return {(__half)x, (__half)y}; }
inline __nv_bfloat162 __floats2bfloat162_rn(float x, float y) {
  return {__nv_bfloat16(x), __nv_bfloat16(y)};
}
