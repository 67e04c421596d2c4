// The edges of one tile of output rows, grouped by offset, so that no multiply is spent on an absent neighbour. Any
// view of a relation gives them (neighbour table, kernel-major edges, output CSR). Within an offset, edges are in
// output order, so edges of one output row are adjacent.
#pragma once
#include <algorithm>
#include <cstdint>
#include <string>
#include <vector>

#include "inner_loops.h"
#include "primitive.h"
#include "thread_pool.h"

namespace lattice {

// What names the edges: a view of the relation, or nothing where row i is the only neighbour of row i.
enum class Form : int { table, edges, csr, identity };

// Offset k has the edges [begin[k], end[k]) of in and out. out is the row o within the tile, and ~o at the first edge
// of a row, where its sum begins. Rows without edges are listed in empty_rows[0:n_empty].
struct EdgeLists {
  int32_t *in, *out, *empty_rows;
  int64_t *begin, *end, n_empty;
};

class EdgeSource {
 public:
  // indices: table (N_out, K); or edges (E, 3) by (k, o); or CSR: starts (N_out + 1), input rows (E), offsets (E).
  EdgeSource(const char* who, Form form, const Tensor* indices, int64_t n_in, int64_t n_out, int64_t volume)
      : who_(who), form_(form), n_in_(n_in), n_out_(n_out), volume_(volume), first_(indices[0].as<int32_t>()) {
    if (form == Form::csr) {
      rows_ = indices[1].as<int32_t>();
      offsets_ = indices[2].as<int32_t>();
      n_edges_ = indices[1].dim(0);
    }
    if (form == Form::edges) {
      n_edges_ = indices[0].dim(0);
      offset_begin_.resize(volume + 1);
      for (int64_t k = 0; k <= volume; ++k) offset_begin_[k] = lower_bound(0, n_edges_, 2, k);
    }
  }

  // The lists of output rows [row, row + rows), in this thread's scratch (slots 0, 1 and 6).
  EdgeLists lists(int64_t row, int64_t rows) const {
    EdgeLists l;
    l.begin = scratch<int64_t>(0, 2 * volume_);
    l.end = l.begin + volume_;
    l.empty_rows = scratch<int32_t>(6, rows + 1);
    l.n_empty = 0;
    if (form_ == Form::table) {
      from_table(row, rows, l);
      return l;
    }
    if (form_ == Form::edges)
      from_edges(row, rows, l);
    else
      from_csr(row, rows, l);
    mark_first(rows, l);
    return l;
  }

 private:
  static void allocate(EdgeLists& l, int64_t edges) {
    l.in = scratch<int32_t>(1, 2 * edges + 2);
    l.out = l.in + edges + 1;
  }

  void from_table(int64_t row, int64_t rows, EdgeLists& l) const {
    allocate(l, volume_ * rows);
    for (int64_t k = 0; k < volume_; ++k) l.begin[k] = l.end[k] = k * rows;
    const int32_t* table = first_ + row * volume_;
    int32_t largest = inner_loops().bucket(table, rows, volume_, l.in, l.out, l.end, l.empty_rows, &l.n_empty);
    check_input(largest);
  }

  // Marks the first edge of each row, in the order in which edges are added, and lists the rows without edges.
  void mark_first(int64_t rows, EdgeLists& l) const {
    std::fill(l.empty_rows, l.empty_rows + rows, 0);
    for (int64_t k = 0; k < volume_; ++k)
      for (int64_t e = l.begin[k]; e < l.end[k]; ++e) {
        int32_t o = l.out[e];
        if (!l.empty_rows[o]) l.out[e] = ~o;
        l.empty_rows[o] = 1;
      }
    for (int64_t o = 0; o < rows; ++o)
      if (!l.empty_rows[o]) l.empty_rows[l.n_empty++] = int32_t(o);
  }

  void from_edges(int64_t row, int64_t rows, EdgeLists& l) const {
    int64_t total = 0;
    for (int64_t k = 0; k < volume_; ++k) {
      l.begin[k] = lower_bound(offset_begin_[k], offset_begin_[k + 1], 1, row);
      l.end[k] = lower_bound(l.begin[k], offset_begin_[k + 1], 1, row + rows);
      total += l.end[k] - l.begin[k];
    }
    allocate(l, total);
    int64_t at = 0;
    for (int64_t k = 0; k < volume_; ++k) {
      int64_t e = l.begin[k], end = l.end[k];
      l.begin[k] = at;
      for (; e < end; ++e, ++at) {
        check_input(first_[3 * e], true);
        int64_t o = first_[3 * e + 1] - row;
        if (o < 0 || o >= rows) fail(who_, "edges must be sorted by (offset, output row), but they are not.");
        l.in[at] = first_[3 * e];
        l.out[at] = int32_t(o);
      }
      l.end[k] = at;
    }
  }

