// quantized_traversal: y[o] = sum over the edges (i, o, k) of x[i] @ W[k], and what
// follows, W packed as int4 or int8.
//
//   thread (row o, channel c):  edges of o, for each group of channels, with one scale:
//     word of 8 (4) levels --> scale * level + bias --> x[i, group] . channel c
//
// W is (K, C_out, channels) along its inputs, whose last word may be padded: features
// are read up to the last real channel only. Any relation, dtype, channels and groups;
// edges are added in order of k, so the bits are the same every time. Traffic per
// output channel: edges x C_in / 2 (int4) or C_in (int8) bytes of weights, and C_in
// features an edge, by broadcast, from cache. It is the floor of packed weights: it
// wins below about a thousand rows, with groups, and where several edges have one row and
// offset. Needs alignment.cuh, channels.cuh and epilogue.cuh.

namespace lattice {

template <typename T, int BITS>
struct PackedLines {
  static constexpr int EACH = 32 / BITS;  // levels of a word
  const unsigned* words;
  const T* scales;
  const T* biases;
  int in_each, c_out, scale_groups, group_size;  // of an output channel

  // Adds x[0 .. in_each) . W[k, channel].
  __device__ __forceinline__ float add_edge(float sum, const T* x, long long k,
                                            int channel) const {
    const long long line = (k * c_out + channel) * scale_groups;
    const unsigned* word = words + line * (group_size / EACH);
    for (int c = 0; c < in_each; c += EACH, ++word) {
      const float scale = static_cast<float>(scales[line + c / group_size]);
      const float bias = static_cast<float>(biases[line + c / group_size]);
      unsigned levels = *word;
#pragma unroll
      for (int j = 0; j < EACH; ++j) {
        if (c + j < in_each) {
          const float level = static_cast<float>(levels & ((1u << BITS) - 1));
          sum = fmaf(static_cast<float>(x[c + j]), fmaf(scale, level, bias), sum);
        }
        levels >>= BITS;
      }
    }
    return sum;
  }
};

// x (n_in, groups * in_each); words (K, c_out, channels * BITS / 32); scales and biases
// (K, c_out, groups of GROUP_SIZE channels); table (n_out, volume); after: a Bias or an
// Epilogue of y (n_out, c_out). c_x and c_y are the channels of a group.
template <typename T, int BITS, int GROUP_SIZE, typename AFTER>
__device__ __forceinline__ void quantized_traversal(
    const T* x, const unsigned* words, const T* scales, const T* biases,
    const int* table, const AFTER& after, const PackedRowSizes& sizes, T* y) {
  const int volume = sizes.volume, out_each = sizes.c_y, c_out = out_each * sizes.groups;
  const PackedLines<T, BITS> w = {words, scales,   biases, sizes.c_x,
                                  c_out, sizes.scale_groups, GROUP_SIZE};
  each_row<1>(sizes.rows, c_out, [&](long long row, int channel) {
    const int group = channel / out_each;
    float sum[1] = {};
    for (int k = 0; k < volume; ++k) {
      const int i = table[row * volume + k];
      if (i < 0) continue;
      const T* from = x + ((long long)i * sizes.groups + group) * w.in_each;
      sum[0] = w.add_edge(sum[0], from, k, channel);
    }
    after.finish(sum, row, channel, c_out);
    store_channels<1>(y + row * c_out + channel, sum);
  });
}

// The same over edges (i, o, k) by output row: starts (n_out + 1).
template <typename T, int BITS, int GROUP_SIZE, typename AFTER>
__device__ __forceinline__ void quantized_traversal_of_edges(
    const T* x, const unsigned* words, const T* scales, const T* biases,
    const int* starts, const int* edges, const AFTER& after,
    const PackedRowSizes& sizes, T* y) {
  const int out_each = sizes.c_y, c_out = out_each * sizes.groups;
  const PackedLines<T, BITS> w = {words, scales,   biases, sizes.c_x,
                                  c_out, sizes.scale_groups, GROUP_SIZE};
  each_row<1>(sizes.rows, c_out, [&](long long row, int channel) {
    const int group = channel / out_each;
    float sum[1] = {};
    for (long long e = starts[row], stop = starts[row + 1]; e < stop; ++e) {
      const T* from = x + ((long long)edges[3 * e] * sizes.groups + group) * w.in_each;
      sum[0] = w.add_edge(sum[0], from, edges[3 * e + 2], channel);
    }
    after.finish(sum, row, channel, c_out);
    store_channels<1>(y + row * c_out + channel, sum);
  });
}

}  // namespace lattice
