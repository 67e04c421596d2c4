// dW[k] = sum over edges (i, o, k) of x[i]^T dy[o].
//
//   unit      the edges of one offset into one range of about 3072 output rows; inside it, blocks of 96 edges: dy rows
//             are gathered into an aligned panel, x rows are read through pointers, and register tiles of input
//             channels x output channels run over the block. Units go range by range, so the rows of a range are read
//             from memory once and from L2 for the other offsets.
//   memory    one partial dW per range; ranges are widened until the partials take at most 64 MB.
//   order     ranges depend on the shapes alone and are added in order: bits do not depend on threads.
//   wins      everywhere; depthwise weights take an elementwise loop.
#include <algorithm>
#include <memory>
#include <new>

#include "edge_lists.h"
#include "operations.h"

namespace lattice {
namespace {

constexpr int64_t block = 96;
constexpr int64_t range_rows = 3072;
constexpr int64_t most_partials = 16 << 20;  // floats

KernelMajor from_edges(const Tensor& edges, int64_t n_in, int64_t n_out, int64_t volume) {
  const int32_t* t = edges.as<int32_t>();
  int64_t n = edges.dim(0);
  KernelMajor e;
  e.in.resize(n);
  e.out.resize(n);
  e.begin.assign(volume + 1, 0);
  parallel_range(n, 8192, [&](int64_t begin, int64_t end) {
    for (int64_t j = begin; j < end; ++j) {
      int32_t i = t[3 * j], o = t[3 * j + 1], k = t[3 * j + 2];
      if (i < 0 || i >= n_in || o < 0 || o >= n_out || k < 0 || k >= volume || (j && (t[3 * j - 1] > k || (t[3 * j - 1] == k && t[3 * j - 2] > o))))
        fail("weight_grad_edges", "edge " + std::to_string(j) + " is (" + std::to_string(i) + ", " + std::to_string(o) +
                                      ", " + std::to_string(k) + "): it is out of range, or not sorted by (offset, output row).");
      e.in[j] = i;
      e.out[j] = o;
    }
  });
  for (int64_t k = 0; k <= volume; ++k) {
    int64_t low = 0, high = n;
    while (low < high) {
      int64_t middle = (low + high) / 2;
      if (t[3 * middle + 2] < k)
        low = middle + 1;
      else
        high = middle;
    }
    e.begin[k] = low;
  }
  return e;
}

struct WeightGrad {
  static constexpr const char* name = "WeightGrad";
  bool from_list;
  int volume, groups;
  bool operator==(const WeightGrad&) const = default;

  std::vector<mx::Shape> shapes(const std::vector<array>& in) const {
    int k = from_list ? volume : in[2].shape(1);
    return {{k, in[0].shape(1) / groups, in[1].shape(1)}};
  }
  std::vector<mx::Dtype> dtypes(const std::vector<array>& in) const { return {in[0].dtype()}; }

