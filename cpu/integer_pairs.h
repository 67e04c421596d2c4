// The register tile of int8 features on Arm's i8mm: smmla multiplies two rows of 8 channels by two output channels of 8
// and adds to the four sums. A vector of 4 output channels is 32 bytes of the panel. Included by integer_tiles.h only.
#pragma once

namespace lattice::LATTICE_ISA {
namespace {

LATTICE_INLINE int64x2_t two_rows(const char* a, const char* b) {
  int64_t low, high;
  memcpy(&low, a, 8);
  memcpy(&high, b, 8);
  return vcombine_s64(vcreate_s64(uint64_t(low)), vcreate_s64(uint64_t(high)));
}

template <bool SCALED, int R, int V>
LATTICE_INLINE void dot_tile(const TileRows& rows, const char* b, int64_t steps) {
  constexpr int P = (R + 1) / 2;  // pairs of rows; an odd last row is paired with itself, and stored once
  auto second = [](int p) { return 2 * p + 1 < R ? 2 * p + 1 : R - 1; };
  int32x4_t acc[P][V][2];  // [row, row + 1] x [channel, channel + 1]
#pragma GCC unroll 4
  for (int p = 0; p < P; ++p)
#pragma GCC unroll 4
    for (int v = 0; v < V; ++v) {
      int64x2_t one = vdupq_n_s64(0), two = one;
      if (!SCALED) {
        one = (int64x2_t)load_sums(rows.from[2 * p] + v * lanes * 4);
        two = (int64x2_t)load_sums(rows.from[second(p)] + v * lanes * 4);
      }
      acc[p][v][0] = vreinterpretq_s32_s64(vzip1q_s64(one, two));
      acc[p][v][1] = vreinterpretq_s32_s64(vzip2q_s64(one, two));
    }
#pragma GCC unroll 1
  for (int64_t s = 0; s < steps; ++s) {
    int8x16_t x[P];
#pragma GCC unroll 4
    for (int p = 0; p < P; ++p)
      x[p] = vreinterpretq_s8_s64(two_rows(rows.x[2 * p] + s * 8, rows.x[second(p)] + s * 8));
#pragma GCC unroll 4
    for (int v = 0; v < V; ++v) {
      auto* w = reinterpret_cast<const int8_t*>(b + (s * V + v) * lanes * step_bytes);
#pragma GCC unroll 2
      for (int half = 0; half < 2; ++half) {
        int8x16_t channels = vld1q_s8(w + 16 * half);
#pragma GCC unroll 4
        for (int p = 0; p < P; ++p) acc[p][v][half] = vmmlaq_s32(acc[p][v][half], x[p], channels);
      }
    }
  }
#pragma GCC unroll 4
  for (int p = 0; p < P; ++p)
#pragma GCC unroll 4
    for (int v = 0; v < V; ++v) {
      int64x2_t low = vreinterpretq_s64_s32(acc[p][v][0]), high = vreinterpretq_s64_s32(acc[p][v][1]);
      finish_tile_row<SCALED>(rows, 2 * p, v, (Sums)vzip1q_s64(low, high));
      if (2 * p + 1 < R) finish_tile_row<SCALED>(rows, 2 * p + 1, v, (Sums)vzip2q_s64(low, high));
    }
}

}  // namespace
}  // namespace lattice::LATTICE_ISA
