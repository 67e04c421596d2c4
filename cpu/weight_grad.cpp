// dW[k] = sum over edges (i, o, k) of x[i]^T dy[o].
//
//   unit      the edges of one offset into one range of about 3072 output rows, in blocks of 96 edges: rows of x and dy
//             are read through pointers (odd widths and half types through a gathered copy), packed where they are
//             wide, and register tiles of input channels x output channels add the block. Units are ordered by range,
//             so the rows of a range are read from memory once, and from L2 for the other offsets.
//   memory    one partial dW per range, added up in the first; ranges get longer until all partials take at most
//             64 MB. A single range has none: its floats are added up in dW itself, or in scratch where dW is half or has
//             output channels first, MLX's layout. An offset without an edge is written as zeros.
//   order     ranges depend on the shapes alone, and partials are added in order: bits do not depend on threads.
//   wins      everywhere; depthwise weights take an elementwise loop.
#include "weight_grad.h"

#include <algorithm>
#include <atomic>
#include <cstring>

#include "edge_lists.h"
#include "widen.h"

namespace lattice {
namespace {

constexpr int64_t block = 96;
constexpr int64_t range_rows = 3072;
constexpr int64_t most_partials = 16 << 20;  // floats

// The edges of each offset, in output order: those of a list (E, 3), or row i with row i where there is no list.
class OffsetEdges {
 public:
  OffsetEdges(const char* who, const Tensor* list, int64_t n_in, int64_t n_out, int64_t volume)
      : who_(who), n_in_(n_in), list_(list ? list->as<int32_t>() : nullptr) {
    int64_t n = list ? list->dim(0) : n_out;
    for (int64_t k = 0; k <= volume; ++k)
      begin_.push_back(list_ ? search(0, n, [&](int64_t e) { return list_[3 * e + 2] < k; }) : k * n);
    listed_ = list_ ? n : -1;
  }

  // In an unsorted list, searches miss edges: fails unless all were taken.
  void check_taken(int64_t n) const {
    if (listed_ >= 0 && n != listed_) fail_at(listed_ - 1);
  }

  // The first edge of offset k whose output row is at least `row`.
  int64_t first(int64_t k, int64_t row) const {
    return search(begin_[k], begin_[k + 1], [&](int64_t e) { return (list_ ? list_[3 * e + 1] : e) < row; });
  }

  // Writes the rows of n <= block edges of offset k from edge e on. Fails where an output row is not in [row, end).
  void take(int64_t k, int64_t row, int64_t end, int64_t e, int64_t n, int32_t* in, int32_t* out) const {
    for (int64_t j = 0; j < n; ++j, ++e) {
      in[j] = list_ ? list_[3 * e] : int32_t(e);
      out[j] = list_ ? list_[3 * e + 1] : int32_t(e);
      if (list_ && (in[j] < 0 || in[j] >= n_in_ || out[j] < row || out[j] >= end || list_[3 * e + 2] != k)) fail_at(e);
    }
  }

 private:
  // The first of [begin, end) for which `before` does not hold.
  template <class Before>
  static int64_t search(int64_t begin, int64_t end, Before before) {
    while (begin < end) {
      int64_t middle = (begin + end) / 2;
      before(middle) ? begin = middle + 1 : end = middle;
    }
    return begin;
  }
  [[noreturn]] void fail_at(int64_t e) const {
    auto entry = [&](int column) { return std::to_string(list_[3 * e + column]); };
    fail(who_, "edge " + std::to_string(e) + " is (" + entry(0) + ", " + entry(1) + ", " + entry(2) +
                   "): it is out of range, or not sorted by (offset, output row).");
  }

  const char* who_;
  int64_t n_in_, listed_ = -1;
  const int32_t* list_;
  std::vector<int64_t> begin_;
};

struct WeightGrad {
  const char* name;
  int volume, groups;  // edges are in[2], where there are three inputs
  bool output_major;   // dW is (C_out, K, C_in / groups)
  bool operator==(const WeightGrad&) const = default;

  std::vector<mx::Shape> shapes(const std::vector<array>& in) const {
    int c_in = in[0].shape(1) / groups, c_out = in[1].shape(1);
    return {output_major ? mx::Shape{c_out, volume, c_in} : mx::Shape{volume, c_in, c_out}};
  }
  std::vector<mx::Dtype> dtypes(const std::vector<array>& in) const { return {in[0].dtype()}; }

