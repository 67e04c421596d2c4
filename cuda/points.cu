// Weights of the cells around points.
//
//   thread (point):  how far beyond its cell --> products over the axes --> weights
//
// Float32. Traffic: 4 bytes a coordinate and 4 of each cell in, and 4 out for each cell,
// where MLX's operations pass an array of (points, cells, axes) through memory several
// times.

namespace lattice {

// weights (points, 2^AXES) of the cells from each point's own on, the last axis fastest; 0
// of those that table has not. The last columns of points and of cells are the axes;
// without cells, points say how far beyond they lie.
template <int AXES, bool RENORMALISE>
__device__ __forceinline__ void corner_weights(const float* points, const float* size,
                                               const int* cells, const int* table,
                                               PointsSizes sizes, float* weights) {
  constexpr int CORNERS = 1 << AXES;
  const int step = sizes.columns, own = step - AXES;
  const long long threads = (long long)gridDim.x * blockDim.x;
  for (long long i = (long long)blockIdx.x * blockDim.x + threadIdx.x; i < sizes.rows;
       i += threads) {
    float beyond[AXES];
#pragma unroll
    for (int a = 0; a < AXES; ++a) {
      beyond[a] = points[i * step + own + a];
      if (size) beyond[a] /= size[own + a];
      if (cells) beyond[a] -= (float)cells[i * (AXES + 1) + 1 + a];
    }
    float share[CORNERS], total = 0.0f;
#pragma unroll
    for (int k = 0; k < CORNERS; ++k) {
      share[k] = table[i * CORNERS + k] >= 0 ? 1.0f : 0.0f;
#pragma unroll
      for (int a = 0; a < AXES; ++a) {
        share[k] *= k >> (AXES - 1 - a) & 1 ? beyond[a] : 1.0f - beyond[a];
      }
      total += share[k];
    }
    const float divisor = RENORMALISE && total > 0.0f ? total : 1.0f;
#pragma unroll
    for (int k = 0; k < CORNERS; ++k) weights[i * CORNERS + k] = share[k] / divisor;
  }
}

}  // namespace lattice
