// Depthwise convolution: as many groups as input channels, M output channels of each.
//
//   y[o, c]     = sum over edges of x[i, c / M] W[k, c]       thread (4 channels, o)
//   dx[i, a]    = sum over edges, m < M of dy[o, a M + m] W[k, a M + m]
//   dW[k, c]    = sum over edges of x[i, c / M] dy[o, c]    thread (4 channels, split)
//
// W is (K, 1, C_out). There is no sum over channels, so it is bound by memory: traffic
// per output channel is an edge's feature and weight each, 16-byte reads of float32
// along the channels. Any dtype; order of k, then of splits: the same bits each time.
// Always wins over relation_traversal, whose four channels would lie in four groups.
// Reads relation_traversal.metal too.

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

// M are the channels of y a group.
template <typename T>
METAL_FUNC void depthwise(
    const device T* x,
    const device T* w,
    const device int* table,
    const device T* bias,
    const thread PerRowSizes& sizes,
    device T* y,
    uint2 at) {
  const int volume = sizes.volume, multiplier = sizes.c_y;
  const int c_in = sizes.groups, c_out = c_in * multiplier, channel = 4 * int(at.x);
  const int last = min(3, c_out - 1 - channel);
  const device int* neighbours = table + (size_t(sizes.first) + at.y) * volume;
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
  store_channels(y + size_t(at.y) * c_out, sum, bias, channel, last);
}

// x are the layer's output channels here, M a group, y its input channels.
template <typename T>
METAL_FUNC void depthwise_transposed(
    const device T* x,
    const device T* w,
    const device int* table,
    const device T* bias,
    const thread PerRowSizes& sizes,
    device T* y,
    uint2 at) {
  const int volume = sizes.volume, multiplier = sizes.c_x;
  const int c_y = sizes.groups, c_x = c_y * multiplier, channel = 4 * int(at.x);
  const int last = min(3, c_y - 1 - channel);
  const device int* neighbours = table + (size_t(sizes.first) + at.y) * volume;
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
  store_channels(y + size_t(at.y) * c_y, sum, bias, channel, last);
}

// Lines of dW are (split, k), k the faster.
template <typename T, typename OUT>
METAL_FUNC void depthwise_weight_grad(
    const device T* x,
    const device T* dy,
    const device int* starts,
    const device int* edges,
    const thread WeightGradSizes& sizes,
    device OUT* dw,
    uint2 at) {
  const int volume = sizes.volume, multiplier = sizes.c_out;
  const int c_in = sizes.groups, c_out = c_in * multiplier, channel = 4 * int(at.x);
  const int last = min(3, c_out - 1 - channel);
  const size_t line = size_t(sizes.first) + at.y;
  const EdgeShare share(
      starts, int(line % volume), int(line / volume), sizes.splits);
  const SourceChannels from(channel, last, multiplier);
  float4 sum = float4(0);
  for (size_t e = share.first; e < share.stop; ++e) {
    const device T* row = x + size_t(edges[3 * e]) * c_in;
    const device T* to = dy + size_t(edges[3 * e + 1]) * c_out + channel;
    for (int j = 0; j < 4; ++j)
      sum[j] += float(row[from.at[j]]) * float(to[min(j, last)]);
  }
  for (int j = 0; j < 4; ++j)
    if (j <= last) dw[size_t(at.y) * c_out + channel + j] = OUT(sum[j]);
}
