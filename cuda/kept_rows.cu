// Rows that a mask keeps, in their order: where each row stands among them, then which
// they are, and their coordinates.
//
//   mask -> places, their number -> (Python reads the number) -> rows, coordinates
//
// Tiles count what they keep and look back at those before (radix_sort.cu). Traffic: 5
// bytes a row, then 4 + 4 COLUMNS more and as much of a kept one.

namespace lattice {

// places (n): -1 of what is not kept; found (1). scratch, all 0 before: tiles taken,
// then the state, a word a tile. SORT_THREADS threads.
__device__ __forceinline__ void kept_places(const bool* mask, unsigned* scratch,
                                            KeptPlacesSizes sizes, int* places,
                                            int* found) {
  const int n = sizes.rows;
  constexpr int WARPS = SORT_THREADS / 32;
  __shared__ int taken, of_warp[WARPS], before_tile;
  const int lane = threadIdx.x & 31, warp = threadIdx.x / 32;
  if (threadIdx.x == 0) taken = (int)atomicAdd(scratch, 1u);
  __syncthreads();
  const int tile = taken;
  const long long base = (long long)tile * SORT_TILE + warp * 32 * SORT_ITEMS + lane;
  unsigned kept[SORT_ITEMS];
  int count = 0;
#pragma unroll
  for (int j = 0; j < SORT_ITEMS; ++j) {
    const long long at = base + 32 * j;
    kept[j] = __ballot_sync(~0u, at < n && mask[at]);
    count += __popc(kept[j]);
  }
  if (lane == 0) of_warp[warp] = count;
  __syncthreads();
  if (threadIdx.x == 0) {
    unsigned own = 0;
    for (int w = 0; w < WARPS; ++w) own += of_warp[w];
    before_tile = (int)tiles_before(scratch + 1, tile, 1, own);
  }
  __syncthreads();
  int place = before_tile;
  for (int w = 0; w < warp; ++w) place += of_warp[w];
#pragma unroll
  for (int j = 0; j < SORT_ITEMS; ++j) {
    const long long at = base + 32 * j;
    const int mine = place + __popc(kept[j] & ((1u << lane) - 1));
    const bool keep = kept[j] >> lane & 1;
    if (at < n) places[at] = keep ? mine : -1;
    if (at == n - 1) found[0] = mine + keep;
    place += __popc(kept[j]);
  }
}

// rows (found) and their coordinates, kept (found, COLUMNS).
template <int COLUMNS>
__device__ __forceinline__ void kept_rows(const int* places, const int* coords,
                                          KeptRowsSizes sizes, int* rows, int* kept) {
  for (long long at = grid_thread(); at < sizes.rows; at += grid_threads()) {
    const int place = places[at];
    if (place < 0) continue;
    const auto row = load_row<COLUMNS>(coords, at);
    rows[place] = (int)at;
#pragma unroll
    for (int c = 0; c < COLUMNS; ++c) kept[(long long)place * COLUMNS + c] = row.at[c];
  }
}

}  // namespace lattice
