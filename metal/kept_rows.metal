// Rows that a mask keeps, in their order: which they are, their coordinates, and where
// each row stands among them, or -1. ends are the running sums of the mask, MLX's scan.
// Traffic: 5 + 4 W bytes read of a row and 4 written, 4 + 4 W written of a kept one.

#include <metal_stdlib>
using namespace metal;

// One thread a row from sizes.first on; kept rows after the first sizes.before.
template <int W>
METAL_FUNC void kept_rows(
    const device bool* mask,
    const device int* ends,
    const device int* coords,
    KeptRowsSizes sizes,
    device int* rows,
    device int* kept,
    device int* places,
    uint at) {
  const size_t row = size_t(sizes.first) + at;
  const bool keep = mask[row];
  const int place = ends[row] - 1;
  places[at] = keep ? place : -1;
  if (!keep) return;
  const size_t to = size_t(place - sizes.before);
  rows[to] = int(row);
  for (int c = 0; c < W; ++c) kept[to * W + c] = coords[row * W + c];
}
