// y[o] = sum over the edges of o of x[i] @ W[k], both int8: tiles over mask-sorted rows,
// for chips that multiply no matrices of integers.
//
//   threadgroup: 64 sorted rows x 64 (32) channels, as in sorted_implicit_gemm.metal:
//     for k used by the tile, for a step of channels:
//       gathered rows [64, depth] | W[k] [64, depth], bytes -> registers, as M ->
//       threadgroup memory -> 8x8 matrices -> float sums
//
// M is half, which holds every int8, and float every product: sums are exact while they
// stay below 2^24. Rows and weights are read as they are stored, four channels a word.
// Traffic per output row and 64 channels: edges x C_in bytes, and 64 C_in of weights of
// each offset for 64 rows; y is written once, with all that follows the sums. Reads
// integer_epilogue.metal, sorted_implicit_gemm.metal and all that they read.

// Reads channels that are stored as int8; `wide`: words of four begin at one.
template <typename T>
METAL_FUNC void fetch(
    thread Wide<T>& to, const device int8_t* from, int left, bool wide) {
  UNROLL for (int f = 0; f < Wide<T>::COUNT; f += 4) {
    if (wide && left - f >= 4) {
      const uint word = *(const device uint*)(from + f);
      UNROLL for (int j = 0; j < 4; ++j)
        to.v[f + j] = T(int(word << (24 - 8 * j)) >> 24);  // with its sign
      continue;
    }
    Four<int8_t> four;
    fetch(four, from + f, left - f);
    UNROLL for (int j = 0; j < 4; ++j) to.v[f + j] = T(four.v[j]);
  }
}

template <
    typename OUT, int COLUMNS, typename M, int SIDE, int BYTES,
    bool PLACED, bool FAR, typename R, int ACTIVATION>
METAL_FUNC void quantized_sorted_int8(
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
    threadgroup float* memory,
    uint3 group,
    int simdgroup,
    int lane) {
  const auto weights =
      float_weights<FAR, M>(w, sizes.w_offset_stride, sizes.w_row_stride);
  const IntegerEpilogue<ACTIVATION, R> after = {
      scale, shift, residual, residual_scale, out_inverse};
  NoMoments none;
  sorted_tiles<
      M, OUT, COLUMNS, true, PLACED, FloatWeights<M, FAR, int8_t>,
      IntegerEpilogue<ACTIVATION, R>,
      GemmSums<M, M, COLUMNS, true, SIDE, BYTES>, FAR>(
      x, weights, table, rows, masks, after, sizes, y, memory, none, group, simdgroup,
      lane);
}
