// MmaTile of grouped_gemm: the weight gradient dW[k] = sum over edges (i, o, k) of
// x[i]^T dy[o], in half, bfloat16 or float32 with float32 accumulators, from compute
// capability 8.0 on.
// On Hopper, 16-bit inputs go to EdgeTile instead.
//
// Tile: SIDE channels of x by SIDE of dy, 64 or 128, summed over one split of the
// kernel-major edges; a stage is 64 edges (32 in float32), four in flight. The partial sum
// of split s and offset k stands at s + k; add_partials adds those of an offset in order:
// the same bits always.
// Traffic per edge: its rows of x and dy once per SIDE channels of the other.
// Wins wherever 64 x 64 tiles are filled; small layers go to relation_traversal.

namespace lattice {

constexpr int GROUPED_PIPELINE = 4;

// Arguments as of grouped_gemm. 2 * SIDE threads.
template <int PRODUCTS, int SIDE, typename T>
__device__ __forceinline__ void multiply_edges(
    MmaTile<PRODUCTS, SIDE>, const T* x, const T* dy, const int* pairs, const int* spans,
    const int* firsts, const WeightGradSizes& sizes, float* partials) {
  const int volume = sizes.volume, c_in = sizes.c_in, c_out = sizes.c_out;
  using Core = TensorCore<T, SIDE>;
  constexpr int DEPTH = Core::DEPTH, EACH = Core::EACH, WIDTH = SIDE / EACH;
  extern __shared__ __align__(128) unsigned char lattice_shared[];
  const unsigned stages = shared_address(lattice_shared);
  const int row_tiles = (c_in + SIDE - 1) / SIDE;
  const int column_tiles = (c_out + SIDE - 1) / SIDE;
  const int splits = gridDim.x / (row_tiles * column_tiles);
  const int split = blockIdx.x / (row_tiles * column_tiles);
  const int tile = blockIdx.x % (row_tiles * column_tiles);
  const int first_row = tile / column_tiles * SIDE;
  const int first_column = tile % column_tiles * SIDE;
  const int thread = threadIdx.x, warp = thread / 32, lane = thread & 31;
  const int span = (firsts[volume] + splits - 1) / splits;

  EdgeWalk<DEPTH> ahead(spans, firsts, volume, split, span), walk = ahead;
  int fetched = 0;
  // Rows of x and dy of the edges that the thread copies next: read a stage ahead.
  constexpr int HIGH = 2 * SIDE / WIDTH, MINE = DEPTH / HIGH;
  int2 next[MINE];
  bool turned;
  auto prefetch = [&]() {
    turned = ahead.turned;
#pragma unroll
    for (int i = 0; i < MINE; ++i) {
      const int e = thread / WIDTH + HIGH * i;
      next[i] = int2{-1, -1};
      if (!ahead.done() && e < ahead.count()) next[i] = ahead.pair(pairs, e);
    }
  };
  auto copy = [&](auto aligned) {
    const unsigned a = stages + fetched % GROUPED_PIPELINE * 2 * Core::TILE_BYTES;
    const unsigned b = a + Core::TILE_BYTES;
    const int entry = thread % WIDTH * EACH;
#pragma unroll
    for (int i = 0; i < MINE; ++i) {
      const int e = thread / WIDTH + HIGH * i;
      const int2 rows = rows_of(next[i], turned);
      const bool of_x = rows.x >= 0 && first_row + entry < c_in;
      const bool of_dy = rows.y >= 0 && first_column + entry < c_out;
      copy16(a + Core::template place<false>(entry, e),
             of_x ? x + (long long)rows.x * c_in + first_row + entry : x, of_x,
             aligned);
      copy16(b + Core::template place<false>(entry, e),
             of_dy ? dy + (long long)rows.y * c_out + first_column + entry : dy,
             of_dy, aligned);
    }
  };
  auto fetch = [&]() {
    if (!ahead.done()) {
      by_alignment(copy, x, dy);
      ahead.advance();
      prefetch();
    }
    ++fetched;
    asm volatile("cp.async.commit_group;" ::: "memory");
  };
  prefetch();
#pragma unroll
  for (int s = 0; s < GROUPED_PIPELINE - 1; ++s) fetch();

  constexpr int ACROSS = SIDE / 32, M = SIDE / 32;  // warps; 16 rows of a warp
  const int warp_row = warp / ACROSS * 16 * M, warp_column = warp % ACROSS * 32;
  int step = 0;
  while (!walk.done()) {
    const int k = walk.k;
    float sums[M][4][4] = {};
    do {
      asm volatile("cp.async.wait_group %0;" ::"n"(GROUPED_PIPELINE - 2) : "memory");
      __syncthreads();
      fetch();
      const unsigned a = stages + step % GROUPED_PIPELINE * 2 * Core::TILE_BYTES;
      multiply_stage<Core, T, false, false, PRODUCTS>(sums, a, a + Core::TILE_BYTES,
                                                      warp_row, warp_column);
      ++step;
    } while (!walk.advance());
    float* to = partials + (long long)(split + k) * c_in * c_out;
#pragma unroll
    for (int m = 0; m < M; ++m) {
#pragma unroll
      for (int half = 0; half < 2; ++half) {
        const int r = first_row + warp_row + 16 * m + lane / 4 + 8 * half;
#pragma unroll
        for (int n = 0; n < 4; ++n) {
          const int c = first_column + warp_column + 8 * n + (lane & 3) * 2;
          if (r < c_in && c < c_out) {
            *reinterpret_cast<float2*>(to + (long long)r * c_out + c) =
                make_float2(sums[m][n][2 * half], sums[m][n][2 * half + 1]);
          }
        }
      }
    }
  }
}

}  // namespace lattice