  void evaluate(const std::vector<Tensor>& in, const std::vector<Tensor>& out) const {
    const Tensor& w = out[0];
    auto& loops = inner_loops();
    Type type = type_of(w.dtype);
    int64_t n_offsets = volume, in_width = in[0].dim(1), out_width = in[1].dim(1), rows = in[1].dim(0);
    int64_t c_in = in_width / groups, c_out = out_width / groups;
    bool depthwise = c_in == 1 && c_out == 1 && groups > 1;
    int64_t padded = depthwise ? 1 : loops.padded(c_out);
    int64_t size = groups * c_in * padded;  // of one partial: (groups, c_in, padded)
    if (n_offsets == 0 || size == 0) return;
    OffsetEdges edges(name, in.size() == 3 ? &in[2] : nullptr, in[0].dim(0), rows, n_offsets);
    const Tensor &x = in[0], &dy = in[1];
    int64_t ranges = std::min((rows + range_rows - 1) / range_rows, most_partials / (size * n_offsets));
    ranges = std::max<int64_t>(1, ranges);
    // A single range is added up in the result itself, where that has the layout of a partial sum, or else in scratch,
    // which threads keep: not where it is large.
    constexpr int64_t most_scratch = 4 << 20;  // floats
    bool direct = ranges == 1 && type == Type::f32 && groups == 1 && padded == c_out && !output_major;
    bool single = direct || (ranges == 1 && size <= most_scratch);
    Floats partials = aligned_floats(single ? 0 : ranges * n_offsets * size);
    // A range's rows of half dy serve every offset, so they are converted once where they fit L2 beside the rest.
    constexpr int64_t most_widened = 256 << 10;  // floats
    bool widen = type != Type::f32 && !depthwise && n_offsets > 1 && (rows / ranges + 1) * out_width <= most_widened;
    static std::atomic<uint64_t> calls{0};
    const uint64_t call = ++calls;
    std::atomic<int64_t> taken{0};
    parallel_for(ranges * n_offsets, [&](int64_t u) {
      int64_t k = u % n_offsets, range = u / n_offsets;
      int64_t row = rows * range / ranges, end_row = rows * (range + 1) / ranges;
      int64_t begin = edges.first(k, row), end = edges.first(k, end_row);
      taken += std::max<int64_t>(end - begin, 0);
      if (single && begin >= end) return write(nullptr, k, padded, w);
      float* sum = direct ? w.as<float>() + k * size : single ? scratch<float>(2, size) : partials.get() + u * size;
      std::fill(sum, sum + size, 0.0f);
      Tensor dy_range = dy;
      int64_t first_row = 0;
      if (widen) {
        first_row = row;
        dy_range = {widened_rows(dy, row, end_row, call), {int(end_row - row), int(out_width)}, mx::float32};
      }
      int32_t from[block], to[block];
      for (int64_t e = begin; e < end; e += block) {
        int64_t n = std::min(block, end - e);
        edges.take(k, row, end_row, e, n, from, to);
        for (int64_t j = 0; j < n; ++j) to[j] -= int32_t(first_row);
        if (depthwise)
          loops.gather_product(type_of(x.dtype), x.data, dy.data, from, to, n, groups, sum);
        else
          add_block(x, dy_range, from, to, n, sum);
      }
      if (single && !direct) write(sum, k, padded, w);
    });
    edges.check_taken(taken);
    if (single) return;

    parallel_range(n_offsets, 1, [&](int64_t k0, int64_t k1) {
      for (int64_t k = k0; k < k1; ++k) {
        float* sum = partials.get() + k * size;  // of the first range, to which the others are added
        for (int64_t range = 1; range < ranges; ++range)
          loops.accumulate(Type::f32, partials.get() + (range * n_offsets + k) * size, size, 1.0f, sum);
        write(sum, k, padded, w);
      }
    });
  }

 private:
  // Writes the sums of offset k, (groups, c_in, padded), to dW; zeros where there are none.
  void write(const float* sum, int64_t k, int64_t padded, const Tensor& w) const {
    auto& loops = inner_loops();
    Type type = type_of(w.dtype);
    int64_t c_in = w.dim(output_major ? 2 : 1), out_width = w.dim(output_major ? 0 : 2), bytes = bytes_of(type);
    int64_t row = (output_major ? volume * c_in : out_width) * bytes;  // of dW
    char* to = w.as<char>() + k * c_in * (output_major ? 1 : out_width) * bytes;
    if (!sum) {
      if (!output_major) std::memset(to, 0, c_in * row);
      for (int64_t o = 0; output_major && o < out_width; ++o) std::memset(to + o * row, 0, c_in * bytes);
      return;
    }
    // Depthwise sums lie side by side, as those of one group.
    int64_t parts = c_in == 1 && padded * groups == out_width ? 1 : groups, own = out_width / parts;
    for (int64_t g = 0; g < parts; ++g, sum += c_in * padded) {
      if (!output_major) {
        for (int64_t i = 0; i < c_in; ++i) loops.store(type, sum + i * padded, own, to + i * row + g * own * bytes);
        continue;
      }
      constexpr int64_t columns = 16;  // that are turned at a time
      int64_t length = loops.padded(c_in);
      float* turned = scratch<float>(1, columns * length);
      for (int64_t o = 0; o < own; o += columns) {
        int64_t n = std::min(columns, own - o);
        loops.turn(Type::f32, sum + o, padded, c_in, n, turned, length);
        for (int64_t j = 0; j < n; ++j) loops.store(type, turned + j * length, c_in, to + (g * own + o + j) * row);
      }
    }
  }

