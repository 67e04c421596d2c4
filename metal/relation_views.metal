// Views of a relation, made from its neighbour table (N_out, K) int32, -1 for no edge.
//
//   table --transpose--> (N_in, K)            --count, scan, write--> edges (E, 3)
//         --occupancy--> K bits a row or block  --Gray rank--> sort keys
//
// The threads of a simdgroup read neighbouring offsets of one row, so every table byte
// is read once, in order. Traffic per entry: 4 bytes read; 4 scattered to transpose, 8
// read and 12 written an edge to list, a bit written to mask. No atomics: every place
// follows from counts, so views are the same bits whatever the order of threads. Wins
// over sorting edges from the first row on.

#include <metal_stdlib>
using namespace metal;

// One thread an (offset, output row) for some of the offsets; `transposed`, of those,
// starts as -1. sizes.first: the first of the offsets, sizes.columns: how many.
METAL_FUNC void transpose_table(
    const device int* table,
    TransposeTableSizes sizes,
    device int* transposed,
    uint2 at) {
  int i = table[size_t(at.y) * sizes.volume + sizes.first + at.x];
  if (i >= 0) transposed[size_t(i) * sizes.columns + at.x] = int(at.y);
}

// Kernel-major edges. One thread an (offset, block of rows), for some of the offsets:
// counts (offsets, blocks). sizes.first: the first of the offsets, sizes.block: the rows
// of a block.
METAL_FUNC void count_edges(
    const device int* table, ListEdgesSizes sizes, device int* counts, uint2 at) {
  const int volume = sizes.volume, blocks = sizes.blocks;
  const int start = int(at.y) * sizes.block, stop = min(sizes.rows, start + sizes.block);
  const size_t k = size_t(sizes.first) + at.x;
  int count = 0;
  for (int o = start; o < stop; ++o)
    count += table[size_t(o) * volume + k] >= 0 ? 1 : 0;
  counts[size_t(at.x) * blocks + at.y] = count;
}

// The same threads write their edges from their place on: sorted by (k, o).
METAL_FUNC void write_edges(
    const device int* table,
    const device int64_t* places,
    ListEdgesSizes sizes,
    device int* edges,
    uint2 at) {
  const int volume = sizes.volume, blocks = sizes.blocks;
  const int start = int(at.y) * sizes.block, stop = min(sizes.rows, start + sizes.block);
  const size_t k = size_t(sizes.first) + at.x;
  size_t place = size_t(places[size_t(at.x) * blocks + at.y]);
  for (int o = start; o < stop; ++o) {
    int i = table[size_t(o) * volume + k];
    if (i < 0) continue;
    device int* edge = edges + 3 * place++;
    edge[0] = i;
    edge[1] = o;
    edge[2] = int(k);
  }
}

// One thread a (word, block of rows): bit b of word w is set where any row of the block
// uses offset 32 w + b. sizes.first: the first block, sizes.block: the rows of one.
METAL_FUNC void occupancy_masks(
    const device int* table, OccupancyMasksSizes sizes, device uint* masks, uint2 at) {
  const int volume = sizes.volume, words = sizes.words, block = sizes.block;
  const int start = (sizes.first + int(at.y)) * block;
  const int stop = min(sizes.rows, start + block);
  const int k0 = 32 * int(at.x), bits = min(32, volume - k0);
  uint mask = 0;
  for (int o = start; o < stop; ++o)
    for (int b = 0; b < bits; ++b)
      if (table[size_t(o) * volume + k0 + b] >= 0) mask |= 1u << b;
  masks[size_t(at.y) * words + at.x] = mask;
}

// The rank of each row's mask among Gray codes: the prefix parity of its bits, read
// from the highest offset down. One thread a row; keys (words, N) of 62 bits a word,
// the first leading. With `tie_bits` the row's own index follows, so that keys are
// unique. sizes.first: the first of sizes.rows rows.
METAL_FUNC void gray_keys(
    const device int* table,
    GrayKeysSizes sizes,
    device int64_t* keys,
    uint at) {
  const int volume = sizes.volume, rows = sizes.rows;
  const int word_bits = sizes.word_bits, tie_bits = sizes.tie_bits;
  const size_t row = size_t(sizes.first) + at;
  long key = 0;
  int parity = 0, bits = 0, word = 0;
  for (int k = volume - 1; k >= 0; --k) {
    parity ^= table[row * volume + k] >= 0 ? 1 : 0;
    key = key << 1 | long(parity);
    if (++bits == word_bits && k > 0) {
      keys[size_t(word++) * rows + at] = key;
      key = 0;
      bits = 0;
    }
  }
  if (tie_bits > 0) key = key << tie_bits | long(row);
  keys[size_t(word) * rows + at] = key;
}
