// The inner loops of int8 features for one instruction set (LATTICE_ISA), collected into its table. CMake compiles this
// file once per instruction set, contraction of floating point off: every operation is rounded by itself, so that
// results are the same bits everywhere.
#include "integer_loops.h"

#include "activations.h"
#include "integer_tiles.h"
#include "transpose.h"
#include "typed_rows.h"

namespace lattice::LATTICE_ISA {
namespace {

void prepare(const int8_t* x, int64_t rows, int64_t c, char* to, int32_t* sums) {
  int64_t whole = (c + step - 1) / step * step;
  for (int64_t r = 0; r < rows; ++r, x += c) {
    if (sums) {
      int32_t sum = 0;
      for (int64_t i = 0; i < c; ++i) sum += x[i];
      sums[r] = sum;
    }
    if (!to) continue;
    if (step_bytes == step) {
      memcpy(to, x, size_t(c));
      memset(to + c, 0, size_t(whole - c));
    } else {
      auto* wide = reinterpret_cast<int16_t*>(to);
      for (int64_t i = 0; i < c; ++i) wide[i] = x[i];
      if (whole > c) wide[c] = 0;
    }
    to += whole / step * step_bytes;
  }
}

// Four weights as one float, to be turned, shifted where the panel's are.
struct FourBytes {
  struct Element {
    char bytes[4];
  };
  static LATTICE_INLINE Vec vector(const Element* p) {
    Sums v;
    memcpy(&v, p, sizeof v);
    return (Vec)(is_shifted ? v ^ 0x80808080u : v);
  }
  static LATTICE_INLINE float scalar(const Element* p) {
    uint32_t v;
    memcpy(&v, p, sizeof v);
    return float_of(is_shifted ? v ^ 0x80808080u : v);
  }
};

void pack(const int8_t* w, int64_t stored, int64_t c_in, int64_t c_out, char* panel) {
  int64_t width = (c_out + lanes - 1) / lanes * lanes, steps = (c_in + step - 1) / step;
  for (int64_t n0 = 0; n0 < width; n0 += lanes * vectors) {
    int64_t block = width - n0 < lanes * vectors ? width - n0 : lanes * vectors;
    if constexpr (step == 4 && step_bytes == 4) {
      int64_t take = c_out - n0 < block ? c_out - n0 : block;
      auto* from = reinterpret_cast<const FourBytes::Element*>(w + n0 * stored);
      turn_rows<FourBytes>(from, stored / 4, take, steps, reinterpret_cast<float*>(panel), block);
      panel += steps * block * step_bytes;
      continue;
    }
    for (int64_t s = 0; s < steps; ++s)
      for (int64_t n = n0; n < n0 + block; ++n, panel += step_bytes) {
        if (n >= c_out) {
          memset(panel, 0, step_bytes);
          continue;
        }
        const int8_t* from = w + n * stored + s * step;
        if (step_bytes == step) {
          memcpy(panel, from, step_bytes);
        } else {
          int16_t pair[2] = {from[0], from[1]};
          memcpy(panel, pair, 4);
        }
      }
  }
}

// Sixteen bytes at a time, low halves first; a share is 32 values or more.
void unpack(const uint32_t* words, int64_t shares, int64_t each, const int8_t* multipliers, int8_t* values) {
  typedef int8_t Bytes __attribute__((vector_size(16)));
  for (int64_t s = 0; s < shares; ++s)
    for (int64_t j = 0; j < each; j += 4, words += 4, values += 32) {
      Bytes both;
      memcpy(&both, words, sizeof both);
      Bytes low = (both << 4 >> 4) * multipliers[s], high = (both >> 4) * multipliers[s];
      Bytes first = __builtin_shufflevector(low, high, 0, 16, 1, 17, 2, 18, 3, 19, 4, 20, 5, 21, 6, 22, 7, 23);
      Bytes last = __builtin_shufflevector(low, high, 8, 24, 9, 25, 10, 26, 11, 27, 12, 28, 13, 29, 14, 30, 15, 31);
      memcpy(values, &first, sizeof first);
      memcpy(values + 16, &last, sizeof last);
    }
}

// The lowest byte of each lane, where that is all of it.
LATTICE_INLINE void store_bytes(int8_t* y, SignedSums v) {
#if defined(__AVX512F__)
  _mm_storeu_si128(reinterpret_cast<__m128i*>(y), _mm512_cvtepi32_epi8((__m512i)v));
#elif defined(__AVX2__)
  __m256i whole = (__m256i)v;
  __m128i pairs = _mm_packs_epi32(_mm256_castsi256_si128(whole), _mm256_extracti128_si256(whole, 1));
  _mm_storel_epi64(reinterpret_cast<__m128i*>(y), _mm_packs_epi16(pairs, pairs));
#else
  for (int i = 0; i < lanes; ++i) y[i] = int8_t(v[i]);
#endif
}

// Rounds to the nearest whole number, half to even: adding 3 * 2^22 leaves it in the lowest bits. A NaN is -127. Reads
// whole vectors.
LATTICE_INLINE void round_to_int8(const float* v, int64_t n, float inverse, int8_t* y) {
  const Vec least = Vec{} - 127.0f, most = Vec{} + 127.0f;
  for (int64_t i = 0; i < n; i += lanes) {
    Vec level = load(v + i) * inverse;
    level = level > least ? level : least;
    level = level < most ? level : most;
    SignedSums whole = (SignedSums)(level + 12582912.0f) - int32_t(0x4b400000);
    if (n - i >= lanes) {
      store_bytes(y + i, whole);
    } else {
      int8_t tail[lanes];
      store_bytes(tail, whole);
      memcpy(y + i, tail, size_t(n - i));
    }
  }
}

template <Activation ACTIVATION>
LATTICE_INLINE void activate(float* v, int64_t n, float below) {
  for (int64_t i = 0; i < n; i += lanes) store(v + i, activated<ACTIVATION>(load(v + i), below));
}

void gather_multiply(const IntegerEdges& p, const char* w, int64_t c, void* sums, int64_t ld) {
  auto* values = reinterpret_cast<const int8_t*>(w);
  for (int64_t e = 0; e < p.n; ++e) {
    int64_t i = p.in ? p.in[e] : e, o = p.out ? p.out[e] : ~e;
    auto* x = reinterpret_cast<const int8_t*>(p.x + i * p.ldx);
    bool is_first = o < 0;
    if (is_first) o = ~o;
    if (p.row_scales) {
      float* to = static_cast<float*>(sums) + o * ld;
      for (int64_t j = 0; j < c; ++j) to[j] = (is_first ? 0.0f : to[j]) + float(x[j] * values[j]) * p.row_scales[i];
    } else {
      int32_t* to = static_cast<int32_t*>(sums) + o * ld;
      for (int64_t j = 0; j < c; ++j) to[j] = (is_first ? 0 : to[j]) + x[j] * values[j];
    }
  }
}

constexpr int64_t chunk = 256;  // channels at a time; a multiple of any number of lanes

void finish(const IntegerFinish& f, void* sums, bool are_floats, int32_t taken, const void* residual, int64_t c,
            void* y) {
  for (int64_t c0 = 0; c0 < c; c0 += chunk) {
    int64_t n = c - c0 < chunk ? c - c0 : chunk;
    float* v = static_cast<float*>(sums) + c0;
    for (int64_t i = 0; i < n; i += lanes) {
      Vec sum = are_floats ? load(v + i) : as_floats(load_sums(v + i) - uint32_t(taken) * 128u);
      sum = sum * load(f.scale + c0 + i);
      if (f.shift) sum = sum + load(f.shift + c0 + i);
      store(v + i, sum);
    }
    if (residual) {
      float added[chunk];
      if (f.residual_scale) {
        auto* r = static_cast<const int8_t*>(residual) + c0;
        for (int64_t i = 0; i < n; ++i) added[i] = float(r[i]) * *f.residual_scale;
      } else {
        load_any(f.residual, offset(f.residual, residual, c0), n, added);
      }
      for (int64_t i = 0; i < n; ++i) v[i] += added[i];
    }
    if (f.act.kind != Activation::none)
      with_activation(f.act.kind, [&](auto kind) { activate<decltype(kind)::value>(v, n, f.act.slope); });
    if (f.out_inverse)
      round_to_int8(v, n, *f.out_inverse, static_cast<int8_t*>(y) + c0);
    else
      store_any(f.out, v, n, const_cast<void*>(offset(f.out, y, c0)));
  }
}

void quantise(Type t, const void* x, int64_t n, float inverse, int8_t* y) {
  float values[chunk];
  for (int64_t at = 0; at < n; at += chunk) {
    int64_t m = n - at < chunk ? n - at : chunk;
    load_any(t, offset(t, x, at), m, values);
    round_to_int8(values, m, inverse, y + at);
  }
}

float largest(Type t, const void* x, int64_t n) {
  float values[chunk];
  Mask most{};  // magnitudes as integers, which are in the order of the floats; a NaN is the largest
  for (int64_t at = 0; at < n; at += chunk) {
    int64_t m = n - at < chunk ? n - at : chunk;
    load_any(t, offset(t, x, at), m, values);
    for (int64_t i = m; i % lanes; ++i) values[i] = 0.0f;
    for (int64_t i = 0; i < m; i += lanes) {
      Mask size = (Mask)absolute(load(values + i));
      most = (Mask)choose(size > most, (Vec)size, (Vec)most);
    }
  }
  int32_t result = 0;
  for (int i = 0; i < lanes; ++i) result = most[i] > result ? most[i] : result;
  return float_of(uint32_t(result));
}

}  // namespace

extern const IntegerLoops integer_table;
const IntegerLoops integer_table{lanes,  vectors,    step,            step_bytes, is_shifted, prepare, unpack,
                                 pack,   gather_dot, gather_multiply, finish,     quantise,   largest};

}  // namespace lattice::LATTICE_ISA
