// Finds launches in MLX's lazy graph, and runs them again.
#include "recorded_launches.h"

#include <algorithm>
#include <cctype>
#include <limits>
#include <string_view>
#include <unordered_map>
#include <unordered_set>
#include <utility>

namespace lattice {
namespace {

// By name: MLX exports no type information of its classes.
std::string_view name_of(const mx::Primitive& primitive) {
  std::string_view name = primitive.name();
  return name.substr(0, name.find(' '));  // "View int32"
}

// Whether what it makes may be memory of what it reads.
bool is_view(const mx::Primitive& primitive) {
  static constexpr std::string_view of_mlx[] = {"Contiguous", "ExpandDims",   "Flatten",   "Reshape",   "Slice",
                                                "Squeeze",    "StopGradient", "Transpose", "Unflatten", "View"};
  return std::find(std::begin(of_mlx), std::end(of_mlx), name_of(primitive)) != std::end(of_mlx);
}

// Kernels from Python are Custom- and HostMetalKernel; ours are named as Python's functions, in small letters.
bool is_launch_or_view(const mx::Primitive& primitive) {
  auto name = name_of(primitive);
  return std::islower(static_cast<unsigned char>(name[0])) || name.ends_with("Kernel") || name == "CustomFunction" ||
         name == "Depends" || is_view(primitive);
}

}  // namespace

RecordedLaunches::RecordedLaunches(const std::vector<mx::array>& given, const std::vector<mx::array>& before,
                                   const std::vector<mx::array>& results, std::vector<mx::array>& constants)
    : given_(int(given.size())), stream_(mx::default_stream(mx::default_device())) {
  constexpr int unnumbered = std::numeric_limits<int>::min();
  std::unordered_map<uintptr_t, int> numbers;
  for (int i = 0; i < given_; ++i) numbers.emplace(given[i].id(), i);
  for (auto& a : before) numbers.emplace(a.id(), unnumbered);

  // Each after what it reads.
  std::vector<mx::array> computed;
  std::vector<std::pair<mx::array, size_t>> open;
  auto find = [&](const mx::array& a) {
    if (!numbers.emplace(a.id(), unnumbered).second) return;
    if (a.status() != mx::array::Status::unscheduled || !a.has_primitive()) return;
    for (auto& sibling : a.siblings()) numbers.emplace(sibling.id(), unnumbered);
    open.emplace_back(a, 0);
  };
  for (auto& result : results) {
    find(result);
    while (!open.empty()) {
      auto& [a, at] = open.back();
      if (at < a.inputs().size()) {
        find(mx::array(a.inputs()[at++]));  // `open` moves
      } else {
        computed.push_back(std::move(a));
        open.pop_back();
      }
    }
  }

  searched_ = int(numbers.size());
  auto number = [&](const mx::array& a) {
    int& found = numbers.at(a.id());
    if (found == unnumbered) {
      constants.push_back(a);
      found = -int(constants.size());
    }
    return found;
  };
  int next = given_;
  for (auto& a : computed) {
    auto& inputs = a.inputs();
    if (std::none_of(inputs.begin(), inputs.end(), [&](auto& in) { return numbers.at(in.id()) >= 0; })) continue;
    Step step{a.primitive_ptr(), {}, {}, {}};
    for (auto& in : inputs) step.inputs.push_back(number(in));
    for (auto& output : a.outputs()) {
      int& found = numbers.at(output.id());
      if (found == unnumbered) found = next;
      ++next;
      step.shapes.push_back(output.shape());
      step.dtypes.push_back(output.dtype());
    }
    auto name = name_of(*step.primitive);
    if (name == "Transpose") step.axes = static_cast<mx::Transpose&>(*step.primitive).state();
    step.is_made_anew = name == "Reshape" || name == "Transpose" || name == "Broadcast";
    if (step.is_made_anew) {
      auto own = anew(step, inputs[0]);
      if (own.id() != inputs[0].id()) step.primitive = own.primitive_ptr();
    }
    if (steps_.empty()) stream_ = step.primitive->stream();
    is_plain_ = is_plain_ && step.primitive->stream() == stream_ && is_launch_or_view(*step.primitive);
    steps_.push_back(std::move(step));
  }
  for (auto& result : results) results_.push_back(number(result));
  constants_ = int(constants.size());

  // Of views the value whose memory they are.
  std::unordered_map<int, int> whose;
  auto memory = [&](int value) {
    auto found = whose.find(value);
    return found == whose.end() ? value : found->second;
  };
  std::unordered_set<int> read;
  int made = given_;
  for (auto& step : steps_) {
    if (is_view(*step.primitive)) whose[made] = memory(step.inputs[0]);
    else for (int value : step.inputs) read.insert(memory(value));
    made += int(step.shapes.size());
  }
  for (int result : results_) reads_.push_back(read.contains(memory(result)));
}

mx::array RecordedLaunches::anew(const Step& step, const mx::array& input) {
  auto stream = step.primitive->stream();
  auto name = name_of(*step.primitive);
  if (name == "Transpose") return mx::transpose(input, step.axes, stream);
  if (name == "Broadcast") return mx::broadcast_to(input, step.shapes[0], stream);
  return mx::reshape(input, step.shapes[0], stream);
}

std::vector<mx::array> RecordedLaunches::now(const std::vector<mx::array>& inputs, Evaluate evaluate) const {
  const int count = given_ + constants_;
  std::vector<mx::array> computed;
  for (auto& step : steps_) {
    std::vector<mx::array> read;
    for (int number : step.inputs) {
      int at = place(number);
      read.push_back(at < count ? inputs[at] : computed[at - count]);
    }
    auto made = mx::array::make_arrays(step.shapes, step.dtypes, step.primitive, read);
    (made[0].primitive().*evaluate)(made[0].inputs(), made);
    for (auto& a : made) a.set_status(mx::array::Status::evaluated);
    made[0].detach();
    computed.insert(computed.end(), made.begin(), made.end());
  }
  return computed;
}

std::vector<int> RecordedLaunches::results() const {
  std::vector<int> places;
  for (int number : results_) places.push_back(place(number));
  return places;
}

}  // namespace lattice
