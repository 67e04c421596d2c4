// simdgroup_matrix: 8x8 matrices spread over the 32 lanes of a simdgroup.
//
// A lane holds two neighbouring elements of one row; which ones is the map that MLX's
// own kernels rely on (steel/gemm/mma.h, get_coord), and Metal promises none. Loads and
// stores are plain accesses of each lane, so that checked mode sees every byte. A
// multiplication needs all 32 lanes and sums in float, in order of k, rounding once to
// the type of the destination.
#pragma once
#include "simd.h"

namespace metal {

// The storage of a matrix. A lane owns elements 0 and 1. The other 62 are poison: they
// have no memory here, and checked mode reports an index of one.
template <class T>
struct vec<T, 64> {
  T own[2];
  METAL_FUNC T& operator[](int i) {
    T checked = own[i];  // clang allows a reference to the element past the end
    return own[i];
  }
  METAL_FUNC T operator[](int i) const { return own[i]; }
};

template <class T, int Rows = 8, int Columns = 8>
struct simdgroup_matrix {
  static_assert(Rows == 8 && Columns == 8, "only 8x8 simdgroup matrices exist");
  vec<T, 2> elements;

  static constexpr int row(int lane) { return (lane / 4 & 4) + lane / 2 % 4; }
  static constexpr int column(int lane) { return (lane / 4 & 2) * 2 + lane % 2 * 2; }
  static METAL_FUNC int own_lane() { return mtl_thread()->thread_index_in_simdgroup; }

  simdgroup_matrix() = default;
  METAL_FUNC explicit simdgroup_matrix(T diagonal) {
    int r = row(own_lane()), c = column(own_lane());
    for (int k = 0; k < 2; ++k) elements[k] = r == c + k ? diagonal : T(0);
  }
  METAL_FUNC vec<T, 64>& thread_elements() {
    return reinterpret_cast<vec<T, 64>&>(elements);
  }
  METAL_FUNC const vec<T, 64>& thread_elements() const {
    return reinterpret_cast<const vec<T, 64>&>(elements);
  }
};
using simdgroup_float8x8 = simdgroup_matrix<float>;
using simdgroup_half8x8 = simdgroup_matrix<half>;
using simdgroup_bfloat8x8 = simdgroup_matrix<bfloat>;

template <class T, int Rows, int Columns>
METAL_FUNC simdgroup_matrix<T, Rows, Columns> make_filled_simdgroup_matrix(T x) {
  simdgroup_matrix<T, Rows, Columns> m;
  m.elements = vec<T, 2>(x, x);
  return m;
}
template <class T, int Rows, int Columns>
METAL_FUNC simdgroup_matrix<T, Rows, Columns> make_diagonal_simdgroup_matrix(T x) {
  return simdgroup_matrix<T, Rows, Columns>(x);
}

// Counted kernels keep the place of an element out of their own arithmetic.
#ifdef MTL_COUNTED
#define MTL_MATRIX_ADDRESS inline __attribute__((noinline))
#define MTL_MATRIX_ACCESS(store) mtl_matrix_access(store)
#else
#define MTL_MATRIX_ADDRESS METAL_FUNC
#define MTL_MATRIX_ACCESS(store)
#endif

// Where element k of this lane lies in a matrix in memory.
template <class Matrix>
MTL_MATRIX_ADDRESS ulong matrix_offset(int k, ulong stride, vec<ulong, 2> origin,
                               bool transposed) {
  int lane = Matrix::own_lane();
  ulong r = Matrix::row(lane), c = Matrix::column(lane) + k;
  return transposed ? (origin.y + c) * stride + origin.x + r
                    : (origin.y + r) * stride + origin.x + c;
}
#ifdef MTL_MEASURED
template <class T>
vec<T, 2> fetched(const T* from);
#endif

template <class T, class U>
METAL_FUNC void simdgroup_load(simdgroup_matrix<T>& m, const U* from, ulong stride = 8,
                               vec<ulong, 2> origin = vec<ulong, 2>(0, 0),
                               bool transposed = false) {
  static_assert(is_same_v<T, remove_cv_t<U>>);
#ifdef MTL_MEASURED
  m.elements = fetched<T>(from + (transposed ? origin.x * stride + origin.y
                                             : origin.y * stride + origin.x));
  return;
#endif
  MTL_MATRIX_ACCESS(0);
  for (int k = 0; k < 2; ++k)
    m.elements[k] =
        from[matrix_offset<simdgroup_matrix<T>>(k, stride, origin, transposed)];
}
template <class T, class U>
METAL_FUNC void simdgroup_store(const simdgroup_matrix<T>& m, U* to, ulong stride = 8,
                                vec<ulong, 2> origin = vec<ulong, 2>(0, 0),
                                bool transposed = false) {
  static_assert(is_same_v<T, U>);
  MTL_MATRIX_ACCESS(1);
  for (int k = 0; k < 2; ++k)
    to[matrix_offset<simdgroup_matrix<T>>(k, stride, origin, transposed)] =
        m.elements[k];
}

#ifdef MTL_MEASURED
// As simd::met, of the elements that a lane holds.
template <class D, class A, class B, class C>
__attribute__((const)) vec<D, 2> product(vec<A, 2> a, vec<B, 2> b, vec<C, 2> c);
#endif

template <class D, class A, class B, class C>
METAL_FUNC void simdgroup_multiply_accumulate(simdgroup_matrix<D>& d,
                                              const simdgroup_matrix<A>& a,
                                              const simdgroup_matrix<B>& b,
                                              const simdgroup_matrix<C>& c) {
#ifdef MTL_MEASURED
  d.elements = product<D>(a.elements, b.elements, c.elements);
  return;
#endif
  using Map = simdgroup_matrix<D>;
  struct Lane {
    vec<A, 2> a;
    vec<B, 2> b;
    vec<C, 2> c;
    vec<D, 2> d;
  } own{a.elements, b.elements, c.elements, {}};
  mtl_collective(
      [](void** lanes, uint32_t) {
        float left[8][8], right[8][8], sum[8][8];
        for (int l = 0; l < 32; ++l) {
          auto* x = static_cast<Lane*>(lanes[l]);
          for (int k = 0; k < 2; ++k) {
            int r = Map::row(l), c = Map::column(l) + k;
            left[r][c] = float(x->a[k]);
            right[r][c] = float(x->b[k]);
            sum[r][c] = float(x->c[k]);
          }
        }
        for (int i = 0; i < 8; ++i)
          for (int k = 0; k < 8; ++k)
            for (int j = 0; j < 8; ++j) sum[i][j] += left[i][k] * right[k][j];
        for (int l = 0; l < 32; ++l)
          for (int k = 0; k < 2; ++k)
            static_cast<Lane*>(lanes[l])->d[k] =
                static_cast<D>(sum[Map::row(l)][Map::column(l) + k]);
      },
      &own, mtlhost::kAllLanes, 2 * 8 * 8 * 8);
  d.elements = own.d;
}
template <class D, class A, class B>
METAL_FUNC void simdgroup_multiply(simdgroup_matrix<D>& d, const simdgroup_matrix<A>& a,
                                   const simdgroup_matrix<B>& b) {
  simdgroup_multiply_accumulate(d, a, b, make_filled_simdgroup_matrix<D, 8, 8>(D(0)));
}
template <class T>
METAL_FUNC simdgroup_matrix<T> operator*(const simdgroup_matrix<T>& a,
                                         const simdgroup_matrix<T>& b) {
  simdgroup_matrix<T> d;
  simdgroup_multiply(d, a, b);
  return d;
}

}  // namespace metal
