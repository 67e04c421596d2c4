// y[o] = sum over the edges of o of x[i] @ W[k], float32, C_out a multiple of 4.
//
//   thread (block b, quad q):  rows o = 4 q .. 4 q + 3, channels 4 b .. 4 b + 3
//     for k: 4 neighbours; for c: one float4 of W[k][c], 4 features -> 4 float4 sums
//                              (or four of each of four rows, where rows run along c)
//
// A weight is read once for four rows, and a whole simdgroup works on the same rows, so
// that missing neighbours are skipped together. Traffic per output channel: edges x
// C_in / 4 weights and features each, a quarter and a half of relation_traversal's.
// Wins over it wherever it is admissible; the tiled routes win from some thousand rows
// on.

#include <metal_stdlib>
using namespace metal;

constant constexpr int ROWS = 4;

// The weights of a thread's four channels, for COUNT channels of x. TRANSPOSED: a row
// runs along x's channels, so that four rows are read and turned.
template <bool TRANSPOSED, int COUNT>
METAL_FUNC void load_weights(
    thread float4 (&to)[COUNT], const device float* w, int row_stride) {
  if (!TRANSPOSED) {
    for (int c = 0; c < COUNT; ++c)
      to[c] = *(const device packed_float4*)(w + size_t(c) * row_stride);
    return;
  }
  for (int j = 0; j < 4; ++j) {
    const device float* row = w + size_t(j) * row_stride;
    if (COUNT == 4) {
      const float4 line = *(const device packed_float4*)(row);
      for (int c = 0; c < COUNT; ++c) to[c][j] = line[c];
    } else {
      to[0][j] = row[0];
    }
  }
}

// C_in is a multiple of 4 where WIDE.
template <bool WIDE, bool TRANSPOSED>
METAL_FUNC void vec4(
    const device float* x,
    const device float* w,
    const device int* table,
    const device float* bias,
    const thread PerRowSizes& sizes,
    device float* y,
    uint2 at) {
  const int volume = sizes.volume, c_in = sizes.c_x, c_out = sizes.c_y;
  const int start = ROWS * int(at.y), count = min(ROWS, sizes.rows - start);
  const device int* neighbours = table + (size_t(sizes.first) + start) * volume;
  const int row_stride = sizes.w_row_stride;
  w += size_t(4 * at.x) * (TRANSPOSED ? row_stride : 1);
  float4 sums[ROWS] = {float4(0), float4(0), float4(0), float4(0)};
  for (int k = 0; k < volume; ++k, w += sizes.w_offset_stride) {
    int from[ROWS];
    bool any = false;
    for (int r = 0; r < ROWS; ++r) {
      from[r] = r < count ? neighbours[size_t(r) * volume + k] : -1;
      any = any || from[r] >= 0;
    }
    if (!any) continue;
    const device float* weights = w;
    // Packed vectors need no more than a float's alignment.
    for (int c = 0; c < c_in; c += WIDE ? 4 : 1) {
      if (WIDE) {
        float4 block[4];
        load_weights<TRANSPOSED>(block, weights, row_stride);
        for (int r = 0; r < ROWS; ++r) {
          if (from[r] < 0) continue;
          float4 f = *(const device packed_float4*)(x + size_t(from[r]) * c_in + c);
          sums[r] += f.x * block[0] + f.y * block[1] + f.z * block[2] + f.w * block[3];
        }
        weights += TRANSPOSED ? 4 : 4 * row_stride;
      } else {
        float4 line[1];
        load_weights<TRANSPOSED>(line, weights, row_stride);
        for (int r = 0; r < ROWS; ++r)
          if (from[r] >= 0) sums[r] += x[size_t(from[r]) * c_in + c] * line[0];
        weights += TRANSPOSED ? 1 : row_stride;
      }
    }
  }
  float4 added = float4(0);
  if (bias) added = *(const device packed_float4*)(bias + 4 * at.x);
  // A fixed count unrolls, so that the sums stay in registers.
  for (int r = 0; r < ROWS; ++r)
    if (r < count)
      *(device packed_float4*)(y + size_t(start + r) * c_out + 4 * at.x) =
          packed_float4(sums[r] + added);
}
