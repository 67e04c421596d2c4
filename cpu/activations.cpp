// GELU by the error function or by tanh, and SiLU, and their ways back: one pass over the elements, float32 inside.
#include <algorithm>
#include <string>

#include "operations.h"
#include "thread_pool.h"

namespace lattice {
namespace {

// y = f(x), or with dy its product with the slope at x.
struct Activated {
  const char* name;
  Activation f;
  bool back;
  bool operator==(const Activated&) const = default;
  std::vector<mx::Shape> shapes(const std::vector<array>& in) const { return {in[0].shape()}; }
  std::vector<mx::Dtype> dtypes(const std::vector<array>& in) const { return {in[0].dtype()}; }

  void evaluate(const std::vector<Tensor>& in, const std::vector<Tensor>& out) const {
    Type type = type_of(in[0].dtype);
    int64_t count = 1, size = bytes_of(type);
    for (auto n : in[0].shape) count *= n;
    parallel_range(count, 1 << 14, [&](int64_t begin, int64_t end) {
      const char* dy = back ? in[1].as<char>() + begin * size : nullptr;
      inner_loops().activate(f, type, in[0].as<char>() + begin * size, dy, end - begin,
                             out[0].as<char>() + begin * size);
    });
  }
};

array activated(const char* who, Activation f, const array& x, const MaybeArray& dy, Stream s) {
  want_float(who, "x", x);
  std::vector<array> inputs{x};
  if (dy) {
    want_same_dtype(who, "dy", *dy, "x", x);
    if (dy->shape() != x.shape()) fail(who, "dy must have the shape of x.");
    inputs.push_back(*dy);
  }
  return build(Activated{who, f, dy.has_value()}, std::move(inputs), s)[0];
}

}  // namespace

array gelu(const array& x, const MaybeArray& dy, Stream s) { return activated("gelu", Activation::gelu, x, dy, s); }
array gelu_tanh(const array& x, const MaybeArray& dy, Stream s) {
  return activated("gelu_tanh", Activation::gelu_tanh, x, dy, s);
}
array silu(const array& x, const MaybeArray& dy, Stream s) { return activated("silu", Activation::silu, x, dy, s); }

}  // namespace lattice
