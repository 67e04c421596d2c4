// What follows the int32 sums of a contraction of int8, four channels of a row at a time:
//
//   v = act(float(sum) * scale + shift + residual), in that order;
//   y = v in the dtype of the output, or int8: v * out_inverse, rounded half to even,
//   from -127 to 127
//
// Every operation is rounded by itself, none are fused, so that all kernels of all
// backends give the same bits. Scale and shift by channel; a residual of floats, or of
// int8 times residual_scale; all may be null, and partial sums are written as they are.
// Traffic: the residual once; the rest from the caches. Reads matrix_tiles.metal and
// epilogue.metal too.

// R: the dtype of the residual.
template <int ACTIVATION, typename R>
struct IntegerEpilogue {
  const device float* scale;
  const device float* shift;
  const device R* residual;
  const device float* residual_scale;
  const device float* out_inverse;

  METAL_FUNC static float activate(float v) {
    if (ACTIVATION == CODE_RELU) return v <= 0.0f ? 0.0f : v;  // a NaN stays
    return activated_by_code<ACTIVATION>(v);
  }

  // Finishes the sums of the `left` first of four channels, from c on, of a row of C_y.
  template <typename INDEX>
  METAL_FUNC void finish(
      thread float4& sums, INDEX row, int c_y, int c, int left) const thread {
#pragma METAL fp contract(off)
    Four<R> added;
    if (residual) fetch(added, residual + (row * INDEX(c_y) + INDEX(c)), left);
    for (int j = 0; j < 4; ++j) {
      if (j >= left) break;
      float v = sums[j];
      if (scale) v = v * scale[c + j];
      if (shift) v = v + shift[c + j];
      if (residual) {
        float more = float(added.v[j]);
        if (residual_scale) more = more * residual_scale[0];
        v = v + more;
      }
      v = activate(v);
      if (out_inverse) v = clamp(rint(v * out_inverse[0]), -127.0f, 127.0f);
      sums[j] = v;
    }
  }
};

// Writes what follows four sums, the `left` first of them, of a row of C_y from c on.
template <typename OUT, int ACTIVATION, typename R>
METAL_FUNC void write_line(
    device OUT* to, const thread IntegerEpilogue<ACTIVATION, R>& after,
    const thread int4& sums, size_t row, int c_y, int c, int left) {
  float4 line;
  for (int j = 0; j < 4; ++j) line[j] = float(sums[j]);
  after.finish(line, row, c_y, c, left);
  write_sums(to, line, left);
}

// Writes partial sums.
template <int ACTIVATION, typename R>
METAL_FUNC void write_line(
    device int* to, const thread IntegerEpilogue<ACTIVATION, R>& after,
    const thread int4& sums, size_t row, int c_y, int c, int left) {
  Four<int> line;
  for (int j = 0; j < 4; ++j) line.v[j] = sums[j];
  if (left >= 4) {
    *(device Four<int>*)(to) = line;
    return;
  }
  for (int j = 0; j < 4; ++j)
    if (j < left) to[j] = line.v[j];
}
