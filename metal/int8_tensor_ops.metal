// y[o] = sum over the edges of o of x[i] @ W[k], both int8, through Metal 4 TensorOps.
//
//   simdgroup, alone: 64 (32, 16) sorted rows x 32 channels, as in tensor_ops.metal:
//     for k used by its rows, for 64 (128, 32) channels:
//       W[k] [32, 64], gathered rows [16, 64] -> registers -> 16 x 32 x 16 -> int sums
//
// Integers add up in any order, so that every split gives the same bits. Weights are
// (K, C_out, channels up to a multiple of 32), zeros beyond C_in. A lane reads words of
// four channels where both arrays and all rows begin at one, else bytes, by 16 channels.
// Skipping and traffic are those of tensor_ops.metal with half its bytes: it reads that,
// integer_epilogue.metal, and all that they read. Twice the rate of half on the neural
// accelerators of M5 and later; other chips multiply no matrices of integers.

// In the place of TensorWeights.
template <bool FAR>
struct TensorIntegers {
  static constant constexpr bool ACROSS = true;
  using Index = typename IndexOf<FAR>::Type;
  const device int8_t* w;
  int offset_stride, line_stride;

  METAL_FUNC bool in_steps(const device int8_t* x, int c_x) const thread {
    const device int8_t* none = nullptr;
    return c_x % 4 == 0 && (x - none) % 4 == 0 && (w - none) % 4 == 0;
  }

  // Sixteen channels are read wherever they begin.
  template <int DEEP, bool WHOLE>
  METAL_FUNC void read(
      thread int8_t* to, int k, int c, int column, int c_x, int c_y,
      const thread FragmentPlace& place) const thread {
    const int first = column + interleaved<2>(place.row);
    const int start = c + place.column * DEEP;
    const Index own = Index(k) * Index(offset_stride) + Index(start);
    UNROLL for (int i = 0; i < 2; ++i)
      UNROLL for (int h = 0; h < 2; ++h) {
        thread int8_t* part = to + 8 * i + 4 * h;
        const int line = first + 4 * i + 16 * h;
        UNROLL for (int f = 0; f < DEEP; ++f)
          UNROLL for (int j = 0; j < 4; ++j) part[16 * f + j] = 0;
        if (WHOLE || line < c_y)
          read_fours<DEEP, 16, (DEEP > 1)>(
              part, w + (own + Index(line) * Index(line_stride)), 4 * DEEP);
      }
  }
};

template <
    typename OUT, int COLUMNS, int HEIGHT, int DEEP, bool PLACED, bool FAR,
    typename R, int ACTIVATION>
METAL_FUNC void int8_tensor_ops(
    const device int8_t* x,
    const device int8_t* w,
    const device int* table,
    const device int* rows,
    const device uint* masks,
    const device float* scale,
    const device float* shift,
    const device Given<R>* residual,
    const device float* residual_scale,
    const device float* out_inverse,
    const thread SortedTilesSizes& sizes,
    device OUT* y,
    uint3 group,
    int simdgroup,
    int lane) {
  const TensorIntegers<FAR> weights = {w, sizes.w_offset_stride, sizes.w_row_stride};
  const IntegerEpilogue<ACTIVATION, R> after = {
      scale, shift, residual, residual_scale, out_inverse};
  NoMoments none;
  tensor_tiles<int8_t, OUT, COLUMNS, HEIGHT, DEEP, PLACED, FAR>(
      x, weights, table, rows, masks, after, sizes, y, none, group, simdgroup, lane);
}
