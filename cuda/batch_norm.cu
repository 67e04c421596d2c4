// BatchNorm of few rows, with the activation and the sum that follow: one launch forward
// and one back, where channel_norms.cu takes three each way.
//
//   block (all rows, 8 x EACH channels), 32 bytes of each row of half:
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

constexpr int BATCH_ACROSS = 8;  // threads along the channels of a row
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

// Adds up the threads of a block that have the same channels, in a fixed order; all of
// them get the sums.
template <int COUNT>
__device__ __forceinline__ void add_block(float (&values)[COUNT]) {
  constexpr int SUMS = COUNT * BATCH_ACROSS;
  // A number more a line: lanes that read one value of all warps have banks of their own.
  __shared__ float kept[BATCH_WARPS][SUMS + 1], sums[SUMS];
  const int x = threadIdx.x, thread = threadIdx.y * BATCH_ACROSS + x;
  const int lane = thread % 32, warp = thread / 32, warps = BATCH_ACROSS * blockDim.y / 32;
#pragma unroll
  for (int i = 0; i < COUNT; ++i) {
    for (int by = 16; by >= BATCH_ACROSS; by /= 2) {
      values[i] += __shfl_xor_sync(~0u, values[i], by);
    }
    if (lane < BATCH_ACROSS) kept[warp][i * BATCH_ACROSS + lane] = values[i];
  }
  __syncthreads();
  for (int value = warp; value < SUMS; value += warps) {
    const float sum = add_lanes<32>(lane < warps ? kept[lane][value] : 0.0f);
    if (lane == 0) sums[value] = sum;
  }
  __syncthreads();
#pragma unroll
  for (int i = 0; i < COUNT; ++i) values[i] = sums[i * BATCH_ACROSS + x];
}

template <typename T, int EACH, typename P, int ACT>
__device__ __forceinline__ void batch_norm(
    const T* x, const P* weight, const P* bias, const T* residual,
    const float* running_mean, const float* running_var, const float* norm_numbers,
    BatchNormSizes sizes, T* y, float* mean, float* var, float* moved_mean,
    float* moved_var) {
  const int channels = sizes.channels, channel = channel_of_thread<EACH>();
  const bool inside = channel < channels;
  const int rows = inside ? sizes.rows : 0;
  const float share = 1.0f / sizes.rows, slope = norm_numbers[NORM_SLOPE];
  float about[EACH], m[EACH] = {}, squares[EACH] = {}, scale[EACH], shift[EACH];
#pragma unroll
  for (int j = 0; j < EACH; ++j) {  // read before there is something to wait for
    const int c = channel + j;
    about[j] = inside ? static_cast<float>(x[c]) : 0.0f;
    scale[j] = weight && inside ? static_cast<float>(weight[c]) : 1.0f;
    shift[j] = bias && inside ? static_cast<float>(bias[c]) : 0.0f;
  }
  auto run = [&](auto aligned) {
    auto at = [&](int row) { return (long long)row * channels + channel; };
    Channels<T, EACH> held[BATCH_HELD<T>];
    each_held_row<T>(rows, [&](int a, int row) {
      held[a] = load_channels<EACH>(x + at(row), aligned);
    });
    each_held_row<T>(rows, [&](int a, int) {
#pragma unroll
      for (int j = 0; j < EACH; ++j) m[j] += static_cast<float>(held[a].v[j]) - about[j];
    });
    add_block(m);
#pragma unroll
    for (int j = 0; j < EACH; ++j) m[j] = about[j] + share * m[j];
    each_held_row<T>(rows, [&](int a, int) {
#pragma unroll
      for (int j = 0; j < EACH; ++j) {
        const float d = static_cast<float>(held[a].v[j]) - m[j];
        squares[j] += d * d;
      }
    });
    add_block(squares);
#pragma unroll
    for (int j = 0; j < EACH; ++j) {
      scale[j] *= rsqrtf(share * squares[j] + norm_numbers[NORM_EPS]);
      if (threadIdx.y != 0 || !inside) continue;
      const Running old(running_mean, running_var, norm_numbers, channel + j, true);
      write_statistics(rows, m[j], squares[j], old, channel + j, mean, var, moved_mean,
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

// dx, and g itself, which is the residual's gradient, if dresidual is not null; dweight and
// dbias are the sums of g xhat and of g.
template <typename T, int EACH, typename P, int ACT>
__device__ __forceinline__ void batch_norm_gradient(
    const T* dy, const T* x, const float* mean, const float* var, const P* weight,
    const P* bias, const T* residual, const float* norm_numbers, BatchNormSizes sizes,
    T* dx, P* dweight, P* dbias, T* dresidual) {
  const int channels = sizes.channels, channel = channel_of_thread<EACH>();
  const bool inside = channel < channels;
  const float share = 1.0f / sizes.rows, slope = norm_numbers[NORM_SLOPE];
  const BlockRows rows(0, inside ? sizes.rows : 0);
  ChannelFit<EACH> fit = {};
  if (inside) {
    fit.load(mean, var, weight, bias, norm_numbers[NORM_EPS], 0, channel, channels);
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
      each_block_row<BATCH_BACK_AHEAD>(rows, nullptr, load, [&](const auto& from,
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
    add_block(sums);
#pragma unroll
    for (int j = 0; j < EACH; ++j) {
      if (threadIdx.y != 0 || !inside) continue;
      dbias[channel + j] = static_cast<P>(sums[j]);
      dweight[channel + j] = static_cast<P>(sums[EACH + j]);
    }
    each_gradient([&](const auto& g, const auto& xhat, long long row) {
      float out[EACH];
#pragma unroll
      for (int j = 0; j < EACH; ++j) {
        const float rest = share * sums[j] + xhat[j] * (share * sums[EACH + j]);
        out[j] = fit.scale[j] * (g[j] - rest);
      }
      store_channels<EACH>(dx + at(row), out);
      if (dresidual) store_channels<EACH>(dresidual + at(row), g);
    });
  };
  residual ? by_alignment(run, dy, x, residual) : by_alignment(run, dy, x);
}

}  // namespace lattice
