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

  // Where its results are among the inputs and then what the launches compute.
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

// What a function launched for some arrays, to be one node of the graph. What a function returns, one array or a sequence
// of them, is returned so.
class Recording {
 public:
  // `results` are what the function returned of the `stopped` arrays, and of those `before` them, which were there already.
  Recording(const std::vector<mx::array>& stopped, nb::handle results, const std::vector<mx::array>& before);

  int searched() const { return launches_->searched(); }

  // The results of `given` arrays as one node, with rules for who follows it.
  nb::object now(const std::vector<mx::array>& given, nb::handle results, nb::object rules) const;

 private:
  std::vector<mx::array> constants_;
  int given_;
  bool is_single_;
  std::shared_ptr<const RecordedLaunches> launches_;
  std::vector<mx::Shape> shapes_;
  std::vector<mx::Dtype> dtypes_;
};

}  // namespace lattice
