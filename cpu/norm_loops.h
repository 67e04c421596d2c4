// Rows of norms by channel: sums of columns, and normalised rows with what follows them. Included by inner_loops.cpp
// only, inside the namespace of one instruction set.
//
// A row is read in chunks of `norm_chunk` channels, widened to float in L1, so each dtype has the same plain loops,
// which the compiler turns into vectors; values beside them (mean, scale, ...) stay in L1 from row to row.
#pragma once
#include <math.h>

#include "activations.h"
#include "inner_loops.h"
#include "simd.h"

namespace lattice::LATTICE_ISA {
namespace {

constexpr int64_t norm_chunk = 256;

LATTICE_INLINE float sigmoid(float v) { return 1.0f / (1.0f + expf(-v)); }

// Of which GELU by tanh is v times the sigmoid.
LATTICE_INLINE float gelu_argument(float v) { return 1.5957691f * v * (1.0f + 0.044715f * v * v); }

// v has room for whole vectors.
LATTICE_INLINE void activate(float* v, int64_t n, int act, float slope) {
  if (act == int(NormAct::gelu)) {
    for (int64_t i = 0; i < n; ++i) v[i] = 0.5f * v[i] * (1.0f + erff(v[i] * 0.70710678f));
  } else if (act == int(NormAct::silu)) {
    for (int64_t i = 0; i < n; ++i) v[i] *= sigmoid(v[i]);
  } else if (act == int(NormAct::gelu_tanh)) {
    for (int64_t i = 0; i < n; ++i) v[i] *= sigmoid(gelu_argument(v[i]));
  } else if (act == int(NormAct::elu)) {
    for (int64_t i = n; i % lanes; ++i) v[i] = 0.0f;
    for (int64_t i = 0; i < n; i += lanes) store(v + i, activated<Activation::elu>(load(v + i), slope));
  } else if (slope == 0.0f) {
    for (int64_t i = 0; i < n; ++i) v[i] = v[i] < 0.0f ? 0.0f : v[i];  // a NaN stays
  } else if (slope != 1.0f) {
    for (int64_t i = 0; i < n; ++i) v[i] = v[i] < 0.0f ? slope * v[i] : v[i];
  }
}

// g *= the derivative at v; both have room for whole vectors.
LATTICE_INLINE void activation_gradient(float* v, float* g, int64_t n, int act, float slope) {
  if (act == int(NormAct::gelu)) {
    for (int64_t i = 0; i < n; ++i) {
      float density = 0.39894228f * expf(-0.5f * v[i] * v[i]);
      g[i] *= 0.5f * (1.0f + erff(v[i] * 0.70710678f)) + v[i] * density;
    }
  } else if (act == int(NormAct::silu)) {
    for (int64_t i = 0; i < n; ++i) {
      float s = sigmoid(v[i]);
      g[i] *= s * (1.0f + v[i] * (1.0f - s));
    }
  } else if (act == int(NormAct::gelu_tanh)) {
    for (int64_t i = 0; i < n; ++i) {
      float s = sigmoid(gelu_argument(v[i])), turn = s * (1.0f - s);
      // Far from 0 the sigmoid's own slope is 0, and v's square may not be finite.
      g[i] *= turn == 0.0f ? s : s + v[i] * turn * 1.5957691f * (1.0f + 0.134145f * v[i] * v[i]);
    }
  } else if (act == int(NormAct::elu)) {
    for (int64_t i = n; i % lanes; ++i) v[i] = g[i] = 0.0f;
    for (int64_t i = 0; i < n; i += lanes)
      store(g + i, load(g + i) * lattice::LATTICE_ISA::slope<Activation::elu>(load(v + i), slope));
  } else if (slope == 0.0f) {
    for (int64_t i = 0; i < n; ++i) g[i] = v[i] > 0.0f ? g[i] : 0.0f;
  } else if (slope != 1.0f) {
    for (int64_t i = 0; i < n; ++i) g[i] = v[i] >= 0.0f ? g[i] : slope * g[i];
  }
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
                    const NormLine& line, int act, float slope, void* y) {
  float xs[norm_chunk], v[norm_chunk];
  for (int64_t e = first; e < first + n; ++e)
    for (int64_t from = 0; from < c; from += norm_chunk) {
      int64_t m = c - from < norm_chunk ? c - from : norm_chunk, at = e * c + from;
      norm_values(t, x, residual, at, from, m, line, xs, v);
      activate(v, m, act, slope);
      store_any(t, v, m, static_cast<char*>(y) + at * bytes_of(t));
    }
}

void norm_gradient_sums(Type t, const void* dy, const void* x, const void* residual, const int32_t* rows, int64_t first,
                        int64_t n, int64_t c, const NormLine& line, int act, float slope, float* sum, float* products) {
  float xs[norm_chunk], v[norm_chunk], g[norm_chunk];
  for (int64_t e = first; e < first + n; ++e)
    for (int64_t from = 0; from < c; from += norm_chunk) {
      int64_t m = c - from < norm_chunk ? c - from : norm_chunk, at = (rows ? rows[e] : e) * c + from;
      norm_values(t, x, residual, at, from, m, line, xs, v);
      load_any(t, offset(t, dy, at), m, g);
      activation_gradient(v, g, m, act, slope);
      const float *mean = line.mean + from, *rstd = line.rstd + from;
      float *s = sum + from, *p = products + from;
      for (int64_t i = 0; i < m; ++i) {
        s[i] += g[i];
        p[i] += g[i] * (xs[i] - mean[i]) * rstd[i];
      }
    }
}

void norm_gradient(Type t, const void* dy, const void* x, const void* residual, int64_t first, int64_t n, int64_t c,
                   const NormLine& line, int act, float slope, void* dx, void* dresidual) {
  float xs[norm_chunk], v[norm_chunk], g[norm_chunk];
  for (int64_t e = first; e < first + n; ++e)
    for (int64_t from = 0; from < c; from += norm_chunk) {
      int64_t m = c - from < norm_chunk ? c - from : norm_chunk, at = e * c + from;
      norm_values(t, x, residual, at, from, m, line, xs, v);
      load_any(t, offset(t, dy, at), m, g);
      activation_gradient(v, g, m, act, slope);
      const float *mean = line.mean + from, *scale = line.scale + from;
      const float *shift = line.shift + from, *turn = line.turn + from;
      for (int64_t i = 0; i < m; ++i) v[i] = scale[i] * g[i] - shift[i] - (xs[i] - mean[i]) * turn[i];
      store_any(t, v, m, static_cast<char*>(dx) + at * bytes_of(t));
      if (dresidual) store_any(t, g, m, static_cast<char*>(dresidual) + at * bytes_of(t));
    }
}

}  // namespace
}  // namespace lattice::LATTICE_ISA
