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

// One thread an (offset, output row); `transposed` starts as -1.
void transpose_table(
    const device int* table,
    const constant int* sizes,
    device int* transposed,
    uint2 at) {
  const int volume = sizes[0];
  int i = table[size_t(at.y) * volume + at.x];
  if (i >= 0) transposed[size_t(i) * volume + at.x] = int(at.y);
}

// Kernel-major edges. One thread an (offset, block of rows): counts (K, blocks).
void count_edges(
    const device int* table, const constant int* sizes, device int* counts, uint2 at) {
  const int volume = sizes[0], rows = sizes[1], block = sizes[2], blocks = sizes[3];
  const int start = int(at.y) * block, stop = min(rows, start + block);
  int count = 0;
  for (int o = start; o < stop; ++o)
    count += table[size_t(o) * volume + at.x] >= 0 ? 1 : 0;
  counts[size_t(at.x) * blocks + at.y] = count;
}

// The same threads write their edges behind ends[...] - counts[...]: sorted by (k, o).
void write_edges(
    const device int* table,
    const device int* counts,
    const device int64_t* ends,
    const constant int* sizes,
    device int* edges,
    uint2 at) {
  const int volume = sizes[0], rows = sizes[1], block = sizes[2], blocks = sizes[3];
  const int start = int(at.y) * block, stop = min(rows, start + block);
  const size_t slot = size_t(at.x) * blocks + at.y;
  size_t place = size_t(ends[slot]) - counts[slot];
  for (int o = start; o < stop; ++o) {
    int i = table[size_t(o) * volume + at.x];
    if (i < 0) continue;
    device int* edge = edges + 3 * place++;
    edge[0] = i;
    edge[1] = o;
    edge[2] = int(at.x);
  }
}

// Edges by output row. One thread a row.
void count_row_edges(
    const device int* table, const constant int* sizes, device int* counts, uint row) {
  const int volume = sizes[0];
  int count = 0;
  for (int k = 0; k < volume; ++k)
    count += table[size_t(row) * volume + k] >= 0 ? 1 : 0;
  counts[row] = count;
}

// One thread a row writes its edges from starts[row] on: sorted by (o, k).
void write_row_edges(
    const device int* table,
    const device int* starts,
    const constant int* sizes,
    device int* edges,
    uint row) {
  const int volume = sizes[0];
  size_t place = size_t(starts[row]);
  for (int k = 0; k < volume; ++k) {
    int i = table[size_t(row) * volume + k];
    if (i < 0) continue;
    device int* edge = edges + 3 * place++;
    edge[0] = i;
    edge[1] = int(row);
    edge[2] = k;
  }
}

// One thread a (word, block of rows): bit b of word w is set where any row of the block
// uses offset 32 w + b.
void occupancy_masks(
    const device int* table, const constant int* sizes, device uint* masks, uint2 at) {
  const int volume = sizes[0], rows = sizes[1], block = sizes[2], words = sizes[3];
  const int start = int(at.y) * block, stop = min(rows, start + block);
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
// unique.
void gray_keys(
    const device int* table,
    const constant int* sizes,
    device int64_t* keys,
    uint row) {
  const int volume = sizes[0], rows = sizes[1];
  const int word_bits = sizes[2], tie_bits = sizes[3];
  long key = 0;
  int parity = 0, bits = 0, word = 0;
  for (int k = volume - 1; k >= 0; --k) {
    parity ^= table[size_t(row) * volume + k] >= 0 ? 1 : 0;
    key = key << 1 | long(parity);
    if (++bits == word_bits && k > 0) {
      keys[size_t(word++) * rows + row] = key;
      key = 0;
      bits = 0;
    }
  }
  if (tie_bits > 0) key = key << tie_bits | long(row);
  keys[size_t(word) * rows + row] = key;
}
