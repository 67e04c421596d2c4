// sorted_implicit_gemm: y[o] = sum over k of x[table[o, k]] @ W[k], and what follows, by
// matrix tiles over mask-sorted rows, float32 accumulators. The input gradient contracts the same
// weights the other way.
//
//   TILE: MmaTile          compute capability 8.0, any dtype     sorted_implicit_gemm_mma
//         PersistentTile   Hopper, 16 bits, few channels         ..._hopper
//                          Hopper, float32 with prepared weights ..._hopper, tf32_weights
//         WideTile         Hopper, 16 bits, many channels, and   ..._wide
//                          one TF32 product of whole stages
//
// Each file says what its tile is, its traffic, and where it wins.

namespace lattice {

// x (n_in, c_in); table (K, pitch) and rows (pitch) in sorted order; masks (pitch / 32,
// words); after: a Bias or an Epilogue; y (n_out, c_out). Element (k, ci, co) of w stands at
// k * w_offset_stride + ci * w_row_stride + co, or, if TRANSPOSED, + co * w_row_stride + ci:
// so both passes read (K, C_in, C_out) and MLX's (C_out, K, C_in). With several splits
// (gridDim.y), y is float32 (splits, n_out, c_out): a partial sum for each split of a tile's
// offsets. Channels are multiples of 16 bytes.
// MIRRORED: the table is that of the transpose, and offset k of it carries W[K - 1 - k].
template <typename TILE, typename T, typename OUT, bool TRANSPOSED, bool MIRRORED,
          typename AFTER>
__device__ __forceinline__ void sorted_implicit_gemm(
    const T* x, const T* w, const int* table, const int* rows, const unsigned* masks,
    const AFTER& after, const SortedTilesSizes& sizes, OUT* y) {
  multiply_tiles<TRANSPOSED, MIRRORED>(TILE(), x, w, table, rows, masks, after, sizes, y);
}

}  // namespace lattice
