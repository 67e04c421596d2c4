// Norms by channel: BatchNorm, and GroupNorm and InstanceNorm by batch element, with
// the activation and the sum that follow.
//
//   block (rows, across x EACH channels): thread (row, EACH channels) --> sums of rows
//   partials (blocks, 3, C): rows, mean, squares --> mean, variance     in one order
//   y = act((x - mean) rstd weight + bias + residual)        one pass over the rows
//
// Statistics are taken about the first row of each block and joined by their means, so
// that a large mean cancels nothing. Backward: sums of g and g xhat, g = dy act'(v) with
// v computed again from x, then dx = rstd (weight g - A - xhat B) in a second pass. Any
// dtype, any channels, float32 inside, no atomics; sums have one order by sizes: the same
// bits on every run. Traffic: x once for the statistics, once (and y, and a residual) to
// normalise; x and dy twice and dx once back; nothing float32 of a row's size. Bound by
// memory, 16 bytes a read where the channels allow it. Needs norm_blocks.cuh.

namespace lattice {

constexpr int COMBINE_ACROSS = 8;  // channels of a block that adds partials
constexpr int COMBINE_DOWN = 64;   // and its threads for each of them

// Rows, mean and sum of squares about it of each channel, by block.
template <typename T, int EACH>
__device__ __forceinline__ void channel_moments(const T* x, const int* order,
                                                const int* bounds,
                                                ChannelNormSizes sizes,
                                                float* partials) {
  const int channels = sizes.channels, channel = channel_of_thread<EACH>();
  const BlockRows rows(bounds, sizes.rows);
  const int count = rows.stop - rows.first;
  float about[EACH] = {}, sum[EACH] = {}, squares[EACH] = {};
  auto run = [&](auto aligned) {
    auto load = [&](long long row) {
      return load_channels<EACH>(x + row * channels + channel, aligned);
    };
    if (channel >= channels || count == 0) return;
    const auto start = load(order ? order[rows.first] : rows.first);
#pragma unroll
    for (int j = 0; j < EACH; ++j) about[j] = static_cast<float>(start.v[j]);
    each_block_row<ONE_AHEAD>(rows, order, load, [&](const auto& from, long long) {
#pragma unroll
      for (int j = 0; j < EACH; ++j) {
        const float d = static_cast<float>(from.v[j]) - about[j];
        sum[j] += d;
        squares[j] += d * d;
      }
    });
  };
  by_alignment(run, x);
  add_thread_rows(sum, squares);
  const float share = count ? 1.0f / count : 0.0f;
#pragma unroll
  for (int j = 0; j < EACH; ++j) {
    const float d = sum[j] * share, square = squares[j] - sum[j] * d;
    sum[j] = about[j] + d;
    squares[j] = square < 0.0f ? 0.0f : square;
  }
  write_partials(partials, count, channel, channels, sum, squares);
}

// Rows of a channel, their mean, and the sum of squares about it.
struct RowMoments {
  float rows, mean, squares;

  __device__ __forceinline__ void join(const RowMoments& other) {
    const float all = rows + other.rows, share = all > 0.0f ? other.rows / all : 0.0f;
    const float d = other.mean - mean;
    mean += share * d;
    squares += other.squares + share * rows * d * d;
    rows = all;
  }
  __device__ __forceinline__ RowMoments of_lane(int bit) const {
    return {__shfl_xor_sync(~0u, rows, bit), __shfl_xor_sync(~0u, mean, bit),
            __shfl_xor_sync(~0u, squares, bit)};
  }
};

// Rows of a channel, and sums of g and g xhat.
struct GradientSums {
  float rows, sum, products;

