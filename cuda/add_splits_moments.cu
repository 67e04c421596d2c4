// add_splits_moments: as add_splits, and statistics of the rows of y for the norm that
// follows: how many rows, and of each channel their mean and the sum of squares about it, a
// line for each block, as channel_moments of channel_norms.cu writes them.
//
//   block: some rows x 64 channels; thread (16 rows down, 16 x 4 channels)
//     --> a warp's two rows --> the warps, in order --> a line
//
// Of the values that are written, rounded, about the first row of the block, so that a
// large mean cancels nothing; sums have one order by sizes. Traffic: that of add_splits, and
// 12 bytes a channel and block, where the norm would read all rows again. Reads
// epilogue.cuh too.

namespace lattice {

constexpr int MOMENTS_ACROSS = 16, MOMENTS_DOWN = 16;  // threads of a block

// As of add_splits. Blocks: (lines x columns of 64 channels).
template <typename T, typename AFTER>
__device__ __forceinline__ void add_splits_moments(const float* partial,
                                                   const AFTER& after,
                                                   const AddSplitsSizes& sizes, T* y) {
  constexpr int WARPS = MOMENTS_ACROSS * MOMENTS_DOWN / 32;
  __shared__ float kept[WARPS][8][MOMENTS_ACROSS];
  const int channels = sizes.channels, splits = sizes.splits;
  const int columns = (channels + 4 * MOMENTS_ACROSS - 1) / (4 * MOMENTS_ACROSS);
  const int line = blockIdx.x / columns, lines = gridDim.x / columns;
  const int across = threadIdx.x % MOMENTS_ACROSS, down = threadIdx.x / MOMENTS_ACROSS;
  const int channel = 4 * (blockIdx.x % columns * MOMENTS_ACROSS + across);
  const int each = (sizes.lines + lines - 1) / lines;
  const int first = min(line * each, sizes.lines), stop = min(first + each, sizes.lines);
  const long long elements = (long long)sizes.lines * channels;

  // A row's four channels, finished.
  auto summed = [&](int row) {
    const long long at = (long long)row * channels + channel;
    float4 sum = {};
#pragma unroll 4
    for (int r = 0; r < splits; ++r) {
      const float4 v = *reinterpret_cast<const float4*>(partial + r * elements + at);
      sum.x += v.x, sum.y += v.y, sum.z += v.z, sum.w += v.w;
    }
    float all[4] = {sum.x, sum.y, sum.z, sum.w};
    after.finish(all, row, channel, channels);
    return make_float4(all[0], all[1], all[2], all[3]);
  };
  auto rounded = [](float v) { return static_cast<float>(static_cast<T>(v)); };

  float about[4] = {}, sums[8] = {};  // of what is off, and of its squares
  if (channel < channels && first < stop) {
    const float4 start = summed(first);
    about[0] = rounded(start.x), about[1] = rounded(start.y);
    about[2] = rounded(start.z), about[3] = rounded(start.w);
    for (int row = first + down; row < stop; row += MOMENTS_DOWN) {
      const float4 v = summed(row);
      const float values[4] = {v.x, v.y, v.z, v.w};
      store_channels<4>(y + (long long)row * channels + channel, values);
#pragma unroll
      for (int j = 0; j < 4; ++j) {
        const float d = rounded(values[j]) - about[j];
        sums[j] += d, sums[4 + j] += d * d;
      }
    }
  }
#pragma unroll
  for (int j = 0; j < 8; ++j) {
    sums[j] += __shfl_xor_sync(~0u, sums[j], MOMENTS_ACROSS);
    if (threadIdx.x % 32 < MOMENTS_ACROSS) kept[threadIdx.x / 32][j][across] = sums[j];
  }
  __syncthreads();
  if (down != 0 || channel >= channels) return;
  for (int warp = 1; warp < WARPS; ++warp) {
#pragma unroll
    for (int j = 0; j < 8; ++j) sums[j] += kept[warp][j][across];
  }
  const int rows = stop - first;
  const float share = rows > 0 ? 1.0f / rows : 0.0f;
  float* to = after.lines + (long long)line * 3 * channels + channel;
#pragma unroll
  for (int j = 0; j < 4; ++j) {
    to[j] = rows;
    to[channels + j] = about[j] + sums[j] * share;
    const float square = sums[4 + j] - sums[j] * sums[j] * share;
    to[2 * channels + j] = square < 0.0f ? 0.0f : square;  // a NaN stays
  }
}

}  // namespace lattice
