// Neighbour tables: built from coordinates, transposed, listed as edges.
//
//   neighbour_table   out_in (N_out, K): the input row i with in[i] = out * stride + offset_k (or, transposed, with
//                     in[i] * stride + offset_k = out), -1 where there is none.
//     by merging      Both sides become sorted 64-bit keys, in which an offset is one number to add. For each offset
//                     both sequences are read side by side; offsets that are consecutive along the last axis share one
//                     pass. Memory is read in order, which is several times faster than hashing. Searching only half of
//                     a symmetric kernel's offsets would save less than its scattered writes cost.
//     by hashing      Where the ranges of the coordinates do not fit a key: lookups that compare the whole row,
//                     hashed and prefetched block by block.
//   memory            12 to 24 bytes a row for keys or hash, and the table.
#include <algorithm>
#include <limits>
#include <optional>

#include "box.h"
#include "edge_lists.h"
#include "hash.h"
#include "operations.h"
#include "sort.h"

namespace lattice {
namespace {

// Rows times a scale as sorted keys, with the row of each key. One more key, greater than all others, ends the list.
struct SortedKeys {
  Keys keys;
  std::vector<int32_t> rows;
  int64_t n;

  SortedKeys(const Box& box, const int32_t* coords, int64_t n, const int64_t* scale)
      : keys(box, coords, n, scale), n(n) {
    if (keys.increasing) {
      rows.resize(n + 1);
      std::iota(rows.begin(), rows.end(), 0);
    } else {
      rows = sorted_order(coords, n, box.columns);
      rows.push_back(-1);
      keys.at = Keys(box, coords, n, scale, rows.data()).at;
    }
    keys.at[n] = ~uint64_t(0);
  }
  const uint64_t* begin() const { return keys.at.get(); }
  uint64_t operator[](int64_t i) const { return keys.at[i]; }
};

// Offsets whose keys are consecutive: key `delta` + j belongs to offset k[j].
struct Consecutive {
  uint64_t delta;
  std::vector<int> k;
};

// Fills the table's columns of these offsets for the output rows [begin, end) in key order, with input keys from `at`
// on; returns the input key that it reached. `length` is the number of offsets, or 0 for any.
template <int length>
size_t merge_columns(const Consecutive& offsets, const SortedKeys& in, const SortedKeys& out, int64_t begin,
                     int64_t end, size_t at, int32_t* table, int64_t volume) {
  const uint64_t* keys = in.begin();
  const int32_t* rows = in.rows.data();
  const int n = length ? length : int(offsets.k.size());
  const int* k = offsets.k.data();
  for (int64_t r = begin; r < end; ++r) {
    uint64_t wanted = out[r] + offsets.delta;
    while (keys[at] < wanted) ++at;
    int32_t* row = table + out.rows[r] * volume;
    size_t p = at;
    for (int j = 0; j < n; ++j) {
      bool hit = keys[p] == wanted + j;
      row[k[j]] = hit ? rows[p] : -1;
      p += hit;
    }
  }
  return at;
}

struct NeighbourTable {
  static constexpr const char* name = "neighbour_table";
  Rows offsets;
  std::vector<int> stride;
  bool transposed;
  bool operator==(const NeighbourTable&) const = default;

  std::vector<mx::Shape> shapes(const std::vector<array>& in) const {
    return {{in[1].shape(0), int(offsets.size())}};
  }
  std::vector<mx::Dtype> dtypes(const std::vector<array>&) const { return {mx::int32}; }

  void evaluate(const std::vector<Tensor>& in, const std::vector<Tensor>& out) const {
    int columns = int(in[0].dim(1));
    // One rule for both directions: in * in_scale = out * out_scale + delta.
    int64_t in_scale[most_columns] = {1}, out_scale[most_columns] = {1};
    Ranges ranges = ranges_of(in[0].as<int32_t>(), in[0].dim(0), columns);
    Ranges asked = ranges_of(in[1].as<int32_t>(), in[1].dim(0), columns);
    for (int j = 0; j < columns; ++j) {
      Range shift{0, 0};
      if (j > 0) {
        in_scale[j] = transposed ? stride[j - 1] : 1;
        out_scale[j] = transposed ? 1 : stride[j - 1];
        for (auto& offset : offsets) {
          shift.low = std::min<int64_t>(shift.low, transposed ? -int64_t(offset[j - 1]) : offset[j - 1]);
          shift.high = std::max<int64_t>(shift.high, transposed ? -int64_t(offset[j - 1]) : offset[j - 1]);
        }
      }
      ranges[j] = {std::min(ranges[j].low * in_scale[j], asked[j].low * out_scale[j] + shift.low),
                   std::max(ranges[j].high * in_scale[j], asked[j].high * out_scale[j] + shift.high)};
    }
    Box box(ranges, columns);
    if (box.has_keys()) return merge(in, out, box, in_scale, out_scale);
    by_columns(columns, [&](auto c) { search<c>(in, out); });
  }

