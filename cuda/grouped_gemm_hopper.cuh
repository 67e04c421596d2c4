// EdgeTile of grouped_gemm, on Hopper: the weight gradient dW[k] = sum over edges (i, o, k) of
// x[i]^T dy[o], in half or bfloat16 with float32 accumulators, over kernel-major edges.
//
// Tile: 64 * CONSUMERS channels of x by BN channels of dy, summed over one split of the
// edges. All splits are equally long, so that the work is even whatever the counts of the
// offsets; a split that reaches from one offset into the next leaves a partial sum for
// each. A stage has 64 edges: their gathered rows of x and of dy, which wgmma reads across
// the rows (both operands "MN-major"), so nothing is transposed.
// Traffic per edge: its row of x once per BN channels, its row of dy once per tile.
// Deterministic: the partial sum of split s and offset k stands at s + k, where no other
// does, and add_partials adds those of an offset in order.

namespace lattice {

// Where the operands of a stage stand in shared memory.
template <int CONSUMERS, int BN>
struct EdgeStage {
  static constexpr int A_BYTES = CONSUMERS * 8192;
  static constexpr int STAGE_BYTES = A_BYTES + WEIGHT_BYTES<BN, true>;
};

// Names the kernel in a template: CONSUMERS warpgroups that multiply 64 channels of x each
// by BN of dy, PRODUCER_THREADS that copy, and STAGES in shared memory. 128 * CONSUMERS +
// PRODUCER_THREADS threads.
template <int CONSUMERS, int PRODUCER_THREADS, int BN, int STAGES>
struct EdgeTile {};

// Arguments as of grouped_gemm; stages are of 64 edges.
template <int CONSUMERS, int PRODUCER_THREADS, int BN, int STAGES, typename T>
__device__ __forceinline__ void multiply_edges(
    EdgeTile<CONSUMERS, PRODUCER_THREADS, BN, STAGES>, const T* x, const T* dy,
    const int* pairs, const int* spans, const int* firsts, const WeightGradSizes& sizes,
    float* partials) {
  const int volume = sizes.volume, c_in = sizes.c_in, c_out = sizes.c_out;
  using Tile = EdgeStage<CONSUMERS, BN>;
  extern __shared__ unsigned char lattice_shared[];
  __shared__ Ring<STAGES> ring;

  const int row_tiles = (c_in + 64 * CONSUMERS - 1) / (64 * CONSUMERS);
  const int column_tiles = (c_out + BN - 1) / BN;
  const int splits = gridDim.x / (row_tiles * column_tiles);
  const int split = blockIdx.x / (row_tiles * column_tiles);
  const int tile = blockIdx.x % (row_tiles * column_tiles);
  const int first_row = tile / column_tiles * 64 * CONSUMERS;
  const int first_column = tile % column_tiles * BN;
  int thread = threadIdx.x;
  const unsigned stages = (shared_address(lattice_shared) + 1023) & ~1023u;

  if (thread == 0) ring.init(PRODUCER_THREADS, 4 * CONSUMERS);
  __syncthreads();
  const int span = (firsts[volume] + splits - 1) / splits;
  EdgeWalk<64> walk(spans, firsts, volume, split, span);
  if (walk.done()) return;

  const int group = uniform(thread / 128);
  if (group >= CONSUMERS) {
    thread -= 128 * CONSUMERS;
    constexpr int HEIGHT = PRODUCER_THREADS / 8;
    constexpr int EACH = 64 / HEIGHT;  // edges of one thread
    const int chunk = thread & 7;
    const int row = thread >> 3;
    const unsigned swizzled = (unsigned)(row * 128 + ((chunk ^ (row & 7)) << 4));
    // Channels of 32 or fewer on both sides: lanes 0-3 of a row copy x, lanes 4-7 dy.
    constexpr bool NARROW = CONSUMERS == 1 && BN == 32;
    const long long x_row = (long long)c_in * sizeof(T);
    const long long dy_row = (long long)c_out * sizeof(T);
    const char* x_from = reinterpret_cast<const char*>(x + first_row + 8 * chunk);
    const char* dy_from = reinterpret_cast<const char*>(dy + first_column + 8 * chunk);
    int2 next[EACH];
    bool turned;
    auto prefetch = [&]() {
      const int count = walk.done() ? 0 : walk.count();
      turned = walk.turned;
#pragma unroll
      for (int e = 0; e < EACH; ++e) {
        next[e] = int2{-1, -1};
        if (row + HEIGHT * e < count) next[e] = walk.pair(pairs, row + HEIGHT * e);
      }
    };
    prefetch();
    auto copy = [&](auto aligned) {
      // Channels past the end only reach sums that are never stored: nothing zeroes them.
      // Among many copies of a thread, branches around them are faster.
      auto copy_if = [&](bool needed, unsigned to, const char* from, bool present) {
        if constexpr (EACH <= 4) {
          copy16_if(needed, to, from, present, aligned);
        } else if (needed) {
          copy16(to, from, present, aligned);
        }
      };
      for (int step = 0; !walk.done(); ++step) {
        const int slot = step % STAGES;
        const unsigned a = stages + slot * Tile::STAGE_BYTES;
        const unsigned b = a + Tile::A_BYTES;
        int2 rows[EACH];
#pragma unroll
        for (int e = 0; e < EACH; ++e) rows[e] = rows_of(next[e], turned);
        walk.advance();
        prefetch();
        barrier_wait(shared_address(&ring.empty[slot]), ((step / STAGES) & 1) ^ 1);
        if constexpr (NARROW) {
          const bool of_x = chunk < 4;
          const char* from = of_x ? x_from : dy_from - 64;
          const long long bytes = of_x ? x_row : dy_row;
          const bool inside = of_x ? 8 * chunk < c_in : 8 * (chunk - 4) < c_out;
#pragma unroll
          for (int e = 0; e < EACH; ++e) {
            const int r = row + HEIGHT * e;
            const int index = of_x ? rows[e].x : rows[e].y;
            const unsigned to = of_x ? a + swizzled + e * (HEIGHT * 128)
                                     : b + place_across<64>(r, chunk - 4);
            copy_if(inside, to, from + (unsigned long long)(unsigned)index * bytes,
                    index >= 0);
          }
        } else {
#pragma unroll
          for (int e = 0; e < EACH; ++e) {
            const char* from = x_from + (unsigned long long)(unsigned)rows[e].x * x_row;
#pragma unroll
            for (int g = 0; g < CONSUMERS; ++g) {
              copy_if(first_row + 64 * g + 8 * chunk < c_in,
                      a + g * 8192 + swizzled + e * (HEIGHT * 128), from + 128 * g,
                      rows[e].x >= 0);
            }
          }
#pragma unroll
          for (int e = 0; e < EACH; ++e) {
            const char* from = dy_from + (unsigned long long)(unsigned)rows[e].y * dy_row;
            if constexpr (BN == 32) {
              copy_if(chunk < 4 && first_column + 8 * chunk < c_out,
                      b + place_across<64>(row + HEIGHT * e, chunk), from,
                      rows[e].y >= 0);
            } else {
#pragma unroll
              for (int n = 0; n < (BN + 63) / 64; ++n) {
                const int column = 64 * n + 8 * chunk;
                copy_if(column < BN && first_column + column < c_out,
                        b + n * 8192 + swizzled + e * (HEIGHT * 128), from + 128 * n,
                        rows[e].y >= 0);
              }
            }
          }
        }
        barrier_arrive_after_copies(shared_address(&ring.full[slot]), aligned);
      }
    };
    by_alignment(copy, x, dy);
    asm volatile("cp.async.wait_all;" ::: "memory");
  } else {
    const int lane = thread & 31, warp = (thread >> 5) & 3;
    float sums[BN / 2];
    int step = 0;
    auto multiply = [&]() {
      const int slot = step % STAGES;
      const unsigned a = stages + slot * Tile::STAGE_BYTES + group * 8192;
      const unsigned b = stages + slot * Tile::STAGE_BYTES + Tile::A_BYTES;
      barrier_wait(shared_address(&ring.full[slot]), (step / STAGES) & 1);
      multiply_columns<T, BN>(sums, a, b);
      ++step;
    };
    auto release = [&](int of) {
      if (lane == 0) barrier_arrive(shared_address(&ring.empty[of % STAGES]));
    };
    while (!walk.done()) {
      const int k = walk.k;
#pragma unroll
      for (int i = 0; i < BN / 2; ++i) sums[i] = 0.0f;
      multiply();
      while (!walk.advance()) {
        multiply();
        wgmma_wait<1>();
        release(step - 2);
      }
      wgmma_wait<0>();
      release(step - 1);
      float* to = partials + (long long)(split + k) * c_in * c_out;
#pragma unroll
      for (int half = 0; half < 2; ++half) {
        const int r = first_row + group * 64 + warp * 16 + lane / 4 + 8 * half;
        store_row<T, BN>(to + (long long)r * c_out + first_column, sums, half,
                         r < c_in ? c_out - first_column : 0);
      }
    }
  }
}

}  // namespace lattice
