// Neighbouring channels of a row, which a thread reads and writes at once.
//
// What the reductions, the depthwise kernels and the packed traversal share: 16-byte
// accesses where the channels allow them, and the walks over rows and entries of a list.
// Reads alignment.cuh too.

namespace lattice {

// Neighbouring channels of a row: one memory access where they fill 16 bytes.
template <typename T, int EACH>
struct alignas(sizeof(T) * EACH < 16 ? sizeof(T) * EACH : 16) Channels {
  T v[EACH];
};

// ALIGNED: the array begins at 16 bytes. A slice of a flat one may begin anywhere.
template <int EACH, bool ALIGNED, typename T>
__device__ __forceinline__ Channels<T, EACH> load_channels(
    const T* from, cuda::std::bool_constant<ALIGNED>) {
  if constexpr (ALIGNED) {
    return *reinterpret_cast<const Channels<T, EACH>*>(from);
  } else {
    Channels<T, EACH> to;
#pragma unroll
    for (int j = 0; j < EACH; ++j) to.v[j] = from[j];
    return to;
  }
}

// Rounds to the dtype and writes.
template <int EACH, typename T, typename U>
__device__ __forceinline__ void store_channels(T* to, const U (&from)[EACH]) {
  Channels<T, EACH> out;
#pragma unroll
  for (int j = 0; j < EACH; ++j) out.v[j] = static_cast<T>(from[j]);
  *reinterpret_cast<Channels<T, EACH>*>(to) = out;
}

// Calls f(row, first channel) for this thread's share of rows x channels.
template <int EACH, typename F>
__device__ __forceinline__ void each_row(long long rows, int channels, F f) {
  const int across = channels / EACH;
  const long long threads = (long long)gridDim.x * blockDim.x;
  for (long long at = (long long)blockIdx.x * blockDim.x + threadIdx.x;
       at < rows * across; at += threads) {
    f(at / across, (int)(at % across) * EACH);
  }
}

// Calls use(load(i, k), i, k) for the entries i = list[k] that are not -1, in order. What
// four of them load is on its way at once.
template <typename L, typename U>
__device__ __forceinline__ void each_entry(const int* list, int count, L load, U use) {
  constexpr int AHEAD = 4;
  for (int k = 0; k < count; k += AHEAD) {
    int entry[AHEAD];
    decltype(load(0, 0)) value[AHEAD];
#pragma unroll
    for (int a = 0; a < AHEAD; ++a) entry[a] = k + a < count ? list[k + a] : -1;
#pragma unroll
    for (int a = 0; a < AHEAD; ++a) {
      if (entry[a] >= 0) value[a] = load(entry[a], k + a);
    }
#pragma unroll
    for (int a = 0; a < AHEAD; ++a) {
      if (entry[a] >= 0) use(value[a], entry[a], k + a);
    }
  }
}

}  // namespace lattice
