// y[o] = sum over the edges (i, o, k) of x[i] @ W[k], W packed as int4 or int8.
//
//   thread (block b, row o):  edges of o, for each share of channels, with one scale:
//     word of 8 (4) levels --> scale * level + bias --> x[i, share] . 4 channels of b
//                              four float32 sums --> y[o, 4 b .. 4 b + 3]
//
// W is (K, C_out, channels) along its inputs, whose last word may be padded: features
// are read up to the last real channel only. Any relation, dtype, channels and groups;
// rows are added in order of k, so the bits are the same on every run. Traffic per
// output channel: edges x C_in / 2 (int4) or C_in (int8) bytes of weights, and a
// quarter of C_in features an edge, from cache. It is the floor of packed weights: it
// wins below about a thousand rows, with groups, and where edges share a row and
// offset. Reads relation_traversal.metal too.

// Adds `count` channels of a word of each of four output channels.
template <typename T, int BITS>
METAL_FUNC void add_word(
    thread float4& sum,
    const device T* x,
    uint4 word,
    float4 scale,
    float4 bias,
    int count) {
  constexpr uint mask = (1u << BITS) - 1u;
  for (int c = 0; c < count; ++c) {
    const float4 level = float4(word & uint4(mask));
    sum += float(x[c]) * (scale * level + bias);
    word = word >> uint4(uint(BITS));
  }
}

// Where a packed weight stands, and one edge's part of four channels.
template <typename T, int BITS, int GROUP>
struct PackedWeight {
  static constant constexpr int EACH = 32 / BITS;
  const device uint* words;
  const device T* scales;
  const device T* biases;
  int c_x, shares, length;  // channels, scales and words of an output channel

  METAL_FUNC PackedWeight(
      const device uint* words, const device T* scales, const device T* biases,
      int c_x) thread
      : words(words), scales(scales), biases(biases), c_x(c_x) {
    shares = (c_x + GROUP - 1) / GROUP;
    length = shares * (GROUP / EACH);
  }

  // One scale of each of four channels; beyond `last` they repeat it: never stored.
  METAL_FUNC float4 four(const device T* from, int last) const thread {
    return float4(
        float(from[0]), float(from[min(1, last) * shares]),
        float(from[min(2, last) * shares]), float(from[min(3, last) * shares]));
  }

  // Adds x[0 .. c_x) @ W[k] to the channels from `line` = k C_out + channel on.
  METAL_FUNC void add_edge(
      thread float4& sum, const device T* x, size_t line, int last) const thread {
    const device uint* word = words + line * length;
    const int at1 = min(1, last) * length, at2 = min(2, last) * length,
              at3 = min(3, last) * length;
    for (int share = 0; share < shares; ++share) {
      const float4 scale = four(scales + line * shares + share, last);
      const float4 bias = four(biases + line * shares + share, last);
      const int stop = min(c_x, (share + 1) * GROUP);
      for (int c = share * GROUP; c < stop; c += EACH, ++word) {
        const uint4 levels = uint4(word[0], word[at1], word[at2], word[at3]);
        if (stop - c >= EACH)
          add_word<T, BITS>(sum, x + c, levels, scale, bias, EACH);
        else
          add_word<T, BITS>(sum, x + c, levels, scale, bias, stop - c);
      }
    }
  }
};

template <typename T, int BITS, int GROUP>
METAL_FUNC void quantized_traversal(
    const device T* x,
    const device uint* words,
    const device T* scales,
    const device T* biases,
    const device int* table,
    const device T* bias,
    const thread PerRowSizes& sizes,
    device T* y,
    uint2 at) {
  const int volume = sizes.volume, groups = sizes.groups;
  const int c_x = sizes.c_x, c_y = sizes.c_y;
  const PackedWeight<T, BITS, GROUP> w(words, scales, biases, c_x);
  const ChannelBlock block(int(at.x), c_y);
  const device int* neighbours = table + (size_t(sizes.first) + at.y) * volume;
  const size_t line = size_t(block.group) * c_y + block.channel;
  float4 sum = float4(0);
  for (int k = 0; k < volume; ++k) {
    const int i = neighbours[k];
    if (i < 0) continue;
    w.add_edge(
        sum, x + (size_t(i) * groups + block.group) * c_x,
        size_t(k) * groups * c_y + line, block.last);
  }
  store_channels(y + size_t(at.y) * groups * c_y, sum, bias, int(line), block.last);
}

// The same over edges (i, o, k) by output row: starts (N_out + 1).
template <typename T, int BITS, int GROUP>
METAL_FUNC void quantized_traversal_csr(
    const device T* x,
    const device uint* words,
    const device T* scales,
    const device T* biases,
    const device int* starts,
    const device int* edges,
    const device T* bias,
    const thread PerRowSizes& sizes,
    device T* y,
    uint2 at) {
  const int groups = sizes.groups, c_x = sizes.c_x, c_y = sizes.c_y;
  const PackedWeight<T, BITS, GROUP> w(words, scales, biases, c_x);
  const ChannelBlock block(int(at.x), c_y);
  const size_t o = size_t(sizes.first) + at.y;
  const size_t line = size_t(block.group) * c_y + block.channel;
  float4 sum = float4(0);
  for (size_t e = size_t(starts[o]); e < size_t(starts[o + 1]); ++e) {
    const size_t i = size_t(edges[3 * e]), k = size_t(edges[3 * e + 2]);
    w.add_edge(
        sum, x + (i * groups + block.group) * c_x, k * groups * c_y + line, block.last);
  }
  store_channels(y + size_t(at.y) * groups * c_y, sum, bias, int(line), block.last);
}
