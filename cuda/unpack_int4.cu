// unpack_int4: int4 weights of two levels as int8, for the length of a call of int8_sorted:
// the product of a nibble, -7 to 7, and of its group's multiplier, 1 to 18. 16 channels a
// thread. Traffic: half a byte read and one written a weight, which stays in the L2 cache.

namespace lattice {

// words (K, c_out, padded / 8), channel j of a word in bits 4 j; multipliers (K, c_out,
// padded / GROUP_SIZE); w (K, c_out, padded).
template <int GROUP_SIZE>
__device__ __forceinline__ void unpack_int4(const unsigned* words,
                                            const signed char* multipliers,
                                            const UnpackInt4Sizes& sizes, signed char* w) {
  const long long at = (long long)blockIdx.x * blockDim.x + threadIdx.x;
  if (at >= (long long)sizes.lines * (sizes.padded / 16)) return;
  const int multiplier = multipliers[at / (GROUP_SIZE / 16)];
  unsigned to[4];
#pragma unroll
  for (int i = 0; i < 4; ++i) {
    const unsigned word = words[2 * at + i / 2] >> 16 * (i & 1);
    unsigned bytes = 0;
#pragma unroll
    for (int j = 0; j < 4; ++j) {
      const int level = (int)(word << (28 - 4 * j)) >> 28;
      bytes |= (unsigned)(level * multiplier & 0xff) << 8 * j;
    }
    to[i] = bytes;
  }
  reinterpret_cast<uint4*>(w)[at] = make_uint4(to[0], to[1], to[2], to[3]);
}

}  // namespace lattice
