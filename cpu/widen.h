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

// Returns x itself, or where it is half and `often` read, a float32 copy that lives in `memory`.
inline Tensor widened(const Tensor& x, bool often, Floats& memory) {
  Type type = type_of(x.dtype);
  if (type == Type::f32 || !often) return x;
  int64_t rows = x.dim(0), width = x.dim(1);
  memory = aligned_floats(rows * width);
  parallel_range(rows, 1024, [&, to = memory.get()](int64_t begin, int64_t end) {
    kernels().load(type, x.as<char>() + begin * width * bytes_of(type), (end - begin) * width, to + begin * width);
  });
  return {reinterpret_cast<char*>(memory.get()), x.shape, mx::float32};
}

}  // namespace lattice
