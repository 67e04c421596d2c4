// The two register tiles that all contractions run on.
//
// gather_gemm   y[out[e]] += x[in[e]] @ panel.  A tile of R gathered rows times V vectors of output channels stays in
//               registers over the whole depth; x is read by broadcasts straight through R row pointers (no packing),
//               the panel from L1, y rows (float32 scratch of the caller) are loaded and stored once per tile.
// outer         w += x^T dy over a block of edges: R input channels times V vectors of output channels stay in
//               registers over the block.
//
// With AVX-512, V = 4, R = 6: 24 accumulators; per step 4 vector loads and 6 broadcasts feed 24 multiply-adds.
#pragma once
#include "kernel_table.h"
#include "simd.h"

namespace lattice::LATTICE_ISA {
namespace {

constexpr int64_t depth_block = 128;  // of c_in: a block of the panel (128 x 64 floats) shares L1 with the rows

template <int R, int V>
LATTICE_INLINE void gemm_tile(const float* const* x, const float* b, int64_t depth, float* const* y) {
  Vec acc[R][V];
#pragma GCC unroll 8
  for (int r = 0; r < R; ++r)
#pragma GCC unroll 4
    for (int v = 0; v < V; ++v) acc[r][v] = load(y[r] + v * lanes);
  const float* a[R];
#pragma GCC unroll 8
  for (int r = 0; r < R; ++r) a[r] = x[r];
#pragma GCC unroll 1
  for (int64_t c = 0; c < depth; ++c) {
    Vec w[V];
#pragma GCC unroll 4
    for (int v = 0; v < V; ++v) w[v] = load(b + c * (V * lanes) + v * lanes);
#pragma GCC unroll 8
    for (int r = 0; r < R; ++r) {
      float s = a[r][c];
#pragma GCC unroll 4
      for (int v = 0; v < V; ++v) acc[r][v] += w[v] * s;
    }
  }
#pragma GCC unroll 8
  for (int r = 0; r < R; ++r)
#pragma GCC unroll 4
    for (int v = 0; v < V; ++v) store(y[r] + v * lanes, acc[r][v]);
}

template <int R, int V>
void gemm_rows(int rows, const float* const* x, const float* b, int64_t depth, float* const* y) {
  if (rows == R) return gemm_tile<R, V>(x, b, depth, y);
  if constexpr (R > 1) gemm_rows<R - 1, V>(rows, x, b, depth, y);
}

template <int V>
void gemm_block(const float* x, int64_t ldx, const int32_t* in, const int32_t* out, int64_t n, const float* b,
                int64_t depth, float* y, int64_t ldy) {
  constexpr int R = tile_rows(V);
  const float* a[R];
  float* c[R];
  for (int64_t e = 0; e < n;) {
    int rows = 0;
    // A tile must not hold one y row twice: its second sum would overwrite the first.
    do {
      a[rows] = x + (in ? in[e] : e) * ldx;
      c[rows] = y + (out ? out[e] : e) * ldy;
      ++rows, ++e;
    } while (rows < R && e < n && !(out && out[e] == out[e - 1]));
    for (int64_t ahead = e + R; ahead < e + 2 * R && ahead < n; ++ahead) {
      for (int64_t line = 0; in && line < depth; line += 16) __builtin_prefetch(x + in[ahead] * ldx + line);
      for (int64_t line = 0; out && line < V * lanes; line += 16) __builtin_prefetch(y + out[ahead] * ldy + line, 1);
    }
    gemm_rows<R, V>(rows, a, b, depth, c);
  }
}

template <int V>
LATTICE_INLINE bool gemm_if(int v, const float* x, int64_t ldx, const int32_t* in, const int32_t* out, int64_t n,
                            const float* b, int64_t depth, float* y, int64_t ldy) {
  if (v == V) gemm_block<V>(x, ldx, in, out, n, b, depth, y, ldy);
  return v == V;
}

void gather_gemm(const float* x, int64_t ldx, const int32_t* in, const int32_t* out, int64_t n, const float* panel,
                 int64_t c_in, int64_t c_out, float* y, int64_t ldy) {
  int64_t width = (c_out + lanes - 1) / lanes * lanes;
  for (int64_t n0 = 0; n0 < width; n0 += lanes * vectors) {
    int64_t block = width - n0 < lanes * vectors ? width - n0 : lanes * vectors;
    int v = int(block / lanes);
    for (int64_t c0 = 0; c0 < c_in; c0 += depth_block) {
      int64_t depth = c_in - c0 < depth_block ? c_in - c0 : depth_block;
      const float* b = panel + n0 * c_in + c0 * block;
      gemm_if<1>(v, x + c0, ldx, in, out, n, b, depth, y + n0, ldy) ||
          gemm_if<2>(v, x + c0, ldx, in, out, n, b, depth, y + n0, ldy) ||
#if !defined(__AVX512F__) && !defined(__aarch64__)
          false;
#else
          gemm_if<3>(v, x + c0, ldx, in, out, n, b, depth, y + n0, ldy) ||
          gemm_if<4>(v, x + c0, ldx, in, out, n, b, depth, y + n0, ldy);
#endif
    }
  }
}

template <int R, int V>
LATTICE_INLINE void outer_tile(const float* const* x, const float* dy, int64_t n, int64_t c, float* w, int64_t ldw) {
  Vec acc[R][V];
#pragma GCC unroll 8
  for (int r = 0; r < R; ++r)
#pragma GCC unroll 4
    for (int v = 0; v < V; ++v) acc[r][v] = load(w + r * ldw + v * lanes);
#pragma GCC unroll 1
  for (int64_t e = 0; e < n; ++e) {
    const float* a = x[e] + c;
    Vec b[V];
#pragma GCC unroll 4
    for (int v = 0; v < V; ++v) b[v] = load(dy + e * (V * lanes) + v * lanes);
#pragma GCC unroll 8
    for (int r = 0; r < R; ++r) {
      float s = a[r];
#pragma GCC unroll 4
      for (int v = 0; v < V; ++v) acc[r][v] += b[v] * s;
    }
  }
#pragma GCC unroll 8
  for (int r = 0; r < R; ++r)
#pragma GCC unroll 4
    for (int v = 0; v < V; ++v) store(w + r * ldw + v * lanes, acc[r][v]);
}

template <int V>
LATTICE_INLINE bool outer_if(int v, const float* const* x, const float* dy, int64_t n, int64_t c_in, float* w,
                             int64_t ldw) {
  if (v != V) return false;
  constexpr int R = tile_rows(V), half = R / 2 + 1;
  int64_t c = 0;
  for (; c + R <= c_in; c += R) outer_tile<R, V>(x, dy, n, c, w + c * ldw, ldw);
  for (; c + half <= c_in; c += half) outer_tile<half, V>(x, dy, n, c, w + c * ldw, ldw);
  for (; c < c_in; ++c) outer_tile<1, V>(x, dy, n, c, w + c * ldw, ldw);
  return true;
}

void outer(const float* const* x, const float* dy, int64_t n, int64_t c_in, int64_t c_out, float* w, int64_t ldw) {
  int64_t width = (c_out + lanes - 1) / lanes * lanes;
  for (int64_t n0 = 0; n0 < width; n0 += lanes * vectors) {
    int64_t block = width - n0 < lanes * vectors ? width - n0 : lanes * vectors;
    int v = int(block / lanes);
    const float* b = dy + n0 * n;
    outer_if<1>(v, x, b, n, c_in, w + n0, ldw) || outer_if<2>(v, x, b, n, c_in, w + n0, ldw) ||
#if !defined(__AVX512F__) && !defined(__aarch64__)
        false;
#else
        outer_if<3>(v, x, b, n, c_in, w + n0, ldw) || outer_if<4>(v, x, b, n, c_in, w + n0, ldw);
#endif
  }
}

}  // namespace
}  // namespace lattice::LATTICE_ISA
