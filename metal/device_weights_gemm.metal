// y[o] = sum over the edges of o of x[i] @ W[k]: the tiles of sorted_implicit_gemm, but
// weights do not pass through threadgroup memory.
//
//   threadgroup, simdgroups, sums and results: as in sorted_implicit_gemm.metal
//     gathered rows [64, depth] -> registers -> threadgroup memory -> 8x8 matrices
//     W[k] [depth, channels] -> 8x8 matrices, from device memory
//
// Channels are multiples of 8, since a matrix is loaded whole. Half, bfloat and float;
// float sums, in order of k: the bits of sorted_implicit_gemm. Traffic is that route's,
// but each simdgroup reads the weights of its columns itself, from cache: it wins where
// that costs less than staging, which a chip alone can say. Reads matrix_tiles.metal,
// epilogue.metal and sorted_implicit_gemm.metal too.

template <typename T, bool FAR = true>
struct DeviceWeights {
  FloatWeights<T, FAR> all;
};

// Rows are staged; of the weights, where those of a step begin is kept.
template <typename T, typename TILE, int COLUMNS, bool TRANSPOSED, bool FAR>
struct GemmStage<T, TILE, COLUMNS, TRANSPOSED, DeviceWeights<T, FAR>> {
  GemmStage<T, TILE, COLUMNS, TRANSPOSED, FloatWeights<T, FAR>> rows;
  const device T* next;
  const device T* now;
  int line;

  template <typename INDEX>
  METAL_FUNC void fetch_rows(
      const device T* x, INDEX row, bool there, int c, int c_x, bool wide,
      int lane) thread {
    rows.fetch_rows(x, row, there, c, c_x, wide, lane);
  }

  METAL_FUNC void put_rows(threadgroup T* to, int row, int lane) const thread {
    rows.put_rows(to, row, lane);
  }

  METAL_FUNC void fetch_weights(
      const thread DeviceWeights<T, FAR>& w, int k, int c, int column, int c_x, int c_y,
      int) thread {
    line = w.all.line_stride;
    next = w.all.w
        + (TRANSPOSED ? w.all.place(k, column, c_y, c, c_x)
                      : w.all.place(k, c, c_x, column, c_y));
  }

  METAL_FUNC void put_weights(threadgroup T*, int) thread { now = next; }

  METAL_FUNC const device T* own_weights(const threadgroup T*, int side) const thread {
    return now + (TRANSPOSED ? side * line : side);
  }

  METAL_FUNC int weight_line() const thread { return line; }
};

template <
    typename T, typename OUT, int COLUMNS, typename M, int SIDE, int GROUPS, int BYTES,
    int KEPT, bool FAR, bool TRANSPOSED, bool PLACED, bool SLICED,
    int ACTIVATION = BIAS_ALONE, typename P = T, int EPS = 0>
METAL_FUNC void device_weights_gemm(
    const device T* x,
    const device T* w,
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
  const DeviceWeights<T, FAR> weights = {
      float_weights<FAR, T>(w, sizes.w_offset_stride, sizes.w_row_stride)};
  const Epilogue<T, ACTIVATION, P, EPS> after = {bias, scale, mean, var, residual};
  NoMoments none;
  sorted_tiles<
      T, OUT, COLUMNS, TRANSPOSED, PLACED, SLICED, DeviceWeights<T, FAR>,
      Epilogue<T, ACTIVATION, P, EPS>,
      GemmSums<T, M, COLUMNS, TRANSPOSED, SIDE, GROUPS, BYTES, KEPT, false>, FAR>(
      x, weights, table, rows, masks, after, sizes, y, memory, none, group, simdgroup,
      lane);
}
