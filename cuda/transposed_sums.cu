// transposed_sums: weight gradients as MLX stores weights, (C_out, K, C_in), from partial sums
// that stand as (K, C_in, C_out).
//
// A thread block has 32 x 32 entries of one offset: it adds them along the output channels,
// where the partial sums lie, and writes them along the input channels, by way of shared
// memory. Sums and their order are those of add_partials and add_splits, and so are the
// bits. Traffic: the partial sums and dW, once. Needs edge_walk.cuh.

namespace lattice {

// sum(k, element) is what stands at an element of (C_in, C_out). 256 threads a block.
template <typename T, typename SUM>
__device__ __forceinline__ void write_transposed(const AddSplitsSizes& sizes, SUM sum, T* dw) {
  constexpr int SIDE = 32;
  __shared__ float tile[SIDE][SIDE + 1];
  const int volume = sizes.volume, c_in = sizes.lines, c_out = sizes.channels;
  const int across = (c_out + SIDE - 1) / SIDE, down = (c_in + SIDE - 1) / SIDE;
  const int k = blockIdx.x / (across * down), rest = blockIdx.x % (across * down);
  const int first_in = rest / across * SIDE, first_out = rest % across * SIDE;
  const int lane = threadIdx.x % SIDE, warp = threadIdx.x / SIDE;
#pragma unroll
  for (int r = warp; r < SIDE; r += 256 / SIDE) {
    const int i = first_in + r, o = first_out + lane;
    if (i < c_in && o < c_out) tile[r][lane] = sum(k, i * c_out + o);
  }
  __syncthreads();
#pragma unroll
  for (int r = warp; r < SIDE; r += 256 / SIDE) {
    const int i = first_in + lane, o = first_out + r;
    if (i < c_in && o < c_out) {
      dw[((long long)o * volume + k) * c_in + i] = static_cast<T>(tile[lane][r]);
    }
  }
}

// As add_partials; dw (C_out, K, C_in).
template <typename T>
__device__ __forceinline__ void add_partials_transposed(const float* partials,
                                                        const int* firsts,
                                                        const AddSplitsSizes& sizes, T* dw) {
  const auto sum = [&](int k, int element) {
    return sum_partials(partials, firsts, sizes, k, element);
  };
  write_transposed(sizes, sum, dw);
}

// partial (splits, K, C_in, C_out), added in order of the splits; dw (C_out, K, C_in).
template <typename T>
__device__ __forceinline__ void add_splits_transposed(const float* partial,
                                                      const AddSplitsSizes& sizes, T* dw) {
  const long long elements = (long long)sizes.lines * sizes.channels;
  const auto sum = [&](int k, int element) {
    float total = 0.0f;
#pragma unroll 4
    for (int r = 0; r < sizes.splits; ++r) {
      total += partial[(r * (long long)sizes.volume + k) * elements + element];
    }
    return total;
  };
  write_transposed(sizes, sum, dw);
}

}  // namespace lattice
