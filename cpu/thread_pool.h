// One pool of threads for every operation. parallel_for hands out unit indices one by one, which balances uneven units;
// which thread takes a unit never changes a result, because each unit writes its own part of the output.
#pragma once
#include <cstddef>
#include <cstdint>
#include <functional>

namespace lattice {

int num_threads();
void set_num_threads(int n);

// Calls unit(u) for u in [0, units) on up to num_threads() threads, the caller among them, and returns when all are
// done. The first exception is rethrown here.
void parallel_for(int64_t units, const std::function<void(int64_t)>& unit);

// Calls range(begin, end) on ranges that cover [0, n), each of at least `grain` where n allows.
void parallel_range(int64_t n, int64_t grain, const std::function<void(int64_t, int64_t)>& range);

// Per-thread working memory, 64-byte aligned, kept from call to call; each slot is one buffer.
void* scratch_bytes(int slot, size_t bytes);
template <class T>
T* scratch(int slot, int64_t count) {
  return static_cast<T*>(scratch_bytes(slot, size_t(count) * sizeof(T)));
}

}  // namespace lattice
