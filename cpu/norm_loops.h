// Rows of norms by channel: sums of columns, and normalised rows with what follows them. Included by inner_loops.cpp
// only, inside the namespace of one instruction set.
//
// A row is read in chunks of `norm_chunk` channels, widened to float in L1, so each dtype has the same plain loops,
// which the compiler turns into vectors; values beside them (mean, scale, ...) stay in L1 from row to row.
#pragma once
#include "activations.h"
#include "inner_loops.h"
#include "simd.h"

namespace lattice::LATTICE_ISA {
namespace {

constexpr int64_t norm_chunk = 256;

// v = act(v), or with g: g *= the derivative at v. Both have room for whole vectors.
LATTICE_INLINE void activate(float* v, float* g, int64_t n, Act act) {
  for (int64_t i = n; i % lanes; ++i) v[i] = 0.0f;
  for (int64_t i = n; g && i % lanes; ++i) g[i] = 0.0f;
  with_activation(act.kind, [&](auto kind) {
    constexpr Activation KIND = decltype(kind)::value;
    for (int64_t i = 0; i < n && g; i += lanes)
      store(g + i, activation_gradient<KIND>(load(g + i), load(v + i), act.slope));
    for (int64_t i = 0; i < n && !g; i += lanes) store(v + i, activated<KIND>(load(v + i), act.slope));
  });
}

void column_moments(Type t, const void* x, const int32_t* rows, int64_t first, int64_t n, int64_t c,
                    const float* about, float* sum, float* squares) {
  with_type(t, [&](auto type) {
    using T = decltype(type);
    for (int64_t e = first; e < first + n; ++e) {
      auto* p = static_cast<const typename T::Element*>(x) + (rows ? rows[e] : e) * c;
      int64_t i = 0;
      for (; i + lanes <= c; i += lanes) {
        Vec d = T::vector(p + i) - load(about + i);
        store(sum + i, load(sum + i) + d);
        store(squares + i, load(squares + i) + d * d);
      }
      for (; i < c; ++i) {
        float d = T::scalar(p + i) - about[i];
        sum[i] += d;
        squares[i] += d * d;
      }
    }
  });
}

// v = (x - mean) * scale + bias + residual of `m` channels from `at` on; x too.
LATTICE_INLINE void norm_values(Type t, const void* x, const void* residual, int64_t at, int64_t from, int64_t m,
                                const NormLine& line, float* xs, float* v) {
  float added[norm_chunk];
  load_any(t, offset(t, x, at), m, xs);
  const float *mean = line.mean + from, *scale = line.scale + from, *bias = line.bias + from;
  for (int64_t i = 0; i < m; ++i) v[i] = (xs[i] - mean[i]) * scale[i] + bias[i];
  if (!residual) return;
  load_any(t, offset(t, residual, at), m, added);
  for (int64_t i = 0; i < m; ++i) v[i] += added[i];
}

void normalize_rows(Type t, const void* x, const void* residual, int64_t first, int64_t n, int64_t c,
                    const NormLine& line, Act act, void* y) {
  float xs[norm_chunk], v[norm_chunk];
  for (int64_t e = first; e < first + n; ++e)
    for (int64_t from = 0; from < c; from += norm_chunk) {
      int64_t m = c - from < norm_chunk ? c - from : norm_chunk, at = e * c + from;
      norm_values(t, x, residual, at, from, m, line, xs, v);
      activate(v, nullptr, m, act);
      store_any(t, v, m, static_cast<char*>(y) + at * bytes_of(t));
    }
}

void norm_gradient_sums(Type t, const void* dy, const void* x, const void* residual, const int32_t* rows, int64_t first,
                        int64_t n, int64_t c, const NormLine& line, Act act, float* sum, float* products) {
  float xs[norm_chunk], v[norm_chunk], g[norm_chunk];
  for (int64_t e = first; e < first + n; ++e)
    for (int64_t from = 0; from < c; from += norm_chunk) {
      int64_t m = c - from < norm_chunk ? c - from : norm_chunk, at = (rows ? rows[e] : e) * c + from;
      norm_values(t, x, residual, at, from, m, line, xs, v);
      load_any(t, offset(t, dy, at), m, g);
      activate(v, g, m, act);
      const float *mean = line.mean + from, *rstd = line.rstd + from;
      float *s = sum + from, *p = products + from;
      for (int64_t i = 0; i < m; ++i) {
        s[i] += g[i];
        p[i] += g[i] * (xs[i] - mean[i]) * rstd[i];
      }
    }
}

void norm_gradient(Type t, const void* dy, const void* x, const void* residual, int64_t first, int64_t n, int64_t c,
                   const NormLine& line, Act act, void* dx, void* dresidual) {
  float xs[norm_chunk], v[norm_chunk], g[norm_chunk];
  for (int64_t e = first; e < first + n; ++e)
    for (int64_t from = 0; from < c; from += norm_chunk) {
      int64_t m = c - from < norm_chunk ? c - from : norm_chunk, at = e * c + from;
      norm_values(t, x, residual, at, from, m, line, xs, v);
      load_any(t, offset(t, dy, at), m, g);
      activate(v, g, m, act);
      const float *mean = line.mean + from, *scale = line.scale + from;
      const float *shift = line.shift + from, *turn = line.turn + from;
      for (int64_t i = 0; i < m; ++i) v[i] = scale[i] * g[i] - shift[i] - (xs[i] - mean[i]) * turn[i];
      store_any(t, v, m, static_cast<char*>(dx) + at * bytes_of(t));
      if (dresidual) store_any(t, g, m, static_cast<char*>(dresidual) + at * bytes_of(t));
    }
}

}  // namespace
}  // namespace lattice::LATTICE_ISA
