// A stable radix sort in one launch: in each pass tiles of 4096 keys go to their places
// by one digit. Blocks take tickets for the tiles of the first pass, then of the next.
//
//   histograms (earlier) -> starts of digits -+
//   tile -> rank within warp and tile --------+-> place = start + tiles before + rank
//
// "Tiles before" is found by looking back: each tile publishes its own counts, then its
// sums with all before it, in one word a digit; it walks back over the tiles before
// until it meets a sum. Tiles are taken in order of arrival, so every tile that one
// waits for is running or done. Counts alone are shared: the result is the same bits
// whatever the timing.
// Traffic: keys and rows in and out once a pass; three passes for K = 27.

namespace lattice {

constexpr int SORT_THREADS = 512, SORT_ITEMS = 8;
constexpr int SORT_TILE = SORT_THREADS * SORT_ITEMS;
constexpr int SORT_TICKETS = 2;  // word of scratch: tickets of radix_sort taken
constexpr int DONE = 4;          // and those after it: tiles done of each pass
constexpr unsigned SUM_OF_TILE = 1u << 30, SUM_OF_ALL = 2u << 30;
constexpr unsigned SUM = SUM_OF_TILE - 1;

// Words of scratch that the passes of a sort share; even, so that several follow each
// other.
__device__ __forceinline__ long long scratch_words(int n, int passes) {
  const long long tiles = ((long long)n + SORT_TILE - 1) / SORT_TILE;
  return HEADER + passes * (1 + tiles) * BINS + tiles + (tiles & 1);
}

// How often each digit occurs in the keys of a block, for the histograms of radix_sort:
// in scratch, all 0 before, from HEADER on. Threads of the block call all of them.
template <typename KEY>
struct DigitCounts {
  static constexpr int PASSES = sizeof(KEY) == 8 ? 7 : 4;
  int counts[PASSES * BINS];

