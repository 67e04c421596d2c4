// int8_sorted: y[o] = sum over k of x[table[o, k]] . W[k] of int8, exact in int32, and what
// follows (integer_epilogue), by the matrix tiles of sorted_implicit_gemm over mask-sorted
// rows: the same bytes, of which a row has half as many as of half precision.
//
//   TILE: MmaTile          compute capability 8.0          sorted_implicit_gemm_mma
//         PersistentTile   Hopper, few channels            ..._hopper
//         WideTile         Hopper, many channels           ..._wide

namespace lattice {

// x (n_in, c_x); w (K, c_y, w_row_stride), zeros from c_x on; table, rows and masks as of
// sorted_implicit_gemm; after: an IntegerEpilogue, and y (n_out, c_y). With several splits
// after is PartialSums, and y int32 (splits, n_out, c_y). c_x and c_y are multiples
// of 16.
template <typename TILE, typename OUT, bool MIRRORED, typename AFTER>
__device__ __forceinline__ void int8_sorted(const signed char* x, const signed char* w,
                                            const int* table, const int* rows,
                                            const unsigned* masks, const AFTER& after,
                                            const SortedTilesSizes& sizes, OUT* y) {
  multiply_tiles<true, MIRRORED>(TILE(), x, w, table, rows, masks, after, sizes, y);
}

}  // namespace lattice
