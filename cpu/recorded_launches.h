// What MLX's lazy graph has between some arrays and some results, without the arrays: it can be run again.
#pragma once
#include <memory>
#include <vector>

#include "mlx/mlx.h"
#include "mlx/primitives.h"

namespace lattice {
namespace mx = mlx::core;

class RecordedLaunches {
 public:
  // What computes `results` from `given` arrays. What else they read is added to `constants`: inputs after those given.
  // It is not looked for what computes those `before` them. None of the arrays is kept.
  RecordedLaunches(const std::vector<mx::array>& given, const std::vector<mx::array>& before,
                   const std::vector<mx::array>& results, std::vector<mx::array>& constants);

  // Arrays that were looked at for it: what it took.
  int searched() const { return searched_; }
  // Whether all of it are launches of this library and views of arrays, on one stream: a few, of little memory.
  bool is_plain() const { return is_plain_; }
  mx::Stream stream() const { return stream_; }
  // What it computes of other inputs (those given, then constants), in order, by MLX's own rule for a CPU or a GPU stream.
  using Evaluate = void (mx::Primitive::*)(const std::vector<mx::array>&, std::vector<mx::array>&);
  std::vector<mx::array> now(const std::vector<mx::array>& inputs, Evaluate evaluate) const;

  // Where the results are among the inputs and then what is computed of them.
  std::vector<int> results() const;
  // Whether any launch of it reads the memory of a result.
  const std::vector<bool>& reads() const { return reads_; }

 private:
  // Values are numbered while constants are still found: what is given, then the outputs of each step; constants are
  // -1, -2, ...
  struct Step {
    std::shared_ptr<mx::Primitive> primitive;
    std::vector<int> inputs;
    std::vector<mx::Shape> shapes;
    std::vector<mx::Dtype> dtypes;
    // MLX's rule of vmap writes into a Reshape, Transpose or Broadcast: each graph has its own.
    bool is_made_anew = false;
    std::vector<int> axes;
  };
  static mx::array anew(const Step& step, const mx::array& input);
  // A value's place among the inputs and then what is computed of them.
  int place(int number) const {
    if (number < 0) return given_ - 1 - number;
    return number < given_ ? number : number + constants_;
  }

  int given_, constants_, searched_;
  std::vector<Step> steps_;
  std::vector<int> results_;
  std::vector<bool> reads_;
  bool is_plain_ = true;
  mx::Stream stream_;
};

}  // namespace lattice
