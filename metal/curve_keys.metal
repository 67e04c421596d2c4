// Keys of coordinate rows along a Hilbert or Morton curve. The sort after it is MLX's.
//
//   row -> cells, counted from the least -> (Skilling's transform) -> their bits, highest
//   first, one axis after another, below the batch index -> key
//
// Where 62 bits hold them, row numbers stand below the keys: sorted keys then bring the
// order along. Traffic: 4 bytes a column read, 8 written a row. In MLX's operations a
// Hilbert curve is 33 launches for each bit of an axis.

#include <metal_stdlib>
using namespace metal;

// Skilling, "Programming the Hilbert curve", 2004: the interleaved bits of x are then the
// place on the curve.
template <int AXES>
METAL_FUNC void to_hilbert(thread uint (&x)[AXES], int bits) {
  for (int bit = bits - 1; bit > 0; --bit) {
    const uint low = (1u << bit) - 1;
    for (int a = 0; a < AXES; ++a) {
      const bool is_set = (x[a] >> bit) & 1;
      const uint swap = is_set ? 0 : (x[0] ^ x[a]) & low;
      x[0] ^= is_set ? low : swap;
      if (a > 0) x[a] ^= swap;
    }
  }
  for (int a = 1; a < AXES; ++a) x[a] ^= x[a - 1];
  uint flip = 0;
  for (int bit = bits - 1; bit > 0; --bit)
    if ((x[AXES - 1] >> bit) & 1) flip ^= (1u << bit) - 1;
  for (int a = 0; a < AXES; ++a) x[a] ^= flip;
}

// One thread a row. frame: the least batch index, what cells of each
// axis are counted from, the bits of an axis, and those of a row number below the key.
template <int W, bool HILBERT, bool SWAPPED>
METAL_FUNC void curve_keys(
    const device int* coords,
    const device int* frame,
    device int64_t* keys,
    uint at) {
  const device int* own = coords + size_t(at) * W;
  const int bits = frame[W], row_bits = frame[W + 1];
  uint x[W - 1];
  for (int a = 0; a < W - 1; ++a) {
    const int c = 1 + (SWAPPED && a < 2 ? 1 - a : a);
    x[a] = uint(own[c]) - uint(frame[c]);
  }
  if (HILBERT) to_hilbert(x, bits);
  int64_t key = int64_t(uint(own[0]) - uint(frame[0]));
  for (int bit = bits - 1; bit >= 0; --bit)
    for (int a = 0; a < W - 1; ++a) key = (key << 1) | int64_t((x[a] >> bit) & 1);
  keys[at] = row_bits > 0 ? (key << row_bits) | int64_t(at) : key;
}
