// Every function that the extension exports, in mx arrays; bindings.cpp gives them to Python.
#pragma once
#include <optional>
#include <string>
#include <tuple>
#include <vector>

#include "inner_loops.h"
#include "primitive.h"

namespace lattice {

using mx::array;
using Rows = std::vector<std::vector<int>>;
using Stream = mx::StreamOrDevice;
using MaybeArray = std::optional<array>;

// What follows the sums of a contraction: scale, mean and variance of each channel, rows to add, the code of an
// activation, and what is added to the variance. The bias is its shift.
using Epilogue = std::optional<std::tuple<MaybeArray, MaybeArray, MaybeArray, MaybeArray, int, float>>;

inline Type type_of(mx::Dtype d) { return d == mx::float32 ? Type::f32 : d == mx::float16 ? Type::f16 : Type::bf16; }

// Contractions: a route's name is its file and its function. Float weights w, any strides, and their gradients,
// (K, C_in / groups, C_out) or, output_major, (C_out, K, C_in / groups):
array blocked_gather_gemm(const array& x, const array& w, const array& table, const MaybeArray& bias, int groups,
                          bool transpose_weight, const Epilogue& epilogue, Stream s);
// and statistics of its rows, for a norm: see contraction.h
std::tuple<array, array> blocked_gather_gemm_moments(const array& x, const array& w, const array& table,
                                                     const MaybeArray& bias, int groups, Stream s);
array blocked_gather_gemm_weight_grad(const array& x, const array& dy, const array& edges, int volume, int groups,
                                      bool output_major, Stream s);
array grouped_gemm(const array& x, const array& w, const array& edges, int n_out, const MaybeArray& bias, int groups,
                   bool transpose_weight, const Epilogue& epilogue, Stream s);
array grouped_gemm_weight_grad(const array& x, const array& dy, const array& edges, int volume, int groups,
                               bool output_major, Stream s);
array relation_traversal(const array& x, const array& w, const array& starts, const array& rows, const array& offsets,
                         const MaybeArray& bias, int groups, bool transpose_weight, const Epilogue& epilogue, Stream s);
array relation_traversal_weight_grad(const array& x, const array& dy, const array& edges, int volume, int groups,
                                     bool output_major, Stream s);
array native_pointwise(const array& x, const array& w, const MaybeArray& bias, bool transpose,
                       const Epilogue& epilogue, Stream s);
array native_pointwise_weight_grad(const array& x, const array& dy, int groups, bool output_major, Stream s);
// Packed weights:
array quantized_pointwise(const array& x, const array& words, const array& scales, const array& biases,
                          const MaybeArray& bias, int bits, int group_size, const Epilogue& epilogue, Stream s);
array quantized_sorted(const array& x, const array& words, const array& scales, const array& biases, const array& table,
                       const MaybeArray& bias, int groups, int bits, int group_size,
                       const Epilogue& epilogue, Stream s);
array quantized_traversal(const array& x, const array& words, const array& scales, const array& biases,
                          const array& edges, int n_out, const MaybeArray& bias, int groups, int bits, int group_size,
                          const Epilogue& epilogue, Stream s);

// int8 features (N_in, C_in), weights (K, C_out, C_in / groups padded to 32) int8, or uint32 words of int4 with
// multipliers; without a table rows feed themselves; the result is int8 where out_inverse is given, else of `dtype`:
array int8_blocked(const array& x, const array& w, const MaybeArray& table, const array& scale, const MaybeArray& shift,
                   const MaybeArray& residual, const MaybeArray& residual_scale, const MaybeArray& out_inverse,
                   const MaybeArray& row_scales, const MaybeArray& multipliers, int groups,
                   int activation, mx::Dtype dtype, Stream s);

// quantise.cpp: int8 of (N, C) floats by one scale (1,), or by that of each row, which comes too
array quantise(const array& x, const array& scale, Stream s);
std::tuple<array, array> quantise_rows(const array& x, Stream s);

// coordinate_sets.cpp (eager: they read their inputs at once)
std::tuple<std::vector<int>, std::vector<int>> bounds(const array& coords);
std::tuple<array, array, array> unique_rows(const array& coords);
array cells(const array& coords, const std::vector<int>& stride);
array reach(const array& coords, const Rows& offsets, const std::vector<int>& stride);
array expand(const array& coords, const Rows& offsets, const std::vector<int>& stride);
std::optional<std::tuple<int, int>> first_duplicate(const array& coords);

// neighbour_tables.cpp (edges is eager)
array neighbour_table(const array& in_coords, const array& out_coords, const Rows& offsets,
                      const std::vector<int>& stride, bool transposed, Stream s);
array transpose_table(const array& table, int n_in, Stream s);
std::tuple<array, array> edges(const array& table);

// curve_order.cpp
array curve_order(const array& coords, const std::vector<int>& low, int bits, bool is_hilbert, bool is_swapped, Stream s);

// table_reductions.cpp
std::tuple<array, array> gather_max(const array& x, const array& table, Stream s);
array max_pool_backward(const array& dy, const array& index, const array& in_out, Stream s);
array gather_sum(const array& x, const array& table, const MaybeArray& weights, Stream s);
array scatter_sum(const array& x, const array& table, int rows, const MaybeArray& weights, Stream s);
std::tuple<array, array> scatter_max(const array& x, const array& table, int rows, Stream s);

// attention.cpp: in groups of rows; y and the logarithms of the sums, and the gradients of q, and of k and v by place
std::tuple<array, array> attention(const array& q, const array& k, const array& v, const array& rows,
                                   const array& starts, const array& queries, const MaybeArray& asked,
                                   const MaybeArray& begins, float scale, Stream s);
std::tuple<array, array, array> attention_gradient(const array& dy, const array& q, const array& k, const array& v,
                                                   const array& y, const array& lse, const array& rows,
                                                   const array& starts, const array& queries, const MaybeArray& asked,
                                                   const MaybeArray& begins, float scale, Stream s);

// channel_norms.cpp: of rows [starts[s], starts[s + 1]) of `order`, or of all
std::tuple<array, array, array, array> channel_moments(const array& x, const std::vector<int>& starts,
                                                       const MaybeArray& order, const MaybeArray& running_mean,
                                                       const MaybeArray& running_var, float momentum, Stream s);
// The same of all rows, from lines (L, 3, C) of blocked_gather_gemm_moments
std::tuple<array, array, array, array> combine_moments(const array& lines, const MaybeArray& running_mean,
                                                       const MaybeArray& running_var, float momentum, Stream s);
array normalize_channels(const array& x, const array& mean, const array& var, const MaybeArray& weight,
                         const MaybeArray& bias, const MaybeArray& residual, const MaybeArray& of, int act, float eps,
                         float slope, Stream s);
std::tuple<array, array> channel_gradient_sums(const array& dy, const array& x, const array& mean, const array& var,
                                               const MaybeArray& weight, const MaybeArray& bias,
                                               const MaybeArray& residual, const std::vector<int>& starts,
                                               const MaybeArray& order, int act, float eps, float slope, Stream s);
std::vector<array> channel_gradient(const array& dy, const array& x, const array& mean, const array& var,
                                    const MaybeArray& weight, const MaybeArray& bias, const MaybeArray& residual,
                                    const MaybeArray& of, const MaybeArray& terms, int act, float eps, float slope,
                                    Stream s);

}  // namespace lattice
