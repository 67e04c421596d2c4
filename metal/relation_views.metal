// Views of a relation, made from its neighbour table (N_out, K) int32, -1 for no edge.
//
//   table --transpose--> (N_in, K)        --count, scan, write--> edges (E, 3)
//         --Gray rank--> sort keys, K bits --sort--> rows and masks in that order
//
// The threads of a simdgroup read neighbouring offsets of one row, or of several rows as
// one array, so every table byte is read once, in order. Four rows have as many blocks of
// 16 bytes as a row has offsets: transposing and counting read a block a thread.
// Traffic per entry: 4 bytes read; 4 scattered to transpose, 8 read and 12 written an edge
// to list; to order, a bit written and after the sort 4 bytes read and 4 written. No
// atomics: every place follows from counts, so views are the same bits whatever the order
// of threads. Wins over sorting edges from the first row on.

#include <metal_stdlib>
using namespace metal;

// Which entries of four rows a block of 16 bytes has.
struct FourPlaces {
  int row[4], offset[4];

  METAL_FUNC FourPlaces(int block, int volume) thread {
    for (int j = 0; j < 4; ++j) {
      row[j] = 0;
      offset[j] = 4 * block + j;
      for (int r = 1; r < 4; ++r) {
        if (offset[j] < volume) continue;
        offset[j] -= volume;
        row[j] = r;
      }
    }
  }
};

// That block of entries: `left` of them, -1 behind the last row.
METAL_FUNC int4 four_entries(const device int* from, int left, bool wide) {
  if (wide && left >= 4) return *(const device int4*)(from);
  int4 entries = int4(-1);
  for (int j = 0; j < 4; ++j)
    if (j < left) entries[j] = from[j];
  return entries;
}

// Whether blocks of a table begin at multiples of 16 bytes: a view may begin anywhere.
METAL_FUNC bool blocks_are_wide(const device int* table) {
  const device char* none = nullptr;
  return ((const device char*)table - none) % 16 == 0;
}

// One thread a block of four rows; `transposed` starts as -1.
METAL_FUNC void transpose_table(
    const device int* table,
    TransposeTableSizes sizes,
    device int* transposed,
    uint2 at) {
  const int volume = sizes.volume, first = 4 * int(at.y), block = 4 * int(at.x);
  const int left = min(sizes.rows - first, 4) * volume - block;
  const device int* from = table + (size_t(first) * volume + block);
  const int4 entries = four_entries(from, left, blocks_are_wide(table));
  const FourPlaces places(int(at.x), volume);
  for (int j = 0; j < 4; ++j)
    if (entries[j] >= 0)
      transposed[size_t(entries[j]) * volume + places.offset[j]] =
          first + places.row[j];
}

// Kernel-major edges, counted: one thread (a block of every four rows, a block of rows)
// gives counts (offsets, blocks, every fourth row). sizes.block: the rows of a block, a
// multiple of four.
METAL_FUNC void count_edges(
    const device int* table, ListEdgesSizes sizes, device int* counts, uint2 at) {
  const int volume = sizes.volume, blocks = sizes.blocks;
  const int start = int(at.y) * sizes.block, stop = min(sizes.rows, start + sizes.block);
  const bool wide = blocks_are_wide(table);
  const int block = 4 * int(at.x);
  int left = (stop - start) * volume - block;
  const device int* from = table + (size_t(start) * volume + block);
  int4 found = int4(0);
  for (int o = start; o < stop; o += 4, from += 4 * volume, left -= 4 * volume) {
    const int4 entries = four_entries(from, left, wide);
    for (int j = 0; j < 4; ++j) found[j] += entries[j] >= 0 ? 1 : 0;
  }
  const FourPlaces places(int(at.x), volume);
  device int* to = counts + 4 * size_t(at.y);
  for (int j = 0; j < 4; ++j)
    to[4 * size_t(places.offset[j]) * blocks + places.row[j]] = found[j];
}

