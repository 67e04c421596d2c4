// A read-mostly hash table from coordinate rows to row numbers: open addressing, one 64-bit word a slot (32 bits of the
// hash, 32 of the row), a full compare of the row on every tag match, at most half full. The last axis picks the slot
// within a group of four, so neighbours along it share a cache line. Built in parallel by compare-and-swap; equal rows
// keep the smallest row number, so lookups do not depend on the thread count.
#pragma once
#include <cstdint>
#include <cstring>
#include <memory>

#include "thread_pool.h"

namespace lattice {

template <int columns>
class CoordinateHash {
 public:
  CoordinateHash(const int32_t* coords, int64_t n) : coords_(coords) {
    size_t size = 16;
    while (size < size_t(n) * 2) size *= 2;
    mask_ = size - 1;
    slots_.reset(new uint64_t[size]);
    parallel_range(int64_t(size), 1 << 16, [&](int64_t begin, int64_t end) {
      std::memset(slots_.get() + begin, 0xff, size_t(end - begin) * 8);
    });
    parallel_range(n, 4096, [&](int64_t begin, int64_t end) {
      constexpr int64_t ahead = 16;
      for (int64_t i = begin; i < end; ++i) {
        if (i + ahead < end) __builtin_prefetch(&slots_[hash(row(i + ahead)) & mask_], 1);
        insert(int32_t(i));
      }
    });
  }

  // Multilinear, so that the multiplications of the columns do not wait for one another.
  uint64_t hash(const int32_t* c) const {
    constexpr uint64_t odd[] = {0x9e3779b97f4a7c15, 0xbf58476d1ce4e5b9, 0x94d049bb133111eb, 0xd6e8feb86659fd93};
    uint64_t h = 0;
    for (int j = 0; j < columns - 1; ++j) h += uint32_t(c[j]) * odd[j];
    uint32_t last = uint32_t(c[columns - 1]);
    h += (last >> 2) * 0xff51afd7ed558ccd;
    h = (h ^ h >> 32) * 0xc4ceb9fe1a85ec53;
    h ^= h >> 32;
    return (h & ~uint64_t(3)) + (last & 3);
  }
  void prefetch(uint64_t h) const { __builtin_prefetch(&slots_[h & mask_]); }

  // The row that equals c, or -1.
  int32_t find(const int32_t* c, uint64_t h) const {
    for (size_t s = h & mask_;; s = (s + 1) & mask_) {
      uint64_t slot = slots_[s];
      if (slot == empty) return -1;
      if ((slot ^ h) >> 32 == 0 && equal(row(int32_t(slot)), c)) return int32_t(slot);
    }
  }
  int32_t find(const int32_t* c) const { return find(c, hash(c)); }

 private:
  static constexpr uint64_t empty = ~uint64_t(0);

  const int32_t* row(int64_t i) const { return coords_ + i * columns; }
  bool equal(const int32_t* a, const int32_t* b) const {
    int32_t difference = 0;
    for (int j = 0; j < columns; ++j) difference |= a[j] ^ b[j];
    return difference == 0;
  }

  void insert(int32_t i) {
    uint64_t h = hash(row(i)), mine = (h & 0xffffffff00000000) | uint32_t(i);
    for (size_t s = h & mask_;; s = (s + 1) & mask_) {
      uint64_t* slot = &slots_[s];
      uint64_t seen = __atomic_load_n(slot, __ATOMIC_RELAXED);
      while (seen == empty)
        if (swap(slot, seen, mine)) return;
      if ((seen ^ mine) >> 32 || !equal(row(int32_t(seen)), row(i))) continue;
      while (int32_t(seen) > i)
        if (swap(slot, seen, mine)) return;
      return;
    }
  }
  // Compiler builtins: not every standard library has atomic_ref.
  static bool swap(uint64_t* slot, uint64_t& seen, uint64_t mine) {
    return __atomic_compare_exchange_n(slot, &seen, mine, true, __ATOMIC_RELAXED, __ATOMIC_RELAXED);
  }

  const int32_t* coords_;
  size_t mask_;
  std::unique_ptr<uint64_t[]> slots_;
};

}  // namespace lattice
