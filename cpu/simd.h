// Vectors of floats through the compilers' vector extensions, and the conversions of half types. Included by
// inner_loops.cpp only, inside the namespace of one instruction set. Objects that are compiled with different target
// flags must share nothing, so everything is local to the object and no standard templates are used.
#pragma once
#include <cstddef>
#include <cstdint>
#include <cstring>
#if defined(__AVX2__) || defined(__AVX512F__)
#include <immintrin.h>
#elif defined(__ARM_NEON)
#include <arm_neon.h>
#endif

namespace lattice::LATTICE_ISA {
namespace {

#define LATTICE_INLINE inline __attribute__((always_inline))

#if defined(__AVX512F__)
constexpr int lanes = 16, vectors = 4;  // 32 registers
#elif defined(__AVX2__)
constexpr int lanes = 8, vectors = 2;  // 16 registers
#elif defined(__aarch64__)
constexpr int lanes = 4, vectors = 4;  // 32 registers
#else
constexpr int lanes = 4, vectors = 2;  // 16 registers, no fused multiply-add
#endif

// Rows of the register tile for a block of v vectors: accumulators, one row of b, a broadcast. Row pointers count too:
// beyond eight they no longer fit the general registers.
constexpr int tile_rows(int v) {
#if defined(__AVX512F__)
  return v == 4 ? 6 : 8;
#elif defined(__AVX2__)
  return v == 2 ? 6 : 8;
#elif defined(__aarch64__)
  return v == 4 ? 6 : 8;
#else
  return v == 2 ? 4 : 6;
#endif
}

typedef float Vec __attribute__((vector_size(lanes * 4)));
typedef float LooseVec __attribute__((vector_size(lanes * 4), aligned(4), may_alias));

LATTICE_INLINE Vec load(const float* p) { return *reinterpret_cast<const LooseVec*>(p); }
LATTICE_INLINE void store(float* p, Vec v) { *reinterpret_cast<LooseVec*>(p) = v; }
LATTICE_INLINE Vec splat(float s) { return Vec{} + s; }

// sum + v * s, rounded once wherever the instruction set can. Left to the compiler, GCC 13 fuses all tiles but those of
// a single accumulator, and a row's bits would depend on the rows beside it.
LATTICE_INLINE Vec multiply_add(Vec v, float s, Vec sum) {
#if defined(__AVX512F__)
  return (Vec)_mm512_fmadd_ps((__m512)v, _mm512_set1_ps(s), (__m512)sum);
#elif defined(__AVX2__)
  return (Vec)_mm256_fmadd_ps((__m256)v, _mm256_set1_ps(s), (__m256)sum);
#elif defined(__aarch64__)
  return (Vec)vfmaq_n_f32((float32x4_t)sum, (float32x4_t)v, s);
#else
  return sum + v * s;
#endif
}

LATTICE_INLINE uint32_t bits_of(float f) {
  uint32_t u;
  memcpy(&u, &f, 4);
  return u;
}
LATTICE_INLINE float float_of(uint32_t u) {
  float f;
  memcpy(&f, &u, 4);
  return f;
}

LATTICE_INLINE float from_f16(uint16_t h) {
  uint32_t sign = uint32_t(h & 0x8000) << 16, rest = h & 0x7fff;
  if (rest >= 0x7c00) return float_of(sign | 0x7f800000 | (rest & 0x3ff) << 13);
  // Shifting the exponent by a multiplication makes subnormals come out right.
  return float_of(sign | bits_of(float_of(rest << 13) * 0x1p112f));
}
LATTICE_INLINE uint16_t to_f16(float f) {
  uint32_t u = bits_of(f), sign = u >> 16 & 0x8000, rest = u & 0x7fffffff;
  if (rest > 0x7f800000) return uint16_t(sign | 0x7e00);
  if (rest >= 0x477ff000) return uint16_t(sign | 0x7c00);  // rounds to 2^16 or beyond
  if (rest < 0x38800000) {                                  // subnormal: let the adder round at 2^-24
    return uint16_t(sign | (bits_of(float_of(rest) + 0.5f) - bits_of(0.5f)));
  }
  return uint16_t(sign | ((rest + 0xfff + (rest >> 13 & 1) - 0x38000000) >> 13));
}
LATTICE_INLINE float from_bf16(uint16_t h) { return float_of(uint32_t(h) << 16); }
LATTICE_INLINE uint16_t to_bf16(float f) {
  uint32_t u = bits_of(f);
  if ((u & 0x7fffffff) > 0x7f800000) return uint16_t(u >> 16 | 0x40);
  return uint16_t((u + 0x7fff + (u >> 16 & 1)) >> 16);
}

#if defined(__AVX512F__)
LATTICE_INLINE Vec load_f16(const uint16_t* p) {
  return (Vec)_mm512_cvtph_ps(_mm256_loadu_si256(reinterpret_cast<const __m256i*>(p)));
}
LATTICE_INLINE void store_f16(uint16_t* p, Vec v) {
  _mm256_storeu_si256(reinterpret_cast<__m256i*>(p), _mm512_cvtps_ph((__m512)v, _MM_FROUND_TO_NEAREST_INT));
}
LATTICE_INLINE Vec load_bf16(const uint16_t* p) {
  __m512i wide = _mm512_cvtepu16_epi32(_mm256_loadu_si256(reinterpret_cast<const __m256i*>(p)));
  return (Vec)_mm512_castsi512_ps(_mm512_slli_epi32(wide, 16));
}
#elif defined(__AVX2__)
LATTICE_INLINE Vec load_f16(const uint16_t* p) {
  return (Vec)_mm256_cvtph_ps(_mm_loadu_si128(reinterpret_cast<const __m128i*>(p)));
}
LATTICE_INLINE void store_f16(uint16_t* p, Vec v) {
  _mm_storeu_si128(reinterpret_cast<__m128i*>(p), _mm256_cvtps_ph((__m256)v, _MM_FROUND_TO_NEAREST_INT));
}
LATTICE_INLINE Vec load_bf16(const uint16_t* p) {
  __m256i wide = _mm256_cvtepu16_epi32(_mm_loadu_si128(reinterpret_cast<const __m128i*>(p)));
  return (Vec)_mm256_castsi256_ps(_mm256_slli_epi32(wide, 16));
}
#elif defined(__aarch64__)
LATTICE_INLINE Vec load_f16(const uint16_t* p) { return (Vec)vcvt_f32_f16(vreinterpret_f16_u16(vld1_u16(p))); }
LATTICE_INLINE void store_f16(uint16_t* p, Vec v) {
  vst1_u16(p, vreinterpret_u16_f16(vcvt_f16_f32((float32x4_t)v)));
}
LATTICE_INLINE Vec load_bf16(const uint16_t* p) { return (Vec)vshll_n_u16(vld1_u16(p), 16); }
#else
LATTICE_INLINE Vec load_f16(const uint16_t* p) {
  return Vec{from_f16(p[0]), from_f16(p[1]), from_f16(p[2]), from_f16(p[3])};
}
LATTICE_INLINE void store_f16(uint16_t* p, Vec v) {
  for (int i = 0; i < lanes; ++i) p[i] = to_f16(v[i]);
}
LATTICE_INLINE Vec load_bf16(const uint16_t* p) {
  return Vec{from_bf16(p[0]), from_bf16(p[1]), from_bf16(p[2]), from_bf16(p[3])};
}
#endif

// Bit j is set where p[j] >= 0, for j below n <= mask_lanes.
#if defined(__AVX512F__)
constexpr int mask_lanes = 16;
LATTICE_INLINE uint32_t mask_present(const int32_t* p, int64_t n) {
  return uint32_t(_mm512_cmpge_epi32_mask(
      _mm512_mask_loadu_epi32(_mm512_set1_epi32(-1), __mmask16((1u << n) - 1), p), _mm512_setzero_si512()));
}
#else
constexpr int mask_lanes = 8;
LATTICE_INLINE uint32_t mask_present(const int32_t* p, int64_t n) {
#if defined(__AVX2__)
  if (n == 8) return ~uint32_t(_mm256_movemask_ps(_mm256_loadu_ps(reinterpret_cast<const float*>(p)))) & 0xff;
#elif defined(__aarch64__)
  if (n == 8) {
    const uint32x4_t low = {1, 2, 4, 8}, high = {16, 32, 64, 128};
    uint32x4_t a = vandq_u32(vcgezq_s32(vld1q_s32(p)), low), b = vandq_u32(vcgezq_s32(vld1q_s32(p + 4)), high);
    return vaddvq_u32(vorrq_u32(a, b));
  }
#endif
  uint32_t mask = 0;
  for (int64_t j = 0; j < n; ++j) mask |= uint32_t(p[j] >= 0) << j;
  return mask;
}
#endif

// One element type: vector and scalar loads as float.
struct F32 {
  typedef float Element;
  static LATTICE_INLINE Vec vector(const float* p) { return load(p); }
  static LATTICE_INLINE float scalar(const float* p) { return *p; }
};
struct F16 {
  typedef uint16_t Element;
  static LATTICE_INLINE Vec vector(const uint16_t* p) { return load_f16(p); }
  static LATTICE_INLINE float scalar(const uint16_t* p) { return from_f16(*p); }
};
struct BF16 {
  typedef uint16_t Element;
  static LATTICE_INLINE Vec vector(const uint16_t* p) { return load_bf16(p); }
  static LATTICE_INLINE float scalar(const uint16_t* p) { return from_bf16(*p); }
};

}  // namespace
}  // namespace lattice::LATTICE_ISA
