// y[o] = sum over the edges (i, o, k) of x[i] @ W[k], for any relation; and its weight
// gradient, dW[k] = sum over the edges of k of x[i]^T dy[o].
//
//   thread (block b, row o):  edges of o --> x[i, group] . W[k][group, 4 channels of b]
//                             four float32 sums --> y[o, 4 b .. 4 b + 3]
//   thread (4 outputs, split, k, 4 inputs): a share of k's edges --> 4 x 4 of dW[k]
//
// The edges of a row are its entries in the neighbour table, or its part of a CSR where
// several edges share an (o, k). Any dtype, channels and groups; rows are added in
// order of k, splits in order, so the bits are the same on every run. Weights are read
// where they stand, in either layout, along the summed channels or across. Traffic per
// output channel: edges x C_in weights and a quarter of that in features, from cache;
// for a weight gradient, 4 features and 4 gradients an edge for 16 multiply-adds. It is
// the floor: it wins where nothing else is admissible, and on small or odd problems.

#include <metal_stdlib>
using namespace metal;

// Where a weight stands: from an offset to the next, from a channel to the next of those
// that are summed (`along`) and of those that are written (`across`). TRANSPOSED: rows
// run along the former.
template <bool TRANSPOSED>
struct WeightLayout {
  size_t offset;
  int along, across;

  METAL_FUNC WeightLayout(int offset_stride, int row_stride) thread
      : offset(offset_stride),
        along(TRANSPOSED ? 1 : row_stride),
        across(TRANSPOSED ? row_stride : 1) {}
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

// Writes a row's four channels from `channel` on, with the bias where there is one.
template <typename T, typename OUT>
METAL_FUNC void store_channels(
    device OUT* y, const thread float4& sum, const device T* bias, int channel,
    int last) {
  // A fixed count unrolls, so that the sums stay in registers.
  for (int j = 0; j < 4; ++j) {
    if (j > last) continue;
    float value = sum[j];
    if (bias) value += float(bias[channel + j]);
    y[channel + j] = OUT(value);
  }
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

template <typename T, bool TRANSPOSED>
METAL_FUNC void relation_traversal(
    const device T* x,
    const device T* w,
    const device int* table,
    const device T* bias,
    const thread PerRowSizes& sizes,
    device T* y,
    uint2 at) {
  const int volume = sizes.volume, groups = sizes.groups;
  const int c_x = sizes.c_x, c_y = sizes.c_y;
  const WeightLayout<TRANSPOSED> layout(sizes.w_offset_stride, sizes.w_row_stride);
  const ChannelBlock block(int(at.x), c_y);
  const device int* neighbours = table + (size_t(sizes.first) + at.y) * volume;
  w += size_t(block.group) * sizes.w_group_stride +
       size_t(block.channel) * layout.across;
  float4 sum = float4(0);
  for (int k = 0; k < volume; ++k) {
    int i = neighbours[k];
    if (i < 0) continue;
    add_edge(
        sum, x + (size_t(i) * groups + block.group) * c_x, w + k * layout.offset, c_x,
        layout.along, layout.across, block.last);
  }
  store_channels(
      y + size_t(at.y) * groups * c_y, sum, bias, block.group * c_y + block.channel,
      block.last);
}

// The same over edges (i, o, k) by output row, or by piece of a long row's: starts has
// one entry more than rows.
template <typename T, typename OUT, bool TRANSPOSED>
METAL_FUNC void relation_traversal_csr(
    const device T* x,
    const device T* w,
    const device int* starts,
    const device int* edges,
    const device T* bias,
    const thread PerRowSizes& sizes,
    device OUT* y,
    uint2 at) {
  const int groups = sizes.groups, c_x = sizes.c_x, c_y = sizes.c_y;
  const WeightLayout<TRANSPOSED> layout(sizes.w_offset_stride, sizes.w_row_stride);
  const ChannelBlock block(int(at.x), c_y);
  const size_t o = size_t(sizes.first) + at.y;
  w += size_t(block.group) * sizes.w_group_stride +
       size_t(block.channel) * layout.across;
  float4 sum = float4(0);
  for (size_t e = size_t(starts[o]); e < size_t(starts[o + 1]); ++e) {
    size_t i = size_t(edges[3 * e]), k = size_t(edges[3 * e + 2]);
    add_edge(
        sum, x + (i * groups + block.group) * c_x, w + k * layout.offset, c_x,
        layout.along, layout.across, block.last);
  }
  store_channels(
      y + size_t(at.y) * groups * c_y, sum, bias, block.group * c_y + block.channel,
      block.last);
}

// The edges of one split: starts are those of the offsets, (K + 1).
struct EdgeShare {
  size_t first, stop;

  METAL_FUNC EdgeShare(
      const device int* starts, int k, int split, int splits) thread {
    size_t start = size_t(starts[k]), count = size_t(starts[k + 1]) - start;
    first = start + count * split / splits;
    stop = start + count * (split + 1) / splits;
  }
};

// Lines of dW are (split, k, input), the last fastest: `first` begins a block of four
// inputs.
template <typename T, typename OUT>
METAL_FUNC void relation_traversal_weight_grad(
    const device T* x,
    const device T* dy,
    const device int* starts,
    const device int* edges,
    const thread WeightGradSizes& sizes,
    device OUT* dw,
    uint2 at) {
  const int volume = sizes.volume, groups = sizes.groups;
  const int c_in = sizes.c_in, c_out = sizes.c_out;
  const int in_blocks = (c_in + 3) / 4, out_blocks = (c_out + 3) / 4;
  const int before = sizes.first / c_in * in_blocks + sizes.first % c_in / 4;
  const size_t unit = size_t(before) + at.y;
  const int a = 4 * int(unit % in_blocks), k = int(unit / in_blocks % volume);
  const int group = int(at.x) / out_blocks, b = 4 * (int(at.x) % out_blocks);
  const int last_a = min(3, c_in - 1 - a), last_b = min(3, c_out - 1 - b);
  const EdgeShare share(starts, k, int(unit / in_blocks / volume), sizes.splits);
  float4 sums[4] = {float4(0), float4(0), float4(0), float4(0)};
  for (size_t e = share.first; e < share.stop; ++e) {
    const device T* from = x + (size_t(edges[3 * e]) * groups + group) * c_in + a;
    const device T* to = dy + (size_t(edges[3 * e + 1]) * groups + group) * c_out + b;
    // Channels beyond the last repeat it: never stored.
    float4 g = float4(
        float(to[0]), float(to[min(1, last_b)]), float(to[min(2, last_b)]),
        float(to[last_b]));
    for (int j = 0; j < 4; ++j) sums[j] += float(from[min(j, last_a)]) * g;
  }
  const int width = groups * c_out;
  const size_t line = unit / in_blocks * c_in + a - sizes.first;
  device OUT* to = dw + line * width + group * c_out + b;
  for (int j = 0; j < 4; ++j)
    for (int c = 0; c < 4; ++c)
      if (j <= last_a && c <= last_b) to[size_t(j) * width + c] = OUT(sums[j][c]);
}
