// Rows of greatest score of each batch element: keys, MLX's sort, and which are kept.
//
// A key has the number of the element, then the bits of the score so turned that a
// greater one comes first, then the row's own index: zeros of both signs are one, a NaN
// comes last, and the order is the same with any sort. Traffic: the score and 4 bytes read
// and 8 written a row; then 16 read and 1 written.

#include <metal_stdlib>
using namespace metal;

// Of a floating number's bits, those that a greater number has lesser. INFINITE: the
// bits of infinity.
template <int INFINITE, typename WORD>
METAL_FUNC WORD falling(WORD bits) {
  constexpr WORD SIGN = WORD(1) << (8 * sizeof(WORD) - 1);
  const WORD size = bits & WORD(~SIGN);
  if (size > WORD(INFINITE)) return WORD(~WORD(0));
  if (size == 0) bits = 0;
  return bits & SIGN ? bits : WORD(bits ^ WORD(~SIGN));
}

// One thread a row from sizes.first on. `least`: the least batch index.
template <int W, int INFINITE, typename WORD>
METAL_FUNC void score_keys(
    const device int* coords,
    const device WORD* scores,
    ScoreKeysSizes sizes,
    device int64_t* keys,
    uint at) {
  const size_t row = size_t(sizes.first) + at;
  const int64_t element = int64_t(coords[row * W]) - sizes.least;
  const int64_t score = int64_t(falling<INFINITE>(scores[row]));
  const int64_t key = (element << (8 * sizeof(WORD))) | score;
  keys[at] = (key << sizes.row_bits) | int64_t(row);
}

// One thread a sorted key: of an element's keys each but the first k has another of it k
// places before. low_bits: of the score and the row.
METAL_FUNC void mark_best(
    const device int64_t* keys, MarkBestSizes sizes, device bool* kept, uint at) {
  const int64_t key = keys[at];
  bool is_best = int(at) < sizes.k;
  if (!is_best) is_best = (key ^ keys[at - sizes.k]) >> sizes.low_bits != 0;
  kept[key & ((int64_t(1) << sizes.row_bits) - 1)] = is_best;
}
