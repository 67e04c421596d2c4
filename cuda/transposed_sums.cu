// transposed_sums: weight gradients as MLX stores weights, (C_out, K, C_in), from partial sums
// that stand as (K, C_in, C_out).
//
// A thread block has 32 x 32 entries of one offset: it adds them along the output channels,
// where the partial sums lie, and writes them along the input channels, by way of shared
// memory. Sums and their order are those of add_partials and add_splits, and so are the
// bits. Traffic: the partial sums and dW, once. Needs edge_walk.cuh.

namespace lattice {

// partial_sums(k) are those of an offset, AHEAD of which a thread loads at once. 256
// threads a block.
template <int AHEAD, typename T, typename OF>
__device__ __forceinline__ void write_transposed(const AddSplitsSizes& sizes,
                                                 OF partial_sums, T* dw) {
  constexpr int SIDE = 32, ROWS = 256 / SIDE, EACH = SIDE / ROWS;
  __shared__ float tile[SIDE][SIDE + 1];
  const int volume = sizes.volume, c_in = sizes.lines, c_out = sizes.channels;
  const int across = (c_out + SIDE - 1) / SIDE, down = (c_in + SIDE - 1) / SIDE;
  const int k = blockIdx.x / (across * down), rest = blockIdx.x % (across * down);
  const int first_in = rest / across * SIDE, first_out = rest % across * SIDE;
  const int lane = threadIdx.x % SIDE, warp = threadIdx.x / SIDE;
  int element[EACH];
  float sum[EACH];
#pragma unroll
  for (int j = 0; j < EACH; ++j) {
    const int i = first_in + warp + j * ROWS, o = first_out + lane;
    element[j] = i < c_in && o < c_out ? i * c_out + o : -1;
  }
  add_in_order<AHEAD>(partial_sums(k), element, sum);
#pragma unroll
  for (int j = 0; j < EACH; ++j) tile[warp + j * ROWS][lane] = sum[j];
  __syncthreads();
#pragma unroll
  for (int r = warp; r < SIDE; r += ROWS) {
    const int i = first_in + lane, o = first_out + r;
    if (i < c_in && o < c_out) {
      dw[((long long)o * volume + k) * c_in + i] = static_cast<T>(tile[lane][r]);
    }
  }
}

// As add_partials; dw (C_out, K, C_in).
template <typename T, int AHEAD>
__device__ __forceinline__ void add_partials_transposed(const float* partials,
                                                        const int* firsts,
                                                        const AddSplitsSizes& sizes,
                                                        T* dw) {
  const auto of = [&](int k) { return partial_sums_of(partials, firsts, sizes, k); };
  write_transposed<AHEAD>(sizes, of, dw);
}

// partial (splits, K, C_in, C_out), added in order of the splits; dw (C_out, K, C_in).
template <typename T, int AHEAD>
__device__ __forceinline__ void add_splits_transposed(const float* partial,
                                                      const AddSplitsSizes& sizes, T* dw) {
  const long long elements = (long long)sizes.lines * sizes.channels;
  const auto of = [&](int k) -> PartialSums {
    return {partial + k * elements, sizes.volume * elements, sizes.splits};
  };
  write_transposed<AHEAD>(sizes, of, dw);
}

}  // namespace lattice
