// Coordinate rows as single 64-bit keys: the number of a row's cell in the box that the columns' ranges span. Keys are
// in the rows' lexicographic order, and linear: key(row + d) = key(row) + delta(d) while both lie in the box. Boxes of
// more than 2^62 cells (no real scene) have no keys; callers then compare whole rows.
#pragma once
#include <algorithm>
#include <array>
#include <cstdint>
#include <limits>
#include <mutex>
#include <type_traits>

#include "thread_pool.h"

namespace lattice {

constexpr int most_columns = 5;  // batch and up to four axes

struct Range {
  int64_t low, high;
};
using Ranges = std::array<Range, most_columns>;

// Calls function with the number of columns as a compile-time constant, for loops over rows.
template <class Function>
auto by_columns(int columns, Function function) {
  switch (columns) {
    case 2: return function(std::integral_constant<int, 2>());
    case 3: return function(std::integral_constant<int, 3>());
    case 4: return function(std::integral_constant<int, 4>());
    default: return function(std::integral_constant<int, most_columns>());
  }
}

// Least and greatest value of every column; zeros where there are no rows.
template <int columns>
Ranges ranges_of(const int32_t* rows, int64_t n) {
  constexpr int wide = 4 * columns;  // four rows at a time, so that the compiler uses vectors
  Ranges all;
  all.fill(n ? Range{std::numeric_limits<int32_t>::max(), std::numeric_limits<int32_t>::min()} : Range{0, 0});
  std::mutex mutex;
  parallel_range(n, 8192, [&](int64_t begin, int64_t end) {
    int32_t low[wide], high[wide];
    for (int j = 0; j < wide; ++j) low[j] = high[j] = rows[begin * columns + j % columns];
    const int32_t *p = rows + begin * columns, *last = rows + end * columns;
    for (; p + wide <= last; p += wide)
      for (int j = 0; j < wide; ++j) {
        low[j] = p[j] < low[j] ? p[j] : low[j];
        high[j] = p[j] > high[j] ? p[j] : high[j];
      }
    for (int j = 0; p < last; ++p, ++j) low[j] = std::min(low[j], *p), high[j] = std::max(high[j], *p);
    std::lock_guard lock(mutex);
    for (int j = 0; j < wide; ++j) {
      Range& r = all[j % columns];
      r = {std::min<int64_t>(r.low, low[j]), std::max<int64_t>(r.high, high[j])};
    }
  });
  return all;
}

inline Ranges ranges_of(const int32_t* rows, int64_t n, int columns) {
  return by_columns(columns, [&](auto c) { return ranges_of<c>(rows, n); });
}

struct Box {
  std::array<int64_t, most_columns> low{};
  std::array<uint64_t, most_columns> extent{}, weight{};
  int columns;
  uint64_t cells = 1;  // 0: too many for keys

  Box(const Ranges& ranges, int columns) : columns(columns) {
    for (int j = columns - 1; j >= 0; --j) {
      low[j] = ranges[j].low;
      extent[j] = uint64_t(ranges[j].high) - uint64_t(ranges[j].low) + 1;
      weight[j] = cells;
      if (cells) cells = extent[j] == 0 || extent[j] > (uint64_t(1) << 62) / cells ? 0 : cells * extent[j];
    }
  }
  bool has_keys() const { return cells != 0; }

  template <int columns, class Integer>
  uint64_t key(const Integer* row) const {
    uint64_t k = 0;
    for (int j = 0; j < columns; ++j) k += (uint64_t(int64_t(row[j])) - uint64_t(low[j])) * weight[j];
    return k;
  }
  // What moving a row by `step` cells adds to its key.
  uint64_t delta(const int64_t* step) const {
    uint64_t d = 0;
    for (int j = 0; j < columns; ++j) d += uint64_t(step[j]) * weight[j];
    return d;
  }
};

// Converts keys to rows. Keys that follow one another along the last axis need no division.
class Unpack {
 public:
  explicit Unpack(const Box& box) : box_(box), last_(box.columns - 1) {}

  void operator()(uint64_t key, int32_t* out) {
    if (key - start_ >= length_) {
      start_ = key - key % (length_ = box_.extent[last_]);
      uint64_t rest = key / length_;
      for (int j = last_ - 1; j > 0; --j) {
        head_[j] = int32_t(int64_t(rest % box_.extent[j]) + box_.low[j]);
        rest /= box_.extent[j];
      }
      head_[0] = int32_t(int64_t(rest) + box_.low[0]);
    }
    for (int j = 0; j < last_; ++j) out[j] = head_[j];
    out[last_] = int32_t(int64_t(key - start_) + box_.low[last_]);
  }

 private:
  const Box& box_;
  int last_;
  int32_t head_[most_columns];
  uint64_t start_ = 0, length_ = 0;
};

}  // namespace lattice
