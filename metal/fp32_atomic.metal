// y[o] += x[i] @ W[k] for every edge (i, o, k), float32, by atomic addition.
//
//   thread (block b, edge e):  x[i] . W[k][:, 4 b .. 4 b + 3] --> 4 atomic adds to y[o]
//
// The order of additions is the GPU's: the last bits differ from run to run, so it runs
// only where determinism is waived. Traffic per edge and channel: C_in weights, C_in /
// 4 features, one atomic add. Wins where few edges fall on many rows and where rows
// differ so much in edges that one thread a row leaves the GPU idle; edges need no
// table.

// Reads relation_traversal.metal too.
template <bool TRANSPOSED>
METAL_FUNC void fp32_atomic(
    const device float* x,
    const device float* w,
    const device int* edges,
    const thread PerEdgeSizes& sizes,
    device atomic_float* y,
    uint2 at) {
  const int c_x = sizes.c_x, c_y = sizes.c_y;
  const device int* edge = edges + 3 * (size_t(sizes.first) + at.y);
  const WeightLayout<TRANSPOSED> layout(sizes.w_offset_stride, sizes.w_row_stride);
  const ChannelBlock block(int(at.x), c_y);
  float4 sum = float4(0);
  add_edge(
      sum, x + size_t(edge[0]) * c_x,
      w + size_t(edge[2]) * layout.offset + size_t(block.channel) * layout.across, c_x,
      layout.along, layout.across, block.last);
  device atomic_float* row = y + size_t(edge[1]) * c_y + block.channel;
  for (int j = 0; j < 4; ++j)
    if (j <= block.last)
      atomic_fetch_add_explicit(row + j, sum[j], memory_order_relaxed);
}
