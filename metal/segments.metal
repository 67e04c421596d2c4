// Reductions of rows into segments: voxelising, global pooling, scattered sums.
//
//   segment s owns places starts[s] .. starts[s + 1] of the entries sorted by segment
//   thread (16 bytes of channels, or four, segment):  x[entry / K] --> sum or max
//
// Long segments are cut first, into pieces of at most 256 entries; the same kernels
// reduce the pieces again, so a cell that holds most of a scan keeps no thread busy for
// long. Any dtype, sums in float32; pieces and their order depend only on where
// segments begin, and there are no atomics: the same bits on every run. Traffic: every
// feature once, 4 bytes an entry for the order (4 more for a weight), pieces written
// and read once. Wins over scattered atomic adds where rows are shared, and over any
// sum whose order must not change. Reads table_reductions.metal too.

// entries: places (o, k) of a flat (M, K) table, or null where they are in order.
// weights, one a place, may be null.
template <typename T, typename OUT>
METAL_FUNC void sum_segments(
    const device T* x,
    const device int* entries,
    const device float* weights,
    const device int* starts,
    ReductionSizes sizes,
    device OUT* y,
    uint2 at) {
  const RowThread here(sizes, at, Sums<T>::COUNT);
  const int stop = starts[here.row + 1];
  const bool in_rows = here.volume > 1;
  Sums<T> sums;
  for (int e = starts[here.row]; e < stop; ++e) {
    const int entry = entries ? entries[e] : e;
    const float weight = weights ? weights[entry] : 1.0f;
    const uint row = in_rows ? uint(entry) / uint(here.volume) : uint(entry);
    sums.add(weight, x + here.place(size_t(row)), here.count);
  }
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
  const RowThread here(sizes, at);
  const int stop = starts[here.row + 1];
  float4 best = float4(0);
  int4 winner = int4(-1);
  for (int e = starts[here.row]; e < stop; ++e) {
    const int entry = entries ? entries[e] : e;
    const size_t from = here.place(size_t(entry));
    for (int j = 0; j < 4; ++j) {
      if (j >= here.count) continue;
      const float value = float(x[from + j]);
      const int name = names ? names[from + j] : entry;
      if (name < 0 || (winner[j] >= 0 && !beats(value, best[j]))) continue;
      best[j] = value;
      winner[j] = name;
    }
  }
  const size_t to = here.place(at.y);
  for (int j = 0; j < 4; ++j) {
    if (j >= here.count) continue;
    y[to + j] = OUT(best[j]);
    won[to + j] = winner[j];
  }
}
