// What the forward routes share: the checks of their arguments, and the tiled contraction of contraction.cpp.
#pragma once
#include "edge_lists.h"
#include "operations.h"

namespace lattice {

// y (N_out, C_out) = bias + the sum over edges (i, o, k) of x[i] @ w[k]; with an epilogue
// y = activation((sum - mean) / sqrt(var + eps) * scale + bias + residual), rounded once.
//
//   route             names the primitive in graphs and errors; a string literal
//   w                 (K, C_in / groups, C_out), any strides; read transposed where `transposed`; no K for identity
//   indices, n_out    what names the edges (see EdgeSource); n_out only for Form::edges
array contract(const char* route, Form form, const array& x, const array& w, const std::vector<array>& indices,
               int n_out, const MaybeArray& bias, int groups, bool transposed, const Epilogue& epilogue, Stream s);

// y without an epilogue, and statistics of its rows, (lines, 3, C_out) float32: how many, of each channel their mean and
// the sum of squares about it, of some rows each; those of tables and identities.
std::tuple<array, array> contract_with_moments(const char* route, Form form, const array& x, const array& w,
                                               const std::vector<array>& indices, const MaybeArray& bias, int groups,
                                               Stream s);

// The same as contract with weights in MLX's affine packing: words (K, C_out, stored * bits / 32), scales and biases
// (K, C_out, stored / group_size), where `stored` is C_in / groups rounded up to whole groups of group_size.
array contract_packed(const char* route, Form form, const array& x, const array& words, const array& scales,
                      const array& biases, const std::vector<array>& indices, int n_out, const MaybeArray& bias,
                      int groups, int bits, int group_size, const Epilogue& epilogue, Stream s);

// The activation of a code, see mlx_lattice/epilogue.py, or a failure.
Act activation_of(const char* who, int code);

}  // namespace lattice
