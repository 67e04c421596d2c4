// ResidentTile of sorted_implicit_gemm, on Hopper: y = x @ W and what follows, of rows that
// feed themselves alone, in half or bfloat16 with float32 accumulators.
//
//   W (c_in x BN) --> shared memory, once a block
//   x, 64 rows x 128 bytes a stage --> a ring for each warpgroup, which has a tile in turn
//
// A block keeps to one column of BN output channels and takes tile after tile of rows. One
// warpgroup finishes and writes its tile while the next one multiplies, and rows of tiles
// ahead are copied meanwhile.
// Traffic: x once for each column, W once for each block, y once.
// Wins where rows are many: a tile of its own block (WideTile) reads W again.

namespace lattice {

// Names the kernel in a template: CONSUMERS warpgroups that multiply by BN channels, with
// STAGES of rows each; PER blocks lie on a multiprocessor. ROOM: stages of weights that
// shared memory has room for, which a name has one of. TAIL: as of WideTile.
template <int CONSUMERS, int BN, int STAGES, int PER, int ROOM, int TAIL>
struct ResidentTile {};

// Arguments as of sorted_implicit_gemm; neither table, rows nor masks are read.
template <bool TRANSPOSED, bool MIRRORED, int CONSUMERS, int BN, int STAGES, int PER,
          int ROOM, int TAIL, typename T, typename OUT, typename W, typename S,
          typename AFTER>
__device__ __forceinline__ void multiply_tiles(
    ResidentTile<CONSUMERS, BN, STAGES, PER, ROOM, TAIL>, const T* x, W w, const int*,
    const int*, const unsigned*, const AFTER& after, const S& sizes, OUT* y) {
  static_assert(sizeof(T) == 2 && !is_packed<W>);
  const int n_out = sizes.rows, c_in = sizes.c_x, c_out = sizes.c_y;
  constexpr int DEPTH = 128 / sizeof(T);  // summed channels of a stage
  constexpr int PRODUCERS = 128, STAGE_BYTES = 64 * 128;
  constexpr int WEIGHTS = WEIGHT_BYTES<BN, !TRANSPOSED>;
  extern __shared__ unsigned char lattice_shared[];
  __shared__ Ring<CONSUMERS * STAGES> ring;
  __shared__ __align__(16) float2 kept[KEPT<AFTER, BN>];
  __shared__ __align__(8) float about[sums_moments<AFTER> ? BN : 2];

  const int column_tiles = (c_out + BN - 1) / BN;
  const int first_column = blockIdx.x % column_tiles * BN;
  const int tiles = (n_out + 63) / 64, line = blockIdx.x / column_tiles;
  const int lines = gridDim.x / column_tiles;
  const int each = (c_in + DEPTH - 1) / DEPTH;  // stages of a tile
  const unsigned stages = (shared_address(lattice_shared) + 1023) & ~1023u;
  const unsigned weights_at = stages + CONSUMERS * STAGES * STAGE_BYTES;
  int thread = threadIdx.x;
  if (thread == 0) ring.init(PRODUCERS, 4);
  __syncthreads();

  const int group = uniform(thread / 128);
  if (group == CONSUMERS) {
    thread -= 128 * CONSUMERS;
    const int chunk = thread & 7, row = thread >> 3;
    const WeightCopies<W, BN, PRODUCERS, TRANSPOSED, TAIL> weights(
        w, (long long)sizes.w_row_stride * sizeof(T), first_column, c_out, thread);
    const long long x_row = (long long)c_in * sizeof(T);
    const unsigned a_row = row * 128 + ((chunk ^ (row & 7)) << 4);
    auto copy = [&](auto aligned) {
      int turn = 0, first = 0;  // a warpgroup, and its steps up to this tile
      for (int tile = line; tile < tiles; tile += lines) {
        const int left = n_out - tile * 64 - row;
        const char* from =
            reinterpret_cast<const char*>(x) + (tile * 64LL + row) * x_row + chunk * 16;
        for (int s = 0; s < each; ++s) {
          const int slot = turn * STAGES + (first + s) % STAGES;
          barrier_wait(shared_address(&ring.empty[slot]), ~((first + s) / STAGES) & 1);
          // Before the rows of the first tile: what says that these came says it of both.
          if (tile == line) {
            weights.copy(weights_at + s * WEIGHTS, weights.base + s * weights.stage,
                         c_in - s * DEPTH, thread, aligned);
          }
          const bool inside = !TAIL || s * DEPTH + chunk * int(16 / sizeof(T)) < c_in;
#pragma unroll
          for (int i = 0; i < 4; ++i) {
            copy16(stages + slot * STAGE_BYTES + a_row + i * 2048,
                   from + s * 128 + i * 16 * x_row, inside && 16 * i < left, aligned);
          }
          barrier_arrive_after_copies(shared_address(&ring.full[slot]), aligned);
        }
        if (++turn == CONSUMERS) turn = 0, first += each;
      }
    };
    by_alignment(copy, x, w);
    asm volatile("cp.async.wait_all;" ::: "memory");
  } else {
    if constexpr (AFTER::FINISHES) {
      keep_channels<BN>(kept, after, first_column, c_out, thread, 128 * CONSUMERS);
      named_barrier(1, 128 * CONSUMERS);
    }
    Sum<T> sums[BN / 2];
    constexpr int BESIDE = 512 / (CONSUMERS + 1) / PER - BN / 2;  // registers
    SortedResult<T, BN, BESIDE, 1, OUT, AFTER> result{after, kept,  nullptr, y,
                                                      n_out, 0,     c_out};
    TileMoments<AFTER, T, BN, 128 * CONSUMERS> moments;
    int step = 0, turn = 0;  // of its own ring; whose tile it is
    for (int tile = line; tile < tiles; tile += lines) {
      const bool mine = turn == group;
      turn = turn + 1 == CONSUMERS ? 0 : turn + 1;
      if (mine) {
#pragma unroll
        for (int i = 0; i < BN / 2; ++i) sums[i] = 0;
        result.begin(tile * 64, first_column);
        auto release = [&](int of) {
          const int slot = group * STAGES + of % STAGES;
          if ((thread & 31) == 0) barrier_arrive(shared_address(&ring.empty[slot]));
        };
        for (int s = 0; s < each; ++s, ++step) {
          const int slot = group * STAGES + step % STAGES;
          barrier_wait(shared_address(&ring.full[slot]), step / STAGES & 1);
          fence_for_wgmma();
          wgmma_begin();
          multiply_stage<T, BN, TRANSPOSED, TAIL>(sums, stages + slot * STAGE_BYTES,
                                                  weights_at + s * WEIGHTS, s + 1 == each);
          wgmma_commit();
          // One product stays in flight; once it is done, its stage may be filled again.
          wgmma_wait<1>();
          if (s > 0) release(step - 1);
        }
        wgmma_wait<0>();
        release(step - 1);
        result.store(sums, 0);
      }
      // The first tile says what sums are about, and every tile how many rows there are.
      moments.begin(about, sums, min(64, n_out - tile * 64));
      if (mine) moments.add(about, sums, result.row[0]);
    }
    moments.write(after, about, lattice_shared, line, first_column, c_out);
  }
}

}  // namespace lattice
