// Reductions of rows into segments: voxelising, global pooling, scattered sums.
//
//   segment s owns places starts[s] .. starts[s + 1] of the entries sorted by segment
//   thread (segment, EACH channels):  x[entry / K] --> sum or max
//
// Long segments are cut first, into pieces of at most 256 entries; the same kernels
// reduce the pieces again, so a cell that holds most of a scan keeps no thread busy for
// long. Any dtype, sums in float32; pieces and their order depend only on where
// segments begin, and there are no atomics: the same bits on every run. Traffic: every
// feature once, 4 bytes an entry for the order (4 more for a weight), pieces written
// and read once. Wins over scattered atomic adds where rows are shared, and over any
// sum whose order must not change. Reads table_reductions.cu too.

namespace lattice {

// entries: places (o, k) of a flat (M, K) table, or null where they are in order;
// weights, one a place, may be null, and so may divisors, one a segment: 1 where those are
// less. sizes.rows: segments.
template <typename T, int EACH, typename OUT>
__device__ __forceinline__ void sum_segments(const T* x, const int* entries,
                                             const float* weights, const int* starts,
                                             const int* divisors, ReductionSizes sizes,
                                             OUT* y) {
  const int volume = sizes.volume, channels = sizes.channels;
  auto run = [&](auto aligned) {
    each_row<EACH>(sizes.rows, channels, [&](long long segment, int channel) {
      float sum[EACH] = {};
#pragma unroll 4
      for (int e = starts[segment], stop = starts[segment + 1]; e < stop; ++e) {
        const int entry = entries ? entries[e] : e;
        const float weight = weights ? weights[entry] : 1.0f;
        const auto from = load_channels<EACH>(
            x + (long long)(entry / volume) * channels + channel, aligned);
#pragma unroll
        for (int j = 0; j < EACH; ++j) sum[j] += weight * static_cast<float>(from.v[j]);
      }
      divide_sums(sum, divisors, segment);
      store_channels<EACH>(y + segment * channels + channel, sum);
    });
  };
  by_alignment(run, x);
}

// Of pieces, `names` are the rows that won in them, -1 in empty ones; without names an
// entry is the row. The first of equal values wins, and entries of a segment ascend.
template <typename T, int EACH, typename OUT>
__device__ __forceinline__ void max_segments(const T* x, const int* entries,
                                             const int* names, const int* starts,
                                             ReductionSizes sizes, OUT* y, int* won) {
  const int channels = sizes.channels;
  auto run = [&](auto aligned) {
    each_row<EACH>(sizes.rows, channels, [&](long long segment, int channel) {
      float best[EACH] = {};
      int winner[EACH];
#pragma unroll
      for (int j = 0; j < EACH; ++j) winner[j] = -1;
#pragma unroll 4
      for (int e = starts[segment], stop = starts[segment + 1]; e < stop; ++e) {
        const int entry = entries ? entries[e] : e;
        const long long at = (long long)entry * channels + channel;
        const auto from = load_channels<EACH>(x + at, aligned);
#pragma unroll
        for (int j = 0; j < EACH; ++j) {
          const float value = static_cast<float>(from.v[j]);
          const int name = names ? names[at + j] : entry;
          if (name < 0 || (winner[j] >= 0 && !beats(value, best[j]))) continue;
          best[j] = value;
          winner[j] = name;
        }
      }
      store_channels<EACH>(y + segment * channels + channel, best);
      store_channels<EACH>(won + segment * channels + channel, winner);
    });
  };
  by_alignment(run, x);
}

}  // namespace lattice
