// Places of a table by the row that they name, for reductions into those rows.
//
//   places -> keys (row + 1, so that those of no row come first), histograms
//   -> radix passes (radix_sort.cu) -> where the places of each row begin
//
// Traffic: 4 bytes a place in and out, 8 in and out a pass; a binary search a row.

namespace lattice {

// keys (places) of a flat table; scratch: see DigitCounts. 256 threads.
__device__ __forceinline__ void row_keys(const int* table, unsigned* scratch,
                                         RowKeysSizes sizes, unsigned* keys) {
  __shared__ DigitCounts<unsigned> digits;
  digits.clear(sizes.passes);
  __syncthreads();
  for (long long i = grid_thread(); i < sizes.places; i += grid_threads()) {
    const unsigned key = (unsigned)(max(table[i], -1) + 1);
    keys[i] = key;
    digits.add(key, sizes.digit_bits, sizes.passes);
  }
  __syncthreads();
  digits.store(scratch, sizes.passes);
}

// starts (rows + 1) of sorted keys; rows lie in the CPU's memory.
__device__ __forceinline__ void row_starts(const unsigned* keys, const int* rows,
                                           RowStartsSizes sizes, int* starts) {
  __shared__ int count;
  if (threadIdx.x == 0) count = rows[0];
  __syncthreads();
  for (long long row = grid_thread(); row <= count; row += grid_threads()) {
    int low = 0, high = sizes.places;
    while (low < high) {
      const int middle = low + (high - low) / 2;
      if (keys[middle] <= (unsigned)row) {
        low = middle + 1;
      } else {
        high = middle;
      }
    }
    starts[row] = low;
  }
}

}  // namespace lattice
