// Squares of floats turned in registers. Included by the files of inner loops only.
#pragma once
#include "typed_rows.h"

namespace lattice::LATTICE_ISA {
namespace {

template <int... I>
struct Places {};
template <int N, int... I>
struct PlacesUpTo : PlacesUpTo<N - 1, N - 1, I...> {};
template <int... I>
struct PlacesUpTo<0, I...> {
  typedef Places<I...> List;
};

// Exchanges blocks of STEP x STEP: the upper right one, in the rows of a, for the lower left one, in those of b.
template <int STEP, int... I>
LATTICE_INLINE void exchange(Vec& a, Vec& b, Places<I...>) {
  Vec upper = __builtin_shufflevector(a, b, (I & STEP ? lanes + I - STEP : I)...);
  b = __builtin_shufflevector(a, b, (I & STEP ? lanes + I : I + STEP)...);
  a = upper;
}

// Turns the columns of r into its rows.
template <int STEP = 1>
LATTICE_INLINE void transpose(Vec (&r)[lanes]) {
  if constexpr (STEP < lanes) {
#pragma GCC unroll 16
    for (int i = 0; i < lanes; ++i)
      if (!(i & STEP)) exchange<STEP>(r[i], r[i + STEP], PlacesUpTo<lanes>::List{});
    transpose<2 * STEP>(r);
  }
}

// As InnerLoops::turn, of one type.
template <class T>
void turn_rows(const typename T::Element* src, int64_t stride, int64_t rows, int64_t columns, float* dst, int64_t ldd) {
  for (int64_t row = 0; row < rows; row += lanes) {
    int64_t n = rows - row < lanes ? rows - row : lanes;
    for (int64_t c = 0; c < columns; c += lanes) {
      int64_t width = columns - c < lanes ? columns - c : lanes;
      auto* p = src + row * stride + c;
      Vec r[lanes];
      if (n == lanes && width == lanes) {
#pragma GCC unroll 16
        for (int i = 0; i < lanes; ++i) r[i] = T::vector(p + i * stride);
      } else {
        float padded[lanes][lanes] = {};
        for (int64_t i = 0; i < n; ++i) load_row<T>(p + i * stride, width, padded[i]);
        for (int i = 0; i < lanes; ++i) r[i] = load(padded[i]);
      }
      transpose(r);
      float* to = dst + c * ldd + row;
      if (width == lanes) {
#pragma GCC unroll 16
        for (int i = 0; i < lanes; ++i) store(to + i * ldd, r[i]);
      } else {
        for (int i = 0; i < width; ++i) store(to + i * ldd, r[i]);
      }
    }
  }
}

}  // namespace
}  // namespace lattice::LATTICE_ISA
