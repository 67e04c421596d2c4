// TensorOps: matmul2d on cooperative tensors, as far as MLX's own kernels use it
// (nax.h).
//
// One simdgroup multiplies m x k by k x n. A cooperative tensor is a grid of 16x16
// fragments in row-major order; each lane holds 8 elements of a fragment, four of a row
// and four of the row eight below, at the coordinates of MLX's BaseNAXFrag. A kernel
// that cares where an element lies should ask for it in one function and keep to this
// layout.
//
// Sums are float whatever `relaxed_precision` says, and int of int8. Tensor views,
// extents and execution by several simdgroups are not here.
#pragma once
#include "simd.h"

namespace metal {
struct execution_simdgroup {};
template <class T>
METAL_FUNC T uniform(T x) {
  return x;
}
template <class T>
METAL_FUNC T make_uniform(T x) {
  return x;
}
struct os_log {
  constexpr os_log(const char*, const char*) {}
  template <class... A>
  void log_debug(const char*, A...) const {}
};
}  // namespace metal

namespace mpp::tensor_ops {

struct matmul2d_descriptor {
  enum class mode { multiply, multiply_accumulate };
  int m, n, k;
  bool transpose_left, transpose_right, relaxed_precision;
  mode matmul_mode;
  constexpr matmul2d_descriptor(int m, int n, int k = 0, bool transpose_left = false,
                                bool transpose_right = false,
                                bool relaxed_precision = false,
                                mode matmul_mode = mode::multiply)
      : m(m),
        n(n),
        k(k),
        transpose_left(transpose_left),
        transpose_right(transpose_right),
        relaxed_precision(relaxed_precision),
        matmul_mode(matmul_mode) {}
};

template <class T, int Rows, int Columns>
struct cooperative_tensor {
  static_assert(Rows % 16 == 0 && Columns % 16 == 0, "fragments are 16 x 16");
  static constexpr int capacity = Rows * Columns / 32;
  using element_type = T;
  T elements[capacity];

  static constexpr int get_capacity() { return capacity; }
  METAL_FUNC T& operator[](int i) { return elements[i]; }
  METAL_FUNC const T& operator[](int i) const { return elements[i]; }
  static constexpr int row(int lane, int i) {
    int quad = lane >> 2, fragment = i / 8;
    return fragment / (Columns / 16) * 16 + ((quad & 4) | (lane >> 1 & 3)) +
           (i % 8 >> 2) * 8;
  }
  static constexpr int column(int lane, int i) {
    int quad = lane >> 2, fragment = i / 8;
    return fragment % (Columns / 16) * 16 + ((quad & 2) | (lane & 1)) * 4 + (i & 3);
  }
};

#ifdef MTL_MEASURED
// As simd::met, of the elements that a lane holds.
template <class A, class B, class C>
void multiplied(A& a, B& b, C& c);
#endif

// What Apple's header multiplies, of both operands cooperative, as far as it is here.
template <class A, class B, class C>
constexpr bool multiplies =
    std::is_same_v<A, B> &&
    (std::is_same_v<A, int8_t>
         ? std::is_same_v<C, int>
         : std::is_floating_point_v<C> || std::is_same_v<C, A>);

template <matmul2d_descriptor D, class Scope>
struct matmul2d {
  static_assert(std::is_same_v<Scope, metal::execution_simdgroup>,
                "the host runs matmul2d in one simdgroup only");
  template <class A, class B, class C>
  METAL_FUNC auto get_left_input_cooperative_tensor() {
    static_assert(multiplies<A, B, C>, "TensorOps does not multiply these types");
    return cooperative_tensor<A, D.transpose_left ? D.k : D.m,
                              D.transpose_left ? D.m : D.k>();
  }
  template <class A, class B, class C>
  METAL_FUNC auto get_right_input_cooperative_tensor() {
    static_assert(multiplies<A, B, C>, "TensorOps does not multiply these types");
    return cooperative_tensor<B, D.transpose_right ? D.n : D.k,
                              D.transpose_right ? D.k : D.n>();
  }
  template <class A, class B, class C>
  METAL_FUNC auto get_destination_cooperative_tensor() {
    return cooperative_tensor<C, D.m, D.n>();
  }

  template <class A, class B, class C>
  METAL_FUNC void run(A& a, B& b, C& c) {
#ifdef MTL_MEASURED
    return multiplied(a, b, c);
#endif
    struct Lane {
      A* a;
      B* b;
      C* c;
    } own{&a, &b, &c};
    mtl_collective(&multiply<Lane, A, B, C>, &own, mtlhost::kAllLanes,
                   uint64_t(2) * D.m * D.n * D.k);
  }

 private:
  template <class Lane, class A, class B, class C>
  static void multiply(void** lanes, uint32_t) {
    constexpr bool add =
        D.matmul_mode == matmul2d_descriptor::mode::multiply_accumulate;
    using T = typename C::element_type;
    using Sum = std::conditional_t<std::is_same_v<T, int>, int, float>;
    Sum left[D.m][D.k], right[D.k][D.n], sum[D.m][D.n];
    for (int l = 0; l < 32; ++l) {
      auto* x = static_cast<Lane*>(lanes[l]);
      for (int i = 0; i < A::capacity; ++i) {
        int r = A::row(l, i), c = A::column(l, i);
        (D.transpose_left ? left[c][r] : left[r][c]) = Sum(x->a->elements[i]);
      }
      for (int i = 0; i < B::capacity; ++i) {
        int r = B::row(l, i), c = B::column(l, i);
        (D.transpose_right ? right[c][r] : right[r][c]) = Sum(x->b->elements[i]);
      }
      for (int i = 0; i < C::capacity; ++i)
        sum[C::row(l, i)][C::column(l, i)] = add ? Sum(x->c->elements[i]) : Sum(0);
    }
    for (int i = 0; i < D.m; ++i)
      for (int k = 0; k < D.k; ++k)
        for (int j = 0; j < D.n; ++j) sum[i][j] += left[i][k] * right[k][j];
    for (int l = 0; l < 32; ++l)
      for (int i = 0; i < C::capacity; ++i)
        static_cast<Lane*>(lanes[l])->c->elements[i] =
            static_cast<T>(sum[C::row(l, i)][C::column(l, i)]);
  }
};

}  // namespace mpp::tensor_ops
