// Half features as float32, converted once by all threads: cheaper than once an edge where narrow rows have several.
#pragma once
#include "kernel_table.h"
#include "memory.h"
#include "operations.h"
#include "primitive.h"
#include "thread_pool.h"

namespace lattice {

// Whether rows are read so often, and are so narrow, that widening them all beforehand costs less than at each use.
inline bool often_read(int64_t volume, int64_t width) { return volume >= 16 && width <= 64; }

// Returns x itself, or where it is half and `often` read, a float32 copy that lives in `memory` or in a scratch slot.
inline Tensor widened(const Tensor& x, bool often, int slot, Floats& memory) {
  Type type = type_of(x.dtype);
  if (type == Type::f32 || !often) return x;
  int64_t rows = x.dim(0), width = x.dim(1);
  // Fresh pages cost as much as the conversion, so a moderate buffer stays with the stream's thread.
  constexpr int64_t most_kept = 16 << 20;
  if (rows * width > most_kept) memory = aligned_floats(rows * width);
  float* to = memory ? memory.get() : scratch<float>(slot, std::max<int64_t>(rows * width, 16));
  parallel_range(rows, 1024, [&](int64_t begin, int64_t end) {
    kernels().load(type, x.as<char>() + begin * width * bytes_of(type), (end - begin) * width, to + begin * width);
  });
  return {to, x.shape, mx::float32};
}

}  // namespace lattice
