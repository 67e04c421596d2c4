// Norms of few rows by their statistics, with the activation and the sum that follow: one
// launch forward and one back, where channel_norms.cu takes three each way. BatchNorm, and
// GroupNorm and InstanceNorm, by which each batch element, a segment, is normalised alone.
//
//   block (all rows of a segment, across x EACH channels), 32 bytes of each row of half:
//     x --> registers --> mean --> squares about it --> y
//     dy, x --> sums of g and g xhat --> dx                     g = dy act'(v)
//
// A block waits for no other: its threads add up what they have by shuffles, and its warps
// by shared memory, in one order: the same bits on every run. Squares are taken about the
// mean, in a pass of their own. Any dtype, any channels, float32 inside. Traffic: x and a
// residual once, y once; back dy, x and a residual once from memory and again from the
// caches, dx once. It wins while a block reads its rows faster than two launches more take
// to start. Needs norm_blocks.cuh.

namespace lattice {

constexpr int BATCH_WARPS = 32;  // of a block, at most: as many as a warp has lanes
// Rows whose reads are on their way at once, back.
constexpr int BATCH_BACK_AHEAD = 4;

// Rows of a thread forward, which its registers hold.
template <typename T>
constexpr int BATCH_HELD = 32 / (int)sizeof(T);

// Calls f(which of this thread's rows, row) for each of them, at once.
template <typename T, typename F>
__device__ __forceinline__ void each_held_row(int rows, F f) {
#pragma unroll
  for (int a = 0; a < BATCH_HELD<T>; ++a) {
    const int row = threadIdx.y + a * blockDim.y;
    if (row < rows) f(a, row);
  }
}

// Threads along the channels of a row: as many as a group of WIDTH has, or 8.
template <int WIDTH, int EACH>
constexpr int BATCH_ACROSS = WIDTH > 8 * EACH ? WIDTH / EACH : 8;

// Adds up the threads of a block that have the same channels, in a fixed order; all of
// them get the sums.
template <int ACROSS, int COUNT>
__device__ __forceinline__ void add_block(float (&values)[COUNT]) {
  // A number more a line: lanes that read one value of all warps have banks of their own.
  __shared__ float kept[BATCH_WARPS][COUNT * ACROSS + 1], sums[COUNT * ACROSS];
  const int x = threadIdx.x;
  const int thread = threadIdx.y * ACROSS + x, lane = thread % 32, warp = thread / 32;
  const int warps = ACROSS * blockDim.y / 32;
#pragma unroll
  for (int i = 0; i < COUNT; ++i) {
    for (int by = 16; by >= ACROSS; by /= 2) {
      values[i] += __shfl_xor_sync(~0u, values[i], by);
    }
    if (lane < ACROSS) kept[warp][i * ACROSS + lane] = values[i];
  }
  __syncthreads();
  for (int value = warp; value < COUNT * ACROSS; value += warps) {
    float sum = lane < warps ? kept[lane][value] : 0.0f;
    for (int by = 16; by; by /= 2) sum += __shfl_xor_sync(~0u, sum, by);
    if (lane == 0) sums[value] = sum;
  }
  __syncthreads();
#pragma unroll
  for (int i = 0; i < COUNT; ++i) values[i] = sums[i * ACROSS + x];
}

// Gives the WIDTH channels of a group, a power of two, the mean of what they have. Groups
// lie within a block, and all threads of a warp call it.
template <int WIDTH, int EACH>
__device__ __forceinline__ void average_groups(float (&values)[EACH]) {
  if constexpr (WIDTH > 1) {
    constexpr int INNER = WIDTH < EACH ? WIDTH : EACH;  // of a thread
#pragma unroll
    for (int first = 0; first < EACH; first += INNER) {
      float sum = values[first];
#pragma unroll
      for (int j = 1; j < INNER; ++j) sum += values[first + j];
#pragma unroll
      for (int by = 1; by < WIDTH / EACH; by *= 2) sum += __shfl_xor_sync(~0u, sum, by);
#pragma unroll
      for (int j = 0; j < INNER; ++j) values[first + j] = sum * (1.0f / WIDTH);
    }
  }
}

// The rows of a block's segment: order[first] up to order[stop], or themselves in order.
struct SegmentRows {
  const int* order;
  int segment = 0, first = 0, stop;

