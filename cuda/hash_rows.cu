// The hash table of a coordinate set, and what must be known of a user's rows: the first
// repeat and the bounds of every column. One pass over the rows.
//
// After the slots stand the words that blocks share: the least row that equals an earlier
// one, the count of blocks that are done, and each block's bounds, which the last block
// joins. MLX reads arrays of 8 bytes from the host without a copy, so each pair of
// numbers that the host wants is an array of its own.

namespace lattice {

constexpr int HASH_BLOCKS = 1056;  // as many as write bounds; they stride over the rows

// Puts every row into table, all -1 before: slots_for(n) slots, then the shared words.
// scratch (words) becomes 0, for the first relation of the set.
// repeat (2): the least row that equals an earlier one, or -1. ranges[c] (2): the least
// and the greatest value of column c.
template <int COLUMNS>
__device__ __forceinline__ void hash_rows(const int* coords, int* table, int* repeat,
                                          int* const (&ranges)[COLUMNS],
                                          unsigned* scratch, int n, int words) {
  const unsigned capacity = slots_for(n);
  const int bits = row_bits(n);
  unsigned* shared_words = reinterpret_cast<unsigned*>(table) + capacity;
  unsigned *least_repeat = shared_words, *arrivals = shared_words + 1;
  int* bounds = reinterpret_cast<int*>(shared_words) + 2;
  for (long long i = grid_thread(); i < words; i += grid_threads()) scratch[i] = 0;
  int low[COLUMNS], high[COLUMNS];
#pragma unroll
  for (int c = 0; c < COLUMNS; ++c) low[c] = 0x7fffffff, high[c] = -0x7fffffff - 1;
  for (long long i = grid_thread(); i < n; i += grid_threads()) {
    const auto row = load_row<COLUMNS>(coords, i);
#pragma unroll
    for (int c = 0; c < COLUMNS; ++c) {
      low[c] = min(low[c], row.at[c]), high[c] = max(high[c], row.at[c]);
    }
    const Trail trail = row.trail();
    const int mine = tagged(trail.tag(), bits, (int)i);
    for (unsigned next = 0;; ++next) {
      int* slot = table + (trail.slot(next) & (capacity - 1));
      const int there = atomicCAS(slot, -1, mine);
      if (there == -1) break;
      if (!is_alike(there, mine, bits)) continue;
      if (row.equals(load_row<COLUMNS>(coords, row_of(there, bits)))) {
        // Whatever the order of arrival, the second of equal rows meets the first.
        const int other = row_of(atomicMin(slot, mine), bits);
        atomicMin(least_repeat, (unsigned)max(other, (int)i));
        break;
      }
    }
  }
  __shared__ int low_of[COLUMNS], high_of[COLUMNS];
  const auto join = [&]() {
    __syncthreads();
    if (threadIdx.x < COLUMNS) {
      low_of[threadIdx.x] = 0x7fffffff, high_of[threadIdx.x] = -0x7fffffff - 1;
    }
    __syncthreads();
#pragma unroll
    for (int c = 0; c < COLUMNS; ++c) {
      const int l = __reduce_min_sync(~0u, low[c]), h = __reduce_max_sync(~0u, high[c]);
      if ((threadIdx.x & 31) == 0) atomicMin(low_of + c, l), atomicMax(high_of + c, h);
    }
    __syncthreads();
  };
  join();
  if (threadIdx.x < COLUMNS) {
    bounds[2 * (blockIdx.x * COLUMNS + threadIdx.x)] = low_of[threadIdx.x];
    bounds[2 * (blockIdx.x * COLUMNS + threadIdx.x) + 1] = high_of[threadIdx.x];
  }
  if (!is_last_block(arrivals, ~0u)) return;
  for (int block = threadIdx.x; block < (int)gridDim.x; block += blockDim.x) {
#pragma unroll
    for (int c = 0; c < COLUMNS; ++c) {
      const int2 found =
          __ldcg(reinterpret_cast<const int2*>(bounds) + block * COLUMNS + c);
      low[c] = min(low[c], found.x), high[c] = max(high[c], found.y);
    }
  }
  join();
  if (threadIdx.x == 0) {
    repeat[0] = (int)__ldcg(least_repeat), repeat[1] = 0;
#pragma unroll
    for (int c = 0; c < COLUMNS; ++c) {
      ranges[c][0] = low_of[c], ranges[c][1] = high_of[c];
    }
  }
}

}  // namespace lattice
