// y[o] = sum over the edges of o of x[i] @ W[k] for 16 output channels, any C_in.
//
//   threadgroup: 128 rows x 16 channels; simdgroup: 32 rows, 4 x 2 8x8 sums
//     for k, for 64 bytes of channels: gathered rows [128, depth] | W[k] [depth, 16]
//     eight rows without an edge of k are not multiplied
//
// All of y's channels stay in registers, so a feature is gathered once. The loop is
// dense_channel's, with twice the rows, since 16 columns leave the room, and channels
// of x known when it runs. Half, bfloat and float; float sums in order of k: the same
// bits on every run. Traffic per output row: edges x C_in features, K x C_in x 16
// weights for 128 rows. Wins in the first and last layers of a net, which are bound by
// memory.

// Threadgroups (1, tile). Reads dense_channel.metal and what that reads.
template <typename T, typename M, bool TRANSPOSED>
METAL_FUNC void cout16(
    const device T* x,
    const device T* w,
    const device int* table,
    const device T* bias,
    const thread PerRowSizes& sizes,
    device T* y,
    threadgroup float* memory,
    uint3 group,
    int simdgroup,
    int lane) {
  table_gemm<T, M, 16, 4, 0, TRANSPOSED>(
      x, w, table, bias, sizes, y, memory, group, simdgroup, lane);
}
