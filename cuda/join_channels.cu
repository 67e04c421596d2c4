// Rows of two arrays side by side, as a skip connection joins them, y = (a | b), and the
// way back of their gradients: apart again.
//
//   a (N, c_a)  ####       y (N, c_a + c_b)  ####++++
//   b (N, c_b)  ++++       without b         ####0000
//
// Or lines below zeros, where an axis before the last one is filled up.
//
// A block has BLOCK_ROWS neighbouring rows, a thread EACH neighbouring channels at a time.
// Traffic: all once. One launch, where MLX copies each array by itself, number by number,
// fills what is padded before, and copies a part of rows once for each kernel that reads
// it. Reads alignment.cuh, channels.cuh too.

namespace lattice {

// EACH: channels of 16 bytes, or as many as divide both numbers of channels.
template <typename T, int EACH, int BLOCK_ROWS>
__device__ __forceinline__ void join_channels(const T* a, const T* b,
                                              const JoinChannelsSizes& sizes, T* y) {
  const long long first = (long long)blockIdx.x * BLOCK_ROWS;
  const int rows = min((long long)BLOCK_ROWS, sizes.rows - first);
  const int of_a = sizes.c_a / EACH, of_b = sizes.c_b / EACH, across = of_a + of_b;
  a += first * sizes.c_a;
  if (b) b += first * sizes.c_b;
  y += first * (sizes.c_a + sizes.c_b);
  by_alignment([&](auto aligned) {
#pragma unroll 4
    for (int at = threadIdx.x; at < rows * across; at += blockDim.x) {
      const int row = at / across, place = at - row * across;
      Channels<T, EACH> v = {};
      if (place < of_a) {
        v = load_channels<EACH>(a + (row * of_a + place) * EACH, aligned);
      } else if (b) {
        v = load_channels<EACH>(b + (row * of_b + place - of_a) * EACH, aligned);
      }
      reinterpret_cast<Channels<T, EACH>*>(y)[at] = v;
    }
  }, a, b);
}

// a, b: the parts of y.
template <typename T, int EACH, int BLOCK_ROWS>
__device__ __forceinline__ void split_channels(const T* y, const SplitChannelsSizes& sizes,
                                               T* a, T* b) {
  const long long first = (long long)blockIdx.x * BLOCK_ROWS;
  const int rows = min((long long)BLOCK_ROWS, sizes.rows - first);
  const int of_a = sizes.c_a / EACH, of_b = sizes.c_b / EACH, across = of_a + of_b;
  y += first * (sizes.c_a + sizes.c_b);
  auto* to_a = reinterpret_cast<Channels<T, EACH>*>(a + first * sizes.c_a);
  auto* to_b = reinterpret_cast<Channels<T, EACH>*>(b + first * sizes.c_b);
  by_alignment([&](auto aligned) {
#pragma unroll 4
    for (int at = threadIdx.x; at < rows * across; at += blockDim.x) {
      const int row = at / across, place = at - row * across;
      const auto v = load_channels<EACH>(y + at * EACH, aligned);
      if (place < of_a) {
        to_a[row * of_a + place] = v;
      } else {
        to_b[row * of_b + place - of_a] = v;
      }
    }
  }, y);
}

// y (outer, lines up to a multiple of MULTIPLE, inner) of a (outer, lines, inner): zeros
// after its lines. EACH: numbers of 16 bytes, or as many as divide `inner`.
template <typename T, int EACH, int MULTIPLE>
__device__ __forceinline__ void fill_lines(const T* a, const FillLinesSizes& sizes, T* y) {
  const long long inner = sizes.inner / EACH, of_a = sizes.lines * inner;
  const long long of_y = (sizes.lines + MULTIPLE - 1) / MULTIPLE * MULTIPLE * inner;
  const long long threads = (long long)gridDim.x * blockDim.x;
  by_alignment([&](auto aligned) {
    for (long long at = (long long)blockIdx.x * blockDim.x + threadIdx.x;
         at < sizes.outer * of_y; at += threads) {
      const long long block = at / of_y, place = at - block * of_y;
      Channels<T, EACH> v = {};
      if (place < of_a) v = load_channels<EACH>(a + (block * of_a + place) * EACH, aligned);
      reinterpret_cast<Channels<T, EACH>*>(y)[at] = v;
    }
  }, a);
}

}  // namespace lattice
