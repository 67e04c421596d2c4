// Reductions over a table of rows, (M, K) with -1 for none: pooling, interpolation.
//
//   thread (16 bytes of channels, row o):  for k: x[table[o, k]] --> sum or max
//     one load, where rows begin at multiples of 16 bytes; else one a channel
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

// Sixteen bytes of a row.
template <typename T>
struct alignas(16) Sixteen {
  static constant constexpr int COUNT = 16 / int(sizeof(T));
  T v[COUNT];
};

// Whether all rows of an array begin at multiples of 16 bytes: a view may begin anywhere.
template <typename T>
METAL_FUNC bool rows_are_wide(const device T* array, int channels) {
  const device char* none = nullptr;
  return channels % Sixteen<T>::COUNT == 0 &&
         ((const device char*)array - none) % 16 == 0;
}

// Reads as much, whole where rows are wide; what lies beyond `count` is zero.
template <typename T>
METAL_FUNC void read(
    thread Sixteen<T>& to, const device T* from, int count, bool wide) {
  if (wide) {
    to = *(const device Sixteen<T>*)(from);
    return;
  }
  for (int j = 0; j < Sixteen<T>::COUNT; ++j) {
    to.v[j] = T(0);
    if (j < count) to.v[j] = from[j];
  }
}

// As many numbers as a Sixteen of T has elements, which may take several loads.
template <typename T>
struct Numbers {
  static constant constexpr int COUNT = Sixteen<T>::COUNT;
  int v[COUNT];

  METAL_FUNC void read_from(const device int* from, int count, bool wide) thread {
    for (int f = 0; f < COUNT; f += 4) {
      Sixteen<int> four;
      read(four, from + f, count - f, wide && count - f >= 4);
      for (int j = 0; j < 4 && f + j < COUNT; ++j) v[f + j] = four.v[j];
    }
  }
};

// One thread's row and channels of T, a Sixteen of them but in the last block.
template <typename T>
struct RowThread {
  static constant constexpr int COUNT = Sixteen<T>::COUNT;
  int volume, channels, channel, count;
  size_t row;

  METAL_FUNC RowThread(ReductionSizes sizes, uint2 at) thread {
    volume = sizes.volume;
    channels = sizes.channels;
    channel = COUNT * int(at.x);
    count = min(COUNT, channels - channel);
    row = size_t(sizes.first) + at.y;
  }

  // Where the thread's channels of a row stand.
  METAL_FUNC size_t place(size_t other) const thread {
    return other * channels + channel;
  }
};

// Sums of a block of channels. Loops have a fixed count: so they unroll, and sums stay
// in registers.
template <typename T>
struct Sums {
  static constant constexpr int COUNT = Sixteen<T>::COUNT;
  float v[COUNT];

  METAL_FUNC Sums() thread {
    for (int j = 0; j < COUNT; ++j) v[j] = 0;
  }

  METAL_FUNC void add(
      float weight, const device T* from, int count, bool wide) thread {
    Sixteen<T> values;
    read(values, from, count, wide);
    for (int j = 0; j < COUNT; ++j) v[j] += weight * float(values.v[j]);
  }

  // By a row's divisor, 1 where it is less or there are none.
  METAL_FUNC void divide(const device int* divisors, size_t row) thread {
    if (!divisors) return;
    const float divisor = float(max(divisors[row], 1));
    for (int j = 0; j < COUNT; ++j) v[j] /= divisor;
  }

  template <typename OUT>
  METAL_FUNC void put(device OUT* to, int count) const thread {
    for (int j = 0; j < COUNT; ++j)
      if (j < count) to[j] = OUT(v[j]);
  }
};

// Whether a value replaces the greatest so far.
METAL_FUNC bool beats(float value, float best) {
  return value > best || (isnan(value) && !isnan(best));
}

// Maxima of a block of channels, and whose they are; -1 where there is none yet.
template <typename T>
struct Maxima {
  static constant constexpr int COUNT = Sixteen<T>::COUNT;
  float best[COUNT];
  int winner[COUNT];

  METAL_FUNC Maxima() thread {
    for (int j = 0; j < COUNT; ++j) {
      best[j] = 0;
      winner[j] = -1;
    }
  }

  METAL_FUNC void take(int j, float value, int name) thread {
    if (winner[j] >= 0 && !beats(value, best[j])) return;
    best[j] = value;
    winner[j] = name;
  }

  METAL_FUNC void add(const device T* from, int count, bool wide, int name) thread {
    Sixteen<T> values;
    read(values, from, count, wide);
    for (int j = 0; j < COUNT; ++j) take(j, float(values.v[j]), name);
  }

  template <typename OUT>
  METAL_FUNC void put(device OUT* to, device int* won, int count) const thread {
    for (int j = 0; j < COUNT; ++j) {
      if (j >= count) continue;
      to[j] = OUT(best[j]);
      won[j] = winner[j];
    }
  }
};

// weights (M, K) and divisors (M) may be null.
template <typename T>
METAL_FUNC void gather_sum(
    const device T* x,
    const device int* table,
    const device float* weights,
    const device int* divisors,
    ReductionSizes sizes,
    device T* y,
    uint2 at) {
  const RowThread<T> here(sizes, at);
  const bool wide = rows_are_wide(x, here.channels);
  Sums<T> sums;
  for (int k = 0; k < here.volume; ++k) {
    const size_t entry = here.row * here.volume + k;
    const int i = table[entry];
    if (i < 0) continue;
    const float weight = weights ? weights[entry] : 1.0f;
    sums.add(weight, x + here.place(size_t(i)), here.count, wide);
  }
  sums.divide(divisors, here.row);
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
  const RowThread<T> here(sizes, at);
  const bool wide = rows_are_wide(x, here.channels);
  Maxima<T> maxima;
  for (int k = 0; k < here.volume; ++k) {
    const int i = table[here.row * here.volume + k];
    if (i >= 0) maxima.add(x + here.place(size_t(i)), here.count, wide, i);
  }
  const size_t to = here.place(at.y);
  maxima.put(y + to, won + to, here.count);
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
  const RowThread<T> here(sizes, at);
  const bool wide = rows_are_wide(x, here.channels);
  const bool won_wide = rows_are_wide(won, here.channels);
  Sums<T> sums;
  for (int k = 0; k < here.volume; ++k) {
    const int o = table[here.row * here.volume + k];
    if (o < 0) continue;
    const size_t from = here.place(size_t(o));
    Numbers<T> winner;
    winner.read_from(won + from, here.count, won_wide);
    Sixteen<T> values;
    read(values, x + from, here.count, wide);
    for (int j = 0; j < Sums<T>::COUNT; ++j)
      if (j < here.count && winner.v[j] == int(here.row))
        sums.v[j] += float(values.v[j]);
  }
  sums.put(dx + here.place(at.y), here.count);
}
