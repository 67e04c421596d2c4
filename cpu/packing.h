// Coordinate rows as single 64-bit keys: each column relative to the smallest value it takes, in just the bits that its
// range needs. Keys are in the rows' lexicographic order, and linear: key(row + d) = key(row) + delta(d). Rows whose
// ranges do not fit 63 bits together (no real scene) are left to callers' slower ways.
#pragma once
#include <algorithm>
#include <array>
#include <cstdint>
#include <limits>

namespace lattice {

constexpr int most_columns = 5;  // batch and up to four axes

struct Range {
  int64_t low, high;
};
using Ranges = std::array<Range, most_columns>;

inline Ranges ranges_of(const int32_t* rows, int64_t n, int columns) {
  Ranges r;
  r.fill(n ? Range{std::numeric_limits<int32_t>::max(), std::numeric_limits<int32_t>::min()} : Range{0, 0});
  for (int64_t i = 0; i < n; ++i)
    for (int j = 0; j < columns; ++j) {
      int64_t v = rows[i * columns + j];
      r[j].low = std::min(r[j].low, v);
      r[j].high = std::max(r[j].high, v);
    }
  return r;
}

struct Packing {
  std::array<int, most_columns> shift{};
  std::array<int64_t, most_columns> low{}, mask{};
  int columns;
  bool fits;

  Packing(const Ranges& ranges, int columns) : columns(columns) {
    int bits = 0;
    for (int j = columns - 1; j >= 0; --j) {
      shift[j] = std::min(bits, 63);
      low[j] = ranges[j].low;
      int need = 0;
      while (need < 62 && (ranges[j].high - ranges[j].low) >> need) ++need;
      mask[j] = (int64_t(1) << need) - 1;
      bits += need;
    }
    fits = bits <= 63;
  }

  // The key of row * scale.
  template <class Integer>
  uint64_t key(const Integer* row, const int64_t* scale = nullptr) const {
    uint64_t k = 0;
    for (int j = 0; j < columns; ++j) k += uint64_t(int64_t(row[j]) * (scale ? scale[j] : 1) - low[j]) << shift[j];
    return k;
  }
  void row(uint64_t key, int32_t* out) const {
    for (int j = 0; j < columns; ++j) out[j] = int32_t(int64_t(key >> shift[j] & uint64_t(mask[j])) + low[j]);
  }
};

}  // namespace lattice
