// Depthwise convolution: as many groups as input channels, M output channels of each.
//
//   y[o, c]  = sum over edges of x[i, c / M] W[k, c]           warp (rows, EACH channels a
//   dx[i, a] = sum over edges, m < M of dy[o, a M + m] W[k, a M + m]       lane)
//
// W is (K, 1, C_out). There is no sum over channels, so memory bounds it: traffic per
// output channel is an edge's feature and weight each, 16 bytes a read along the channels
// where these allow it. A warp has the 4 to 32 lanes of a row, and so several rows of few
// channels: it reads 32 entries of a row's table at once and lists those that are there,
// since most offsets of a large kernel are not. Any dtype; sums in float32 in order of k:
// the same bits every time. Always wins over relation_traversal, which reads an edge once a
// channel. Its weight gradient is in depthwise_weight_grad.cu. Needs alignment.cuh,
// channels.cuh and epilogue.cuh.

namespace lattice {

// Calls load(i, k, channel), which returns an edge's Operands, for the edges of each output
// row and EACH of its channels, use(sum, operands) for these in order of k, and end(sum,
// row, channel). GROUP lanes are a row's.
template <int EACH, int GROUP, typename LOAD, typename USE, typename END>
__device__ __forceinline__ void each_edge(const int* table, int rows, int volume,
                                          int channels, LOAD load, USE use, END end) {
  constexpr int WARPS = 256 / 32, ROWS = 32 / GROUP, AHEAD = 4;
  // Padded, so that the rows of a warp lie in other banks.
  __shared__ int2 lists[WARPS][ROWS][32 + 1];
  const int lane = threadIdx.x % 32, warp = threadIdx.x / 32, own = lane / GROUP;
  const int across = (channels + GROUP * EACH - 1) / (GROUP * EACH);
  const long long tiles = ((long long)rows + ROWS - 1) / ROWS * across;
  const long long warps = (long long)gridDim.x * WARPS;
  for (long long at = (long long)blockIdx.x * WARPS + warp; at < tiles; at += warps) {
    const long long first = at / across * ROWS, row = first + own;
    const int channel = (int)(at % across * GROUP + lane % GROUP) * EACH;
    const bool inside = row < rows && channel < channels;
    int entries[ROWS];
    auto read = [&](int k) {
#pragma unroll
      for (int r = 0; r < ROWS; ++r) {
        const bool there = first + r < rows && k + lane < volume;
        entries[r] = there ? table[(first + r) * volume + k + lane] : -1;
      }
    };
    read(0);
    float sum[EACH] = {};
    for (int k = 0; k < volume; k += 32) {
      int count = 0;
#pragma unroll
      for (int r = 0; r < ROWS; ++r) {
        const unsigned there = __ballot_sync(~0u, entries[r] >= 0);
        const int before = __popc(there & ((1u << lane) - 1));
        if (entries[r] >= 0) lists[warp][r][before] = int2{entries[r], k + lane};
        if (r == own) count = __popc(there);
      }
      __syncwarp();
      if (k + 32 < volume) read(k + 32);  // on its way while these are summed
      for (int e = 0; inside && e < count; e += AHEAD) {
        decltype(load(0, 0, 0)) value[AHEAD];
#pragma unroll
        for (int a = 0; a < AHEAD; ++a) {
          if (e + a >= count) continue;
          const int2 edge = lists[warp][own][e + a];
          value[a] = load(edge.x, edge.y, channel);
        }
#pragma unroll
        for (int a = 0; a < AHEAD; ++a) {
          if (e + a < count) use(sum, value[a]);
        }
      }
      __syncwarp();
    }
    if (inside) end(sum, row, channel);
  }
}

// A row's channels and their weights, which are loaded together.
template <typename T, int EACH>
struct Operands {
  Channels<T, EACH> x, w;
};

// sum[j] += a[j] * b[j].
template <typename T, int EACH>
__device__ __forceinline__ void add_products(float (&sum)[EACH],
                                             const Operands<T, EACH>& of) {
#pragma unroll
  for (int j = 0; j < EACH; ++j) {
    sum[j] = fmaf(static_cast<float>(of.x.v[j]), static_cast<float>(of.w.v[j]), sum[j]);
  }
}

// x (n_in, c_out / M); w (K, 1, c_out); table (n_out, K); after: a Bias or an Epilogue of
// y (n_out, c_out). `groups` are the input channels, c_y is M. EACH > 1 only where M is 1.
template <typename T, int EACH, int GROUP, typename AFTER>
__device__ __forceinline__ void depthwise(const T* x, const T* w, const int* table,
                                          const AFTER& after, const PerRowSizes& sizes,
                                          T* y) {
  const int multiplier = sizes.c_y, c_in = sizes.groups, c_out = c_in * multiplier;
  const auto sum_rows = [&](auto aligned) {
    each_edge<EACH, GROUP>(
        table, sizes.rows, sizes.volume, c_out,
        [&](int i, int k, int channel) -> Operands<T, EACH> {
          const T* from = x + (long long)i * c_in + channel / multiplier;
          return {load_channels<EACH>(from, aligned),
                  load_channels<EACH>(w + (long long)k * c_out + channel, aligned)};
        },
        [](auto& sum, const auto& operands) { add_products(sum, operands); },
        [&](auto& sum, long long row, int channel) {
          after.finish(sum, row, channel, c_out);
          store_channels<EACH>(y + row * c_out + channel, sum);
        });
  };
  by_alignment(sum_rows, x, w);
}

// The same over the transposed relation: x (n_in, c_in * M) are the layer's output channels,
// y (n_out, c_in) its input channels, and so are those of what follows. c_x is M.
template <typename T, int EACH, int GROUP, typename AFTER>
__device__ __forceinline__ void depthwise_transposed(const T* x, const T* w,
                                                     const int* table,
                                                     const AFTER& after,
                                                     const PerRowSizes& sizes, T* y) {
  const int multiplier = sizes.c_x, c_in = sizes.groups, c_x = c_in * multiplier;
  struct Edge {
    const T *x, *w;
  };
  const auto finish = [&](auto& sum, long long row, int channel) {
    after.finish(sum, row, channel, c_in);
    store_channels<EACH>(y + row * c_in + channel, sum);
  };
  const auto sum_rows = [&](auto aligned) {
    each_edge<EACH, GROUP>(
        table, sizes.rows, sizes.volume, c_in,
        [&](int i, int k, int channel) -> Operands<T, EACH> {
          return {load_channels<EACH>(x + (long long)i * c_x + channel, aligned),
                  load_channels<EACH>(w + (long long)k * c_x + channel, aligned)};
        },
        [](auto& sum, const auto& operands) { add_products(sum, operands); }, finish);
  };
  if (multiplier == 1) return by_alignment(sum_rows, x, w);
  each_edge<EACH, GROUP>(
      table, sizes.rows, sizes.volume, c_in,
      [&](int i, int k, int channel) -> Edge {
        return {x + (long long)i * c_x + channel * multiplier,
                w + (long long)k * c_x + channel * multiplier};
      },
      [&](auto& sum, const Edge& edge) {
        for (int m = 0; m < multiplier; ++m) {
          const float a = static_cast<float>(edge.x[m]);
          sum[0] = fmaf(a, static_cast<float>(edge.w[m]), sum[0]);
        }
      },
      finish);
}

}  // namespace lattice