  __device__ __forceinline__ SegmentRows(const int* order, const int* starts, int rows)
      : order(order), stop(rows) {
    if (!starts) return;
    segment = blockIdx.x;
    first = starts[segment], stop = starts[segment + 1];
  }
  __device__ __forceinline__ long long row(int place) const {
    return order ? order[first + place] : first + place;
  }
};

// order, starts: the rows of segments, or null of one of all rows. WIDTH: channels that
// share statistics. sizes.step: the channels of a line of weight and bias where each
// segment has one.
template <typename T, int EACH, typename P, int ACT, int WIDTH>
__device__ __forceinline__ void batch_norm(
    const T* x, const P* weight, const P* bias, const T* residual,
    const float* running_mean, const float* running_var, const int* order,
    const int* starts, const float* norm_numbers, BatchNormSizes sizes, T* y, float* mean,
    float* var, float* moved_mean = nullptr, float* moved_var = nullptr) {
  const SegmentRows segment(order, starts, sizes.rows);
  const int channels = sizes.channels, channel = channel_of_thread<EACH>();
  const int count = segment.stop - segment.first;
  const bool inside = channel < channels;
  const int rows = inside ? count : 0;
  const float share = count ? 1.0f / count : 0.0f, slope = norm_numbers[NORM_SLOPE];
  const long long own = (long long)segment.segment * sizes.step + channel;
  float about[EACH], m[EACH] = {}, squares[EACH] = {}, scale[EACH], shift[EACH];
  const long long start = rows ? segment.row(0) * channels + channel : 0;
#pragma unroll
  for (int j = 0; j < EACH; ++j) {  // read before there is something to wait for
    about[j] = rows ? static_cast<float>(x[start + j]) : 0.0f;
    scale[j] = weight && rows ? static_cast<float>(weight[own + j]) : 1.0f;
    shift[j] = bias && rows ? static_cast<float>(bias[own + j]) : 0.0f;
  }
  auto run = [&](auto aligned) {
    auto at = [&](int place) { return segment.row(place) * channels + channel; };
    Channels<T, EACH> held[BATCH_HELD<T>];
    each_held_row<T>(rows, [&](int a, int row) {
      held[a] = load_channels<EACH>(x + at(row), aligned);
    });
    each_held_row<T>(rows, [&](int a, int) {
#pragma unroll
      for (int j = 0; j < EACH; ++j) m[j] += static_cast<float>(held[a].v[j]) - about[j];
    });
    add_block<BATCH_ACROSS<WIDTH, EACH>>(m);
#pragma unroll
    for (int j = 0; j < EACH; ++j) m[j] = about[j] + share * m[j];
    average_groups<WIDTH>(m);
    each_held_row<T>(rows, [&](int a, int) {
#pragma unroll
      for (int j = 0; j < EACH; ++j) {
        const float d = static_cast<float>(held[a].v[j]) - m[j];
        squares[j] += d * d;
      }
    });
    add_block<BATCH_ACROSS<WIDTH, EACH>>(squares);
    average_groups<WIDTH>(squares);
    const long long line = (long long)segment.segment * channels + channel;
#pragma unroll
    for (int j = 0; j < EACH; ++j) {
      scale[j] *= rsqrtf(share * squares[j] + norm_numbers[NORM_EPS]);
      if (threadIdx.y != 0 || !inside) continue;
      const Running old(running_mean, running_var, norm_numbers, line + j, true);
      write_statistics(rows, m[j], squares[j], old, line + j, mean, var, moved_mean,
                       moved_var);
    }
    each_held_row<T>(rows, [&](int a, int row) {
      Channels<T, EACH> added;
      if (residual) added = load_channels<EACH>(residual + at(row), aligned);
      float out[EACH];
#pragma unroll
      for (int j = 0; j < EACH; ++j) {
        float v = (static_cast<float>(held[a].v[j]) - m[j]) * scale[j] + shift[j];
        if (residual) v += static_cast<float>(added.v[j]);
        out[j] = activated<ACT>(v, slope);
      }
      store_channels<EACH>(y + at(row), out);
    });
  };
  residual ? by_alignment(run, x, residual) : by_alignment(run, x);
}

// dx, and g itself, which is the residual's gradient, where there is a place for it;
// dweight and dbias are the sums of g xhat and of g, a line of each segment.
template <typename T, int EACH, typename P, int ACT, int WIDTH, typename G>
__device__ __forceinline__ void batch_norm_gradient(
    const T* dy, const T* x, const float* mean, const float* var, const P* weight,
    const P* bias, const T* residual, const int* order, const int* starts,
    const float* norm_numbers, BatchNormSizes sizes, T* dx, G* dweight, G* dbias,
    T* dresidual = nullptr) {
  const SegmentRows segment(order, starts, sizes.rows);
  const int channels = sizes.channels, channel = channel_of_thread<EACH>();
  const int count = segment.stop - segment.first;
  const bool inside = channel < channels;
  const float share = count ? 1.0f / count : 0.0f, slope = norm_numbers[NORM_SLOPE];
  const BlockRows rows(segment.first, inside ? segment.stop : segment.first);
  ChannelFit<EACH> fit = {};
  if (inside) {
    fit.load(mean, var, weight, bias, norm_numbers[NORM_EPS], segment.segment, channel,
             channels, sizes.step);
  }
  float sums[2 * EACH] = {};  // of g, then of g xhat
  auto run = [&](auto aligned) {
    auto at = [&](long long row) { return row * channels + channel; };
    auto load = [&](long long row) {
      RowChannels<T, EACH, 3> values;
      values.of[0] = load_channels<EACH>(dy + at(row), aligned);
      values.of[1] = load_channels<EACH>(x + at(row), aligned);
      if (residual) values.of[2] = load_channels<EACH>(residual + at(row), aligned);
      return values;
    };
    // Calls use(g, xhat, row) for this thread's rows.
    auto each_gradient = [&](auto use) {
      each_block_row<BATCH_BACK_AHEAD>(rows, order, load, [&](const auto& from,
                                                              long long row) {
        float g[EACH], xhat[EACH];
#pragma unroll
        for (int j = 0; j < EACH; ++j) {
          const float value = static_cast<float>(from.of[1].v[j]);
          float v = fit.value(j, value);
          if (residual) v += static_cast<float>(from.of[2].v[j]);
          g[j] = static_cast<float>(from.of[0].v[j]) * activation_slope<ACT>(v, slope);
          xhat[j] = (value - fit.mean[j]) * fit.rstd[j];
        }
        use(g, xhat, row);
      });
    };
    each_gradient([&](const auto& g, const auto& xhat, long long) {
#pragma unroll
      for (int j = 0; j < EACH; ++j) {
        sums[j] += g[j];
        sums[EACH + j] += g[j] * xhat[j];
      }
    });
    add_block<BATCH_ACROSS<WIDTH, EACH>>(sums);
    if (threadIdx.y == 0 && inside) {
      const long long line = (long long)segment.segment * channels + channel;
#pragma unroll
      for (int j = 0; j < EACH; ++j) {
        dbias[line + j] = static_cast<G>(sums[j]);
        dweight[line + j] = static_cast<G>(sums[EACH + j]);
      }
    }
    float turn[EACH], shift[EACH];  // of a group, of all its channels' weights
#pragma unroll
    for (int j = 0; j < EACH; ++j) {
      const float by = share * (WIDTH > 1 ? fit.scale[j] : 1.0f);
      shift[j] = by * sums[j], turn[j] = by * sums[EACH + j];
    }
    average_groups<WIDTH>(shift);
    average_groups<WIDTH>(turn);
    each_gradient([&](const auto& g, const auto& xhat, long long row) {
      float out[EACH];
#pragma unroll
      for (int j = 0; j < EACH; ++j) {
        const float rest = shift[j] + xhat[j] * turn[j];
        out[j] = WIDTH > 1 ? fit.scale[j] * g[j] - rest : fit.scale[j] * (g[j] - rest);
      }
      store_channels<EACH>(dx + at(row), out);
      if (dresidual) store_channels<EACH>(dresidual + at(row), g);
    });
  };
  residual ? by_alignment(run, dy, x, residual) : by_alignment(run, dy, x);
}

// The same of segments. sums: (2, segments, C) of g and of g xhat.
template <typename T, int EACH, typename P, int ACT, int WIDTH>
__device__ __forceinline__ void segment_norm_gradient(
    const T* dy, const T* x, const float* mean, const float* var, const P* weight,
    const P* bias, const T* residual, const int* order, const int* starts,
    const float* norm_numbers, BatchNormSizes sizes, T* dx, float* sums,
    T* dresidual = nullptr) {
  float* products = sums + (long long)gridDim.x * sizes.channels;
  batch_norm_gradient<T, EACH, P, ACT, WIDTH>(dy, x, mean, var, weight, bias, residual,
                                              order, starts, norm_numbers, sizes, dx,
                                              products, sums, dresidual);
}

}  // namespace lattice
