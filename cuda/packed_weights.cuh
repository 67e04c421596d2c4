// int4 and int8 weights that tiles read in place of floats: (K, C_out, channels) levels, and
// a scale and a bias a group of channels.
//
//   a thread:  levels, scale, bias -> registers, one stage ahead
//                -> scale * level + bias, rounded once to T -> shared memory
//
// They run along the input channels, so the tile is the transposed one, and a thread has 16
// bytes of neighbouring input channels: a word of int4 is eight of them; in WideTile 32
// channels, which have one scale. Storage may be padded beyond the last channel.

namespace lattice {

template <int BYTES>
struct BitsOf {
  using type = unsigned;
};
template <>
struct BitsOf<2> {
  using type = unsigned short;
};

// What the sorted tiles take in place of a pointer to float weights: (K, c_out, channels)
// levels, and a scale and a bias a group of `group_size` channels.
template <typename T, int BITS>
struct PackedWeights {
  static constexpr int EACH = 16 / sizeof(T);  // channels of a chunk
  static constexpr int WORDS = (EACH * BITS + 31) / 32;

  using Bits = typename BitsOf<sizeof(T)>::type;

  // A chunk in registers: its levels, lowest channel first, and the bits of its scale and
  // bias.
  struct Chunk {
    unsigned levels[WORDS];
    Bits scale, bias;
  };

  // Four chunks of 16-bit values: 32 channels, which have one scale.
  struct Quad {
    unsigned levels[4 * WORDS];
    Bits scale, bias;
  };

  __device__ static __forceinline__ float number(Bits bits) {
    return static_cast<float>(*reinterpret_cast<const T*>(&bits));
  }

  const unsigned* words;
  const T* scales;
  const T* biases;
  int c_out, scale_groups, group_size;  // groups of an output channel; channels of one

  // Reads neighbouring words, all at once or four at a time where they are ALIGNED.
  template <int COUNT, bool ALIGNED>
  __device__ static __forceinline__ void load_words(unsigned (&to)[COUNT],
                                                    const void* from,
                                                    cuda::std::bool_constant<ALIGNED>) {
    constexpr int EACH = !ALIGNED ? 1 : COUNT < 4 ? COUNT : 4;
    const unsigned* words = static_cast<const unsigned*>(from);
#pragma unroll
    for (int i = 0; i < COUNT; i += EACH) {
      if constexpr (EACH == 4) {
        const uint4 four = __ldg(reinterpret_cast<const uint4*>(words + i));
        to[i] = four.x, to[i + 1] = four.y, to[i + 2] = four.z, to[i + 3] = four.w;
      } else if constexpr (EACH == 2) {
        const uint2 two = __ldg(reinterpret_cast<const uint2*>(words + i));
        to[i] = two.x, to[i + 1] = two.y;
      } else {
        to[i] = __ldg(words + i);
      }
    }
  }

  // Reads the chunk at `channel` of an output channel, or of the last one: what lies
  // beyond it is never stored. No branch, so that a thread's loads are in flight together.
  template <bool ALIGNED>
  __device__ __forceinline__ void fetch(
      Chunk& to, long long k, int column, int channel,
      cuda::std::bool_constant<ALIGNED> aligned) const {
    // Within an offset, 32 bits are enough.
    const unsigned at = (unsigned)min(column, c_out - 1) * scale_groups;
    const char* from = reinterpret_cast<const char*>(words) +
                       k * c_out * scale_groups * (group_size * BITS / 8) +
                       (at * group_size + channel) * BITS / 8;
    if constexpr (EACH * BITS < 32) {
      to.levels[0] = __ldg(reinterpret_cast<const unsigned short*>(from));
    } else {
      load_words(to.levels, from, aligned);
    }
    const long long first = k * c_out * scale_groups;
    const unsigned place = at + (unsigned)channel / group_size;
    to.scale = __ldg(reinterpret_cast<const Bits*>(scales) + first + place);
    to.bias = __ldg(reinterpret_cast<const Bits*>(biases) + first + place);
  }

