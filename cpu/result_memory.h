// The memory of results. It comes from MLX's allocator, so that MLX counts and caches its bytes. It is aligned to cache
// lines, which malloc's is not, and on huge pages: what MLX's cache of freed memory does not hold is mapped anew, at a
// page fault per 4 KB.
#pragma once
#include "memory.h"
#include "mlx/allocator.h"
#include "mlx/mlx.h"

namespace lattice {

// Gives an array that is being evaluated its memory.
inline void allocate(mlx::core::array& a) {
  namespace mx = mlx::core;
  mx::array whole(a.shape(), a.dtype(), nullptr, {});
  whole.set_data(mx::allocator::malloc(a.nbytes() + cache_line));
  char* p = whole.data<char>();
  advise_huge_pages(p, a.nbytes());
  // Shared, and then let go by `whole`: the array alone owns it, so MLX may donate it as any other.
  int64_t skip = (cache_line - uintptr_t(p) % cache_line) % cache_line;
  a.copy_shared_buffer(whole, whole.strides(), whole.flags(), whole.data_size(), skip / a.itemsize());
}

}  // namespace lattice
