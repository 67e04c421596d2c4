// Heads of queries and keys before attention: root mean square 1, and rotary positions.
//
//   x (rows, parts, heads, D)   parts below TURNED: v = x scale / rms(x), then each pair
//                               (v[2p], v[2p + 1]) turned by cos[n, p], sin[n, p]
//                               others (the values): as they are
//   back                        g = dy turned back, dx = scale g / rms - x (..)
//                               sums of g x / rms by block --> lines
//
// SPAN threads of a simdgroup have a head of a row, four channels a thread; its square is
// summed by shuffles. All parts in one array, so that attention moves them together.
// Float32 inside, rounded once, no atomics, sums in one order. Traffic: x and y once; back
// dy, x and dx once. Bound by memory. Reads matrix_tiles.metal and epilogue.metal too.

constant constexpr float HEAD_EPS = 1e-12f;  // added to the mean square

template <int SPAN>
METAL_FUNC float add_span(float v) {
  for (ushort by = SPAN / 2; by; by /= 2) v += simd_shuffle_xor(v, by);
  return v;
}

// Four channels of one head, and what they are multiplied by. `first`: of the dispatch.
template <int SPAN>
struct HeadShare {
  int line, channel, part, lines, channels, heads, first;  // line: of a row's heads
  bool has;

  METAL_FUNC HeadShare(
      const thread AttentionHeadsSizes& sizes, int line, int across) thread {
    this->line = line;
    channel = 4 * across;
    channels = sizes.channels;
    heads = sizes.heads;
    lines = sizes.parts * heads;
    part = line / heads;
    first = sizes.first;
    has = channel < channels && line < lines;
  }
  METAL_FUNC size_t at(int row) const thread {
    return (size_t(row) * size_t(lines) + size_t(line)) * size_t(channels) +
           size_t(channel);
  }
  // Its channels of a row; zeros where it has none.
  template <typename T>
  METAL_FUNC float4 of(const device T* from, int row, bool there) const thread {
    if (!there) return float4(0);
    Four<T> four;
    fetch(four, from + at(row), 4);
    return float4(
        float(four.v[0]), float(four.v[1]), float(four.v[2]), float(four.v[3]));
  }
  // Its entries of (heads, D): those of queries, or of keys.
  template <typename P>
  METAL_FUNC float4 scale(const device P* of_q, const device P* of_k) const thread {
    const device P* from = part ? of_k : of_q;
    if (!has || !from) return float4(1);
    Four<P> four;
    fetch(four, from + (line % heads * channels + channel), 4);
    return float4(
        float(four.v[0]), float(four.v[1]), float(four.v[2]), float(four.v[3]));
  }
  // Turns its pairs by the row's angles, or back.
  METAL_FUNC float4 turned(
      float4 v, const device float* cos, const device float* sin, int row,
      float direction) const thread {
    const size_t place = (size_t(row) * size_t(channels) + size_t(channel)) / 2;
    for (int p = 0; p < 2; ++p) {
      const float c = cos[place + p], s = direction * sin[place + p];
      const float a = v[2 * p], b = v[2 * p + 1];
      v[2 * p] = a * c - b * s;
      v[2 * p + 1] = a * s + b * c;
    }
    return v;
  }
};

// scales (heads, D) and angles (rows, D / 2) may be null: then nothing is scaled, or
// turned.
template <typename T, int SPAN, int TURNED, typename P>
METAL_FUNC void attention_heads(
    const device T* x, const device Given<P>* q_scale, const device Given<P>* k_scale,
    const device float* cos, const device float* sin,
    const thread AttentionHeadsSizes& sizes, device T* y, uint3 group, uint3 at,
    uint3 threads) {
  const int lines = sizes.parts * sizes.heads;
  const uint head = group.x * threads.y + at.y;  // of the dispatch, which is bounded
  const int row = int(head / uint(lines));
  HeadShare<SPAN> own(sizes, int(head % uint(lines)), int(at.x));
  own.has = own.has && row < sizes.rows;
  const int from = own.first + row;
  float4 v = own.of(x, from, own.has);
  if (q_scale) {  // lanes beyond go along: shuffles want all
    const float root =
        rsqrt(add_span<SPAN>(dot(v, v)) / float(sizes.channels) + HEAD_EPS);
    if (own.part < TURNED) v *= root * own.template scale<P>(q_scale, k_scale);
  }
  if (!own.has) return;
  if (cos && own.part < TURNED) v = own.turned(v, cos, sin, from, 1.0f);
  write_sums(y + own.at(row), v, 4);
}

// Blocks have block_rows rows, and some heads. lines may be null where scales are.
template <typename T, int SPAN, int TURNED, typename P>
METAL_FUNC void attention_heads_gradient(
    const device T* dy, const device T* x, const device Given<P>* q_scale,
    const device Given<P>* k_scale, const device float* cos, const device float* sin,
    const thread AttentionHeadsSizes& sizes, device T* dx, device float* lines,
    uint3 group, uint3 at, uint3 threads) {
  const HeadShare<SPAN> own(sizes, int(group.y * threads.y + at.y), int(at.x));
  const bool is_turned = own.part < TURNED;
  const int begin = int(group.x) * sizes.block_rows;
  const int end = min(sizes.rows, begin + sizes.block_rows);
  const float4 scale = own.template scale<P>(q_scale, k_scale);
  float4 sums = float4(0);
  for (int row = begin; row < end; ++row) {
    const int from = own.first + row;
    float4 g = own.of(dy, from, own.has);
    if (cos && own.has && is_turned) g = own.turned(g, cos, sin, from, -1.0f);
    if (q_scale) {
      const float4 v = own.of(x, from, own.has && is_turned);
      const float root =
          rsqrt(add_span<SPAN>(dot(v, v)) / float(sizes.channels) + HEAD_EPS);
      const float along =
          add_span<SPAN>(dot(g * scale, v)) * root * root / float(sizes.channels);
      if (is_turned) {
        sums += g * v * root;
        g = root * (g * scale - v * along);
      }
    }
    if (own.has) write_sums(dx + own.at(row), g, 4);
  }
  if (!lines || !own.has || !is_turned) return;
  const size_t width = size_t(TURNED * sizes.heads) * size_t(sizes.channels);
  const size_t place = size_t(own.line * sizes.channels + own.channel);
  write_sums(lines + (size_t(group.x) * width + place), sums, 4);
}

template <typename T, int SPAN, int TURNED, typename P>
METAL_FUNC void attention_heads_gradient(
    const device T* dy, const device T* x, const device Given<P>* q_scale,
    const device Given<P>* k_scale, const device float* cos, const device float* sin,
    const thread AttentionHeadsSizes& sizes, device T* dx, uint3 group, uint3 at,
    uint3 threads) {
  device float* none = nullptr;
  attention_heads_gradient<T, SPAN, TURNED, P>(
      dy, x, q_scale, k_scale, cos, sin, sizes, dx, none, group, at, threads);
}
