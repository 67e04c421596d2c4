// Keys of coordinate rows along a Hilbert or Morton curve, for radix_sort.cu.
//
//   row -> cells, counted from the least -> (Skilling's transform) -> their bits, highest
//   first, one axis after another, below the batch index -> key, histograms of its digits
//
// Traffic: 4 bytes a column in, 4 or 8 out a row. In MLX's operations a Hilbert curve is
// 33 launches for each bit of an axis.

namespace lattice {

// Skilling, "Programming the Hilbert curve", 2004: the interleaved bits of x are then
// the place on the curve.
template <int AXES>
__device__ __forceinline__ void to_hilbert(unsigned (&x)[AXES], int bits) {
  for (int bit = bits - 1; bit > 0; --bit) {
    const unsigned low = (1u << bit) - 1;
#pragma unroll
    for (int a = 0; a < AXES; ++a) {
      const bool is_set = x[a] >> bit & 1;
      const unsigned swap = is_set ? 0 : (x[0] ^ x[a]) & low;
      x[0] ^= is_set ? low : swap;
      if (a > 0) x[a] ^= swap;
    }
  }
#pragma unroll
  for (int a = 1; a < AXES; ++a) x[a] ^= x[a - 1];
  unsigned flip = 0;
  for (int bit = bits - 1; bit > 0; --bit) {
    if (x[AXES - 1] >> bit & 1) flip ^= (1u << bit) - 1;
  }
#pragma unroll
  for (int a = 0; a < AXES; ++a) x[a] ^= flip;
}

// keys (n), unique as the rows are; frame: the least batch index, what cells of each axis
// are counted from, and the bits of an axis. scratch: see DigitCounts. 256 threads.
template <int COLUMNS, bool HILBERT, bool SWAPPED, typename KEY>
__device__ __forceinline__ void curve_keys(const int* coords, const int* frame,
                                           unsigned* scratch, CurveKeysSizes sizes,
                                           KEY* keys) {
  constexpr int AXES = COLUMNS - 1;
  __shared__ DigitCounts<KEY> digits;
  __shared__ int own_frame[COLUMNS + 1];
  digits.clear(sizes.passes);
  // Once a block: it lies in the CPU's memory.
  if (threadIdx.x <= COLUMNS) own_frame[threadIdx.x] = frame[threadIdx.x];
  __syncthreads();
  const int bits = own_frame[COLUMNS];
  for (long long i = grid_thread(); i < sizes.rows; i += grid_threads()) {
    const auto row = load_row<COLUMNS>(coords, i);
    unsigned x[AXES];
#pragma unroll
    for (int a = 0; a < AXES; ++a) {
      const int c = 1 + (SWAPPED && a < 2 ? 1 - a : a);
      x[a] = (unsigned)row.at[c] - (unsigned)own_frame[c];
    }
    if (HILBERT) to_hilbert(x, bits);
    KEY key = (unsigned)row.at[0] - (unsigned)own_frame[0];
    for (int bit = bits - 1; bit >= 0; --bit) {
#pragma unroll
      for (int a = 0; a < AXES; ++a) key = key << 1 | (x[a] >> bit & 1);
    }
    keys[i] = key;
    digits.add(key, sizes.digit_bits, sizes.passes);
  }
  __syncthreads();
  digits.store(scratch, sizes.passes);
}

}  // namespace lattice
