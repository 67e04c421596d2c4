// Functions with rules of their own. What their rules return is read as MLX reads it: an array, or a sequence of them.
#include "custom_function.h"

#include <nanobind/stl/vector.h>

#include <stdexcept>
#include <string>
#include <utility>

namespace lattice {
namespace {

using Arrays = std::vector<mx::array>;

// Alone where it is one, else in a tuple.
template <class Item>
nb::object handed(size_t count, bool alone, Item item) {
  if (alone) return item(0);
  nb::list all;
  for (size_t i = 0; i < count; ++i) all.append(item(i));
  return nb::tuple(all);
}
nb::object handed(const Arrays& arrays, size_t count, bool alone) {
  return handed(count, alone, [&](size_t i) { return nb::cast(arrays[i]); });
}

Arrays arrays_of(nb::handle found) {
  if (nb::isinstance<mx::array>(found)) return {nb::cast<mx::array>(found)};
  return nb::cast<Arrays>(found);
}

nb::object rule(const nb::object& by_name, const char* name) {
  auto found = by_name.attr("get")(name);
  if (found.is_none()) throw std::invalid_argument("[CustomFunction] this function has no rule for " + std::string(name));
  return found;
}

void want(const char* name, size_t found, size_t wanted) {
  if (found != wanted)
    throw std::invalid_argument("[CustomFunction] the rule for " + std::string(name) + " must return " +
                                std::to_string(wanted) + " arrays; it returned " + std::to_string(found));
}

}  // namespace

CustomFunction::Rules::~Rules() {
  if (!nb::is_alive()) {
    by_name.release();  // Python has ended, and its objects
    return;
  }
  nb::gil_scoped_acquire gil;
  by_name.reset();
}

void CustomFunction::eval_cpu(const Arrays& inputs, Arrays& outputs) {
  evaluate(inputs, outputs, &mx::Primitive::eval_cpu);
}

void CustomFunction::eval_gpu(const Arrays& inputs, Arrays& outputs) {
  evaluate(inputs, outputs, &mx::Primitive::eval_gpu);
}

// An array of the same memory, of which it is one more owner.
mx::array owner_of(const mx::array& a) {
  mx::array owner(a.shape(), a.dtype(), nullptr, {});
  owner.set_data(mx::allocator::Data(a.buffer(), [data = a.data_shared_ptr()](mx::allocator::Buffer) {}));
  owner.set_status(mx::array::Status::evaluated);  // where gradients keep graphs, MLX looks at it again
  return owner;
}

void CustomFunction::evaluate(const Arrays& inputs, Arrays& outputs, RecordedLaunches::Evaluate how) const {
  auto computed = launches_ ? launches_->now(inputs, how) : Arrays{};
  auto places = results(int(inputs.size()), int(outputs.size()));
  Arrays owners;
  for (size_t i = 0; i < outputs.size(); ++i) {
    size_t at = places[i];
    auto& source = at < inputs.size() ? inputs[at] : computed[at - inputs.size()];
    outputs[i].copy_shared_buffer(source);
    // On CUDA what follows may run beside the launches of this node. Had the memory one owner, it might write there, over
    // what one of them still reads: MLX keeps no memory that is a result's for its own readers.
    if (launches_ && launches_->reads()[i]) owners.push_back(owner_of(source));
  }
  computed.insert(computed.end(), owners.begin(), owners.end());
  // MLX keeps what a node reads until the stream is done with it.
  for (auto& output : outputs) output.inputs().insert(output.inputs().end(), computed.begin(), computed.end());
}

Arrays CustomFunction::vjp(const Arrays& primals, const Arrays& cotangents, const std::vector<int>& asked,
                           const Arrays& outputs) {
  nb::gil_scoped_acquire gil;
  auto found = arrays_of(rule(rules_->by_name, "vjp")(handed(primals, given_, given_ == 1),
                                                      handed(cotangents, cotangents.size(), rules_->is_single),
                                                      handed(outputs, outputs.size(), rules_->is_single)));
  want("vjp", found.size(), given_);
  Arrays gradients;
  for (int at : asked) gradients.push_back(at < given_ ? found[at] : mx::zeros_like(primals[at], stream()));
  return gradients;
}

Arrays CustomFunction::jvp(const Arrays& primals, const Arrays& tangents, const std::vector<int>& along) {
  nb::gil_scoped_acquire gil;
  std::vector<nb::object> moved(given_, nb::none());
  for (size_t i = 0; i < along.size(); ++i)
    if (along[i] < given_) moved[along[i]] = nb::cast(tangents[i]);
  return arrays_of(rule(rules_->by_name, "jvp")(handed(primals, given_, given_ == 1),
                                                handed(given_, given_ == 1, [&](size_t i) { return moved[i]; })));
}

std::pair<Arrays, std::vector<int>> CustomFunction::vmap(const Arrays& inputs, const std::vector<int>& axes) {
  nb::gil_scoped_acquire gil;
  auto axis = [&](size_t i) -> nb::object { return axes[i] < 0 ? nb::none() : nb::cast(axes[i]); };
  auto found = nb::cast<nb::tuple>(rule(rules_->by_name, "vmap")(handed(inputs, given_, given_ == 1),
                                                                 handed(given_, given_ == 1, axis)));
  auto arrays = arrays_of(found[0]);
  std::vector<int> mapped;
  auto note = [&](nb::handle each) { mapped.push_back(each.is_none() ? -1 : nb::cast<int>(each)); };
  if (nb::isinstance<nb::sequence>(found[1]))
    for (auto each : nb::cast<nb::sequence>(found[1])) note(each);
  else
    note(found[1]);
  want("vmap", mapped.size(), arrays.size());
  return {arrays, mapped};
}

std::vector<int> CustomFunction::results(int inputs, int count) const {
  if (launches_) return launches_->results();
  std::vector<int> last;
  for (int at = inputs - count; at < inputs; ++at) last.push_back(at);
  return last;
}

Arrays stopped(const Arrays& arrays) {
  Arrays all;
  for (auto& a : arrays) all.push_back(mx::stop_gradient(a));
  return all;
}

Recording::Recording(const Arrays& stopped, nb::handle results, const Arrays& before)
    : given_(int(stopped.size())), is_single_(nb::isinstance<mx::array>(results)) {
  auto made = arrays_of(results);
  launches_ = std::make_shared<RecordedLaunches>(stopped, before, made, constants_);
  for (auto& a : made) {
    shapes_.push_back(a.shape());
    dtypes_.push_back(a.dtype());
  }
}

nb::object Recording::now(const Arrays& given, nb::handle results, nb::object rules) const {
  Arrays inputs = given;
  if (launches_->is_plain())
    inputs.insert(inputs.end(), constants_.begin(), constants_.end());
  else
    for (auto& result : arrays_of(results)) inputs.push_back(mx::stop_gradient(result, launches_->stream()));
  auto kept = std::make_shared<CustomFunction::Rules>(std::move(rules), is_single_);
  auto primitive = std::make_shared<CustomFunction>(launches_->stream(), std::move(kept), given_,
                                                    launches_->is_plain() ? launches_ : nullptr);
  auto made = mx::array::make_arrays(shapes_, dtypes_, primitive, inputs);
  return handed(made, made.size(), is_single_);
}

}  // namespace lattice
