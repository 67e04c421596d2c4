// WideTile of sorted_implicit_gemm, on Hopper: y[o] = sum over k of x[table[o, k]] @
// W[k], and what follows, in half, bfloat16 or one TF32 product with float32 accumulators,
// or in int8 with int32 ones. c_in is a multiple of 128 bytes, but where a stage has a TAIL.
//
// Tile: 64 * CONSUMERS rows, sorted by the Gray rank of their mask, by BN channels; each
// thread block has one. Producer warps copy into a stage 128 bytes of the
// tile's input rows (gathered by the neighbour table, zeros where there is none) and of
// the weights, which it unpacks if they are packed. CONSUMERS warpgroups multiply 64 rows
// each; where CONSUMERS_BEGIN, the first of them copies the weights of the first stage,
// while it has nothing to multiply. Offsets that no row of the tile uses are skipped.
// Traffic per output row: its live input rows once (per BN channels), W[k] / tile rows.
// Wins where a tile is long work: every producer thread keeps its row indices in
// registers. Elsewhere PersistentTile wins.

namespace lattice {

// Names the kernel in a template: CONSUMERS warpgroups that multiply 64 rows each by BN
// channels, and STAGES in shared memory. TAIL: slices of 32 bytes that the last stage of an
// offset has, zeros at their end among them; 0 where it is whole. EARLY: the row indices of
// so many offsets are fetched beside the masks, not after them: a tile of few offsets is
// little but the wait for its reads. ITSELF: every row is fed by itself alone, and neither
// the table nor masks are read.
template <int CONSUMERS, int BN, int STAGES, int TAIL = 0, int EARLY = 0,
          bool ITSELF = false>
struct WideTile {};

// Arguments as of sorted_implicit_gemm; w may be PackedWeights.
template <bool TRANSPOSED, bool MIRRORED, int CONSUMERS, int BN, int STAGES, int TAIL,
          int EARLY, bool ITSELF, typename T, typename OUT, typename W, typename S,
          typename AFTER>
__device__ __forceinline__ void multiply_tiles(
    WideTile<CONSUMERS, BN, STAGES, TAIL, EARLY, ITSELF>, const T* x, W w,
    const int* table, const int* rows, const unsigned* masks, const AFTER& after,
    const S& sizes, OUT* y) {
  static_assert(!TAIL || !is_packed<W>, "packed weights have no tail");
  static_assert(sizeof(T) < 4 || TRANSPOSED, "TF32 runs along the summed channels");
  const int n_out = sizes.rows, pitch = sizes.pitch, volume = sizes.volume;
  const int c_in = sizes.c_x, c_out = sizes.c_y;
  constexpr int BM = 64 * CONSUMERS, PRODUCERS = 128;  // threads that copy
  constexpr int DEPTH = 128 / sizeof(T);  // summed channels of a stage
  // On an H200 tiles of 128 columns take 4% less by that, of 192 2%, of 256 the same; of 64
  // up to 8% more.
  constexpr bool CONSUMERS_BEGIN =
      !is_packed<W> && sizeof(T) == 2 && BN >= 128 && BN < 256 && !EARLY && !ITSELF;
  constexpr int A_BYTES = BM * 128, STAGE_BYTES = A_BYTES + WEIGHT_BYTES<BN, !TRANSPOSED>;
  extern __shared__ unsigned char lattice_shared[];
  __shared__ Ring<STAGES> ring;
  __shared__ unsigned short live[MAX_OFFSETS];
  __shared__ int live_count;
  __shared__ __align__(16) float2 kept[KEPT<AFTER, BN>];
  __shared__ __align__(8) float about[sums_moments<AFTER> ? BN : 2];
  __shared__ __align__(16) int indices[EARLY ? EARLY : 1][EARLY ? BM : 4];

  // The last tiles first: they use the most offsets, and others fill up what is left.
  const int place = gridDim.x - 1 - blockIdx.x;
  const int column_tiles = (c_out + BN - 1) / BN;
  const int tile = place / column_tiles;
  const int first_column = (place % column_tiles) * BN;
  const int split = blockIdx.y, splits = gridDim.y;
  int thread = threadIdx.x;
  const unsigned stages = (shared_address(lattice_shared) + 1023) & ~1023u;

  if (thread == 0) {
    ring.init(PRODUCERS + (is_packed<W> ? PRODUCERS / 32 : 0), 4 * CONSUMERS);
  }
  if (ITSELF) {
    if (thread == 0) live[0] = 0, live_count = 1;
  } else if (thread < 32) {
    const int count = list_offsets(live, masks, tile * (BM / 32), BM / 32, pitch / 32,
                                   (volume + 31) / 32);
    if (thread == 0) live_count = count;
  } else if (EARLY && thread >= 128 * CONSUMERS) {
    for (int i = thread - 128 * CONSUMERS; i < EARLY * BM / 4; i += PRODUCERS) {
      const int k = i / (BM / 4), row = i % (BM / 4) * 4;
      const int* from = table + (long long)k * pitch + (long long)tile * BM + row;
      if (k < volume) copy16(shared_address(&indices[k][row]), from, true);
    }
    asm volatile("cp.async.wait_all;" ::: "memory");
  }
  __syncthreads();

  auto weight_of = [&](int k) { return (long long)(MIRRORED ? volume - 1 - k : k); };

  // The offsets of this split, and the stages they take.
  const int offsets = uniform(live_count);
  const int begin = offsets * split / splits, end = offsets * (split + 1) / splits;
  const int each = TAIL ? (c_in + DEPTH - 1) / DEPTH : c_in / DEPTH;
  const int steps = (end - begin) * each;
  auto weights_from = [&](const char* base, int k) {
    return base + weight_of(k) * sizes.w_offset_stride * sizeof(T);
  };
  const long long w_line = (long long)sizes.w_row_stride * sizeof(T);

  const int group = uniform(thread / 128);
  if (group >= CONSUMERS) {
    thread -= 128 * CONSUMERS;
    constexpr int HEIGHT = PRODUCERS / 8;  // threads down the tile; 8 copy a row
    constexpr int EACH = BM / HEIGHT;      // consecutive rows of one thread
    static_assert(EACH % 4 == 0, "indices are read four at a time");
    const int chunk = thread & 7;
    const int row = thread >> 3;
    // Row row * EACH + i keeps chunk c at place c ^ (low ^ i & 7): EACH is 4, 8, 12 ...
    const int low = (row * EACH) & 7;
    const unsigned a_row = row * EACH * 128;
    const int4* rows_of_tile =
        reinterpret_cast<const int4*>(table + (long long)tile * BM + row * EACH);
    const long long x_row = (long long)c_in * sizeof(T);
    const char* x_chunk = reinterpret_cast<const char*>(x) + chunk * 16;
    int next[EACH];  // row indices of the next offset
    auto prefetch = [&](int ordinal) {
      const int k = ordinal < end ? live[ordinal] : -1;
#pragma unroll
      for (int i = 0; i < EACH / 4; ++i) {
        int4 four = make_int4(-1, -1, -1, -1);
        if (ITSELF) {
          const int at = tile * BM + row * EACH + 4 * i, there = n_out - at;
          four = make_int4(there > 0 ? at : -1, there > 1 ? at + 1 : -1,
                           there > 2 ? at + 2 : -1, there > 3 ? at + 3 : -1);
        } else if (EARLY && k >= 0 && k < EARLY) {
          four = reinterpret_cast<const int4*>(&indices[k][row * EACH])[i];
        } else if (k >= 0) {
          four = __ldg(rows_of_tile + ((long long)k * pitch >> 2) + i);
        }
        next[4 * i] = four.x, next[4 * i + 1] = four.y;
        next[4 * i + 2] = four.z, next[4 * i + 3] = four.w;
      }
    };

    // Whole stages of one offset: every address is a base and a constant step.
    prefetch(begin);
    const WeightCopies<W, BN, PRODUCERS, TRANSPOSED, TAIL> weights(
        w, w_line, first_column, c_out, thread);
    // Packed weights pass through registers, 32 channels of a column at a time: those of a
    // stage are fetched while the stage before is filled.
    constexpr int PACKED = is_packed<W> ? BN * 2 / PRODUCERS : 1;
    typename Held<W>::Quad held[PACKED], next_held[PACKED];
    const int w_row = thread >> 1, w_half = thread & 1;
    auto fetch_weights = [&](int ordinal, int c, auto aligned) {
      if constexpr (is_packed<W>) {
        const long long k = weight_of(ordinal < end ? live[ordinal] : 0);
#pragma unroll
        for (int i = 0; i < PACKED; ++i) {
          w.fetch(next_held[i], k, first_column + w_row + i * (PRODUCERS / 2),
                  c + w_half * 32, aligned);
        }
      }
    };
    auto store_weights = [&](unsigned b) {
      if constexpr (is_packed<W>) {
#pragma unroll
        for (int i = 0; i < PACKED; ++i) {
#pragma unroll
          for (int j = 0; j < 4; ++j) {
            W::store(b + (w_row + i * (PRODUCERS / 2)) * 128 +
                         (((w_half * 4 + j) ^ (w_row & 7)) << 4),
                     held[i], j);
          }
        }
      }
    };
    auto copy = [&](auto aligned) {
      fetch_weights(begin, 0, aligned);
      RingPosition<STAGES> at;
      for (int ordinal = begin; ordinal < end; ++ordinal) {
        int rows_of[EACH];
#pragma unroll
        for (int i = 0; i < EACH; ++i) rows_of[i] = next[i];
        const char* w_from = weights_from(weights.base, live[ordinal]);
        prefetch(ordinal + 1);
        for (int c = 0; c < c_in; c += DEPTH, at.advance(), w_from += weights.stage) {
          const unsigned a = stages + at.slot * STAGE_BYTES;
          const unsigned b = a + A_BYTES;
          barrier_wait(shared_address(&ring.empty[at.slot]), at.phase ^ 1);
          const bool inside = !TAIL || c + chunk * int(16 / sizeof(T)) < c_in;
          // The address of an absent row lies outside x, and is never read.
#pragma unroll
          for (int i = 0; i < EACH; ++i) {
            copy16(a + a_row + i * 128 + ((chunk ^ low ^ (i & 7)) << 4),
                   x_chunk + c * sizeof(T) +
                       (unsigned long long)(unsigned)rows_of[i] * x_row,
                   inside && rows_of[i] >= 0, aligned);
          }
          if constexpr (is_packed<W>) {
#pragma unroll
            for (int i = 0; i < PACKED; ++i) held[i] = next_held[i];
            const bool more = c + DEPTH < c_in;
            fetch_weights(more ? ordinal : ordinal + 1, more ? c + DEPTH : 0, aligned);
            store_weights(b);
          } else if (!CONSUMERS_BEGIN || ordinal > begin || c > 0) {
            weights.copy(b, w_from, c_in - c, thread, aligned);
          }
          barrier_arrive_after_copies(shared_address(&ring.full[at.slot]), aligned);
          // Asynchronous copies arrive when complete; what the thread stored itself, now.
          if constexpr (is_packed<W>) {
            __syncwarp();
            if ((thread & 31) == 0) barrier_arrive(shared_address(&ring.full[at.slot]));
          }
        }
      }
    };
    by_alignment(copy, x, start_of(w));
    asm volatile("cp.async.wait_all;" ::: "memory");
  } else {
    if constexpr (CONSUMERS_BEGIN) {
      if (group == 0 && steps > 0) {
        const WeightCopies<W, BN, 128, TRANSPOSED, TAIL> weights(w, w_line, first_column,
                                                                 c_out, thread);
        const char* from = weights_from(weights.base, live[begin]);
        auto copy = [&](auto aligned) {
          weights.copy(stages + A_BYTES, from, c_in, thread, aligned);
        };
        by_alignment(copy, w);
      }
    }
    if constexpr (AFTER::FINISHES) {
      keep_channels<BN>(kept, after, first_column, c_out, thread, 128 * CONSUMERS);
    }
    Sum<T> sums[BN / 2];
#pragma unroll
    for (int i = 0; i < BN / 2; ++i) sums[i] = 0;
    constexpr int BESIDE = 512 / (CONSUMERS + 1) - BN / 2;  // registers
    SortedResult<T, BN, BESIDE, 1, OUT, AFTER> result{
        after, kept, ITSELF ? nullptr : rows, y, n_out, split, c_out};
    result.begin(tile * BM + group * 64, first_column);
    if constexpr (CONSUMERS_BEGIN) {  // by a barrier of their own, of this stage once
      asm volatile("cp.async.wait_all;" ::: "memory");
      fence_for_wgmma();
      named_barrier(2, 128 * CONSUMERS);
    }

    int of_offset = 0;  // stages that were multiplied
    auto multiply = [&](int step) {
      const int slot = step % STAGES;
      const unsigned a = stages + slot * STAGE_BYTES + group * 8192;
      const unsigned b = stages + slot * STAGE_BYTES + A_BYTES;
      barrier_wait(shared_address(&ring.full[slot]), (step / STAGES) & 1);
      fence_for_wgmma();
      wgmma_begin();
      const bool is_last = ++of_offset == each;
      multiply_stage<T, BN, TRANSPOSED, TAIL>(sums, a, b, is_last);
      if (is_last) of_offset = 0;
      wgmma_commit();
    };
    if (steps > 0) {
      // One product stays in flight; once it is done, its stage may be filled again.
      multiply(0);
      for (int step = 1; step < steps; ++step) {
        multiply(step);
        wgmma_wait<1>();
        if ((thread & 31) == 0) {
          barrier_arrive(shared_address(&ring.empty[(step - 1) % STAGES]));
        }
      }
      result.ahead();
      wgmma_wait<0>();
    } else {
      result.ahead();
    }

    if constexpr (AFTER::FINISHES) named_barrier(1, 128 * CONSUMERS);
    result.store(sums, 0);
    TileMoments<AFTER, T, BN, 128 * CONSUMERS> moments;
    moments.begin(about, sums, min(BM, n_out - tile * BM));
    moments.add(about, sums, result.row[0]);
    moments.write(after, about, lattice_shared, tile, first_column, c_out);
  }
}

}  // namespace lattice
