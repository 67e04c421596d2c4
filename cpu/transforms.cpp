// Questions about MLX's transformations. Nothing is evaluated here.
#include "transforms.h"

#include <unordered_set>

namespace lattice {

bool is_transforming() {
  // MLX has no such function, but answers for an array that is marked as traced. Never freed: MLX may end before.
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
  return y.inputs().size() != 3 || !y.siblings().empty();
}

std::vector<mx::array> one_of_each(const std::vector<mx::array>& arrays) {
  std::vector<mx::array> each;
  std::unordered_set<uintptr_t> siblings;
  for (auto& a : arrays) {
    if (siblings.contains(a.id())) continue;
    each.push_back(a);
    for (auto& sibling : a.siblings()) siblings.insert(sibling.id());
  }
  return each;
}

}  // namespace lattice
