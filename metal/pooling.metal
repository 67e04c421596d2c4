// Pooling over a neighbour table, and its transposes: max with the winning offset, sum,
// average. Gradients are gathers over the transposed table: no atomics anywhere.
//
//   thread (channels 4 b .. 4 b + 3, row o):  for k: x[table[o, k]] --> max or sum
//
// Any dtype, sums in float32 in order of k: the same bits on every run. Of equal maxima
// the first offset wins, NaN beats everything, and a row without edges is 0. Traffic
// per output: one feature an edge, 4 bytes of table an edge and row, shared by the
// row's threads through cache; a maximum also writes its offset, 4 bytes. Bound by
// memory; it beats K gathers of whole arrays, which write and read (N, C) for every
// offset.

#include <metal_stdlib>
using namespace metal;

// One thread's row and channels; sizes begin with first row, K, channels.
struct PoolThread {
  int volume, channels, channel, count;
  size_t row;

  PoolThread(const constant int* sizes, uint2 at) {
    volume = sizes[1];
    channels = sizes[2];
    channel = 4 * int(at.x);
    count = min(4, channels - channel);
    row = size_t(sizes[0]) + at.y;
  }
};

template <typename T>
void max_pool(
    const device T* x,
    const device int* table,
    const constant int* sizes,
    device T* y,
    device int* winner,
    uint2 at) {
  const PoolThread here(sizes, at);
  float4 best = float4(0);
  int4 won = int4(-1);
  for (int k = 0; k < here.volume; ++k) {
    int i = table[here.row * here.volume + k];
    if (i < 0) continue;
    const device T* from = x + size_t(i) * here.channels + here.channel;
    for (int j = 0; j < here.count; ++j) {
      float value = float(from[j]);
      bool greater = value > best[j] || (isnan(value) && !isnan(best[j]));
      if (won[j] >= 0 && !greater) continue;
      best[j] = value;
      won[j] = k;
    }
  }
  const size_t to = size_t(at.y) * here.channels + here.channel;
  for (int j = 0; j < here.count; ++j) {
    y[to + j] = T(best[j]);
    winner[to + j] = won[j];
  }
}

// y[o, c] = x[table[o, winner[o, c]], c]: what a maximum selects of another array.
template <typename T>
void select_winners(
    const device T* x,
    const device int* table,
    const device int* winner,
    const constant int* sizes,
    device T* y,
    uint2 at) {
  const PoolThread here(sizes, at);
  for (int j = 0; j < here.count; ++j) {
    const size_t from = here.row * here.channels + here.channel + j;
    const int k = winner[from];
    float value = 0;
    if (k >= 0) {
      int i = table[here.row * here.volume + k];
      value = float(x[size_t(i) * here.channels + here.channel + j]);
    }
    y[size_t(at.y) * here.channels + here.channel + j] = T(value);
  }
}

// The transpose: x[i, c] = sum of y[o, c] over the edges (i, o, k) with winner[o, c] =
// k. `table` is the transposed one, (N_in, K).
template <typename T>
void spread_winners(
    const device T* y,
    const device int* table,
    const device int* winner,
    const constant int* sizes,
    device T* x,
    uint2 at) {
  const PoolThread here(sizes, at);
  float4 sum = float4(0);
  for (int k = 0; k < here.volume; ++k) {
    int o = table[here.row * here.volume + k];
    if (o < 0) continue;
    const size_t from = size_t(o) * here.channels + here.channel;
    for (int j = 0; j < here.count; ++j)
      if (winner[from + j] == k) sum[j] += float(y[from + j]);
  }
  const size_t to = size_t(at.y) * here.channels + here.channel;
  for (int j = 0; j < here.count; ++j) x[to + j] = T(sum[j]);
}

// What a sum is divided by: nothing, the row's own edges, or K. For the gradient of
// an average by edges, each gathered row is divided by its own count instead.
enum Divisor { BY_NOTHING, BY_EDGES, BY_VOLUME, BY_COUNTS };

template <typename T, int DIVISOR>
void sum_pool(
    const device T* x,
    const device int* table,
    const device int* counts,
    const constant int* sizes,
    device T* y,
    uint2 at) {
  const PoolThread here(sizes, at);
  float4 sum = float4(0);
  int edges = 0;
  for (int k = 0; k < here.volume; ++k) {
    int i = table[here.row * here.volume + k];
    if (i < 0) continue;
    ++edges;
    const float share = DIVISOR == BY_COUNTS ? float(counts[i]) : 1.0f;
    const device T* from = x + size_t(i) * here.channels + here.channel;
    for (int j = 0; j < here.count; ++j) sum[j] += float(from[j]) / share;
  }
  float over = 1;
  if (DIVISOR == BY_EDGES) over = float(max(edges, 1));
  if (DIVISOR == BY_VOLUME) over = float(here.volume);
  const size_t to = size_t(at.y) * here.channels + here.channel;
  for (int j = 0; j < here.count; ++j) y[to + j] = T(sum[j] / over);
}
