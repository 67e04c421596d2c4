// The rows of a neighbour table in sorted order, offset by offset.
//
// A warp takes 32 rows of the table, 32 offsets at a time, through shared memory: read
// along the rows, written along the offsets, so that both sides move whole sectors.
// Traffic: 4 K bytes a row, in and out.

namespace lattice {

constexpr int SLAB = 32;            // offsets that go through shared memory at a time
constexpr int ROW_ALIGNMENT = 384;  // every height of WideTile divides it

// The rows that tiles of n rows are padded to.
__device__ __forceinline__ int pitch_of(int n) {
  return (n + ROW_ALIGNMENT - 1) / ROW_ALIGNMENT * ROW_ALIGNMENT;
}

// Entries k0 ... of this lane's row (or none: -1) into slab[lane], by whole rows.
__device__ __forceinline__ void load_slab(const int* table, int (*slab)[SLAB + 1],
                                          int row, int k0, int volume) {
  const int lane = threadIdx.x & 31;
  __syncwarp();
#pragma unroll 16
  for (int r = 0; r < 32; ++r) {
    const long long from = __shfl_sync(~0u, row, r);
    const bool there = from >= 0 && k0 + lane < volume;
    slab[r][lane] = there ? __ldcg(table + from * volume + k0 + lane) : -1;
  }
  __syncwarp();
}

// sorted (volume, pitch) = table[rows] the other way round, -1 past the n rows; masks
// (pitch / 32, words): the offsets that any of 32 rows uses. A warp takes the 32 rows
// whose lane is at: all, or none of them, are below pitch.
__device__ __forceinline__ void sort_table(int (*slab)[SLAB + 1], long long at,
                                           const int* table, const int* rows,
                                           int* sorted, unsigned* masks, int n, int pitch,
                                           int volume) {
  if (at >= pitch) return;
  const int lane = threadIdx.x & 31, words = (volume + 31) / 32;
  const int row = at < n ? __ldcg(rows + at) : -1;
  for (int word = 0; word < words; ++word) {
    load_slab(table, slab, row, 32 * word, volume);
    unsigned used = 0;
    for (int bit = 0; bit < 32 && 32 * word + bit < volume; ++bit) {
      const int i = slab[lane][bit];
      sorted[(long long)(32 * word + bit) * pitch + at] = i;
      used |= (unsigned)(__ballot_sync(~0u, i >= 0) != 0) << bit;
    }
    if (lane == 0) masks[at / 32 * words + word] = used;
  }
}

}  // namespace lattice
