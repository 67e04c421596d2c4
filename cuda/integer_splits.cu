// add_integer_splits: y = partial[0] + partial[1] + ... in int32, and what follows these
// sums. Four channels of a line a thread. Traffic: splits * 4 bytes read and an element
// written, and a residual once. Reads integer_epilogue.cuh too.

namespace lattice {

// partial (splits, lines, channels) int32; after: an IntegerEpilogue; y (lines, channels).
// Channels are a multiple of 16.
template <typename OUT, typename AFTER>
__device__ __forceinline__ void add_integer_splits(const int* partial, const AFTER& after,
                                                   const AddSplitsSizes& sizes, OUT* y) {
  const int splits = sizes.splits;
  const long long elements = (long long)sizes.lines * sizes.channels;
  const long long at = 4 * ((long long)blockIdx.x * blockDim.x + threadIdx.x);
  if (at >= elements) return;
  int sum[4] = {};
#pragma unroll 4
  for (int r = 0; r < splits; ++r) {
    const int4 v = *reinterpret_cast<const int4*>(partial + r * elements + at);
    sum[0] += v.x, sum[1] += v.y, sum[2] += v.z, sum[3] += v.w;
  }
  float a[4], b[4];
  after.load(a, b, (int)(at % sizes.channels), cuda::std::true_type());
  float2 kept[4];
#pragma unroll
  for (int j = 0; j < 4; ++j) kept[j] = make_float2(a[j], b[j]);
  store_integers(sum, after, kept, at, y + at);
}

}  // namespace lattice
