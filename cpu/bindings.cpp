// The Python module of the extension: mlx_lattice._cpu. The contractions bear the names of their routes.
#include <nanobind/nanobind.h>
#include <nanobind/stl/optional.h>
#include <nanobind/stl/string.h>
#include <nanobind/stl/tuple.h>
#include <nanobind/stl/variant.h>
#include <nanobind/stl/vector.h>

#include "instruction_set.h"
#include "operations.h"
#include "thread_pool.h"
#include "transforms.h"

namespace nb = nanobind;
using namespace nb::literals;
using namespace lattice;

namespace {

// Reads offsets and strides, which are constants of a relation: nested sequences, or an array, which is evaluated.
std::vector<int> integers(nb::handle h) {
  if (nb::hasattr(h, "tolist")) return nb::cast<std::vector<int>>(h.attr("tolist")());
  return nb::cast<std::vector<int>>(h);
}

Rows integer_rows(nb::handle h) {
  if (nb::hasattr(h, "tolist")) return nb::cast<Rows>(h.attr("tolist")());
  return nb::cast<Rows>(h);
}

}  // namespace

NB_MODULE(_cpu, m) {
  nb::set_leak_warnings(false);
  auto kw = nb::kw_only();
  auto stream = nb::arg("stream") = nb::none();

  m.def("built_for", [] { return std::string(LATTICE_MLX_VERSION); }, "The MLX version this was built against.");
  m.def("num_threads", &num_threads);
  m.def("set_num_threads", &set_num_threads, "n"_a, "Threads of every operation; 0 restores the default.");
  m.def("settle", [] {
    mx::synchronize(mx::default_stream(mx::Device(mx::Device::cpu)));
    for (int lost = mx::scheduler::n_active_tasks(); lost > 0; --lost)
      mx::scheduler::notify_task_completion(mx::default_stream(mx::Device(mx::Device::cpu)));
  }, "Corrects MLX's count of running tasks, which loses some when a task fails. Call it while nothing runs.");
  m.def("isa", [] { return std::string(isa()); }, "The instruction set in use.");
  m.def("isas", &isas, "Those that this build and processor have, the best first.");
  m.def("set_isa", [](const std::string& name) {
    if (!set_isa(name.c_str())) throw nb::value_error(("this processor or build has no " + name + " kernels").c_str());
  }, "name"_a);

  // Contractions, by the names of their routes.
  m.def("blocked_gather_gemm", &blocked_gather_gemm, "x"_a, "w"_a, "table"_a, "bias"_a = nb::none(), kw, "groups"_a = 1,
        "transpose_weight"_a = false, "epilogue"_a = nb::none(), stream);
  m.def("blocked_gather_gemm_moments", &blocked_gather_gemm_moments, "x"_a, "w"_a, "table"_a, "bias"_a = nb::none(), kw,
        "groups"_a = 1, stream);
  m.def("grouped_gemm", &grouped_gemm, "x"_a, "w"_a, "edges"_a, "n_out"_a, "bias"_a = nb::none(), kw, "groups"_a = 1,
        "transpose_weight"_a = false, "epilogue"_a = nb::none(), stream);
  m.def("relation_traversal", &relation_traversal, "x"_a, "w"_a, "starts"_a, "rows"_a, "offsets"_a,
        "bias"_a = nb::none(), kw, "groups"_a = 1, "transpose_weight"_a = false, "epilogue"_a = nb::none(), stream);
  m.def("native_pointwise", &native_pointwise, "x"_a, "w"_a, "bias"_a = nb::none(), kw, "transpose"_a = false,
        "epilogue"_a = nb::none(), stream);
  m.def("quantized_sorted", &quantized_sorted, "x"_a, "words"_a, "scales"_a, "biases"_a, "table"_a,
        "bias"_a = nb::none(), kw, "groups"_a = 1, "bits"_a = 4, "group_size"_a = 64,
        "epilogue"_a = nb::none(), stream);
  m.def("quantized_traversal", &quantized_traversal, "x"_a, "words"_a, "scales"_a, "biases"_a, "edges"_a, "n_out"_a,
        "bias"_a = nb::none(), kw, "groups"_a = 1, "bits"_a = 4, "group_size"_a = 64,
        "epilogue"_a = nb::none(), stream);
  m.def("quantized_pointwise", &quantized_pointwise, "x"_a, "words"_a, "scales"_a, "biases"_a, "bias"_a = nb::none(),
        kw, "bits"_a = 4, "group_size"_a = 64, "epilogue"_a = nb::none(), stream);
  auto no_array = nb::none();
  m.def("int8_blocked", &int8_blocked, "x"_a, "w"_a, "table"_a.none(), "scale"_a, "shift"_a = no_array, "residual"_a = no_array,
        "residual_scale"_a = no_array, "out_inverse"_a = no_array, "row_scales"_a = no_array,
        "multipliers"_a = no_array, kw, "groups"_a = 1, "activation"_a = 0, "dtype"_a = mx::float32, stream);
  m.def("quantise", &quantise, "x"_a, "scale"_a, kw, stream);
  m.def("quantise_rows", &quantise_rows, "x"_a, kw, stream);
  m.def("blocked_gather_gemm_weight_grad", &blocked_gather_gemm_weight_grad, "x"_a, "dy"_a, "edges"_a, "volume"_a, kw,
        "groups"_a = 1, "output_major"_a = false, stream);
  m.def("grouped_gemm_weight_grad", &grouped_gemm_weight_grad, "x"_a, "dy"_a, "edges"_a, "volume"_a, kw,
        "groups"_a = 1, "output_major"_a = false, stream);
  m.def("relation_traversal_weight_grad", &relation_traversal_weight_grad, "x"_a, "dy"_a, "edges"_a, "volume"_a, kw,
        "groups"_a = 1, "output_major"_a = false, stream);
  m.def("native_pointwise_weight_grad", &native_pointwise_weight_grad, "x"_a, "dy"_a, kw, "groups"_a = 1,
        "output_major"_a = false, stream);

  // Eager: they read their inputs at once, and the size of the result is data.
  nb::call_guard<nb::gil_scoped_release> no_gil;
  m.def("bounds", &bounds, "coords"_a, no_gil);
  m.def("unique_rows", &unique_rows, "coords"_a, no_gil);
  m.def("first_duplicate", &first_duplicate, "coords"_a, no_gil);
  m.def("edges", &lattice::edges, "table"_a, no_gil);
  m.def("cells", [](const array& coords, nb::object stride) {
    auto s = integers(stride);
    nb::gil_scoped_release release;
    return cells(coords, s);
  }, "coords"_a, "stride"_a);
  for (auto [name, rows] : {std::pair{"reach", &reach}, {"expand", &expand}})
    m.def(name, [rows](const array& coords, nb::object offsets, nb::object stride) {
      auto o = integer_rows(offsets);
      auto s = integers(stride);
      nb::gil_scoped_release release;
      return rows(coords, o, s);
    }, "coords"_a, "offsets"_a, "stride"_a);

  m.def("neighbour_table", [](const array& in_coords, const array& out_coords, nb::object offsets, nb::object stride,
                              bool transposed, Stream s) {
    return neighbour_table(in_coords, out_coords, integer_rows(offsets), integers(stride), transposed, s);
  }, "in_coords"_a, "out_coords"_a, "offsets"_a, "stride"_a, "transposed"_a = false, kw, stream);
  m.def("transpose_table", &transpose_table, "table"_a, "n_in"_a, kw, stream);
  m.def("curve_order", &curve_order, "coords"_a, "low"_a, "bits"_a, "is_hilbert"_a, "is_swapped"_a, kw, stream);

  m.def("gather_max", &gather_max, "x"_a, "table"_a, kw, stream);
  m.def("max_pool_backward", &max_pool_backward, "dy"_a, "index"_a, "in_out"_a, kw, stream);
  m.def("gather_sum", &gather_sum, "x"_a, "table"_a, "weights"_a = nb::none(), kw, stream);
  m.def("scatter_sum", &scatter_sum, "x"_a, "table"_a, "rows"_a, "weights"_a = nb::none(), kw, stream);
  m.def("scatter_max", &scatter_max, "x"_a, "table"_a, "rows"_a, kw, stream);

  m.def("attention", &attention, "q"_a, "k"_a, "v"_a, "rows"_a, "starts"_a, "queries"_a, "asked"_a = nb::none(),
        "begins"_a = nb::none(), kw, "scale"_a, stream);
  m.def("attention_gradient", &attention_gradient, "dy"_a, "q"_a, "k"_a, "v"_a, "y"_a, "lse"_a, "rows"_a, "starts"_a,
        "queries"_a, "asked"_a = nb::none(), "begins"_a = nb::none(), kw, "scale"_a, stream);

  // Norms by channel.
  auto none = nb::none();
  m.def("channel_moments", &channel_moments, "x"_a, "starts"_a, "order"_a = none, "running_mean"_a = none,
        "running_var"_a = none, kw, "momentum"_a = 0.0f, stream);
  m.def("combine_moments", &combine_moments, "lines"_a, "running_mean"_a = none, "running_var"_a = none, kw,
        "momentum"_a = 0.0f, stream);
  m.def("normalize_channels", &normalize_channels, "x"_a, "mean"_a, "var"_a, "weight"_a = none, "bias"_a = none,
        "residual"_a = none, "of"_a = none, kw, "act"_a, "eps"_a, "slope"_a, stream);
  m.def("channel_gradient_sums", &channel_gradient_sums, "dy"_a, "x"_a, "mean"_a, "var"_a, "weight"_a = none,
        "bias"_a = none, "residual"_a = none, "starts"_a, "order"_a = none, kw, "act"_a, "eps"_a, "slope"_a, stream);
  m.def("channel_gradient", &channel_gradient, "dy"_a, "x"_a, "mean"_a, "var"_a, "weight"_a = none, "bias"_a = none,
        "residual"_a = none, "of"_a = none, "terms"_a = none, kw, "act"_a, "eps"_a, "slope"_a, stream);

  m.def("start", [](const std::vector<array>& arrays) {
    auto each = one_of_each(arrays);
    nb::gil_scoped_release without_python;
    mx::async_eval(std::move(each));
  }, "arrays"_a, "As mx.async_eval, which takes long over arrays that one launch computes.");

  m.def("unfollow", [](const std::vector<array>& arrays) {
    for (auto a : arrays) {
      a.set_tracer(false);
      a.detach();
    }
  }, "arrays"_a, "Lets computed arrays be constants of transformations that come: MLX marks what a vjp rule makes.");

  m.def("is_transforming", &is_transforming);
  m.def("is_differentiating", &is_differentiating);
}
