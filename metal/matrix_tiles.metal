// What the matrix routes share: vector copies, and the offsets that a tile uses.
//
//   device rows --Wide--> registers --Wide--> threadgroup memory --> 8x8 matrices
//
// A tile has 64 rows and mostly four simdgroups; blocks of eight rows without an edge
// of an offset are neither read nor multiplied for it. A Wide is 16 bytes, read at once
// where all rows begin at a multiple of 16. Else, and at a row's end, it is read in
// Fours, which need no more than an element's alignment: any channel count and any
// slice of an array is read in place; what lies beyond the last channel is zero in the
// tile. Nothing here is launched by itself.

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

// What a lane moves at once.
template <typename T>
struct alignas(16) Wide {
  static constant constexpr int COUNT = 16 / int(sizeof(T));
  T v[COUNT];
};

// Elements of an array: 32 bits hold the place of each, but where arrays are FAR larger.
template <bool FAR>
struct IndexOf {
  using Type = uint;
};
template <>
struct IndexOf<true> {
  using Type = size_t;
};

// Whether an array begins at a multiple of 16 bytes: a view may begin anywhere.
template <typename T>
METAL_FUNC bool begins_wide(const device T* array) {
  const device char* none = nullptr;
  return ((const device char*)array - none) % 16 == 0;
}

// Where a split of `total` begins, floor(total * split / splits), of up to 65535 splits.
METAL_FUNC int split_start(int total, int split, int splits) {
  const uint whole = uint(total) / uint(splits);
  const uint rest = uint(total) - whole * uint(splits);
  return int(whole * uint(split) + rest * uint(split) / uint(splits));
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

// The same of a Wide; `wide`: those that are whole begin at a multiple of 16 bytes.
template <typename T>
METAL_FUNC void fetch(
    thread Wide<T>& to, const device T* from, int left, bool wide) {
  if (wide && left >= Wide<T>::COUNT) {
    to = *(const device Wide<T>*)(from);
    return;
  }
  UNROLL for (int f = 0; f < Wide<T>::COUNT; f += 4) {
    Four<T> four;
    fetch(four, from + f, left - f);
    UNROLL for (int j = 0; j < 4; ++j) to.v[f + j] = four.v[j];
  }
}

template <typename T>
METAL_FUNC void put(threadgroup T* to, const thread Four<T>& from) {
  *(threadgroup Four<T>*)(to) = from;
}

// `to` is a multiple of 16 bytes.
template <typename T>
METAL_FUNC void put(threadgroup T* to, const thread Wide<T>& from) {
  *(threadgroup Wide<T>*)(to) = from;
}

// Loads matrices of what is stored as T, or, ACROSS, their transposes, to be multiplied
// as M: chips without bfloat arithmetic multiply it as float.
template <typename T, typename M>
struct Matrices {
  template <bool ACROSS, typename FROM>
  METAL_FUNC static void load(
      thread simdgroup_matrix<M, 8, 8>& to, FROM from, int line) {
    simdgroup_matrix<T, 8, 8> stored;
    simdgroup_load(stored, from, line, ulong2(0, 0), ACROSS);
    // The storage is 64 wide; a lane owns elements 0 and 1.
    to.thread_elements()[0] = M(stored.thread_elements()[0]);
    to.thread_elements()[1] = M(stored.thread_elements()[1]);
  }
};
template <typename T>
struct Matrices<T, T> {
  template <bool ACROSS, typename FROM>
  METAL_FUNC static void load(
      thread simdgroup_matrix<T, 8, 8>& to, FROM from, int line) {
    simdgroup_load(to, from, line, ulong2(0, 0), ACROSS);
  }
};

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
      each[b] = b < blocks ? masks[uint(b * words + w)] : 0;
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
