// Rows of attention's scores: their softmax as keys come block after block, and the way back. Included by
// inner_loops.cpp only, inside the namespace of one instruction set.
#pragma once
#include "activations.h"
#include "inner_loops.h"
#include "simd.h"

namespace lattice::LATTICE_ISA {
namespace {

// Places behind the last key get nothing.
LATTICE_INLINE void forget_tail(float* row, int64_t c) {
  for (int64_t i = c; i % lanes; ++i) row[i] = -__builtin_inff();
}

void soften(float* s, int64_t ld, int64_t n, int64_t c, float* peak, float* total, float* y, int64_t width) {
  for (int64_t r = 0; r < n; ++r, s += ld, y += width) {
    forget_tail(s, c);
    Vec tops = splat(peak[r]);
    for (int64_t i = 0; i < c; i += lanes) {
      Vec v = load(s + i);
      tops = choose(v > tops, v, tops);
    }
    float top = tops[0];
    for (int j = 1; j < lanes; ++j) top = tops[j] > top ? tops[j] : top;
    Vec sums = Vec{};
    for (int64_t i = 0; i < c; i += lanes) {
      Vec v = exp_below_zero(load(s + i) - top);
      store(s + i, v);
      sums += v;
    }
    float sum = sums[0];
    for (int j = 1; j < lanes; ++j) sum += sums[j];
    if (peak[r] != top) {
      float moved = exp_below_zero(splat(peak[r] - top))[0];
      total[r] *= moved;
      for (int64_t i = 0; i < width; i += lanes) store(y + i, load(y + i) * moved);
    }
    total[r] += sum;
    peak[r] = top;
  }
}

void soften_gradient(float* s, float* ds, int64_t ld, int64_t n, int64_t c, const float* lse, const float* delta) {
  for (int64_t r = 0; r < n; ++r, s += ld, ds += ld) {
    forget_tail(s, c);
    for (int64_t i = 0; i < c; i += lanes) {
      Vec p = exp_below_zero(load(s + i) - lse[r]);
      store(s + i, p);
      store(ds + i, p * (load(ds + i) - delta[r]));
    }
  }
}

}  // namespace
}  // namespace lattice::LATTICE_ISA
