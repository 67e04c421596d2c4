// What follows the sums of a contraction, four channels of a row at a time, in float32:
//
//   y = act((sum - mean) / sqrt(var + eps) * scale + shift + residual)
//
// Rounded once, where a kernel writes. Each array may be null. A norm is read as it is
// stored, so that nothing is computed, or kept, of it before. Traffic: the residual once;
// the rest from the caches. Reads matrix_tiles.metal too.

// Codes of mlx_lattice/epilogue.py; others are the bits of a LeakyReLU's slope, or of
// minus an ELU's alpha. BIAS_ALONE: the shift is a bias, and there is nothing else.
enum Activation { BIAS_ALONE = -1, NO_ACTIVATION, RELU, GELU, SILU, GELU_TANH };

// P, which is not deduced: a null pointer has none.
template <typename P>
struct Stated {
  using Type = P;
};
template <typename P>
using Given = typename Stated<P>::Type;

// Within 1.5e-7 (Abramowitz and Stegun, 7.1.26): Metal has none.
METAL_FUNC float error_function(float x) {
  const float a = abs(x), t = 1.0f / (1.0f + 0.3275911f * a);
  float p = fma(1.061405429f, t, -1.453152027f);
  p = fma(p, t, 1.421413741f);
  p = fma(p, t, -0.284496736f);
  p = fma(p, t, 0.254829592f) * t;
  return copysign(1.0f - p * exp(-a * a), x);
}

template <int ACTIVATION>
METAL_FUNC float activated(float v) {
  if (ACTIVATION == RELU) return v < 0.0f ? 0.0f : v;  // a NaN stays
  if (ACTIVATION == GELU) return 0.5f * v * (1.0f + error_function(v * 0.70710678f));
  if (ACTIVATION == SILU) return v / (1.0f + exp(-v));
  if (ACTIVATION == GELU_TANH)
    return v / (1.0f + exp(-1.5957691f * v * (1.0f + 0.044715f * v * v)));
  if (ACTIVATION >= BIAS_ALONE && ACTIVATION <= GELU_TANH) return v;
  if (!(v < 0.0f)) return v;
  const float given = as_type<float>(ACTIVATION);
  return ACTIVATION > GELU_TANH ? given * v : given * (1.0f - exp(v));
}

// EPS: the bits of what is added to the variance.
template <typename T, int ACTIVATION, typename P, int EPS>
struct Epilogue {
  const device P* shift;
  const device P* scale;
  const device float* mean;
  const device float* var;
  const device T* residual;

  // Finishes the sums of the `left` first of four channels, from c on, of a row of C_y.
  template <typename INDEX>
  METAL_FUNC void finish(
      thread float4& sums, INDEX row, int c_y, int c, int left) const thread {
    Four<T> added;
    if (residual) fetch(added, residual + (row * INDEX(c_y) + INDEX(c)), left);
    for (int j = 0; j < 4; ++j) {
      if (j >= left) break;
      float v = sums[j];
      if (mean) v -= mean[c + j];
      if (var) v *= rsqrt(var[c + j] + as_type<float>(EPS));
      if (scale) v *= float(scale[c + j]);
      if (shift) v += float(shift[c + j]);
      if (residual) v += float(added.v[j]);
      sums[j] = activated<ACTIVATION>(v);
    }
  }
};
