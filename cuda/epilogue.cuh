// What follows the sums of a contraction, in float32, before they are rounded:
//
//   Bias      y = sum + bias
//   Epilogue  y = act((sum - mean) / sqrt(var + eps) * scale + shift + residual)
//   Moments   as Bias; statistics of the rows of y are written, too
//
// Any array may be null. A norm is read as it is stored, so that nothing is computed, or
// kept, of it before. Tiles have, of each of their channels, a and b in shared memory: y =
// act(a * sum + b + residual); kernels over rows and what adds splits compute the two
// where they write. Traffic: the residual once; the rest from the caches. Reads
// alignment.cuh, channels.cuh and activations.cuh too.

namespace lattice {

// A bias, or null, and nothing else.
template <typename T>
struct Bias {
  static constexpr bool FINISHES = false;
  const T* bias;

  // Finishes EACH sums of a row of `channels` channels, from `channel` on.
  template <int EACH>
  __device__ __forceinline__ void finish(float (&sum)[EACH], long long, int channel,
                                         int) const {
    if (bias == nullptr) return;
#pragma unroll
    for (int j = 0; j < EACH; ++j) sum[j] += static_cast<float>(bias[channel + j]);
  }
};

// The same, and where statistics are written to: lines of 3 x C.
template <typename T>
struct Moments : Bias<T> {
  float* lines;
};

// ACTIVATION: the code of one; EPS: the bits of what is added to the variance.
template <typename T, int ACTIVATION, typename P, int EPS>
struct Epilogue {
  static constexpr bool FINISHES = true;
  const P* shift;
  const P* scale;
  const float* mean;
  const float* var;
  const T* residual;

  __device__ __forceinline__ static float activate(float v) {
    return activated_by_code<ACTIVATION>(v);
  }

  // a and b of EACH channels from `channel` on.
  template <int EACH, bool ALIGNED>
  __device__ __forceinline__ void load(float (&a)[EACH], float (&b)[EACH], int channel,
                                       cuda::std::bool_constant<ALIGNED> aligned) const {
    auto fetch = [&](const auto* from) {
      return load_channels<EACH>(from + channel, aligned);
    };
    Channels<P, EACH> scales = {}, shifts = {};
    Channels<float, EACH> means = {}, vars = {};
    if (var) vars = fetch(var);
    if (scale) scales = fetch(scale);
    if (mean) means = fetch(mean);
    if (shift) shifts = fetch(shift);
#pragma unroll
    for (int j = 0; j < EACH; ++j) {
      a[j] = var ? rsqrtf(vars.v[j] + __int_as_float(EPS)) : 1.0f;
      if (scale) a[j] *= static_cast<float>(scales.v[j]);
      b[j] = shift ? static_cast<float>(shifts.v[j]) : 0.0f;
      if (mean) b[j] -= a[j] * means.v[j];
    }
  }

  // As of Bias.
  template <int EACH>
  __device__ __forceinline__ void finish(float (&sum)[EACH], long long row, int channel,
                                         int channels) const {
    auto run = [&](auto aligned) {
      float a[EACH], b[EACH];
      Channels<T, EACH> added = {};
      if (residual) {
        added = load_channels<EACH>(residual + row * channels + channel, aligned);
      }
      load(a, b, channel, aligned);
#pragma unroll
      for (int j = 0; j < EACH; ++j) {
        float v = fmaf(a[j], sum[j], b[j]);
        if (residual) v += static_cast<float>(added.v[j]);
        sum[j] = activate(v);
      }
    };
    by_alignment(run, shift, scale, mean, var, residual);
  }
};

// Channels of a tile of WIDTH in shared memory.
template <typename AFTER, int WIDTH>
inline constexpr int KEPT = AFTER::FINISHES ? WIDTH : 1;

// Writes a and b of the channels of a tile that begins at `first`, `threads` threads
// together. They must meet before others read them.
template <int WIDTH, typename AFTER>
__device__ __forceinline__ void keep_channels(float2* kept, const AFTER& after, int first,
                                              int channels, int thread, int threads) {
  for (int c = thread; c < WIDTH; c += threads) {
    float a[1] = {}, b[1] = {};
    if (first + c < channels) after.load(a, b, first + c, cuda::std::false_type());
    kept[c] = make_float2(a[0], b[0]);
  }
}

}  // namespace lattice
