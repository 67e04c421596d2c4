// TensorOps as declarations, for lint.py: matmul2d of cooperative tensors in one
// simdgroup, as MLX's own kernels and ours use it.
//
// clcpp has C++17's template arguments, of which none is a class: here a descriptor is a
// number, and a struct beside the function of that name holds its `mode`. What Apple's
// header asserts of operands and sizes is asserted here too.
#pragma once

namespace metal {
struct execution_simdgroup {};
}  // namespace metal

namespace mpp::tensor_ops {

struct matmul2d_descriptor {
  enum class mode { multiply, multiply_accumulate };
};
constexpr ulong matmul2d_descriptor(
    int m, int n, int k, bool across_left = false, bool across_right = false,
    bool relaxed_precision = false,
    enum matmul2d_descriptor::mode mode = matmul2d_descriptor::mode::multiply) {
  return ulong(m) | ulong(n) << 16 | ulong(k) << 32 | ulong(relaxed_precision) << 48;
}

template <class T, int ROWS, int COLUMNS>
struct cooperative_tensor {
  T elements[ROWS * COLUMNS / 32];
  __private T& operator[](int) __private;
  const __private T& operator[](int) const __private;
  static constexpr int get_capacity() { return ROWS * COLUMNS / 32; }
};

template <class A, class B, class C>
struct multiplied {
  enum { n = 0 };
};
#define MULTIPLIED(A, B, C)    \
  template <>                  \
  struct multiplied<A, B, C> { \
    enum { n = 1 };            \
  };
// clang-format off
MULTIPLIED(half, half, half) MULTIPLIED(half, half, float)
MULTIPLIED(bfloat, bfloat, bfloat) MULTIPLIED(bfloat, bfloat, float)
MULTIPLIED(float, float, float) MULTIPLIED(int8_t, int8_t, int)
// clang-format on
#undef MULTIPLIED

template <ulong DESCRIPTOR, class SCOPE>
struct matmul2d {
  enum {
    M = DESCRIPTOR & 0xffff,
    N = DESCRIPTOR >> 16 & 0xffff,
    K = DESCRIPTOR >> 32 & 0xffff
  };
  static_assert(metal::is_same_v<SCOPE, metal::execution_simdgroup>,
                "cooperative operands are those of one simdgroup");
  static_assert((M == 16 || M == 32) && (N == 16 || N == 32) && (K == 16 || K == 32),
                "sizes of cooperative operands are 16 or 32");
  static_assert(M == 32 || N == 32 || K == 32,
                "one of the sizes of cooperative operands is 32");

  template <class A, class B, class C>
  cooperative_tensor<A, M, K> get_left_input_cooperative_tensor() __private {
    static_assert(multiplied<A, B, C>::n, "TensorOps does not multiply these types");
    return {};
  }
  template <class A, class B, class C>
  cooperative_tensor<B, K, N> get_right_input_cooperative_tensor() __private {
    static_assert(multiplied<A, B, C>::n, "TensorOps does not multiply these types");
    return {};
  }
  // Of a variable decltype has the address space, which macOS 27 does not take here.
  template <class A, class B, class C>
  cooperative_tensor<C, M, N> get_destination_cooperative_tensor() __private {
    static_assert(metal::is_same_v<A, metal::remove_addrspace_t<A>> &&
                      metal::is_same_v<B, metal::remove_addrspace_t<B>>,
                  "operand types have an address space: take remove_addrspace_t");
    return {};
  }
  template <class A, class B, class C>
  void run(__private cooperative_tensor<A, M, K>&, __private cooperative_tensor<B, K, N>&,
           __private cooperative_tensor<C, M, N>&) __private;
};

}  // namespace mpp::tensor_ops
