// Reductions over a table of rows, (M, K) with -1 for none: pooling, interpolation.
//
//   thread (row o, EACH channels):  for k: x[table[o, k]] --> sum or max
//
// Sums, with or without a float32 weight an entry; maxima with the row that won, and
// the way back of their gradients. Any dtype, sums in float32 in order of k: the same
// bits on every run, no atomics. Of equal maxima the first wins, NaN beats everything,
// no row gives 0. Traffic per output: one feature an entry, 16 bytes a read where the
// channels allow it, and the table's row once, through cache. Bound by memory; it beats
// K gathers of whole (M, C) arrays, each written and read again. Reads alignment.cuh too.

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

// Adds the bias of some channels to their sums; there may be none (null).
template <int EACH, typename T>
__device__ __forceinline__ void add_bias(float (&sum)[EACH], const T* bias, int channel) {
  if (bias == nullptr) return;
#pragma unroll
  for (int j = 0; j < EACH; ++j) sum[j] += static_cast<float>(bias[channel + j]);
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

// Whether a value replaces the greatest so far.
__device__ __forceinline__ bool beats(float value, float best) {
  return value > best || (value != value && best == best);
}

// y (rows, channels); weights (rows, volume), or none.
template <typename T, int EACH>
__device__ __forceinline__ void gather_sum(const T* x, const int* table,
                                           const float* weights, T* y, int rows,
                                           int volume, int channels) {
  auto run = [&](auto aligned) {
    each_row<EACH>(rows, channels, [&](long long row, int channel) {
      float sum[EACH] = {};
      each_entry(
          table + row * volume, volume,
          [&](int i, int) {
            return load_channels<EACH>(x + (long long)i * channels + channel, aligned);
          },
          [&](const auto& from, int, int k) {
            const float weight = weights ? weights[row * volume + k] : 1.0f;
#pragma unroll
            for (int j = 0; j < EACH; ++j) sum[j] += weight * static_cast<float>(from.v[j]);
          });
      store_channels<EACH>(y + row * channels + channel, sum);
    });
  };
  by_alignment(run, x);
}

// y and won (rows, channels): the greatest values and the rows that they stand in.
template <typename T, int EACH>
__device__ __forceinline__ void gather_max(const T* x, const int* table, T* y, int* won,
                                           int rows, int volume, int channels) {
  auto run = [&](auto aligned) {
    each_row<EACH>(rows, channels, [&](long long row, int channel) {
      float best[EACH] = {};
      int winner[EACH];
#pragma unroll
      for (int j = 0; j < EACH; ++j) winner[j] = -1;
      each_entry(
          table + row * volume, volume,
          [&](int i, int) {
            return load_channels<EACH>(x + (long long)i * channels + channel, aligned);
          },
          [&](const auto& from, int i, int) {
#pragma unroll
            for (int j = 0; j < EACH; ++j) {
              const float value = static_cast<float>(from.v[j]);
              if (winner[j] >= 0 && !beats(value, best[j])) continue;
              best[j] = value;
              winner[j] = i;
            }
          });
      store_channels<EACH>(y + row * channels + channel, best);
      store_channels<EACH>(won + row * channels + channel, winner);
    });
  };
  by_alignment(run, x);
}

// Channels of two arrays, side by side.
template <typename A, typename B>
struct Both {
  A a;
  B b;
};

// x[i, c] = sum of dy[o, c] over o = back[i, :] where won[o, c] = i.
template <typename T, int EACH>
__device__ __forceinline__ void max_pool_backward(const T* dy, const int* won, const int* back,
                                           T* x, int rows, int volume, int channels) {
  using Pair = Both<Channels<T, EACH>, Channels<int, EACH>>;
  auto run = [&](auto aligned) {
    each_row<EACH>(rows, channels, [&](long long row, int channel) {
      float sum[EACH] = {};
      each_entry(
          back + row * volume, volume,
          [&](int o, int) {
            const long long at = (long long)o * channels + channel;
            return Pair{load_channels<EACH>(dy + at, aligned),
                        load_channels<EACH>(won + at, aligned)};
          },
          [&](const Pair& from, int, int) {
#pragma unroll
            for (int j = 0; j < EACH; ++j) {
              if (from.b.v[j] == (int)row) sum[j] += static_cast<float>(from.a.v[j]);
            }
          });
      store_channels<EACH>(x + row * channels + channel, sum);
    });
  };
  by_alignment(run, dy, won);
}

// products[o, k] = x[table[o, k]] . y[o]: a warp an entry, its lanes along the channels.
template <typename T>
__device__ __forceinline__ void row_products(const T* x, const T* y, const int* table,
                                             float* products, int rows, int volume,
                                             int channels) {
  const int lane = threadIdx.x & 31;
  const long long warps = (long long)gridDim.x * blockDim.x / 32;
  for (long long at = ((long long)blockIdx.x * blockDim.x + threadIdx.x) / 32;
       at < (long long)rows * volume; at += warps) {
    const int i = table[at];
    float sum = 0.0f;
    if (i >= 0) {
      const T* a = x + (long long)i * channels;
      const T* b = y + at / volume * channels;
      for (int c = lane; c < channels; c += 32) {
        sum += static_cast<float>(a[c]) * static_cast<float>(b[c]);
      }
    }
    for (int step = 16; step; step /= 2) sum += __shfl_xor_sync(~0u, sum, step);
    if (lane == 0) products[at] = sum;
  }
}

}  // namespace lattice
