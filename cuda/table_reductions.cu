// Reductions over a table of rows, (M, K) with -1 for none: pooling, interpolation.
//
//   thread (row o, EACH channels):  for k: x[table[o, k]] --> sum or max
//
// Sums, with or without a float32 weight an entry; maxima with the row that won, and
// the way back of their gradients. Any dtype, sums in float32 in order of k: the same
// bits on every run, no atomics. Of equal maxima the first wins, NaN beats everything,
// no row gives 0. Traffic per output: one feature an entry, 16 bytes a read where the
// channels allow it, and the table's row once, through cache. Bound by memory; it beats
// K gathers of whole (M, C) arrays, each written and read again. Reads
// alignment.cuh and channels.cuh too.

namespace lattice {

// Whether a value replaces the greatest so far.
__device__ __forceinline__ bool beats(float value, float best) {
  return value > best || (value != value && best == best);
}

// Makes sums means: over a row's divisor, 1 where it is less or there are none.
template <int EACH>
__device__ __forceinline__ void divide_sums(float (&sum)[EACH], const int* divisors,
                                            long long row) {
  if (!divisors) return;
  const float divisor = (float)max(divisors[row], 1);
#pragma unroll
  for (int j = 0; j < EACH; ++j) sum[j] /= divisor;
}

// y (rows, channels); weights (rows, volume) and divisors (rows), or null.
template <typename T, int EACH>
__device__ __forceinline__ void gather_sum(const T* x, const int* table,
                                           const float* weights, const int* divisors,
                                           ReductionSizes sizes, T* y) {
  const int volume = sizes.volume, channels = sizes.channels;
  auto run = [&](auto aligned) {
    each_row<EACH>(sizes.rows, channels, [&](long long row, int channel) {
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
      divide_sums(sum, divisors, row);
      store_channels<EACH>(y + row * channels + channel, sum);
    });
  };
  by_alignment(run, x);
}

// y and won (rows, channels): the greatest values and the rows that they stand in.
template <typename T, int EACH>
__device__ __forceinline__ void gather_max(const T* x, const int* table,
                                           ReductionSizes sizes, T* y, int* won) {
  const int volume = sizes.volume, channels = sizes.channels;
  auto run = [&](auto aligned) {
    each_row<EACH>(sizes.rows, channels, [&](long long row, int channel) {
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

// dx[i, c] = sum of x[o, c] over o = table[i, :] where won[o, c] = i.
template <typename T, int EACH>
__device__ __forceinline__ void max_pool_backward(const T* x, const int* won,
                                                  const int* table,
                                                  ReductionSizes sizes, T* dx) {
  const int volume = sizes.volume, channels = sizes.channels;
  using Pair = Both<Channels<T, EACH>, Channels<int, EACH>>;
  auto run = [&](auto aligned) {
    each_row<EACH>(sizes.rows, channels, [&](long long row, int channel) {
      float sum[EACH] = {};
      each_entry(
          table + row * volume, volume,
          [&](int o, int) {
            const long long at = (long long)o * channels + channel;
            return Pair{load_channels<EACH>(x + at, aligned),
                        load_channels<EACH>(won + at, aligned)};
          },
          [&](const Pair& from, int, int) {
#pragma unroll
            for (int j = 0; j < EACH; ++j) {
              if (from.b.v[j] == (int)row) sum[j] += static_cast<float>(from.a.v[j]);
            }
          });
      store_channels<EACH>(dx + row * channels + channel, sum);
    });
  };
  by_alignment(run, x, won);
}

}  // namespace lattice
