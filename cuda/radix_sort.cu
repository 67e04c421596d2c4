// One pass of a stable radix sort: tiles of 2048 keys go to their places by one digit.
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

constexpr int SORT_ITEMS = 8, SORT_TILE = 256 * SORT_ITEMS;
constexpr unsigned SUM_OF_TILE = 1u << 30, SUM_OF_ALL = 2u << 30;
constexpr unsigned SUM = SUM_OF_TILE - 1;

// Two neighbouring words that other blocks write.
__device__ __forceinline__ uint2 peek(const unsigned* words) {
  const auto both = *reinterpret_cast<const volatile unsigned long long*>(words);
  return {(unsigned)both, (unsigned)(both >> 32)};
}

__device__ __forceinline__ void publish(unsigned* words, unsigned a, unsigned b) {
  *reinterpret_cast<volatile unsigned long long*>(words) =
      (unsigned long long)b << 32 | a;
}

// The sums of words a and b over the tiles before this one. state holds pitch words a
// tile, all 0 before; own are the words' counts in this tile.
__device__ __forceinline__ uint2 tiles_before(unsigned* state, int tile, int pitch,
                                              uint2 own) {
  constexpr int WINDOW = 8;
  unsigned* mine = state + (long long)tile * pitch;
  uint2 sum = {0, 0};
  if (tile > 0) {
    publish(mine, SUM_OF_TILE | own.x, SUM_OF_TILE | own.y);
    bool more_x = true, more_y = true;
    int at = tile - 1;
    while (more_x || more_y) {
      uint2 seen[WINDOW];
#pragma unroll
      for (int i = 0; i < WINDOW; ++i) {
        seen[i] = at >= i ? peek(state + (long long)(at - i) * pitch)
                          : uint2{SUM_OF_ALL, SUM_OF_ALL};
      }
      bool ready = true;
#pragma unroll
      for (int i = 0; i < WINDOW; ++i) {
        ready &= (!more_x || seen[i].x) && (!more_y || seen[i].y);
        if (!ready) continue;
        if (more_x) sum.x += seen[i].x & SUM, more_x = !(seen[i].x & SUM_OF_ALL);
        if (more_y) sum.y += seen[i].y & SUM, more_y = !(seen[i].y & SUM_OF_ALL);
        --at;
      }
    }
  }
  publish(mine, SUM_OF_ALL | (sum.x + own.x), SUM_OF_ALL | (sum.y + own.y));
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

// scratch: a word of arrivals for each pass from word 4 on; the histograms of all passes
// at HEADER; then the state of all passes, BINS words a tile, all 0 before.
// digits: offsets (of no use here), bits of a digit, passes; which: the pass. The first pass takes row numbers to be 0, 1,
// ...; the last leaves keys out unless KEEP. Without ROWS keys go alone. 256 threads.
template <typename KEY, bool ROWS, bool KEEP>
__device__ __forceinline__ void radix_pass(const KEY* keys, const int* rows,
                                           const int* digits, const int* which,
                                           KEY* sorted_keys, int* sorted_rows,
                                           unsigned* scratch, int n) {
  constexpr int WARPS = 8;
  __shared__ unsigned counts[WARPS][BINS];  // running counts, then starts in the tile
  __shared__ unsigned places[BINS], of_warp[WARPS];
  __shared__ int taken;
  const int pass = which[0], passes = digits[2], digit_bits = digits[1];
  const int lane = threadIdx.x & 31, warp = threadIdx.x / 32;
  const bool first = pass == 0, last = pass == passes - 1;
  const unsigned mask = (1u << digit_bits) - 1;
  const int shift = pass * digit_bits;
  const long long tiles = ((long long)n + SORT_TILE - 1) / SORT_TILE;
  unsigned* state = scratch + HEADER + (passes + pass * tiles) * BINS;
  if (threadIdx.x == 0) taken = (int)atomicAdd(scratch + 4 + pass, 1u);
  for (int i = threadIdx.x; i < WARPS * BINS; i += 256) (&counts[0][0])[i] = 0;
  __syncthreads();
  const int tile = taken;
  const long long base = (long long)tile * SORT_TILE + warp * 32 * SORT_ITEMS + lane;
  KEY key[SORT_ITEMS];
  int row[SORT_ITEMS];
  unsigned rank[SORT_ITEMS];
#pragma unroll
  for (int j = 0; j < SORT_ITEMS; ++j) {
    const long long at = base + 32 * j;
    key[j] = at < n ? keys[at] : 0;
    if constexpr (ROWS) row[j] = first ? (int)at : at < n ? rows[at] : 0;
  }
#pragma unroll
  for (int j = 0; j < SORT_ITEMS; ++j) {
    const bool valid = base + 32 * j < n;
    const unsigned digit = (unsigned)(key[j] >> shift) & mask;
    const unsigned same = lanes_of(digit, __ballot_sync(~0u, valid));
    const unsigned before = counts[warp][digit];
    rank[j] = before + __popc(same & ((1u << lane) - 1));
    __syncwarp();
    if (valid && lane == 31 - __clz(same)) counts[warp][digit] = before + __popc(same);
    __syncwarp();
  }
  __syncthreads();
  // A thread has two neighbouring digits from here on.
  const int bin = 2 * threadIdx.x;
  uint2 own = {0, 0};
#pragma unroll
  for (int w = 0; w < WARPS; ++w) {
    const uint2 count = {counts[w][bin], counts[w][bin + 1]};
    counts[w][bin] = own.x, counts[w][bin + 1] = own.y;
    own.x += count.x, own.y += count.y;
  }
  const unsigned* histogram = scratch + HEADER + pass * BINS + bin;
  const uint2 all = {histogram[0], histogram[1]};
  unsigned end = all.x + all.y;
#pragma unroll
  for (int by = 1; by < 32; by *= 2) {
    const unsigned other = __shfl_up_sync(~0u, end, by);
    if (lane >= by) end += other;
  }
  if (lane == 31) of_warp[warp] = end;
  const uint2 before = tiles_before(state + bin, tile, BINS, own);
  __syncthreads();
  unsigned start = end - all.x - all.y;
  for (int w = 0; w < warp; ++w) start += of_warp[w];
  places[bin] = start + before.x, places[bin + 1] = start + all.x + before.y;
  __syncthreads();
#pragma unroll
  for (int j = 0; j < SORT_ITEMS; ++j) {
    if (base + 32 * j >= n) continue;
    const unsigned digit = (unsigned)(key[j] >> shift) & mask;
    const long long place = (long long)places[digit] + counts[warp][digit] + rank[j];
    if (!last || KEEP) sorted_keys[place] = key[j];
    if constexpr (ROWS) sorted_rows[place] = row[j];
  }
}

}  // namespace lattice
