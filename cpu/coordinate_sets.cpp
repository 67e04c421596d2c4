// Coordinate sets: bounds, sorted unique rows, floor cells, the outputs of strided and generative kernels, duplicates.
//
// Rows are (1 + D) int32 columns, any values. Where their box has keys (any real scene), a row is one 64-bit number.
//   by a bitmap       Where the box is not much larger than the set: candidates set bits, and the bits read in order
//                     are the sorted unique rows.
//   by a radix sort   of the keys elsewhere. Of the N x K candidates of reach and expand, a small hash set per block of
//                     input rows drops most repeats first, so that memory is near the size of the result.
//   by comparing      columns, where there are no keys.
// These functions are eager: the size of their result is data, and the caller is about to read it.
#include <algorithm>
#include <array>
#include <atomic>
#include <limits>

#include "bitmap.h"
#include "hash.h"
#include "operations.h"
#include "sort.h"
#include "target_rule.h"

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
    fail(who, "coords must have 2 to 5 columns (batch and 1 to 4 axes), but has " + std::to_string(coords.shape(1)) +
                  ".");
  array a = mx::contiguous(coords, false, mx::Device(mx::Device::cpu));
  a.eval();
  return {a, a.data<int32_t>(), a.shape(0), a.shape(1)};
}

array empty(mx::Shape shape) {
  size_t bytes = 4;
  for (int n : shape) bytes *= size_t(n);
  return array(mx::allocator::malloc(bytes), std::move(shape), mx::int32);
}

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

// Calls emit(key, mask) for the targets of the rows [begin, end): keys `key` + j for each bit j of `mask`.
template <class Emit>
void each_target(const Coordinates& c, const TargetRule& rule, const Box& box, const KeySteps& to, int64_t begin,
                 int64_t end, Emit emit) {
  by_columns(c.columns, [&](auto columns) {
    for (int64_t i = begin; i < end; ++i) {
      int64_t base[columns];
      int group = rule.base<columns>(c.data + i * columns, base);
      if (group < 0) continue;
      uint64_t key = box.key<columns>(base);
      for (int s = to.first[group]; s < to.first[group + 1]; ++s) emit(key + to.steps[s].delta, to.steps[s].mask);
    }
  });
}

array rows_of(const Box& box, const Bitmap& bitmap, int64_t count) {
  array rows = empty({int(count), box.columns});
  bitmap.each([unpack = Unpack(box), out = rows.data<int32_t>(), columns = box.columns](
                  int64_t rank, uint64_t key) mutable { unpack(key, out + rank * columns); });
  return rows;
}

