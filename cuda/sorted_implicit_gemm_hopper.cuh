// PersistentTile of sorted_implicit_gemm, on Hopper: y[o] = sum over k of
// x[table[o, k]] @ W[k], and what follows, in half or bfloat16 with float32 accumulators, in
// TF32 with weights that tf32_weights prepared, or in int8 with int32 ones.
//
// Tile: 64 * CONSUMERS * BLOCKS rows, sorted by the Gray rank of their mask, by BN
// channels. One warp prefetches: it lists the offsets that the tile uses and fetches the
// row indices of several offsets ahead. The other warps of the PRODUCERS warpgroups copy
// into a stage 64 summed channels of the tile's input rows (zeros where there is none) and
// of the weights. CONSUMERS warpgroups multiply BLOCKS blocks of 64 rows each. An offset
// that no row of a block uses is skipped for that block; offsets of fewer than 64 channels
// fill a stage together, in slices of 16 channels. The grid is persistent: a thread block
// takes tile after tile, and copies for the next one while it writes the sums of this one.
// Traffic per output row: its live input rows once (per BN channels), W[k] / tile rows.
// What bounds it is the way from the L2 cache, 30 bytes a cycle and multiprocessor, and
// how fast warps issue copies. Wins at up to 64 channels, where high tiles read the
// weights seldom, and where rows have few edges; elsewhere WideTile.

