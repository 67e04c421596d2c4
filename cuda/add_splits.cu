// add_splits: y = partial[0] + partial[1] + ... (+ bias), in that order: what the splits of
// a tile leave is added in one launch, and rounded once. Four channels of a line a thread.
// Traffic: splits * 4 bytes read and sizeof(T) written per element.

namespace lattice {

// partial (splits, lines, channels) float32; bias (channels) or null; y (lines, channels).
// Channels are multiples of 16 bytes of T.
template <typename T>
__device__ __forceinline__ void add_splits(const float* partial, const T* bias,
                                           const AddSplitsSizes& sizes, T* y) {
  const int splits = sizes.splits;
  const long long elements = (long long)sizes.lines * sizes.channels;
  const long long at = 4 * ((long long)blockIdx.x * blockDim.x + threadIdx.x);
  if (at >= elements) return;
  float4 sum = make_float4(0.0f, 0.0f, 0.0f, 0.0f);
#pragma unroll 4
  for (int r = 0; r < splits; ++r) {
    const float4 v = *reinterpret_cast<const float4*>(partial + r * elements + at);
    sum.x += v.x, sum.y += v.y, sum.z += v.z, sum.w += v.w;
  }
  if (bias != nullptr) {
    const T* b = bias + at % sizes.channels;
    sum.x += static_cast<float>(b[0]), sum.y += static_cast<float>(b[1]);
    sum.z += static_cast<float>(b[2]), sum.w += static_cast<float>(b[3]);
  }
  y[at] = static_cast<T>(sum.x), y[at + 1] = static_cast<T>(sum.y);
  y[at + 2] = static_cast<T>(sum.z), y[at + 3] = static_cast<T>(sum.w);
}

}  // namespace lattice
