// MLX's lazy graph as data. Nothing is evaluated here.
#include "graph.h"

#include <stdexcept>
#include <string_view>
#include <unordered_set>
#include <utility>

#include "custom_function.h"
#include "mlx/primitives.h"

namespace lattice {
namespace {

// The references to an array's descriptor decide whether MLX may reuse its memory; MLX tells only whether there is one.
// An explicit instantiation may name what is private: this one befriends a function that reads it.
template <auto Descriptor>
struct Reach {
  friend long references(const mx::array& a) { return (a.*Descriptor).use_count(); }
};
long references(const mx::array& a);
template struct Reach<&mx::array::array_desc_>;

class Withheld final : public mx::Primitive {
 public:
  explicit Withheld(mx::Stream stream) : mx::Primitive(stream) {}
  void eval_cpu(const std::vector<mx::array>&, std::vector<mx::array>&) override { refuse(); }
  void eval_gpu(const std::vector<mx::array>&, std::vector<mx::array>&) override { refuse(); }
  const char* name() const override { return "Withheld"; }
  std::vector<mx::Shape> output_shapes(const std::vector<mx::array>& inputs) override { return {inputs[0].shape()}; }
  std::vector<mx::array> jvp(const std::vector<mx::array>&, const std::vector<mx::array>& tangents,
                             const std::vector<int>&) override {
    return tangents;
  }
  std::vector<mx::array> vjp(const std::vector<mx::array>&, const std::vector<mx::array>& cotangents,
                             const std::vector<int>&, const std::vector<mx::array>&) override {
    return cotangents;
  }
  bool is_equivalent(const mx::Primitive&) const override { return true; }

