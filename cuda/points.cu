// Points among cells: the cell that each lies in, and the weights of the cells around it.
//
//   thread (point):  (p - origin) / size --> floor --> cell
//   thread (point):  how far beyond its cell --> products over the axes --> weights
//
// Float32 by MLX's own operations one after another, so that a point lies in the same
// cell everywhere. Traffic: 4 bytes a coordinate in and out; of weights 4 in and 4 out for
// each of the cells, where MLX's operations pass an array of (points, cells, axes) through
// memory several times.

namespace lattice {

constexpr int NO_CELL = -2147483647 - 1;  // in the place of what int32 does not hold

// A coordinate in cells; origin and size, one a column each, may be null.
__device__ __forceinline__ float in_cells(const float* points, const float* origin,
                                          const float* size, long long at, int column) {
  float v = points[at];
  if (origin) v -= origin[column];
  if (size) v /= size[column];
  return v;
}

// cells (points, COLUMNS). With batch (points), points have no column of it.
template <int COLUMNS>
__device__ __forceinline__ void cells_of_points(const float* points, const int* batch,
                                                const float* origin, const float* size,
                                                PointsSizes sizes, int* cells) {
  const int before = batch ? 1 : 0, columns = COLUMNS - before;
  const long long threads = (long long)gridDim.x * blockDim.x;
  for (long long i = (long long)blockIdx.x * blockDim.x + threadIdx.x; i < sizes.rows;
       i += threads) {
    if (batch) cells[i * COLUMNS] = batch[i];
#pragma unroll
    for (int c = 0; c < COLUMNS; ++c) {
      if (c == columns) break;
      const float v = floorf(in_cells(points, origin, size, i * columns + c, c));
      const bool held = v >= -2147483648.0f && v < 2147483648.0f;
      cells[i * COLUMNS + before + c] = held ? (int)v : NO_CELL;
    }
  }
}

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
      beyond[a] = in_cells(points, nullptr, size, i * step + own + a, own + a);
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
