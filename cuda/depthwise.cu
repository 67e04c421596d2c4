// Depthwise convolution: as many groups as input channels, M output channels of each.
//
//   y[o, c]  = sum over edges of x[i, c / M] W[k, c]           thread (o, EACH channels)
//   dx[i, a] = sum over edges, m < M of dy[o, a M + m] W[k, a M + m]
//   dW[k, c] = sum over edges of x[i, c / M] dy[o, c]          block (split of the rows, 64
//                                                              bytes or more of channels)
//
// W is (K, 1, C_out). There is no sum over channels, so memory bounds it: traffic per
// output channel is an edge's feature and weight each, 16 bytes a read along the channels
// where these allow it. The threads of the weight gradient read a row of dy for all
// offsets at once, and write a partial sum a split. Any dtype; sums in float32 in order of
// k, then of rows: the same bits every time. Always wins over relation_traversal, which
// reads an edge once a channel. Needs alignment.cuh, channels.cuh and epilogue.cuh.

namespace lattice {

// A row's channels and their weights, which are loaded together.
template <typename T, int EACH>
struct Operands {
  Channels<T, EACH> x, w;
};

// sum[j] += a[j] * b[j].
template <typename T, int EACH>
__device__ __forceinline__ void add_products(float (&sum)[EACH],
                                             const Channels<T, EACH>& a,
                                             const Channels<T, EACH>& b) {
#pragma unroll
  for (int j = 0; j < EACH; ++j) {
    sum[j] = fmaf(static_cast<float>(a.v[j]), static_cast<float>(b.v[j]), sum[j]);
  }
}

// x (n_in, c_out / M); w (K, 1, c_out); table (n_out, K); after: a Bias or an Epilogue of
// y (n_out, c_out). `groups` are the input channels, c_y is M. EACH > 1 only where M is 1.
template <typename T, int EACH, typename AFTER>
__device__ __forceinline__ void depthwise(const T* x, const T* w, const int* table,
                                          const AFTER& after, const PerRowSizes& sizes,
                                          T* y) {
  const int n_out = sizes.rows, volume = sizes.volume, multiplier = sizes.c_y;
  const int c_out = sizes.groups * multiplier;
  using Pair = Operands<T, EACH>;
  const int c_in = c_out / multiplier;
  auto sum_rows = [&](auto aligned) {
    each_row<EACH>(n_out, c_out, [&](long long row, int channel) {
      const T* from = x + channel / multiplier;
      float sum[EACH] = {};
      each_entry(
          table + row * volume, volume,
          [&](int i, int k) {
            return Pair{load_channels<EACH>(from + (long long)i * c_in, aligned),
                        load_channels<EACH>(w + (long long)k * c_out + channel, aligned)};
          },
          [&](const Pair& pair, int, int) { add_products(sum, pair.x, pair.w); });
      after.finish(sum, row, channel, c_out);
      store_channels<EACH>(y + row * c_out + channel, sum);
    });
  };
  by_alignment(sum_rows, x, w);
}

// The same over the transposed relation: x (n_in, c_in * M) are the layer's output channels,
// y (n_out, c_in) its input channels, and so are those of what follows. c_x is M.
template <typename T, int EACH, typename AFTER>
__device__ __forceinline__ void depthwise_transposed(const T* x, const T* w,
                                                     const int* table,
                                                     const AFTER& after,
                                                     const PerRowSizes& sizes, T* y) {
  const int n_out = sizes.rows, volume = sizes.volume, multiplier = sizes.c_x;
  const int c_in = sizes.groups;
  using Pair = Operands<T, EACH>;
  const int c_x = c_in * multiplier;
  auto sum_rows = [&](auto aligned) {
    each_row<EACH>(n_out, c_in, [&](long long row, int channel) {
      float sum[EACH] = {};
      for (int m = 0; m < multiplier; ++m) {
        const int c = channel * multiplier + m;
        each_entry(
            table + row * volume, volume,
            [&](int i, int k) {
              return Pair{load_channels<EACH>(x + (long long)i * c_x + c, aligned),
                          load_channels<EACH>(w + (long long)k * c_x + c, aligned)};
            },
            [&](const Pair& pair, int, int) { add_products(sum, pair.x, pair.w); });
      }
      after.finish(sum, row, channel, c_in);
      store_channels<EACH>(y + row * c_in + channel, sum);
    });
  };
  by_alignment(sum_rows, x, w);
}

// partials (splits, K, c_out), a split a thread block in x. A block has 256 threads: ACROSS
// of them along the channels, the others along the offsets, then along the rows of the
// split, whose sums are added in order. Neighbouring offsets read one row of dy together.
template <typename T, int EACH, int ACROSS>
__device__ __forceinline__ void depthwise_weight_grad(const T* x, const T* dy,
                                                      const int* table,
                                                      const WeightGradSizes& sizes,
                                                      float* partials) {
  const int n_out = sizes.n_out, volume = sizes.volume, multiplier = sizes.c_out;
  const int c_out = sizes.groups * multiplier;
  constexpr int UNITS = 256 / ACROSS, AHEAD = 4;
  __shared__ float parts[UNITS][ACROSS * EACH];
  const int c_in = c_out / multiplier;
  const int lane = threadIdx.x % ACROSS, unit = threadIdx.x / ACROSS;
  const int channel = (blockIdx.y * ACROSS + lane) * EACH;
  int side = 1;  // offsets side by side
  while (side < volume && side < UNITS) side *= 2;
  const int down = UNITS / side;
  const int span = (n_out + gridDim.x - 1) / gridDim.x;
  const long long first = (long long)blockIdx.x * span;
  const long long last = min((long long)n_out, first + span);
  for (int start = 0; start < volume; start += side) {
    const int k = start + unit % side;
    const bool inside = channel < c_out && k < volume;
    float sum[EACH] = {};
    auto sum_rows = [&](auto aligned) {
      for (long long row = first + unit / side; inside && row < last;
           row += AHEAD * down) {
        int from[AHEAD];
        Channels<T, EACH> u[AHEAD], v[AHEAD];
#pragma unroll
        for (int a = 0; a < AHEAD; ++a) {
          const long long o = row + a * down;
          from[a] = o < last ? table[o * volume + k] : -1;
        }
#pragma unroll
        for (int a = 0; a < AHEAD; ++a) {
          if (from[a] < 0) continue;
          u[a] = load_channels<EACH>(x + (long long)from[a] * c_in +
                                                channel / multiplier, aligned);
          v[a] = load_channels<EACH>(dy + (row + a * down) * c_out + channel, aligned);
        }
#pragma unroll
        for (int a = 0; a < AHEAD; ++a) {
          if (from[a] >= 0) add_products(sum, u[a], v[a]);
        }
      }
    };
    by_alignment(sum_rows, x, dy);
    __syncthreads();
#pragma unroll
    for (int j = 0; j < EACH; ++j) parts[unit][lane * EACH + j] = sum[j];
    __syncthreads();
    for (int q = threadIdx.x; q < side * ACROSS * EACH; q += 256) {
      const int offset = q / (ACROSS * EACH), c = q % (ACROSS * EACH);
      const int at = blockIdx.y * ACROSS * EACH + c;
      if (start + offset >= volume || at >= c_out) continue;
      float total = 0.0f;
      for (int d = 0; d < down; ++d) total += parts[d * side + offset][c];
      partials[((long long)blockIdx.x * volume + start + offset) * c_out + at] = total;
    }
  }
}

}  // namespace lattice
