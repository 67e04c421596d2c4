// Sorted unique rows: of a set itself, of its cells, of what a convolution reaches.
//
// Every candidate row becomes a key that keeps its order, its place in a box that holds
// them all; the keys are sorted (radix_sort.cu); equal keys, side by side, are one row.
//
//   candidates -> keys + histograms -> radix passes -> unique keys, their number
//   -> (Python reads the number) -> rows
//
// sizes: offsets of the rule (volume), bits of a digit, digits of a key (passes).
// Candidates beyond the box, or off the lattice, get the greatest key and are left out.
// CELLS makes the cells of several strides at once, one after another: the number of a
// level leads its keys, and a level has as many candidates as there are rows. Ranges are
// then those of the rows, which nobody may have read yet: the first kernel works out a
// box of all cells, for itself and for the next ones.
// Traffic: 4 or 8 bytes a candidate and pass, in and out.

namespace lattice {

enum Rule { ITSELF, CELL, REACH, EXPAND, CELLS };

__device__ __forceinline__ long long floor_of(long long v, int by) {
  const long long quotient = v / by;
  return quotient - (v - quotient * by < 0);
}

// A box that holds the rows wanted: ranges are the least and greatest of each column.
// A cell's key is its place in the box, the last column fastest.
template <int COLUMNS>
struct Box {
  int low[COLUMNS], high[COLUMNS];
  long long weight[COLUMNS], cells;

