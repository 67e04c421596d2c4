// The inner loops of an instruction set, as a table of function pointers. inner_loops.cpp is compiled once per
// instruction set and fills one table; instruction_set.cpp picks the best that the processor has. The files that call
// them (contraction.cpp, weight_grad.cpp, attention.cpp, ...) are compiled once, without target flags.
#pragma once
#include <cstdint>

namespace lattice {

enum class Type : int { f32, f16, bf16 };
// The kinds of mlx_lattice/epilogue.py from `gelu` on; a new one goes before `leaky_relu`.
enum class Activation : int { none, relu, gelu, silu, gelu_tanh, leaky_relu, elu };
// An activation, and its slope below zero or, of ELU, just below zero.
struct Act {
  Activation kind = Activation::none;
  float slope = 0.0f;
  bool operator==(const Act&) const = default;
};
inline int bytes_of(Type t) { return t == Type::f32 ? 4 : 2; }

// What normalises the channels of one segment, and what its way back subtracts: (C,) each.
struct NormLine {
  const float *mean, *rstd, *scale, *bias, *shift, *turn;
};

// A panel is one (c_in, c_out) weight matrix as gather_gemm reads it: blocks of up to `lanes * vectors` output
// channels, each (c_in, width), zero-padded to whole vectors, one after the other: c_in * padded(c_out) floats.
struct InnerLoops {
  int lanes, vectors;
  int64_t padded(int64_t n) const { return (n + lanes - 1) / lanes * lanes; }

  // dst[0:n] = float(src[0:n]), and back with round-to-nearest-even.
  void (*load)(Type, const void* src, int64_t n, float* dst);
  void (*store)(Type, const float* src, int64_t n, void* dst);
  // dst (n, ldd) = float(x[rows]), x of row length ld elements.
  void (*gather)(Type, const void* x, int64_t ld, const int32_t* rows, int64_t n, int64_t c, float* dst, int64_t ldd);

  // Buckets the edges of a table's rows by offset: edge (i, o, k) goes to in[end[k]] and out[end[k]], then end[k]
  // grows by one; out is ~o at the first edge of a row. Rows without edges go to empty_rows[(*n_empty)++].
  // Returns the largest input row.
  int32_t (*bucket)(const int32_t* table, int64_t rows, int64_t volume, int32_t* in, int32_t* out, int64_t* end,
                    int32_t* empty_rows, int64_t* n_empty);

  // dst (columns, ldd) = float(src (rows, columns))^T, src of row length stride elements. Rows of dst are written to
  // padded(rows) floats, those beyond `rows` as zero.
  void (*turn)(Type, const void* src, int64_t stride, int64_t rows, int64_t columns, float* dst, int64_t ldd);
  // The panel of one (c_in, c_out) matrix whose element (c, n) is src[c * stride + n], or src[n * stride + c].
  void (*pack)(Type, const void* src, int64_t stride, bool transposed, int64_t c_in, int64_t c_out, float* panel);
  // The panel of the first c_in columns of one (c_out, stored) matrix in MLX's affine packing, 32 / bits a word; the
  // words of whole groups are stored.
  void (*dequantize)(const uint32_t* words, Type, const void* scales, const void* biases, int bits, int group_size,
                     int64_t stored, int64_t c_in, int64_t c_out, float* panel);

  // y[out[e]] += x[in[e]] @ panel for e in [0, n), in order. A negative out[e] is row ~out[e] before its first edge:
  // its sum begins at `start`. in == nullptr means x[e], out == nullptr the first edge of each y[e]. Equal out rows may
  // only be neighbours in the list. `start` and y rows hold padded(c_out) floats.
  void (*gather_gemm)(const float* x, int64_t ldx, const int32_t* in, const int32_t* out, int64_t n,
                      const float* panel, int64_t c_in, int64_t c_out, const float* start, float* y, int64_t ldy);

  // w (c_in, ldw) += sum over e of x[e]^T dy[e], both by row pointers; dy rows are readable to padded(c_out) floats.
  // Rows are packed into `room` first, n * (c_in + padded(c_out)) floats; or, where it is null, read where they are.
  void (*outer)(const float* const* x, const float* const* dy, int64_t n, int64_t c_in, int64_t c_out, float* room,
                float* w, int64_t ldw);

  // y[out[e]] += x[in[e]] * w elementwise, rows of c channels; a negative out[e] as above.
  void (*gather_multiply)(Type, const void* x, int64_t ldx, const int32_t* in, const int32_t* out, int64_t n,
                          const float* w, int64_t c, const float* start, float* y, int64_t ldy);
  // sums = activation(scale * sums + shift + residual), of n channels of a row; residual may be null.
  void (*finish)(Act, const float* scale, const float* shift, Type, const void* residual, int64_t n,
                 float* sums);
  // w += sum over e of x[in[e]] * dy[out[e]] elementwise.
  void (*gather_product)(Type, const void* x, const void* dy, const int32_t* in, const int32_t* out, int64_t n,
                         int64_t c, float* w);
  // acc[0:n] += scale * x[0:n].
  void (*accumulate)(Type, const void* x, int64_t n, float scale, float* acc);
  // acc = max(acc, x), a NaN wins; where x is taken, index = row.
  void (*maximum)(Type, const void* x, int64_t n, int32_t row, float* acc, int32_t* index);

  // Norms by channel, over rows [first, first + n) of c channels; of `rows`, where given, these are places.
  // sum += x - about, squares += (x - about)^2.
  void (*column_moments)(Type, const void* x, const int32_t* rows, int64_t first, int64_t n, int64_t c,
                         const float* about, float* sum, float* squares);
  // y = act((x - mean) * scale + bias + residual); residual may be null.
  void (*normalize_rows)(Type, const void* x, const void* residual, int64_t first, int64_t n, int64_t c,
                         const NormLine&, Act, void* y);
  // With g = dy * act' there: sum += g, products += g * (x - mean) * rstd.
  void (*norm_gradient_sums)(Type, const void* dy, const void* x, const void* residual, const int32_t* rows,
                             int64_t first, int64_t n, int64_t c, const NormLine&, Act, float* sum, float* products);
  // dx = scale * g - shift - (x - mean) * turn; dresidual, where given, = g.
  void (*norm_gradient)(Type, const void* dy, const void* x, const void* residual, int64_t first, int64_t n, int64_t c,
                        const NormLine&, Act, void* dx, void* dresidual);

  // Attention, over n rows of scores, c keys each, rows of `ld` = padded(c) floats or more.
  // peak = max(peak, s), s = exp(s - peak); total and y, rows of `width` = padded(...) floats, follow the peak as it
  // moves, and the row's sum is added to total.
  void (*soften)(float* s, int64_t ld, int64_t n, int64_t c, float* peak, float* total, float* y, int64_t width);
  // s = exp(s - lse), ds = s * (ds - delta).
  void (*soften_gradient)(float* s, float* ds, int64_t ld, int64_t n, int64_t c, const float* lse, const float* delta);
};

const InnerLoops& inner_loops();

}  // namespace lattice
