// What the matrix routes share: vector copies, and the offsets that a tile uses.
//
//   device rows --Four--> registers --Four--> threadgroup memory --> 8x8 matrices
//
// A tile has 64 rows and four simdgroups; blocks of eight rows without an edge of an
// offset are neither read nor multiplied for it. A Four is copied as one vector and
// needs no more than an element's alignment, so any channel count and any slice of an
// array is read in place; what lies beyond the last channel is zero in the tile.
// Nothing here is launched by itself.

#include <metal_stdlib>
#include <metal_simdgroup>
#include <metal_simdgroup_matrix>
using namespace metal;

#define UNROLL _Pragma("clang loop unroll(full)")

constant constexpr int LANES = 32, SIMDGROUPS = 4, THREADS = LANES * SIMDGROUPS;
constant constexpr int BLOCK_ROWS = 8, TILE_ROWS = 64, BLOCKS = 8;

template <typename T>
struct Four {
  T v[4];
};

// Where a piece of `total` begins, floor(total * at / pieces), of up to 65535 pieces.
METAL_FUNC int piece_start(int total, int at, int pieces) {
  const uint whole = uint(total) / uint(pieces);
  const uint rest = uint(total) - whole * uint(pieces);
  return int(whole * uint(at) + rest * uint(at) / uint(pieces));
}

// Reads four elements; those from `left` on are zero.
template <typename T>
METAL_FUNC void fetch(thread Four<T>& to, const device T* from, int left) {
  if (left >= 4) {
    to = *(const device Four<T>*)(from);
    return;
  }
  for (int j = 0; j < 4; ++j) {
    to.v[j] = T(0);
    if (j < left) to.v[j] = from[j];
  }
}

template <typename T>
METAL_FUNC void put(threadgroup T* to, const thread Four<T>& from) {
  *(threadgroup Four<T>*)(to) = from;
}

// Writes four sums, or the `left` first of them, rounded once.
template <typename OUT>
METAL_FUNC void write_sums(device OUT* to, const thread float4& sums, int left) {
  if (left >= 4) {
    Four<OUT> line;
    for (int j = 0; j < 4; ++j) line.v[j] = OUT(sums[j]);
    *(device Four<OUT>*)(to) = line;
    return;
  }
  // A fixed count unrolls, so that the sums stay in registers.
  for (int j = 0; j < 4; ++j)
    if (j < left) to[j] = OUT(sums[j]);
}

// Which of a dispatch's tiles of rows a threadgroup has, and which column of tiles:
// `together` tiles pass a column before the next column.
struct TilePlace {
  int tile, column;

  METAL_FUNC TilePlace(uint group, int together, int across, int tiles) thread {
    const int first = int(group) / (across * together) * together;
    const int passing = min(together, tiles - first);
    const int place = int(group) - first * across;
    tile = first + place % passing;
    column = place / passing;
  }
};

// The offsets that a tile uses, in order, and which blocks of its rows do. Masks are
// (blocks, words): bit b of word w stands for offset 32 w + b. COUNT: blocks at most.
template <int COUNT = BLOCKS>
struct TileOffsets {
  const device uint* masks;
  int blocks, words, volume;
  int word;
  uint all, each[COUNT];

  METAL_FUNC TileOffsets(const device uint* first, int blocks, int volume) thread
      : masks(first),
        blocks(blocks),
        words((volume + 31) / 32),
        volume(volume),
        word(-1),
        all(0) {}

  METAL_FUNC void load(int w) thread {
    word = w;
    all = 0;
    UNROLL for (int b = 0; b < COUNT; ++b) {
      each[b] = b < blocks ? masks[size_t(b) * words + w] : 0;
      all |= each[b];
    }
  }

  // The first offset from k on that the tile uses, or the volume.
  METAL_FUNC int next(int k) thread {
    while (k < volume) {
      if (k / 32 != word) load(k / 32);
      const uint rest = all >> (k % 32);
      if (rest != 0) return k + int(ctz(rest));
      k = (k / 32 + 1) * 32;
    }
    return volume;
  }

  // A bit for each block that uses the offset that next() gave.
  METAL_FUNC uint live(int k) const thread {
    uint bits = 0;
    if (k >= volume) return bits;
    UNROLL for (int b = 0; b < COUNT; ++b) bits |= (each[b] >> (k % 32) & 1u) << b;
    return bits;
  }

  // The same, a bit for each two blocks.
  METAL_FUNC uint live_pairs(int k) const thread {
    uint bits = 0;
    if (k >= volume) return bits;
    UNROLL for (int b = 0; b < COUNT / 2; ++b)
      bits |= ((each[2 * b] | each[2 * b + 1]) >> (k % 32) & 1u) << b;
    return bits;
  }

  METAL_FUNC int count() thread {
    int total = 0;
    for (int w = 0; w < words; ++w) {
      load(w);
      total += int(popcount(all));
    }
    return total;
  }
};
