// The weight gradient of a depthwise convolution: M output channels of each input channel.
//
//   dW[k, c] = sum over edges of x[i, c / M] dy[o, c]
//
// By splits of the kernel-major edges, as grouped_gemm's. A thread block has a split, and 64
// bytes or more of channels: 4 to 32 threads along them, EACH a thread, and the others
// along the edges of a stage, of which each thread loads four or more at once. Traffic: an
// edge's two rows, of those channels, and its pair; the partial sums, a split and offset.
// Any dtype; sums in float32, a thread's in order, then of threads: the same bits every
// time. Needs alignment.cuh, channels.cuh and edge_walk.cuh.

namespace lattice {

// partials (splits + K, 1, c_out). `groups` are the input channels, c_out is M. EACH > 1
// only where M is 1. 256 threads a block.
template <typename T, int EACH, int ACROSS, int STAGE>
__device__ __forceinline__ void depthwise_weight_grad(const T* x, const T* dy,
                                                      const int* pairs,
                                                      const int* spans,
                                                      const int* firsts,
                                                      const WeightGradSizes& sizes,
                                                      float* partials) {
  constexpr int UNITS = 256 / ACROSS, WARPS = 256 / 32;
  constexpr int SIDE = UNITS < STAGE ? STAGE / UNITS : 1;  // of a stage's edges a thread
  constexpr int STAGES = SIDE < 4 ? 4 / SIDE : 1;          // that are loaded together
  __shared__ float parts[WARPS][ACROSS * EACH];
  const int multiplier = sizes.c_out, c_in = sizes.groups, c_out = c_in * multiplier;
  const int lane = threadIdx.x % ACROSS, unit = threadIdx.x / ACROSS;
  const int first = blockIdx.y * ACROSS * EACH, channel = first + lane * EACH;
  const bool inside = channel < c_out;
  const int splits = gridDim.x, volume = sizes.volume;
  const int span = (firsts[volume] + splits - 1) / splits;
  const T* from_x = x + channel / multiplier;
  const T* from_dy = dy + channel;
  EdgeWalk<STAGE> walk(spans, firsts, volume, blockIdx.x, span);
  const auto sum_offset = [&](auto aligned, float(&sum)[EACH]) {
    const bool turned = walk.turned;
    for (bool ends = false; !ends;) {
      int2 pair[STAGES][SIDE];
#pragma unroll
      for (int s = 0; s < STAGES; ++s) {
        const int count = inside && !ends ? walk.count() : 0;
#pragma unroll
        for (int j = 0; j < SIDE; ++j) {
          const int edge = unit + j * UNITS;
          pair[s][j] = edge < count ? walk.pair(pairs, edge) : int2{-1, -1};
        }
        ends = ends || walk.advance();
      }
      Channels<T, EACH> a[STAGES][SIDE], b[STAGES][SIDE];
#pragma unroll
      for (int s = 0; s < STAGES; ++s) {
#pragma unroll
        for (int j = 0; j < SIDE; ++j) {
          if (pair[s][j].x < 0) continue;
          const int2 rows = rows_of(pair[s][j], turned);
          a[s][j] = load_channels<EACH>(from_x + (long long)rows.x * c_in, aligned);
          b[s][j] = load_channels<EACH>(from_dy + (long long)rows.y * c_out, aligned);
        }
      }
#pragma unroll
      for (int s = 0; s < STAGES; ++s) {
#pragma unroll
        for (int j = 0; j < SIDE; ++j) {
          if (pair[s][j].x < 0) continue;
#pragma unroll
          for (int c = 0; c < EACH; ++c) {
            const float of_x = static_cast<float>(a[s][j].v[c]);
            sum[c] = fmaf(of_x, static_cast<float>(b[s][j].v[c]), sum[c]);
          }
        }
      }
    }
  };
  while (!walk.done()) {
    const int k = walk.k;
    float sum[EACH] = {};
    by_alignment([&](auto aligned) { sum_offset(aligned, sum); }, x, dy);
#pragma unroll
    for (int c = 0; c < EACH; ++c) {
#pragma unroll
      for (int by = ACROSS; by < 32; by *= 2) {
        sum[c] += __shfl_xor_sync(~0u, sum[c], by);
      }
    }
    __syncthreads();
    if (threadIdx.x % 32 < ACROSS) {
#pragma unroll
      for (int c = 0; c < EACH; ++c) parts[threadIdx.x / 32][lane * EACH + c] = sum[c];
    }
    __syncthreads();
    const int c = first + threadIdx.x;
    if (threadIdx.x < ACROSS * EACH && c < c_out) {
      float total = 0.0f;
#pragma unroll
      for (int warp = 0; warp < WARPS; ++warp) total += parts[warp][threadIdx.x];
      partials[((long long)blockIdx.x + k) * c_out + c] = total;
    }
  }
}

}  // namespace lattice
