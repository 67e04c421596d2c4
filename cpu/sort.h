// A stable parallel radix sort of 64-bit keys with row numbers: least significant digit first, eleven bits a pass, only
// the digits in which keys differ. Memory: two copies of keys and rows.
#pragma once
#include <algorithm>
#include <cstdint>
#include <utility>
#include <vector>

#include "thread_pool.h"

namespace lattice {

// Sorts keys, and rows with them where rows is not empty.
inline void radix_sort(std::vector<uint64_t>& keys, std::vector<int32_t>& rows) {
  constexpr int digit = 11;
  constexpr int64_t buckets = 1 << digit;
  int64_t n = int64_t(keys.size());
  uint64_t any = 0, all = ~uint64_t(0);
  bool sorted = true;
  for (int64_t i = 0; i < n; ++i) {
    any |= keys[i], all &= keys[i];
    sorted &= i == 0 || keys[i - 1] <= keys[i];
  }
  if (sorted) return;
  uint64_t differ = any & ~all;
  std::vector<uint64_t> other_keys(n);
  std::vector<int32_t> other_rows(rows.size());
  int64_t pieces = std::clamp<int64_t>(n / 16384, 1, num_threads());
  std::vector<int64_t> place(pieces * buckets);
  for (int shift = 0; shift < 64; shift += digit) {
    if (!(differ >> shift & (buckets - 1))) continue;
    std::fill(place.begin(), place.end(), 0);
    parallel_for(pieces, [&](int64_t p) {
      int64_t* count = &place[p * buckets];
      for (int64_t i = n * p / pieces; i < n * (p + 1) / pieces; ++i) ++count[keys[i] >> shift & (buckets - 1)];
    });
    int64_t at = 0;
    for (int64_t b = 0; b < buckets; ++b)
      for (int64_t p = 0; p < pieces; ++p) at += std::exchange(place[p * buckets + b], at);
    parallel_for(pieces, [&](int64_t p) {
      int64_t* next = &place[p * buckets];
      for (int64_t i = n * p / pieces; i < n * (p + 1) / pieces; ++i) {
        int64_t to = next[keys[i] >> shift & (buckets - 1)]++;
        other_keys[to] = keys[i];
        if (!rows.empty()) other_rows[to] = rows[i];
      }
    });
    keys.swap(other_keys);
    rows.swap(other_rows);
  }
}

}  // namespace lattice
