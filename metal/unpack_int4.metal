// int4 weights of two levels become int8: w = nibble * multiplier of its group.
//
//   thread: one word of eight channels -> eight bytes
//
// Words (K, C_out, channels / 8), the first channel in the lowest bits, two's complement;
// multipliers (K, C_out, channels / GROUP). Traffic: both once, and the result. One
// launch before a contraction, whose tiles would unpack each weight many times.

template <int GROUP>
METAL_FUNC void unpack_int4(
    const device uint* words,
    const device int8_t* multipliers,
    const thread UnpackInt4Sizes& sizes,
    device int8_t* w,
    uint2 at) {
  if (at.x >= uint(sizes.words)) return;
  const uint word = words[at.x];
  const int multiplier = multipliers[at.x / (GROUP / 8)];
  uint made[2] = {0, 0};
  UNROLL for (int j = 0; j < 8; ++j) {
    const int level = int(word << (28 - 4 * j)) >> 28;  // with its sign
    made[j / 4] |= uint(level * multiplier & 255) << (8 * (j % 4));
  }
  device uint* to = (device uint*)w + 2 * size_t(at.x);
  to[0] = made[0];
  to[1] = made[1];
}