  // The same for a quad.
  template <bool ALIGNED>
  __device__ __forceinline__ void fetch(
      Quad& to, long long k, int column, int channel,
      cuda::std::bool_constant<ALIGNED> aligned) const {
    const long long line = k * c_out + min(column, c_out - 1);
    const long long place = line * scale_groups + channel / group_size;
    const long long at = (line * scale_groups * group_size + channel) * BITS / 32;
    load_words(to.levels, words + at, aligned);
    to.scale = __ldg(reinterpret_cast<const Bits*>(scales) + place);
    to.bias = __ldg(reinterpret_cast<const Bits*>(biases) + place);
  }

  // The value of one level: 2^23 + level is exact, and needs no conversion.
  __device__ static __forceinline__ float value(const Chunk& chunk, int j) {
    const unsigned word = chunk.levels[j * BITS / 32];
    const unsigned level = word >> (j * BITS % 32) & ((1u << BITS) - 1);
    return fmaf(number(chunk.scale), __uint_as_float(0x4b000000u | level) - 8388608.0f,
                number(chunk.bias));
  }

  // Two neighbouring values in half: 1024 + level is exact there, 1024 + 16 level too,
  // and a multiply-add in half rounds once.
  __device__ static __forceinline__ unsigned half_pair(const Chunk& chunk, int i) {
    const unsigned word = chunk.levels[2 * i * BITS / 32];
    __half2 levels;
    if constexpr (BITS == 8) {
      const unsigned two = __byte_perm(word, 0x64646464, i % 2 ? 0x4342 : 0x4140);
      levels = __hsub2(as_half2(two), as_half2(0x64006400));
    } else {
      const unsigned two = __byte_perm(word, 0, 0x4040 + 0x0101 * i);
      levels = __hfma2(as_half2((two & 0x00f0000f) | 0x64006400), as_half2(0x2c003c00),
                       as_half2(0xd400e400));
    }
    const __half2 both = __hfma2(as_half2(__byte_perm(chunk.scale, 0, 0x1010)), levels,
                                 as_half2(__byte_perm(chunk.bias, 0, 0x1010)));
    return *reinterpret_cast<const unsigned*>(&both);
  }

  __device__ static __forceinline__ __half2 as_half2(unsigned bits) {
    return *reinterpret_cast<const __half2*>(&bits);
  }

  // The values of a chunk, rounded once; zeros unless inside.
  __device__ static __forceinline__ uint4 values(Chunk chunk, bool inside) {
    unsigned out[4];
    if (!inside) chunk.scale = chunk.bias = 0;
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      if constexpr (sizeof(T) == 4) {
        out[i] = __float_as_uint(value(chunk, i));
      } else if constexpr (!is_bfloat16<T>) {
        out[i] = half_pair(chunk, i);
      } else {
        out[i] = pack2<T>(value(chunk, 2 * i), value(chunk, 2 * i + 1));
      }
    }
    return make_uint4(out[0], out[1], out[2], out[3]);
  }

  // Writes them to shared memory.
  __device__ static __forceinline__ void store(unsigned to, const Chunk& chunk,
                                               bool inside) {
    const uint4 four = values(chunk, inside);
    asm volatile("st.shared.v4.b32 [%0], {%1, %2, %3, %4};" ::"r"(to), "r"(four.x),
                 "r"(four.y), "r"(four.z), "r"(four.w)
                 : "memory");
  }

  // Writes chunk i of a quad.
  __device__ static __forceinline__ void store(unsigned to, const Quad& quad, int i) {
    Chunk chunk;
#pragma unroll
    for (int word = 0; word < WORDS; ++word) {
      chunk.levels[word] = quad.levels[i * WORDS + word];
    }
    chunk.scale = quad.scale, chunk.bias = quad.bias;
    store(to, chunk, true);
  }
};

}  // namespace lattice
