// The register tile of weight gradients: w += x^T dy over a block of edges.
//
// A tile of R input channels times V vectors of output channels stays in registers over the block. Rows are read where
// they are, through pointers, or packed first: a line of a row serves few of a tile's edges before the next row is
// needed, and rows of a power of two of bytes share few of L1's sets. Packed, what a tile reads is in order.
#pragma once
#include <cstring>
#include <type_traits>

#include "inner_loops.h"
#include "simd.h"

namespace lattice::LATTICE_ISA {
namespace {

// Where the channels of edge e begin: in its row, from channel c on, or in a panel of `width` channels.
LATTICE_INLINE const float* channels(const float* const* rows, int64_t e, int64_t c, int64_t) { return rows[e] + c; }
LATTICE_INLINE const float* channels(const float* panel, int64_t e, int64_t, int64_t width) { return panel + e * width; }

// From is row pointers or a panel, alike for x and dy. A function of its own: within its caller's loops it is short of
// registers.
template <int R, int V, class From>
__attribute__((noinline)) void outer_tile(From x, From dy, int64_t n, int64_t c, int64_t c0, float* w, int64_t ldw) {
  Vec acc[R][V];
#pragma GCC unroll 8
  for (int r = 0; r < R; ++r)
#pragma GCC unroll 4
    for (int v = 0; v < V; ++v) acc[r][v] = load(w + r * ldw + v * lanes);
#pragma GCC unroll 1
  for (int64_t e = 0; e < n; ++e) {
    const float* a = channels(x, e, c, R);
    Vec b[V];
#pragma GCC unroll 4
    for (int v = 0; v < V; ++v) b[v] = load(channels(dy, e, c0, V * lanes) + v * lanes);
#pragma GCC unroll 8
    for (int r = 0; r < R; ++r) {
      float s = a[r];
#pragma GCC unroll 4
      for (int v = 0; v < V; ++v) acc[r][v] = multiply_add(b[v], s, acc[r][v]);
    }
  }
#pragma GCC unroll 8
  for (int r = 0; r < R; ++r)
#pragma GCC unroll 4
    for (int v = 0; v < V; ++v) store(w + r * ldw + v * lanes, acc[r][v]);
}

template <int R, int V, class From>
void outer_rows(int rows, From x, From dy, int64_t n, int64_t c, int64_t c0, float* w, int64_t ldw) {
  if (rows == R) return outer_tile<R, V>(x, dy, n, c, c0, w, ldw);
  if constexpr (R > 1) outer_rows<R - 1, V>(rows, x, dy, n, c, c0, w, ldw);
}

// Input channels in tiles of nearly equal height: a last one of a row or two would take as long as a whole one.
struct Heights {
  int64_t c_in, tiles;
  Heights(int64_t c_in, int most) : c_in(c_in), tiles((c_in + most - 1) / most) {}
  int64_t begin(int64_t t) const { return c_in * t / tiles; }
  int height(int64_t t) const { return int(begin(t + 1) - begin(t)); }
};

// Calls f(v, n0) for each block of v vectors of output channels, n0 the first channel.
template <class F>
LATTICE_INLINE void for_blocks(int64_t c_out, F f) {
  int64_t width = (c_out + lanes - 1) / lanes * lanes;
  for (int64_t n0 = 0; n0 < width; n0 += lanes * vectors)
    f(int((width - n0 < lanes * vectors ? width - n0 : lanes * vectors) / lanes), n0);
}

// Calls f(the constant v), for v from 1 to V.
template <int V, class F>
LATTICE_INLINE void with_vectors(int v, F f) {
  if (v == V) return f(std::integral_constant<int, V>());
  if constexpr (V > 1) with_vectors<V - 1>(v, f);
}

template <int R>
LATTICE_INLINE void pack_columns(int height, const float* const* x, int64_t n, int64_t c, float* to) {
  if (height == R) {
    for (int64_t e = 0; e < n; ++e) std::memcpy(to + e * R, x[e] + c, R * sizeof(float));
    return;
  }
  if constexpr (R > 1) pack_columns<R - 1>(height, x, n, c, to);
}

// Packs the rows of n edges: for each tile of input channels (n, its height), for each block of output channels
// (n, its width). A few rows at a time, so that a line of them is read from memory once.
void pack_rows(const float* const* x, const float* const* dy, int64_t n, const Heights& heights, int64_t c_out,
               float* x_panels, float* dy_panels) {
  constexpr int64_t some = 8;
  for (int64_t e = 0; e < n; e += some) {
    int64_t m = n - e < some ? n - e : some;
    for (int64_t t = 0; t < heights.tiles; ++t) {
      int64_t c = heights.begin(t);
      int height = heights.height(t);
      pack_columns<tile_rows(vectors)>(height, x + e, m, c, x_panels + c * n + e * height);
    }
    for_blocks(c_out, [&](int v, int64_t n0) {
      for (int64_t j = e; j < e + m; ++j)
        for (int i = 0; i < v; ++i)
          store(dy_panels + n0 * n + (j * v + i) * lanes, load(dy[j] + n0 + i * lanes));
    });
  }
}

void outer(const float* const* x, const float* const* dy, int64_t n, int64_t c_in, int64_t c_out, float* room, float* w,
           int64_t ldw) {
  Heights packed(c_in, tile_rows(vectors));
  // Those of dy come first: they are whole vectors, as aligned as the room is.
  float *dy_panels = room, *x_panels = room ? room + (c_out + lanes - 1) / lanes * lanes * n : nullptr;
  if (room) pack_rows(x, dy, n, packed, c_out, x_panels, dy_panels);
  for_blocks(c_out, [&](int blocks, int64_t n0) {
    with_vectors<vectors>(blocks, [&](auto v) {
      constexpr int V = decltype(v)::value, R = tile_rows(V);
      Heights heights = room ? packed : Heights(c_in, R);
      for (int64_t t = 0; t < heights.tiles; ++t) {
        int64_t c = heights.begin(t);
        int height = heights.height(t);
        float* tile = w + c * ldw + n0;
        if (room)
          outer_rows<R, V, const float*>(height, x_panels + c * n, dy_panels + n0 * n, n, c, n0, tile, ldw);
        else
          outer_rows<R, V>(height, x, dy, n, c, n0, tile, ldw);
      }
    });
  });
}

}  // namespace
}  // namespace lattice::LATTICE_ISA