  __device__ __forceinline__ void clear(int passes) {
    for (int i = threadIdx.x; i < passes * BINS; i += blockDim.x) counts[i] = 0;
  }
  __device__ __forceinline__ void add(KEY key, int digit_bits, int passes) {
    for (int pass = 0; pass < passes; ++pass) {
      const int digit = (int)(key >> (pass * digit_bits)) & ((1 << digit_bits) - 1);
      atomicAdd(counts + pass * BINS + digit, 1);
    }
  }
  __device__ __forceinline__ void store(unsigned* scratch, int passes) {
    for (int i = threadIdx.x; i < passes * BINS; i += blockDim.x) {
      if (counts[i]) atomicAdd(scratch + HEADER + i, (unsigned)counts[i]);
    }
  }
};

// The sum of own, this tile's count, over the tiles before. state holds a word of this
// count every pitch words, all 0 before.
__device__ __forceinline__ unsigned tiles_before(unsigned* state, int tile, int pitch,
                                                 unsigned own) {
  constexpr int WINDOW = 8;
  volatile unsigned* words = state;
  const long long mine = (long long)tile * pitch;
  unsigned sum = 0;
  if (tile > 0) {
    words[mine] = SUM_OF_TILE | own;
    int at = tile - 1;
    for (bool more = true; more;) {
      unsigned seen[WINDOW];
#pragma unroll
      for (int i = 0; i < WINDOW; ++i) {
        seen[i] = SUM_OF_ALL;
        if (at >= i) seen[i] = words[(long long)(at - i) * pitch];
      }
      bool ready = true;
#pragma unroll
      for (int i = 0; i < WINDOW; ++i) {
        ready &= more && seen[i] != 0;
        if (!ready) continue;
        sum += seen[i] & SUM;
        more = !(seen[i] & SUM_OF_ALL);
        --at;
      }
    }
  }
  words[mine] = SUM_OF_ALL | (sum + own);
  return sum;
}

// The lanes of active whose digit is this lane's.
__device__ __forceinline__ unsigned lanes_of(unsigned digit, unsigned active) {
  unsigned same = active;
#pragma unroll
  for (int bit = 0; bit < 9; ++bit) {
    const bool set = digit >> bit & 1;
    const unsigned votes = __ballot_sync(~0u, set);
    same &= set ? votes : ~votes;
  }
  return same;
}

template <typename KEY>
struct RadixTile {
  union {
    unsigned short counts[SORT_THREADS / 32][BINS];  // running, then starts in the digit
    KEY keys[SORT_TILE];
    int rows[SORT_TILE];
  } of;
  unsigned starts[BINS], places[BINS], of_warp[2][SORT_THREADS / 32];
};

// One tile of a pass. scratch:
// the histograms of all passes at HEADER; then the state of all passes, BINS words a
// tile, all 0 before.
// The first pass takes rows to be 0, 1, ... The last leaves keys out unless KEEP. Without
// ROWS keys go alone.
// SORT_THREADS threads. What other blocks wrote is read past the first cache.
// A tile is put in order in shared memory first, so that keys of one digit
// leave together.
template <typename KEY, bool ROWS, bool KEEP>
__device__ __forceinline__ void radix_tile(RadixTile<KEY>& tile_of, int tile, int pass,
                                           const KEY* keys, const int* rows,
                                           int digit_bits, int passes,
                                           KEY* sorted_keys, int* sorted_rows,
                                           unsigned* scratch, int n) {
  static_assert(SORT_THREADS == BINS);  // a thread has a digit of its own
  constexpr int WARPS = SORT_THREADS / 32;
  const int lane = threadIdx.x & 31, warp = threadIdx.x / 32;
  const bool first = pass == 0, write_keys = KEEP || pass < passes - 1;
  const unsigned mask = (1u << digit_bits) - 1;
  const int shift = pass * digit_bits;
  const long long tiles = ((long long)n + SORT_TILE - 1) / SORT_TILE;
  unsigned* state = scratch + HEADER + (passes + pass * tiles) * BINS;
  const unsigned all = __ldcg(scratch + HEADER + pass * BINS + threadIdx.x);
  for (int w = 0; w < WARPS; ++w) tile_of.of.counts[w][threadIdx.x] = 0;
  __syncthreads();
  const long long first_key = (long long)tile * SORT_TILE;
  const long long base = first_key + warp * 32 * SORT_ITEMS + lane;
  KEY key[SORT_ITEMS];
  int row[SORT_ITEMS];
  unsigned at[SORT_ITEMS];
#pragma unroll
  for (int j = 0; j < SORT_ITEMS; ++j) {
    const long long from = base + 32 * j;
    const bool valid = from < n;
    key[j] = valid ? __ldcg(keys + from) : 0;
    if constexpr (ROWS) row[j] = first ? (int)from : valid ? __ldcg(rows + from) : 0;
  }
#pragma unroll
  for (int j = 0; j < SORT_ITEMS; ++j) {
    const bool valid = base + 32 * j < n;
    const unsigned digit = (unsigned)(key[j] >> shift) & mask;
    const unsigned same = lanes_of(digit, __ballot_sync(~0u, valid));
    const unsigned before = tile_of.of.counts[warp][digit];
    at[j] = before + __popc(same & ((1u << lane) - 1));
    __syncwarp();
    if (valid && lane == 31 - __clz(same)) {
      tile_of.of.counts[warp][digit] = (unsigned short)(before + __popc(same));
    }
    __syncwarp();
  }
  __syncthreads();
  unsigned own = 0;
#pragma unroll
  for (int w = 0; w < WARPS; ++w) {
    const unsigned count = tile_of.of.counts[w][threadIdx.x];
    tile_of.of.counts[w][threadIdx.x] = (unsigned short)own;
    own += count;
  }
  // Where digits start: among all keys, and in the tile.
  unsigned end = all, tile_end = own;
#pragma unroll
  for (int by = 1; by < 32; by *= 2) {
    const unsigned other = __shfl_up_sync(~0u, end, by);
    const unsigned tile_other = __shfl_up_sync(~0u, tile_end, by);
    if (lane >= by) end += other, tile_end += tile_other;
  }
  if (lane == 31) tile_of.of_warp[0][warp] = end, tile_of.of_warp[1][warp] = tile_end;
  const unsigned before = tiles_before(state + threadIdx.x, tile, BINS, own);
  __syncthreads();
  unsigned start = end - all, tile_start = tile_end - own;
  for (int w = 0; w < warp; ++w) {
    start += tile_of.of_warp[0][w], tile_start += tile_of.of_warp[1][w];
  }
  tile_of.starts[threadIdx.x] = tile_start;
  tile_of.places[threadIdx.x] = start + before - tile_start;
  __syncthreads();
#pragma unroll
  for (int j = 0; j < SORT_ITEMS; ++j) {
    const unsigned digit = (unsigned)(key[j] >> shift) & mask;
    at[j] += tile_of.starts[digit] + tile_of.of.counts[warp][digit];
  }
  __syncthreads();
  const int here = (int)min((long long)SORT_TILE, n - first_key);
#pragma unroll
  for (int j = 0; j < SORT_ITEMS; ++j) {
    if (base + 32 * j < n) tile_of.of.keys[at[j]] = key[j];
  }
  __syncthreads();
  unsigned place[SORT_ITEMS];
#pragma unroll
  for (int j = 0; j < SORT_ITEMS; ++j) {
    const int i = threadIdx.x + j * SORT_THREADS;
    if (i >= here) continue;
    const KEY moved = tile_of.of.keys[i];
    place[j] = tile_of.places[(unsigned)(moved >> shift) & mask] + i;
    if (write_keys) sorted_keys[place[j]] = moved;
  }
  if constexpr (ROWS) {
    __syncthreads();
#pragma unroll
    for (int j = 0; j < SORT_ITEMS; ++j) {
      if (base + 32 * j < n) tile_of.of.rows[at[j]] = row[j];
    }
    __syncthreads();
#pragma unroll
    for (int j = 0; j < SORT_ITEMS; ++j) {
      const int i = threadIdx.x + j * SORT_THREADS;
      if (i < here) sorted_rows[place[j]] = tile_of.of.rows[i];
    }
  }
}

// Sorts keys (n), and the rows that they are of. work_keys and work_rows are as long, of
// every other pass.
template <typename KEY, bool ROWS, bool KEEP>
__device__ __forceinline__ void radix_sort(const KEY* keys, unsigned* scratch,
                                           RadixSortSizes sizes, KEY* sorted_keys,
                                           KEY* work_keys, int* sorted_rows,
                                           int* work_rows) {
  __shared__ RadixTile<KEY> tile_of;
  __shared__ int mine;
  const Tickets tickets{scratch + SORT_TICKETS, 0, &mine};
  const int n = sizes.keys, passes = sizes.passes;
  const int tiles = (int)(((long long)n + SORT_TILE - 1) / SORT_TILE);
  tickets.fetch();
  for (int ticket = tickets.next(); ticket < passes * tiles; ticket = tickets.next()) {
    tickets.fetch();
    const int pass = ticket / tiles;
    if (pass > 0) wait_for(scratch + DONE + pass - 1, tiles);
    const bool here = (passes - 1 - pass) % 2 == 0;
    radix_tile<KEY, ROWS, KEEP>(
        tile_of, ticket - pass * tiles, pass,
        pass == 0 ? keys : here ? work_keys : sorted_keys,
        here ? work_rows : sorted_rows, sizes.digit_bits, passes,
        here ? sorted_keys : work_keys, here ? sorted_rows : work_rows, scratch, n);
    add_done(scratch + DONE + pass);
  }
}

}  // namespace lattice
