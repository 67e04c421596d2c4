// y[o] = sum over the edges of o of x[i] @ W[k], W packed: tiles over mask-sorted rows.
//
//   threadgroup: 64 sorted rows x 64 (32) channels, as in sorted_implicit_gemm.metal:
//     for k used by the tile, for 64 bytes of channels:
//       levels, scale, bias -> registers -> scale * level + bias, rounded once to T
//       gathered rows [64, depth] | W[k] [64, depth] -> threadgroup memory -> 8x8 sums
//
// Packed weights are (K, C_out, channels), so the tile is the transposed one, and a
// thread has four neighbouring input channels: 2 (4) bytes of int4 (int8). They are
// unpacked after the multiplication that they travel behind. Traffic per output row and
// 64 channels: edges x C_in features, and 32 (64) C_in bytes of weights of each offset
// of the tile for 64 rows; no float weight reaches device memory. It wins over the
// traversal from about a thousand rows on, and over float weights where these exceed
// the cache. Reads matrix_tiles.metal and sorted_implicit_gemm.metal too.

template <typename T, int BITS, int GROUP>
struct PackedWeights {
  struct Part {
    uint levels;
    T scale, bias;
  };
  const device uint* words;
  const device T* scales;
  const device T* biases;

  // Reads four channels of an output channel's line of `length`, or zeros beyond it.
  METAL_FUNC void fetch_part(
      thread Part& to, int k, int row, int rows, int at, int length) const thread {
    to.levels = 0;
    to.scale = to.bias = T(0);
    if (at >= length) return;
    const int shares = (length + GROUP - 1) / GROUP;
    const size_t line = size_t(k) * rows + row;
    const size_t four = (line * shares * GROUP + at) / 4;
    to.levels = BITS == 4 ? uint(((const device ushort*)words)[four]) : words[four];
    to.scale = scales[line * shares + at / GROUP];
    to.bias = biases[line * shares + at / GROUP];
  }

  METAL_FUNC static void unpack(thread Four<T>& to, const thread Part& part) {
    const float scale = float(part.scale), bias = float(part.bias);
    UNROLL for (int j = 0; j < 4; ++j) {
      const uint level = part.levels >> (BITS * j) & ((1u << BITS) - 1u);
      to.v[j] = T(scale * float(level) + bias);
    }
  }
};

template <
    typename T, typename OUT, int COLUMNS, int BITS, int GROUP, bool PLACED,
    bool SLICED, int ACTIVATION = BIAS_ALONE, typename P = T, int EPS = 0,
    typename S = P>
METAL_FUNC void quantized_sorted(
    const device T* x,
    const device uint* words,
    const device T* scales,
    const device T* biases,
    const device int* table,
    const device int* rows,
    const device uint* masks,
    const device Given<P>* bias,
    const device Given<P>* scale,
    const device Given<S>* mean,
    const device Given<S>* var,
    const device T* residual,
    const thread SortedTilesSizes& sizes,
    device OUT* y,
    threadgroup float* memory,
    uint3 group,
    int simdgroup,
    int lane) {
  const PackedWeights<T, BITS, GROUP> weights = {words, scales, biases};
  const Epilogue<T, ACTIVATION, P, EPS, S> after = {bias, scale, mean, var, residual};
  sorted_tiles<T, OUT, COLUMNS, true, PLACED, SLICED>(
      x, weights, table, rows, masks, after, sizes, y, memory, group, simdgroup, lane);
}
