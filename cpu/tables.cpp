// Relations as tables: the neighbour table of a geometric rule, its transpose, its edges, its rows sorted by mask.
//
//   neighbour_table   out_in (N_out, K): the input row i with in[i] = out * stride + offset_k (or, transposed, with
//                     in[i] * stride + offset_k = out), -1 where there is none. Per block of rows all lookups are
//                     hashed and prefetched, then resolved. Where the input is the output, the stride 1 and the
//                     offsets symmetric, half of the offsets are searched and each hit is written in both rows.
//   memory            the hash (16 to 32 bytes a row) and the table.
#include <algorithm>
#include <limits>

#include "edge_lists.h"
#include "hash.h"
#include "operations.h"
#include "sort.h"

namespace lattice {
namespace {

// The offset that is the negative of each offset, or an empty list where one has none.
std::vector<int> mirrors(const Rows& offsets) {
  std::vector<int> mirror;
  for (auto& a : offsets) {
    auto negative = std::find_if(offsets.begin(), offsets.end(), [&](const std::vector<int>& b) {
      for (size_t j = 0; j < a.size(); ++j)
        if (int64_t(a[j]) + b[j]) return false;
      return true;
    });
    if (negative == offsets.end()) return {};
    mirror.push_back(int(negative - offsets.begin()));
  }
  for (size_t k = 0; k < mirror.size(); ++k)
    if (mirror[mirror[k]] != int(k)) return {};  // an offset stands twice
  return mirror;
}

struct NeighbourTable {
  static constexpr const char* name = "NeighbourTable";
  Rows offsets;
  std::vector<int> stride;
  bool transposed;
  bool operator==(const NeighbourTable&) const = default;

  std::vector<mx::Shape> shapes(const std::vector<array>& in) const {
    return {{in[1].shape(0), int(offsets.size())}};
  }
  std::vector<mx::Dtype> dtypes(const std::vector<array>&) const { return {mx::int32}; }

  void run(const std::vector<Tensor>& in, const std::vector<Tensor>& out) const {
    int columns = int(in[0].dim(1));
    if (columns == 2) search<2>(in, out);
    if (columns == 3) search<3>(in, out);
    if (columns == 4) search<4>(in, out);
    if (columns == 5) search<5>(in, out);
  }

 private:
  template <int columns>
  void search(const std::vector<Tensor>& in, const std::vector<Tensor>& out) const {
    const int32_t *from = in[0].as<int32_t>(), *to = in[1].as<int32_t>();
    int64_t n_in = in[0].dim(0), n_out = in[1].dim(0);
    int volume = int(offsets.size());
    int32_t* table = out[0].as<int32_t>();
    bool unit = std::all_of(stride.begin(), stride.end(), [](int s) { return s == 1; });
    std::vector<int> mirror;
    if (unit && from == to && n_in == n_out) mirror = mirrors(offsets);
    bool half = !mirror.empty();

    std::vector<int> searched;
    for (int k = 0; k < volume; ++k)
      if (!half || k < mirror[k]) searched.push_back(k);
    int count = int(searched.size());
    std::vector<int> shifts;
    for (auto& offset : offsets) shifts.insert(shifts.end(), offset.begin(), offset.end());

    CoordinateHash<columns> hash(from, n_in);
    if (half)
      parallel_range(n_out * volume, 1 << 16,
                     [&](int64_t begin, int64_t end) { std::fill(table + begin, table + end, -1); });
    const int block = std::max(1, 512 / std::max(count, 1));
    int64_t pieces = (n_out + 4095) / 4096;
    parallel_for(pieces, [&](int64_t p) {
      struct Query {
        uint64_t hash;
        int32_t row[columns];
        bool legal;
      };
      Query* queries = scratch<Query>(6, int64_t(block) * count + 1);
      int64_t end = std::min(n_out, (p + 1) * 4096);
      for (int64_t o = p * 4096; o < end; o += block) {
        int64_t rows = std::min<int64_t>(block, end - o);
        Query* q = queries;
        for (int64_t r = 0; r < rows; ++r)
          for (int k : searched) {
            q->legal = ask<columns>(to + (o + r) * columns, &shifts[k * (columns - 1)], unit, q->row);
            q->hash = hash.hash(q->row);
            hash.prefetch(q->hash);
            ++q;
          }
        q = queries;
        for (int64_t r = 0; r < rows; ++r) {
          int32_t* row = table + (o + r) * volume;
          for (int k : searched) {
            int32_t i = q->legal ? hash.find(q->row, q->hash) : -1;
            ++q;
            if (!half) {
              row[k] = i;
            } else if (i >= 0) {
              row[k] = i;
              table[int64_t(i) * volume + mirror[k]] = int32_t(o + r);
            }
          }
          if (half)
            for (int k = 0; k < volume; ++k)
              if (mirror[k] == k) row[k] = int32_t(o + r);
        }
      }
    });
  }

