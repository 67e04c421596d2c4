// unpack_weights: int4 or int8 weights as floats, each rounded once, for the length of a call
// of quantized_sorted: (K, c_out, channels) levels to (K, c_in, c_out), which the tiles of
// sorted_implicit_gemm read.
//
// A thread transposes a square of EACH chunks of EACH channels, so that it reads and writes
// 16 bytes at once. Wins where many tiles would unpack the same weights.

namespace lattice {

// to (K, c_in, c_out), both padded to 16 bytes; the packed storage has `padding` channels
// more than c_in. Thread blocks: (squares / 256, K) of 256 threads.
template <typename T, int BITS, int GROUP_SIZE>
__device__ __forceinline__ void unpack_weights(const unsigned* words, const T* scales,
                                               const T* biases, const UnpackSizes& sizes,
                                               T* to) {
  const PackedWeights<T, BITS> w = {
      words, scales, biases, sizes.c_out, sizes.scale_groups, GROUP_SIZE};
  constexpr int EACH = PackedWeights<T, BITS>::EACH;
  const unsigned down = (w.scale_groups * w.group_size - sizes.padding) / EACH;
  const unsigned across = (w.c_out + EACH - 1) / EACH;
  const unsigned at = blockIdx.x * blockDim.x + threadIdx.x;
  if (at >= down * across) return;
  const int column = at % across * EACH, channel = at / across * EACH;
  typename PackedWeights<T, BITS>::Chunk chunks[EACH];
  auto fetch = [&](auto aligned) {
#pragma unroll
    for (int i = 0; i < EACH; ++i) {
      w.fetch(chunks[i], blockIdx.y, column + i, channel, aligned);
    }
  };
  by_alignment(fetch, w.words);
  uint4 columns[EACH];
#pragma unroll
  for (int i = 0; i < EACH; ++i) columns[i] = w.values(chunks[i], column + i < w.c_out);
  const T(&square)[EACH][EACH] = reinterpret_cast<const T(&)[EACH][EACH]>(columns);
  const long long first = (long long)blockIdx.y * down * EACH + channel;
  uint4* line = reinterpret_cast<uint4*>(to) + first * across + at % across;
#pragma unroll
  for (int j = 0; j < EACH; ++j, line += across) {
    uint4 row;
#pragma unroll
    for (int i = 0; i < EACH; ++i) reinterpret_cast<T*>(&row)[i] = square[i][j];
    *line = row;
  }
}

}  // namespace lattice
