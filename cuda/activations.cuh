// Activations of norms and epilogues in float32, and their derivatives. A kind is a number
// of mlx_lattice/epilogue.py. `slope` is the slope of a leaky ReLU below zero (1: identity,
// 0: ReLU), or the alpha of an ELU. A new kind goes before ACT_ELU, here and there.

namespace lattice {

enum Activation { ACT_SLOPE, ACT_GELU, ACT_SILU, ACT_GELU_TANH, ACT_ELU };

// Of which GELU by tanh is v times the sigmoid.
__device__ __forceinline__ float gelu_argument(float v) {
  return 1.5957691f * v * (1.0f + 0.044715f * v * v);
}

template <int ACT>
__device__ __forceinline__ float activated(float v, float slope) {
  if constexpr (ACT == ACT_GELU) return 0.5f * v * (1.0f + erff(v * 0.70710678f));
  if constexpr (ACT == ACT_SILU) return v / (1.0f + expf(-v));
  if constexpr (ACT == ACT_GELU_TANH) return v / (1.0f + expf(-gelu_argument(v)));
  if (!(v < 0.0f)) return v;  // a NaN stays
  if constexpr (ACT == ACT_ELU) return slope * expm1f(v);
  return slope == 0.0f ? 0.0f : slope * v;
}

// The derivative of an activation.
template <int ACT>
__device__ __forceinline__ float activation_slope(float v, float slope) {
  if constexpr (ACT == ACT_GELU) {
    const float density = 0.39894228f * expf(-0.5f * v * v);
    return 0.5f * (1.0f + erff(v * 0.70710678f)) + v * density;
  }
  if constexpr (ACT == ACT_SILU) {
    const float s = 1.0f / (1.0f + expf(-v));
    return s * (1.0f + v * (1.0f - s));
  }
  if constexpr (ACT == ACT_GELU_TANH) {
    const float s = 1.0f / (1.0f + expf(-gelu_argument(v)));
    // Far from 0 the sigmoid's own slope is 0, and v's square may not be finite.
    const float turn = s * (1.0f - s);
    return turn == 0.0f ? s : s + v * turn * 1.5957691f * (1.0f + 0.134145f * v * v);
  }
  if constexpr (ACT == ACT_ELU) return v > 0.0f ? 1.0f : slope * expf(v);
  return v > 0.0f || (v == 0.0f && slope != 0.0f) ? 1.0f : slope;
}

// The activation of a code of mlx_lattice/epilogue.py: none, kinds from 1 on, or the
// bits of a LeakyReLU's slope, or of minus an ELU's alpha.
template <int CODE>
__device__ __forceinline__ float activated_by_code(float v) {
  if constexpr (CODE < 0) return activated<ACT_ELU>(v, -__int_as_float(CODE));
  if constexpr (CODE > ACT_ELU) return activated<ACT_SLOPE>(v, __int_as_float(CODE));
  if constexpr (CODE > 0 && CODE <= ACT_ELU) return activated<CODE - 1>(v, 0.0f);
  return v;
}

}  // namespace lattice