  void run(const std::vector<Tensor>& in, const std::vector<Tensor>& out) const {
    const Tensor &x = in[0], &dy = in[1], &w = out[0];
    auto& kernel = kernels();
    Type type = type_of(x.dtype);
    int64_t n_offsets = w.dim(0), in_width = x.dim(1), out_width = dy.dim(1);
    int64_t c_in = in_width / groups, c_out = out_width / groups;
    bool depthwise = c_in == 1 && c_out == 1 && groups > 1;
    int64_t padded = depthwise ? 1 : kernel.padded(c_out);
    int64_t size = groups * c_in * padded;  // of one partial: (groups, c_in, padded)
    if (n_offsets == 0 || size == 0) return;
    KernelMajor e = from_list ? from_edges(in[2], x.dim(0), dy.dim(0), n_offsets) : kernel_major("weight_grad", in[2].as<int32_t>(), in[2].dim(0), n_offsets, x.dim(0));

    int64_t rows = dy.dim(0);
    int64_t ranges = std::max<int64_t>(1, std::min((rows + range_rows - 1) / range_rows, most_partials / (size * n_offsets)));
    auto first_edge = [&](int64_t k, int64_t range) {
      auto begin = e.out.begin() + e.begin[k], end = e.out.begin() + e.begin[k + 1];
      return std::lower_bound(begin, end, rows * range / ranges) - e.out.begin();
    };
    int64_t n_partial = std::max<int64_t>(ranges * n_offsets * size, 16);
    auto release = [](float* p) { ::operator delete(p, std::align_val_t(64)); };
    std::unique_ptr<float, decltype(release)> partial(
        static_cast<float*>(::operator new(size_t(n_partial) * 4, std::align_val_t(64))), release);
    parallel_for(ranges * n_offsets, [&](int64_t u) {
      float* sum = partial.get() + u * size;
      std::fill(sum, sum + size, 0.0f);
      int64_t begin = first_edge(u % n_offsets, u / n_offsets), end = first_edge(u % n_offsets, u / n_offsets + 1);
      if (depthwise)
        return kernel.gather_product(type, x.data, dy.data, e.in.data() + begin, e.out.data() + begin, end - begin, groups, sum);
      for (int64_t b = begin; b < end; b += block)
        add_block(x, dy, e.in.data() + b, e.out.data() + b, std::min(block, end - b), sum);
    });

    parallel_range(n_offsets, 1, [&](int64_t k0, int64_t k1) {
      for (int64_t k = k0; k < k1; ++k) {
        float* sum = scratch<float>(2, size);
        std::fill(sum, sum + size, 0.0f);
        for (int64_t range = 0; range < ranges; ++range)
          kernel.accumulate(Type::f32, partial.get() + (range * n_offsets + k) * size, size, 1.0f, sum);
        char* to = w.as<char>() + k * c_in * out_width * bytes_of(type);
        if (depthwise) {
          kernel.store(type, sum, size, to);
          continue;
        }
        for (int64_t g = 0; g < groups; ++g)
          for (int64_t i = 0; i < c_in; ++i)
            kernel.store(type, sum + (g * c_in + i) * padded, c_out, to + (i * out_width + g * c_out) * bytes_of(type));
      }
    });
  }

 private:
  // sum (groups, c_in, padded) += the products of n <= block edges.
  void add_block(const Tensor& x, const Tensor& dy, const int32_t* in, const int32_t* out, int64_t n, float* sum) const {
    auto& kernel = kernels();
    Type type = type_of(x.dtype);
    int64_t in_width = x.dim(1), out_width = dy.dim(1), c_in = in_width / groups, c_out = out_width / groups;
    int64_t padded = kernel.padded(c_out);
    const float* rows[block];
    if (type == Type::f32) {
      for (int64_t j = 0; j < n; ++j) {
        rows[j] = x.as<float>() + in[j] * in_width;
        for (int64_t line = 0; line < in_width; line += 16) __builtin_prefetch(rows[j] + line);
      }
    } else {
      float* wide = scratch<float>(3, block * in_width);
      kernel.gather(type, x.data, in_width, in, n, in_width, wide, in_width);
      for (int64_t j = 0; j < n; ++j) rows[j] = wide + j * in_width;
    }
    float* panel = scratch<float>(4, block * padded);
    for (int64_t g = 0; g < groups; ++g) {
      kernel.gather_panel(type, dy.data, out_width, out, n, g * c_out, c_out, panel);
      kernel.outer(rows, panel, n, c_in, c_out, sum + g * c_in * padded, padded);
      for (int64_t j = 0; j < n; ++j) rows[j] += c_in;
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

array weight_grad(const array& x, const array& dy, const array& table, int groups, Stream s) {
  check("weight_grad", x, dy, groups);
  want_rank("weight_grad", "table", table, 2, "(N_out, K)");
  want_dtype("weight_grad", "table", table, mx::int32);
  if (table.shape(0) != dy.shape(0))
    fail("weight_grad", "table has " + std::to_string(table.shape(0)) + " output rows, but dy has " +
                            std::to_string(dy.shape(0)) + ".");
  return build(WeightGrad{false, 0, groups}, {x, dy, table}, s)[0];
}

array weight_grad_edges(const array& x, const array& dy, const array& edges, int volume, int groups, Stream s) {
  check("weight_grad_edges", x, dy, groups);
  want_rank("weight_grad_edges", "edges", edges, 2, "(E, 3)");
  want_dtype("weight_grad_edges", "edges", edges, mx::int32);
  if (edges.shape(1) != 3 || volume < 0)
    fail("weight_grad_edges", "edges must have shape (E, 3) and volume must not be negative, but edges has shape " +
                                  text(edges.shape()) + " and volume is " + std::to_string(volume) + ".");
  return build(WeightGrad{true, volume, groups}, {x, dy, edges}, s)[0];
}

}  // namespace lattice
