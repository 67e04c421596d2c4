// relation_traversal: y[o] = sum over the edges (i, o, k) of x[i] @ W[k], and what follows,
// for any relation, dtype, channel count and number of groups; and its weight gradient.
//
// Forward: one thread an output row and output channel walks the row's edges in order
// (o, k, i), neighbouring threads neighbouring channels: x is read by broadcast, W where it
// stands. Weight gradient: one block a split of kernel-major edges and 16 x 16 entries of
// dW; the partial sum of split s and offset k stands at s + k, and they are added in order.
// Traffic per edge: C_in of x and C_in x C_out of W from cache; no thread reuses another's.
// Wins only where the tiles cannot run: grouped and depthwise layers, relations with no
// neighbour table, few rows. It is the floor that the other routes are checked against.
// Needs alignment.cuh, channels.cuh and epilogue.cuh.

namespace lattice {

template <typename T>
__device__ __forceinline__ float to_float(T v) {
  return static_cast<float>(v);
}

// x (n_in, groups * in_each); starts (n_out + 1); edges (E, 3); after: a Bias or
// an Epilogue. Channels i and j of a group's input and output have in w the element k *
// w_offset_stride + group * w_group_stride + i * w_row_stride + j, or, if TRANSPOSED,
// ... + j * w_row_stride + i.
template <typename T, bool TRANSPOSED, typename AFTER>
__device__ __forceinline__ void relation_traversal(const T* x, const T* w,
                                                   const int* starts, const int* edges,
                                                   const AFTER& after,
                                                   const PerRowSizes& sizes, T* y) {
  const int n_out = sizes.rows, groups = sizes.groups;
  const int in_each = sizes.c_x, out_each = sizes.c_y;
  const int c_in = in_each * groups, c_out = out_each * groups;
  const long long step = sizes.w_row_stride;
  constexpr int EACH = 16 / sizeof(T);
  bool wide = false;
  by_alignment(
      [&](auto aligned) { wide = decltype(aligned)::value && in_each % EACH == 0; }, x,
      w);
  const long long all = (long long)n_out * c_out;
  const long long threads = (long long)gridDim.x * blockDim.x;
  for (long long at = (long long)blockIdx.x * blockDim.x + threadIdx.x; at < all;
       at += threads) {
    const long long o = at / c_out;
    const int c = (int)(at % c_out);
    const int group = c / out_each;
    const T* of_channel = w + (long long)group * sizes.w_group_stride +
                          (long long)(c % out_each) * (TRANSPOSED ? step : 1);
    float sums[1] = {}, &sum = sums[0];
    for (long long e = starts[o], end = starts[o + 1]; e < end; ++e) {
      const T* row = x + (long long)edges[3 * e] * c_in + group * in_each;
      const long long k = edges[3 * e + 2];
      const T* column = of_channel + k * sizes.w_offset_stride;
      int i = 0;
      if constexpr (TRANSPOSED) {
        // Both run along the summed channels: 16 bytes of each at once.
#pragma unroll 2
        for (; wide && i < in_each; i += EACH) {
          const auto a = load_channels<EACH>(row + i, cuda::std::true_type());
          const auto b = load_channels<EACH>(column + i, cuda::std::true_type());
#pragma unroll
          for (int j = 0; j < EACH; ++j) {
            sum = fmaf(to_float(a.v[j]), to_float(b.v[j]), sum);
          }
        }
      }
      for (; i < in_each; ++i) {
        sum = fmaf(to_float(row[i]), to_float(column[TRANSPOSED ? i : i * step]), sum);
      }
    }
    after.finish(sums, o, c, c_out);
    y[at] = static_cast<T>(sum);
  }
}

// partials (splits + K, in_each, c_out), c_out of all groups. 256 threads a block.
template <typename T>
__device__ __forceinline__ void relation_traversal_weight_grad(
    const T* x, const T* dy, const int* starts, const int* edges,
    const WeightGradSizes& sizes, float* partials) {
  const int n_edges = sizes.n_edges, groups = sizes.groups;
  const int in_each = sizes.c_in, out_each = sizes.c_out;
  const int c_in = in_each * groups, c_out = out_each * groups;
  constexpr int SIDE = 16, STEP = 32;
  __shared__ float xs[STEP][SIDE], ys[STEP][SIDE];
  const int row_tiles = (in_each + SIDE - 1) / SIDE;
  const int column_tiles = (c_out + SIDE - 1) / SIDE;
  const int tiles = row_tiles * column_tiles;
  const int splits = gridDim.x / tiles, span = (n_edges + splits - 1) / splits;
  const int split = blockIdx.x / tiles, tile = blockIdx.x % tiles;
  const int tx = threadIdx.x % SIDE, ty = threadIdx.x / SIDE;
  const int row = tile / column_tiles * SIDE + ty;
  const int column = tile % column_tiles * SIDE + tx;
  // In a grouped layer, neighbouring columns may read different channels of x.
  const bool one_group = groups == 1;
  const int group = min(column, c_out - 1) / out_each;
  int at = (int)min((long long)n_edges, (long long)split * span);
  const int split_end = (int)min((long long)n_edges, (long long)at + span);
  int k = 0;
  while (at < split_end) {
    while (starts[k + 1] <= at) ++k;
    const int stop = min(split_end, starts[k + 1]);
    float sum = 0.0f;
    for (; at < stop; at += STEP) {
      const int count = min(STEP, stop - at);
      __syncthreads();
      for (int q = threadIdx.x; q < STEP * SIDE; q += SIDE * SIDE) {
        const int e = q / SIDE, c = q % SIDE;
        const int first_row = tile / column_tiles * SIDE;
        const int first_column = tile % column_tiles * SIDE;
        const bool present = e < count;
        const int* edge = edges + 3LL * (at + (present ? e : 0));
        xs[e][c] = present && one_group && first_row + c < in_each
                       ? to_float(x[(long long)edge[0] * c_in + first_row + c])
                       : 0.0f;
        ys[e][c] = present && first_column + c < c_out
                       ? to_float(dy[(long long)edge[1] * c_out + first_column + c])
                       : 0.0f;
      }
      __syncthreads();
      for (int e = 0; e < count; ++e) {
        float a = xs[e][ty];
        if (!one_group) {
          a = row < in_each ? to_float(x[(long long)edges[3LL * (at + e)] * c_in +
                                         group * in_each + row])
                            : 0.0f;
        }
        sum = fmaf(a, ys[e][tx], sum);
      }
    }
    at = stop;
    if (row < in_each && column < c_out) {
      partials[((long long)(split + k) * in_each + row) * c_out + column] = sum;
    }
  }
}

}  // namespace lattice
