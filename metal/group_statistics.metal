// What norms over groups of channels take from sums by channel: GroupNorm and
// InstanceNorm, whose statistics are those of a segment's rows.
//
//   partials of channel_moments --> mean, variance of a group      its lines x channels
//   sums (2, S, C) of g, g xhat --> terms of a group, gradients of weight and bias
//
// One threadgroup a group and segment; a group's channels all get its values. Joined in
// one order by sizes: the same bits on every run. Reads channel_norms.metal too.

constant constexpr int GROUP_THREADS = 256;

// Adds what the threads of a threadgroup have, in a fixed order; all get the sum.
METAL_FUNC float add_threads(float value, threadgroup float* kept, int thread_at) {
  threadgroup_barrier(mem_flags::mem_threadgroup);
  kept[thread_at] = value;
  for (int half_way = GROUP_THREADS / 2; half_way; half_way /= 2) {
    threadgroup_barrier(mem_flags::mem_threadgroup);
    if (thread_at < half_way) kept[thread_at] += kept[thread_at + half_way];
  }
  threadgroup_barrier(mem_flags::mem_threadgroup);
  return kept[0];
}

METAL_FUNC void combine_group_moments(
    const device float* partials,
    const device int* starts,
    const thread GroupMomentSizes& sizes,
    device float* mean,
    device float* var,
    threadgroup float* memory,
    uint3 group,
    uint3 at,
    uint3) {
  const int channels = sizes.channels, width = sizes.width, thread_at = int(at.x);
  const int segment = int(group.y), channel = int(group.x) * width;
  const int start = starts[segment];
  const int values = (starts[segment + 1] - start) * width;
  const device float* lines = partials + size_t(start) * 3 * channels + channel;
  const float about = values ? lines[channels] : 0.0f;
  float rows = 0, moved = 0, squares = 0;
  for (int i = thread_at; i < values; i += GROUP_THREADS) {
    const device float* line = lines + size_t(i / width) * 3 * channels + i % width;
    rows += line[0];
    moved += line[0] * (line[channels] - about);
  }
  rows = add_threads(rows, memory, thread_at);
  moved = add_threads(moved, memory, thread_at);
  const float m = about + (rows > 0.0f ? moved / rows : 0.0f);
  for (int i = thread_at; i < values; i += GROUP_THREADS) {
    const device float* line = lines + size_t(i / width) * 3 * channels + i % width;
    const float d = line[channels] - m;
    squares += line[2 * channels] + line[0] * d * d;
  }
  squares = add_threads(squares, memory, thread_at);
  for (int c = thread_at; c < width; c += GROUP_THREADS) {
    const size_t to = size_t(segment) * channels + channel + c;
    mean[to] = m;
    var[to] = rows > 0.0f ? squares / rows : 0.0f;
  }
}

// terms: means over a group of g and g xhat times the weight. counts: rows of a segment.
// dweight, dbias: of each segment by itself where it has a line of its own (step).
template <typename P>
METAL_FUNC void combine_group_terms(
    const device float* sums,
    const device P* weight,
    const device float* counts,
    const thread GroupTermSizes& sizes,
    device float* terms,
    device P* dweight,
    device P* dbias,
    threadgroup float* memory,
    uint3 group,
    uint3 at,
    uint3) {
  const int channels = sizes.channels, width = sizes.width, thread_at = int(at.x);
  const int segment = int(group.y), channel = int(group.x) * width;
  const size_t plane = size_t(sizes.segments) * channels;
  const size_t line = size_t(segment) * channels + channel;
  const size_t own = size_t(segment) * sizes.step + channel;
  float sum = 0, products = 0;
  for (int c = thread_at; c < width; c += GROUP_THREADS) {
    const float w = weight ? float(weight[own + c]) : 1.0f;
    sum += w * sums[line + c];
    products += w * sums[plane + line + c];
  }
  const float share = 1.0f / (counts[segment] * float(width));
  const float term = share * add_threads(sum, memory, thread_at);
  const float turn = share * add_threads(products, memory, thread_at);
  const bool is_shared = sizes.step == 0;
  for (int c = thread_at; c < width; c += GROUP_THREADS) {
    terms[line + c] = term;
    terms[plane + line + c] = turn;
    if (is_shared && segment > 0) continue;
    const device float* from = sums + line + c;
    float of_bias = from[0], of_weight = from[plane];
    for (int s = 1; is_shared && s < sizes.segments; ++s) {
      of_bias += from[size_t(s) * channels];
      of_weight += from[plane + size_t(s) * channels];
    }
    dbias[own + c] = P(of_bias);
    dweight[own + c] = P(of_weight);
  }
}
