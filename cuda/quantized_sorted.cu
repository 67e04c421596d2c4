// y[o] = sum over the edges of o of x[i] @ W[k], W packed: tiles over mask-sorted rows.
//
//   the tiles of sorted_implicit_gemm (mma.sync) and of its Hopper sibling (wgmma):
//     for k used by the tile, for 128 bytes of channels:
//       gathered rows of x --------------------------- cp.async --> shared memory
//       levels, scale, bias -> registers, one stage ahead
//           -> scale * level + bias, rounded once to T -----------> shared memory
//
// Packed weights are (K, C_out, channels), so the tile is the transposed one, and a
// thread has 16 bytes of neighbouring input channels: a word of int4 is eight of them.
// Traffic per output row: its live input rows, and a half (int4) or one (int8) byte of
// weight for each C_in x C_out of each offset of its tile; no float weight reaches
// device memory. It wins over the traversal from about a thousand rows on, and over
// float weights where these exceed the cache. Reads tiles.cuh too.

namespace lattice {

template <int BYTES>
struct BitsOf {
  using type = unsigned;
};
template <>
struct BitsOf<2> {
  using type = unsigned short;
};

// What the sorted tiles take in place of a pointer to float weights.
template <typename T, int BITS>
struct PackedWeights {
  static constexpr int EACH = 16 / sizeof(T);  // channels of a chunk
  static constexpr int WORDS = (EACH * BITS + 31) / 32;

  using Bits = typename BitsOf<sizeof(T)>::type;

  // A chunk on its way: its levels, lowest channel first, and the bits of its scale and
  // bias.
  struct Part {
    unsigned levels[WORDS];
    Bits scale, bias;
  };

  __device__ static __forceinline__ float number(Bits bits) {
    return static_cast<float>(*reinterpret_cast<const T*>(&bits));
  }

  const unsigned* words;
  const T* scales;
  const T* biases;
  int c_out, shares, share;  // shares of a line, and channels of a share

  // Reads the chunk at `channel` of an output channel, or of the last one: what lies
  // beyond it is never stored. No branch, so that a thread's loads travel together.
  template <bool ALIGNED>
  __device__ __forceinline__ void fetch(Part& to, long long k, int column, int channel,
                                        cuda::std::bool_constant<ALIGNED>) const {
    // Within an offset, 32 bits are enough.
    const unsigned at = (unsigned)min(column, c_out - 1) * shares;
    const char* from = reinterpret_cast<const char*>(words) +
                       k * c_out * shares * (share * BITS / 8) +
                       (at * share + channel) * BITS / 8;
    if constexpr (WORDS == 2 && !ALIGNED) {
#pragma unroll
      for (int i = 0; i < 2; ++i) {
        to.levels[i] = __ldg(reinterpret_cast<const unsigned*>(from) + i);
      }
    } else if constexpr (WORDS == 2) {
      const uint2 two = __ldg(reinterpret_cast<const uint2*>(from));
      to.levels[0] = two.x, to.levels[1] = two.y;
    } else if constexpr (EACH * BITS == 32) {
      to.levels[0] = __ldg(reinterpret_cast<const unsigned*>(from));
    } else {
      to.levels[0] = __ldg(reinterpret_cast<const unsigned short*>(from));
    }
    const long long first = k * c_out * shares;
    const unsigned place = at + (unsigned)channel / share;
    to.scale = __ldg(reinterpret_cast<const Bits*>(scales) + first + place);
    to.bias = __ldg(reinterpret_cast<const Bits*>(biases) + first + place);
  }

  // The value of one level: 2^23 + level is exact, and needs no conversion.
  __device__ static __forceinline__ float value(const Part& part, int j) {
    const unsigned word = part.levels[j * BITS / 32];
    const unsigned level = word >> (j * BITS % 32) & ((1u << BITS) - 1);
    return fmaf(number(part.scale), __uint_as_float(0x4b000000u | level) - 8388608.0f,
                number(part.bias));
  }

  // Two neighbouring values in half: 1024 + level is exact there, 1024 + 16 level too,
  // and a multiply-add in half rounds once.
  __device__ static __forceinline__ unsigned half_pair(const Part& part, int i) {
    const unsigned word = part.levels[2 * i * BITS / 32];
    __half2 levels;
    if constexpr (BITS == 8) {
      const unsigned two = __byte_perm(word, 0x64646464, i % 2 ? 0x4342 : 0x4140);
      levels = __hsub2(as_half2(two), as_half2(0x64006400));
    } else {
      const unsigned two = __byte_perm(word, 0, 0x4040 + 0x0101 * i);
      levels = __hfma2(as_half2((two & 0x00f0000f) | 0x64006400), as_half2(0x2c003c00),
                       as_half2(0xd400e400));
    }
    const __half2 both = __hfma2(as_half2(__byte_perm(part.scale, 0, 0x1010)), levels,
                                 as_half2(__byte_perm(part.bias, 0, 0x1010)));
    return *reinterpret_cast<const unsigned*>(&both);
  }

  __device__ static __forceinline__ __half2 as_half2(unsigned bits) {
    return *reinterpret_cast<const __half2*>(&bits);
  }

  // Writes the chunk to shared memory, rounded once; zeros unless inside.
  __device__ static __forceinline__ void store(unsigned to, Part part, bool inside) {
    unsigned out[4];
    if (!inside) part.scale = part.bias = 0;
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      if constexpr (sizeof(T) == 4) {
        out[i] = __float_as_uint(value(part, i));
      } else if constexpr (!is_bfloat16<T>) {
        out[i] = half_pair(part, i);
      } else {
        out[i] = pack2<T>(value(part, 2 * i), value(part, 2 * i + 1));
      }
    }
    asm volatile("st.shared.v4.b32 [%0], {%1, %2, %3, %4};" ::"r"(to), "r"(out[0]),
                 "r"(out[1]), "r"(out[2]), "r"(out[3])
                 : "memory");
  }
};

}  // namespace lattice