 private:
  [[noreturn]] static void refuse() {
    throw std::runtime_error("the value of a feature is needed in a dry run, where only its size is known");
  }
};

bool is_lazy(const mx::array& a) { return a.status() == mx::array::Status::unscheduled && a.has_primitive(); }

bool is_custom_function(const mx::array& a) { return std::string_view(a.primitive().name()) == "CustomFunction"; }

template <class T>
void append(std::vector<int64_t>& to, const T& values) {
  to.insert(to.end(), values.begin(), values.end());
}

// The parameters of views that shapes do not tell. By name: MLX exports no type information of these classes.
std::vector<int64_t> state_of(const mx::array& a) {
  std::vector<int64_t> state;
  auto& p = a.primitive();
  std::string_view name = p.name();
  if (name == "Transpose") {
    append(state, static_cast<const mx::Transpose&>(p).state());
  } else if (name == "Slice") {
    auto [starts, ends, strides] = static_cast<const mx::Slice&>(p).state();
    append(state, strides);
  } else if (name == "ExpandDims") {
    append(state, static_cast<const mx::ExpandDims&>(p).state());
  } else if (name == "Squeeze") {
    append(state, static_cast<const mx::Squeeze&>(p).state());
  } else if (is_custom_function(a)) {
    append(state, static_cast<const CustomFunction&>(p).results(int(a.inputs().size()), int(a.siblings().size()) + 1));
  }
  return state;
}

}  // namespace

bool is_transforming() {
  // MLX exports no such question, but asks it of an array that is marked. Never freed: MLX may end before.
  static const mx::array* marked = [] {
    auto* a = new mx::array(0.0f);
    a->set_tracer(true);
    return a;
  }();
  return marked->is_tracer();
}

bool is_differentiating() {
  if (!is_transforming()) return false;
  static const mx::array* probe = new mx::array(mx::zeros({1, 1, 128, 64}, mx::float16));  // never evaluated, or freed
  mx::array y = mx::fast::scaled_dot_product_attention(*probe, *probe, *probe, 1.0f);
  return y.primitive().name() != std::string_view("ScaledDotProductAttention") || !y.siblings().empty();
}

std::vector<mx::array> one_of_each(const std::vector<mx::array>& arrays) {
  std::vector<mx::array> each;
  std::unordered_set<uintptr_t> beside;
  for (auto& a : arrays) {
    if (beside.contains(a.id())) continue;
    each.push_back(a);
    for (auto& sibling : a.siblings()) beside.insert(sibling.id());
  }
  return each;
}

std::vector<int> Graph::add(const std::vector<mx::array>& roots) {
  std::vector<int> places;
  std::vector<mx::array> open;
  auto found = [&](const mx::array& a) {
    auto [it, is_new] = places_.try_emplace(a.id(), int(arrays_.size()));
    if (is_new) {
      arrays_.push_back(a);
      was_lazy_.push_back(is_lazy(a));
      if (is_lazy(a)) open.push_back(a);
    }
    return it->second;
  };
  for (auto& a : roots) places.push_back(found(a));
  while (!open.empty()) {
    auto a = std::move(open.back());
    open.pop_back();
    if (is_custom_function(a) && !launched_.contains(a.id())) {
      auto launched = static_cast<const CustomFunction&>(a.primitive()).lazily(a.inputs());
      for (auto& output : a.outputs()) launched_[output.id()] = launched;
    }
    each_input(a, found);
    for (auto& sibling : a.siblings()) found(sibling);
  }
  return places;
}

// What an array reads, and then what it computes itself.
template <class Each>
void Graph::each_input(const mx::array& a, Each each) const {
  for (auto& in : a.inputs()) each(in);
  if (auto launched = launched_.find(a.id()); launched != launched_.end())
    for (auto& in : launched->second) each(in);
}

GraphNode Graph::node(int at) const {
  auto& a = arrays_.at(at);
  GraphNode node;
  node.shape = a.shape();
  node.itemsize = a.itemsize();
  node.evaluated = !is_lazy(a);
  node.strides = a.strides();
  if (node.evaluated) {
    if (auto& data = a.data_shared_ptr()) {
      node.data = reinterpret_cast<uintptr_t>(data.get());
      if (a.buffer().ptr()) node.data_bytes = a.buffer_size();
    }
    node.data_size = a.data_size();
    node.contiguous = a.flags().contiguous;
    node.row_contiguous = a.flags().row_contiguous;
    node.column_contiguous = a.flags().col_contiguous;
    return node;
  }
  auto stream = a.primitive().stream();
  node.primitive = a.primitive().name();
  node.stream = stream.index;
  node.gpu = stream.device == mx::Device::gpu;
  node.position = a.sibling_position();
  each_input(a, [&](auto& in) { node.inputs.push_back(places_.at(in.id())); });
  node.known = int(a.inputs().size());
  for (auto& sibling : a.siblings()) node.siblings.push_back(places_.at(sibling.id()));
  node.state = state_of(a);
  return node;
}

GraphHolders Graph::holders() const {
  GraphHolders held;
  std::unordered_map<uintptr_t, int> owners;
  for (auto& a : arrays_) {
    held.arrays.push_back(int(references(a)) - 1);
    if (auto& data = a.data_shared_ptr()) ++owners[reinterpret_cast<uintptr_t>(data.get())];
  }
  for (size_t at = 0; at < arrays_.size(); ++at) {
    auto& a = arrays_[at];
    if (!is_lazy(a)) {
      if (was_lazy_[at]) held.evaluated.push_back(int(at));
    } else {
      each_input(a, [&](auto& in) { --held.arrays[places_.at(in.id())]; });
      for (auto& sibling : a.siblings()) --held.arrays[places_.at(sibling.id())];
    }
    auto& data = a.data_shared_ptr();
    held.data.push_back(data ? int(data.use_count()) - owners[reinterpret_cast<uintptr_t>(data.get())] : 0);
  }
  return held;
}

mx::array withheld(const mx::array& a) {
  return mx::array(a.shape(), a.dtype(), std::make_shared<Withheld>(mx::default_stream(mx::default_device())), {a});
}

}  // namespace lattice
