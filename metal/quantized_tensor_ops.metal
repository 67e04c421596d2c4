// y[o] = sum over the edges of o of x[i] @ W[k], W packed, through Metal 4 TensorOps.
//
//   threadgroup: 64 sorted rows x 128 (64, 32) channels, as in tensor_ops.metal, with
//   weights that are unpacked into the tile as in quantized_sorted.metal
//
// Rows, staging, skipping, splits, traffic and determinism are those of these two; it
// reads them, and all that they read. Half and bfloat. Wins over quantized_sorted where
// the device has neural accelerators.

template <
    typename T, typename OUT, int COLUMNS, int BITS, int GROUP, bool PLACED,
    bool SLICED, int ACTIVATION = BIAS_ALONE, typename P = T, int EPS = 0,
    typename S = P>
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
  sorted_tiles<
      T, OUT, COLUMNS, true, PLACED, SLICED, PackedWeights<T, BITS, GROUP>,
      Epilogue<T, ACTIVATION, P, EPS, S>, TensorSums<T, COLUMNS, true>>(
      x, weights, table, rows, masks, after, sizes, y, memory, group, simdgroup, lane);
}
