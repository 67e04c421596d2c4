// y[o] = sum over the edges (i, o, k) of x[i] @ W[k], for any relation.
//
//   thread (block b, row o):  edges of o --> x[i, group] . W[k][group, 4 channels of b]
//                             four float32 sums --> y[o, 4 b .. 4 b + 3]
//
// The edges of a row are its entries in the neighbour table, or its part of a CSR where
// several edges share an (o, k). Any dtype, channels and groups; rows are added in
// order of k, so the bits are the same on every run. Weights are read where they stand:
// the input gradient reads W[k] across instead of along. Traffic per output channel:
// edges x C_in weights and a quarter of that in features, from cache. It is the floor:
// it wins where nothing else is admissible, and on small or odd problems.

#include <metal_stdlib>
using namespace metal;

// Where a weight stands: W is (K, layer's input channels a group, layer's outputs).
// `along` steps through the channels that are summed, `across` through the written
// ones.
template <bool TRANSPOSED>
struct WeightLayout {
  size_t offset;
  int along, across, group;

  METAL_FUNC WeightLayout(int groups, int c_x, int c_y) thread {
    int width = groups * (TRANSPOSED ? c_x : c_y);
    offset = size_t(TRANSPOSED ? c_y : c_x) * width;
    along = TRANSPOSED ? 1 : width;
    across = TRANSPOSED ? width : 1;
    group = TRANSPOSED ? c_x : c_y;
  }
};

// Adds x[0 .. c_x) @ w to four channels. Beyond `last` they repeat it: never stored.
template <typename T>
METAL_FUNC void add_edge(
    thread float4& sum,
    const device T* x,
    const device T* w,
    int c_x,
    int along,
    int across,
    int last) {
  const size_t at1 = size_t(min(1, last)) * across, at2 = size_t(min(2, last)) * across,
               at3 = size_t(min(3, last)) * across;
  for (int c = 0; c < c_x; ++c) {
    const float4 weights =
        float4(float(w[0]), float(w[at1]), float(w[at2]), float(w[at3]));
    sum += float(x[c]) * weights;
    w += along;
  }
}

template <typename T>
METAL_FUNC void store_channels(device T* y, const thread float4& sum, int last) {
  // A fixed count unrolls, so that the sums stay in registers.
  for (int j = 0; j < 4; ++j)
    if (j <= last) y[j] = T(sum[j]);
}

// One thread's four channels: the group, its first channel there, its last of four.
struct ChannelBlock {
  int group, channel, last;

  METAL_FUNC ChannelBlock(int block, int c_y) thread {
    int per_group = (c_y + 3) / 4;
    group = block / per_group;
    channel = 4 * (block % per_group);
    last = min(3, c_y - 1 - channel);
  }
};

// sizes: first row, K, groups, channels a group of x and of y.
template <typename T, bool TRANSPOSED>
METAL_FUNC void traverse_table(
    const device T* x,
    const device T* w,
    const device int* table,
    const constant int* sizes,
    device T* y,
    uint2 at) {
  const int volume = sizes[1], groups = sizes[2], c_x = sizes[3], c_y = sizes[4];
  const WeightLayout<TRANSPOSED> layout(groups, c_x, c_y);
  const ChannelBlock block(int(at.x), c_y);
  const device int* neighbours = table + (size_t(sizes[0]) + at.y) * volume;
  w += size_t(block.group) * layout.group + size_t(block.channel) * layout.across;
  float4 sum = float4(0);
  for (int k = 0; k < volume; ++k) {
    int i = neighbours[k];
    if (i < 0) continue;
    add_edge(
        sum, x + (size_t(i) * groups + block.group) * c_x, w + k * layout.offset, c_x,
        layout.along, layout.across, block.last);
  }
  store_channels(
      y + (size_t(at.y) * groups + block.group) * c_y + block.channel, sum, block.last);
}

// The same over edges (i, o, k) by output row, or by piece of a long row's: starts has
// one entry more than rows. sizes: first row, groups, channels a group of x and of y.
template <typename T, typename OUT, bool TRANSPOSED>
METAL_FUNC void traverse_csr(
    const device T* x,
    const device T* w,
    const device int* starts,
    const device int* edges,
    const constant int* sizes,
    device OUT* y,
    uint2 at) {
  const int groups = sizes[1], c_x = sizes[2], c_y = sizes[3];
  const WeightLayout<TRANSPOSED> layout(groups, c_x, c_y);
  const ChannelBlock block(int(at.x), c_y);
  const size_t o = size_t(sizes[0]) + at.y;
  w += size_t(block.group) * layout.group + size_t(block.channel) * layout.across;
  float4 sum = float4(0);
  for (size_t e = size_t(starts[o]); e < size_t(starts[o + 1]); ++e) {
    size_t i = size_t(edges[3 * e]), k = size_t(edges[3 * e + 2]);
    add_edge(
        sum, x + (i * groups + block.group) * c_x, w + k * layout.offset, c_x,
        layout.along, layout.across, block.last);
  }
  store_channels(
      y + (size_t(at.y) * groups + block.group) * c_y + block.channel, sum, block.last);
}
