// Depthwise convolution: as many groups as input channels, M output channels of each.
//
//   y[o, c]  = sum over edges of x[i, c / M] W[k, c]           thread (o, EACH channels)
//   dx[i, a] = sum over edges, m < M of dy[o, a M + m] W[k, a M + m]
//   dW[k, c] = sum over edges of x[i, c / M] dy[o, c]          block (range of rows, 64
//                                                              bytes or more of channels)
//
// W is (K, 1, C_out). There is no sum over channels, so it is bound by memory: traffic
// per output channel is an edge's feature and weight each, 16 bytes a read along the
// channels where these allow it. The weight gradient keeps its range's rows of dy in
// cache while it walks the offsets, and leaves a partial sum a range. Any dtype, sums in
// float32 in order of k, then of rows: the same bits on every run. Always wins over
// relation_traversal, which reads an edge once a channel. Reads pooling.cu too.

namespace lattice {

// x (n_in, c_out / m); w (K, 1, c_out); table (n_out, K); y (n_out, c_out). EACH > 1
// only where M is 1.
template <typename T, int EACH>
__device__ __forceinline__ void depthwise_forward(const T* x, const T* w,
                                                  const int* table, T* y, int n_out,
                                                  int volume, int c_out,
                                                  int multiplier) {
  const int c_in = c_out / multiplier;
  each_row<EACH>(n_out, c_out, [&](long long row, int channel) {
    float sum[EACH] = {};
    for (int k = 0; k < volume; ++k) {
      const int i = table[row * volume + k];
      if (i < 0) continue;
      const auto from = load_channels<EACH>(x + (long long)i * c_in + channel / multiplier);
      const auto by = load_channels<EACH>(w + (long long)k * c_out + channel);
#pragma unroll
      for (int j = 0; j < EACH; ++j) {
        sum[j] = fmaf(static_cast<float>(from.v[j]), static_cast<float>(by.v[j]), sum[j]);
      }
    }
    store_channels<EACH>(y + row * c_out + channel, sum);
  });
}

// The same the other way: x (n_in, c_in * M) are the layer's output channels, y its
// input channels (n_out, c_in).
template <typename T, int EACH>
__device__ __forceinline__ void depthwise_transposed(const T* x, const T* w,
                                                     const int* table, T* y, int n_out,
                                                     int volume, int c_in,
                                                     int multiplier) {
  const int c_x = c_in * multiplier;
  each_row<EACH>(n_out, c_in, [&](long long row, int channel) {
    float sum[EACH] = {};
    for (int k = 0; k < volume; ++k) {
      const int i = table[row * volume + k];
      if (i < 0) continue;
      for (int m = 0; m < multiplier; ++m) {
        const int c = channel * multiplier + m;
        const auto from = load_channels<EACH>(x + (long long)i * c_x + c);
        const auto by = load_channels<EACH>(w + (long long)k * c_x + c);
#pragma unroll
        for (int j = 0; j < EACH; ++j) {
          sum[j] =
              fmaf(static_cast<float>(from.v[j]), static_cast<float>(by.v[j]), sum[j]);
        }
      }
    }
    store_channels<EACH>(y + row * c_in + channel, sum);
  });
}

// partials (ranges, K, c_out). A block has 256 threads: ACROSS of them along the
// channels, the others along its range of rows; their sums are added in order.
template <typename T, int EACH, int ACROSS>
__device__ __forceinline__ void depthwise_weight_grad(const T* x, const T* dy,
                                                      const int* table,
                                                      float* partials, int n_out,
                                                      int volume, int c_out,
                                                      int multiplier) {
  constexpr int DOWN = 256 / ACROSS;
  __shared__ float parts[DOWN][ACROSS * EACH];
  const int c_in = c_out / multiplier, lane = threadIdx.x % ACROSS;
  const int down = threadIdx.x / ACROSS;
  const int channel = (blockIdx.y * ACROSS + lane) * EACH;
  const int span = (n_out + gridDim.x - 1) / gridDim.x;
  const long long first = (long long)blockIdx.x * span;
  const int last = (int)min((long long)n_out, first + span);
  const bool inside = channel < c_out;
  for (int k = 0; k < volume; ++k) {
    float sum[EACH] = {};
    for (long long row = first + down; inside && row < last; row += DOWN) {
      const int i = table[row * volume + k];
      if (i < 0) continue;
      const auto a = load_channels<EACH>(x + (long long)i * c_in + channel / multiplier);
      const auto b = load_channels<EACH>(dy + row * c_out + channel);
#pragma unroll
      for (int j = 0; j < EACH; ++j) {
        sum[j] = fmaf(static_cast<float>(a.v[j]), static_cast<float>(b.v[j]), sum[j]);
      }
    }
    __syncthreads();
#pragma unroll
    for (int j = 0; j < EACH; ++j) parts[down][lane * EACH + j] = sum[j];
    __syncthreads();
    for (int c = threadIdx.x; c < ACROSS * EACH; c += 256) {
      const int at = blockIdx.y * ACROSS * EACH + c;
      if (at >= c_out) continue;
      float total = 0.0f;
      for (int d = 0; d < DOWN; ++d) total += parts[d][c];
      partials[((long long)blockIdx.x * volume + k) * c_out + at] = total;
    }
  }
}

}  // namespace lattice
