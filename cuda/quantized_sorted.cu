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

  // A chunk on its way: its levels, lowest channel first, and the bits of the scale and
  // of the bias; two of 16 bits share a register.
  struct Part {
    unsigned levels[WORDS], scaling[sizeof(T) / 2];

    __device__ __forceinline__ float scale() const { return number(scaling[0]); }

    __device__ __forceinline__ float bias() const {
      return number(sizeof(T) == 2 ? scaling[0] >> 16 : scaling[sizeof(T) / 4]);
    }
  };

  __device__ static __forceinline__ float number(unsigned bits) {
    const Bits low = static_cast<Bits>(bits);
    return static_cast<float>(*reinterpret_cast<const T*>(&low));
  }

  const unsigned* words;
  const T* scales;
  const T* biases;
  int c_out, shares, share;  // shares of a line, and channels of a share

  // Reads the chunk at `channel` of an output channel; zeros unless inside.
  __device__ __forceinline__ void fetch(Part& to, long long k, int column, int channel,
                                        bool inside) const {
    if (!inside || column >= c_out) {
      to = {};
      return;
    }
    const long long line = (k * c_out + column) * shares;
    const char* from =
        reinterpret_cast<const char*>(words) + (line * share + channel) * BITS / 8;
    if constexpr (WORDS == 2) {
      const uint2 two = __ldg(reinterpret_cast<const uint2*>(from));
      to.levels[0] = two.x, to.levels[1] = two.y;
    } else if constexpr (EACH * BITS == 32) {
      to.levels[0] = __ldg(reinterpret_cast<const unsigned*>(from));
    } else {
      to.levels[0] = __ldg(reinterpret_cast<const unsigned short*>(from));
    }
    const long long at = line + channel / share;
    const unsigned scale = reinterpret_cast<const Bits*>(scales)[at];
    const unsigned bias = reinterpret_cast<const Bits*>(biases)[at];
    if constexpr (sizeof(T) == 2) {
      to.scaling[0] = scale | bias << 16;
    } else {
      to.scaling[0] = scale, to.scaling[1] = bias;
    }
  }

  // The value of one level: 2^23 + level is exact, and needs no conversion.
  __device__ static __forceinline__ float value(const Part& part, int j) {
    const unsigned word = part.levels[j * BITS / 32];
    const unsigned level = word >> (j * BITS % 32) & ((1u << BITS) - 1);
    return fmaf(part.scale(), __uint_as_float(0x4b000000u | level) - 8388608.0f,
                part.bias());
  }

  // Writes the chunk to shared memory, rounded once.
  __device__ static __forceinline__ void store(unsigned to, const Part& part) {
    unsigned out[4];
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      if constexpr (sizeof(T) == 4) {
        out[i] = __float_as_uint(value(part, i));
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
