// Norms of few rows by their statistics, with the activation and the sum that follow: one
// launch forward and one back, where channel_norms.metal takes three each way. BatchNorm,
// and GroupNorm and InstanceNorm, by which each batch element, a segment, is normalised
// alone.
//
//   threadgroup (all rows of a segment, across x 4 channels):
//     x --> mean --> squares about it --> y            rows stay in the caches
//     dy, x --> sums of g and g xhat --> dx            g = dy act'(v)
//
// A threadgroup waits for no other: its threads add up what they have in threadgroup
// memory, in one order: the same bits on every run. Squares are taken about the mean, in a
// pass of their own. Any dtype, any channels, float32 inside. Traffic: x, and back dy and
// x, once from memory and again from the caches; y or dx once. It wins while a threadgroup
// reads its rows faster than two launches that wait for each other start. Reads
// channel_norms.metal too.

// The rows of a threadgroup's segment, of all where starts is null, for the channels of a
// thread. `block` is the segment.
METAL_FUNC NormThread segment_rows(
    const device int* starts, const thread BatchNormSizes& sizes, uint3 group, uint3 at,
    uint3 threads) {
  const ChannelNormSizes whole = {0, sizes.rows, sizes.channels, sizes.rows, 1, 0};
  return NormThread(starts, whole, group, at, threads);
}

// Where a thread's channels of the row at a place of its segment begin.
METAL_FUNC size_t placed(
    const device int* order, int place, const thread NormThread& here, int channels) {
  return size_t(order ? order[place] : place) * channels + here.channel;
}

