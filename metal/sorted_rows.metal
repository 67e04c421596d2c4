// Sorted unique coordinate rows: 64-bit keys that compare as rows do, runs of equal
// rows, and the places of all of them. The sort between is MLX's.
//
//   coords --pack--> keys --mx.argsort--> order --run starts--> 1 0 0 1 1 0 ...
//                                                --cumsum--> place --scatter--> rows
//
// A key is the row's number in the box of all rows, times N, plus the row's own index:
// keys are unique, so the order is the same with any sort. Traffic: 4 W bytes read and
// 8 written a row to pack, 8 W read to compare neighbours. Used wherever a new set is
// made; boxes of more cells than keys can number are left to the portable builder.

#include <metal_stdlib>
using namespace metal;

// One thread a row. `least` and `weight` are the box, W of each.
template <int W>
void pack_rows(
    const device int* coords,
    const device int64_t* least,
    const device int64_t* weight,
    device int64_t* keys,
    uint row) {
  long key = long(row);
  for (int c = 0; c < W; ++c)
    key += (long(coords[size_t(row) * W + c]) - long(least[c])) * long(weight[c]);
  keys[row] = key;
}

// One thread a sorted place: 1 where a run of equal rows starts.
template <int W>
void run_starts(
    const device int* coords, const device int* order, device int* starts, uint place) {
  bool first = place == 0;
  if (!first) {
    const device int* a = coords + size_t(order[place]) * W;
    const device int* b = coords + size_t(order[place - 1]) * W;
    for (int c = 0; c < W; ++c) first = first || a[c] != b[c];
  }
  starts[place] = first ? 1 : 0;
}

// One thread a sorted place: the unique rows, and for every given row its place among
// them.
template <int W>
void write_unique_rows(
    const device int* coords,
    const device int* order,
    const device int* starts,
    const device int* ends,
    device int* rows,
    device int* inverse,
    uint place) {
  int unique = ends[place] - 1, from = order[place];
  inverse[from] = unique;
  if (starts[place] == 0) return;
  for (int c = 0; c < W; ++c)
    rows[size_t(unique) * W + c] = coords[size_t(from) * W + c];
}
