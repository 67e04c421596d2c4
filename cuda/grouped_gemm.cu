// grouped_gemm: the weight gradient dW[k] = sum over edges (i, o, k) of x[i]^T dy[o] by
// matrix tiles over splits of the kernel-major edges, float32 accumulators.
//
//   TILE: MmaTile    compute capability 8.0, any dtype    grouped_gemm_mma
//         EdgeTile   Hopper, 16 bits                      grouped_gemm_hopper
//
// Few edges on Hopper go to grouped_gemm_whole, which leaves no partial sums.
// Each file says what its tile is, its traffic, and where it wins. The partial sum of split
// s and offset k stands at s + k, where no other does, and add_partials adds those of an
// offset in order: the same bits every time.

namespace lattice {

// x (n_in, c_in); dy (n_out, c_out); pairs (n, 2) of (i, o) by offset; spans (volume, 2):
// where those of each offset are, see EdgeWalk; firsts (volume + 1): where its stages
// start; partials float32 (splits + volume, c_in, c_out). Channels are multiples of 16
// bytes. Thread blocks: splits * tiles of c_in * tiles of c_out.
template <typename TILE, typename T>
__device__ __forceinline__ void grouped_gemm(const T* x, const T* dy, const int* pairs,
                                             const int* spans, const int* firsts,
                                             const WeightGradSizes& sizes,
                                             float* partials) {
  multiply_edges(TILE(), x, dy, pairs, spans, firsts, sizes, partials);
}

}  // namespace lattice
