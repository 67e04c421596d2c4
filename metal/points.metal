// Points among cells: the cell that each lies in, and the weights of the cells around it.
//
//   thread (point):  (p - origin) / size --> floor --> cell
//   thread (point):  how far beyond its cell --> products over the axes --> weights
//
// Float32 by MLX's own operations one after another, so that a point lies in the same
// cell everywhere. Traffic: 4 bytes a coordinate in and out; of weights 4 in and 4 out for
// each of the cells, where MLX's operations pass an array of (points, cells, axes) through
// memory several times.

#include <metal_stdlib>
using namespace metal;

constant constexpr int NO_CELL = -2147483647 - 1;  // of what int32 does not hold

// A coordinate in cells; origin and size, one a column each, may be null.
METAL_FUNC float in_cells(
    const device float* points,
    const device float* origin,
    const device float* size,
    size_t at,
    int column) {
  float v = points[at];
  if (origin) v -= origin[column];
  if (size) v /= size[column];
  return v;
}

// cells (points, COLUMNS) of points from sizes.first on. With batch (points), points have
// no column of it.
template <int COLUMNS>
METAL_FUNC void cells_of_points(
    const device float* points,
    const device int* batch,
    const device float* origin,
    const device float* size,
    PointsSizes sizes,
    device int* cells,
    uint at) {
  const size_t i = size_t(sizes.first) + at;
  const int before = batch ? 1 : 0, columns = COLUMNS - before;
  device int* own = cells + size_t(at) * COLUMNS;
  if (batch) own[0] = batch[i];
  for (int c = 0; c < columns; ++c) {
    const float v = floor(in_cells(points, origin, size, i * columns + c, c));
    const bool held = v >= -2147483648.0f && v < 2147483648.0f;
    own[before + c] = held ? int(v) : NO_CELL;
  }
}

// weights (points, 2^AXES) of the cells from each point's own on, the last axis fastest; 0
// of those that table has not. The last columns of points and of cells are the axes;
// without cells, points say how far beyond they lie.
template <int AXES, bool RENORMALISE>
METAL_FUNC void corner_weights(
    const device float* points,
    const device float* size,
    const device int* cells,
    const device int* table,
    PointsSizes sizes,
    device float* weights,
    uint at) {
  constexpr int CORNERS = 1 << AXES;
  const size_t i = size_t(sizes.first) + at;
  const int step = sizes.columns, own = step - AXES;
  const device float* none = nullptr;
  float beyond[AXES];
  for (int a = 0; a < AXES; ++a) {
    beyond[a] = in_cells(points, none, size, i * step + own + a, own + a);
    if (cells) beyond[a] -= float(cells[i * (AXES + 1) + 1 + a]);
  }
  float share[CORNERS], total = 0;
  for (int k = 0; k < CORNERS; ++k) {
    share[k] = table[i * CORNERS + k] >= 0 ? 1.0f : 0.0f;
    for (int a = 0; a < AXES; ++a)
      share[k] *= (k >> (AXES - 1 - a)) & 1 ? beyond[a] : 1.0f - beyond[a];
    total += share[k];
  }
  const float divisor = RENORMALISE && total > 0 ? total : 1.0f;
  for (int k = 0; k < CORNERS; ++k)
    weights[size_t(at) * CORNERS + k] = share[k] / divisor;
}
