// The register tile of int8 features: sums[out[e]] += x[in[e]] @ panel.
//
// A tile of R gathered rows times V vectors of output channels stays in registers over the whole depth. Each step sums
// the products of a few channels into every 32-bit lane: x is read by broadcasts straight through R row pointers, the
// panel from L1 or L2.
//
//   AVX-512 VNNI, AVX-VNNI   4 channels: vpdpbusd, weights plus 128 as its unsigned bytes
//   AVX-512, AVX2, SSE2      2 channels: vpmaddwd of 16 bits, exact where vpmaddubsw would saturate
//   Arm dotprod              4 channels: sdot
//   Arm i8mm                 8 channels: smmla, two rows by two output channels (integer_pairs.h)
//   else                     2 channels of 16 bits, in plain vectors
#pragma once
#if defined(__SSE2__)
#include <immintrin.h>
#endif

#include "integer_loops.h"
#include "simd.h"

namespace lattice::LATTICE_ISA {
namespace {

// 32-bit sums; unsigned, since they may wrap on the way.
typedef uint32_t Sums __attribute__((vector_size(lanes * 4)));
typedef uint32_t LooseSums __attribute__((vector_size(lanes * 4), aligned(4), may_alias));
typedef int32_t SignedSums __attribute__((vector_size(lanes * 4)));

LATTICE_INLINE Sums load_sums(const void* p) { return *static_cast<const LooseSums*>(p); }
LATTICE_INLINE void store_sums(void* p, Sums v) { *static_cast<LooseSums*>(p) = v; }
LATTICE_INLINE Vec as_floats(Sums v) { return __builtin_convertvector((SignedSums)v, Vec); }
LATTICE_INLINE int32_t four_bytes(const void* p) {
  int32_t v;
  memcpy(&v, p, 4);
  return v;
}

#if defined(__AVX512VNNI__) || defined(__AVXVNNI__)
constexpr int step = 4, step_bytes = 4;
constexpr bool is_shifted = true;
#elif defined(__ARM_FEATURE_MATMUL_INT8)
constexpr int step = 8, step_bytes = 8;
constexpr bool is_shifted = false;
#elif defined(__ARM_FEATURE_DOTPROD)
constexpr int step = 4, step_bytes = 4;
constexpr bool is_shifted = false;
#else
constexpr int step = 2, step_bytes = 4;
constexpr bool is_shifted = false;
#endif

// acc + the products of one step: w (lanes, step) from the panel, x (step) for all lanes.
LATTICE_INLINE Sums dot(Sums acc, Sums w, int32_t x) {
#if defined(__AVX512VNNI__)
  return (Sums)_mm512_dpbusd_epi32((__m512i)acc, (__m512i)w, _mm512_set1_epi32(x));
#elif defined(__AVXVNNI__)
  return (Sums)_mm256_dpbusd_avx_epi32((__m256i)acc, (__m256i)w, _mm256_set1_epi32(x));
#elif defined(__AVX512BW__)
  return acc + (Sums)_mm512_madd_epi16((__m512i)w, _mm512_set1_epi32(x));
#elif defined(__AVX2__)
  return acc + (Sums)_mm256_madd_epi16((__m256i)w, _mm256_set1_epi32(x));
#elif defined(__SSE2__)
  return acc + (Sums)_mm_madd_epi16((__m128i)w, _mm_set1_epi32(x));
#elif defined(__ARM_FEATURE_DOTPROD)
  return (Sums)vdotq_s32((int32x4_t)acc, (int8x16_t)w, vreinterpretq_s8_s32(vdupq_n_s32(x)));
#else
  SignedSums pairs = (SignedSums)w;
  return acc + (Sums)((pairs << 16 >> 16) * int32_t(int16_t(x)) + (pairs >> 16) * (x >> 16));
#endif
}

// What a tile adds to: rows of sums, where each begins, and of floats what the whole of a row's products is taken by.
constexpr int most_rows = 8;
struct TileRows {
  const char* x[most_rows];
  const char* from[most_rows];
  char* to[most_rows];
  int32_t taken[most_rows];
  float scale[most_rows];
};

// Stores vector v of row r: integers as they are; floats as what the row held before plus the scaled products.
template <bool SCALED>
LATTICE_INLINE void finish_tile_row(const TileRows& rows, int r, int v, Sums acc) {
  char* to = rows.to[r] + v * lanes * 4;
  if constexpr (!SCALED) return store_sums(to, acc);
  if (is_shifted) acc -= uint32_t(rows.taken[r]) * 128u;
  Vec before = load(reinterpret_cast<const float*>(rows.from[r]) + v * lanes);
  store(reinterpret_cast<float*>(to), before + as_floats(acc) * rows.scale[r]);
}

#if defined(__ARM_FEATURE_MATMUL_INT8)
}  // namespace
}  // namespace lattice::LATTICE_ISA
#include "integer_pairs.h"
namespace lattice::LATTICE_ISA {
namespace {
#else
template <bool SCALED, int R, int V>
LATTICE_INLINE void dot_tile(const TileRows& rows, const char* b, int64_t steps) {
  Sums acc[R][V];
#pragma GCC unroll 8
  for (int r = 0; r < R; ++r)
#pragma GCC unroll 4
    for (int v = 0; v < V; ++v) acc[r][v] = SCALED ? Sums{} : load_sums(rows.from[r] + v * lanes * 4);
  const char* a[R];
#pragma GCC unroll 8
  for (int r = 0; r < R; ++r) a[r] = rows.x[r];
#pragma GCC unroll 1
  for (int64_t s = 0; s < steps; ++s) {
    Sums w[V];
#pragma GCC unroll 4
    for (int v = 0; v < V; ++v) w[v] = load_sums(b + (s * V + v) * lanes * step_bytes);
#pragma GCC unroll 8
    for (int r = 0; r < R; ++r) {
      int32_t x = four_bytes(a[r] + s * step_bytes);
#pragma GCC unroll 4
      for (int v = 0; v < V; ++v) acc[r][v] = dot(acc[r][v], w[v], x);
    }
  }
#pragma GCC unroll 8
  for (int r = 0; r < R; ++r)
#pragma GCC unroll 4
    for (int v = 0; v < V; ++v) finish_tile_row<SCALED>(rows, r, v, acc[r][v]);
}
#endif

// Not inlined: the pointers of a tile and those of the next do not fit the general registers together.
template <bool SCALED, int R, int V>
__attribute__((noinline)) void dot_rows(int n, const TileRows& rows, const char* b, int64_t steps) {
  if (n == R) return dot_tile<SCALED, R, V>(rows, b, steps);
  if constexpr (R > 1) dot_rows<SCALED, R - 1, V>(n, rows, b, steps);
}

alignas(64) const int32_t zeros[lanes * vectors] = {};

// The output channels of one block; sums points at the first of them. taken is null for all blocks but one.
template <bool SCALED, int V>
void dot_block(const IntegerEdges& p, const char* b, int64_t steps, char* sums, int64_t ld, int32_t* taken) {
  constexpr int R = tile_rows(V);
  TileRows rows;
  static_assert(R <= most_rows);
  for (int64_t e = 0; e < p.n;) {
    int n = 0;
    for (; n < R && e < p.n; ++n, ++e) {
      int64_t i = p.in ? p.in[e] : e, o = p.out ? p.out[e] : ~e;
      bool is_first = o < 0;
      if (is_first) o = ~o;
      rows.x[n] = p.x + i * p.ldx;
      rows.to[n] = sums + o * ld * 4;
      rows.from[n] = is_first ? reinterpret_cast<const char*>(zeros) : rows.to[n];
      if (SCALED) {
        rows.taken[n] = is_shifted ? p.row_sums[i * p.ld_sums] : 0;
        rows.scale[n] = p.row_scales[i];
      } else if (is_shifted && taken) {
        taken[o] = (is_first ? 0 : taken[o]) + p.row_sums[i * p.ld_sums];
      }
    }
    for (int64_t ahead = e + R; p.in && ahead < e + 2 * R && ahead < p.n; ++ahead) {
      const char* row = p.x + p.in[ahead] * p.ldx;
      for (int64_t line = 0; line < steps * step_bytes; line += 64) __builtin_prefetch(row + line);
    }
    dot_rows<SCALED, R, V>(n, rows, b, steps);
  }
}

template <bool SCALED, int V>
LATTICE_INLINE void dot_if(int v, const IntegerEdges& p, const char* b, int64_t steps, char* sums, int64_t ld,
                           int32_t* taken) {
  if constexpr (V <= vectors)
    if (v == V) dot_block<SCALED, V>(p, b, steps, sums, ld, taken);
}

template <bool SCALED>
void gather_dot_of(const IntegerEdges& p, const char* panel, int64_t c_in, int64_t c_out, char* sums, int64_t ld,
                   int32_t* taken) {
  int64_t width = (c_out + lanes - 1) / lanes * lanes, steps = (c_in + step - 1) / step;
  for (int64_t n0 = 0; n0 < width; n0 += lanes * vectors) {
    int64_t block = width - n0 < lanes * vectors ? width - n0 : lanes * vectors;
    int v = int(block / lanes);
    const char* b = panel + n0 * steps * step_bytes;
    int32_t* own = n0 ? nullptr : taken;
    dot_if<SCALED, 1>(v, p, b, steps, sums + n0 * 4, ld, own);
    dot_if<SCALED, 2>(v, p, b, steps, sums + n0 * 4, ld, own);
    dot_if<SCALED, 3>(v, p, b, steps, sums + n0 * 4, ld, own);
    dot_if<SCALED, 4>(v, p, b, steps, sums + n0 * 4, ld, own);
  }
}

void gather_dot(const IntegerEdges& p, const char* panel, int64_t c_in, int64_t c_out, void* sums, int64_t ld,
                int32_t* taken) {
  char* to = static_cast<char*>(sums);
  if (p.row_scales) return gather_dot_of<true>(p, panel, c_in, c_out, to, ld, taken);
  gather_dot_of<false>(p, panel, c_in, c_out, to, ld, taken);
}

}  // namespace
}  // namespace lattice::LATTICE_ISA