 private:
  void merge(const std::vector<Tensor>& in, const std::vector<Tensor>& out, const Box& box,
             const int64_t* in_scale, const int64_t* out_scale) const {
    int64_t n_in = in[0].dim(0), n_out = in[1].dim(0), volume = int64_t(offsets.size());
    int32_t* table = out[0].as<int32_t>();
    SortedKeys inputs(box, in[0].as<int32_t>(), n_in, in_scale);
    std::optional<SortedKeys> other;
    bool same = in[0].data == in[1].data && n_in == n_out && std::equal(in_scale, in_scale + box.columns, out_scale);
    if (!same) other.emplace(box, in[1].as<int32_t>(), n_out, out_scale);
    const SortedKeys& queries = same ? inputs : *other;

    std::vector<std::pair<int64_t, int>> deltas;
    for (int k = 0; k < volume; ++k) {
      int64_t step[most_columns] = {};
      for (int j = 1; j < box.columns; ++j) step[j] = transposed ? -int64_t(offsets[k][j - 1]) : offsets[k][j - 1];
      deltas.emplace_back(int64_t(box.delta(step)), k);
    }
    std::sort(deltas.begin(), deltas.end());
    std::vector<Consecutive> groups;
    for (auto [delta, k] : deltas) {
      if (groups.empty() || groups.back().delta + groups.back().k.size() != uint64_t(delta))
        groups.push_back({uint64_t(delta), {}});
      groups.back().k.push_back(k);
    }

    constexpr int64_t piece = 4096, block = 256;  // a block's rows of the table stay in L1 over all groups
    parallel_for((n_out + piece - 1) / piece, [&](int64_t p) {
      int64_t end = std::min(n_out, (p + 1) * piece);
      size_t* at = scratch<size_t>(6, int64_t(groups.size()) + 1);
      for (size_t r = 0; r < groups.size(); ++r)
        at[r] = size_t(std::lower_bound(inputs.begin(), inputs.begin() + n_in, queries[p * piece] + groups[r].delta) -
                       inputs.begin());
      for (int64_t o = p * piece; o < end; o += block) {
        // Rows that came unsorted are written anywhere in the table: fetch the next block's meanwhile.
        for (int64_t next = queries.keys.increasing ? end : o + block; next < std::min(end, o + 2 * block); ++next)
          for (int64_t k = 0; k < volume; k += 16) __builtin_prefetch(table + queries.rows[next] * volume + k, 1);
        for (size_t r = 0; r < groups.size(); ++r) {
          size_t length = groups[r].k.size();
          auto merge = length == 1   ? merge_columns<1>
                       : length == 2 ? merge_columns<2>
                       : length == 3 ? merge_columns<3>
                                     : merge_columns<0>;
          at[r] = merge(groups[r], inputs, queries, o, std::min(end, o + block), at[r], table, volume);
        }
      }
    });
  }

  template <int columns>
  void search(const std::vector<Tensor>& in, const std::vector<Tensor>& out) const {
    const int32_t* to = in[1].as<int32_t>();
    int64_t n_out = in[1].dim(0);
    int volume = int(offsets.size());
    int32_t* table = out[0].as<int32_t>();
    CoordinateHash<columns> hash(in[0].as<int32_t>(), in[0].dim(0));
    const int block = std::max(1, 512 / std::max(volume, 1));
    parallel_for((n_out + 4095) / 4096, [&](int64_t p) {
      struct Query {
        uint64_t hash;
        int32_t row[columns];
        bool legal;
      };
      Query* queries = scratch<Query>(6, int64_t(block) * volume + 1);
      int64_t end = std::min(n_out, (p + 1) * 4096);
      for (int64_t o = p * 4096; o < end; o += block) {
        int64_t rows = std::min<int64_t>(block, end - o);
        Query* q = queries;
        for (int64_t r = 0; r < rows; ++r)
          for (auto& offset : offsets) {
            q->legal = wanted_row<columns>(to + (o + r) * columns, offset.data(), q->row);
            q->hash = hash.hash(q->row);
            hash.prefetch(q->hash);
            ++q;
          }
        for (q = queries; q < queries + rows * volume; ++q)
          table[o * volume + (q - queries)] = q->legal ? hash.find(q->row, q->hash) : -1;
      }
    });
  }

  // Writes the input row that an offset leads to from an output row; false where int32 holds no such row.
  template <int columns>
  bool wanted_row(const int32_t* out, const int* offset, int32_t* row) const {
    bool legal = true;
    row[0] = out[0];
    for (int j = 1; j < columns; ++j) {
      int64_t v;
      if (transposed) {
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

// in_out (N_in, K): the output row o with out_in[o, k] = i, or -1.
struct TransposeTable {
  static constexpr const char* name = "transpose_table";
  int n_in;
  bool operator==(const TransposeTable&) const = default;
  std::vector<mx::Shape> shapes(const std::vector<array>& in) const { return {{n_in, in[0].shape(1)}}; }
  std::vector<mx::Dtype> dtypes(const std::vector<array>&) const { return {mx::int32}; }

  void evaluate(const std::vector<Tensor>& in, const std::vector<Tensor>& out) const {
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
          __atomic_store_n(&to[row[present[j]] * volume + present[j]], int32_t(o), __ATOMIC_RELAXED);
      }
    });
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
