// Norms by channel: BatchNorm, and GroupNorm and InstanceNorm by batch element, with
// the activation and the sum that follow.
//
//   threadgroup (rows, across x 4 channels): thread (row, 4 channels) --> sums of rows
//   partials (blocks, 3, C): rows, mean, squares --> mean, variance     in one order
//   y = act((x - mean) rstd weight + bias + residual)        one pass over the rows
//
// Statistics are taken about the first row of each block and joined by their means, so
// that a large mean cancels nothing. Backward: sums of g and g xhat, g = dy act'(v) with
// v computed again from x, then dx = rstd (weight g - A - xhat B) in a second pass. Any
// dtype, any channels, float32 inside, no atomics; sums have one order by sizes: the same
// bits on every run. Traffic: x once for the statistics, once (and y, and a residual) to
// normalise; x and dy twice and dx once back; nothing float32 of a row's size. Bound by
// memory, four channels a read. Reads matrix_tiles.metal and
// activations.metal too.

// Floats that kernels are told, in this order.
enum NormNumber { NORM_EPS, NORM_MOMENTUM, NORM_SLOPE };
constant constexpr int NORM_THREADS = 256;  // of a threadgroup, at most

// Where a thread is, its four channels, and the rows of its block: those of a segment's
// piece, or block_rows of all. `start` is the first row of the dispatch.
struct NormThread {
  int first, stop, start, channel, left, across, down, x, y, block;

  METAL_FUNC NormThread(
      const device int* bounds, const thread ChannelNormSizes& sizes, uint3 group,
      uint3 at, uint3 threads) thread {
    across = int(threads.x);
    down = int(threads.y);
    x = int(at.x);
    y = int(at.y);
    block = int(group.x);
    channel = 4 * (int(group.y) * across + x);
    left = sizes.channels - channel;
    const int whole = sizes.first + block;
    start = sizes.first * sizes.block_rows;
    first = bounds ? bounds[whole] : min(sizes.rows, whole * sizes.block_rows);
    stop = bounds ? bounds[whole + 1] : min(sizes.rows, first + sizes.block_rows);
  }
};

// What normalises four channels of a segment: its line of each array.
struct ChannelFit {
  float4 mean, rstd, scale, bias;

  template <typename P>
  METAL_FUNC void load(
      const device float* means, const device float* vars, const device P* weight,
      const device P* shift, float eps, size_t segment, int channel,
      int channels) thread {
    for (int j = 0; j < 4; ++j) {
      const bool inside = channel + j < channels;
      const size_t at = segment * channels + (inside ? channel + j : channel);
      mean[j] = means[at];
      rstd[j] = rsqrt(vars[at] + eps);
      scale[j] = weight ? rstd[j] * float(weight[at]) : rstd[j];
      bias[j] = shift ? float(shift[at]) : 0.0f;
    }
  }
  METAL_FUNC float4 value(float4 from) const thread {
    return (from - mean) * scale + bias;
  }
};

template <typename T>
METAL_FUNC float4 four_channels(const device T* from, int left) {
  Four<T> line;
  fetch(line, from, left);
  return float4(float(line.v[0]), float(line.v[1]), float(line.v[2]), float(line.v[3]));
}

// Adds the threads of a threadgroup that have the same channels, in a fixed order.
// Thread row 0 has the sums then. kept: 8 x NORM_THREADS floats.
METAL_FUNC void add_thread_rows(
    thread float4& a, thread float4& b, threadgroup float* kept,
    const thread NormThread& here) {
  const int thread_at = here.y * here.across + here.x;
  for (int j = 0; j < 4; ++j) {
    kept[j * NORM_THREADS + thread_at] = a[j];
    kept[(4 + j) * NORM_THREADS + thread_at] = b[j];
  }
  for (int half_way = NORM_THREADS / 2; half_way; half_way /= 2) {
    threadgroup_barrier(mem_flags::mem_threadgroup);
    if (here.y >= half_way || here.y + half_way >= here.down) continue;
    for (int j = 0; j < 8; ++j) {
      threadgroup float* sums = kept + j * NORM_THREADS + thread_at;
      sums[0] += sums[half_way * here.across];
    }
  }
  if (here.y != 0) return;
  for (int j = 0; j < 4; ++j) {
    a[j] = kept[j * NORM_THREADS + thread_at];
    b[j] = kept[(4 + j) * NORM_THREADS + thread_at];
  }
}

