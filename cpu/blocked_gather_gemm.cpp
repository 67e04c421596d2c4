// Route blocked_gather_gemm: output-stationary tiles over the neighbour table (N_out, K), -1 for no neighbour.
//
//   y[o] = bias + sum over k, where i = table[o, k] >= 0, of x[i] @ W[k]
//
// A tile groups its rows' edges by offset with a vector compare of the table: no other view is made. The first choice
// for float weights where there is a table. Its weight gradient reads the kernel-major edges.
#include "contraction.h"
#include "weight_grad.h"

namespace lattice {

array blocked_gather_gemm(const array& x, const array& w, const array& table, const MaybeArray& bias, int groups,
                          bool transpose_weight, const Epilogue& epilogue, Stream s) {
  return contract("blocked_gather_gemm", Form::table, x, w, {table}, 0, bias, groups, transpose_weight, epilogue, s);
}

std::tuple<array, array> blocked_gather_gemm_moments(const array& x, const array& w, const array& table,
                                                     const MaybeArray& bias, int groups, Stream s) {
  return contract_with_moments("blocked_gather_gemm", Form::table, x, w, {table}, bias, groups, s);
}

array blocked_gather_gemm_weight_grad(const array& x, const array& dy, const array& edges, int volume, int groups,
                                      bool output_major, Stream s) {
  return edge_weight_grad("blocked_gather_gemm_weight_grad", x, dy, edges, volume, groups, output_major, s);
}

}  // namespace lattice
