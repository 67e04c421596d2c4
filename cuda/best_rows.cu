// Rows of greatest score of each batch element, by radix_sort.cu.
//
//   scores, batch indices -> keys + histograms -> radix passes -> which rows are kept
//
// A key has the number of the element, then the bits of the score so turned that a
// greater one comes first: zeros of both signs are one, and a NaN comes last. The sort is
// stable, so that of equal scores the earlier row comes first.
// Traffic: the score and 4 bytes in and 4 or 8 out a row; then 8 or 12 in and 1 out.

namespace lattice {

// Of a floating number's bits, those that a greater number has lesser. INFINITE: the
// bits of infinity.
template <int INFINITE, typename WORD>
__device__ __forceinline__ WORD falling(WORD bits) {
  constexpr WORD SIGN = (WORD)1 << (8 * sizeof(WORD) - 1);
  const WORD size = bits & (WORD)~SIGN;
  if (size > (WORD)INFINITE) return (WORD)~(WORD)0;
  if (size == 0) bits = 0;
  return bits & SIGN ? bits : (WORD)(bits ^ (WORD)~SIGN);
}

// keys (n); scratch: see DigitCounts. 256 threads.
template <int COLUMNS, int INFINITE, typename KEY, typename WORD>
__device__ __forceinline__ void score_keys(const WORD* scores, const int* coords,
                                           unsigned* scratch, ScoreKeysSizes sizes,
                                           KEY* keys) {
  __shared__ DigitCounts<KEY> digits;
  digits.clear(sizes.passes);
  __syncthreads();
  for (long long at = grid_thread(); at < sizes.rows; at += grid_threads()) {
    const unsigned element = (unsigned)coords[at * COLUMNS] - (unsigned)sizes.least;
    KEY key = falling<INFINITE>(scores[at]);
    if constexpr (sizeof(KEY) > sizeof(WORD)) key |= (KEY)element << 8 * sizeof(WORD);
    keys[at] = key;
    digits.add(key, sizes.digit_bits, sizes.passes);
  }
  __syncthreads();
  digits.store(scratch, sizes.passes);
}

// kept (n), of sorted keys and the rows that they are of: of an element's keys each but
// the first k has another of it k places before. score_bits: of a key.
template <typename KEY>
__device__ __forceinline__ void mark_best(const KEY* keys, const int* rows,
                                          MarkBestSizes sizes, bool* kept) {
  for (long long at = grid_thread(); at < sizes.rows; at += grid_threads()) {
    const long long before = at - sizes.k;
    bool is_best = before < 0;
    if (!is_best && sizes.score_bits < 8 * (int)sizeof(KEY)) {
      is_best = keys[at] >> sizes.score_bits != keys[before] >> sizes.score_bits;
    }
    kept[rows[at]] = is_best;
  }
}

}  // namespace lattice