// One block's line of the partials: rows, and two values a channel.
METAL_FUNC void write_partials(
    device float* partials, int rows, int channels, const thread NormThread& here,
    float4 a, float4 b) {
  if (here.y != 0) return;
  device float* to = partials + size_t(here.block) * 3 * channels + here.channel;
  for (int j = 0; j < 4; ++j) {
    if (j >= here.left) continue;
    to[j] = float(rows);
    to[channels + j] = a[j];
    to[2 * channels + j] = b[j];
  }
}

// Rows, mean and sum of squares about it of each channel, by block. order: the row of
// each place, or null.
template <typename T>
METAL_FUNC void channel_moments(
    const device T* x,
    const device int* order,
    const device int* bounds,
    const thread ChannelNormSizes& sizes,
    device float* partials,
    threadgroup float* memory,
    uint3 group,
    uint3 at,
    uint3 threads) {
  const NormThread here(bounds, sizes, group, at, threads);
  const int channels = sizes.channels, count = here.stop - here.first;
  float4 about = float4(0), sum = float4(0), squares = float4(0);
  if (here.left > 0 && count > 0) {
    const size_t begin = size_t(order ? order[here.first] : here.first);
    about = four_channels(x + begin * channels + here.channel, here.left);
    for (int place = here.first + here.y; place < here.stop; place += here.down) {
      const size_t row = size_t(order ? order[place] : place);
      const float4 d =
          four_channels(x + row * channels + here.channel, here.left) - about;
      sum += d;
      squares += d * d;
    }
  }
  add_thread_rows(sum, squares, memory, here);
  const float share = count ? 1.0f / float(count) : 0.0f;
  const float4 d = share * sum, square = squares - sum * d;
  for (int j = 0; j < 4; ++j) squares[j] = square[j] < 0.0f ? 0.0f : square[j];
  write_partials(partials, count, channels, here, about + d, squares);
}

// A thread's channel and its share of the lines of a segment's partials.
struct LineThread {
  int first, stop, channel, channels, across, down, x, y, segment;

  METAL_FUNC LineThread(
      const device int* starts, const thread CombineSizes& sizes, uint3 group, uint3 at,
      uint3 threads) thread {
    across = int(threads.x);
    down = int(threads.y);
    x = int(at.x);
    y = int(at.y);
    channels = sizes.channels;
    channel = int(group.x) * across + x;
    segment = int(group.y);
    first = starts ? starts[segment] : 0;
    stop = starts ? starts[segment + 1] : sizes.blocks;
  }

  METAL_FUNC const device float* line(const device float* partials, int b) const thread {
    return partials + size_t(b) * 3 * channels + channel;
  }
};

// Adds what the threads of a channel have, in a fixed order; all of them get the sum.
// down is a power of two.
METAL_FUNC float add_down(
    float value, threadgroup float* kept, const thread LineThread& here) {
  threadgroup_barrier(mem_flags::mem_threadgroup);
  kept[here.y * here.across + here.x] = value;
  for (int half_way = here.down / 2; half_way; half_way /= 2) {
    threadgroup_barrier(mem_flags::mem_threadgroup);
    if (here.y < half_way)
      kept[here.y * here.across + here.x] +=
          kept[(here.y + half_way) * here.across + here.x];
  }
  threadgroup_barrier(mem_flags::mem_threadgroup);
  return kept[here.x];
}