// Gives the WIDTH channels of a group, a power of two, the mean of what they have. Groups
// lie within a threadgroup, and all threads of a simdgroup call it.
template <int WIDTH>
METAL_FUNC float4 group_averages(float4 values) {
  if (WIDTH == 1) return values;
  if (WIDTH == 2) {
    const float first = 0.5f * (values[0] + values[1]);
    const float second = 0.5f * (values[2] + values[3]);
    return float4(first, first, second, second);
  }
  float sum = (values[0] + values[1]) + (values[2] + values[3]);
  for (ushort by = 1; by < WIDTH / 4; by *= 2) sum += simd_shuffle_xor(sum, by);
  return float4(sum * (1.0f / float(WIDTH)));
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

// order, starts: the rows of segments, or null of one of all rows. WIDTH: channels that
// share statistics. sizes.step: the channels of a line of weight and bias where each
// segment has one.
template <typename T, typename P, int ACT, int WIDTH>
METAL_FUNC void batch_norm(
    const device T* x,
    const device P* weight,
    const device P* bias,
    const device T* residual,
    const device float* running_mean,
    const device float* running_var,
    const device int* order,
    const device int* starts,
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
  const NormThread here = segment_rows(starts, sizes, group, at, threads);
  const int channels = sizes.channels, channel = here.channel, left = here.left;
  const int rows = here.stop - here.first;
  const bool inside = left > 0;
  const float share = rows ? 1.0f / float(rows) : 0.0f;
  const float slope = norm_numbers[NORM_SLOPE];
  float4 about = float4(0), m = float4(0), squares = float4(0), none = float4(0);
  if (inside && rows) about = four_channels(x + placed(order, here.first, here, channels), left);
  for (int row = here.first + here.y; row < here.stop && inside; row += here.down)
    m += four_channels(x + placed(order, row, here, channels), left) - about;
  add_threadgroup(m, none, memory, here);
  m = group_averages<WIDTH>(about + share * m);
  for (int row = here.first + here.y; row < here.stop && inside; row += here.down) {
    const float4 d = four_channels(x + placed(order, row, here, channels), left) - m;
    squares += d * d;
  }
  add_threadgroup(squares, none, memory, here);
  squares = group_averages<WIDTH>(squares);
  if (!inside) return;
  const size_t line = size_t(here.block) * channels, own = size_t(here.block) * sizes.step;
  ChannelFit fit;
  for (int j = 0; j < 4; ++j) {
    const int c = j < left ? channel + j : channel;
    fit.set(
        j, m[j], share * squares[j], weight, bias, norm_numbers[NORM_EPS], own + c);
    if (here.y == 0 && j < left)
      write_statistics(
          float(rows), m[j], squares[j], running_mean, running_var,
          norm_numbers[NORM_MOMENTUM], line + c, mean, var, moved_mean, moved_var);
  }
  for (int row = here.first + here.y; row < here.stop; row += here.down) {
    const size_t place = placed(order, row, here, channels);
    float4 v = fit.value(four_channels(x + place, left));
    if (residual) v += four_channels(residual + place, left);
    for (int j = 0; j < 4; ++j) v[j] = activated<ACT>(v[j], slope);
    write_sums(y + place, v, left);
  }
}

// The same of segments, which move no running statistics.
template <typename T, typename P, int ACT, int WIDTH>
METAL_FUNC void batch_norm(
    const device T* x,
    const device P* weight,
    const device P* bias,
    const device T* residual,
    const device float* running_mean,
    const device float* running_var,
    const device int* order,
    const device int* starts,
    const device float* norm_numbers,
    const thread BatchNormSizes& sizes,
    device T* y,
    device float* mean,
    device float* var,
    threadgroup float* memory,
    uint3 group,
    uint3 at,
    uint3 threads) {
  device float* none = nullptr;
  batch_norm<T, P, ACT, WIDTH>(
      x, weight, bias, residual, running_mean, running_var, order, starts, norm_numbers,
      sizes, y, mean, var, none, none, memory, group, at, threads);
}

// dx, and g itself, which is the residual's gradient, where there is a place for it;
// dweight and dbias are the sums of g xhat and of g, a line of each segment.
template <typename T, typename P, int ACT, int WIDTH, typename G>
METAL_FUNC void batch_norm_gradient(
    const device T* dy,
    const device T* x,
    const device float* mean,
    const device float* var,
    const device P* weight,
    const device P* bias,
    const device T* residual,
    const device int* order,
    const device int* starts,
    const device float* norm_numbers,
    const thread BatchNormSizes& sizes,
    device T* dx,
    device G* dweight,
    device G* dbias,
    device T* dresidual,
    threadgroup float* memory,
    uint3 group,
    uint3 at,
    uint3 threads) {
  const NormThread here = segment_rows(starts, sizes, group, at, threads);
  const int channels = sizes.channels, channel = here.channel, left = here.left;
  const int rows = here.stop - here.first;
  const bool inside = left > 0;
  const float share = rows ? 1.0f / float(rows) : 0.0f;
  const float slope = norm_numbers[NORM_SLOPE];
  ChannelFit fit;
  fit.scale = float4(0);
  if (inside)
    fit.load(
        mean, var, weight, bias, norm_numbers[NORM_EPS], size_t(here.block), channel,
        channels, sizes.step);
  float4 sum = float4(0), products = float4(0);
  for (int row = here.first + here.y; row < here.stop && inside; row += here.down) {
    const size_t from = placed(order, row, here, channels);
    const float4 value = four_channels(x + from, left);
    const float4 g =
        pre_activation_gradient<ACT>(dy, residual, value, slope, from, left, fit);
    sum += g;
    products += g * (value - fit.mean) * fit.rstd;
  }
  add_threadgroup(sum, products, memory, here);
  const size_t line = size_t(here.block) * channels + channel;
  for (int j = 0; j < 4; ++j) {
    if (here.y != 0 || j >= left) continue;
    dbias[line + j] = G(sum[j]);
    dweight[line + j] = G(products[j]);
  }
  // Of a group they are those of all its channels, by their weights.
  const float4 by = WIDTH > 1 ? share * fit.scale : float4(share);
  const float4 shift = group_averages<WIDTH>(by * sum);
  const float4 turn = group_averages<WIDTH>(by * products);
  for (int row = here.first + here.y; row < here.stop && inside; row += here.down) {
    const size_t from = placed(order, row, here, channels);
    const float4 value = four_channels(x + from, left);
    const float4 g =
        pre_activation_gradient<ACT>(dy, residual, value, slope, from, left, fit);
    const float4 xhat = (value - fit.mean) * fit.rstd;
    const float4 rest = shift + xhat * turn;
    const float4 out = WIDTH > 1 ? fit.scale * g - rest : fit.scale * (g - rest);
    write_sums(dx + from, out, left);
    if (dresidual) write_sums(dresidual + from, g, left);
  }
}

template <typename T, typename P, int ACT, int WIDTH, typename G>
METAL_FUNC void batch_norm_gradient(
    const device T* dy,
    const device T* x,
    const device float* mean,
    const device float* var,
    const device P* weight,
    const device P* bias,
    const device T* residual,
    const device int* order,
    const device int* starts,
    const device float* norm_numbers,
    const thread BatchNormSizes& sizes,
    device T* dx,
    device G* dweight,
    device G* dbias,
    threadgroup float* memory,
    uint3 group,
    uint3 at,
    uint3 threads) {
  device T* none = nullptr;
  batch_norm_gradient<T, P, ACT, WIDTH>(
      dy, x, mean, var, weight, bias, residual, order, starts, norm_numbers, sizes, dx,
      dweight, dbias, none, memory, group, at, threads);
}

// The same of segments. sums: (2, segments, C) of g and of g xhat.
template <typename T, typename P, int ACT, int WIDTH>
METAL_FUNC void segment_norm_gradient(
    const device T* dy,
    const device T* x,
    const device float* mean,
    const device float* var,
    const device P* weight,
    const device P* bias,
    const device T* residual,
    const device int* order,
    const device int* starts,
    const device float* norm_numbers,
    const thread BatchNormSizes& sizes,
    device T* dx,
    device float* sums,
    device T* dresidual,
    threadgroup float* memory,
    uint3 group,
    uint3 at,
    uint3 threads) {
  device float* products = sums + size_t(sizes.segments) * sizes.channels;
  batch_norm_gradient<T, P, ACT, WIDTH>(
      dy, x, mean, var, weight, bias, residual, order, starts, norm_numbers, sizes, dx,
      products, sums, dresidual, memory, group, at, threads);
}

template <typename T, typename P, int ACT, int WIDTH>
METAL_FUNC void segment_norm_gradient(
    const device T* dy,
    const device T* x,
    const device float* mean,
    const device float* var,
    const device P* weight,
    const device P* bias,
    const device T* residual,
    const device int* order,
    const device int* starts,
    const device float* norm_numbers,
    const thread BatchNormSizes& sizes,
    device T* dx,
    device float* sums,
    threadgroup float* memory,
    uint3 group,
    uint3 at,
    uint3 threads) {
  device T* none = nullptr;
  segment_norm_gradient<T, P, ACT, WIDTH>(
      dy, x, mean, var, weight, bias, residual, order, starts, norm_numbers, sizes, dx,
      sums, none, memory, group, at, threads);
}
