// y = before + partial[0] + partial[1] + ... + bias: the splits of a sum, in order.
//
//   thread (block b, line n):  partial[s][n, 4 b .. 4 b + 3] of every split s
//                              one float4 --> y[place of n, 4 b .. 4 b + 3]
//
// Partial sums are (splits, lines, channels) float32: lines are sorted rows of y, which
// are put in place here, or those of dW, (K x C_in). Splits and their order depend on
// sizes only, so the bits are the same on every run. Traffic: all partials once. Reads
// matrix_tiles.metal and epilogue.metal too.

// `rows`, where given, are the rows that lines belong to, from `first` on. What of the
// epilogue and `before` is given is added; a residual asks for rows.
template <typename T, int ACTIVATION = BIAS_ALONE, typename P = T, int EPS = 0>
METAL_FUNC void add_splits(
    const device float* partial,
    const device int* rows,
    const device Given<P>* bias,
    const device Given<P>* scale,
    const device float* mean,
    const device float* var,
    const device T* residual,
    const device float* before,
    const thread AddSplitsSizes& sizes,
    device T* y,
    uint2 at) {
  const int c = 4 * int(at.x), left = sizes.channels - c, n = int(at.y);
  const size_t to = rows ? size_t(rows[sizes.first + n] - sizes.first) : size_t(n);
  float4 sum = float4(0);
  if (before) {
    for (int j = 0; j < 4; ++j)
      if (j < left) sum[j] = before[size_t(n) * sizes.channels + c + j];
  }
  for (int s = 0; s < sizes.splits; ++s) {
    Four<float> part;
    fetch(part, partial + (size_t(s) * sizes.lines + n) * sizes.channels + c, left);
    for (int j = 0; j < 4; ++j) sum[j] += part.v[j];
  }
  const Epilogue<T, ACTIVATION, P, EPS> after = {bias, scale, mean, var, residual};
  const size_t row = rows ? size_t(rows[sizes.first + n]) : size_t(n);
  after.finish(sum, row, sizes.channels, c, left);
  write_sums(y + to * sizes.channels + c, sum, left);
}
