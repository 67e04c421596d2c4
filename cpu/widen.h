// Half-precision features as float32, converted once: cheaper than once per edge where narrow rows have many edges.
#pragma once
#include "inner_loops.h"
#include "memory.h"
#include "operations.h"
#include "primitive.h"
#include "thread_pool.h"

namespace lattice {

// Whether rows have so many edges, and are so narrow, that converting all beforehand costs less than at each edge.
inline bool pays_to_widen(int64_t volume, int64_t width) { return volume >= 16 && width <= 64; }

// Returns x itself where it is float32 or `pays` is false, else a float32 copy in `memory` or in a scratch slot.
inline Tensor widened(const Tensor& x, bool pays, int slot, Floats& memory) {
  Type type = type_of(x.dtype);
  if (type == Type::f32 || !pays) return x;
  int64_t rows = x.dim(0), width = x.dim(1);
  // New pages cost as much as the conversion, so a buffer of moderate size is kept by the stream's thread.
  constexpr int64_t most_kept = 16 << 20;
  if (rows * width > most_kept) memory = aligned_floats(rows * width);
  float* to = memory ? memory.get() : scratch<float>(slot, std::max<int64_t>(rows * width, 16));
  parallel_range(rows, 1024, [&](int64_t begin, int64_t end) {
    inner_loops().load(type, x.as<char>() + begin * width * bytes_of(type), (end - begin) * width, to + begin * width);
  });
  return {to, x.shape, mx::float32};
}

}  // namespace lattice
