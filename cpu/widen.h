// Half features as float32, converted once by all threads: cheaper than once an edge where narrow rows have several.
#pragma once
#include <memory>
#include <new>

#include "kernel_table.h"
#include "operations.h"
#include "primitive.h"
#include "thread_pool.h"

namespace lattice {

struct AlignedDelete {
  void operator()(float* p) const { ::operator delete(p, std::align_val_t(64)); }
};
using Floats = std::unique_ptr<float, AlignedDelete>;

inline Floats aligned_floats(int64_t n) {
  return Floats(static_cast<float*>(::operator new(size_t(std::max<int64_t>(n, 16)) * 4, std::align_val_t(64))));
}

// Returns x itself, or where it is half and `often` read, a float32 copy that lives in `memory` or in scratch slot 7.
inline Tensor widened(const Tensor& x, bool often, Floats& memory) {
  Type type = type_of(x.dtype);
  if (type == Type::f32 || !often) return x;
  int64_t rows = x.dim(0), width = x.dim(1);
  // Fresh pages cost as much as the conversion, so a moderate buffer stays with the stream's thread.
  constexpr int64_t most_kept = 16 << 20;
  if (rows * width > most_kept) memory = aligned_floats(rows * width);
  float* to = memory ? memory.get() : scratch<float>(7, std::max<int64_t>(rows * width, 16));
  parallel_range(rows, 1024, [&](int64_t begin, int64_t end) {
    kernels().load(type, x.as<char>() + begin * width * bytes_of(type), (end - begin) * width, to + begin * width);
  });
  return {to, x.shape, mx::float32};
}

}  // namespace lattice
