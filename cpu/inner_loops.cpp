// The inner loops of one instruction set (LATTICE_ISA: baseline, avx2, avx512), collected into its table. CMake
// compiles this file once per instruction set with that set's target flags.
#include "activations.h"
#include "bucket.h"
#include "inner_loops.h"
#include "outer_tiles.h"
#include "register_tiles.h"
#include "simd.h"
#include "transpose.h"
#include "typed_rows.h"

namespace lattice::LATTICE_ISA {
namespace {

void gather(Type t, const void* x, int64_t ld, const int32_t* rows, int64_t n, int64_t c, float* dst, int64_t ldd) {
  with_type(t, [&](auto type) {
    for (int64_t e = 0; e < n; ++e) {
      if (rows && e + 8 < n)
        for (int64_t line = 0; line < c; line += 32) __builtin_prefetch(offset(t, x, rows[e + 8] * ld + line));
      load_row<decltype(type)>(offset(t, x, (rows ? rows[e] : e) * ld), c, dst + e * ldd);
    }
  });
}

// The place of column n in a panel: element (c, n) is at start[c * block].
struct Column {
  float* start;
  int64_t block;
};
LATTICE_INLINE Column column(float* panel, int64_t c_in, int64_t width, int64_t n) {
  int64_t n0 = n / (lanes * vectors) * (lanes * vectors);
  int64_t block = width - n0 < lanes * vectors ? width - n0 : lanes * vectors;
  return {panel + n0 * c_in + (n - n0), block};
}

void turn(Type t, const void* src, int64_t stride, int64_t rows, int64_t columns, float* dst, int64_t ldd) {
  with_type(t, [&](auto type) {
    using T = decltype(type);
    turn_rows<T>(static_cast<const typename T::Element*>(src), stride, rows, columns, dst, ldd);
  });
}

void pack(Type t, const void* src, int64_t stride, bool transposed, int64_t c_in, int64_t c_out, float* panel) {
  int64_t width = (c_out + lanes - 1) / lanes * lanes;
  for (int64_t n0 = 0; n0 < width; n0 += lanes * vectors) {
    int64_t block = width - n0 < lanes * vectors ? width - n0 : lanes * vectors;
    int64_t take = c_out - n0 < block ? c_out - n0 : block;
    float* dst = panel + n0 * c_in;
    if (transposed) {
      turn(t, offset(t, src, n0 * stride), stride, take, c_in, dst, block);
      continue;
    }
    for (int64_t c = 0; c < c_in; ++c, dst += block) {
      load_any(t, offset(t, src, c * stride + n0), take, dst);
      for (int64_t i = take; i < block; ++i) dst[i] = 0;
    }
  }
}

void dequantize(const uint32_t* words, Type t, const void* scales, const void* biases, int bits, int group_size,
                int64_t stored, int64_t c_in, int64_t c_out, float* panel) {
  typedef int32_t Ints __attribute__((vector_size(lanes * 4)));
  int64_t width = (c_out + lanes - 1) / lanes * lanes, per_word = 32 / bits;
  int64_t row_words = stored / per_word, row_scales = stored / group_size, group_words = group_size / per_word;
  int32_t mask = (1 << bits) - 1;
  with_type(t, [&](auto type) {
    using T = decltype(type);
    auto* s = static_cast<const typename T::Element*>(scales);
    auto* b = static_cast<const typename T::Element*>(biases);
    // A vector of output channels at a time: their words side by side, so panel rows are written whole.
    for (int64_t n = 0; n < width; n += lanes) {
      Column to = column(panel, c_in, width, n);
      float* dst = to.start;
      int64_t real = c_out - n < lanes ? c_out - n : lanes;
      for (int64_t g = 0; g < row_scales; ++g) {
        Vec scale{}, bias{};
        for (int64_t l = 0; l < real; ++l) {
          scale[l] = T::scalar(s + (n + l) * row_scales + g);
          bias[l] = T::scalar(b + (n + l) * row_scales + g);
        }
        for (int64_t j = g * group_words; j < (g + 1) * group_words; ++j) {
          Ints word{};
          for (int64_t l = 0; l < real; ++l) word[l] = int32_t(words[(n + l) * row_words + j]);
          int64_t left = c_in - j * per_word;
          for (int64_t i = 0; i < per_word && i < left; ++i, word >>= bits, dst += to.block)
            store(dst, __builtin_convertvector(word & mask, Vec) * scale + bias);
        }
      }
    }
  });
}

void accumulate(Type t, const void* x, int64_t n, float scale, float* acc) {
  with_type(t, [&](auto type) {
    using T = decltype(type);
    auto* p = static_cast<const typename T::Element*>(x);
    int64_t i = 0;
    for (; i + lanes <= n; i += lanes) store(acc + i, load(acc + i) + T::vector(p + i) * scale);
    for (; i < n; ++i) acc[i] += T::scalar(p + i) * scale;
  });
}

void gather_multiply(Type t, const void* x, int64_t ldx, const int32_t* in, const int32_t* out, int64_t n,
                     const float* w, int64_t c, const float* start, float* y, int64_t ldy) {
  with_type(t, [&](auto type) {
    using T = decltype(type);
    for (int64_t e = 0; e < n; ++e) {
      auto* p = static_cast<const typename T::Element*>(x) + in[e] * ldx;
      int64_t o = out[e];
      float* acc = y + (o < 0 ? ~o : o) * ldy;
      const float* from = o < 0 ? start : acc;
      int64_t i = 0;
      for (; i + lanes <= c; i += lanes) store(acc + i, load(from + i) + T::vector(p + i) * load(w + i));
      for (; i < c; ++i) acc[i] = from[i] + T::scalar(p + i) * w[i];
    }
  });
}

template <Activation ACTIVATION>
void finish_with(float below, const float* scale, const float* shift, Type t, const void* residual, int64_t n,
                 float* sums) {
  with_type(t, [&](auto type) {
    using T = decltype(type);
    auto* r = static_cast<const typename T::Element*>(residual);
    int64_t i = 0;
    for (; i + lanes <= n; i += lanes) {
      Vec v = load(sums + i) * load(scale + i) + load(shift + i);
      if (r) v += T::vector(r + i);
      store(sums + i, activated<ACTIVATION>(v, below));
    }
    if (i == n) return;
    Vec v{};
    for (int64_t j = i; j < n; ++j) v[j - i] = sums[j] * scale[j] + shift[j] + (r ? T::scalar(r + j) : 0.0f);
    v = activated<ACTIVATION>(v, below);
    for (int64_t j = i; j < n; ++j) sums[j] = v[j - i];
  });
}

void finish(Act act, const float* scale, const float* shift, Type t, const void* residual, int64_t n, float* sums) {
  with_activation(act.kind, [&](auto kind) {
    finish_with<decltype(kind)::value>(act.slope, scale, shift, t, residual, n, sums);
  });
}

void gather_product(Type t, const void* x, const void* dy, const int32_t* in, const int32_t* out, int64_t n,
                    int64_t c, float* w) {
  with_type(t, [&](auto type) {
    using T = decltype(type);
    for (int64_t e = 0; e < n; ++e) {
      auto* p = static_cast<const typename T::Element*>(x) + in[e] * c;
      auto* q = static_cast<const typename T::Element*>(dy) + out[e] * c;
      int64_t i = 0;
      for (; i + lanes <= c; i += lanes) store(w + i, load(w + i) + T::vector(p + i) * T::vector(q + i));
      for (; i < c; ++i) w[i] += T::scalar(p + i) * T::scalar(q + i);
    }
  });
}

void maximum(Type t, const void* x, int64_t n, int32_t row, float* acc, int32_t* index) {
  with_type(t, [&](auto type) {
    using T = decltype(type);
    auto* p = static_cast<const typename T::Element*>(x);
    for (int64_t i = 0; i < n; ++i) {
      float v = T::scalar(p + i);
      // !(v <= acc) lets a NaN in; acc == acc keeps the first NaN.
      bool take = index[i] < 0 || (!(v <= acc[i]) && acc[i] == acc[i]);
      acc[i] = take ? v : acc[i];
      index[i] = take ? row : index[i];
    }
  });
}

}  // namespace
}  // namespace lattice::LATTICE_ISA

#include "norm_loops.h"
#include "softmax_loops.h"

namespace lattice::LATTICE_ISA {

extern const InnerLoops table;
const InnerLoops table{lanes,
                       vectors,
                       load_any,
                       store_any,
                       gather,
                       bucket,
                       turn,
                       pack,
                       dequantize,
                       gather_gemm,
                       outer,
                       gather_multiply,
                       finish,
                       gather_product,
                       accumulate,
                       maximum,
                       column_moments,
                       normalize_rows,
                       norm_gradient_sums,
                       norm_gradient,
                       soften,
                       soften_gradient};

}  // namespace lattice::LATTICE_ISA
