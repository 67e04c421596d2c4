// The register tile of forward contractions and of their input gradients; that of weight gradients is in outer_tiles.h.
//
// gather_gemm   y[out[e]] += x[in[e]] @ panel.  A tile of R gathered rows times V vectors of output channels stays in
//               registers over the whole depth; x is read by broadcasts straight through R row pointers (no packing),
//               the panel from L1; y rows are stored once per tile, and loaded but for their first edge.
//
// With AVX-512, V = 4, R = 6: 24 accumulators; per step 4 vector loads and 6 broadcasts feed 24 multiply-adds.
#pragma once
#include "inner_loops.h"
#include "simd.h"

namespace lattice::LATTICE_ISA {
namespace {

constexpr int64_t depth_block = 128;  // of c_in: a block of the panel (128 x 64 floats) shares L1 with the rows

template <int R, int V>
LATTICE_INLINE void gemm_tile(const float* const* x, const float* b, int64_t depth, const float* const* from,
                              float* const* y) {
  Vec acc[R][V];
#pragma GCC unroll 8
  for (int r = 0; r < R; ++r)
#pragma GCC unroll 4
    for (int v = 0; v < V; ++v) acc[r][v] = load(from[r] + v * lanes);
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
      for (int v = 0; v < V; ++v) acc[r][v] = multiply_add(w[v], s, acc[r][v]);
    }
  }
#pragma GCC unroll 8
  for (int r = 0; r < R; ++r)
#pragma GCC unroll 4
    for (int v = 0; v < V; ++v) store(y[r] + v * lanes, acc[r][v]);
}

template <int R, int V>
void gemm_rows(int rows, const float* const* x, const float* b, int64_t depth, const float* const* from,
               float* const* y) {
  if (rows == R) return gemm_tile<R, V>(x, b, depth, from, y);
  if constexpr (R > 1) gemm_rows<R - 1, V>(rows, x, b, depth, from, y);
}

// The part of a contraction that all its blocks share. start == nullptr: no row begins here.
struct Rows {
  const float* x;
  int64_t ldx;
  const int32_t *in, *out;
  int64_t n;
  const float* start;
  float* y;
  int64_t ldy;
};

template <int V>
void gemm_block(const Rows& p, const float* b, int64_t depth) {
  constexpr int R = tile_rows(V);
  const float *a[R], *from[R];
  float* c[R];
  for (int64_t e = 0; e < p.n;) {
    int rows = 0;
    // A tile must not hold one y row twice: its second sum would overwrite the first.
    do {
      int64_t o = p.out ? p.out[e] : ~e;
      a[rows] = p.x + (p.in ? p.in[e] : e) * p.ldx;
      c[rows] = p.y + (o < 0 ? ~o : o) * p.ldy;
      from[rows] = o < 0 && p.start ? p.start : c[rows];
      ++rows, ++e;
    } while (rows < R && e < p.n && !(p.out && p.out[e] >= 0 && p.y + p.out[e] * p.ldy == c[rows - 1]));
    for (int64_t ahead = e + R; ahead < e + 2 * R && ahead < p.n; ++ahead) {
      for (int64_t line = 0; p.in && line < depth; line += 16) __builtin_prefetch(p.x + p.in[ahead] * p.ldx + line);
      for (int64_t line = 0; p.out && line < V * lanes; line += 16)
        __builtin_prefetch(p.y + (p.out[ahead] < 0 ? ~p.out[ahead] : p.out[ahead]) * p.ldy + line, 1);
    }
    gemm_rows<R, V>(rows, a, b, depth, from, c);
  }
}

template <int V>
LATTICE_INLINE bool gemm_if(int v, const Rows& p, const float* b, int64_t depth) {
  if (v == V) gemm_block<V>(p, b, depth);
  return v == V;
}

void gather_gemm(const float* x, int64_t ldx, const int32_t* in, const int32_t* out, int64_t n, const float* panel,
                 int64_t c_in, int64_t c_out, const float* start, float* y, int64_t ldy) {
  int64_t width = (c_out + lanes - 1) / lanes * lanes;
  for (int64_t n0 = 0; n0 < width; n0 += lanes * vectors) {
    int64_t block = width - n0 < lanes * vectors ? width - n0 : lanes * vectors;
    int v = int(block / lanes);
    for (int64_t c0 = 0; c0 < c_in; c0 += depth_block) {
      int64_t depth = c_in - c0 < depth_block ? c_in - c0 : depth_block;
      const float* b = panel + n0 * c_in + c0 * block;
      Rows p{x + c0, ldx, in, out, n, c0 ? nullptr : start + n0, y + n0, ldy};
      gemm_if<1>(v, p, b, depth) || gemm_if<2>(v, p, b, depth) ||
#if !defined(__AVX512F__) && !defined(__aarch64__)
          false;
#else
          gemm_if<3>(v, p, b, depth) || gemm_if<4>(v, p, b, depth);
#endif
    }
  }
}

}  // namespace
}  // namespace lattice::LATTICE_ISA
