// Reductions over a table of rows, (M, K) with -1 for none: pooling, interpolation.
//
//   thread (a block of channels, row o):  for k: x[table[o, k]] --> sum or max
//     blocks of sums: 16 bytes of x, of one load; of maxima: four channels
//
// Sums, with or without a float32 weight an entry; maxima with the row that won, and
// the way back of their gradients. Any dtype, sums in float32 in order of k: the same
// bits on every run, no atomics. Of equal maxima the first wins, NaN beats everything,
// no row gives 0. Traffic per output: one feature an entry, and 4 (8) bytes of table
// (and weight) an entry and row, shared by the row's threads through cache; a maximum
// also writes 4 bytes of row. Bound by memory; it beats K gathers of whole (M, C)
// arrays, each written and read again.

#include <metal_stdlib>
using namespace metal;

// One thread's row and channels, `width` of them but in the last block.
struct RowThread {
  int volume, channels, channel, count;
  size_t row;

  METAL_FUNC RowThread(ReductionSizes sizes, uint2 at, int width = 4) thread {
    volume = sizes.volume;
    channels = sizes.channels;
    channel = width * int(at.x);
    count = min(width, channels - channel);
    row = size_t(sizes.first) + at.y;
  }

  // Where the thread's channels of a row stand.
  METAL_FUNC size_t place(size_t other) const thread {
    return other * channels + channel;
  }
};

// Whether a value replaces the greatest so far.
METAL_FUNC bool beats(float value, float best) {
  return value > best || (isnan(value) && !isnan(best));
}

// Sixteen bytes of a row, which are one load and need no more than an element's
// alignment.
template <typename T>
struct Sixteen {
  static constant constexpr int COUNT = 16 / int(sizeof(T));
  T v[COUNT];
};

// Sums of a block of channels. Loops have a fixed count and a guard: so they unroll, and
// sums stay in registers. Whole blocks are read without guards, in one go.
template <typename T>
struct Sums {
  static constant constexpr int COUNT = Sixteen<T>::COUNT;
  float v[COUNT];

  METAL_FUNC Sums() thread {
    for (int j = 0; j < COUNT; ++j) v[j] = 0;
  }

  METAL_FUNC void add(float weight, const device T* from, int count) thread {
    if (count == COUNT) {
      const Sixteen<T> values = *(const device Sixteen<T>*)(from);
      for (int j = 0; j < COUNT; ++j) v[j] += weight * float(values.v[j]);
      return;
    }
    for (int j = 0; j < COUNT; ++j)
      if (j < count) v[j] += weight * float(from[j]);
  }

  template <typename OUT>
  METAL_FUNC void put(device OUT* to, int count) const thread {
    for (int j = 0; j < COUNT; ++j)
      if (j < count) to[j] = OUT(v[j]);
  }
};

template <typename T>
METAL_FUNC void put_channels(device T* to, const thread float4& sum, int count) {
  for (int j = 0; j < 4; ++j)
    if (j < count) to[j] = T(sum[j]);
}

// weights (M, K) may be null.
template <typename T>
METAL_FUNC void gather_sum(
    const device T* x,
    const device int* table,
    const device float* weights,
    ReductionSizes sizes,
    device T* y,
    uint2 at) {
  const RowThread here(sizes, at, Sums<T>::COUNT);
  Sums<T> sums;
  for (int k = 0; k < here.volume; ++k) {
    const size_t entry = here.row * here.volume + k;
    const int i = table[entry];
    if (i < 0) continue;
    const float weight = weights ? weights[entry] : 1.0f;
    sums.add(weight, x + here.place(size_t(i)), here.count);
  }
  sums.put(y + here.place(at.y), here.count);
}

template <typename T>
METAL_FUNC void gather_max(
    const device T* x,
    const device int* table,
    ReductionSizes sizes,
    device T* y,
    device int* won,
    uint2 at) {
  const RowThread here(sizes, at);
  float4 best = float4(0);
  int4 winner = int4(-1);
  for (int k = 0; k < here.volume; ++k) {
    const int i = table[here.row * here.volume + k];
    if (i < 0) continue;
    const device T* from = x + here.place(size_t(i));
    for (int j = 0; j < 4; ++j) {
      if (j >= here.count) continue;
      const float value = float(from[j]);
      if (winner[j] >= 0 && !beats(value, best[j])) continue;
      best[j] = value;
      winner[j] = i;
    }
  }
  const size_t to = here.place(at.y);
  for (int j = 0; j < 4; ++j) {
    if (j >= here.count) continue;
    y[to + j] = T(best[j]);
    won[to + j] = winner[j];
  }
}

// dx[i, c] = sum of x[o, c] over o = table[i, :] where won[o, c] = i.
template <typename T>
METAL_FUNC void max_pool_backward(
    const device T* x,
    const device int* won,
    const device int* table,
    ReductionSizes sizes,
    device T* dx,
    uint2 at) {
  const RowThread here(sizes, at);
  float4 sum = float4(0);
  for (int k = 0; k < here.volume; ++k) {
    const int o = table[here.row * here.volume + k];
    if (o < 0) continue;
    const size_t from = here.place(size_t(o));
    for (int j = 0; j < 4; ++j)
      if (j < here.count && won[from + j] == int(here.row))
        sum[j] += float(x[from + j]);
  }
  device T* to = dx + here.place(at.y);
  put_channels(to, sum, here.count);
}

// w[o, k] = x[table[o, k]] . y[o], one thread an entry.
template <typename T>
METAL_FUNC void row_products(
    const device T* x,
    const device T* y,
    const device int* table,
    ReductionSizes sizes,
    device float* products,
    uint2 at) {
  const int volume = sizes.volume, channels = sizes.channels;
  const size_t row = size_t(sizes.first) + at.y;
  const int i = table[row * volume + at.x];
  float sum = 0;
  if (i >= 0) {
    const device T* a = x + size_t(i) * channels;
    const device T* b = y + row * channels;
    for (int c = 0; c < channels; ++c) sum += float(a[c]) * float(b[c]);
  }
  products[size_t(at.y) * volume + at.x] = sum;
}
