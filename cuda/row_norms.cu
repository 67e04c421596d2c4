// Layer norm: each row normalised over its channels, and what follows: a sum, then an
// activation.
//
//   LANES threads a row, VECTORS x EACH channels of it a thread, in registers
//   mean, then squares about it, by shuffles
//         --> y = act(v), v = (x - mean) rstd weight + bias + residual
//   back: both again, g = dy act'(v) --> dx = rstd (weight g - A - xhat B), dresidual = g
//         A, B: means over the row of weight g and of weight g xhat
//         sums of g xhat and g by block --> partials (blocks, 2 C), which column_sums adds
//
// Blocks walk over rows, so that few blocks start however many rows there are, and few
// partials are written. Any dtype, float32 inside, channels a multiple of EACH; no
// atomics, sums have one order. Traffic: x, residual and y once; back x, dy and dx once,
// residual and dresidual where an activation follows. Bound by memory, 16 bytes a read.
// Needs norm_blocks.cuh.

namespace lattice {

// The mean of a row, and what its values' distances from it are multiplied by.
struct RowFit {
  float mean, rstd;
};

// What a thread has of a row, and of those that it walks to. Blocks are LANES across.
template <typename T, int EACH, int LANES, int VECTORS>
struct RowShare {
  using Values = RowChannels<T, EACH, VECTORS>;
  // Values that wait: each half of them would take a register.
  struct Words {
    uint4 of[VECTORS];
  };
  RowNormSizes sizes;
  long long row;

  __device__ __forceinline__ RowShare(RowNormSizes sizes)
      : sizes(sizes), row((long long)blockIdx.x * blockDim.y + threadIdx.y) {}
  __device__ __forceinline__ void step() { row += (long long)gridDim.x * blockDim.y; }
  // Whether the block has a row. Lanes beyond the rows or channels go along: shuffles
  // want whole warps.
  __device__ __forceinline__ bool goes_on() const {
    return row - (int)threadIdx.y < sizes.rows;
  }
  __device__ __forceinline__ int channel(int i) const {
    return (i * LANES + (int)threadIdx.x) * EACH;
  }
  __device__ __forceinline__ bool has(int i) const {
    return row < sizes.rows && channel(i) < sizes.channels;
  }
  __device__ __forceinline__ long long at(int i) const {
    return row * sizes.channels + channel(i);
  }

  // Zeros where it has none.
  template <typename A>
  __device__ __forceinline__ Words load(const T* from, A aligned) const {
    Words words = {};
#pragma unroll
    for (int i = 0; i < VECTORS; ++i) {
      if (!has(i)) continue;
      const auto values = load_channels<EACH>(from + at(i), aligned);
      words.of[i] = reinterpret_cast<const uint4&>(values);
    }
    return words;
  }
  __device__ __forceinline__ static Values values(const Words& words) {
    Values values;
#pragma unroll
    for (int i = 0; i < VECTORS; ++i) {
      reinterpret_cast<uint4&>(values.of[i]) = words.of[i];
    }
    return values;
  }

  // Those of an array that may not be there.
  template <typename A>
  __device__ __forceinline__ Values values_of(const T* from, A aligned) const {
    return values(from ? load(from, aligned) : Words{});
  }

  __device__ __forceinline__ RowFit fit(const Values& x, float eps) const {
    float sum = 0.0f, squares = 0.0f;
#pragma unroll
    for (int i = 0; i < VECTORS; ++i) {
#pragma unroll
      for (int j = 0; j < EACH; ++j) sum += static_cast<float>(x.of[i].v[j]);
    }
    const float mean = add_lanes<LANES>(sum) / (float)sizes.channels;
#pragma unroll
    for (int i = 0; i < VECTORS; ++i) {
#pragma unroll
      for (int j = 0; j < EACH; ++j) {
        const float v = has(i) ? static_cast<float>(x.of[i].v[j]) - mean : 0.0f;
        squares += v * v;
      }
    }
    return {mean, rsqrtf(add_lanes<LANES>(squares) / (float)sizes.channels + eps)};
  }
};

// The scale and shift of EACH channels.
template <int EACH>
struct RowAffine {
  float scale[EACH], shift[EACH];

