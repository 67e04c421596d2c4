// Native<Op>: the one MLX primitive class. An Op is a small struct of parameters with
//   const char* name;                         of the function that Python calls; may be static
//   std::vector<mx::Shape> shapes(const std::vector<mx::array>&) const;   output shapes from the inputs' shapes
//   std::vector<mx::Dtype> dtypes(const std::vector<mx::array>&) const;
//   void evaluate(const std::vector<Tensor>& in, const std::vector<Tensor>& out) const;
//   bool operator==(const Op&) const = default;
//   bool reads_strides(size_t input) const;   optional: which inputs need not be contiguous
//   static constexpr bool is_flat = true;     optional: it rounds, so that its gradients are zero
// `evaluate` is called on the stream's own thread, without the GIL, over contiguous memory. Gradients are defined in
// Python by custom functions, so a primitive that is not flat refuses to be transformed.
#pragma once
#include <memory>
#include <stdexcept>
#include <string>
#include <utility>
#include <vector>

#include "mlx/backend/cpu/encoder.h"
#include "mlx/mlx.h"
#include "mlx/primitives.h"
#include "result_memory.h"

namespace lattice {
namespace mx = mlx::core;

// An array's memory as an operation sees it; MLX keeps the buffer alive until the dispatched task is done.
struct Tensor {
  void* data;
  mx::Shape shape;
  mx::Dtype dtype;
  mx::Strides strides{};  // in elements; rows one after the other but where an Op says that it reads strides
  template <class T>
  T* as() const {
    return static_cast<T*>(data);
  }
  int64_t dim(int axis) const { return shape[axis]; }
};

[[noreturn]] inline void fail(const std::string& who, const std::string& sentence) {
  throw std::invalid_argument("[" + who + "] " + sentence);
}
inline std::string text(const mx::Shape& shape) {
  std::string s = "(";
  for (size_t i = 0; i < shape.size(); ++i) s += (i ? ", " : "") + std::to_string(shape[i]);
  return s + (shape.size() == 1 ? ",)" : ")");
}
inline std::string text(mx::Dtype dtype) {
  switch (dtype) {
    case mx::float32: return "float32";
    case mx::float16: return "float16";
    case mx::bfloat16: return "bfloat16";
    case mx::int8: return "int8";
    case mx::int32: return "int32";
    case mx::uint32: return "uint32";
    case mx::int64: return "int64";
    case mx::bool_: return "bool";
    default: return "another dtype of " + std::to_string(mx::size_of(dtype)) + " bytes";
  }
}
inline void want_rank(const char* who, const char* what, const mx::array& a, size_t rank, const char* shape) {
  if (a.ndim() != rank) fail(who, std::string(what) + " must have shape " + shape + ", but has " + text(a.shape()) + ".");
}
inline void want_dtype(const char* who, const char* what, const mx::array& a, mx::Dtype dtype) {
  if (a.dtype() != dtype)
    fail(who, std::string(what) + " must be " + text(dtype) + ", but is " + text(a.dtype()) + ".");
}
inline void want_float(const char* who, const char* what, const mx::array& a) {
  if (a.dtype() != mx::float32 && a.dtype() != mx::float16 && a.dtype() != mx::bfloat16)
    fail(who, std::string(what) + " must be float32, float16 or bfloat16, but is " + text(a.dtype()) + ".");
}
inline void want_same_dtype(const char* who, const char* one, const mx::array& a, const char* other, const mx::array& b) {
  if (a.dtype() != b.dtype())
    fail(who, std::string(one) + " is " + text(a.dtype()) + " but " + other + " is " + text(b.dtype()) +
                  "; cast one of them.");
}

[[noreturn]] inline void refuse(const char* name, const char* what) {
  throw std::runtime_error(std::string("[mlx_lattice._cpu.") + name + "] this operation has no rule for " + what +
                           "; call the operation of mlx_lattice.ops, which defines its transformations.");
}

template <class Op>
std::vector<mx::array> build(Op op, std::vector<mx::array> inputs, mx::StreamOrDevice s);

template <class Op>
class Native final : public mx::Primitive {
 public:
  Native(mx::Stream stream, Op op) : mx::Primitive(stream), op_(std::move(op)) {}

  void eval_cpu(const std::vector<mx::array>& inputs, std::vector<mx::array>& outputs) override {
    auto& encoder = mx::cpu::get_command_encoder(stream());
    // Asked for its memory, MLX's CUDA moves it to the host, at once: not before what writes it has run.
    std::vector<mx::array> given;
    for (auto& a : inputs) {
      encoder.set_input_array(a);
      given.push_back(mx::array::unsafe_weak_copy(a));
    }
    std::vector<Tensor> out;
    for (auto& a : outputs) {
      allocate(a);
      encoder.set_output_array(a);
      out.push_back({a.data<char>(), a.shape(), a.dtype()});
    }
    encoder.dispatch([op = op_, given = std::move(given), out = std::move(out)] {
      std::vector<Tensor> in;
      for (auto& a : given) in.push_back({const_cast<char*>(a.data<char>()), a.shape(), a.dtype(), a.strides()});
      op.evaluate(in, out);
    });
  }
  void eval_gpu(const std::vector<mx::array>&, std::vector<mx::array>&) override { refuse(op_.name, "a GPU stream"); }

