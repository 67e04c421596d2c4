// add_integer_splits: y = partial[0] + partial[1] + ... in int32, and what follows these
// sums. Four channels of a line a thread. What follows is read first, and AHEAD parts are
// on their way at once: there are few threads, and each read is a wait. Traffic: splits *
// 4 bytes read and an element written, and a residual once. Reads integer_epilogue.cuh too.

namespace lattice {

// partial (splits, lines, channels) int32; after: an IntegerEpilogue; y (lines, channels).
// Channels are a multiple of 16.
template <typename OUT, typename AFTER>
__device__ __forceinline__ void add_integer_splits(const int* partial, const AFTER& after,
                                                   const AddSplitsSizes& sizes, OUT* y) {
  constexpr int AHEAD = 8;
  const int splits = sizes.splits;
  const long long elements = (long long)sizes.lines * sizes.channels;
  const long long at = 4 * ((long long)blockIdx.x * blockDim.x + threadIdx.x);
  if (at >= elements) return;
  const int channel = (int)(at % sizes.channels);
  auto run = [&](auto aligned) {
    const float step = after.step(), inverse = inverse_of<OUT>(after);
    float a[4], b[4];
    after.load(a, b, channel, aligned);
    Channels<typename AFTER::Residual, 4> added = {};
    if constexpr (AFTER::HAS_RESIDUAL) {
      added = load_channels<4>(after.residual + at, aligned);
    }
    int sum[4] = {};
    for (int first = 0; first < splits; first += AHEAD) {
      int4 part[AHEAD] = {};
#pragma unroll
      for (int i = 0; i < AHEAD; ++i) {
        if (first + i < splits) {
          part[i] = *reinterpret_cast<const int4*>(partial + (first + i) * elements + at);
        }
      }
#pragma unroll
      for (int i = 0; i < AHEAD; ++i) {
        sum[0] += part[i].x, sum[1] += part[i].y;
        sum[2] += part[i].z, sum[3] += part[i].w;
      }
    }
    float2 kept[4];
#pragma unroll
    for (int j = 0; j < 4; ++j) kept[j] = make_float2(a[j], b[j]);
    store_finished(sum, after, kept, added, step, inverse, y + at);
  };
  by_alignment(run, after.scale, after.shift, after.residual);
}

}  // namespace lattice