  // One thread reads the ranges, which may lie in the CPU's memory, for its block. With
  // strides, COLUMNS - 1 of each level, the box holds the cells of rows in the ranges.
  __device__ __forceinline__ void load(const int* const (&ranges)[COLUMNS],
                                       const int* strides = nullptr, int levels = 0) {
    if (threadIdx.x == 0) {
      cells = 1;
#pragma unroll
      for (int c = COLUMNS - 1; c >= 0; --c) {
        const int first = ranges[c][0], last = ranges[c][1];
        low[c] = first, high[c] = last;
        for (int k = 0; c > 0 && k < levels; ++k) {
          const int stride = strides[k * (COLUMNS - 1) + c - 1];
          const int a = (int)floor_of(first, stride), b = (int)floor_of(last, stride);
          low[c] = k == 0 ? a : min(low[c], a), high[c] = k == 0 ? b : max(high[c], b);
        }
        weight[c] = cells;
        cells *= (long long)high[c] - low[c] + 1;
      }
    }
    __syncthreads();
  }
};

// keys (n * volume) of the candidates, offsets fastest; scratch, all 0 before: the
// histograms of their digits from HEADER on. 256 threads. Of CELLS, strides stand where
// other rules have offsets, and boxes (2 each) become the ranges of their box.
template <int COLUMNS, int RULE, typename KEY>
__device__ __forceinline__ void pack_keys(const int* coords, const int* rule,
                                          const int* const (&ranges)[COLUMNS],
                                          unsigned* scratch, PackKeysSizes sizes,
                                          KEY* keys, int* const (&boxes)[COLUMNS]) {
  __shared__ DigitCounts<KEY> digits;
  __shared__ Box<COLUMNS> box;
  const int n = sizes.rows, volume = sizes.volume;
  const int digit_bits = sizes.digit_bits, passes = sizes.passes;
  const int* strides = rule + volume * (COLUMNS - 1);
  digits.clear(passes);
  if constexpr (RULE == CELLS) {
    box.load(ranges, rule, volume);
    if (blockIdx.x == 0 && threadIdx.x < COLUMNS) {
      boxes[threadIdx.x][0] = box.low[threadIdx.x];
      boxes[threadIdx.x][1] = box.high[threadIdx.x];
    }
  } else {
    box.load(ranges);
  }
  const long long all = (long long)n * volume;
  for (long long at = grid_thread(); at < all; at += grid_threads()) {
    const long long i = at >> 32 ? at / volume : (unsigned)at / (unsigned)volume;
    const int k = (int)(at - i * volume);
    const auto row = load_row<COLUMNS>(coords, i);
    long long cell = 0;
    bool inside = true;
#pragma unroll
    for (int c = 0; c < COLUMNS; ++c) {
      long long v = row.at[c];
      if (c > 0 && RULE != ITSELF) {
        const int own = RULE == CELL ? 0 : rule[k * (COLUMNS - 1) + c - 1];
        const int stride = RULE == CELLS ? own : strides[c - 1];
        const int offset = RULE == CELLS ? 0 : own;
        if (RULE == EXPAND) {
          v = v * stride + offset;
        } else {
          const long long moved = v - offset;
          v = floor_of(moved, stride);
          if (RULE == REACH) inside &= v * stride == moved;
        }
      }
      inside &= v >= box.low[c] && v <= box.high[c];
      cell += (v - box.low[c]) * box.weight[c];
    }
    const long long in_box = inside ? cell : box.cells;
    const KEY key = (KEY)(RULE == CELLS ? cell + k * box.cells : in_box);
    keys[at] = key;
    digits.add(key, digit_bits, passes);
  }
  __syncthreads();
  digits.store(scratch, passes);
}

// unique: the n sorted keys without repeats and without those beyond the box, in order;
// found (1 each): how many up to the end of each of LEVELS equal parts. places (n):
// where each row's key stands among them, if ROWS.
// scratch: arrivals at word 3; the state, a word a tile, follows the sort's.
// SORT_THREADS threads.
template <int COLUMNS, typename KEY, bool ROWS, int LEVELS>
__device__ __forceinline__ void unique_keys(const KEY* keys, const int* rows,
                                            const int* const (&ranges)[COLUMNS],
                                            unsigned* scratch, UniqueKeysSizes sizes,
                                            KEY* unique,
                                            long long* const (&found)[LEVELS],
                                            int* places) {
  const int n = sizes.keys;
  constexpr int WARPS = SORT_THREADS / 32;
  __shared__ int taken, of_warp[WARPS], before_tile;
  __shared__ Box<COLUMNS> box;
  const int lane = threadIdx.x & 31, warp = threadIdx.x / 32;
  const long long tiles = ((long long)n + SORT_TILE - 1) / SORT_TILE;
  unsigned* state = scratch + HEADER + sizes.passes * (1 + tiles) * BINS;
  if (threadIdx.x == 0) taken = (int)atomicAdd(scratch + 3, 1u);
  box.load(ranges);
  const int tile = taken;
  const long long base = (long long)tile * SORT_TILE + warp * 32 * SORT_ITEMS + lane;
  const KEY beyond = (KEY)(LEVELS * box.cells);
  const int part = n / LEVELS;
  KEY key[SORT_ITEMS];
  unsigned starts[SORT_ITEMS];
  int count = 0;
#pragma unroll
  for (int j = 0; j < SORT_ITEMS; ++j) {
    const long long at = base + 32 * j;
    key[j] = at < n ? keys[at] : beyond;
    const bool start = key[j] != beyond && (at == 0 || key[j] != keys[at - 1]);
    starts[j] = __ballot_sync(~0u, start);
    count += __popc(starts[j]);
  }
  if (lane == 0) of_warp[warp] = count;
  __syncthreads();
  if (threadIdx.x == 0) {
    unsigned own = 0;
    for (int w = 0; w < WARPS; ++w) own += of_warp[w];
    const unsigned before = tiles_before(state, tile, 1, own);
    before_tile = (int)before;
  }
  __syncthreads();
  long long place = before_tile;
  for (int w = 0; w < warp; ++w) place += of_warp[w];
#pragma unroll
  for (int j = 0; j < SORT_ITEMS; ++j) {
    const long long at = base + 32 * j;
    const long long mine = place + __popc(starts[j] & ((2u << lane) - 1)) - 1;
    if (starts[j] >> lane & 1) unique[mine] = key[j];
    if (at < n && (LEVELS == 1 ? at == n - 1 : (at + 1) % part == 0)) {
      *found[LEVELS == 1 ? 0 : at / part] = mine + 1;
    }
    if constexpr (ROWS) {
      if (at < n) places[rows[at]] = (int)mine;
    }
    place += __popc(starts[j]);
  }
}

// rows (found, or all, COLUMNS) of the unique keys, the numbers of levels left out.
template <int COLUMNS, typename KEY>
__device__ __forceinline__ void unpack_keys(const KEY* unique, const long long* found,
                                            const int* const (&ranges)[COLUMNS],
                                            UnpackKeysSizes sizes, int* rows) {
  __shared__ Box<COLUMNS> box;
  box.load(ranges);
  const long long all = found ? found[0] : sizes.keys;
  for (long long at = grid_thread(); at < all; at += grid_threads()) {
    KEY left = unique[at] % (KEY)box.cells;
#pragma unroll
    for (int c = 0; c < COLUMNS; ++c) {
      const KEY weight = (KEY)box.weight[c], cell = left / weight;
      left -= cell * weight;
      rows[at * COLUMNS + c] = (int)((long long)cell + box.low[c]);
    }
  }
}

}  // namespace lattice
