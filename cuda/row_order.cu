// Places of a table by the row that they name, for reductions into those rows.
//
//   places -> keys (row + 1, so that those of no row come first), histograms
//   -> radix passes (radix_sort.cu) -> where the places of each row begin
//   -> pieces that a thread can add up
//
// Traffic: 4 bytes a place in and out, 8 in and out a pass; a binary search a row, and one
// a cut.

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

// How many of some sorted values are not above one.
template <typename T>
__device__ __forceinline__ int up_to_value(const T* values, int count, T value) {
  int low = 0, high = count;
  while (low < high) {
    const int middle = low + (high - low) / 2;
    if (values[middle] <= value) {
      low = middle + 1;
    } else {
      high = middle;
    }
  }
  return low;
}

// starts (rows + 1) of sorted keys; rows lie in the CPU's memory.
__device__ __forceinline__ void row_starts(const unsigned* keys, const int* rows,
                                           RowStartsSizes sizes, int* starts) {
  __shared__ int count;
  if (threadIdx.x == 0) count = rows[0];
  __syncthreads();
  for (long long row = grid_thread(); row <= count; row += grid_threads()) {
    starts[row] = up_to_value(keys, sizes.places, (unsigned)row);
  }
}

// Segments from starts on, cut at every PIECE of size entries: bounds, all starts and cuts
// in order, and the first piece of each segment. size lies in the CPU's memory.
template <int PIECE>
__device__ __forceinline__ void cut_pieces(const int* starts, const int* size,
                                           CutPiecesSizes sizes, int* bounds,
                                           int* firsts) {
  __shared__ int cuts;
  if (threadIdx.x == 0) cuts = (size[0] + PIECE - 1) / PIECE;
  __syncthreads();
  const int n = sizes.starts;
  for (long long i = grid_thread(); i < (long long)n + cuts; i += grid_threads()) {
    const bool is_cut = i >= n;
    const int j = (int)(is_cut ? i - n : i);
    const int value = is_cut ? j * PIECE : starts[j];
    const int before =
        is_cut ? up_to_value(starts, n, value) : (value + PIECE - 1) / PIECE;
    bounds[j + before] = value;
    if (!is_cut) firsts[j] = j + before;
  }
}

}  // namespace lattice
