// Reductions of rows into segments: voxelising, global pooling, scattered sums.
//
//   segment s owns places starts[s] .. starts[s + 1] of the entries sorted by segment
//   thread (16 bytes of channels, segment):  x[entry / K] --> sum or max
//
// Long segments are cut first, into pieces of at most 256 entries; the same kernels
// reduce the pieces again, so a cell that holds most of a scan keeps no thread busy for
// long. Any dtype, sums in float32; pieces and their order depend only on where
// segments begin, and there are no atomics: the same bits on every run. Traffic: every
// feature once, 4 bytes an entry for the order (4 more for a weight), pieces written
// and read once. Wins over scattered atomic adds where rows are shared, and over any
// sum whose order must not change. Reads table_reductions.metal too.

// entries: places (o, k) of a flat (M, K) table, or null where they are in order.
// weights, one a place, may be null, and so may divisors, one a segment: 1 where those are
// less.
template <typename T, typename OUT>
METAL_FUNC void sum_segments(
    const device T* x,
    const device int* entries,
    const device float* weights,
    const device int* starts,
    const device int* divisors,
    ReductionSizes sizes,
    device OUT* y,
    uint2 at) {
  const RowThread<T> here(sizes, at);
  const bool wide = rows_are_wide(x, here.channels);
  const int stop = starts[here.row + 1];
  const bool in_rows = here.volume > 1;
  Sums<T> sums;
  for (int e = starts[here.row]; e < stop; ++e) {
    const int entry = entries ? entries[e] : e;
    const float weight = weights ? weights[entry] : 1.0f;
    const uint row = in_rows ? uint(entry) / uint(here.volume) : uint(entry);
    sums.add(weight, x + here.place(size_t(row)), here.count, wide);
  }
  sums.divide(divisors, here.row);
  sums.put(y + here.place(at.y), here.count);
}

// Of pieces, `names` are the rows that won in them, -1 in empty ones; without names an
// entry is the row. The first of equal values wins, and entries of a segment ascend.
template <typename T, typename OUT>
METAL_FUNC void max_segments(
    const device T* x,
    const device int* entries,
    const device int* names,
    const device int* starts,
    ReductionSizes sizes,
    device OUT* y,
    device int* won,
    uint2 at) {
  const RowThread<T> here(sizes, at);
  const bool wide = rows_are_wide(x, here.channels);
  const bool named = names != nullptr && rows_are_wide(names, here.channels);
  const int stop = starts[here.row + 1];
  Maxima<T> maxima;
  for (int e = starts[here.row]; e < stop; ++e) {
    const int entry = entries ? entries[e] : e;
    const size_t from = here.place(size_t(entry));
    if (names == nullptr) {
      maxima.add(x + from, here.count, wide, entry);
      continue;
    }
    Numbers<T> own;
    own.read_from(names + from, here.count, named);
    Sixteen<T> values;
    read(values, x + from, here.count, wide);
    for (int j = 0; j < Maxima<T>::COUNT; ++j)
      if (own.v[j] >= 0) maxima.take(j, float(values.v[j]), own.v[j]);
  }
  const size_t to = here.place(at.y);
  maxima.put(y + to, won + to, here.count);
}
