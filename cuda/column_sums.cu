// Sums of columns: the gradient of a bias, y[c] = sum over the rows of x[., c].
//
//   block (share of rows, across x EACH channels): thread row --> every down-th of its rows
//   lanes of equal channels, then warps                       --> one line of y
//
// One launch of one share where rows are few; else lines of float32, which a second launch
// adds in the same way. Float32 inside, no atomics; the order depends on sizes only: the
// same bits on every run. Traffic: x once. Needs norm_blocks.cuh.

namespace lattice {

// y (blocks, channels). blockDim.x: a power of two, at most a warp's.
template <typename T, int EACH, typename OUT>
__device__ __forceinline__ void column_sums(const T* x, ColumnSumsSizes sizes, OUT* y) {
  constexpr int WARPS = NORM_THREADS / 32;
  __shared__ float kept[WARPS][32 * EACH];
  const int across = blockDim.x, thread = threadIdx.y * across + threadIdx.x;
  const int channels = sizes.channels, channel = channel_of_thread<EACH>();
  float sum[EACH] = {};
  auto run = [&](auto aligned) {
    if (channel >= channels) return;
    auto load = [&](long long row) {
      return load_channels<EACH>(x + row * channels + channel, aligned);
    };
    const BlockRows rows(nullptr, sizes.rows);
    each_block_row<ONE_AHEAD>(rows, nullptr, load, [&](const auto& from, long long) {
#pragma unroll
      for (int j = 0; j < EACH; ++j) sum[j] += static_cast<float>(from.v[j]);
    });
  };
  by_alignment(run, x);
  for (int bit = across; bit < 32; bit *= 2) {
#pragma unroll
    for (int j = 0; j < EACH; ++j) sum[j] += __shfl_xor_sync(~0u, sum[j], bit);
  }
  const int lane = thread % 32, warp = thread / 32;
  if (lane < across) {
#pragma unroll
    for (int j = 0; j < EACH; ++j) kept[warp][j * 32 + lane] = sum[j];
  }
  __syncthreads();
  if (threadIdx.y > 0 || channel >= channels) return;
#pragma unroll
  for (int j = 0; j < EACH; ++j) {
#pragma unroll
    for (int w = 1; w < WARPS; ++w) sum[j] += kept[w][j * 32 + lane];
  }
  store_channels<EACH>(y + (long long)blockIdx.x * channels + channel, sum);
}

}  // namespace lattice
