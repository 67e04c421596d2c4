// Weight gradients, which several routes share: dW (K, C_in / groups, C_out) or, output_major, (C_out, K, C_in /
// groups), in the dtype of x.
#pragma once
#include "operations.h"

namespace lattice {

// dW[k] = sum over the edges (i, o, k) of x[i]^T dy[o]; edges (E, 3), sorted by (k, o). `name` is the caller's, for
// graphs and errors; a string literal.
array edge_weight_grad(const char* name, const array& x, const array& dy, const array& edges, int volume, int groups,
                       bool output_major, Stream s);

// dW[0] = x^T dy: row i is the only neighbour of row i.
array identity_weight_grad(const char* name, const array& x, const array& dy, int groups, bool output_major, Stream s);

}  // namespace lattice
