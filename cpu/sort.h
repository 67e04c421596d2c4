// The lexicographic order of coordinate rows. Rows in order already are not sorted; unique rows that fill enough of
// their box are ordered by a bitmap; others by a radix sort of their keys, or by comparing where they have no keys.
//
// The radix sort is stable and parallel: least significant digit first, eleven bits a pass; digits that all keys share
// are skipped. Memory: two copies of keys and rows.
#pragma once
#include <algorithm>
#include <atomic>
#include <cstdint>
#include <memory>
#include <numeric>
#include <utility>
#include <vector>

#include "bitmap.h"
#include "box.h"

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

// The keys of rows, each multiplied by `scale` and in the order `order`, where these are given.
struct Keys {
  std::unique_ptr<uint64_t[]> at;
  bool increasing = true;  // whether each is greater than the one before it

  Keys(const Box& box, const int32_t* rows, int64_t n, const int64_t* scale = nullptr, const int32_t* order = nullptr)
      : at(new uint64_t[n + 1]) {
    Box scaled = box;  // with the scale in its weights, a key is one multiplication a column
    uint64_t origin = 0;
    for (int j = 0; j < box.columns; ++j) {
      scaled.low[j] = 0;
      scaled.weight[j] *= uint64_t(scale ? scale[j] : 1);
      origin += uint64_t(box.low[j]) * box.weight[j];
    }
    std::atomic<bool> all = true;
    by_columns(box.columns, [&](auto c) {
      auto key = [&](int64_t i) { return scaled.key<c>(rows + (order ? order[i] : i) * c) - origin; };
      parallel_range(n, 4096, [&](int64_t begin, int64_t end) {
        bool rising = true;
        uint64_t before = begin ? key(begin - 1) : 0;
        for (int64_t i = begin; i < end; ++i) {
          at[i] = key(i);
          rising &= i == 0 || at[i] > before;
          before = at[i];
        }
        if (!rising) all = false;
      });
    });
    increasing = all;
  }
};

// Adds keys to a bitmap; returns whether all were different.
inline bool insert_all(Bitmap& bitmap, const Keys& keys, int64_t n) {
  std::atomic<bool> unique = true;
  parallel_range(n, 4096, [&](int64_t begin, int64_t end) {
    bool fresh = true;
    for (int64_t i = begin; i < end; ++i) fresh &= bitmap.insert(keys.at[i]);
    if (!fresh) unique = false;
  });
  return unique;
}

// The row numbers in lexicographic order of the rows; equal rows in ascending number.
inline std::vector<int32_t> sorted_order(const int32_t* rows, int64_t n, int columns) {
  Box box(ranges_of(rows, n, columns), columns);
  std::vector<int32_t> order(n);
  std::iota(order.begin(), order.end(), 0);
  if (!box.has_keys()) {
    std::stable_sort(order.begin(), order.end(), [&](int32_t a, int32_t b) {
      const int32_t *p = rows + int64_t(a) * columns, *q = rows + int64_t(b) * columns;
      return std::lexicographical_compare(p, p + columns, q, q + columns);
    });
    return order;
  }
  Keys keys(box, rows, n);
  if (keys.increasing) return order;
  if (bitmap_serves(box.cells, n)) {
    Bitmap bitmap(box.cells);
    if (insert_all(bitmap, keys, n)) {
      bitmap.number();
      parallel_range(n, 4096, [&](int64_t begin, int64_t end) {
        for (int64_t i = begin; i < end; ++i) order[bitmap.rank(keys.at[i])] = int32_t(i);
      });
      return order;
    }
  }
  std::vector<uint64_t> sorted(keys.at.get(), keys.at.get() + n);
  radix_sort(sorted, order);
  return order;
}

}  // namespace lattice