  // The input row that offset k asks for; false where int32 holds no such row.
  template <int columns>
  bool ask(const int32_t* out, const int* offset, bool unit, int32_t* row) const {
    bool legal = true;
    row[0] = out[0];
    for (int j = 1; j < columns; ++j) {
      int64_t v;
      if (unit) {
        v = transposed ? int64_t(out[j]) - offset[j - 1] : int64_t(out[j]) + offset[j - 1];
      } else if (transposed) {
        v = int64_t(out[j]) - offset[j - 1];
        legal &= v % stride[j - 1] == 0;
        v /= stride[j - 1];
      } else {
        v = int64_t(out[j]) * stride[j - 1] + offset[j - 1];
      }
      row[j] = int32_t(v);
      legal &= row[j] == v;
    }
    return legal;
  }
};

struct TransposeTable {
  static constexpr const char* name = "TransposeTable";
  int n_in;
  bool operator==(const TransposeTable&) const = default;
  std::vector<mx::Shape> shapes(const std::vector<array>& in) const { return {{n_in, in[0].shape(1)}}; }
  std::vector<mx::Dtype> dtypes(const std::vector<array>&) const { return {mx::int32}; }

  void run(const std::vector<Tensor>& in, const std::vector<Tensor>& out) const {
    const int32_t* from = in[0].as<int32_t>();
    int32_t* to = out[0].as<int32_t>();
    int64_t rows = in[0].dim(0), volume = in[0].dim(1);
    parallel_range(n_in * volume, 1 << 16, [&](int64_t begin, int64_t end) { std::fill(to + begin, to + end, -1); });
    parallel_range(rows, 1024, [&](int64_t begin, int64_t end) {
      int64_t* present = scratch<int64_t>(6, volume + 1);
      int32_t largest = -1;
      for (int64_t o = begin; o < end; ++o) {
        const int32_t* row = from + o * volume;
        int64_t n = 0;
        for (int64_t k = 0; k < volume; ++k) {
          present[n] = k;
          n += row[k] >= 0;
          largest = std::max(largest, row[k]);
        }
        if (largest >= n_in)
          fail("transpose_table", "an edge names input row " + std::to_string(largest) + ", but there are " +
                                      std::to_string(n_in) + " input rows.");
        // Relaxed: in a geometric relation each (i, k) is written once.
        for (int64_t j = 0; j < n; ++j)
          std::atomic_ref<int32_t>(to[row[present[j]] * volume + present[j]])
              .store(int32_t(o), std::memory_order_relaxed);
      }
    });
  }
};

struct MaskSort {
  static constexpr const char* name = "MaskSort";
  bool operator==(const MaskSort&) const = default;
  std::vector<mx::Shape> shapes(const std::vector<array>& in) const { return {{in[0].shape(0)}}; }
  std::vector<mx::Dtype> dtypes(const std::vector<array>&) const { return {mx::int32}; }