  template <typename P, typename A>
  __device__ __forceinline__ RowAffine(const P* weight, const P* bias, int channel,
                                       A aligned) {
    Channels<P, EACH> scales = {}, shifts = {};
    if (weight) scales = load_channels<EACH>(weight + channel, aligned);
    if (bias) shifts = load_channels<EACH>(bias + channel, aligned);
#pragma unroll
    for (int j = 0; j < EACH; ++j) {
      scale[j] = weight ? static_cast<float>(scales.v[j]) : 1.0f;
      shift[j] = bias ? static_cast<float>(shifts.v[j]) : 0.0f;
    }
  }
};

template <typename T, int EACH, int LANES, int VECTORS, typename P, int ACT>
__device__ __forceinline__ void layer_norm(const T* x, const P* weight, const P* bias,
                                           const T* residual, const float* norm_numbers,
                                           RowNormSizes sizes, T* y) {
  const float eps = norm_numbers[NORM_EPS], slope = norm_numbers[NORM_SLOPE];
  auto run = [&](auto aligned) {
    for (RowShare<T, EACH, LANES, VECTORS> own(sizes); own.goes_on(); own.step()) {
      const auto from = own.values(own.load(x, aligned));
      const auto added = own.values_of(residual, aligned);
      const RowFit fit = own.fit(from, eps);
#pragma unroll
      for (int i = 0; i < VECTORS; ++i) {
        if (!own.has(i)) continue;
        const RowAffine<EACH> affine(weight, bias, own.channel(i), aligned);
        float out[EACH];
#pragma unroll
        for (int j = 0; j < EACH; ++j) {
          const float xhat = (static_cast<float>(from.of[i].v[j]) - fit.mean) * fit.rstd;
          float v = xhat * affine.scale[j] + affine.shift[j];
          if (residual) v += static_cast<float>(added.of[i].v[j]);
          out[j] = activated<ACT>(v, slope);
        }
        store_channels<EACH>(y + own.at(i), out);
      }
    }
  };
  by_alignment(run, x, weight, bias, residual);
}

// partials: only where there are parameters, or a residual, which an activation follows.
// The next row is on its way while one is computed.
template <typename T, int EACH, int LANES, int VECTORS, typename P, int ACT>
__device__ __forceinline__ void layer_norm_gradient(
    const T* dy, const T* x, const P* weight, const P* bias, const T* residual,
    const float* norm_numbers, RowNormSizes sizes, T* dx, float* partials = nullptr,
    T* dresidual = nullptr) {
  const float eps = norm_numbers[NORM_EPS], slope = norm_numbers[NORM_SLOPE];
  const float share = 1.0f / (float)sizes.channels;
  RowShare<T, EACH, LANES, VECTORS> next(sizes);
  float products[VECTORS][EACH] = {}, sums[VECTORS][EACH] = {};  // g xhat, g
  auto run = [&](auto aligned) {
    auto next_x = next.load(x, aligned), next_dy = next.load(dy, aligned);
    while (next.goes_on()) {
      const auto own = next;
      const auto from = own.values(next_x), by = own.values(next_dy);
      const auto added = own.values_of(residual, aligned);
      next.step();
      next_x = next.load(x, aligned), next_dy = next.load(dy, aligned);
      const RowFit fit = own.fit(from, eps);
      float xhat[VECTORS][EACH], scaled[VECTORS][EACH], straight = 0.0f, turned = 0.0f;
#pragma unroll
      for (int i = 0; i < VECTORS; ++i) {
        if (!own.has(i)) continue;
        const RowAffine<EACH> affine(weight, bias, own.channel(i), aligned);
        float gradient[EACH];
#pragma unroll
        for (int j = 0; j < EACH; ++j) {
          const float h = (static_cast<float>(from.of[i].v[j]) - fit.mean) * fit.rstd;
          float v = h * affine.scale[j] + affine.shift[j];
          if (residual) v += static_cast<float>(added.of[i].v[j]);
          const float g =
              static_cast<float>(by.of[i].v[j]) * activation_slope<ACT>(v, slope);
          gradient[j] = g;
          products[i][j] += g * h;
          sums[i][j] += g;
          xhat[i][j] = h;
          scaled[i][j] = g * affine.scale[j];
          straight += scaled[i][j];
          turned += scaled[i][j] * h;
        }
        if (dresidual) store_channels<EACH>(dresidual + own.at(i), gradient);
      }
      straight = add_lanes<LANES>(straight) * share;
      turned = add_lanes<LANES>(turned) * share;
#pragma unroll
      for (int i = 0; i < VECTORS; ++i) {
        if (!own.has(i)) continue;
        float out[EACH];
#pragma unroll
        for (int j = 0; j < EACH; ++j) {
          out[j] = fit.rstd * (scaled[i][j] - straight - xhat[i][j] * turned);
        }
        store_channels<EACH>(dx + own.at(i), out);
      }
    }
  };
  by_alignment(run, dy, x, weight, bias, residual);
  if (!partials) return;
  float* line = partials + (long long)blockIdx.x * 2 * sizes.channels;
#pragma unroll
  for (int i = 0; i < VECTORS; ++i) {
    const int channel = next.channel(i);
    if (i > 0) __syncthreads();  // the shared memory of the vector before is free
    add_thread_rows(products[i], sums[i]);
    if (threadIdx.y != 0 || channel >= sizes.channels) continue;
    store_channels<EACH>(line + channel, products[i]);
    store_channels<EACH>(line + sizes.channels + channel, sums[i]);
  }
}

}  // namespace lattice
