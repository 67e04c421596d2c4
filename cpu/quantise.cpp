// Float rows as int8, for the integer routes: y = clip(rint(x * inverse), -127, 127), halves to even, in one pass over
// the rows by all threads. The inverse of a scale is 1 / scale, and 0 where the scale is not above 0.
#include <algorithm>

#include "integer_loops.h"
#include "operations.h"
#include "thread_pool.h"

namespace lattice {
namespace {

float inverse_of(float scale) { return scale > 0.0f ? 1.0f / scale : 0.0f; }

// x (N, C), and scale (1,) unless rows get scales of their own: the largest magnitude of each over 127.
struct Quantise {
  static constexpr const char* name = "quantise";
  static constexpr bool is_flat = true;
  bool by_rows;
  bool operator==(const Quantise&) const = default;
  std::vector<mx::Shape> shapes(const std::vector<array>& in) const {
    if (!by_rows) return {in[0].shape()};
    return {in[0].shape(), {in[0].shape(0)}};
  }
  std::vector<mx::Dtype> dtypes(const std::vector<array>&) const {
    if (!by_rows) return {mx::int8};
    return {mx::int8, mx::float32};
  }

  void evaluate(const std::vector<Tensor>& in, const std::vector<Tensor>& out) const {
    const Tensor& x = in[0];
    Type type = type_of(x.dtype);
    int64_t rows = x.dim(0), width = x.dim(1);
    float inverse = by_rows ? 0.0f : inverse_of(*in[1].as<float>());
    auto& loops = integer_loops();
    parallel_range(rows, 1 + (1 << 14) / std::max<int64_t>(width, 1), [&](int64_t begin, int64_t end) {
      const char* from = x.as<char>() + begin * width * bytes_of(type);
      int8_t* to = out[0].as<int8_t>() + begin * width;
      if (!by_rows) return loops.quantise(type, from, (end - begin) * width, inverse, to);
      for (int64_t r = begin; r < end; ++r, from += width * bytes_of(type), to += width) {
        float scale = loops.largest(type, from, width) / 127.0f;
        out[1].as<float>()[r] = scale;
        loops.quantise(type, from, width, inverse_of(scale), to);
      }
    });
  }
};

void check(const array& x) {
  want_rank("quantise", "x", x, 2, "(N, C)");
  want_float("quantise", "x", x);
}

}  // namespace

array quantise(const array& x, const array& scale, Stream s) {
  check(x);
  want_dtype("quantise", "scale", scale, mx::float32);
  if (scale.shape() != mx::Shape{1}) fail("quantise", "scale must have shape (1,), but has " + text(scale.shape()) + ".");
  return build(Quantise{false}, {x, scale}, s)[0];
}

std::tuple<array, array> quantise_rows(const array& x, Stream s) {
  check(x);
  auto made = build(Quantise{true}, {x}, s);
  return {made[0], made[1]};
}

}  // namespace lattice
