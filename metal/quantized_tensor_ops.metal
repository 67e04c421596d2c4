// y[o] = sum over the edges of o of x[i] @ W[k], W packed, through Metal 4 TensorOps.
//
//   simdgroup, alone: 64 (32, 16) sorted rows x 32 channels, as in tensor_ops.metal,
//     with right operands that a lane unpacks: for 32 channels it reads 4 (8) bytes of a
//     line of int4 (int8), and one scale and bias
//
// What a lane unpacks it holds already: nothing is staged. Rows, skipping, splits and
// determinism are those of tensor_ops.metal; it reads that, and all that it reads. Half
// and bfloat. Wins over quantized_sorted where the device has neural accelerators.

// Four neighbouring channels of a line, as they are stored and unpacked.
template <typename T, int BITS, int GROUP>
struct PackedFours {
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

// In the place of TensorWeights.
template <typename T, int BITS, int GROUP>
struct TensorPacked {
  static constant constexpr bool ACROSS = true;
  using Packed = PackedFours<T, BITS, GROUP>;
  Packed packed;

  METAL_FUNC bool in_steps(const device T* x, int c_x) const thread { return true; }

  // Four of each of DEEP fragments lie in one group, and but for DEEP = 1 in whole words.
  template <int DEEP, bool WHOLE>
  METAL_FUNC void read(
      thread T* to, int k, int c, int column, int c_x, int c_y,
      const thread FragmentPlace& place) const thread {
    static_assert(GROUP % (4 * DEEP) == 0, "a lane's channels share a scale");
    const int padded = (c_x + GROUP - 1) / GROUP * GROUP;
    const int first = column + interleaved<2>(place.row);
    const int at = c + place.column * DEEP;
    UNROLL for (int i = 0; i < 2; ++i)
      UNROLL for (int h = 0; h < 2; ++h) {
        const int line = first + 4 * i + 16 * h;
        const bool inside = WHOLE || line < c_y;
        typename Packed::Part part;
        packed.fetch_part(part, k, inside ? line : 0, c_y, inside ? at : c_x, c_x);
        const size_t word = ((size_t(k) * c_y + line) * padded + at) * BITS / 32;
        UNROLL for (int f = 0; f < DEEP; ++f) {
          if (f > 0 && inside)
            part.levels = BITS == 8 ? packed.words[word + f]
                                    : packed.words[word + f / 2] >> (16 * (f % 2));
          Four<T> four;
          Packed::unpack(four, part);
          UNROLL for (int j = 0; j < 4; ++j) to[16 * f + 8 * i + 4 * h + j] = four.v[j];
        }
      }
  }
};

template <
    typename T, typename OUT, int COLUMNS, int HEIGHT, int DEEP, int BITS, int GROUP,
    bool PLACED, bool FAR, int ACTIVATION = BIAS_ALONE, typename P = T,
    int EPS = 0>
METAL_FUNC void quantized_tensor_ops(
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
    uint3 group,
    int simdgroup,
    int lane) {
  const TensorPacked<T, BITS, GROUP> weights = {{words, scales, biases}};
  const Epilogue<T, ACTIVATION, P, EPS> after = {bias, scale, mean, var, residual};
  NoMoments none;
  tensor_tiles<T, OUT, COLUMNS, HEIGHT, DEEP, PLACED, FAR>(
      x, weights, table, rows, masks, after, sizes, y, none, group, simdgroup, lane);
}
