// Statistics of the rows that tiles write, for the norm that follows: how many rows, and of
// each channel their mean and the sum of squares about it, a line for each thread block, as
// channel_moments of channel_norms.cu writes them.
//
//   sums of a warp (16 rows x BN) -> folded over its lanes: of every 64 channels lane l has
//   2 l and 2 l + 1 -> added, tile after tile -> the block's warps, in order -> a line
//
// Of the values that are written, rounded, about the first row of the block, so that a
// large mean cancels nothing. No atomics: sums have one order by the grid. Traffic: 12
// bytes a channel and block, where the norm would read all rows again. Costs 28 shuffles of
// a warp for 16 rows x 64 channels. Reads hopper.cuh too.

namespace lattice {

template <typename AFTER>
inline constexpr bool sums_moments = false;
template <typename T>
inline constexpr bool sums_moments<Moments<T>> = true;

// Sums of one block's tiles, all of one column of BN channels, by THREADS threads.
template <typename AFTER, typename T, int BN, int THREADS>
struct TileMoments {  // of what asks for none
  template <typename... A>
  __device__ __forceinline__ void begin(const A&...) {}
  template <typename... A>
  __device__ __forceinline__ void add(const A&...) {}
  template <typename... A>
  __device__ __forceinline__ void write(const A&...) {}
};

template <typename T, int BN, int THREADS>
struct TileMoments<Moments<T>, T, BN, THREADS> {
  static constexpr int CHUNKS = (BN + 63) / 64;
  float sum[CHUNKS][2] = {}, squares[CHUNKS][2] = {};
  int rows = 0;

  __device__ __forceinline__ static float rounded(float v) {
    return static_cast<float>(static_cast<T>(v));
  }

  // Adds COUNT pairs of lanes that differ in `bit` to those of the others.
  template <int COUNT>
  __device__ __forceinline__ static void fold(float (&v)[8][2], int bit) {
    const bool upper = threadIdx.x & bit;
#pragma unroll
    for (int i = 0; i < COUNT; ++i) {
#pragma unroll
      for (int c = 0; c < 2; ++c) {
        const float given = upper ? v[i][c] : v[i + COUNT][c];
        const float kept = upper ? v[i + COUNT][c] : v[i][c];
        v[i][c] = kept + __shfl_xor_sync(~0u, given, bit);
      }
    }
  }

  // Begins a tile of `height` rows. At the first one all threads meet; its first row, which
  // thread 0 has among `first`, becomes what sums are about.
  __device__ __forceinline__ void begin(float* about, const float (&first)[BN / 2],
                                        int height) {
    if (rows == 0) {
      if (threadIdx.x < 4) {
#pragma unroll
        for (int j = 0; j < BN / 8; ++j) {
          about[8 * j + 2 * threadIdx.x] = rounded(first[4 * j]);
          about[8 * j + 2 * threadIdx.x + 1] = rounded(first[4 * j + 1]);
        }
      }
      named_barrier(1, THREADS);
    }
    rows += height;
  }

  // Adds the two rows that a thread has of 64 x BN; row: -1 where there is none.
  __device__ __forceinline__ void add(const float* about, const float (&values)[BN / 2],
                                      const int (&row)[2]) {
    const int first = (threadIdx.x & 3) * 2;
#pragma unroll
    for (int chunk = 0; chunk < CHUNKS; ++chunk) {
      float s[8][2] = {}, q[8][2] = {};
#pragma unroll
      for (int i = 0; i < 8; ++i) {
        const int j = 8 * chunk + i;
        if (j >= BN / 8) continue;
        const float2 from = *reinterpret_cast<const float2*>(about + 8 * j + first);
#pragma unroll
        for (int half = 0; half < 2; ++half) {
          const int at = 4 * j + 2 * half;
          const float u = row[half] < 0 ? 0.0f : rounded(values[at]) - from.x;
          const float v = row[half] < 0 ? 0.0f : rounded(values[at + 1]) - from.y;
          s[i][0] += u, s[i][1] += v;
          q[i][0] += u * u, q[i][1] += v * v;
        }
      }
      fold<4>(s, 16), fold<2>(s, 8), fold<1>(s, 4);
      fold<4>(q, 16), fold<2>(q, 8), fold<1>(q, 4);
#pragma unroll
      for (int c = 0; c < 2; ++c) sum[chunk][c] += s[0][c], squares[chunk][c] += q[0][c];
    }
  }

  // Writes the block's line, through `memory`, (THREADS / 32, BN) pairs that the last
  // product may still read.
  __device__ __forceinline__ void write(const Moments<T>& after, const float* about,
                                        void* memory, long long line, int first_column,
                                        int channels) const {
    float2(*kept)[BN] = reinterpret_cast<float2(*)[BN]>(memory);
    const int thread = threadIdx.x, own = 2 * (thread & 31);
    named_barrier(1, THREADS);
#pragma unroll
    for (int chunk = 0; chunk < CHUNKS; ++chunk) {
      const int c = 64 * chunk + own;
      if (c >= BN) continue;
      kept[thread / 32][c] = make_float2(sum[chunk][0], squares[chunk][0]);
      kept[thread / 32][c + 1] = make_float2(sum[chunk][1], squares[chunk][1]);
    }
    named_barrier(1, THREADS);
    const float share = 1.0f / rows;
    for (int c = thread; c < BN && first_column + c < channels; c += THREADS) {
      float s = 0.0f, q = 0.0f;
      for (int warp = 0; warp < THREADS / 32; ++warp) {
        s += kept[warp][c].x, q += kept[warp][c].y;
      }
      float* to = after.lines + line * 3 * channels + first_column + c;
      to[0] = rows;
      to[channels] = about[c] + s * share;
      const float square = q - s * s * share;
      to[2 * channels] = square < 0.0f ? 0.0f : square;  // a NaN stays
    }
  }
};

}  // namespace lattice
