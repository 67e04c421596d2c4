// Activations on vectors of floats: ReLU and LeakyReLU, ELU, SiLU, and GELU by the error function or by tanh. Included
// by inner_loops.cpp and integer_loops.cpp only.
#pragma once
#include "inner_loops.h"
#include "simd.h"

namespace lattice::LATTICE_ISA {
namespace {

typedef int32_t Mask __attribute__((vector_size(lanes * 4)));

LATTICE_INLINE Vec choose(Mask mask, Vec a, Vec b) { return (Vec)((mask & (Mask)a) | (~mask & (Mask)b)); }

// e^x to 2 units in the last place for x in [-87, 0]; below it, 0. A NaN stays one.
LATTICE_INLINE Vec exp_below_zero(Vec x) {
  Vec least = splat(-87.0f), at = choose(x < least, least, x);
  // Adding 3 * 2^22 rounds to a whole number, which then stands in the lowest bits.
  const float magic = 12582912.0f;
  Vec shifted = at * 1.44269504f + magic, whole = shifted - magic;
  Vec r = at - whole * 0.693359375f + whole * 2.12194440e-4f;
  Vec p = splat(1.9875691500e-4f);
  p = p * r + 1.3981999507e-3f;
  p = p * r + 8.3334519073e-3f;
  p = p * r + 4.1665795894e-2f;
  p = p * r + 1.6666665459e-1f;
  p = p * r + 5.0000001201e-1f;
  p = p * r * r + r + 1.0f;
  Mask bits = (Mask)p + ((Mask)shifted << 23);
  return choose(x != x, x, choose(x < least, Vec{}, (Vec)bits));
}

LATTICE_INLINE Vec absolute(Vec x) { return (Vec)((Mask)x & (Mask{} + 0x7fffffff)); }

// Abramowitz and Stegun, 7.1.26, to 1.5e-7.
LATTICE_INLINE Vec error_function(Vec x) {
  Vec size = absolute(x), t = 1.0f / (size * 0.3275911f + 1.0f), p = splat(1.061405429f);
  p = p * t - 1.453152027f;
  p = p * t + 1.421413741f;
  p = p * t - 0.284496736f;
  p = p * t + 0.254829592f;
  Vec y = 1.0f - p * t * exp_below_zero(-size * size);
  return choose(x < 0.0f, -y, y);
}

LATTICE_INLINE Vec sigmoid_of(Vec v) {
  Vec small = exp_below_zero(-absolute(v)), whole = 1.0f / (small + 1.0f);
  return choose(v < 0.0f, small * whole, whole);
}

// Of which GELU by tanh is v times the sigmoid.
LATTICE_INLINE Vec gelu_argument(Vec v) { return v * 1.5957691f * (v * v * 0.044715f + 1.0f); }

// The derivative of GELU, SiLU or ELU of `alpha`.
template <Activation ACTIVATION>
LATTICE_INLINE Vec slope(Vec v, float alpha = 0.0f) {
  if constexpr (ACTIVATION == Activation::elu)
    return choose(v > 0.0f, splat(1.0f), exp_below_zero(choose(v > 0.0f, Vec{}, v)) * alpha);
  if constexpr (ACTIVATION == Activation::gelu) {
    Vec density = exp_below_zero(v * v * -0.5f) * 0.39894228f;
    return (error_function(v * 0.70710678f) + 1.0f) * 0.5f + v * density;
  }
  if constexpr (ACTIVATION == Activation::gelu_tanh) {
    Vec s = sigmoid_of(gelu_argument(v)), turn = s * (1.0f - s);
    // Far from 0 the sigmoid's own slope is 0, and v's square may not be finite.
    return choose(turn == 0.0f, s, s + v * turn * 1.5957691f * (v * v * 0.134145f + 1.0f));
  }
  Vec s = sigmoid_of(v);
  return s * (v * (1.0f - s) + 1.0f);
}

template <Activation ACTIVATION>
LATTICE_INLINE Vec activated(Vec v, float below = 0.0f) {
  if constexpr (ACTIVATION == Activation::leaky_relu) return choose(v < 0.0f, v * below, v);
  if constexpr (ACTIVATION == Activation::elu)
    return choose(v > 0.0f, v, (exp_below_zero(choose(v > 0.0f, Vec{}, v)) - 1.0f) * below);
  if constexpr (ACTIVATION == Activation::relu) return choose(v <= 0.0f, Vec{}, v);
  if constexpr (ACTIVATION == Activation::gelu) return v * 0.5f * (error_function(v * 0.70710678f) + 1.0f);
  if constexpr (ACTIVATION == Activation::silu) return v * sigmoid_of(v);
  if constexpr (ACTIVATION == Activation::gelu_tanh) return v * sigmoid_of(gelu_argument(v));
  return v;
}

// g times the derivative of any activation at v.
template <Activation ACTIVATION>
LATTICE_INLINE Vec activation_gradient(Vec g, Vec v, float below) {
  if constexpr (ACTIVATION == Activation::none) return g;
  if constexpr (ACTIVATION == Activation::relu) return choose(v > 0.0f, g, Vec{});
  if constexpr (ACTIVATION == Activation::leaky_relu) return choose(v >= 0.0f, g, g * below);
  return g * slope<ACTIVATION>(v, below);
}

// An activation as a type.
template <Activation KIND>
struct Constant {
  static constexpr Activation value = KIND;
};

// Calls run(Constant<kind>).
template <typename RUN>
LATTICE_INLINE void with_activation(Activation kind, RUN run) {
  switch (kind) {
    case Activation::none: return run(Constant<Activation::none>{});
    case Activation::relu: return run(Constant<Activation::relu>{});
    case Activation::gelu: return run(Constant<Activation::gelu>{});
    case Activation::silu: return run(Constant<Activation::silu>{});
    case Activation::gelu_tanh: return run(Constant<Activation::gelu_tanh>{});
    case Activation::leaky_relu: return run(Constant<Activation::leaky_relu>{});
    case Activation::elu: return run(Constant<Activation::elu>{});
  }
}

}  // namespace
}  // namespace lattice::LATTICE_ISA
