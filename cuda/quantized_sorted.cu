// quantized_sorted: y[o] = sum over the edges of o of x[i] @ W[k], and what follows, W packed
// as int4 or int8, by the tiles of sorted_implicit_gemm, which unpack the weights that they copy.
//
// Traffic per output row: its live input rows, and a half (int4) or one (int8) byte of
// weight for each C_in x C_out of each offset of its tile; no float weight reaches
// device memory. It wins over the traversal from some hundred rows on. Every tile unpacks
// every weight that it uses, in the warps that copy: from some thousand rows on it costs
// less to unpack once a call (unpack_weights), and to multiply with floats.

namespace lattice {

// As sorted_implicit_gemm, with words (K, c_out, channels * BITS / 32), scales and biases
// (K, c_out, groups of GROUP_SIZE channels), where c_out is not padded (c_packed).
template <typename TILE, typename T, typename OUT, bool MIRRORED, int BITS, int GROUP_SIZE,
          typename AFTER>
__device__ __forceinline__ void quantized_sorted(
    const T* x, const unsigned* words, const T* scales, const T* biases,
    const int* table, const int* rows, const unsigned* masks, const AFTER& after,
    const PackedTilesSizes& sizes, OUT* y) {
  const PackedWeights<T, BITS> w = {
      words, scales, biases, sizes.c_packed, sizes.scale_groups, GROUP_SIZE};
  multiply_tiles<true, MIRRORED>(TILE(), x, w, table, rows, masks, after, sizes, y);
}

}  // namespace lattice
