// Depthwise convolution: as many groups as input channels, M output channels of each.
//
//   y[o, c]     = sum over edges of x[i, c / M] W[k, c]       thread (4 channels, o)
//   dx[i, a]    = sum over edges, m < M of dy[o, a M + m] W[k, a M + m]
//   dW[k, c]    = sum over edges of x[i, c / M] dy[o, c]      thread (4 channels, part)
//
// W is (K, 1, C_out). There is no sum over channels, so it is bound by memory: traffic
// per output channel is an edge's feature and weight each, 16-byte reads of float32
// along the channels. Any dtype; order of k, then of parts: the same bits on every run.
// Always wins over relation_traversal, whose four channels would lie in four groups.

#include <metal_stdlib>
using namespace metal;

// The input channels of four output channels: divided once, not at every edge. Beyond
// `last` they repeat it.
struct SourceChannels {
  int at[4];

  METAL_FUNC SourceChannels(int channel, int last, int multiplier) thread {
    for (int j = 0; j < 4; ++j) at[j] = (channel + min(j, last)) / multiplier;
  }
};

// sizes: first row, K, channels of y, multiplier M.
template <typename T>
METAL_FUNC void depthwise_forward(
    const device T* x,
    const device T* w,
    const device int* table,
    const constant int* sizes,
    device T* y,
    uint2 at) {
  const int volume = sizes[1], c_out = sizes[2], multiplier = sizes[3];
  const int c_in = c_out / multiplier, channel = 4 * int(at.x);
  const int last = min(3, c_out - 1 - channel);
  const device int* neighbours = table + (size_t(sizes[0]) + at.y) * volume;
  const SourceChannels from(channel, last, multiplier);
  float4 sum = float4(0);
  for (int k = 0; k < volume; ++k) {
    int i = neighbours[k];
    if (i < 0) continue;
    const device T* row = x + size_t(i) * c_in;
    const device T* weights = w + size_t(k) * c_out + channel;
    for (int j = 0; j < 4; ++j)
      sum[j] += float(row[from.at[j]]) * float(weights[min(j, last)]);
  }
  for (int j = 0; j < 4; ++j)
    if (j <= last) y[size_t(at.y) * c_out + channel + j] = T(sum[j]);
}

// x are the layer's output channels here, y its input channels. sizes as above, with
// the channels of x third.
template <typename T>
METAL_FUNC void depthwise_transposed(
    const device T* x,
    const device T* w,
    const device int* table,
    const constant int* sizes,
    device T* y,
    uint2 at) {
  const int volume = sizes[1], c_x = sizes[2], multiplier = sizes[3];
  const int c_y = c_x / multiplier, channel = 4 * int(at.x);
  const int last = min(3, c_y - 1 - channel);
  const device int* neighbours = table + (size_t(sizes[0]) + at.y) * volume;
  float4 sum = float4(0);
  for (int k = 0; k < volume; ++k) {
    int i = neighbours[k];
    if (i < 0) continue;
    for (int j = 0; j < 4; ++j) {
      const int c = (channel + min(j, last)) * multiplier;
      const device T* row = x + size_t(i) * c_x + c;
      const device T* weights = w + size_t(k) * c_x + c;
      for (int m = 0; m < multiplier; ++m) sum[j] += float(row[m]) * float(weights[m]);
    }
  }
  for (int j = 0; j < 4; ++j)
    if (j <= last) y[size_t(at.y) * c_y + channel + j] = T(sum[j]);
}

// sizes: first unit, parts, K, C_out, multiplier. A unit is (part, k), k fastest;
// partial (parts, K, C_out). Reads weight_grad.metal too.
template <typename T>
METAL_FUNC void depthwise_grad_parts(
    const device T* x,
    const device T* dy,
    const device int* starts,
    const device int* edges,
    const constant int* sizes,
    device float* partial,
    uint2 at) {
  const int parts = sizes[1], volume = sizes[2];
  const int c_out = sizes[3], multiplier = sizes[4];
  const int c_in = c_out / multiplier, channel = 4 * int(at.x);
  const int last = min(3, c_out - 1 - channel);
  const size_t unit = size_t(sizes[0]) + at.y;
  const EdgePart part(starts, int(unit % volume), int(unit / volume), parts);
  const SourceChannels from(channel, last, multiplier);
  float4 sum = float4(0);
  for (size_t e = part.first; e < part.stop; ++e) {
    const device T* row = x + size_t(edges[3 * e]) * c_in;
    const device T* to = dy + size_t(edges[3 * e + 1]) * c_out + channel;
    for (int j = 0; j < 4; ++j)
      sum[j] += float(row[from.at[j]]) * float(to[min(j, last)]);
  }
  for (int j = 0; j < 4; ++j)
    if (j <= last) partial[size_t(at.y) * c_out + channel + j] = sum[j];
}
