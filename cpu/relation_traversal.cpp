// Route relation_traversal: the native floor, over the edges of each output row (CSR), for any relation.
//
//   y[o] = bias + sum over e in [starts[o], starts[o + 1]) of x[rows[e]] @ W[offsets[e]]
//
// starts has N_out + 1 values; rows and offsets have one per edge, by (o, k). A tile counts its edges by offset and
// groups them; the sums are those of the other routes, bit by bit.
#include "contraction.h"
#include "weight_grad.h"

namespace lattice {

array relation_traversal(const array& x, const array& w, const array& starts, const array& rows, const array& offsets,
                         const MaybeArray& bias, int groups, bool transpose_weight,
                         const Epilogue& epilogue, Stream s) {
  return contract("relation_traversal", Form::csr, x, w, {starts, rows, offsets}, 0, bias, groups, transpose_weight,
                  epilogue, s);
}

array relation_traversal_weight_grad(const array& x, const array& dy, const array& edges, int volume, int groups,
                                     bool output_major, Stream s) {
  return edge_weight_grad("relation_traversal_weight_grad", x, dy, edges, volume, groups, output_major, s);
}

}  // namespace lattice
