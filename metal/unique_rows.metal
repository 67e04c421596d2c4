// Sorted unique coordinate rows: 64-bit keys that compare as rows do, where equal
// rows begin, and the places of all of them. The sort between is MLX's.
//
//   coords --pack--> keys --mx.argsort--> order --group starts--> 1 0 0 1 1 0 ...
//                                                --cumsum--> place --scatter--> rows
//
// A key is the row's number in the box of all rows, times N, plus the row's own index.
// So keys are unique, and the order is the same with any sort. Traffic: 4 W bytes read
// and 8 written a row to pack, 8 W read to compare neighbours. Used for rows that may
// repeat: a user's, and those of several hash tables; a single one's are unique, and get
// their keys in hash_table.metal. Boxes of more cells than keys can number are left to
// the portable builder.

#include <metal_stdlib>
using namespace metal;

// One thread a row. `least` and `weight` are the box, W of each.
template <int W>
METAL_FUNC void pack_rows(
    const device int* coords,
    const device int64_t* least,
    const device int64_t* weight,
    device int64_t* keys,
    uint at) {
  int64_t key = int64_t(at);
  for (int c = 0; c < W; ++c)
    key += (int64_t(coords[size_t(at) * W + c]) - least[c]) * weight[c];
  keys[at] = key;
}

// One thread a sorted place: 1 where equal rows begin.
template <int W>
METAL_FUNC void group_starts(
    const device int* coords, const device int* order, device int* starts, uint at) {
  bool first = at == 0;
  if (!first) {
    const device int* a = coords + size_t(order[at]) * W;
    const device int* b = coords + size_t(order[at - 1]) * W;
    for (int c = 0; c < W; ++c) first = first || a[c] != b[c];
  }
  starts[at] = first ? 1 : 0;
}

// One thread a sorted place: the unique rows, and the place of each given row among them.
template <int W>
METAL_FUNC void write_unique_rows(
    const device int* coords,
    const device int* order,
    const device int* starts,
    const device int* ends,
    device int* rows,
    device int* inverse,
    uint at) {
  const int unique = ends[at] - 1, from = order[at];
  inverse[from] = unique;
  if (starts[at] == 0) return;
  for (int c = 0; c < W; ++c)
    rows[size_t(unique) * W + c] = coords[size_t(from) * W + c];
}
