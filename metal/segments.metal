// Reductions of rows into segments: global pooling and voxelising.
//
//   segment s owns places starts[s] .. starts[s + 1], rows order[place] (or the places
//   themselves);  cut into P parts -> partial (P, S, C) float32 -> one row a segment
//
// Sum, mean, maximum and minimum with the row that won. Parts and their order depend on
// sizes only, and there are no atomics: the same bits on every run. One part serves the
// short segments of voxels; a whole scan in one segment is cut so that the GPU is full.
// Traffic: every value once, 4 bytes a row for the order, partials written and read
// once. Wins over scattered atomic adds at any size, and over sorting features always.

#include <metal_stdlib>
using namespace metal;

enum Reduction { SUM, MEAN, MAX, MIN };

// Whether a value replaces the best so far; the first wins a tie, NaN beats everything.
inline bool beats(int reduction, float value, float best, bool none) {
  if (none) return true;
  if (isnan(value)) return !isnan(best);
  return reduction == MAX ? value > best : value < best;
}

// One thread a (channel, segment, part). sizes: segments, channels, parts, first part.
template <typename T, int REDUCTION, bool ORDERED>
void reduce_parts(
    const device T* x,
    const device int* order,
    const device int* starts,
    const constant int* sizes,
    device float* partial,
    device int* winner,
    uint3 at) {
  const int segments = sizes[0], channels = sizes[1], parts = sizes[2];
  const size_t part = size_t(sizes[3]) + at.z;
  const size_t start = size_t(starts[at.y]), count = size_t(starts[at.y + 1]) - start;
  const size_t stop = start + count * (part + 1) / parts;
  float result = 0;
  int won = -1;
  for (size_t place = start + count * part / parts; place < stop; ++place) {
    const int row = ORDERED ? order[place] : int(place);
    const float value = float(x[size_t(row) * channels + at.x]);
    if (REDUCTION == SUM || REDUCTION == MEAN) {
      result += value;
    } else if (beats(REDUCTION, value, result, won < 0)) {
      result = value;
      won = row;
    }
  }
  const size_t to = (size_t(at.z) * segments + at.y) * channels + at.x;
  partial[to] = result;
  winner[to] = won;
}

// One thread a (channel, segment): the parts in order. sizes: segments, channels,
// parts.
template <typename T, int REDUCTION>
void merge_parts(
    const device float* partial,
    const device int* partial_winner,
    const device int* starts,
    const constant int* sizes,
    device T* y,
    device int* winner,
    uint2 at) {
  const int segments = sizes[0], channels = sizes[1], parts = sizes[2];
  float result = 0;
  int won = -1;
  for (int p = 0; p < parts; ++p) {
    const size_t from = (size_t(p) * segments + at.y) * channels + at.x;
    if (REDUCTION == SUM || REDUCTION == MEAN) {
      result += partial[from];
    } else if (
        partial_winner[from] >= 0 && beats(REDUCTION, partial[from], result, won < 0)) {
      result = partial[from];
      won = partial_winner[from];
    }
  }
  if (REDUCTION == MEAN)
    result /= float(max(starts[at.y + 1] - starts[at.y], 1));
  const size_t to = size_t(at.y) * channels + at.x;
  y[to] = T(result);
  winner[to] = won;
}

// The transpose, one thread a (channel, row): x[r] = y[segment of r], divided by the
// segment's rows for a mean, and only where r won for a maximum or minimum. Rows of
// segment -1 get 0. sizes: first row, channels.
template <typename T, int REDUCTION>
void spread_segments(
    const device T* y,
    const device int* segment_of,
    const device int* starts,
    const device int* winner,
    const constant int* sizes,
    device T* x,
    uint2 at) {
  const int channels = sizes[1];
  const size_t row = size_t(sizes[0]) + at.y;
  const int segment = segment_of[row];
  float value = 0;
  if (segment >= 0) {
    const size_t from = size_t(segment) * channels + at.x;
    value = float(y[from]);
    if (REDUCTION == MEAN) value /= float(starts[segment + 1] - starts[segment]);
    if (REDUCTION == MAX || REDUCTION == MIN)
      value = winner[from] == int(row) ? value : 0.0f;
  }
  x[size_t(at.y) * channels + at.x] = T(value);
}
