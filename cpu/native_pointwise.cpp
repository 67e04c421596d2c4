// Route native_pointwise: a kernel of one offset over the same rows, which is a matmul.
//
//   y = bias + x @ W        dW = x^T @ dy        x (N, C_in), W (C_in, C_out), dy (N, C_out)
//
// MLX's own matmul takes a reference BLAS on Linux; this one runs on the register tiles of the other routes.
#include "contraction.h"
#include "weight_grad.h"

namespace lattice {

array native_pointwise(const array& x, const array& w, const MaybeArray& bias, bool transpose,
                       const Epilogue& epilogue, Stream s) {
  return contract("native_pointwise", Form::identity, x, w, {}, 0, bias, 1, transpose, epilogue, s);
}

array native_pointwise_weight_grad(const array& x, const array& dy, int groups, bool output_major, Stream s) {
  return identity_weight_grad("native_pointwise_weight_grad", x, dy, groups, output_major, s);
}

}  // namespace lattice