// starts: the first line of each segment; of one segment all lines, and null. Without
// running statistics, moved are the mean and the unbiased variance; a single row moves the
// mean alone.
METAL_FUNC void combine_moments(
    const device float* partials,
    const device int* starts,
    const device float* running_mean,
    const device float* running_var,
    const device float* norm_numbers,
    const thread CombineSizes& sizes,
    device float* mean,
    device float* var,
    device float* moved_mean,
    device float* moved_var,
    threadgroup float* memory,
    uint3 group,
    uint3 at,
    uint3 threads) {
  const LineThread here(starts, sizes, group, at, threads);
  const int channels = here.channels;
  const bool inside = here.channel < channels;
  float rows = 0, moved = 0, squares = 0, about = 0;
  if (inside && here.first < here.stop)
    about = here.line(partials, here.first)[channels];
  for (int b = here.first + here.y; b < here.stop && inside; b += here.down) {
    const device float* line = here.line(partials, b);
    rows += line[0];
    moved += line[0] * (line[channels] - about);
  }
  rows = add_down(rows, memory, here);
  moved = add_down(moved, memory, here);
  const float m = about + (rows > 0.0f ? moved / rows : 0.0f);
  for (int b = here.first + here.y; b < here.stop && inside; b += here.down) {
    const device float* line = here.line(partials, b);
    const float d = line[channels] - m;
    squares += line[2 * channels] + line[0] * d * d;
  }
  squares = add_down(squares, memory, here);
  if (here.y != 0 || !inside) return;
  const size_t to = size_t(here.segment) * channels + here.channel;
  const float v = rows > 0.0f ? squares / rows : 0.0f, by = norm_numbers[NORM_MOMENTUM];
  const float unbiased = rows > 1.0f ? squares / (rows - 1.0f) : v;
  mean[to] = m;
  var[to] = v;
  moved_mean[to] = running_mean ? (1.0f - by) * running_mean[to] + by * m : m;
  float next = unbiased;
  if (running_var && rows > 1.0f) next = (1.0f - by) * running_var[to] + by * unbiased;
  if (running_var && !(rows > 1.0f)) next = running_var[to];
  moved_var[to] = next;
}

// y = act(norm(x) + residual). of: the segment of each row; one for all where null.
template <typename T, typename P, int ACT>
METAL_FUNC void normalize_channels(
    const device T* x,
    const device float* mean,
    const device float* var,
    const device P* weight,
    const device P* bias,
    const device T* residual,
    const device int* of,
    const device float* norm_numbers,
    const thread ChannelNormSizes& sizes,
    device T* y,
    uint3 group,
    uint3 at,
    uint3 threads) {
  const NormThread here(nullptr, sizes, group, at, threads);
  const int channels = sizes.channels, channel = here.channel;
  if (here.left <= 0) return;
  const float eps = norm_numbers[NORM_EPS], slope = norm_numbers[NORM_SLOPE];
  ChannelFit fit;
  int segment = -1;
  for (int row = here.first + here.y; row < here.stop; row += here.down) {
    const int next = of ? of[row] : 0;
    if (next != segment) {
      segment = next;
      fit.load(mean, var, weight, bias, eps, size_t(segment), channel, channels);
    }
    const size_t from = size_t(row) * channels + channel;
    float4 v = fit.value(four_channels(x + from, here.left));
    if (residual) v += four_channels(residual + from, here.left);
    for (int j = 0; j < 4; ++j) v[j] = activated<ACT>(v[j], slope);
    write_sums(y + size_t(row - here.start) * channels + channel, v, here.left);
  }
}

// g = dy act'(v) of four channels.
template <int ACT, typename T>
METAL_FUNC float4 pre_activation_gradient(
    const device T* dy, const device T* residual, float4 x, float slope, size_t from,
    int left, const thread ChannelFit& fit) {
  float4 v = fit.value(x), g = four_channels(dy + from, left);
  if (residual) v += four_channels(residual + from, left);
  for (int j = 0; j < 4; ++j) g[j] *= activation_slope<ACT>(v[j], slope);
  return g;
}

// Sums of g and g xhat by block, g = dy act'(v).
template <typename T, typename P, int ACT>
METAL_FUNC void channel_gradient_sums(
    const device T* dy,
    const device T* x,
    const device float* mean,
    const device float* var,
    const device P* weight,
    const device P* bias,
    const device T* residual,
    const device int* of,
    const device int* order,
    const device int* bounds,
    const device float* norm_numbers,
    const thread ChannelNormSizes& sizes,
    device float* partials,
    threadgroup float* memory,
    uint3 group,
    uint3 at,
    uint3 threads) {
  const NormThread here(bounds, sizes, group, at, threads);
  const int channels = sizes.channels, count = here.stop - here.first;
  const float slope = norm_numbers[NORM_SLOPE];
  float4 sum = float4(0), products = float4(0);
  if (here.left > 0 && count > 0) {
    const size_t segment =
        of ? size_t(of[order ? order[here.first] : here.first]) : 0;
    ChannelFit fit;
    fit.load(
        mean, var, weight, bias, norm_numbers[NORM_EPS], segment, here.channel,
        channels);
    for (int place = here.first + here.y; place < here.stop; place += here.down) {
      const size_t row = size_t(order ? order[place] : place);
      const size_t from = row * channels + here.channel;
      const float4 value = four_channels(x + from, here.left);
      const float4 g = pre_activation_gradient<ACT>(
          dy, residual, value, slope, from, here.left, fit);
      sum += g;
      products += g * (value - fit.mean) * fit.rstd;
    }
  }
  add_thread_rows(sum, products, memory, here);
  write_partials(partials, count, channels, here, sum, products);
}