  // Rows [begin, end) as float32 in this thread's scratch, where its last unit of this call may have left them.
  static float* widened_rows(const Tensor& dy, int64_t begin, int64_t end, uint64_t call) {
    static thread_local std::pair<uint64_t, int64_t> held{0, 0};
    int64_t width = dy.dim(1);
    float* to = scratch<float>(5, std::max<int64_t>((end - begin) * width, 1));
    if (held == std::pair{call, begin}) return to;
    Type type = type_of(dy.dtype);
    inner_loops().load(type, dy.as<char>() + begin * width * bytes_of(type), (end - begin) * width, to);
    held = {call, begin};
    return to;
  }

  // sum (groups, c_in, padded) += the products of n <= block edges.
  void add_block(const Tensor& x, const Tensor& dy, const int32_t* in, const int32_t* out, int64_t n, float* sum) const {
    auto& loops = inner_loops();
    int64_t c_in = x.dim(1) / groups, c_out = dy.dim(1) / groups, padded = loops.padded(c_out);
    const float *left[block], *right[block];
    // Tiles of a line of output channels gain by packed rows from 48 channels on, those of four from 256 on.
    constexpr int64_t line = 16;  // floats
    bool pack = std::min(c_in, c_out) >= (loops.lanes * loops.vectors <= line ? 48 : 256);
    float* room = pack ? scratch<float>(6, block * (c_in + padded)) : nullptr;
    for (int64_t g = 0; g < groups; ++g) {
      row_pointers(x, in, n, g * c_in, c_in, c_in, 3, left);
      row_pointers(dy, out, n, g * c_out, c_out, padded, 4, right);
      loops.outer(left, right, n, c_in, c_out, room, sum + g * c_in * padded, padded);
    }
  }

  // Writes pointers to channels [c0, c0 + c) of rows, each readable to `width` floats: into x, or a copy in scratch.
  static void row_pointers(const Tensor& x, const int32_t* rows, int64_t n, int64_t c0, int64_t c, int64_t width,
                           int slot, const float** to) {
    Type type = type_of(x.dtype);
    int64_t ld = x.dim(1);
    if (type == Type::f32 && width == c) {
      for (int64_t j = 0; j < n; ++j) {
        to[j] = x.as<float>() + rows[j] * ld + c0;
        for (int64_t line = 0; line < c; line += 16) __builtin_prefetch(to[j] + line);
      }
      return;
    }
    float* copy = scratch<float>(slot, block * width);
    inner_loops().gather(type, x.as<char>() + c0 * bytes_of(type), ld, rows, n, c, copy, width);
    for (int64_t j = 0; j < n; ++j) {
      std::fill(copy + j * width + c, copy + (j + 1) * width, 0.0f);
      to[j] = copy + j * width;
    }
  }
};

void check(const char* who, const array& x, const array& dy, int groups) {
  want_rank(who, "x", x, 2, "(N_in, C_in)");
  want_rank(who, "dy", dy, 2, "(N_out, C_out)");
  want_float(who, "x", x);
  want_same_dtype(who, "x", x, "dy", dy);
  if (groups < 1 || x.shape(1) % groups || dy.shape(1) % groups)
    fail(who, std::to_string(x.shape(1)) + " input and " + std::to_string(dy.shape(1)) +
                  " output channels do not divide into " + std::to_string(groups) + " groups.");
}

}  // namespace

array edge_weight_grad(const char* name, const array& x, const array& dy, const array& edges, int volume, int groups,
                       bool output_major, Stream s) {
  check(name, x, dy, groups);
  want_rank(name, "edges", edges, 2, "(E, 3)");
  want_dtype(name, "edges", edges, mx::int32);
  if (edges.shape(1) != 3 || volume < 0)
    fail(name, "edges must have shape (E, 3) and volume must not be negative, but edges has shape " +
                   text(edges.shape()) + " and volume is " + std::to_string(volume) + ".");
  return build(WeightGrad{name, volume, groups, output_major}, {x, dy, edges}, s)[0];
}

array identity_weight_grad(const char* name, const array& x, const array& dy, int groups, bool output_major,
                           Stream s) {
  check(name, x, dy, groups);
  if (x.shape(0) != dy.shape(0))
    fail(name, "x and dy must have the same rows, but have " + std::to_string(x.shape(0)) + " and " +
                   std::to_string(dy.shape(0)) + ".");
  return build(WeightGrad{name, 1, groups, output_major}, {x, dy}, s)[0];
}

}  // namespace lattice
