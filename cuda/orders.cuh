// What the scout of sorted_implicit_gemm_hopper hands to the warps that copy: which
// offsets of which channels make a stage, and which blocks of 64 rows use them.
//
//   masks of 32 rows --> offsets of the tile, each with a bit a block --> orders, stage by
//   stage: one offset of 64 channels, two of 32, four of 16, or runs of several

namespace lattice {

// The four runs of 16 summed channels in a stage, as (live offset's ordinal, channel).
// RUNS of an offset: 1, 2, or 4 (a multiple of 64 channels); 0 if not known.
template <int RUNS>
struct StageRuns {
  int ordinal[4], channel[4];
  int padded;

  __device__ __forceinline__ StageRuns(int first, int c_in) {
    padded = (c_in + 15) & ~15;
    const int runs = RUNS == 1 || RUNS == 2 ? RUNS : padded >> 4;
#pragma unroll
    for (int g = 0; g < 4; ++g) {
      ordinal[g] = first + g / runs;
      channel[g] = (g % runs) << 4;
    }
  }

  __device__ __forceinline__ void advance() {
#pragma unroll
    for (int g = 0; g < 4; ++g) {
      if constexpr (RUNS == 1 || RUNS == 2) {
        ordinal[g] += 4 / RUNS;
      } else {
        channel[g] += STAGE_CHANNELS;
        while (channel[g] >= padded) {
          channel[g] -= padded;
          ++ordinal[g];
        }
      }
    }
  }
};

// What the scout tells the copying warps of one stage, or of one offset's stages.
struct Order {
  unsigned entries[4];  // for each run: offset | blocks that use it << 16; 0 for none
  int channels[4];      // and its first channel
  int first_column;
  int last;  // 1: the tile's last; 3: the block's last too
};

// Lists the offsets that a tile uses, as k | blocks that use it << 16. Returns how many.
// first: the lane's word of masks for the first 32 offsets, read ahead.
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
