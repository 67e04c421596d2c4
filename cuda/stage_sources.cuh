// What the prefetch warp of sorted_implicit_gemm_hopper hands to the producer warps: which
// channels of which offsets make a stage, and which blocks of 64 rows use them.
//
//   masks of 32 rows --> offsets of the tile, each with a bit a block --> a StageSource a
//   stage: one offset of 64 channels, two pieces of 32, four of 16, or slices of several
//
// A slice is 16 summed channels of one offset (8 of float32), the depth of one wgmma; a
// stage has four.

namespace lattice {

// The slices of a stage, each as (ordinal of its offset in the tile's list, channel).
// SLICES of an offset come together: 1 (all of its channels), 2 (a multiple of 32), or 4
// (of 64); 0 if it varies. WIDTH: channels of a slice.
template <int SLICES, int WIDTH>
struct StageSlices {
  int ordinal[4], channel[4];
  int padded;

  __device__ __forceinline__ StageSlices(int first, int c_in) {
    constexpr int TOGETHER = SLICES == 0 ? 1 : SLICES;
    padded = (c_in + TOGETHER * WIDTH - 1) / (TOGETHER * WIDTH) * (TOGETHER * WIDTH);
    const int slices = SLICES == 1 ? 1 : padded / WIDTH;
#pragma unroll
    for (int g = 0; g < 4; ++g) {
      ordinal[g] = first + g / slices;
      channel[g] = g % slices * WIDTH;
    }
  }

  __device__ __forceinline__ void advance() {
#pragma unroll
    for (int g = 0; g < 4; ++g) {
      if constexpr (SLICES == 1) {
        ordinal[g] += 4;
      } else {
        channel[g] += 4 * WIDTH;
        while (channel[g] >= padded) {
          channel[g] -= padded;
          ++ordinal[g];
        }
      }
    }
  }
};

// What the producer warps copy into one stage, or into all stages of one offset.
struct StageSource {
  unsigned entries[4];  // of each slice: offset | blocks that use it << 16; 0 for none
  int channels[4];      // of each slice: its first channel
  int first_column;     // of the tile
  int last;             // 1: the last of its tile; 3: the last of the thread block too
};

// Lists the offsets that a tile uses, as k | blocks that use it << 16. Returns how many.
// first: the lane's word of masks for the first 32 offsets, loaded ahead.
template <int ROW_BLOCKS>
__device__ __forceinline__ int list_offsets_of_blocks(unsigned* live, unsigned first,
                                                      const unsigned* masks,
                                                      bool inside, int words) {
  const int lane = threadIdx.x & 31;
  int count = 0;
  for (int word = 0; word < words; ++word) {
    const unsigned bits = word == 0 ? first : inside ? masks[word] : 0;
    const unsigned any = __reduce_or_sync(~0u, bits);
    unsigned blocks = 0;
#pragma unroll
    for (int b = 0; b < ROW_BLOCKS; ++b) {
      const unsigned used =
          __shfl_sync(~0u, bits, 2 * b) | __shfl_sync(~0u, bits, 2 * b + 1);
      blocks |= (used >> lane & 1) << b;
    }
    if (blocks) {
      live[count + __popc(any & ((1u << lane) - 1))] = (32 * word + lane) | blocks << 16;
    }
    count += __popc(any);
  }
  return count;
}

}  // namespace lattice
