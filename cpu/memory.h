// Working memory: aligned to cache lines, large blocks on huge pages.
#pragma once
#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <memory>
#include <new>
#if defined(__linux__)
#include <sys/mman.h>
#endif

namespace lattice {

constexpr size_t cache_line = 64;

// Asks for huge pages: page faults of 4 KB cost more than most operations, and scattered rows miss the TLB less.
inline void advise_huge_pages([[maybe_unused]] void* p, [[maybe_unused]] size_t bytes) {
#if defined(__linux__)
  constexpr size_t least = 4 << 20, page = 4096;
  if (bytes < least) return;
  auto begin = (uintptr_t(p) + page - 1) / page * page, end = (uintptr_t(p) + bytes) / page * page;
  madvise(reinterpret_cast<void*>(begin), end - begin, MADV_HUGEPAGE);  // a hint: a refusal changes nothing
#endif
}

inline void* aligned_bytes(size_t bytes) {
  void* p = ::operator new(bytes, std::align_val_t(cache_line));
  advise_huge_pages(p, bytes);
  return p;
}
inline void free_aligned(void* p) { ::operator delete(p, std::align_val_t(cache_line)); }

struct AlignedDelete {
  void operator()(float* p) const { free_aligned(p); }
};
using Floats = std::unique_ptr<float, AlignedDelete>;

inline Floats aligned_floats(int64_t n) {
  return Floats(static_cast<float*>(aligned_bytes(size_t(std::max<int64_t>(n, 16)) * 4)));
}

}  // namespace lattice