  __device__ __forceinline__ void join(const GradientSums& other) {
    rows += other.rows, sum += other.sum, products += other.products;
  }
  __device__ __forceinline__ GradientSums of_lane(int bit) const {
    return {__shfl_xor_sync(~0u, rows, bit), __shfl_xor_sync(~0u, sum, bit),
            __shfl_xor_sync(~0u, products, bit)};
  }
};

// Joins lines of partials of a channel, in a fixed order: those of a thread, of a warp's
// four threads, and of the warps. The first COMBINE_ACROSS threads have the result.
template <typename LINE>
__device__ __forceinline__ LINE join_lines(const float* partials, int first, int stop,
                                           int channels, int channel) {
  constexpr int WARPS = COMBINE_ACROSS * COMBINE_DOWN / 32;
  __shared__ LINE kept[WARPS][COMBINE_ACROSS];
  const int thread = threadIdx.y * COMBINE_ACROSS + threadIdx.x, warp = thread / 32;
  LINE mine = {};
  auto join_lanes = [&] {
#pragma unroll
    for (int bit = COMBINE_ACROSS; bit < 32; bit *= 2) mine.join(mine.of_lane(bit));
  };
  if (channel < channels) {
#pragma unroll 4
    for (int b = first + threadIdx.y; b < stop; b += COMBINE_DOWN) {
      const float* line = partials + (long long)b * 3 * channels + channel;
      mine.join({line[0], line[channels], line[2 * channels]});
    }
  }
  join_lanes();
  if (thread % 32 < COMBINE_ACROSS) kept[warp][threadIdx.x] = mine;
  __syncthreads();
  if (warp > 0) return mine;
  mine = kept[threadIdx.y][threadIdx.x];
#pragma unroll
  for (int w = 32 / COMBINE_ACROSS; w < WARPS; w += 32 / COMBINE_ACROSS) {
    mine.join(kept[w + threadIdx.y][threadIdx.x]);
  }
  join_lanes();
  return mine;
}

// starts: the first line of each segment; of one segment all lines, and null.
__device__ __forceinline__ void combine_moments(
    const float* partials, const int* starts, const float* running_mean,
    const float* running_var, const float* norm_numbers, CombineSizes sizes, float* mean,
    float* var, float* moved_mean, float* moved_var) {
  const int channels = sizes.channels, segment = blockIdx.y;
  const int channel = blockIdx.x * COMBINE_ACROSS + threadIdx.x;
  const int first = starts ? starts[segment] : 0;
  const int stop = starts ? starts[segment + 1] : sizes.blocks;
  const bool inside = threadIdx.y == 0 && channel < channels;
  const long long at = (long long)segment * channels + channel;
  const Running old(running_mean, running_var, norm_numbers, at, inside);
  const auto all = join_lines<RowMoments>(partials, first, stop, channels, channel);
  if (!inside) return;
  write_statistics(all.rows, all.mean, all.squares, old, at, mean, var, moved_mean,
                   moved_var);
}

// y = act(norm(x) + residual). of: the segment of each row; one for all where null.
template <typename T, int EACH, typename P, int ACT>
__device__ __forceinline__ void normalize_channels(
    const T* x, const float* mean, const float* var, const P* weight, const P* bias,
    const T* residual, const int* of, const float* norm_numbers, ChannelNormSizes sizes,
    T* y) {
  const int channels = sizes.channels, channel = channel_of_thread<EACH>();
  if (channel >= channels) return;
  const BlockRows rows(nullptr, sizes.rows);
  const float eps = norm_numbers[NORM_EPS], slope = norm_numbers[NORM_SLOPE];
  ChannelFit<EACH> fit;
  int segment = 0;
  auto prepare = [&] {
    fit.load(mean, var, weight, bias, eps, segment, channel, channels);
  };
  prepare();
  auto run = [&](auto aligned) {
    auto load = [&](long long row) {
      const long long at = row * channels + channel;
      RowChannels<T, EACH, 2> values;
      if (of) values.segment = of[row];
      values.of[0] = load_channels<EACH>(x + at, aligned);
      if (residual) values.of[1] = load_channels<EACH>(residual + at, aligned);
      return values;
    };
    each_block_row<SEVERAL_AHEAD>(rows, nullptr, load, [&](const auto& from, long long row) {
      if (from.segment != segment) segment = from.segment, prepare();
      float out[EACH];
#pragma unroll
      for (int j = 0; j < EACH; ++j) {
        float v = fit.value(j, static_cast<float>(from.of[0].v[j]));
        if (residual) v += static_cast<float>(from.of[1].v[j]);
        out[j] = activated<ACT>(v, slope);
      }
      store_channels<EACH>(y + row * channels + channel, out);
    });
  };
  residual ? by_alignment(run, x, residual) : by_alignment(run, x);
}

// Sums of g and g xhat by block, g = dy act'(v).
template <typename T, int EACH, typename P, int ACT>
__device__ __forceinline__ void channel_gradient_sums(
    const T* dy, const T* x, const float* mean, const float* var, const P* weight,
    const P* bias, const T* residual, const int* of, const int* order, const int* bounds,
    const float* norm_numbers, ChannelNormSizes sizes, float* partials) {
  const int channels = sizes.channels, channel = channel_of_thread<EACH>();
  const BlockRows rows(bounds, sizes.rows);
  const int count = rows.stop - rows.first;
  const float eps = norm_numbers[NORM_EPS], slope = norm_numbers[NORM_SLOPE];
  float sum[EACH] = {}, products[EACH] = {};
  auto run = [&](auto aligned) {
    if (channel >= channels || count == 0) return;
    const long long segment = of ? of[order ? order[rows.first] : rows.first] : 0;
    ChannelFit<EACH> fit;
    fit.load(mean, var, weight, bias, eps, segment, channel, channels);
    auto load = [&](long long row) {
      const long long at = row * channels + channel;
      RowChannels<T, EACH, 3> values;
      values.of[0] = load_channels<EACH>(dy + at, aligned);
      values.of[1] = load_channels<EACH>(x + at, aligned);
      if (residual) values.of[2] = load_channels<EACH>(residual + at, aligned);
      return values;
    };
    each_block_row<SEVERAL_AHEAD>(rows, order, load, [&](const auto& from, long long) {
#pragma unroll
      for (int j = 0; j < EACH; ++j) {
        const float at = static_cast<float>(from.of[1].v[j]);
        float v = fit.value(j, at);
        if (residual) v += static_cast<float>(from.of[2].v[j]);
        const float g =
            static_cast<float>(from.of[0].v[j]) * activation_slope<ACT>(v, slope);
        sum[j] += g;
        products[j] += g * (at - fit.mean[j]) * fit.rstd[j];
      }
    });
  };
  residual ? by_alignment(run, dy, x, residual) : by_alignment(run, dy, x);
  add_thread_rows(sum, products);
  write_partials(partials, count, channel, channels, sum, products);
}

// sums, terms: (2, segments, C). terms are the weight times the means of g and g xhat.
template <typename P>
__device__ __forceinline__ void combine_gradient_sums(const float* partials,
                                                      const int* starts, const P* weight,
                                                      CombineSizes sizes, float* sums,
                                                      float* terms, P* dweight, P* dbias) {
  const int channels = sizes.channels, segment = blockIdx.y;
  const int channel = blockIdx.x * COMBINE_ACROSS + threadIdx.x;
  const int first = starts ? starts[segment] : 0;
  const int stop = starts ? starts[segment + 1] : sizes.blocks;
  const auto all = join_lines<GradientSums>(partials, first, stop, channels, channel);
  if (threadIdx.y != 0 || channel >= channels) return;
  const long long at = (long long)segment * channels + channel;
  const long long half = (long long)gridDim.y * channels;
  float share = all.rows > 0.0f ? 1.0f / all.rows : 0.0f;
  if (weight) share *= static_cast<float>(weight[at]);
  sums[at] = all.sum;
  sums[half + at] = all.products;
  terms[at] = share * all.sum;
  terms[half + at] = share * all.products;
  dbias[at] = static_cast<P>(all.sum);
  dweight[at] = static_cast<P>(all.products);
}

// dx = rstd (weight g - terms[0] - xhat terms[1]), without terms rstd weight g; and g
// itself, which is the residual's gradient, if dresidual is not null.
template <typename T, int EACH, typename P, int ACT>
__device__ __forceinline__ void channel_gradient(
    const T* dy, const T* x, const float* mean, const float* var, const P* weight,
    const P* bias, const T* residual, const float* terms, const int* of,
    const float* norm_numbers, ChannelNormSizes sizes, T* dx, T* dresidual) {
  const int channels = sizes.channels, channel = channel_of_thread<EACH>();
  if (channel >= channels) return;
  const BlockRows rows(nullptr, sizes.rows);
  const float eps = norm_numbers[NORM_EPS], slope = norm_numbers[NORM_SLOPE];
  ChannelFit<EACH> fit;
  float shift[EACH] = {}, turn[EACH] = {};
  int segment = 0;
  auto prepare = [&] {
    fit.load(mean, var, weight, bias, eps, segment, channel, channels);
    if (!terms) return;
    const long long half = (long long)sizes.segments * channels;
#pragma unroll
    for (int j = 0; j < EACH; ++j) {
      const long long at = (long long)segment * channels + channel + j;
      shift[j] = terms[at] * fit.rstd[j];
      turn[j] = terms[half + at] * fit.rstd[j] * fit.rstd[j];
    }
  };
  prepare();
  auto run = [&](auto aligned) {
    auto load = [&](long long row) {
      const long long at = row * channels + channel;
      RowChannels<T, EACH, 3> values;
      values.of[0] = load_channels<EACH>(dy + at, aligned);
      values.of[1] = load_channels<EACH>(x + at, aligned);
      if (residual) values.of[2] = load_channels<EACH>(residual + at, aligned);
      if (of) values.segment = of[row];
      return values;
    };
    each_block_row<SEVERAL_AHEAD>(rows, nullptr, load, [&](const auto& from, long long row) {
      if (from.segment != segment) segment = from.segment, prepare();
      float out[EACH], gradient[EACH];
#pragma unroll
      for (int j = 0; j < EACH; ++j) {
        const float at = static_cast<float>(from.of[1].v[j]);
        float v = fit.value(j, at);
        if (residual) v += static_cast<float>(from.of[2].v[j]);
        const float g =
            static_cast<float>(from.of[0].v[j]) * activation_slope<ACT>(v, slope);
        gradient[j] = g;
        out[j] = fit.scale[j] * g - shift[j] - (at - fit.mean[j]) * turn[j];
      }
      store_channels<EACH>(dx + row * channels + channel, out);
      if (dresidual) store_channels<EACH>(dresidual + row * channels + channel, gradient);
    });
  };
  residual ? by_alignment(run, dy, x, residual) : by_alignment(run, dy, x);
}

}  // namespace lattice
