// A function of arrays with rules of its own for MLX's transformations: one node of the graph, launches and all.
#pragma once
#include <nanobind/nanobind.h>

#include <memory>
#include <vector>

#include "recorded_launches.h"

namespace lattice {
namespace nb = nanobind;

// MLX's own `custom_function` puts a node into the graph for the rules, and one more for each array that forward mode
// and reverse mode must not follow into the launches. Here the launches are in the node, where nothing follows them.
class CustomFunction final : public mx::Primitive {
 public:
  // Python's rules: a dict of "vjp", "jvp" and "vmap", called as `mx.custom_function` calls them.
  struct Rules {
    nb::object by_name;
    bool is_single;  // one result, handed over alone and not in a tuple
    Rules(nb::object by_name, bool is_single) : by_name(std::move(by_name)), is_single(is_single) {}
    Rules(const Rules&) = delete;
    ~Rules();
  };

  // `launches` null: MLX computes the results, which are the last inputs.
  CustomFunction(mx::Stream stream, std::shared_ptr<const Rules> rules, int given,
                 std::shared_ptr<const RecordedLaunches> launches)
      : mx::Primitive(stream), rules_(std::move(rules)), given_(given), launches_(std::move(launches)) {}

  void eval_cpu(const std::vector<mx::array>& inputs, std::vector<mx::array>& outputs) override;
  void eval_gpu(const std::vector<mx::array>& inputs, std::vector<mx::array>& outputs) override;
  std::vector<mx::array> vjp(const std::vector<mx::array>& primals, const std::vector<mx::array>& cotangents,
                             const std::vector<int>& asked, const std::vector<mx::array>& outputs) override;
  std::vector<mx::array> jvp(const std::vector<mx::array>& primals, const std::vector<mx::array>& tangents,
                             const std::vector<int>& along) override;
  std::pair<std::vector<mx::array>, std::vector<int>> vmap(const std::vector<mx::array>& inputs,
                                                           const std::vector<int>& axes) override;
  const char* name() const override { return "CustomFunction"; }

  // For who reads MLX's graph: what it computes itself, in order, and where its results are among inputs and that.
  std::vector<mx::array> lazily(const std::vector<mx::array>& inputs) const;
  std::vector<int> results(int inputs, int count) const;

 private:
  void evaluate(const std::vector<mx::array>& inputs, std::vector<mx::array>& outputs,
                RecordedLaunches::Evaluate how) const;

  std::shared_ptr<const Rules> rules_;
  int given_;
  std::shared_ptr<const RecordedLaunches> launches_;
};

// Arrays that no transformation follows further, which a function with rules is called with.
std::vector<mx::array> stopped(const std::vector<mx::array>& arrays);

// What a function launched for some arrays, to be put into the graph again for others of their shapes and dtypes. What a
// function returns, one array or a sequence of them, is returned so.
class Recording {
 public:
  // `results` are what the function returned of the `stopped` arrays, and of those `beside` them, which were there before.
  Recording(const std::vector<mx::array>& stopped, nb::handle results, const std::vector<mx::array>& beside);

  int searched() const { return launches_->searched(); }
  // Whether it computes each result of what is given: else it was computed already, and is of no other arrays.
  bool repeats() const { return launches_->computes_all(); }
  // Whether the function would launch the same for these arrays, on the stream of now.
  bool fits(const std::vector<mx::array>& given) const;

  // The results of `given` arrays as one node, with rules for who follows it: with what the function returned, or with
  // the launches put into the graph again. Without rules these are nodes: MLX frees memory between them, and reuses it.
  nb::object now(const std::vector<mx::array>& given, nb::handle results, nb::object rules) const;
  nb::object again(const std::vector<mx::array>& given, nb::object rules) const;

 private:
  using Arrays = std::vector<mx::array>;
  Arrays node(Arrays inputs, nb::object rules, bool launches) const;
  nb::object returned(const Arrays& results) const;

  Arrays constants_;
  bool is_single_;
  std::shared_ptr<const RecordedLaunches> launches_;
  std::vector<mx::Shape> shapes_, made_shapes_;
  std::vector<mx::Dtype> dtypes_, made_dtypes_;
};

}  // namespace lattice
