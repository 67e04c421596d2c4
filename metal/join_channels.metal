// Rows of two arrays side by side, as a skip connection joins them, y = (a | b), and the
// way back of their gradients: apart again.
//
//   a (N, c_a)  ####       y (N, c_a + c_b)  ####++++
//   b (N, c_b)  ++++
//
// A thread has 16 bytes of a row, or what is left of a part. Traffic: all once. One launch,
// where MLX copies each array by itself, and a part of rows once for each kernel that reads
// it. Reads table_reductions.metal too.

// A thread's channels: where they stand in their part and in the whole, and how many.
template <typename T>
struct JoinedThread {
  size_t own, whole;
  int count;
  bool is_of_a, is_wide;

  METAL_FUNC JoinedThread(int c_a, int c_b, uint2 at) thread {
    constexpr int COUNT = Sixteen<T>::COUNT;
    const int of_a = (c_a + COUNT - 1) / COUNT, place = int(at.x);
    is_of_a = place < of_a;
    const int channels = is_of_a ? c_a : c_b;
    const int channel = COUNT * (is_of_a ? place : place - of_a);
    own = size_t(at.y) * channels + channel;
    whole = size_t(at.y) * (c_a + c_b) + channel + (is_of_a ? 0 : c_a);
    count = min(COUNT, channels - channel);
    is_wide = c_a % COUNT == 0 && c_b % COUNT == 0;
  }
};

// Writes so many numbers, whole where rows are wide.
template <typename T>
METAL_FUNC void write(device T* to, Sixteen<T> from, int count, bool wide) {
  if (wide) {
    *(device Sixteen<T>*)(to) = from;
    return;
  }
  for (int j = 0; j < Sixteen<T>::COUNT; ++j)
    if (j < count) to[j] = from.v[j];
}

template <typename T>
METAL_FUNC void join_channels(
    const device T* a,
    const device T* b,
    JoinChannelsSizes sizes,
    device T* y,
    uint2 at) {
  const JoinedThread<T> here(sizes.c_a, sizes.c_b, at);
  const device T* from = here.is_of_a ? a : b;
  const int channels = here.is_of_a ? sizes.c_a : sizes.c_b;
  Sixteen<T> values;
  read(values, from + here.own, here.count, rows_are_wide(from, channels));
  write(y + here.whole, values, here.count, here.is_wide);
}

template <typename T>
METAL_FUNC void split_channels(
    const device T* y,
    SplitChannelsSizes sizes,
    device T* a,
    device T* b,
    uint2 at) {
  const JoinedThread<T> here(sizes.c_a, sizes.c_b, at);
  Sixteen<T> values;
  const bool wide = here.is_wide && rows_are_wide(y, sizes.c_a + sizes.c_b);
  read(values, y + here.whole, here.count, wide);
  write((here.is_of_a ? a : b) + here.own, values, here.count, here.is_wide);
}
