// The inner loops of int8 features, as a table of function pointers: integer_loops.cpp is compiled once per instruction
// set that multiplies integers in its own way, and instruction_set.cpp picks the best that the processor has.
#pragma once
#include <cstdint>

#include "inner_loops.h"

namespace lattice {

// The edges of one offset within a tile, as EdgeLists has them, and what they read. x rows are prepared ones. Where `in`
// and `out` are null, edge e is the only one of rows e.
struct IntegerEdges {
  const char* x;
  int64_t ldx;  // bytes
  const int32_t *in, *out;
  int64_t n;
  const int32_t* row_sums;  // of input rows, where weights are shifted, every ld_sums-th
  int64_t ld_sums;
  const float* row_scales;  // of input rows, or null
};

// What follows the sums, each operation rounded by itself: v = sum * scale + shift + residual, an activation, and
// rounding to `out` or, where out_inverse is given, to clip(rint(v * out_inverse), -127, 127).
struct IntegerFinish {
  const float *scale, *shift;  // (padded c_out); shift may be null
  Act act;
  Type out, residual;
  const float *residual_scale, *out_inverse;  // one number each, or null; a residual with a scale is int8
};

// A panel is one (c_out, c_in) weight matrix as `gather_dot` reads it: blocks of up to `lanes * vectors` output channels,
// each (steps, width), an element of it the `step` channels that one multiplication sums: step_bytes bytes.
struct IntegerLoops {
  int lanes, vectors, step, step_bytes;
  // Weights are stored plus 128, for processors that multiply unsigned by signed bytes: 128 times the sum of each
  // input row has to be taken off, exact in 32 bits that wrap.
  bool is_shifted;
  int64_t padded(int64_t n) const { return (n + lanes - 1) / lanes * lanes; }
  int64_t row_bytes(int64_t c) const { return (c + step - 1) / step * step_bytes; }
  // Whether rows of c channels are read as they are given.
  bool reads_as_given(int64_t c) const { return row_bytes(c) == c; }

  // Rows of c channels as gather_dot reads them, into `to` (rows, row_bytes(c)) unless it is null; and the sum of each,
  // unless `sums` is null.
  void (*prepare)(const int8_t* x, int64_t rows, int64_t c, char* to, int32_t* sums);
  // The int4 values of shares of `each` words, a multiple of four, times the multiplier of their share: int8.
  void (*unpack)(const uint32_t* words, int64_t shares, int64_t each, const int8_t* multipliers, int8_t* values);
  // The panel of a (c_out, stored) matrix, of which c_in columns count; the others are zeros.
  void (*pack)(const int8_t* w, int64_t stored, int64_t c_in, int64_t c_out, char* panel);

  // sums[out[e]] += x[in[e]] @ panel, rows of ld = padded(c_out) int32; a negative out[e] is row ~out[e] before its
  // first edge. Where weights are shifted, taken[out[e]] += row_sums[in[e]]: 128 times that has to be taken off.
  // With row_scales, sums are float32: += float(x[in[e]] @ panel) * row_scales[in[e]], complete.
  void (*gather_dot)(const IntegerEdges&, const char* panel, int64_t c_in, int64_t c_out, void* sums, int64_t ld,
                     int32_t* taken);
  // The same of c channels that are groups by themselves: sums[out[e]][c] += x[in[e]][c] * w[c], of rows as they are
  // given and weights that are not shifted.
  void (*gather_multiply)(const IntegerEdges&, const char* w, int64_t c, void* sums, int64_t ld);
  // One row of c channels from its sums, which are overwritten, to y.
  void (*finish)(const IntegerFinish&, void* sums, bool are_floats, int32_t taken, const void* residual, int64_t c,
                 void* y);

  // y = clip(rint(x * inverse), -127, 127).
  void (*quantise)(Type, const void* x, int64_t n, float inverse, int8_t* y);
  float (*largest)(Type, const void* x, int64_t n);  // the largest magnitude
};

const IntegerLoops& integer_loops();

}  // namespace lattice
