// Layer norm: each row normalised over its channels, and the activation that follows.
//
//   LANES threads a row, VECTORS x EACH channels of it a thread, in registers
//   mean, then squares about it, by shuffles --> y = act((x - mean) rstd weight + bias)
//
// Blocks walk over rows, so that few blocks start however many rows there are. Any
// dtype, float32 inside, channels a multiple of EACH; sums have one order. Traffic: x and
// y once. Bound by memory, 16 bytes a read. Reads alignment.cuh, channels.cuh and
// epilogue.cuh too.

namespace lattice {

template <int LANES>
__device__ __forceinline__ float add_lanes(float v) {
#pragma unroll
  for (int by = LANES / 2; by; by /= 2) v += __shfl_xor_sync(~0u, v, by);
  return v;
}

// y = act(norm(x)). norm_numbers: eps, and what ReLU's kin multiply negative values by.
template <typename T, int EACH, int LANES, int VECTORS, typename P, int ACT>
__device__ __forceinline__ void layer_norm(const T* x, const P* weight, const P* bias,
                                           const float* norm_numbers,
                                           RowNormSizes sizes, T* y) {
  const int channels = sizes.channels, together = (int)blockDim.x / LANES;
  const int lane = (int)threadIdx.x % LANES, own = (int)threadIdx.x / LANES;
  const float eps = norm_numbers[0], slope = norm_numbers[2];
  auto run = [&](auto aligned) {
    for (long long first = (long long)blockIdx.x * together; first < sizes.rows;
         first += (long long)gridDim.x * together) {
      // Lanes beyond the rows or channels go along: shuffles want whole warps.
      const long long row = first + own;
      Channels<T, EACH> from[VECTORS];
      bool there[VECTORS];
      float sum = 0.0f, squares = 0.0f;
#pragma unroll
      for (int i = 0; i < VECTORS; ++i) {
        const int channel = (i * LANES + lane) * EACH;
        there[i] = row < sizes.rows && channel < channels;
        if (there[i]) from[i] = load_channels<EACH>(x + row * channels + channel, aligned);
      }
#pragma unroll
      for (int i = 0; i < VECTORS; ++i) {
#pragma unroll
        for (int j = 0; j < EACH; ++j) {
          if (there[i]) sum += static_cast<float>(from[i].v[j]);
        }
      }
      const float mean = add_lanes<LANES>(sum) / (float)channels;
#pragma unroll
      for (int i = 0; i < VECTORS; ++i) {
#pragma unroll
        for (int j = 0; j < EACH; ++j) {
          const float v = there[i] ? static_cast<float>(from[i].v[j]) - mean : 0.0f;
          squares += v * v;
        }
      }
      const float rstd = rsqrtf(add_lanes<LANES>(squares) / (float)channels + eps);
#pragma unroll
      for (int i = 0; i < VECTORS; ++i) {
        if (!there[i]) continue;
        const int channel = (i * LANES + lane) * EACH;
        Channels<P, EACH> scale = {}, shift = {};
        if (weight) scale = load_channels<EACH>(weight + channel, aligned);
        if (bias) shift = load_channels<EACH>(bias + channel, aligned);
        float out[EACH];
#pragma unroll
        for (int j = 0; j < EACH; ++j) {
          float v = (static_cast<float>(from[i].v[j]) - mean) * rstd;
          if (weight) v *= static_cast<float>(scale.v[j]);
          if (bias) v += static_cast<float>(shift.v[j]);
          out[j] = activated<ACT>(v, slope);
        }
        store_channels<EACH>(y + row * channels + channel, out);
      }
    }
  };
  by_alignment(run, x, weight, bias);
}

}  // namespace lattice