  std::vector<mx::array> jvp(const std::vector<mx::array>& inputs, const std::vector<mx::array>&,
                             const std::vector<int>&) override {
    if constexpr (!is_flat()) refuse(op_.name, "jvp");
    std::vector<mx::array> zeros;
    auto shapes = op_.shapes(inputs);
    auto dtypes = op_.dtypes(inputs);
    for (size_t i = 0; i < shapes.size(); ++i) zeros.push_back(mx::zeros(shapes[i], dtypes[i], stream()));
    return zeros;
  }
  std::vector<mx::array> vjp(const std::vector<mx::array>& inputs, const std::vector<mx::array>&,
                             const std::vector<int>& asked, const std::vector<mx::array>&) override {
    if constexpr (!is_flat()) refuse(op_.name, "vjp");
    std::vector<mx::array> zeros;
    for (int i : asked) zeros.push_back(mx::zeros_like(inputs[i], stream()));
    return zeros;
  }
  // One call per element. MLX maps the forward of a custom function too, before it takes the function's own rule.
  // Over no elements: results of the shapes that one element has.
  std::pair<std::vector<mx::array>, std::vector<int>> vmap(const std::vector<mx::array>& inputs,
                                                           const std::vector<int>& axes) override {
    int size = 0;
    for (size_t i = 0; i < inputs.size(); ++i)
      if (axes[i] >= 0) size = inputs[i].shape(axes[i]);
    if (size == 0) return over_nothing(inputs, axes);
    std::vector<std::vector<mx::array>> results;
    for (int e = 0; e < size; ++e) {
      std::vector<mx::array> element;
      for (size_t i = 0; i < inputs.size(); ++i)
        element.push_back(axes[i] < 0 ? inputs[i] : element_of(inputs[i], e, axes[i]));
      auto result = build(op_, std::move(element), stream());
      results.resize(result.size());
      for (size_t j = 0; j < result.size(); ++j) results[j].push_back(result[j]);
    }
    std::vector<mx::array> stacked;
    for (auto& r : results) stacked.push_back(mx::stack(r, 0, stream()));
    return {stacked, std::vector<int>(stacked.size(), 0)};
  }
  std::vector<mx::Shape> output_shapes(const std::vector<mx::array>& inputs) override { return op_.shapes(inputs); }
  bool is_equivalent(const mx::Primitive& other) const override {
    return op_ == static_cast<const Native&>(other).op_;
  }
  const char* name() const override { return op_.name; }

 private:
  std::pair<std::vector<mx::array>, std::vector<int>> over_nothing(std::vector<mx::array> inputs,
                                                                   const std::vector<int>& axes) {
    for (size_t i = 0; i < inputs.size(); ++i) {
      if (axes[i] < 0) continue;
      auto shape = inputs[i].shape();
      shape.erase(shape.begin() + axes[i]);
      inputs[i] = mx::zeros(shape, inputs[i].dtype(), stream());
    }
    std::vector<mx::array> empty;
    auto shapes = op_.shapes(inputs);
    auto dtypes = op_.dtypes(inputs);
    for (size_t i = 0; i < shapes.size(); ++i) {
      shapes[i].insert(shapes[i].begin(), 0);
      empty.push_back(mx::zeros(shapes[i], dtypes[i], stream()));
    }
    return {empty, std::vector<int>(empty.size(), 0)};
  }

  // MLX's take refuses an array of no numbers.
  mx::array element_of(const mx::array& a, int e, int axis) {
    mx::Shape begin(a.ndim(), 0), end = a.shape();
    begin[axis] = e;
    end[axis] = e + 1;
    return mx::squeeze(mx::slice(a, begin, end, stream()), axis, stream());
  }

  static constexpr bool is_flat() { return requires { Op::is_flat; }; }

  Op op_;
};

// Operations run on the CPU: a GPU stream means the default CPU stream, and MLX inserts the fences.
inline mx::Stream cpu_stream(mx::StreamOrDevice s) {
  auto stream = mx::to_stream(s);
  return stream.device == mx::Device::gpu ? mx::default_stream(mx::Device(mx::Device::cpu)) : stream;
}

template <class Op>
std::vector<mx::array> build(Op op, std::vector<mx::array> inputs, mx::StreamOrDevice s) {
  auto stream = cpu_stream(s);
  for (size_t i = 0; i < inputs.size(); ++i) {
    if constexpr (requires { op.reads_strides(i); })
      if (op.reads_strides(i)) continue;
    inputs[i] = mx::contiguous(inputs[i], false, stream);
  }
  auto shapes = op.shapes(inputs);
  auto dtypes = op.dtypes(inputs);
  return mx::array::make_arrays(std::move(shapes), dtypes, std::make_shared<Native<Op>>(stream, std::move(op)),
                                std::move(inputs));
}

}  // namespace lattice
