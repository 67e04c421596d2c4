// sorted_implicit_gemm on Hopper: y[o] = sum over k of x[table[o, k]] @ W[k], in half or
// bfloat16 with float32 accumulators; W[k]^T for the input gradient (TRANSPOSED).
//
// Tile: 64 * GROUPS rows, sorted by the Gray rank of their mask, by BN channels. One
// warpgroup copies: per stage 64 summed channels of the tile's input rows (gathered by
// the neighbour table, zeros where there is none) and of the weights. GROUPS warpgroups
// multiply, 64 rows each. Offsets that no row of the tile uses are skipped; offsets of
// fewer than 64 channels share a stage, in runs of 16 channels.
// Traffic per output row: its live input rows once (per BN channels), W[k] / tile rows.
// Wins over mma.sync from C = 32 on: the product reads both operands from shared memory,
// so registers hold accumulators only and one warp's copies feed the next stages.

namespace lattice {

constexpr int STAGE_CHANNELS = 64;  // summed channels of a stage

template <int GROUPS, int PRODUCERS, int BN, int STAGES, bool TRANSPOSED>
struct SortedTile {
  static constexpr int BM = 64 * GROUPS;
  static constexpr int CONSUMERS = 128 * GROUPS;
  static constexpr int THREADS = CONSUMERS + PRODUCERS;
  static constexpr int A_BYTES = BM * 128;
  static constexpr int B_BYTES = BN * 128;
  static constexpr int STAGE_BYTES = A_BYTES + B_BYTES;
  // 1024 for the alignment of the first stage.
  static constexpr int SHARED_BYTES = STAGES * STAGE_BYTES + 1024;
  // Weights that run along the output channels and are 32 wide have rows of 64 bytes.
  static constexpr int B_SWIZZLE = !TRANSPOSED && BN == 32 ? 64 : 128;
};

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

__device__ __forceinline__ int pick(const int (&v)[4], int g) {
  return g == 0 ? v[0] : g == 1 ? v[1] : g == 2 ? v[2] : v[3];
}

// x (n_in, c_in); w (K, c_in, c_out), or (K, c_out, c_in) if TRANSPOSED; table (K, pitch)
// and rows (pitch) in sorted order; masks (pitch / 32, words); y (n_out, c_out). With
// several splits, y is float32 (splits, n_out, c_out): one partial sum for each share of
// the offsets. c_in and c_out are multiples of 8. mirrored: table is that of the
// transpose, read from its other end. W is a pointer, or PackedWeights: with these, which
// are (K, c_out, c_in), TRANSPOSED is set.
template <typename T, int GROUPS, int PRODUCERS, int BN, int STAGES, bool TRANSPOSED,
          int RUNS, typename OUT, typename W>
__device__ __forceinline__ void sorted_implicit_gemm_hopper(
    const T* x, W w, const int* table, const int* rows, const unsigned* masks,
    OUT* y, int n_out, int pitch, int volume, int c_in, int c_out, int splits,
    bool mirrored = false) {
  using Tile = SortedTile<GROUPS, PRODUCERS, BN, STAGES, TRANSPOSED>;
  constexpr int BM = Tile::BM;
  extern __shared__ unsigned char lattice_shared[];
  __shared__ unsigned long long full[STAGES], empty[STAGES];
  __shared__ unsigned short live[MAX_OFFSETS];
  __shared__ int live_count;

  const int column_tiles = (c_out + BN - 1) / BN;
  const int tile = blockIdx.x / column_tiles;
  const int first_column = (blockIdx.x % column_tiles) * BN;
  const int split = blockIdx.y;
  int thread = threadIdx.x;
  const unsigned stages = (shared_address(lattice_shared) + 1023) & ~1023u;

  if (thread == 0) {
    for (int s = 0; s < STAGES; ++s) {
      barrier_init(shared_address(&full[s]), (is_packed<W> ? 2 : 1) * PRODUCERS);
      barrier_init(shared_address(&empty[s]), 4 * GROUPS);
    }
    asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory");
  }
  if (thread < 32) {
    const int count = list_offsets(live, masks, tile * (BM / 32), BM / 32, pitch / 32,
                                   (volume + 31) / 32);
    if (thread == 0) live_count = count;
  }
  __syncthreads();

  // A mirrored table serves its transpose too: there, offset k carries W[K - 1 - k].
  auto weight_of = [&](int k) { return (long long)(mirrored ? volume - 1 - k : k); };

  // The offsets of this split, and the stages they take.
  const int begin = (int)((long long)live_count * split / splits);
  const int end = (int)((long long)live_count * (split + 1) / splits);
  const int runs = (c_in + 15) / 16;
  const int steps = ((end - begin) * runs + 3) / 4;

  if (thread >= Tile::CONSUMERS) {
    thread -= Tile::CONSUMERS;
    constexpr int HEIGHT = PRODUCERS / 8;  // threads down the tile; 8 lie across a row
    constexpr int EACH = BM / HEIGHT;      // consecutive rows of one thread
    static_assert(EACH % 4 == 0, "indices are read four at a time");
    const int chunk = thread & 7;
    const int row = thread >> 3;
    // Row row * EACH + i keeps chunk c at place c ^ (low ^ i & 7): EACH is 4, 8, 12 ...
    const int low = (row * EACH) & 7;
    const unsigned a_row = row * EACH * 128;
    const unsigned b_row = row * 128 + ((chunk ^ (row & 7)) << 4);
    const int4* indices =
        reinterpret_cast<const int4*>(table + (long long)tile * BM + row * EACH);
    const long long x_row = (long long)c_in * sizeof(T);
    const char* x_chunk = reinterpret_cast<const char*>(x) + chunk * 16;
    StageRuns<RUNS> stage_runs(begin, c_in);
    int next[EACH];
    auto prefetch = [&](int ordinal) {
      const int k = ordinal < end ? live[ordinal] : -1;
#pragma unroll
      for (int i = 0; i < EACH / 4; ++i) {
        const int4 four = k >= 0 ? __ldg(indices + ((long long)k * pitch >> 2) + i)
                                 : make_int4(-1, -1, -1, -1);
        next[4 * i] = four.x, next[4 * i + 1] = four.y;
        next[4 * i + 2] = four.z, next[4 * i + 3] = four.w;
      }
    };
    // The rows of x: sources past the end are never read, so absent rows need no care.
    auto copy_rows = [&](unsigned a, const int (&rows_of)[EACH], const char* from,
                         bool inside) {
#pragma unroll
      for (int i = 0; i < EACH; ++i) {
        copy16(a + a_row + i * 128 + ((chunk ^ low ^ (i & 7)) << 4),
               from + (unsigned long long)(unsigned)rows_of[i] * x_row,
               inside && rows_of[i] >= 0);
      }
    };
    // Packed weights travel through registers, one stage ahead of the copies.
    typename WeightPart<W>::type parts[BN / HEIGHT];
    bool inside_parts = false;
    auto fetch_parts = [&](int ordinal, int channel) {
      if constexpr (is_packed<W>) {
        inside_parts = ordinal < end && channel < c_in;
        const long long k = inside_parts ? weight_of(live[ordinal]) : 0;
        channel = inside_parts ? channel : 0;
#pragma unroll
        for (int i = 0; i < BN / HEIGHT; ++i) {
          w.fetch(parts[i], k, first_column + row + HEIGHT * i, channel);
        }
      }
    };
    auto store_parts = [&](unsigned b) {
      if constexpr (is_packed<W>) {
#pragma unroll
        for (int i = 0; i < BN / HEIGHT; ++i) {
          W::store(b + b_row + i * (HEIGHT * 128), parts[i], inside_parts);
        }
      }
    };
    // Copies arrive when they land; what threads wrote themselves, now.
    auto arrive = [&](int slot) {
      barrier_arrive_after_copies(shared_address(&full[slot]));
      if constexpr (is_packed<W>) barrier_arrive(shared_address(&full[slot]));
    };

    if constexpr (RUNS == 4) {
      // Whole stages of one offset: every address is a base and a constant step.
      prefetch(begin);
      const char* w_base = nullptr;
      long long w_step = 0, w_stage = 0;
      bool in_columns = true;
      constexpr int WIDTH = BN / 8, HIGH = PRODUCERS / WIDTH;
      if constexpr (is_packed<W>) {
        fetch_parts(begin, chunk * 8);
      } else if constexpr (TRANSPOSED) {
        w_base = reinterpret_cast<const char*>(w) +
                 ((long long)(first_column + row) * c_in) * sizeof(T) + chunk * 16;
        w_step = HEIGHT * x_row;
        w_stage = 128;
      } else {
        const int column = first_column + thread % WIDTH * 8;
        in_columns = column < c_out;
        w_base = reinterpret_cast<const char*>(w) +
                 ((long long)(thread / WIDTH) * c_out + column) * sizeof(T);
        w_step = (long long)HIGH * c_out * sizeof(T);
        w_stage = 64LL * c_out * sizeof(T);
      }
      int step = 0;
      for (int ordinal = begin; ordinal < end; ++ordinal) {
        int rows_of[EACH];
#pragma unroll
        for (int i = 0; i < EACH; ++i) rows_of[i] = next[i];
        const char* w_from =
            w_base + weight_of(live[ordinal]) * c_in * c_out * sizeof(T);
        prefetch(ordinal + 1);
        for (int c = 0; c < c_in; c += STAGE_CHANNELS, ++step, w_from += w_stage) {
          const int slot = step % STAGES;
          const unsigned a = stages + slot * Tile::STAGE_BYTES;
          const unsigned b = a + Tile::A_BYTES;
          barrier_wait(shared_address(&empty[slot]), ((step / STAGES) & 1) ^ 1);
          copy_rows(a, rows_of, x_chunk + c * sizeof(T), true);
          if constexpr (is_packed<W>) {
            store_parts(b);
          } else if constexpr (TRANSPOSED) {
#pragma unroll
            for (int i = 0; i < BN / HEIGHT; ++i) {
              copy16(b + b_row + i * (HEIGHT * 128), w_from + i * w_step,
                     first_column + row + HEIGHT * i < c_out);
            }
          } else {
            const int column = thread % WIDTH, r = thread / WIDTH;
#pragma unroll
            for (int i = 0; i < STAGE_CHANNELS / HIGH; ++i) {
              const int at = r + HIGH * i;
              unsigned to;
              if constexpr (Tile::B_SWIZZLE == 64) {
                to = at * 64 + ((column ^ ((at >> 1) & 3)) << 4);
              } else {
                to = (column >> 3) * 8192 + at * 128 + (((column & 7) ^ (at & 7)) << 4);
              }
              copy16(b + to, w_from + i * w_step, in_columns);
            }
          }
          arrive(slot);
          const bool more = c + STAGE_CHANNELS < c_in;
          fetch_parts(more ? ordinal : ordinal + 1,
                      (more ? c + STAGE_CHANNELS : 0) + chunk * 8);
        }
      }
    } else {
      prefetch(pick(stage_runs.ordinal, chunk >> 1));
      auto fetch_stage = [&] {
        fetch_parts(pick(stage_runs.ordinal, chunk >> 1),
                    pick(stage_runs.channel, chunk >> 1) + (chunk & 1) * 8);
      };
      fetch_stage();
      for (int step = 0; step < steps; ++step) {
        const int slot = step % STAGES;
        const unsigned a = stages + slot * Tile::STAGE_BYTES;
        const unsigned b = a + Tile::A_BYTES;
        barrier_wait(shared_address(&empty[slot]), ((step / STAGES) & 1) ^ 1);
        const int start = pick(stage_runs.channel, chunk >> 1);
        const int channel = start + (chunk & 1) * 8;
        copy_rows(a, next, reinterpret_cast<const char*>(x + channel), channel < c_in);
        if constexpr (is_packed<W>) {
          store_parts(b);
        } else if constexpr (TRANSPOSED) {
          const int ordinal = pick(stage_runs.ordinal, chunk >> 1);
          const bool inside = ordinal < end && channel < c_in;
          const int k = ordinal < end ? live[ordinal] : 0;
          const T* from = w + (weight_of(k) * c_out + first_column) * c_in + channel;
#pragma unroll
          for (int i = 0; i < BN / HEIGHT; ++i) {
            const int n = row + HEIGHT * i;
            copy16(b + b_row + i * (HEIGHT * 128), from + (long long)n * c_in,
                   inside && first_column + n < c_out);
          }
        } else {
          constexpr int WIDTH = BN / 8;            // chunks of a weight row
          constexpr int HIGH = PRODUCERS / WIDTH;  // weight rows of one pass
          const int column = thread % WIDTH;
          const bool in_columns = first_column + column * 8 < c_out;
#pragma unroll
          for (int i = 0; i < STAGE_CHANNELS / HIGH; ++i) {
            const int r = thread / WIDTH + HIGH * i;
            const int g = (HIGH * i + (HIGH > 16 ? thread / WIDTH : 0)) >> 4;
            const int ordinal = pick(stage_runs.ordinal, g);
            const int c = pick(stage_runs.channel, g) + (r & 15);
            const int k = ordinal < end ? live[ordinal] : 0;
            const T* from =
                w + (weight_of(k) * c_in + c) * c_out + first_column + column * 8;
            unsigned to;
            if constexpr (Tile::B_SWIZZLE == 64) {
              to = r * 64 + ((column ^ ((r >> 1) & 3)) << 4);
            } else {
              to = (column >> 3) * 8192 + r * 128 + (((column & 7) ^ (r & 7)) << 4);
            }
            copy16(b + to, from, in_columns && ordinal < end && c < c_in);
          }
        }
        arrive(slot);
        stage_runs.advance();
        prefetch(pick(stage_runs.ordinal, chunk >> 1));
        fetch_stage();
      }
    }
    asm volatile("cp.async.wait_all;" ::: "memory");
  } else {
    const int group = thread / 128;
    float sums[BN / 2];
#pragma unroll
    for (int i = 0; i < BN / 2; ++i) sums[i] = 0.0f;

    auto multiply = [&](int step) {
      const int slot = step % STAGES;
      const unsigned a = stages + slot * Tile::STAGE_BYTES + group * 8192;
      const unsigned b = stages + slot * Tile::STAGE_BYTES + Tile::A_BYTES;
      barrier_wait(shared_address(&full[slot]), (step / STAGES) & 1);
      fence_for_wgmma();
      wgmma_begin();
#pragma unroll
      for (int q = 0; q < 4; ++q) {
        const auto rows_of_a = operand<128>(a + q * 32, 16, 1024);
        if constexpr (TRANSPOSED) {
          wgmma<T, BN, false, false>(sums, rows_of_a, operand<128>(b + q * 32, 16, 1024));
        } else if constexpr (Tile::B_SWIZZLE == 64) {
          wgmma<T, BN, false, true>(sums, rows_of_a,
                                    operand<64>(b + q * 1024, 4096, 512));
        } else {
          wgmma<T, BN, false, true>(sums, rows_of_a,
                                    operand<128>(b + q * 2048, 8192, 1024));
        }
      }
      wgmma_commit();
    };
    if (steps > 0) {
      // One product stays in flight; once it is done, its stage may be filled again.
      multiply(0);
      for (int step = 1; step < steps; ++step) {
        multiply(step);
        wgmma_wait<1>();
        if ((thread & 31) == 0) {
          barrier_arrive(shared_address(&empty[(step - 1) % STAGES]));
        }
      }
      wgmma_wait<0>();
    }

    // Sums go through shared memory, so that rows are written 16 bytes a thread.
    named_barrier(1, 128 * GROUPS);
    constexpr int PITCH = BN + 8;
    static_assert(64 * GROUPS * PITCH * (int)sizeof(OUT) <= STAGES * Tile::STAGE_BYTES,
                  "the output tile must fit into the stages");
    OUT* out = reinterpret_cast<OUT*>(lattice_shared + (stages - shared_address(lattice_shared))) +
               group * 64 * PITCH;
    const int lane = thread & 31, warp = (thread >> 5) & 3;
#pragma unroll
    for (int j = 0; j < BN / 8; ++j) {
#pragma unroll
      for (int half = 0; half < 2; ++half) {
        const int r = warp * 16 + lane / 4 + 8 * half;
        OUT* to = out + r * PITCH + 8 * j + (lane & 3) * 2;
        if constexpr (sizeof(OUT) == 4) {
          *reinterpret_cast<float2*>(to) =
              make_float2(sums[4 * j + 2 * half], sums[4 * j + 2 * half + 1]);
        } else {
          *reinterpret_cast<unsigned*>(to) =
              pack2<T>(sums[4 * j + 2 * half], sums[4 * j + 2 * half + 1]);
        }
      }
    }
    __syncwarp();
    // Each warp reads back the 16 rows that it wrote itself.
    constexpr int EACH = 16 / sizeof(OUT);
    constexpr int ACROSS = BN / EACH;
    for (int q = lane; q < 16 * ACROSS; q += 32) {
      const int r = warp * 16 + q / ACROSS, c = (q % ACROSS) * EACH;
      const int sorted = tile * BM + group * 64 + r;
      if (sorted < n_out && first_column + c < c_out) {
        const long long to =
            ((long long)split * n_out + rows[sorted]) * c_out + first_column + c;
        *reinterpret_cast<uint4*>(y + to) =
            *reinterpret_cast<const uint4*>(out + r * PITCH + c);
      }
    }
  }
}

}  // namespace lattice
