// Coordinate sets: sorted unique rows, floor cells, the outputs that a kernel reaches, duplicates.
//
// Rows are (1 + D) int32 columns, any values. Where the ranges of the columns fit 64 bits together (they do for any
// real scene) a row is packed into one key, relative to the smallest values, and keys are radix-sorted; otherwise rows
// are compared column by column. The candidates of reach and expand, N x K of them, are thinned by a small hash set per
// block of input rows before they are sorted, so memory stays near the size of the result.
// These functions are eager: the size of their result is data, and the caller is about to read it.
#include <algorithm>
#include <array>
#include <atomic>
#include <limits>
#include <numeric>

#include "hash.h"
#include "operations.h"
#include "packing.h"
#include "sort.h"

namespace lattice {
namespace {

struct Coordinates {
  array owner;
  const int32_t* data;
  int64_t n;
  int columns;
};

Coordinates read(const char* who, const array& coords) {
  want_rank(who, "coords", coords, 2, "(N, 1 + D)");
  want_dtype(who, "coords", coords, mx::int32);
  if (coords.shape(1) < 2 || coords.shape(1) > most_columns)
    fail(who, "coords must have 2 to 5 columns (batch and 1 to 4 axes), but has " + std::to_string(coords.shape(1)) + ".");
  array a = mx::contiguous(coords, false, mx::Device(mx::Device::cpu));
  a.eval();
  return {a, a.data<int32_t>(), a.shape(0), a.shape(1)};
}

template <class T>
array make(const std::vector<T>& values, mx::Shape shape, mx::Dtype dtype) {
  return array(values.data(), std::move(shape), dtype);
}

using Wide = std::array<int32_t, most_columns>;

int64_t floor_divide(int64_t a, int64_t b) { return a / b - (a % b < 0); }

void check_stride(const char* who, const std::vector<int>& stride, int axes) {
  if (int(stride.size()) != axes)
    fail(who, "stride must have one value per axis, " + std::to_string(axes) + " of them, but has " +
                  std::to_string(stride.size()) + ".");
  for (int s : stride)
    if (s < 1) fail(who, "strides must be at least 1, but one is " + std::to_string(s) + ".");
}

void check_offsets(const char* who, const Rows& offsets, int axes) {
  for (auto& row : offsets)
    if (int(row.size()) != axes)
      fail(who, "every offset must have one value per axis, " + std::to_string(axes) + " of them, but one has " +
                    std::to_string(row.size()) + ".");
}

// The sorted unique rows among the candidates that generate(i, emit) emits for every input row i; a candidate is
// (1 + D) int64 values that lie within `ranges`.
template <class Generate>
array sorted_set(const char* who, int64_t n, int columns, int64_t per_row, const Ranges& ranges, Generate generate) {
  for (int j = 0; j < columns; ++j)
    if (ranges[j].low < std::numeric_limits<int32_t>::min() || ranges[j].high > std::numeric_limits<int32_t>::max())
      fail(who, "the result would hold coordinates from " + std::to_string(ranges[j].low) + " to " +
                    std::to_string(ranges[j].high) + " in column " + std::to_string(j) + ", which int32 cannot.");
  Packing packing(ranges, columns);
  int64_t block = std::max<int64_t>(1, 16384 / std::max<int64_t>(per_row, 1)), blocks = (n + block - 1) / block;
  std::vector<int32_t> rows;
  if (packing.fits) {
    std::vector<std::vector<uint64_t>> parts(blocks);
    size_t slots = 64;
    while (slots < size_t(block * per_row) * 2) slots *= 2;
    parallel_for(blocks, [&](int64_t b) {
      uint64_t* seen = scratch<uint64_t>(5, int64_t(slots));
      std::fill(seen, seen + slots, ~uint64_t(0));
      auto& part = parts[b];
      for (int64_t i = b * block; i < std::min(n, (b + 1) * block); ++i)
        generate(i, [&](const int64_t* candidate) {
          uint64_t key = packing.key(candidate);
          size_t s = (key * 0x9e3779b97f4a7c15 >> 32) & (slots - 1);
          for (; seen[s] != ~uint64_t(0); s = (s + 1) & (slots - 1))
            if (seen[s] == key) return;
          seen[s] = key;
          part.push_back(key);
        });
    });
    std::vector<int64_t> start(blocks + 1, 0);
    for (int64_t b = 0; b < blocks; ++b) start[b + 1] = start[b] + int64_t(parts[b].size());
    std::vector<uint64_t> keys(start[blocks]);
    parallel_for(blocks, [&](int64_t b) {
      std::copy(parts[b].begin(), parts[b].end(), keys.begin() + start[b]);
      std::vector<uint64_t>().swap(parts[b]);
    });
    std::vector<int32_t> none;
    radix_sort(keys, none);
    keys.erase(std::unique(keys.begin(), keys.end()), keys.end());
    rows.resize(keys.size() * columns);
    parallel_range(int64_t(keys.size()), 4096, [&](int64_t begin, int64_t end) {
      for (int64_t i = begin; i < end; ++i) packing.row(keys[i], &rows[i * columns]);
    });
  } else {
    std::vector<Wide> all;
    for (int64_t i = 0; i < n; ++i)
      generate(i, [&](const int64_t* candidate) {
        Wide w{};
        for (int j = 0; j < columns; ++j) w[j] = int32_t(candidate[j]);
        all.push_back(w);
      });
    std::sort(all.begin(), all.end());
    all.erase(std::unique(all.begin(), all.end()), all.end());
    for (auto& w : all) rows.insert(rows.end(), w.begin(), w.begin() + columns);
  }
  return make(rows, {int(rows.size() / columns), columns}, mx::int32);
}

// The rows in lexicographic order, equal rows in input order.
std::vector<int32_t> sorted_order(const Coordinates& c) {
  std::vector<int32_t> order(c.n);
  std::iota(order.begin(), order.end(), 0);
  Packing packing(ranges_of(c.data, c.n, c.columns), c.columns);
  if (packing.fits) {
    std::vector<uint64_t> keys(c.n);
    parallel_range(c.n, 4096, [&](int64_t begin, int64_t end) {
      for (int64_t i = begin; i < end; ++i) keys[i] = packing.key(c.data + i * c.columns);
    });
    radix_sort(keys, order);
  } else {
    std::stable_sort(order.begin(), order.end(), [&](int32_t a, int32_t b) {
      const int32_t *p = c.data + int64_t(a) * c.columns, *q = c.data + int64_t(b) * c.columns;
      return std::lexicographical_compare(p, p + c.columns, q, q + c.columns);
    });
  }
  return order;
}

template <int columns>
std::optional<std::tuple<int, int>> first_equal_pair(const Coordinates& c) {
  CoordinateHash<columns> table(c.data, c.n);
  std::atomic<int64_t> second{c.n};
  parallel_range(c.n, 4096, [&](int64_t begin, int64_t end) {
    for (int64_t i = begin; i < end; ++i) {
      if (table.find(c.data + i * columns) == i) continue;
      int64_t least = second.load();
      while (i < least && !second.compare_exchange_weak(least, i)) {
      }
      return;
    }
  });
  if (second == c.n) return std::nullopt;
  return std::tuple{int(table.find(c.data + second * columns)), int(second)};
}

}  // namespace

std::tuple<array, array, array> sort_unique(const array& coords) {
  auto c = read("sort_unique", coords);
  auto order = sorted_order(c);
  std::vector<int32_t> rows, inverse(c.n), first;
  rows.reserve(c.n * c.columns);
  for (int64_t i = 0; i < c.n; ++i) {
    const int32_t* row = c.data + int64_t(order[i]) * c.columns;
    if (i == 0 || !std::equal(row, row + c.columns, rows.end() - c.columns)) {
      rows.insert(rows.end(), row, row + c.columns);
      first.push_back(order[i]);
    }
    inverse[order[i]] = int32_t(first.size()) - 1;
  }
  int m = int(first.size());
  return {make(rows, {m, c.columns}, mx::int32), make(inverse, {int(c.n)}, mx::int32), make(first, {m}, mx::int32)};
}

array cells(const array& coords, const std::vector<int>& stride) {
  auto c = read("cells", coords);
  check_stride("cells", stride, c.columns - 1);
  auto ranges = ranges_of(c.data, c.n, c.columns);
  for (int j = 1; j < c.columns; ++j)
    ranges[j] = {floor_divide(ranges[j].low, stride[j - 1]), floor_divide(ranges[j].high, stride[j - 1])};
  return sorted_set("cells", c.n, c.columns, 1, ranges, [&](int64_t i, auto emit) {
    int64_t row[most_columns] = {c.data[i * c.columns]};
    for (int j = 1; j < c.columns; ++j) row[j] = floor_divide(c.data[i * c.columns + j], stride[j - 1]);
    emit(row);
  });
}

array reach(const array& coords, const Rows& offsets, const std::vector<int>& stride) {
  auto c = read("reach", coords);
  check_stride("reach", stride, c.columns - 1);
  check_offsets("reach", offsets, c.columns - 1);
  auto ranges = ranges_of(c.data, c.n, c.columns);
  for (int j = 1; j < c.columns; ++j) {
    Range offset{0, 0};
    for (size_t k = 0; k < offsets.size(); ++k) {
      offset.low = k ? std::min<int64_t>(offset.low, offsets[k][j - 1]) : offsets[k][j - 1];
      offset.high = k ? std::max<int64_t>(offset.high, offsets[k][j - 1]) : offsets[k][j - 1];
    }
    ranges[j] = {floor_divide(ranges[j].low - offset.high, stride[j - 1]),
                 floor_divide(ranges[j].high - offset.low, stride[j - 1])};
  }
  // Offsets share their values axis by axis: one division a distinct value, not one an offset.
  std::vector<int> values;
  std::vector<std::array<int, most_columns>> places(offsets.size());
  std::array<int, most_columns + 1> first{};
  for (int j = 1; j < c.columns; ++j) {
    first[j] = int(values.size());
    for (size_t k = 0; k < offsets.size(); ++k) {
      auto at = std::find(values.begin() + first[j], values.end(), offsets[k][j - 1]);
      places[k][j] = int(at - values.begin());
      if (at == values.end()) values.push_back(offsets[k][j - 1]);
    }
  }
  first[c.columns] = int(values.size());
  constexpr int64_t none = std::numeric_limits<int64_t>::min();
  return sorted_set("reach", c.n, c.columns, int64_t(offsets.size()), ranges, [&](int64_t i, auto emit) {
    int64_t row[most_columns] = {c.data[i * c.columns]};
    int64_t* reached = scratch<int64_t>(6, int64_t(values.size()));
    for (int j = 1; j < c.columns; ++j)
      for (int v = first[j]; v < first[j + 1]; ++v) {
        int64_t from = int64_t(c.data[i * c.columns + j]) - values[v], to = floor_divide(from, stride[j - 1]);
        reached[v] = to * stride[j - 1] == from ? to : none;
      }
    for (auto& place : places) {
      bool whole = true;
      for (int j = 1; j < c.columns; ++j) {
        row[j] = reached[place[j]];
        whole &= row[j] != none;
      }
      if (whole) emit(row);
    }
  });
}

array expand(const array& coords, const Rows& offsets, const std::vector<int>& stride) {
  auto c = read("expand", coords);
  check_stride("expand", stride, c.columns - 1);
  check_offsets("expand", offsets, c.columns - 1);
  auto ranges = ranges_of(c.data, c.n, c.columns);
  for (int j = 1; j < c.columns; ++j) {
    Range offset{0, 0};
    for (size_t k = 0; k < offsets.size(); ++k) {
      offset.low = k ? std::min<int64_t>(offset.low, offsets[k][j - 1]) : offsets[k][j - 1];
      offset.high = k ? std::max<int64_t>(offset.high, offsets[k][j - 1]) : offsets[k][j - 1];
    }
    ranges[j] = {ranges[j].low * stride[j - 1] + offset.low, ranges[j].high * stride[j - 1] + offset.high};
  }
  if (c.n == 0 || offsets.empty()) ranges.fill({0, 0});
  return sorted_set("expand", c.n, c.columns, int64_t(offsets.size()), ranges, [&](int64_t i, auto emit) {
    int64_t row[most_columns] = {c.data[i * c.columns]};
    for (auto& offset : offsets) {
      for (int j = 1; j < c.columns; ++j) row[j] = int64_t(c.data[i * c.columns + j]) * stride[j - 1] + offset[j - 1];
      emit(row);
    }
  });
}

std::optional<std::tuple<int, int>> first_duplicate(const array& coords) {
  auto c = read("first_duplicate", coords);
  if (c.columns == 2) return first_equal_pair<2>(c);
  if (c.columns == 3) return first_equal_pair<3>(c);
  if (c.columns == 4) return first_equal_pair<4>(c);
  return first_equal_pair<5>(c);
}

}  // namespace lattice
