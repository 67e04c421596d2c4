// transposed_sums: weight gradients as MLX stores weights, (C_out, K, C_in), from partial sums
// that stand as (K, C_in, C_out).
//
// A thread block has some rows of one offset's (C_in, C_out), by 32 output channels: it adds
// them along the output channels, where the partial sums lie, four a thread, and writes
// them along the input channels, 16 bytes a thread, by way of shared memory. Where an
// element has few partial sums, a block has 32 rows. Where it has more, it has fewer, down
// to 4, and as many SHARES of its warps add a share of them each, not to wait for hundreds
// of loads one after another. Traffic: the partial sums and dW, once. Needs edge_walk.cuh.

namespace lattice {

// partial_sums(k) are those of an offset, SHARES shares of which are added, each in order,
// and then these. 256 threads a block.
template <int SHARES, typename T, typename OF>
__device__ __forceinline__ void write_transposed(const AddSplitsSizes& sizes,
                                                 OF partial_sums, T* dw) {
  constexpr int COLUMNS = 32, EACH = 4, ACROSS = COLUMNS / EACH, ROWS = 32 / SHARES;
  constexpr int AHEAD = 8;
  __shared__ float tile[SHARES][ROWS][COLUMNS + 1];
  const int volume = sizes.volume, c_in = sizes.lines, c_out = sizes.channels;
  const int across = (c_out + COLUMNS - 1) / COLUMNS, down = (c_in + ROWS - 1) / ROWS;
  const int k = blockIdx.x / (across * down), rest = blockIdx.x % (across * down);
  const int first_in = rest / across * ROWS, first_out = rest % across * COLUMNS;
  const int column = threadIdx.x % ACROSS * EACH, slot = threadIdx.x / ACROSS;
  const int row = slot % ROWS, share = slot / ROWS;
  const int left = c_out - first_out - column;  // channels from the thread's first on
  const int element = (first_in + row) * c_out + first_out + column;
  const PartialSums all = partial_sums(k);
  const int most = (all.count + SHARES - 1) / SHARES, begin = share * most;
  const bool inside = first_in + row < c_in && left > 0;
  const PartialSums own = {all.first + begin * all.step, all.step,
                           inside ? min(most, all.count - begin) : 0};
  const auto sum_of = [&](auto whole) {
    return add_in_order<AHEAD>(own, [&](const float* from) {
      if constexpr (decltype(whole)::value) {
        return load_channels<EACH>(from + element, whole);
      } else {
        Channels<float, EACH> some = {};
        for (int j = 0; j < EACH && j < left; ++j) some.v[j] = from[element + j];
        return some;
      }
    });
  };
  const auto sum =
      c_out % EACH == 0 ? sum_of(cuda::std::true_type()) : sum_of(cuda::std::false_type());
#pragma unroll
  for (int j = 0; j < EACH; ++j) tile[share][row][column + j] = sum.v[j];
  __syncthreads();

  constexpr int FILL = 16 / sizeof(T), ALONG = ROWS < FILL ? ROWS : FILL;
  constexpr int LINES = ROWS / ALONG;
  for (int at = threadIdx.x; at < LINES * COLUMNS; at += 256) {
    const int low = at % LINES * ALONG, i = first_in + low, o = first_out + at / LINES;
    if (i >= c_in || o >= c_out) continue;
    float total[ALONG];
#pragma unroll
    for (int j = 0; j < ALONG; ++j) {
      total[j] = tile[0][low + j][at / LINES];
#pragma unroll
      for (int s = 1; s < SHARES; ++s) total[j] += tile[s][low + j][at / LINES];
    }
    T* to = dw + ((long long)o * volume + k) * c_in + i;
    if (c_in % ALONG == 0) {
      store_channels(to, total);
    } else {
      for (int j = 0; j < ALONG && i + j < c_in; ++j) to[j] = static_cast<T>(total[j]);
    }
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