// The sorted unique keys of all targets, for boxes too large for a bitmap.
std::vector<uint64_t> sorted_targets(const Coordinates& c, const TargetRule& rule, const Box& box, const KeySteps& to) {
  int64_t per_row = std::max<int64_t>(1, int64_t(rule.steps.size()));
  int64_t block = std::max<int64_t>(1, 16384 / per_row), blocks = (c.n + block - 1) / block;
  std::vector<std::vector<uint64_t>> parts(blocks);
  size_t slots = 64;
  while (slots < size_t(block * per_row) * 2) slots *= 2;
  parallel_for(blocks, [&](int64_t b) {
    uint64_t* seen = scratch<uint64_t>(5, int64_t(slots));
    std::fill(seen, seen + slots, ~uint64_t(0));
    auto& part = parts[b];
    each_target(c, rule, box, to, b * block, std::min(c.n, (b + 1) * block), [&](uint64_t first, uint64_t mask) {
      for (; mask; mask &= mask - 1) {
        uint64_t key = first + uint64_t(__builtin_ctzll(mask));
        size_t s = (key * 0x9e3779b97f4a7c15 >> 32) & (slots - 1);
        while (seen[s] != ~uint64_t(0) && seen[s] != key) s = (s + 1) & (slots - 1);
        if (seen[s] == key) continue;
        seen[s] = key;
        part.push_back(key);
      }
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
  return keys;
}

array compared_targets(const Coordinates& c, const TargetRule& rule) {
  std::vector<std::array<int32_t, most_columns>> all;
  by_columns(c.columns, [&](auto columns) {
    for (int64_t i = 0; i < c.n; ++i) {
      int64_t base[columns];
      int group = rule.base<columns>(c.data + i * columns, base);
      for (int s = rule.first[group < 0 ? 0 : group]; group >= 0 && s < rule.first[group + 1]; ++s) {
        auto& row = all.emplace_back();
        for (int j = 0; j < columns; ++j) row[j] = int32_t(base[j] + rule.steps[s][j]);
      }
    }
  });
  std::sort(all.begin(), all.end());
  all.erase(std::unique(all.begin(), all.end()), all.end());
  array rows = empty({int(all.size()), c.columns});
  for (size_t i = 0; i < all.size(); ++i) std::copy_n(all[i].begin(), c.columns, rows.data<int32_t>() + i * c.columns);
  return rows;
}

// The sorted unique targets of all rows.
array targets(const char* who, const Coordinates& c, const TargetRule& rule) {
  if (c.n == 0 || rule.steps.empty()) return empty({0, c.columns});
  Ranges ranges = rule.ranges(ranges_of(c.data, c.n, c.columns));
  for (int j = 0; j < c.columns; ++j)
    if (ranges[j].low < std::numeric_limits<int32_t>::min() || ranges[j].high > std::numeric_limits<int32_t>::max())
      fail(who, "the result would hold coordinates from " + std::to_string(ranges[j].low) + " to " +
                    std::to_string(ranges[j].high) + " in column " + std::to_string(j) + ", which int32 cannot.");
  Box box(ranges, c.columns);
  if (!box.has_keys()) return compared_targets(c, rule);
  KeySteps to(rule, box);
  if (bitmap_serves(box.cells, c.n * int64_t(rule.steps.size()) / int64_t(rule.residues.size()))) {
    Bitmap bitmap(box.cells);
    parallel_range(c.n, 1024, [&](int64_t begin, int64_t end) {
      each_target(c, rule, box, to, begin, end, [&](uint64_t key, uint64_t mask) { bitmap.insert(key, mask); });
    });
    return rows_of(box, bitmap, bitmap.number());
  }
  auto keys = sorted_targets(c, rule, box, to);
  array rows = empty({int(keys.size()), c.columns});
  parallel_range(int64_t(keys.size()), 4096, [&](int64_t begin, int64_t end) {
    Unpack unpack(box);
    for (int64_t i = begin; i < end; ++i) unpack(keys[i], rows.data<int32_t>() + i * c.columns);
  });
  return rows;
}

// True where no two rows are equal and that is cheap to know; false where it is not known.
bool unique(const Coordinates& c) {
  Box box(ranges_of(c.data, c.n, c.columns), c.columns);
  if (!box.has_keys()) return false;
  Keys keys(box, c.data, c.n);
  if (keys.increasing) return true;
  if (!bitmap_serves(box.cells, c.n)) return false;
  Bitmap bitmap(box.cells);
  return insert_all(bitmap, keys, c.n);
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

void atomic_min(int32_t* of, int32_t value) {
  int32_t seen = __atomic_load_n(of, __ATOMIC_RELAXED);
  while (value < seen && !__atomic_compare_exchange_n(of, &seen, value, true, __ATOMIC_RELAXED, __ATOMIC_RELAXED)) {
  }
}

std::tuple<array, array, array> unique_by_bitmap(const Coordinates& c, const Box& box) {
  Keys keys(box, c.data, c.n);
  Bitmap bitmap(box.cells);
  insert_all(bitmap, keys, c.n);
  int64_t m = bitmap.number();
  array inverse = empty({int(c.n)}), first = empty({int(m)});
  int32_t *place = inverse.data<int32_t>(), *earliest = first.data<int32_t>();
  std::fill(earliest, earliest + m, std::numeric_limits<int32_t>::max());
  parallel_range(c.n, 4096, [&](int64_t begin, int64_t end) {
    for (int64_t i = begin; i < end; ++i) {
      place[i] = int32_t(bitmap.rank(keys.at[i]));
      atomic_min(&earliest[place[i]], int32_t(i));
    }
  });
  return {rows_of(box, bitmap, m), inverse, first};
}

}  // namespace

std::tuple<std::vector<int>, std::vector<int>> bounds(const array& coords) {
  auto c = read("bounds", coords);
  auto ranges = ranges_of(c.data, c.n, c.columns);
  std::vector<int> low, high;
  for (int j = 0; j < c.columns; ++j) low.push_back(int(ranges[j].low)), high.push_back(int(ranges[j].high));
  return {low, high};
}

std::tuple<array, array, array> unique_rows(const array& coords) {
  auto c = read("unique_rows", coords);
  Box box(ranges_of(c.data, c.n, c.columns), c.columns);
  if (c.n > 0 && bitmap_serves(box.cells, c.n)) return unique_by_bitmap(c, box);
  auto order = sorted_order(c.data, c.n, c.columns);
  array inverse = empty({int(c.n)});
  std::vector<int32_t> rows, first;
  for (int64_t i = 0; i < c.n; ++i) {
    const int32_t* row = c.data + int64_t(order[i]) * c.columns;
    if (i == 0 || !std::equal(row, row + c.columns, rows.end() - c.columns)) {
      rows.insert(rows.end(), row, row + c.columns);
      first.push_back(order[i]);
    }
    inverse.data<int32_t>()[order[i]] = int32_t(first.size()) - 1;
  }
  int m = int(first.size());
  return {array(rows.data(), {m, c.columns}, mx::int32), inverse, array(first.data(), {m}, mx::int32)};
}

array cells(const array& coords, const std::vector<int>& stride) {
  auto c = read("cells", coords);
  check_stride("cells", stride, c.columns - 1);
  return targets("cells", c, TargetRule::cells(c.columns, stride));
}

array reach(const array& coords, const Rows& offsets, const std::vector<int>& stride) {
  auto c = read("reach", coords);
  check_stride("reach", stride, c.columns - 1);
  check_offsets("reach", offsets, c.columns - 1);
  return targets("reach", c, TargetRule::reach(c.columns, offsets, stride));
}

array expand(const array& coords, const Rows& offsets, const std::vector<int>& stride) {
  auto c = read("expand", coords);
  check_stride("expand", stride, c.columns - 1);
  check_offsets("expand", offsets, c.columns - 1);
  return targets("expand", c, TargetRule::expansion(c.columns, offsets, stride));
}

std::optional<std::tuple<int, int>> first_duplicate(const array& coords) {
  auto c = read("first_duplicate", coords);
  if (unique(c)) return std::nullopt;
  return by_columns(c.columns, [&](auto columns) { return first_equal_pair<columns>(c); });
}

}  // namespace lattice
