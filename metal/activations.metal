// Activations of norms and epilogues in float32, and their derivatives. A kind is a number
// of mlx_lattice/epilogue.py. `slope` is the slope of a leaky ReLU below zero (1: identity,
// 0: ReLU), or the alpha of an ELU. A new kind goes before ACT_ELU, here and there.

enum Activation { ACT_SLOPE, ACT_GELU, ACT_SILU, ACT_GELU_TANH, ACT_ELU };
// Codes of epilogues: 0 means no activation, 1 ReLU, then the kinds in their order. Other
// codes are the bits of the slope of a leaky ReLU, or of minus the alpha of an ELU.
// BIAS_ALONE: the shift is a bias, and nothing else follows the sums.
enum ActivationCode { BIAS_ALONE = -1, CODE_NONE, CODE_RELU };

// Within 1.5e-7 (Abramowitz and Stegun, 7.1.26): Metal has none.
METAL_FUNC float error_function(float x) {
  const float a = abs(x), t = 1.0f / (1.0f + 0.3275911f * a);
  float p = fma(1.061405429f, t, -1.453152027f);
  p = fma(p, t, 1.421413741f);
  p = fma(p, t, -0.284496736f);
  p = fma(p, t, 0.254829592f) * t;
  return copysign(1.0f - p * exp(-a * a), x);
}

// Of which GELU by tanh is v times the sigmoid.
METAL_FUNC float gelu_argument(float v) {
  return 1.5957691f * v * (1.0f + 0.044715f * v * v);
}

template <int ACT>
METAL_FUNC float activated(float v, float slope) {
  if (ACT == ACT_GELU) return 0.5f * v * (1.0f + error_function(v * 0.70710678f));
  if (ACT == ACT_SILU) return v / (1.0f + exp(-v));
  if (ACT == ACT_GELU_TANH) return v / (1.0f + exp(-gelu_argument(v)));
  if (!(v < 0.0f)) return v;
  if (ACT == ACT_ELU) return slope * (exp(v) - 1.0f);
  return slope == 0.0f ? 0.0f : slope * v;
}

template <int ACT>
METAL_FUNC float activation_slope(float v, float slope) {
  if (ACT == ACT_GELU) {
    const float density = 0.39894228f * exp(-0.5f * v * v);
    return 0.5f * (1.0f + error_function(v * 0.70710678f)) + v * density;
  }
  if (ACT == ACT_SILU) {
    const float s = 1.0f / (1.0f + exp(-v));
    return s * (1.0f + v * (1.0f - s));
  }
  if (ACT == ACT_GELU_TANH) {
    const float s = 1.0f / (1.0f + exp(-gelu_argument(v)));
    // Far from 0 the sigmoid's own slope is 0, and v's square may not be finite.
    const float turn = s * (1.0f - s);
    return turn == 0.0f ? s : s + v * turn * 1.5957691f * (1.0f + 0.134145f * v * v);
  }
  if (ACT == ACT_ELU) return v > 0.0f ? 1.0f : slope * exp(v);
  return v > 0.0f || (v == 0.0f && slope != 0.0f) ? 1.0f : slope;
}

template <int CODE>
METAL_FUNC float activated_by_code(float v) {
  if (CODE == BIAS_ALONE || CODE == CODE_NONE) return v;
  if (CODE < 0) return activated<ACT_ELU>(v, -as_type<float>(CODE));
  if (CODE > ACT_ELU) return activated<ACT_SLOPE>(v, as_type<float>(CODE));
  return activated<CODE - 1>(v, 0.0f);
}
