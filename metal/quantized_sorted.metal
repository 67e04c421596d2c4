// y[o] = sum over the edges of o of x[i] @ W[k], W packed: tiles over mask-sorted rows.
//
//   threadgroup: 64 sorted rows x 64 (32) channels, as in sorted_implicit_gemm.metal:
//     for k used by the tile, for a step of channels:
//       levels, scale, bias -> registers -> scale * level + bias, rounded once to T
//       gathered rows [64, depth] | W[k] [64, depth] -> threadgroup memory -> 8x8 sums
//
// Packed weights are (K, C_out, channels), so the tile is the transposed one, and a
// thread has eight (float: four) neighbouring input channels of it. They are
// unpacked after the multiplication that they travel behind. Traffic per output row and
// 64 channels: edges x C_in features, and 32 (64) C_in bytes of weights of each offset
// of the tile for 64 rows; no float weight reaches device memory. It wins over the
// traversal from about a thousand rows on, and over float weights where these exceed
// the cache. Reads matrix_tiles.metal and sorted_implicit_gemm.metal too.

template <typename T, int BITS, int GROUP, bool FAR = true>
struct PackedWeights {
  using Index = typename IndexOf<FAR>::Type;
  static constant constexpr int COUNT = Wide<T>::COUNT, WORDS = BITS * COUNT / 32;
  struct Part {
    uint levels[WORDS > 0 ? WORDS : 1];
    T scale, bias;
  };
  // A line of an offset, by its number, and the channel that a part begins with.
  struct Place {
    Index line;
    int at, shares;
  };
  const device uint* words;
  const device T* scales;
  const device T* biases;

  METAL_FUNC Place place(int k, int row, int rows, int at, int length) const thread {
    return {Index(k) * Index(rows) + Index(row), at, (length + GROUP - 1) / GROUP};
  }

  // Reads channels of an output channel's line, `more` lines on; zeros if none is left.
  METAL_FUNC void fetch_part(
      thread Part& to, const thread Place& first, int more, int left) const thread {
    UNROLL for (int j = 0; j < (WORDS > 0 ? WORDS : 1); ++j) to.levels[j] = 0;
    to.scale = to.bias = T(0);
    if (left <= 0) return;
    const Index share = (first.line + Index(more)) * Index(first.shares);
    const Index part = share * Index(GROUP / COUNT) + Index(first.at / COUNT);
    if (WORDS == 0)
      to.levels[0] = uint(((const device ushort*)words)[part]);
    else
      UNROLL for (int j = 0; j < WORDS; ++j) to.levels[j] = words[WORDS * part + j];
    to.scale = scales[share + Index(first.at / GROUP)];
    to.bias = biases[share + Index(first.at / GROUP)];
  }

  METAL_FUNC static void unpack(thread Wide<T>& to, const thread Part& part) {
    const float scale = float(part.scale), bias = float(part.bias);
    UNROLL for (int j = 0; j < COUNT; ++j) {
      const uint word = part.levels[BITS * j / 32];
      const uint level = word >> (BITS * j % 32) & ((1u << BITS) - 1u);
      to.v[j] = T(scale * float(level) + bias);
    }
  }
};

template <
    typename T, typename OUT, int COLUMNS, typename M, int SIDE, int BYTES,
    bool FAR, int BITS, int GROUP, bool PLACED, int ACTIVATION = BIAS_ALONE,
    typename P = T, int EPS = 0>
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
    const device float* mean,
    const device float* var,
    const device T* residual,
    const thread SortedTilesSizes& sizes,
    device OUT* y,
    threadgroup float* memory,
    uint3 group,
    int simdgroup,
    int lane) {
  const PackedWeights<T, BITS, GROUP, FAR> weights = {words, scales, biases};
  const Epilogue<T, ACTIVATION, P, EPS> after = {bias, scale, mean, var, residual};
  NoMoments none;
  sorted_tiles<
      T, OUT, COLUMNS, true, PLACED, PackedWeights<T, BITS, GROUP, FAR>,
      Epilogue<T, ACTIVATION, P, EPS>,
      GemmSums<T, M, COLUMNS, true, SIDE, BYTES>, FAR>(
      x, weights, table, rows, masks, after, sizes, y, memory, none, group, simdgroup,
      lane);
}