// sums, terms: (2, segments, C). terms are the weight times the means of g and g xhat.
template <typename P>
METAL_FUNC void combine_gradient_sums(
    const device float* partials,
    const device int* starts,
    const device P* weight,
    const thread CombineSizes& sizes,
    device float* sums,
    device float* terms,
    device P* dweight,
    device P* dbias,
    threadgroup float* memory,
    uint3 group,
    uint3 at,
    uint3 threads) {
  const LineThread here(starts, sizes, group, at, threads);
  const int channels = here.channels;
  const bool inside = here.channel < channels;
  float rows = 0, sum = 0, products = 0;
  for (int b = here.first + here.y; b < here.stop && inside; b += here.down) {
    const device float* line = here.line(partials, b);
    rows += line[0];
    sum += line[channels];
    products += line[2 * channels];
  }
  rows = add_down(rows, memory, here);
  sum = add_down(sum, memory, here);
  products = add_down(products, memory, here);
  if (here.y != 0 || !inside) return;
  const size_t to = size_t(here.segment) * channels + here.channel;
  const size_t plane = size_t(sizes.segments) * channels;
  float share = rows > 0.0f ? 1.0f / rows : 0.0f;
  if (weight) share *= float(weight[to]);
  sums[to] = sum;
  sums[plane + to] = products;
  terms[to] = share * sum;
  terms[plane + to] = share * products;
  dbias[to] = P(sum);
  dweight[to] = P(products);
}

// dx = rstd (weight g - terms[0] - xhat terms[1]), without terms rstd weight g; and g
// itself, which is the residual's gradient, if dresidual is not null.
template <typename T, typename P, int ACT>
METAL_FUNC void channel_gradient(
    const device T* dy,
    const device T* x,
    const device float* mean,
    const device float* var,
    const device P* weight,
    const device P* bias,
    const device T* residual,
    const device float* terms,
    const device int* of,
    const device float* norm_numbers,
    const thread ChannelNormSizes& sizes,
    device T* dx,
    device T* dresidual,
    uint3 group,
    uint3 at,
    uint3 threads) {
  const NormThread here(nullptr, sizes, group, at, threads);
  const int channels = sizes.channels, channel = here.channel;
  if (here.left <= 0) return;
  const float eps = norm_numbers[NORM_EPS], slope = norm_numbers[NORM_SLOPE];
  const size_t plane = size_t(sizes.segments) * channels;
  ChannelFit fit;
  float4 shift = float4(0), turn = float4(0);
  int segment = -1;
  for (int row = here.first + here.y; row < here.stop; row += here.down) {
    const int next = of ? of[row] : 0;
    if (next != segment) {
      segment = next;
      fit.load(mean, var, weight, bias, eps, size_t(segment), channel, channels);
      if (terms) {
        const device float* term = terms + size_t(segment) * channels + channel;
        shift = four_channels(term, here.left) * fit.rstd;
        turn = four_channels(term + plane, here.left) * fit.rstd * fit.rstd;
      }
    }
    const size_t from = size_t(row) * channels + channel;
    const size_t to = size_t(row - here.start) * channels + channel;
    const float4 value = four_channels(x + from, here.left);
    const float4 g = pre_activation_gradient<ACT>(
        dy, residual, value, slope, from, here.left, fit);
    const float4 out = fit.scale * g - shift - (value - fit.mean) * turn;
    write_sums(dx + to, out, here.left);
    if (dresidual) write_sums(dresidual + to, g, here.left);
  }
}
