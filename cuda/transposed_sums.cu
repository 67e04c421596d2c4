// transposed_sums: weight gradients as MLX stores weights, (C_out, K, C_in), from partial sums
// that stand as (K, C_in, C_out).
//
// A thread block has some rows of one offset's (C_in, C_out), by 32 output channels: it adds
// them along the output channels, where the partial sums lie, and writes them along the
// input channels, by way of shared memory. Where an element has few partial sums, a block has
// 32 rows. Where it has more, it has fewer, down to 4, and SHARES of its warps add a share of
// them each, not to wait for hundreds of loads one after another. Traffic: the partial sums
// and dW, once. Needs edge_walk.cuh.

namespace lattice {

// partial_sums(k) are those of an offset, SHARES shares of which are added, each in order,
// and then these. 256 threads a block.
template <int SHARES, typename T, typename OF>
__device__ __forceinline__ void write_transposed(const AddSplitsSizes& sizes,
                                                 OF partial_sums, T* dw) {
  constexpr int LANES = 32, WARPS = 256 / LANES, EACH = 4;
  constexpr int ROWS = WARPS / SHARES * EACH, AHEAD = 8;
  __shared__ float tile[SHARES][ROWS][LANES + 1];
  const int volume = sizes.volume, c_in = sizes.lines, c_out = sizes.channels;
  const int across = (c_out + LANES - 1) / LANES, down = (c_in + ROWS - 1) / ROWS;
  const int k = blockIdx.x / (across * down), rest = blockIdx.x % (across * down);
  const int first_in = rest / across * ROWS, first_out = rest % across * LANES;
  const int lane = threadIdx.x % LANES, warp = threadIdx.x / LANES;
  const int share = warp % SHARES, first_row = warp / SHARES * EACH;
  int element[EACH];
  float sum[EACH];
#pragma unroll
  for (int j = 0; j < EACH; ++j) {
    const int i = first_in + first_row + j, o = first_out + lane;
    element[j] = i < c_in && o < c_out ? i * c_out + o : -1;
  }
  const PartialSums all = partial_sums(k);
  const int most = (all.count + SHARES - 1) / SHARES, begin = share * most;
  const PartialSums own = {all.first + begin * all.step, all.step,
                           min(most, all.count - begin)};
  add_in_order<AHEAD>(own, element, sum);
#pragma unroll
  for (int j = 0; j < EACH; ++j) tile[share][first_row + j][lane] = sum[j];
  __syncthreads();
#pragma unroll
  for (int at = threadIdx.x; at < ROWS * LANES; at += 256) {
    const int i = first_in + at % ROWS, o = first_out + at / ROWS;
    if (i >= c_in || o >= c_out) continue;
    float total = tile[0][at % ROWS][at / ROWS];
#pragma unroll
    for (int s = 1; s < SHARES; ++s) total += tile[s][at % ROWS][at / ROWS];
    dw[((long long)o * volume + k) * c_in + i] = static_cast<T>(total);
  }
}

// Of partials as add_partials has them; dw (C_out, K, C_in).
template <typename T, int SHARES>
__device__ __forceinline__ void add_partials_transposed(const float* partials,
                                                        const int* firsts,
                                                        const AddSplitsSizes& sizes,
                                                        T* dw) {
  const auto of = [&](int k) { return partial_sums_of(partials, firsts, sizes, k); };
  write_transposed<SHARES>(sizes, of, dw);
}

// partial (splits, K, C_in, C_out); dw (C_out, K, C_in).
template <typename T, int SHARES>
__device__ __forceinline__ void add_splits_transposed(const float* partial,
                                                      const AddSplitsSizes& sizes, T* dw) {
  const long long elements = (long long)sizes.lines * sizes.channels;
  const auto of = [&](int k) -> PartialSums {
    return {partial + k * elements, sizes.volume * elements, sizes.splits};
  };
  write_transposed<SHARES>(sizes, of, dw);
}

}  // namespace lattice