// One thread an (offset, block of rows) writes its edges from their place on: sorted by
// (k, o).
METAL_FUNC void write_edges(
    const device int* table,
    const device int64_t* places,
    ListEdgesSizes sizes,
    device int* edges,
    uint2 at) {
  const int volume = sizes.volume, blocks = sizes.blocks;
  const int start = int(at.y) * sizes.block, stop = min(sizes.rows, start + sizes.block);
  const device int* entry = table + size_t(start) * volume + at.x;
  device int* edge = edges + 3 * size_t(places[size_t(at.x) * blocks + at.y]);
  for (int o = start; o < stop; ++o, entry += volume) {
    const int i = *entry;
    if (i < 0) continue;
    edge[0] = i;
    edge[1] = o;
    edge[2] = int(at.x);
    edge += 3;
  }
}

// Rows of a table in an order, and what blocks of them use: bit b of word w of a mask is
// set where any row of the block uses offset 32 w + b. One simdgroup a block, whose
// lanes have neighbouring offsets of a row. sizes.block: the rows of a block, sizes.rows:
// of the table.
METAL_FUNC void ordered_table(
    const device int* table,
    const device int* order,
    OrderedTableSizes sizes,
    device int* ordered,
    device uint* masks,
    uint2 at) {
  const int volume = sizes.volume, words = sizes.words, block = sizes.block;
  const int place = int(at.y) * block, count = min(block, sizes.rows - place);
  for (int word = 0; word < words; ++word) {
    const int k = 32 * word + int(at.x);
    device int* to = ordered + size_t(place) * volume + k;
    bool used = false;
    for (int j = 0; j < count && k < volume; ++j, to += volume) {
      const int i = table[size_t(order[place + j]) * volume + k];
      *to = i;
      used = used || i >= 0;
    }
    const ulong votes = ulong(simd_ballot(used));
    if (at.x == 0) masks[size_t(at.y) * words + word] = uint(votes);
  }
}

// The rank of each row's mask among Gray codes: the prefix parity of its bits, read
// from the highest offset down. One lane a row; keys (words, columns), the first
// leading. A simdgroup reads its 32 rows as one array, a whole line at a time, and votes
// on each. Keys behind the sizes.rows rows fill up the last region: all ones, as no
// rank is, of which at least one bit is nothing's.
template <typename KEY, typename MASK>
METAL_FUNC void gray_keys(
    const device int* table,
    GrayKeysSizes sizes,
    device KEY* keys,
    uint2 at) {
  constexpr int BITS = 8 * int(sizeof(KEY));
  const int volume = sizes.volume, lane = int(at.x), columns = sizes.columns;
  const int column = 32 * int(at.y) + lane;
  const size_t start = 32 * size_t(at.y);
  const size_t end = size_t(sizes.rows) * volume;
  bool odd = false;
  for (int word = 0; word < sizes.words; ++word) {
    const int low = (sizes.words - 1 - word) * BITS, bits = min(BITS, volume - low);
    MASK mask = 0;
    for (int j = 0; j < volume; ++j) {
      const size_t entry = start * volume + 32 * j + lane;
      const bool used = entry < end && table[entry] >= 0;
      const uint votes = uint(ulong(simd_ballot(used)));
      const int shift = 32 * j - lane * volume - low;
      if (shift >= 0 && shift < bits) mask |= MASK(votes) << shift;
      if (shift < 0 && shift > -32) mask |= MASK(votes >> -shift);
    }
    const MASK ones = ~MASK(0) >> (8 * int(sizeof(MASK)) - bits);
    mask &= ones;
    MASK rank = mask;
    for (int by = 1; by < BITS; by *= 2) rank ^= rank >> by;
    const bool passed = odd != (rank % 2 == 1);
    if (odd) rank ^= ones;
    odd = passed;
    const bool real = start + lane < size_t(sizes.rows);
    if (column < columns)
      keys[size_t(word) * columns + column] = real ? KEY(rank) : KEY(~MASK(0));
  }
}
