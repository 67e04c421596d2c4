// BatchNorm of few rows, with the activation and the sum that follow: one launch forward
// and one back, where channel_norms.metal takes three each way.
//
//   threadgroup (all rows, across x 4 channels):
//     x --> mean --> squares about it --> y            rows stay in the caches
//     dy, x --> sums of g and g xhat --> dx            g = dy act'(v)
//
// A threadgroup waits for no other: its threads add up what they have in threadgroup
// memory, in one order: the same bits on every run. Squares are taken about the mean, in a
// pass of their own. Any dtype, any channels, float32 inside. Traffic: x, and back dy and
// x, once from memory and again from the caches; y or dx once. It wins while a threadgroup
// reads its rows faster than two launches that wait for each other start. Reads
// channel_norms.metal too.

// All rows, for the channels of a thread.
METAL_FUNC NormThread all_rows(
    const thread BatchNormSizes& sizes, uint3 group, uint3 at, uint3 threads) {
  const ChannelNormSizes whole = {0, sizes.rows, sizes.channels, sizes.rows, 1};
  return NormThread(nullptr, whole, group, at, threads);
}

// As add_thread_rows, but all threads get the sums.
METAL_FUNC void add_threadgroup(
    thread float4& a, thread float4& b, threadgroup float* kept,
    const thread NormThread& here) {
  threadgroup_barrier(mem_flags::mem_threadgroup);
  add_thread_rows(a, b, kept, here);
  threadgroup_barrier(mem_flags::mem_threadgroup);
  for (int j = 0; j < 4; ++j) {
    a[j] = kept[j * NORM_THREADS + here.x];
    b[j] = kept[(4 + j) * NORM_THREADS + here.x];
  }
}

template <typename T, typename P, int ACT>
METAL_FUNC void batch_norm(
    const device T* x,
    const device P* weight,
    const device P* bias,
    const device T* residual,
    const device float* running_mean,
    const device float* running_var,
    const device float* norm_numbers,
    const thread BatchNormSizes& sizes,
    device T* y,
    device float* mean,
    device float* var,
    device float* moved_mean,
    device float* moved_var,
    threadgroup float* memory,
    uint3 group,
    uint3 at,
    uint3 threads) {
  const NormThread here = all_rows(sizes, group, at, threads);
  const int channels = sizes.channels, channel = here.channel, left = here.left;
  const bool inside = left > 0;
  const float share = 1.0f / float(sizes.rows), slope = norm_numbers[NORM_SLOPE];
  float4 about = float4(0), m = float4(0), squares = float4(0), none = float4(0);
  if (inside) about = four_channels(x + channel, left);
  for (int row = here.y; row < here.stop && inside; row += here.down)
    m += four_channels(x + size_t(row) * channels + channel, left) - about;
  add_threadgroup(m, none, memory, here);
  m = about + share * m;
  for (int row = here.y; row < here.stop && inside; row += here.down) {
    const float4 d = four_channels(x + size_t(row) * channels + channel, left) - m;
    squares += d * d;
  }
  add_threadgroup(squares, none, memory, here);
  if (!inside) return;
  ChannelFit fit;
  for (int j = 0; j < 4; ++j) {
    const int c = j < left ? channel + j : channel;
    fit.set(j, m[j], share * squares[j], weight, bias, norm_numbers[NORM_EPS], c);
    if (here.y == 0 && j < left)
      write_statistics(
          float(sizes.rows), m[j], squares[j], running_mean, running_var,
          norm_numbers[NORM_MOMENTUM], size_t(c), mean, var, moved_mean, moved_var);
  }
  for (int row = here.y; row < here.stop; row += here.down) {
    const size_t from = size_t(row) * channels + channel;
    float4 v = fit.value(four_channels(x + from, left));
    if (residual) v += four_channels(residual + from, left);
    for (int j = 0; j < 4; ++j) v[j] = activated<ACT>(v[j], slope);
    write_sums(y + from, v, left);
  }
}

// dx, and g itself, which is the residual's gradient, where there is a place for it;
// dweight and dbias are the sums of g xhat and of g.
template <typename T, typename P, int ACT>
METAL_FUNC void batch_norm_gradient(
    const device T* dy,
    const device T* x,
    const device float* mean,
    const device float* var,
    const device P* weight,
    const device P* bias,
    const device T* residual,
    const device float* norm_numbers,
    const thread BatchNormSizes& sizes,
    device T* dx,
    device P* dweight,
    device P* dbias,
    device T* dresidual,
    threadgroup float* memory,
    uint3 group,
    uint3 at,
    uint3 threads) {
  const NormThread here = all_rows(sizes, group, at, threads);
  const int channels = sizes.channels, channel = here.channel, left = here.left;
  const bool inside = left > 0;
  const float share = 1.0f / float(sizes.rows), slope = norm_numbers[NORM_SLOPE];
  ChannelFit fit;
  if (inside)
    fit.load(mean, var, weight, bias, norm_numbers[NORM_EPS], 0, channel, channels, 0);
  float4 sum = float4(0), products = float4(0);
  for (int row = here.y; row < here.stop && inside; row += here.down) {
    const size_t from = size_t(row) * channels + channel;
    const float4 value = four_channels(x + from, left);
    const float4 g =
        pre_activation_gradient<ACT>(dy, residual, value, slope, from, left, fit);
    sum += g;
    products += g * (value - fit.mean) * fit.rstd;
  }
  add_threadgroup(sum, products, memory, here);
  if (!inside) return;
  for (int j = 0; j < 4; ++j) {
    if (here.y != 0 || j >= left) continue;
    dbias[channel + j] = P(sum[j]);
    dweight[channel + j] = P(products[j]);
  }
  for (int row = here.y; row < here.stop; row += here.down) {
    const size_t from = size_t(row) * channels + channel;
    const float4 value = four_channels(x + from, left);
    const float4 g =
        pre_activation_gradient<ACT>(dy, residual, value, slope, from, left, fit);
    const float4 xhat = (value - fit.mean) * fit.rstd;
    const float4 out = fit.scale * (g - share * (sum + xhat * products));
    write_sums(dx + from, out, left);
    if (dresidual) write_sums(dresidual + from, g, left);
  }
}

template <typename T, typename P, int ACT>
METAL_FUNC void batch_norm_gradient(
    const device T* dy,
    const device T* x,
    const device float* mean,
    const device float* var,
    const device P* weight,
    const device P* bias,
    const device T* residual,
    const device float* norm_numbers,
    const thread BatchNormSizes& sizes,
    device T* dx,
    device P* dweight,
    device P* dbias,
    threadgroup float* memory,
    uint3 group,
    uint3 at,
    uint3 threads) {
  device T* none = nullptr;
  batch_norm_gradient<T, P, ACT>(
      dy, x, mean, var, weight, bias, residual, norm_numbers, sizes, dx, dweight, dbias,
      none, memory, group, at, threads);
}