  void from_csr(int64_t row, int64_t rows, EdgeLists& l) const {
    std::fill(l.begin, l.begin + volume_, 0);
    for (int64_t o = row; o < row + rows; ++o) {
      if (first_[o] < 0 || first_[o + 1] < first_[o] || first_[o + 1] > n_edges_)
        fail(who_, "starts must rise from 0 to the number of edges, but row " + std::to_string(o) + " spans [" +
                       std::to_string(first_[o]) + ", " + std::to_string(first_[o + 1]) + ") of " +
                       std::to_string(n_edges_) + " edges.");
      for (int64_t e = first_[o]; e < first_[o + 1]; ++e) {
        check_input(rows_[e], true);
        if (offsets_[e] < 0 || offsets_[e] >= volume_)
          fail(who_, "an edge names offset " + std::to_string(offsets_[e]) + " of a kernel of " +
                         std::to_string(volume_) + ".");
        ++l.begin[offsets_[e]];
      }
    }
    int64_t at = 0;
    for (int64_t k = 0; k < volume_; ++k) {
      int64_t count = l.begin[k];
      l.begin[k] = l.end[k] = at;
      at += count;
    }
    allocate(l, at);
    for (int64_t o = row; o < row + rows; ++o)
      for (int64_t e = first_[o]; e < first_[o + 1]; ++e) {
        int64_t& end = l.end[offsets_[e]];
        l.in[end] = rows_[e];
        l.out[end] = int32_t(o - row);
        ++end;
      }
  }

  // The first edge of [begin, end) whose column is at least `value`.
  int64_t lower_bound(int64_t begin, int64_t end, int column, int64_t value) const {
    while (begin < end) {
      int64_t middle = (begin + end) / 2;
      if (first_[3 * middle + column] < value)
        begin = middle + 1;
      else
        end = middle;
    }
    return begin;
  }

  void check_input(int64_t i, bool edge = false) const {
    if (i >= n_in_ || (edge && i < 0))
      fail(who_, "an edge names input row " + std::to_string(i) + ", but there are " + std::to_string(n_in_) +
                     " input rows.");
  }

  const char* who_;
  Form form_;
  int64_t n_in_, n_out_, volume_, n_edges_ = 0;
  const int32_t* first_;
  const int32_t *rows_ = nullptr, *offsets_ = nullptr;
  std::vector<int64_t> offset_begin_;
};

// All edges of a table: offset k has [begin[k], begin[k + 1]), in output order.
struct KernelMajor {
  std::vector<int32_t> in, out;
  std::vector<int64_t> begin;
};

inline KernelMajor kernel_major(const char* who, const int32_t* table, int64_t rows, int64_t volume, int64_t n_in) {
  constexpr int64_t piece = 1024;
  int64_t pieces = (rows + piece - 1) / piece;
  std::vector<int32_t> counts(pieces * volume, 0);
  parallel_for(pieces, [&](int64_t p) {
    int32_t* count = counts.data() + p * volume;
    for (int64_t o = p * piece; o < std::min(rows, (p + 1) * piece); ++o)
      for (int64_t k = 0; k < volume; ++k) count[k] += table[o * volume + k] >= 0;
  });
  std::vector<int64_t> place(pieces * volume);
  KernelMajor all;
  int64_t at = 0;
  for (int64_t k = 0; k < volume; ++k) {
    all.begin.push_back(at);
    for (int64_t p = 0; p < pieces; ++p) {
      place[p * volume + k] = at;
      at += counts[p * volume + k];
    }
  }
  all.begin.push_back(at);
  all.in.resize(at);
  all.out.resize(at);
  Tensor as_tensor{const_cast<int32_t*>(table), {int(rows), int(volume)}, mx::int32};
  EdgeSource source(who, Form::table, &as_tensor, n_in, rows, volume);
  parallel_for(pieces, [&](int64_t p) {
    int64_t row = p * piece;
    EdgeLists lists = source.lists(row, std::min(piece, rows - row));
    for (int64_t k = 0; k < volume; ++k) {
      int64_t to = place[p * volume + k];
      for (int64_t e = lists.begin[k]; e < lists.end[k]; ++e, ++to) {
        all.in[to] = lists.in[e];
        int32_t o = lists.out[e];
        all.out[to] = (o < 0 ? ~o : o) + int32_t(row);
      }
    }
  });
  return all;
}

}  // namespace lattice
