// What norms over groups of channels take from sums by channel: GroupNorm and
// InstanceNorm, whose statistics are those of a segment's rows.
//
//   partials of channel_moments --> mean, variance of a group      its lines x channels
//   sums (2, S, C) of g, g xhat --> terms of a group, gradients of weight and bias
//
// One block a group and segment; a group's channels all get its values. Joined in one
// order by sizes: the same bits on every run. Needs channel_norms.cu.

namespace lattice {

constexpr int GROUP_THREADS = 256;

// Joins what the threads of a block have, in a fixed order; all of them get it.
template <typename LINE>
__device__ __forceinline__ LINE join_block(LINE mine) {
  constexpr int WARPS = GROUP_THREADS / 32;
  __shared__ LINE kept[WARPS];
#pragma unroll
  for (int bit = 1; bit < 32; bit *= 2) mine.join(mine.of_lane(bit));
  __syncthreads();  // a block joins several times
  if (threadIdx.x % 32 == 0) kept[threadIdx.x / 32] = mine;
  __syncthreads();
  LINE all = kept[0];
#pragma unroll
  for (int w = 1; w < WARPS; ++w) all.join(kept[w]);
  return all;
}

__device__ __forceinline__ void combine_group_moments(const float* partials,
                                                      const int* starts,
                                                      GroupMomentSizes sizes,
                                                      float* mean, float* var) {
  const int channels = sizes.channels, width = sizes.width, segment = blockIdx.y;
  const int first = blockIdx.x * width, start = starts[segment];
  const int values = (starts[segment + 1] - start) * width;
  RowMoments mine = {};
  for (int at = threadIdx.x; at < values; at += GROUP_THREADS) {
    const float* line = partials + (long long)(start + at / width) * 3 * channels;
    line += first + at % width;
    mine.join({line[0], line[channels], line[2 * channels]});
  }
  const RowMoments all = join_block(mine);
  for (int c = threadIdx.x; c < width; c += GROUP_THREADS) {
    const long long to = (long long)segment * channels + first + c;
    mean[to] = all.mean;
    var[to] = all.rows > 0.0f ? all.squares / all.rows : 0.0f;
  }
}

// terms: means over a group of g and g xhat times the weight. counts: rows of a segment.
// dweight, dbias: of each segment by itself where it has a line of its own (step).
template <typename P>
__device__ __forceinline__ void combine_group_terms(const float* sums, const P* weight,
                                                    const float* counts,
                                                    GroupTermSizes sizes, float* terms,
                                                    P* dweight, P* dbias) {
  const int channels = sizes.channels, width = sizes.width, segment = blockIdx.y;
  const int first = blockIdx.x * width;
  const long long plane = (long long)sizes.segments * channels;
  const long long line = (long long)segment * channels + first;
  const long long own = (long long)segment * sizes.step + first;
  GradientSums mine = {};
  for (int c = threadIdx.x; c < width; c += GROUP_THREADS) {
    const float w = weight ? static_cast<float>(weight[own + c]) : 1.0f;
    mine.join({0.0f, w * sums[line + c], w * sums[plane + line + c]});
  }
  const GradientSums all = join_block(mine);
  const float share = 1.0f / (counts[segment] * width);
  const bool shared = sizes.step == 0;
  for (int c = threadIdx.x; c < width; c += GROUP_THREADS) {
    terms[line + c] = share * all.sum;
    terms[plane + line + c] = share * all.products;
    if (shared && segment > 0) continue;
    const float* from = sums + line + c;
    float sum = from[0], products = from[plane];
    for (int s = 1; shared && s < sizes.segments; ++s) {
      sum += from[(long long)s * channels];
      products += from[plane + (long long)s * channels];
    }
    dbias[own + c] = static_cast<P>(sum);
    dweight[own + c] = static_cast<P>(products);
  }
}

}  // namespace lattice
