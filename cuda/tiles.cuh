// What every tile kernel needs: 16-byte asynchronous copies, what stands for the weights
// (floats or packed levels), and the list of kernel offsets that a tile uses.

namespace lattice {

#ifndef LATTICE_MAX_OFFSETS
#define LATTICE_MAX_OFFSETS 512
#endif
constexpr int MAX_OFFSETS = LATTICE_MAX_OFFSETS;  // room in a tile's list of offsets

template <typename T>
inline constexpr bool is_bfloat16 = false;
template <>
inline constexpr bool is_bfloat16<__nv_bfloat16> = true;

// What products of a dtype are added up in: int8 is exact in int.
template <typename T>
struct SumOf {
  using Sum = float;
};
template <>
struct SumOf<signed char> {
  using Sum = int;
};
template <typename T>
using Sum = typename SumOf<T>::Sum;
template <typename T>
inline constexpr bool is_integer = sizeof(T) == 1;

// Weights are a pointer to numbers, or PackedWeights, which producer threads unpack.
template <typename W>
inline constexpr bool is_packed = true;
template <typename T>
inline constexpr bool is_packed<T*> = false;

// What a thread holds of packed weights between their load and their store: one 16-byte
// chunk of values, or four that have one scale. Nothing for floats.
template <typename W>
struct Held {
  using Chunk = typename W::Chunk;
  using Quad = typename W::Quad;
};
template <typename T>
struct Held<T*> {
  struct Chunk {};
  using Quad = Chunk;
};

__device__ __forceinline__ unsigned shared_address(const void* p) {
  return static_cast<unsigned>(__cvta_generic_to_shared(p));
}

// The first address of the weights.
template <typename W>
__device__ __forceinline__ auto start_of(const W& w) {
  if constexpr (is_packed<W>) return w.words;
  else return w;
}

// Copies 16 bytes to shared memory, or writes zeros if not present.
__device__ __forceinline__ void copy16(unsigned to, const void* from, bool present) {
  asm volatile("cp.async.cg.shared.global [%0], [%1], 16, %2;" ::"r"(to), "l"(from),
               "r"(present ? 16 : 0));
}

// The same. A source that is not ALIGNED begins at any element: the thread itself loads
// the words that hold it, shifts and stores them.
template <bool ALIGNED>
__device__ __forceinline__ void copy16(unsigned to, const void* from, bool present,
                                       cuda::std::bool_constant<ALIGNED>) {
  if constexpr (ALIGNED) {
    copy16(to, from, present);
  } else {
    const auto at = reinterpret_cast<unsigned long long>(from);
    const unsigned* words = reinterpret_cast<const unsigned*>(at & ~3ULL);
    const unsigned shift = (at & 3) * 8;
    unsigned v[5] = {};
    if (present) {
#pragma unroll
      for (int i = 0; i < 4; ++i) v[i] = __ldg(words + i);
      if (shift) v[4] = __ldg(words + 4);
    }
#pragma unroll
    for (int i = 0; i < 4; ++i) v[i] = __funnelshift_r(v[i], v[i + 1], shift);
    asm volatile("st.shared.v4.b32 [%0], {%1, %2, %3, %4};" ::"r"(to), "r"(v[0]),
                 "r"(v[1]), "r"(v[2]), "r"(v[3])
                 : "memory");
  }
}

// The same where it is needed, without a branch, in which the compiler would put what the
// address takes.
template <bool ALIGNED>
__device__ __forceinline__ void copy16_if(bool needed, unsigned to, const void* from,
                                          bool present,
                                          cuda::std::bool_constant<ALIGNED> aligned) {
  if constexpr (ALIGNED) {
    asm volatile(
        "{\n.reg .pred needed;\nsetp.ne.b32 needed, %3, 0;\n"
        "@needed cp.async.cg.shared.global [%0], [%1], 16, %2;\n}" ::"r"(to),
        "l"(from), "r"(present ? 16 : 0), "r"(int(needed)));
  } else if (needed) {
    copy16(to, from, present, aligned);
  }
}

template <typename T>
__device__ __forceinline__ unsigned pack2(float a, float b) {
  if constexpr (is_bfloat16<T>) {
    __nv_bfloat162 v = __floats2bfloat162_rn(a, b);
    return *reinterpret_cast<unsigned*>(&v);
  } else {
    __half2 v = __floats2half2_rn(a, b);
    return *reinterpret_cast<unsigned*>(&v);
  }
}

// Lists, in order, the offsets whose bit is set in a mask of the tile. Returns how many.
__device__ __forceinline__ int list_offsets(unsigned short* live, const unsigned* masks,
                                            int first_block, int blocks, int all_blocks,
                                            int words) {
  const int lane = threadIdx.x & 31;
  int count = 0;
  for (int word = 0; word < words; ++word) {
    unsigned bits = 0;
    for (int b = lane; b < blocks; b += 32) {
      if (first_block + b < all_blocks) {
        bits |= masks[(long long)(first_block + b) * words + word];
      }
    }
    bits = __reduce_or_sync(~0u, bits);
    if (bits >> lane & 1) {
      live[count + __popc(bits & ((1u << lane) - 1))] = 32 * word + lane;
    }
    count += __popc(bits);
  }
  return count;
}

}  // namespace lattice
