// y[o] = sum over the edges of o of x[i] @ W[k], half features, any channels, float32
// sums; weights are read where they stand, in either layout.
//
//   thread (block b, pair p):  rows o = 2 p, 2 p + 1, channels 4 b .. 4 b + 3
//     for k, 4 input channels at once: a 4 x 4 block of W[k], a half4 of each row
//
// No atomics: rows are gathered in order of k, the bits are the same on every run.
// Traffic per output channel: edges x C_in / 2 weights and / 4 features, 2 bytes each.
// Wins over relation_traversal by its wide loads; the tiled routes win where the matrix
// units pay, from some thousand rows on.

#include <metal_stdlib>
using namespace metal;

constant constexpr int HALF_ROWS = 2;

// A 4 x 4 block of weights: row c of it weighs feature c, and has four written
// channels. Channels beyond the last repeat it; features beyond it weigh nothing.
template <bool TRANSPOSED>
METAL_FUNC void load_block(
    thread float4 (&block)[4],
    const device half* w,
    int width,
    int features,
    int last) {
  const bool whole = features == 4 && last == 3;
  for (int j = 0; j < 4; ++j) {
    if (whole) {
      block[j] = float4(half4(*(const device packed_half4*)(w + size_t(j) * width)));
      continue;
    }
    float4 line = float4(0);
    int lines = TRANSPOSED ? last + 1 : features;
    int length = TRANSPOSED ? features : last + 1;
    // Fixed counts unroll, so that vectors stay in registers.
    for (int c = 0; c < 4; ++c)
      if (j < lines && c < length) line[c] = float(w[size_t(j) * width + c]);
    block[j] = line;
  }
}

// Rows of W[k] run along C_y, or along C_x where TRANSPOSED.
template <bool TRANSPOSED>
METAL_FUNC void fp16_gather(
    const device half* x,
    const device half* w,
    const device int* table,
    const device half* bias,
    const thread PerRowSizes& sizes,
    device half* y,
    uint2 at) {
  const int volume = sizes.volume, c_x = sizes.c_x, c_y = sizes.c_y;
  const int start = HALF_ROWS * int(at.y), count = min(HALF_ROWS, sizes.rows - start);
  const int channel = 4 * int(at.x), last = min(3, c_y - 1 - channel);
  const int width = sizes.w_row_stride;
  const device int* neighbours = table + (size_t(sizes.first) + start) * volume;
  w += TRANSPOSED ? size_t(channel) * width : size_t(channel);
  float4 sums[HALF_ROWS] = {float4(0), float4(0)};
  for (int k = 0; k < volume; ++k, w += sizes.w_offset_stride) {
    int from[HALF_ROWS];
    bool any = false;
    for (int r = 0; r < HALF_ROWS; ++r) {
      from[r] = r < count ? neighbours[size_t(r) * volume + k] : -1;
      any = any || from[r] >= 0;
    }
    if (!any) continue;
    for (int c = 0; c < c_x; c += 4) {
      const int features = min(4, c_x - c);
      float4 block[4];
      load_block<TRANSPOSED>(
          block, w + size_t(c) * (TRANSPOSED ? 1 : width), width, features, last);
      for (int r = 0; r < HALF_ROWS; ++r) {
        if (from[r] < 0) continue;
        const device half* row = x + size_t(from[r]) * c_x + c;
        float4 f = float4(0);
        if (features == 4)
          f = float4(half4(*(const device packed_half4*)(row)));
        else
          for (int j = 0; j < 4; ++j)
            if (j < features) f[j] = float(row[j]);
        if (TRANSPOSED)
          sums[r] += float4(
              dot(f, block[0]), dot(f, block[1]), dot(f, block[2]), dot(f, block[3]));
        else
          sums[r] += f.x * block[0] + f.y * block[1] + f.z * block[2] + f.w * block[3];
      }
    }
  }
  float4 added = float4(0);
  if (bias) {
    for (int j = 0; j < 4; ++j)
      if (j <= last) added[j] = float(bias[channel + j]);
  }
  for (int r = 0; r < HALF_ROWS; ++r)
    for (int j = 0; j < 4; ++j)
      if (r < count && j <= last)
        y[size_t(start + r) * c_y + channel + j] = half(sums[r][j] + added[j]);
}
