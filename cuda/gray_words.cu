// Gray ranks of masks of 65 to 126 offsets, in two words: such rows are sorted by the low
// word, then, stably, by the high one (radix_sort.cu).
//
//   a row of the table -> its mask -> its rank: bit b is the parity of the bits from b up
//   -> high and low word, and histograms of their digits
//
// A warp takes a row after the other, and reads along it.
// Traffic: 4 K bytes a row in, 16 out.

namespace lattice {

constexpr int LOW_BITS = 63, LOW_PASSES = 7, LOW_DIGIT = 9;

// The binary number whose Gray code is mask, of 64 bits.
__device__ __forceinline__ unsigned long long gray_rank(unsigned long long mask) {
#pragma unroll
  for (int by = 1; by < 64; by *= 2) mask ^= mask >> by;
  return mask;
}

// low, high (n): words of the ranks, LOW_BITS in low. scratch, of_high, all 0 before: the
// histograms of their digits from HEADER on; sizes has those of high. 256 threads.
__device__ __forceinline__ void gray_words(const int* table, unsigned* scratch,
                                           unsigned* of_high, GrayWordsSizes sizes,
                                           unsigned long long* low,
                                           unsigned long long* high) {
  __shared__ int histogram[2][LOW_PASSES * BINS];
  int* counts = histogram[0];
  for (int i = threadIdx.x; i < 2 * LOW_PASSES * BINS; i += 256) counts[i] = 0;
  __syncthreads();
  const int lane = threadIdx.x & 31, volume = sizes.volume;
  for (long long row = grid_thread() / 32; row < sizes.rows; row += grid_threads() / 32) {
    unsigned words[4];
#pragma unroll
    for (int w = 0; w < 4; ++w) {
      const int k = 32 * w + lane;
      words[w] = __ballot_sync(~0u, k < volume && table[row * volume + k] >= 0);
    }
    const unsigned long long top = (unsigned long long)words[3] << 32 | words[2];
    const unsigned long long above = gray_rank(top);
    unsigned long long below = gray_rank((unsigned long long)words[1] << 32 | words[0]);
    if (above & 1) below = ~below;  // the parity of all bits of top
    const unsigned long long of[] = {below & ((1ull << LOW_BITS) - 1),
                                     above << 1 | below >> LOW_BITS};
    if (lane == 0) low[row] = of[0], high[row] = of[1];
    const int word = lane >> 4, pass = lane & 15;
    const int bits = word ? sizes.digit_bits : LOW_DIGIT;
    if (pass < (word ? sizes.passes : LOW_PASSES)) {
      const int digit = (int)(of[word] >> (pass * bits)) & ((1 << bits) - 1);
      atomicAdd(histogram[word] + pass * BINS + digit, 1);
    }
  }
  __syncthreads();
  for (int i = threadIdx.x; i < LOW_PASSES * BINS; i += 256) {
    if (histogram[0][i]) atomicAdd(scratch + HEADER + i, (unsigned)histogram[0][i]);
    const bool has = i < sizes.passes * BINS && histogram[1][i];
    if (has) atomicAdd(of_high + HEADER + i, (unsigned)histogram[1][i]);
  }
}

}  // namespace lattice
