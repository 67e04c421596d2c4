// The prefetch warp of sorted_implicit_gemm_hopper, and what it hands to the producer
// warps: which channels of which offsets make a stage, and which blocks of 64 rows use
// them.
//
//   masks of 32 rows --> offsets of the tile, each with a bit a block --> a StageSource a
//   stage: one offset of 64 channels, two pieces of 32, four of 16, or slices of several
//
// A slice is 16 summed channels of one offset (8 of float32), the depth of one wgmma; a
// stage has four. Needs hopper.cuh.

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

// What the prefetch warp does: for each tile of the thread block it lists the offsets, and
// for each stage of them hands over a StageSource and fetches the row indices of its
// OFFSETS, up to AHEAD stages before they are copied.
template <int SLICES, int WIDTH, int BM, int BN, int AHEAD, int OFFSETS>
__device__ __forceinline__ void send_stage_sources(
    const int* table, const unsigned* masks, int pitch, int volume, int c_in, int tiles,
    int column_tiles, unsigned* live, int (&indices)[AHEAD][OFFSETS][BM],
    StageSource (&sources)[AHEAD], Ring<AHEAD>& ring) {
  const int split = blockIdx.y, splits = gridDim.y, lane = threadIdx.x & 31;
  const int words = (volume + 31) / 32;
  auto masks_of = [&](int tile) {
    return masks + ((long long)(tile / column_tiles) * (BM / 32) + lane) * words;
  };
  auto has_masks = [&](int tile) {
    return tile < tiles && lane < BM / 32 &&
           tile / column_tiles * (BM / 32) + lane < pitch / 32;
  };
  RingPosition<AHEAD> next;
  unsigned mask = has_masks(blockIdx.x) ? __ldg(masks_of(blockIdx.x)) : 0;
  for (int tile = blockIdx.x; tile < tiles; tile += gridDim.x) {
    __syncwarp();
    const int count = list_offsets_of_blocks<BM / 64>(
        live, mask, masks_of(tile), has_masks(tile), words);
    const int after = tile + gridDim.x;
    mask = has_masks(after) ? __ldg(masks_of(after)) : 0;
    __syncwarp();
    const int begin = (int)((long long)count * split / splits);
    const int end = (int)((long long)count * (split + 1) / splits);
    StageSlices<SLICES, WIDTH> slices(begin, c_in);
    const int steps = SLICES == 4 ? end - begin
                                : ((end - begin) * (slices.padded / WIDTH) + 3) / 4;
    const int* from = table + (long long)(tile / column_tiles) * BM;
    for (int step = 0; step < max(steps, 1); ++step) {
      unsigned entries[4];
#pragma unroll
      for (int g = 0; g < 4; ++g) {
        const int ordinal = SLICES == 4 ? begin + step : slices.ordinal[g];
        entries[g] = ordinal < end ? live[ordinal] : 0;
      }
      barrier_wait(shared_address(&ring.empty[next.slot]), next.phase ^ 1);
      const unsigned used = (entries[0] | entries[1] | entries[2] | entries[3]) >> 16;
#pragma unroll
      for (int o = 0; o < OFFSETS; ++o) {
        const unsigned entry = entries[o * (4 / OFFSETS)];
        const int* row = from + (long long)(entry & 0xffff) * pitch;
#pragma unroll
        for (int q = 0; q < BM; q += 128) {
          const int at = q + 4 * lane;
          if (at < BM && entry && used >> at / 64 & 1) {
            copy16(shared_address(&indices[next.slot][o][at]), row + at, true);
          }
        }
      }
      if (lane == 0) {
        StageSource& source = sources[next.slot];
#pragma unroll
        for (int g = 0; g < 4; ++g) {
          source.entries[g] = entries[g], source.channels[g] = slices.channel[g];
        }
        source.first_column = tile % column_tiles * BN;
        source.last = step + 1 < steps ? 0 : after < tiles ? 1 : 3;
        barrier_arrive(shared_address(&ring.full[next.slot]));
      }
      barrier_arrive_after_copies(shared_address(&ring.full[next.slot]));
      next.advance();
      if constexpr (SLICES != 4) slices.advance();
    }
  }
  asm volatile("cp.async.wait_all;" ::: "memory");
}

}  // namespace lattice
