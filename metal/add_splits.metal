// y = before + partial[0] + partial[1] + ... + bias: the splits of a sum, in order.
//
//   thread (block b, line n):  partial[s][n, 4 b .. 4 b + 3] of every split s
//                              one float4 --> y[place of n, 4 b .. 4 b + 3]
//
// Partial sums are (splits, lines, channels) float32: lines are sorted rows of y, which
// are put in place here, or those of dW, (K x C_in). Splits and their order depend on
// sizes only, so the bits are the same on every run. Traffic: all partials once. Reads
// matrix_tiles.metal too.

// `rows`, where given, are the rows that lines belong to, from `first` on. `bias` and
// `before` are added where they are given.
template <typename T>
METAL_FUNC void add_splits(
    const device float* partial,
    const device int* rows,
    const device T* bias,
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
  if (bias) {
    for (int j = 0; j < 4; ++j)
      if (j < left) sum[j] += float(bias[c + j]);
  }
  write_sums(y + to * sizes.channels + c, sum, left);
}
