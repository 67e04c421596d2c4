// Route grouped_gemm: all offsets in one launch over the kernel-major edges (E, 3), rows (i, o, k) sorted by (k, o).
//
//   y[o] = bias + sum over the edges (i, o, k) of x[i] @ W[k]
//
// A tile finds its range of each offset by binary search. Serves relations that have no table: given edges, repeated
// edges, any degree.
#include "contraction.h"
#include "weight_grad.h"

namespace lattice {

array grouped_gemm(const array& x, const array& w, const array& edges, int n_out, const MaybeArray& bias, int groups,
                   bool transpose_weight, const Epilogue& epilogue, Stream s) {
  return contract("grouped_gemm", Form::edges, x, w, {edges}, n_out, bias, groups, transpose_weight, epilogue, s);
}

array grouped_gemm_weight_grad(const array& x, const array& dy, const array& edges, int volume, int groups,
                               bool output_major, Stream s) {
  return edge_weight_grad("grouped_gemm_weight_grad", x, dy, edges, volume, groups, output_major, s);
}

}  // namespace lattice