namespace lattice {

// Where the operands of a stage stand in shared memory.
template <int CONSUMERS, int BLOCKS, int BN, bool TRANSPOSED, int WEIGHTS>
struct SortedStage {
  static constexpr int ROW_BLOCKS = CONSUMERS * BLOCKS;
  static constexpr int BM = 64 * ROW_BLOCKS;
  static constexpr int A_BYTES = BM * 128;
  static constexpr int B_PART = WEIGHT_BYTES<BN, !TRANSPOSED>;
  static constexpr int B_BYTES = WEIGHTS * B_PART;
  static constexpr int STAGE_BYTES = A_BYTES + B_BYTES;
  // Weights that run along the output channels and are 32 wide have rows of 64 bytes.
  static constexpr int B_SWIZZLE = !TRANSPOSED && BN == 32 ? 64 : 128;
  static_assert(ROW_BLOCKS <= 8, "a byte holds the blocks that use an offset");
};

// Names the kernel in a template: CONSUMERS warpgroups that multiply BLOCKS blocks of 64
// rows each by BN channels, PRODUCERS warpgroups that copy, STAGES in shared memory, PER
// thread blocks of 128 * (CONSUMERS + PRODUCERS) threads on a multiprocessor, and SLICES of
// an offset in a stage (see StageSlices). Float32 is multiplied as TF32 in one product, or
// in three PRODUCTS, for which weights stand twice: their high and their low part.
template <int CONSUMERS, int BLOCKS, int PRODUCERS, int BN, int STAGES, int PER, int SLICES,
          int PRODUCTS = 1>
struct PersistentTile {};

// Arguments as of sorted_implicit_gemm. W is a pointer, or PackedWeights, whose rows run
// along c_in: then TRANSPOSED is set.
template <bool TRANSPOSED, bool MIRRORED, int CONSUMERS, int BLOCKS, int PRODUCERS, int BN,
          int STAGES, int PER, int SLICES, int PRODUCTS, typename T, typename OUT,
          typename W, typename S, typename AFTER>
__device__ __forceinline__ void multiply_tiles(
    PersistentTile<CONSUMERS, BLOCKS, PRODUCERS, BN, STAGES, PER, SLICES, PRODUCTS>,
    const T* x, W w, const int* table, const int* rows, const unsigned* masks,
    const AFTER& after, const S& sizes, OUT* y) {
  const int n_out = sizes.rows, pitch = sizes.pitch, volume = sizes.volume;
  const int c_in = sizes.c_x, c_out = sizes.c_y;
  const int w_row_stride = sizes.w_row_stride;
  constexpr int WEIGHTS = PRODUCTS == 3 ? 2 : 1;  // parts of a weight
  using Tile = SortedStage<CONSUMERS, BLOCKS, BN, TRANSPOSED, WEIGHTS>;
  constexpr int BM = Tile::BM, ROW_BLOCKS = Tile::ROW_BLOCKS;
  // Channels of 16 bytes, of a stage and of a slice.
  constexpr int EACH = 16 / sizeof(T), DEPTH = 8 * EACH, WIDTH = 2 * EACH;
  static_assert(sizeof(T) < 4 || TRANSPOSED, "TF32 runs along the summed channels");
  // With three products rows and sums pass through registers.
  constexpr int HELD_ROWS = PRODUCTS == 3 ? 32 + BN / 2 : 0;
  using Registers =
      RegisterBudget<CONSUMERS, PRODUCERS, PER, BLOCKS * BN / 2 + HELD_ROWS>;
  // Offsets of one StageSource, and how many of these are prefetched.
  constexpr int OFFSETS = SLICES == 4 ? 1 : SLICES == 2 ? 2 : 4;
  constexpr int AHEAD = OFFSETS == 1 ? 8 : 4;
  constexpr int WARPS = 4 * PRODUCERS - 1;  // that copy
  extern __shared__ unsigned char lattice_shared[];
  __shared__ __align__(16) int indices[AHEAD][OFFSETS][BM];
  __shared__ StageSource sources[AHEAD];
  __shared__ Ring<AHEAD> source_ring;
  __shared__ Ring<STAGES> ring;
  __shared__ uint2 uses[STAGES];  // blocks that use each slice; whether it is the last
  __shared__ unsigned live[MAX_OFFSETS];
  __shared__ __align__(16) float2 kept[KEPT<AFTER, BN>];
  __shared__ __align__(8) float about[sums_moments<AFTER> ? BN : 2];

  const int column_tiles = (c_out + BN - 1) / BN;
  const int tiles = (n_out + BM - 1) / BM * column_tiles;
  const int split = blockIdx.y;
  const int thread = threadIdx.x, lane = thread & 31;
  const unsigned stages = (shared_address(lattice_shared) + 1023) & ~1023u;
  if (thread == 0) {
    ring.init((is_packed<W> ? 64 : 32) * WARPS + 1, 4 * CONSUMERS);
    source_ring.init(33, WARPS);
  }
  __syncthreads();

  const int group = uniform(thread / 128);
  if (group >= CONSUMERS) {
    Registers::in_producer();
    const int warp = uniform(thread / 32 - 4 * CONSUMERS);
    if (warp == WARPS) {  // the prefetch warp
      send_stage_sources<SLICES, WIDTH, BM, BN>(table, masks, pitch, volume, c_in, tiles,
                                                column_tiles, live, indices, sources,
                                                source_ring);
      return;
    }
    // A unit is 16 rows of x, or 32 chunks of the weights: a warp copies every WARPS-th.
    // Eight lanes copy a row of 128 bytes.
    const int chunk = lane & 7, low = (lane >> 3 & 1) * 4;
    constexpr int UNITS = 4 * ROW_BLOCKS, MINE = (UNITS + WARPS - 1) / WARPS;
    const unsigned x_row = c_in * sizeof(T);
    const unsigned a_lane = warp * 2048 + (lane >> 3) * 512;
    auto weight_of = [&](unsigned entry) {
      const int k = entry & 0xffff;
      return (long long)(MIRRORED ? volume - 1 - k : k) * WEIGHTS;
    };
    auto copy_rows = [&](unsigned a, const int* rows_of, const char* from, bool inside,
                         unsigned blocks, auto aligned) {
#pragma unroll
      for (int m = 0; m < MINE; ++m) {
        const int unit = warp + m * WARPS;
        // Only the last units need the branch: none stands between the other loads.
        if ((m + 1) * WARPS <= UNITS || unit < UNITS) {
          const int4 h = *reinterpret_cast<const int4*>(rows_of + unit * 16);
          const int index[4] = {h.x, h.y, h.z, h.w};
          const bool used = inside && blocks >> unit / 4 & 1;
#pragma unroll
          for (int i = 0; i < 4; ++i) {
            copy16(a + a_lane + m * WARPS * 2048 + i * 128 + ((chunk ^ low ^ i) << 4),
                   from + (unsigned long long)(unsigned)index[i] * x_row,
                   used && index[i] >= 0, aligned);
          }
        }
      }
    };
    RingPosition<STAGES> stage;
    auto begin_stage = [&](unsigned blocks, bool last) {
      barrier_wait(shared_address(&ring.empty[stage.slot]), stage.phase ^ 1);
      if (warp == 0 && lane == 0) {
        uses[stage.slot] = make_uint2(blocks, last);
        barrier_arrive(shared_address(&ring.full[stage.slot]));
      }
      return stages + stage.slot * Tile::STAGE_BYTES;
    };
    auto end_stage = [&](auto aligned) {
      const unsigned full = shared_address(&ring.full[stage.slot]);
      barrier_arrive_after_copies(full, aligned);
      // Asynchronous copies arrive when complete; what the thread stored itself, now.
      if constexpr (is_packed<W>) barrier_arrive(full);
      stage.advance();
    };
    // The weights are BN / 4 units, of which a warp copies every B_WARPS-th: its row, and a
    // chunk of it. Rows of 48 or 96 channels are copied in thirds, by a warp each.
    constexpr int THIRDS = TRANSPOSED || 32 % (BN / EACH) == 0 ? 1 : 3;
    constexpr int B_WARPS = WARPS / THIRDS, B_UNITS = BN / 4 / THIRDS;
    constexpr int B_MINE = (B_UNITS + B_WARPS - 1) / B_WARPS;
    constexpr int ACROSS = TRANSPOSED ? 8 : BN / EACH / THIRDS, DOWN = 32 / ACROSS;
    const int b_warp = warp / THIRDS;
    const int column = warp % THIRDS * ACROSS + lane % ACROSS;
    const int b_row = b_warp * DOWN + lane / ACROSS;
    auto place = [&](int row) {
      if constexpr (TRANSPOSED) return row * 128 + ((column ^ (row & 7)) << 4);
      else return (int)place_across<Tile::B_SWIZZLE>(row, column);
    };
    // Packed weights pass through registers, HELD units at a time; the first of them are
    // fetched before the stage is empty.
    constexpr int HELD = B_MINE < 6 ? B_MINE : 6;
    typename Held<W>::Chunk held[HELD];
    auto has_unit = [&](int m) {
      return m < B_MINE && (WARPS % THIRDS == 0 || b_warp < B_WARPS) &&
             ((m + 1) * B_WARPS <= B_UNITS || b_warp + m * B_WARPS < B_UNITS);
    };
    auto fetch_weights = [&](int from, unsigned entry, int column, int channel,
                           auto aligned) {
      if constexpr (is_packed<W>) {
#pragma unroll
        for (int i = 0; i < HELD; ++i) {
          if (has_unit(from + i)) {
            w.fetch(held[i], weight_of(entry), column + (from + i) * B_WARPS * DOWN,
                    channel < c_in ? channel : 0, aligned);
          }
        }
      }
    };
    auto store_weights = [&](unsigned b, unsigned entry, int first, int channel,
                           auto aligned) {
      if constexpr (is_packed<W>) {
#pragma unroll
        for (int from = 0; from < B_MINE; from += HELD) {
          if (from > 0) fetch_weights(from, entry, first, channel, aligned);
#pragma unroll
          for (int i = 0; i < HELD; ++i) {
            if (has_unit(from + i)) {
              W::store(b + place(b_row + (from + i) * B_WARPS * DOWN), held[i],
                       entry != 0 && channel < c_in);
            }
          }
        }
      }
    };

    const long long w_part = (long long)c_in * c_out * sizeof(T);
    auto copy = [&](auto aligned) {
      RingPosition<AHEAD> next;
      for (int last = 0; last != 3; next.advance()) {
        barrier_wait(shared_address(&source_ring.full[next.slot]), next.phase);
        const StageSource& source = sources[next.slot];
        last = uniform(source.last);
        const int first_column = source.first_column;
        const int of = OFFSETS == 1 ? 0 : chunk / (8 / OFFSETS);
        const int* rows_of = &indices[next.slot][of][(lane >> 3) * 4];
        const int most = first_column + (TRANSPOSED ? 0 : column * EACH);
        if constexpr (SLICES == 4) {
          // Whole stages of one offset: every address is a base and a constant step.
          const unsigned entry = uniform(source.entries[0]);
          const unsigned blocks = entry >> 16;
          const char* w_from = nullptr;
          if constexpr (!is_packed<W>) {
            const long long line = TRANSPOSED ? first_column + b_row : b_row;
            w_from = reinterpret_cast<const char*>(
                w + weight_of(entry) * sizes.w_offset_stride + line * w_row_stride +
                (TRANSPOSED ? column * EACH : most));
          }
          const unsigned w_step = B_WARPS * DOWN * w_row_stride * sizeof(T);
          const long long w_stage =
              TRANSPOSED ? 128LL : (long long)DEPTH * w_row_stride * sizeof(T);
          if (blocks == 0) begin_stage(0, true), end_stage(aligned);
#pragma unroll 1
          for (int c = 0; blocks && c < c_in; c += DEPTH, w_from += w_stage) {
            fetch_weights(0, entry, first_column + b_row, c + column * 8, aligned);
            const unsigned a =
                begin_stage(blocks * 0x01010101u, last && c + DEPTH >= c_in);
            copy_rows(a, rows_of, reinterpret_cast<const char*>(x + c) + chunk * 16, true,
                      blocks, aligned);
            store_weights(a + Tile::A_BYTES, entry, first_column + b_row, c + column * 8,
                        aligned);
#pragma unroll
            for (int m = 0; m < B_MINE; ++m) {
              if (!is_packed<W> && has_unit(m)) {
                const int row = b_row + m * B_WARPS * DOWN;
#pragma unroll
                for (int part = 0; part < WEIGHTS; ++part) {
                  copy16(a + Tile::A_BYTES + part * Tile::B_PART + place(row),
                         at_multiple(w_from + part * w_part, m, w_step),
                         (TRANSPOSED ? first_column + row : most) < c_out, aligned);
                }
              }
            }
            end_stage(aligned);
          }
          __syncwarp();
          if (lane == 0) barrier_arrive(shared_address(&source_ring.empty[next.slot]));
        } else {
          unsigned blocks = 0;
#pragma unroll
          for (int g = 0; g < 4; ++g) blocks |= source.entries[g] >> 16 << 8 * g;
          blocks = uniform(blocks);
          const unsigned own = source.entries[chunk >> 1];
          const int channel = source.channels[chunk >> 1] + (chunk & 1) * EACH;
          fetch_weights(0, own, first_column + b_row, channel, aligned);
          const unsigned a = begin_stage(blocks, last);
          copy_rows(a, rows_of, reinterpret_cast<const char*>(x + channel),
                    channel < c_in && own != 0,
                    (blocks | blocks >> 8 | blocks >> 16 | blocks >> 24) & 0xff,
                    aligned);
          store_weights(a + Tile::A_BYTES, own, first_column + b_row, channel, aligned);
#pragma unroll
          for (int m = 0; m < B_MINE; ++m) {
            if (is_packed<W> || !has_unit(m)) continue;
            const int row = b_row + m * B_WARPS * DOWN;
            const int g = TRANSPOSED ? column >> 1 : row / WIDTH;
            const unsigned entry = source.entries[g];
            const int c =
                source.channels[g] + (TRANSPOSED ? (column & 1) * EACH : row % WIDTH);
            if constexpr (!is_packed<W>) {
              const long long line = TRANSPOSED ? first_column + row : c;
              const T* from = w + weight_of(entry) * sizes.w_offset_stride +
                              line * w_row_stride + (TRANSPOSED ? c : most);
#pragma unroll
              for (int part = 0; part < WEIGHTS; ++part) {
                copy16(a + Tile::A_BYTES + part * Tile::B_PART + place(row),
                       reinterpret_cast<const char*>(from) + part * w_part,
                       entry != 0 && c < c_in &&
                           (TRANSPOSED ? first_column + row : most) < c_out,
                       aligned);
              }
            }
          }
          __syncwarp();
          if (lane == 0) barrier_arrive(shared_address(&source_ring.empty[next.slot]));
          end_stage(aligned);
        }
      }
    };
    by_alignment(copy, x, start_of(w));
    asm volatile("cp.async.wait_all;" ::: "memory");
  } else {
    Registers::in_consumer();
    RingPosition<STAGES> stage;
    auto release = [&](int of) {
      if (lane == 0) barrier_arrive(shared_address(&ring.empty[of]));
    };
    Sum<T> sums[BLOCKS][BN / 2];
    SortedResult<T, BN, Registers::BESIDE, BLOCKS, OUT, AFTER> result{
        after, kept, rows, y, n_out, split, c_out};
    TileMoments<AFTER, T, BN, 128 * CONSUMERS> moments;
    int kept_column = -1;
    for (int tile = blockIdx.x; tile < tiles; tile += gridDim.x) {
      const int first_column = tile % column_tiles * BN;
      if constexpr (AFTER::FINISHES) {
        if (first_column != kept_column) {
          named_barrier(1, 128 * CONSUMERS);  // all are through with the former ones
          keep_channels<BN>(kept, after, first_column, c_out, thread, 128 * CONSUMERS);
          named_barrier(1, 128 * CONSUMERS);
          kept_column = first_column;
        }
      }
#pragma unroll
      for (int j = 0; j < BLOCKS; ++j) {
#pragma unroll
        for (int i = 0; i < BN / 2; ++i) sums[j][i] = 0;
      }
      result.begin(tile / column_tiles * BM + group * BLOCKS * 64, first_column);
      int pending = -1;  // the stage whose product is in flight
      bool last = false;
      while (!last) {
        const int slot = stage.slot;
        barrier_wait(shared_address(&ring.full[slot]), stage.phase);
        // Read by the lane that releases the stage: only its reads precede the refill.
        const uint2 use = lane == 0 ? uses[slot] : make_uint2(0, 0);
        last = __shfl_sync(~0u, use.y, 0);
        const unsigned mine = __shfl_sync(
            ~0u, use.x >> group * BLOCKS & ((1u << BLOCKS) - 1) * 0x01010101u, 0);
        if constexpr (PRODUCTS == 3) {
          const unsigned b = stages + slot * Tile::STAGE_BYTES + Tile::A_BYTES;
          if (mine) fence_for_wgmma();
#pragma unroll
          for (int j = 0; j < BLOCKS; ++j) {
            const unsigned a =
                stages + slot * Tile::STAGE_BYTES + (group * BLOCKS + j) * 8192;
            if constexpr (SLICES == 2) {
              if (mine >> j & 1) multiply_split<BN, 2>(sums[j], a, b, 0);
              if (mine >> (16 + j) & 1) multiply_split<BN, 2>(sums[j], a, b, 2);
            } else if (mine & 0x01010101u << j) {
              multiply_split<BN, 4>(sums[j], a, b, 0);
            }
          }
          release(slot);
        } else if (mine) {
          fence_for_wgmma();
          wgmma_begin();
#pragma unroll
          for (int j = 0; j < BLOCKS; ++j) {
            const unsigned a =
                stages + slot * Tile::STAGE_BYTES + (group * BLOCKS + j) * 8192;
            const unsigned b = stages + slot * Tile::STAGE_BYTES + Tile::A_BYTES;
            auto multiply = [&](int q) {
              const auto rows_of_a = operand<128>(a + q * 32, 16, 1024);
              if constexpr (TRANSPOSED) {
                wgmma<T, BN, false, false>(sums[j], rows_of_a,
                                           operand<128>(b + q * 32, 16, 1024));
              } else if constexpr (Tile::B_SWIZZLE == 64) {
                wgmma<T, BN, false, true>(sums[j], rows_of_a,
                                          operand<64>(b + q * 1024, 4096, 512));
              } else {
                wgmma<T, BN, false, true>(sums[j], rows_of_a,
                                          operand<128>(b + q * 2048, 8192, 1024));
              }
            };
            if constexpr (SLICES == 2) {
              if (mine >> j & 1) multiply(0), multiply(1);
              if (mine >> (16 + j) & 1) multiply(2), multiply(3);
            } else {
              if (BLOCKS == 1 || mine & 0x01010101u << j) {
#pragma unroll
                for (int q = 0; q < 4; ++q) multiply(q);
              }
            }
          }
          wgmma_commit();
          // One product stays in flight; the one before is done: its stage is free.
          wgmma_wait<1>();
          if (pending >= 0) release(pending);
          pending = slot;
        } else {
          // This warpgroup skips the stage: it must not hold an earlier one meanwhile.
          wgmma_wait<0>();
          if (pending >= 0) release(pending);
          pending = -1;
          release(slot);
        }
        stage.advance();
      }
      result.ahead();
      wgmma_wait<0>();
      if (pending >= 0) release(pending);

#pragma unroll
      for (int j = 0; j < BLOCKS; ++j) result.store(sums[j], j);
      moments.begin(about, sums[0], min(BM, n_out - tile / column_tiles * BM));
#pragma unroll
      for (int j = 0; j < BLOCKS; ++j) moments.add(about, sums[j], result.row[j]);
    }
    moments.write(after, about, lattice_shared, blockIdx.x / column_tiles,
                  blockIdx.x % column_tiles * BN, c_out);
  }
}

}  // namespace lattice