  void run(const std::vector<Tensor>& in, const std::vector<Tensor>& out) const {
    const int32_t* table = in[0].as<int32_t>();
    int64_t n = in[0].dim(0), volume = in[0].dim(1), words = (volume + 63) / 64;
    // rank (words, n): the Gray-code rank of each row's mask, bit k of weight 2^k, least significant word first.
    std::vector<uint64_t> rank(words * n);
    parallel_range(n, 1024, [&](int64_t begin, int64_t end) {
      for (int64_t o = begin; o < end; ++o) {
        uint64_t carry = 0;
        for (int64_t w = words - 1; w >= 0; --w) {
          uint64_t mask = 0;
          int64_t first = w * 64, last = std::min(volume, first + 64);
          for (int64_t k = first; k < last; ++k) mask |= uint64_t(table[o * volume + k] >= 0) << (k - first);
          for (int s = 1; s < 64; s *= 2) mask ^= mask >> s;
          mask ^= carry;
          carry = -(mask & 1);
          rank[w * n + o] = mask;
        }
      }
    });
    std::vector<int32_t> order(n);
    for (int64_t i = 0; i < n; ++i) order[i] = int32_t(i);
    std::vector<uint64_t> keys(n);
    for (int64_t w = 0; w < words; ++w) {
      for (int64_t i = 0; i < n; ++i) keys[i] = rank[w * n + order[i]];
      radix_sort(keys, order);
    }
    std::copy(order.begin(), order.end(), out[0].as<int32_t>());
  }
};

}  // namespace

array neighbour_table(const array& in_coords, const array& out_coords, const Rows& offsets,
                      const std::vector<int>& stride, bool transposed, Stream s) {
  const char* who = "neighbour_table";
  for (auto [what, a] : {std::pair{"in_coords", &in_coords}, {"out_coords", &out_coords}}) {
    want_rank(who, what, *a, 2, "(N, 1 + D)");
    want_dtype(who, what, *a, mx::int32);
  }
  int columns = in_coords.shape(1);
  if (columns < 2 || columns > 5 || out_coords.shape(1) != columns)
    fail(who, "in_coords and out_coords must both have 2 to 5 columns (batch and 1 to 4 axes), but have " +
                  std::to_string(columns) + " and " + std::to_string(out_coords.shape(1)) + ".");
  if (int(stride.size()) != columns - 1 || std::any_of(stride.begin(), stride.end(), [](int v) { return v < 1; }))
    fail(who, "stride must have " + std::to_string(columns - 1) + " values of at least 1.");
  for (auto& row : offsets)
    if (int(row.size()) != columns - 1)
      fail(who, "every offset must have " + std::to_string(columns - 1) + " values, but one has " +
                    std::to_string(row.size()) + ".");
  return build(NeighbourTable{offsets, stride, transposed}, {in_coords, out_coords}, s)[0];
}

array transpose_table(const array& table, int n_in, Stream s) {
  want_rank("transpose_table", "table", table, 2, "(N_out, K)");
  want_dtype("transpose_table", "table", table, mx::int32);
  if (n_in < 0) fail("transpose_table", "n_in must not be negative.");
  return build(TransposeTable{n_in}, {table}, s)[0];
}

array mask_sort(const array& table, Stream s) {
  want_rank("mask_sort", "table", table, 2, "(N_out, K)");
  want_dtype("mask_sort", "table", table, mx::int32);
  return build(MaskSort{}, {table}, s)[0];
}

std::tuple<array, array> edges(const array& table) {
  want_rank("edges", "table", table, 2, "(N_out, K)");
  want_dtype("edges", "table", table, mx::int32);
  array a = mx::contiguous(table, false, mx::Device(mx::Device::cpu));
  a.eval();
  constexpr int64_t limit = std::numeric_limits<int32_t>::max();
  KernelMajor all = kernel_major("edges", a.data<int32_t>(), a.shape(0), a.shape(1), limit);
  int64_t total = all.begin.back(), volume = a.shape(1);
  if (total > limit)
    fail("edges", "the relation has " + std::to_string(total) + " edges, more than an array axis can hold.");
  array list(mx::allocator::malloc(size_t(total) * 12), {int(total), 3}, mx::int32);
  int32_t* out = list.data<int32_t>();
  std::vector<int32_t> counts;
  for (int64_t k = 0; k < volume; ++k) counts.push_back(int32_t(all.begin[k + 1] - all.begin[k]));
  parallel_for(volume, [&](int64_t k) {
    for (int64_t e = all.begin[k]; e < all.begin[k + 1]; ++e)
      out[3 * e] = all.in[e], out[3 * e + 1] = all.out[e], out[3 * e + 2] = int32_t(k);
  });
  return {list, array(counts.data(), {int(volume)}, mx::int32)};
}

}  // namespace lattice
