// What processes send each other, and what is made of it: one launch each.
//
//   work (blocks, 4): array, first element, last element + 1, place in the result
//   join: block --> ELEMENTS of one array, times a factor      read and written once
//   rows of means, variances and a number of rows (P, 2 C + 1) --> those of all rows
//   sums (2 C + 1) --> their means, times the weight
//
// Launches count here, not bytes: a norm's rows are of some hundred floats, and a bucket
// of gradients is read and written once, in neighbouring elements.

namespace lattice {

// COUNT: arrays of the launch, whose switch picks that of a block. after: what must be
// there before, which the graph of launches looks at and nobody reads.
template <typename T, int COUNT, typename AFTER>
__device__ __forceinline__ void join_arrays(const int* work, const T* array,
                                            const float* factor, const AFTER*,
                                            T* joined) {
  const int* mine = work + 4 * blockIdx.x;
  const int first = mine[1], stop = mine[2];
  const float by = factor ? factor[0] : 1.0f;
  T* to = joined + mine[3] - first;
#pragma unroll 4
  for (int i = first + (int)threadIdx.x; i < stop; i += (int)blockDim.x) {
    to[i] = static_cast<T>(static_cast<float>(array[i]) * by);
  }
}

// Chan, Golub and LeVeque: no large squares cancel. A thread has a channel.
__device__ __forceinline__ void merge_moments(const float* every,
                                              const float* running_mean,
                                              const float* running_var,
                                              const float* norm_numbers,
                                              MergeSizes sizes, float* mean, float* var,
                                              float* moved_mean, float* moved_var) {
  const int channels = sizes.channels, channel = blockIdx.x * blockDim.x + threadIdx.x;
  if (channel >= channels) return;
  const int width = 2 * channels + 1;
  float rows = 0.0f, m = 0.0f, squares = 0.0f;
  for (int p = 0; p < sizes.processes; ++p) rows += every[p * width + 2 * channels];
  const float share = rows > 0.0f ? 1.0f / rows : 0.0f;
  for (int p = 0; p < sizes.processes; ++p) {
    const float* row = every + p * width;
    m += share * row[2 * channels] * row[channel];
  }
  for (int p = 0; p < sizes.processes; ++p) {
    const float* row = every + p * width;
    const float d = row[channel] - m;
    squares += row[2 * channels] * (row[channels + channel] + d * d);
  }
  const float v = squares * share, by = norm_numbers[1];
  mean[channel] = m;
  var[channel] = v;
  moved_mean[channel] = m;
  moved_var[channel] = v;
  if (!running_mean) return;
  const float old_mean = running_mean[channel], old_var = running_var[channel];
  // No rows leave them as they are; a single row moves the mean alone.
  moved_mean[channel] = rows > 0.0f ? (1.0f - by) * old_mean + by * m : old_mean;
  moved_var[channel] =
      rows > 1.0f ? (1.0f - by) * old_var + by * (squares / (rows - 1.0f)) : old_var;
}

template <typename P>
__device__ __forceinline__ void mean_terms(const float* sums, const P* weight,
                                           MeanSizes sizes, float* terms) {
  const int channels = sizes.channels, at = blockIdx.x * blockDim.x + threadIdx.x;
  if (at >= 2 * channels) return;
  const float rows = sums[2 * channels];
  const float mean = sums[at] / (rows > 1.0f ? rows : 1.0f);
  terms[at] = weight ? mean * static_cast<float>(weight[at % channels]) : mean;
}

}  // namespace lattice
