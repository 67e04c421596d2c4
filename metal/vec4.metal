// y[o] = sum over the edges of o of x[i] @ W[k], float32, C_out a multiple of 4.
//
//   thread (block b, quad q):  rows o = 4 q .. 4 q + 3, channels 4 b .. 4 b + 3
//     for k: 4 neighbours; for c: one float4 of W[k][c], 4 features -> 4 float4 sums
//
// A weight is read once for four rows, and a whole simdgroup works on the same rows, so
// that missing neighbours are skipped together. Traffic per output channel: edges x
// C_in / 4 weights and features each, a quarter and a half of relation_traversal's.
// Wins over it wherever it is admissible; the tiled routes win from some thousand rows
// on.

#include <metal_stdlib>
using namespace metal;

constant constexpr int ROWS = 4;

// C_in is a multiple of 4 where WIDE.
template <bool WIDE>
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
  w += 4 * at.x;
  float4 sums[ROWS] = {float4(0), float4(0), float4(0), float4(0)};
  for (int k = 0; k < volume; ++k, w += size_t(c_in) * c_out) {
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
        float4 w0 = *(const device packed_float4*)(weights);
        float4 w1 = *(const device packed_float4*)(weights + c_out);
        float4 w2 = *(const device packed_float4*)(weights + 2 * c_out);
        float4 w3 = *(const device packed_float4*)(weights + 3 * c_out);
        for (int r = 0; r < ROWS; ++r) {
          if (from[r] < 0) continue;
          float4 f = *(const device packed_float4*)(x + size_t(from[r]) * c_in + c);
          sums[r] += f.x * w0 + f.y * w1 + f.z * w2 + f.w * w3;
        }
        weights += 4 * c_out;
      } else {
        float4 w0 = *(const device packed_float4*)(weights);
        for (int r = 0; r < ROWS; ++r)
          if (from[r] >= 0) sums[r] += x[size_t(from[r]) * c_in + c] * w0;
        weights += c_out;
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
