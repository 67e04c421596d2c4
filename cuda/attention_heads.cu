// Heads of queries and keys before attention: root mean square 1, and rotary positions.
//
//   x (rows, parts, heads, D)   parts below TURNED: v = x scale / rms(x), then each pair
//                               (v[2p], v[2p + 1]) turned by cos[n, p], sin[n, p]
//                               others (the values): as they are
//   back                        g = dy turned back, dx = scale g / rms - x (..)
//                               sums of g x / rms by block --> lines (blocks, TURNED, heads, D)
//
// LANES threads have a head of a row, EACH channels a thread; its square is summed by
// shuffles. All parts in one array, so that attention moves them together. Float32 inside,
// rounded once, no atomics, sums in one order. Traffic: x and y once; back dy, x and dx once.
// Bound by memory, 16 bytes a read. Needs norm_blocks.cuh.

namespace lattice {

constexpr float HEAD_EPS = 1e-12f;  // added to the mean square

// The channels that a thread has of one head.
template <int EACH, int LANES>
struct HeadShare {
  AttentionHeadsSizes sizes;
  int line, channel;  // of the parts and heads of a row
  bool has;

  __device__ __forceinline__ HeadShare(AttentionHeadsSizes sizes, int line)
      : sizes(sizes), line(line), channel(threadIdx.x * EACH) {
    has = channel < sizes.channels && line < lines();
  }
  __device__ __forceinline__ int lines() const { return sizes.parts * sizes.heads; }
  __device__ __forceinline__ int part() const { return line / sizes.heads; }
  __device__ __forceinline__ long long at(long long row) const {
    return (row * lines() + line) * sizes.channels + channel;
  }
  // Its entries of (heads, D): those of queries, or of keys.
  template <typename P>
  __device__ __forceinline__ void load(float (&to)[EACH], const P* of_q, const P* of_k) const {
    const P* from = part() ? of_k : of_q;
#pragma unroll
    for (int j = 0; j < EACH; ++j) {
      const int place = line % sizes.heads * sizes.channels + channel + j;
      to[j] = has && from ? static_cast<float>(from[place]) : 1.0f;
    }
  }
  // Turns its pairs by the row's angles, or back.
  __device__ __forceinline__ void turn(float (&v)[EACH], const float* cos, const float* sin,
                                       long long row, float direction) const {
    const long long first = (row * sizes.channels + channel) / 2;
#pragma unroll
    for (int p = 0; p < EACH / 2; ++p) {
      const float c = cos[first + p], s = direction * sin[first + p];
      const float a = v[2 * p], b = v[2 * p + 1];
      v[2 * p] = a * c - b * s;
      v[2 * p + 1] = a * s + b * c;
    }
  }
};

// One over the root mean square of a head, of which this thread has v.
template <int EACH, int LANES>
__device__ __forceinline__ float inverse_root(const float (&v)[EACH], int channels) {
  float squares = 0.0f;
#pragma unroll
  for (int j = 0; j < EACH; ++j) squares += v[j] * v[j];
  return rsqrtf(add_lanes<LANES>(squares) / channels + HEAD_EPS);
}

// scales (heads, D) and angles (rows, D / 2) may be null: then nothing is scaled, or turned.
template <typename T, int EACH, int LANES, int TURNED, typename P>
__device__ __forceinline__ void attention_heads(const T* x, const P* q_scale,
                                                const P* k_scale, const float* cos,
                                                const float* sin, AttentionHeadsSizes sizes,
                                                T* y) {
  const long long lines = sizes.parts * sizes.heads, all = sizes.rows * lines;
  const long long head = (long long)blockIdx.x * blockDim.y + threadIdx.y;
  const long long row = head / lines;
  HeadShare<EACH, LANES> own(sizes, head % lines);
  own.has = own.has && head < all;
  float v[EACH] = {};
  auto run = [&](auto aligned) {
    if (!own.has) return;
    const auto from = load_channels<EACH>(x + own.at(row), aligned);
#pragma unroll
    for (int j = 0; j < EACH; ++j) v[j] = static_cast<float>(from.v[j]);
  };
  by_alignment(run, x);
  if (q_scale) {  // lanes beyond go along: shuffles want whole warps
    const float root = inverse_root<EACH, LANES>(v, sizes.channels);
    if (own.part() < TURNED) {
      float scale[EACH];
      own.load(scale, q_scale, k_scale);
#pragma unroll
      for (int j = 0; j < EACH; ++j) v[j] *= root * scale[j];
    }
  }
  if (!own.has) return;
  if (cos && own.part() < TURNED) own.turn(v, cos, sin, row, 1.0f);
  store_channels<EACH>(y + own.at(row), v);
}

// Blocks have a share of the rows, and some heads. lines may be null where scales are.
template <typename T, int EACH, int LANES, int TURNED, typename P>
__device__ __forceinline__ void attention_heads_gradient(
    const T* dy, const T* x, const P* q_scale, const P* k_scale, const float* cos,
    const float* sin, AttentionHeadsSizes sizes, T* dx, float* lines) {
  const HeadShare<EACH, LANES> own(sizes, blockIdx.y * blockDim.y + threadIdx.y);
  const BlockRows rows(nullptr, sizes.rows);
  const bool is_turned = own.part() < TURNED;
  float scale[EACH], sums[EACH] = {};
  own.load(scale, q_scale, k_scale);
  auto run = [&](auto aligned) {
    for (int row = rows.first; row < rows.stop; ++row) {
      float g[EACH] = {}, v[EACH] = {};
      if (own.has) {
        const auto from = load_channels<EACH>(dy + own.at(row), aligned);
#pragma unroll
        for (int j = 0; j < EACH; ++j) g[j] = static_cast<float>(from.v[j]);
        if (cos && is_turned) own.turn(g, cos, sin, row, -1.0f);
      }
      if (q_scale) {
        if (own.has && is_turned) {
          const auto from = load_channels<EACH>(x + own.at(row), aligned);
#pragma unroll
          for (int j = 0; j < EACH; ++j) v[j] = static_cast<float>(from.v[j]);
        }
        const float root = inverse_root<EACH, LANES>(v, sizes.channels);
        float dot = 0.0f;
#pragma unroll
        for (int j = 0; j < EACH; ++j) dot += g[j] * scale[j] * v[j];
        dot = add_lanes<LANES>(dot) * root * root / sizes.channels;
        if (is_turned) {
#pragma unroll
          for (int j = 0; j < EACH; ++j) {
            sums[j] += g[j] * v[j] * root;
            g[j] = root * (g[j] * scale[j] - v[j] * dot);
          }
        }
      }
      if (own.has) store_channels<EACH>(dx + own.at(row), g);
    }
  };
  by_alignment(run, dy, x);
  if (!lines || !own.has || !is_turned) return;
  const long long width = (long long)TURNED * sizes.heads * sizes.channels;
  store_channels<EACH>(lines + blockIdx.x * width + own.line * sizes.channels + own.channel, sums);
}

template <typename T, int EACH, int LANES, int TURNED, typename P>
__device__ __forceinline__ void attention_heads_gradient(
    const T* dy, const T* x, const P* q_scale, const P* k_scale, const float* cos,
    const float* sin, AttentionHeadsSizes sizes, T* dx) {
  float* none = nullptr;
  attention_heads_gradient<T, EACH, LANES, TURNED>(dy, x, q_scale, k_scale, cos, sin, sizes, dx,
                                                   none);
}

}  // namespace lattice
