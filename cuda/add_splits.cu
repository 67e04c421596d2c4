// add_splits: y = partial[0] + partial[1] + ..., in that order, and what follows: what the
// splits of a tile leave is added in one launch, and rounded once. Four channels of a line a
// thread. Traffic: splits * 4 bytes read and sizeof(T) written per element, and a residual
// once. Reads epilogue.cuh too.

namespace lattice {

// partial (splits, lines, channels) float32; after: a Bias or an Epilogue; y (lines,
// channels). Channels are multiples of 16 bytes of T.
template <typename T, typename AFTER>
__device__ __forceinline__ void add_splits(const float* partial, const AFTER& after,
                                           const AddSplitsSizes& sizes, T* y) {
  const int splits = sizes.splits;
  const long long elements = (long long)sizes.lines * sizes.channels;
  const long long at = 4 * ((long long)blockIdx.x * blockDim.x + threadIdx.x);
  if (at >= elements) return;
  float sum[4] = {};
#pragma unroll 4
  for (int r = 0; r < splits; ++r) {
    const float4 v = *reinterpret_cast<const float4*>(partial + r * elements + at);
    sum[0] += v.x, sum[1] += v.y, sum[2] += v.z, sum[3] += v.w;
  }
  after.finish(sum, at / sizes.channels, (int)(at % sizes.channels), sizes.channels);
  store_channels<4>(y + at, sum);
}

}  // namespace lattice
