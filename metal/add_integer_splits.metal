// y = what follows partial[0] + partial[1] + ...: the splits of int32 sums.
//
//   thread (block b, line n):  partial[s][n, 4 b .. 4 b + 3] of every split s
//                              one int4 --> y[place of n, 4 b .. 4 b + 3]
//
// The counterpart of add_splits.metal for integer_epilogue.metal, which it reads, and
// all that that reads. Lines belong to `rows`, from `first` on, and are written there if
// PLACED. Traffic: all partials once.

template <typename T, bool PLACED, typename R, int ACTIVATION>
METAL_FUNC void add_integer_splits(
    const device int* partial,
    const device int* rows,
    const device float* scale,
    const device float* shift,
    const device Given<R>* residual,
    const device float* residual_scale,
    const device float* out_inverse,
    const thread AddSplitsSizes& sizes,
    device T* y,
    uint2 at) {
  const int c = 4 * int(at.x), left = sizes.channels - c, n = int(at.y);
  const size_t row = size_t(rows[sizes.first + n]);
  int4 sum = int4(0);
  for (int s = 0; s < sizes.splits; ++s) {
    Four<int> part;
    fetch(part, partial + (size_t(s) * sizes.lines + n) * sizes.channels + c, left);
    for (int j = 0; j < 4; ++j) sum[j] += part.v[j];
  }
  const IntegerEpilogue<ACTIVATION, R> after = {
      scale, shift, residual, residual_scale, out_inverse};
  const size_t to = PLACED ? row - size_t(sizes.first) : size_t(n);
  device T* place = y + to * sizes.channels + c;
  write_line(place, after, sum, row, sizes.channels, c, left);
}
