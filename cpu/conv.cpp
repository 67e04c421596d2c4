// y[o] = sum over edges (i, o, k) of x[i] @ W[k], for float and packed weights, and its one-offset case, a matmul.
//
//   tile      up to 512 output rows; their edges bucketed by offset (edge_lists.h), so no multiply is spent on an
//             absent neighbour; per offset one gathered GEMM adds x[in] @ W[k] into the tile's float32 sums.
//   memory    W is packed into float32 panels once a call (never kept: it cannot go stale) and stays in L2; a
//             tile's sums stay in L2; x rows are read once per edge, mostly from cache when rows are spatially sorted;
//             y is written once. Half x is widened once (widen.h) or, in wide or seldom read rows, as it is gathered.
//   order     a row's sum runs over k, then over the edges of (o, k), then over c_in: the same whatever the tile or
//             the thread count, so results are equal bit by bit.
//   wins      everywhere on the CPU but for depthwise weights, which get a memory-bound loop of their own.
#include <algorithm>

#include "edge_lists.h"
#include "operations.h"
#include "widen.h"

namespace lattice {
namespace {

enum class Source : int { table, edges, csr, identity };

// Where the weights of (k, group) come from: float weights, or packed words with scales and biases.
struct Weights {
  bool quantized, transposed;
  int bits, group_size, groups;
  int64_t c_in, c_out;  // channels of one group
  const Tensor* arrays;

  void pack(int64_t k, int64_t g, float* panel) const {
    auto& kernel = kernels();
    if (quantized) {
      int64_t row = k * groups * c_out + g * c_out;
      // Channels are stored up to whole groups; those that x lacks are left out.
      int64_t scales = (c_in + group_size - 1) / group_size, stored = scales * group_size, words = stored * bits / 32;
      Type t = type_of(arrays[1].dtype);
      int64_t skip = row * scales * bytes_of(t);
      kernel.dequantize(arrays[0].as<uint32_t>() + row * words, t, arrays[1].as<char>() + skip,
                        arrays[2].as<char>() + skip, bits, group_size, stored, c_in, c_out, panel);
      return;
    }
    // The panel's element (c, n) is at from[c * down + n * across]: any view of a weight is packed without a copy.
    const Tensor& w = arrays[0];
    Type t = type_of(w.dtype);
    int64_t rank = int64_t(w.shape.size()), down = w.strides[rank - 2], across = w.strides[rank - 1];
    int64_t start = (rank == 3 ? k * w.strides[0] : 0) + g * (transposed ? c_in : c_out) * across;
    if (transposed) std::swap(down, across);
    const char* from = w.as<char>() + start * bytes_of(t);
    if (across == 1 || c_out == 1) return kernel.pack(t, from, down, false, c_in, c_out, panel);
    if (down == 1 || c_in == 1) return kernel.pack(t, from, across, true, c_in, c_out, panel);
    float* whole = scratch<float>(5, c_in * c_out);
    for (int64_t c = 0; c < c_in; ++c)
      for (int64_t n = 0; n < c_out; ++n)
        kernel.load(t, from + (c * down + n * across) * bytes_of(t), 1, whole + c * c_out + n);
    kernel.pack(Type::f32, whole, c_out, false, c_in, c_out, panel);
  }
};

struct Contraction {
  static constexpr const char* name = "Contraction";
  Source source;
  bool quantized = false, transposed = false, has_bias = false;
  int groups = 1, bits = 0, group_size = 0;
  int n_out = 0;  // of an edge list
  bool operator==(const Contraction&) const = default;

  bool reads_strides(size_t input) const { return !quantized && input == 1; }
  int weight_arrays() const { return quantized ? 3 : 1; }
  int64_t out_channels(const mx::Shape& w) const {
    int axis = int(w.size()) - (quantized ? 2 : 1);  // (.., C_out, words) or (.., C_in, C_out)
    if (!transposed) return w[axis];
    return int64_t(w[axis - 1]) * groups;
  }

  std::vector<mx::Shape> shapes(const std::vector<array>& in) const {
    int64_t rows = in[0].shape(0);
    if (source == Source::table) rows = in[1 + weight_arrays()].shape(0);
    if (source == Source::edges) rows = n_out;
    if (source == Source::csr) rows = in[1 + weight_arrays()].shape(0) - 1;
    return {{int(rows), int(out_channels(in[1].shape()))}};
  }
  std::vector<mx::Dtype> dtypes(const std::vector<array>& in) const { return {in[0].dtype()}; }

  void run(const std::vector<Tensor>& in, const std::vector<Tensor>& out) const {
    const Tensor& y = out[0];
    auto& kernel = kernels();
    int64_t n_rows = y.dim(0), out_width = y.dim(1), in_width = in[0].dim(1);
    if (n_rows == 0 || out_width == 0) return;

    int64_t volume = in[1].shape.size() == 2 ? 1 : in[1].dim(0);
    Floats memory;
    const Tensor x = widened(in[0], source != Source::identity && often_read(volume, in_width), 7, memory);
    Type type = type_of(x.dtype), out_type = type_of(y.dtype);
    int64_t c_in = in_width / groups, c_out = out_width / groups, padded = kernel.padded(c_out);
    Weights weights{quantized, transposed, bits, group_size, groups, c_in, c_out, &in[1]};
    bool depthwise = !quantized && c_in == 1 && c_out == 1 && groups > 1;

    // All panels at once, unless dequantising would undo what packing saved.
    int64_t panel_size = c_in * padded;
    constexpr int64_t most_dequantized = 8 << 20;
    bool whole = !quantized || volume * groups * panel_size <= most_dequantized;
    Floats panels;
    if (depthwise) {
      panels = aligned_floats(volume * groups);
      Type t = type_of(in[1].dtype);
      const auto& strides = in[1].strides;
      for (int64_t p = 0; p < volume * groups; ++p) {
        int64_t at = p / groups * strides[0] + p % groups * strides[2];
        kernel.load(t, in[1].as<char>() + at * bytes_of(t), 1, panels.get() + p);
      }
    } else if (whole) {
      panels = aligned_floats(volume * groups * panel_size);
      parallel_range(volume * groups, 1 + 16384 / std::max<int64_t>(panel_size, 1), [&](int64_t begin, int64_t end) {
        for (int64_t p = begin; p < end; ++p) weights.pack(p / groups, p % groups, panels.get() + p * panel_size);
      });
    }
    auto panel = [&](int64_t k, int64_t g) -> const float* {
      if (whole) return panels.get() + (k * groups + g) * panel_size;
      float* own = scratch<float>(4, panel_size);
      weights.pack(k, g, own);
      return own;
    };

    // Sums are kept as (rows, groups, padded) float32; where that is y's own layout, they are kept in y. Each starts
    // from zero or the bias, which its first edge reads in place of the sum.
    int64_t ldy = depthwise ? groups : groups * padded, spread = depthwise ? 1 : padded;
    bool direct = out_type == Type::f32 && ldy == out_width;
    Floats start = aligned_floats(ldy);
    std::fill(start.get(), start.get() + ldy, 0.0f);
    if (has_bias)
      for (int g = 0; g < groups; ++g) {
        auto& bias = in.back();
        Type t = type_of(bias.dtype);
        kernel.load(t, bias.as<char>() + g * c_out * bytes_of(t), c_out, start.get() + g * spread);
      }
    // A wide tile reads the panels less often, a narrow one keeps a table's edge lists in L1.
    int64_t tile = source == Source::table ? std::clamp<int64_t>(std::max(2 * ldy, 3456 / volume), 128, 512) : 512;
    tile = std::clamp<int64_t>((256 << 10) / ldy, 48, tile);
    tile = std::clamp<int64_t>(n_rows / (4 * num_threads()), 48, tile);
    // Half rows are widened into scratch, so many at a time.
    int64_t gathered = type == Type::f32 ? tile : std::clamp<int64_t>((4 << 10) / std::max<int64_t>(c_in, 1), 48, 512);

    EdgeSource edges("conv", source == Source::identity ? Form::table : Form(int(source)),
                     source == Source::identity ? &in[0] : &in[1 + weight_arrays()], x.dim(0), n_rows,
                     source == Source::identity ? 0 : volume);

    parallel_for((n_rows + tile - 1) / tile, [&](int64_t t) {
      int64_t row = t * tile, rows = std::min(tile, n_rows - row);
      float* sums = direct ? y.as<float>() + row * ldy : scratch<float>(2, rows * ldy);
      auto begin = [&](int64_t r) { std::copy(start.get(), start.get() + ldy, sums + r * ldy); };

      auto add = [&](int64_t k, const int32_t* from, const int32_t* to, int64_t first, int64_t n) {
        // Edges [0, n) of one offset; `first` is the x row that from == nullptr counts from.
        if (depthwise)
          return kernel.gather_multiply(type, x.data, in_width, from, to, n, panels.get() + k * groups, groups,
                                        start.get(), sums, ldy);
        for (int g = 0; g < groups; ++g) {
          const float* weight = panel(k, g);
          for (int64_t e = 0; e < n; e += gathered) {
            int64_t m = std::min(gathered, n - e), skip = (from ? 0 : first + e) * in_width + g * c_in, lda = in_width;
            const int32_t* rows_in = from ? from + e : nullptr;
            const float* a = x.as<float>() + skip;
            if (type != Type::f32) {
              float* wide = scratch<float>(3, m * c_in);
              kernel.gather(type, x.as<char>() + skip * 2, in_width, rows_in, m, c_in, wide, c_in);
              a = wide;
              rows_in = nullptr;
              lda = c_in;
            }
            kernel.gather_gemm(a, lda, rows_in, to ? to + e : nullptr, m, weight, c_in, c_out,
                               start.get() + g * padded, sums + (to ? 0 : e * ldy) + g * padded, ldy);
          }
        }
      };
      if (in_width == 0) {
        for (int64_t r = 0; r < rows; ++r) begin(r);
      } else if (source == Source::identity) {
        add(0, nullptr, nullptr, row, rows);
      } else {
        EdgeLists lists = edges.lists(row, rows);
        for (int64_t j = 0; j < lists.n_bare; ++j) begin(lists.bare[j]);
        for (int64_t k = 0; k < volume; ++k)
          if (int64_t n = lists.end[k] - lists.begin[k]) add(k, lists.in + lists.begin[k], lists.out + lists.begin[k], 0, n);
      }
      if (direct) return;
      char* to = y.as<char>() + row * out_width * bytes_of(out_type);
      if (ldy == out_width) return kernel.store(out_type, sums, rows * ldy, to);
      for (int64_t r = 0; r < rows; ++r)
        for (int g = 0; g < groups; ++g)
          kernel.store(out_type, sums + r * ldy + g * padded, c_out, to + (r * out_width + g * c_out) * bytes_of(out_type));
    });
  }
};

// Checks x, the weights, the bias and the groups against one another.
void check(const char* who, const Contraction& op, const array& x, const array& w, const MaybeArray& bias) {
  want_rank(who, "x", x, 2, "(N, C)");
  want_float(who, "x", x);
  if (op.groups < 1) fail(who, "groups must be at least 1, but is " + std::to_string(op.groups) + ".");
  int axis = int(w.ndim()) - (op.quantized ? 2 : 1);
  int64_t c_out = op.out_channels(w.shape()), c_in;
  if (op.quantized) {
    // Any width whose whole groups are those that the words hold.
    int64_t stored = int64_t(w.shape(-1)) * 32 / op.bits, own = x.shape(1) / op.groups;
    c_in = (own > stored - op.group_size && own < stored ? own : stored) * op.groups;
  }
  else
    c_in = op.transposed ? w.shape(axis) : int64_t(w.shape(axis - 1)) * op.groups;
  if (x.shape(1) != c_in)
    fail(who, "x has " + std::to_string(x.shape(1)) + " channels, but the weight of shape " + text(w.shape()) +
                  (op.transposed ? ", transposed," : "") + " with groups=" + std::to_string(op.groups) + " takes " +
                  std::to_string(c_in) + ".");
  if (c_out % op.groups || c_in % op.groups)
    fail(who, std::to_string(c_in) + " input and " + std::to_string(c_out) + " output channels do not divide into " +
                  std::to_string(op.groups) + " groups.");
  if (bias) {
    want_float(who, "bias", *bias);
    if (bias->ndim() != 1 || bias->shape(0) != c_out)
      fail(who, "bias must have shape (" + std::to_string(c_out) + ",), but has " + text(bias->shape()) + ".");
  }
}

void check_table(const char* who, const array& table, const array& w) {
  want_rank(who, "table", table, 2, "(N_out, K)");
  want_dtype(who, "table", table, mx::int32);
  if (table.shape(1) != w.shape(0))
    fail(who, "table has " + std::to_string(table.shape(1)) + " offsets, but the weight has " +
                  std::to_string(w.shape(0)) + ".");
}

void check_edges(const char* who, const array& edges, int n_out) {
  want_rank(who, "edges", edges, 2, "(E, 3)");
  want_dtype(who, "edges", edges, mx::int32);
  if (edges.shape(1) != 3) fail(who, "edges must have shape (E, 3), but has " + text(edges.shape()) + ".");
  if (n_out < 0) fail(who, "n_out must not be negative.");
}

void check_packed(const char* who, const array& words, const array& scales, const array& biases, int bits,
                  int group_size, size_t rank) {
  if (bits != 4 && bits != 8) fail(who, "bits must be 4 or 8, but is " + std::to_string(bits) + ".");
  if (group_size != 32 && group_size != 64 && group_size != 128)
    fail(who, "group_size must be 32, 64 or 128, but is " + std::to_string(group_size) + ".");
  want_rank(who, "words", words, rank, rank == 3 ? "(K, C_out, words)" : "(C_out, words)");
  want_dtype(who, "words", words, mx::uint32);
  want_float(who, "scales", scales);
  want_same_dtype(who, "scales", scales, "biases", biases);
  mx::Shape expected = words.shape();
  expected.back() = expected.back() * (32 / bits) / group_size;
  if (words.shape(-1) * (32 / bits) % group_size || scales.shape() != expected || biases.shape() != expected)
    fail(who, "scales and biases must have one value per group of " + std::to_string(group_size) + " channels of words " +
                  text(words.shape()) + ", but have shapes " + text(scales.shape()) + " and " + text(biases.shape()) +
                  ".");
}

array finish(Contraction op, std::vector<array> inputs, const MaybeArray& bias, Stream s) {
  if (bias) inputs.push_back(*bias);
  op.has_bias = bias.has_value();
  return build(op, std::move(inputs), s)[0];
}

Contraction dense(const char* who, Source source, const array& x, const array& w, const MaybeArray& bias, int groups,
                  bool transposed) {
  Contraction op{source};
  op.transposed = transposed;
  op.groups = groups;
  size_t rank = source == Source::identity ? 2 : 3;
  want_rank(who, "the weight", w, rank, rank == 2 ? "(C_in, C_out)" : "(K, C_in / groups, C_out)");
  want_same_dtype(who, "x", x, "the weight", w);
  check(who, op, x, w, bias);
  return op;
}

Contraction packed(const char* who, Source source, const array& x, const array& words, const array& scales,
                   const array& biases, const MaybeArray& bias, int groups, int bits, int group_size) {
  Contraction op{source};
  op.quantized = true;
  op.groups = groups;
  op.bits = bits;
  op.group_size = group_size;
  check_packed(who, words, scales, biases, bits, group_size, source == Source::identity ? 2 : 3);
  check(who, op, x, words, bias);
  return op;
}

}  // namespace

array conv(const array& x, const array& w, const array& table, const MaybeArray& bias, int groups, bool transpose_weight,
           Stream s) {
  auto op = dense("conv", Source::table, x, w, bias, groups, transpose_weight);
  check_table("conv", table, w);
  return finish(op, {x, w, table}, bias, s);
}

array conv_edges(const array& x, const array& w, const array& edges, int n_out, const MaybeArray& bias, int groups,
                 bool transpose_weight, Stream s) {
  auto op = dense("conv_edges", Source::edges, x, w, bias, groups, transpose_weight);
  check_edges("conv_edges", edges, n_out);
  op.n_out = n_out;
  return finish(op, {x, w, edges}, bias, s);
}

array conv_csr(const array& x, const array& w, const array& starts, const array& rows, const array& offsets,
               const MaybeArray& bias, int groups, bool transpose_weight, Stream s) {
  auto op = dense("conv_csr", Source::csr, x, w, bias, groups, transpose_weight);
  for (auto [what, a] : {std::pair{"starts", &starts}, {"rows", &rows}, {"offsets", &offsets}}) {
    want_rank("conv_csr", what, *a, 1, "(n,)");
    want_dtype("conv_csr", what, *a, mx::int32);
  }
  if (starts.shape(0) < 1) fail("conv_csr", "starts must hold N_out + 1 values, but is empty.");
  if (rows.shape() != offsets.shape())
    fail("conv_csr", "rows and offsets must have one value per edge, but have shapes " + text(rows.shape()) + " and " +
                         text(offsets.shape()) + ".");
  return finish(op, {x, w, starts, rows, offsets}, bias, s);
}

array matmul(const array& x, const array& w, const MaybeArray& bias, bool transpose, Stream s) {
  return finish(dense("matmul", Source::identity, x, w, bias, 1, transpose), {x, w}, bias, s);
}

array conv_quantized(const array& x, const array& words, const array& scales, const array& biases, const array& table,
                     const MaybeArray& bias, int groups, int bits, int group_size, Stream s) {
  auto op = packed("conv_quantized", Source::table, x, words, scales, biases, bias, groups, bits, group_size);
  check_table("conv_quantized", table, words);
  return finish(op, {x, words, scales, biases, table}, bias, s);
}

array conv_edges_quantized(const array& x, const array& words, const array& scales, const array& biases,
                           const array& edges, int n_out, const MaybeArray& bias, int groups, int bits, int group_size,
                           Stream s) {
  auto op = packed("conv_edges_quantized", Source::edges, x, words, scales, biases, bias, groups, bits, group_size);
  check_edges("conv_edges_quantized", edges, n_out);
  op.n_out = n_out;
  return finish(op, {x, words, scales, biases, edges}, bias, s);
}

array matmul_quantized(const array& x, const array& words, const array& scales, const array& biases,
                       const MaybeArray& bias, int bits, int group_size, Stream s) {
  auto op = packed("matmul_quantized", Source::identity, x, words, scales, biases, bias, 1, bits, group_size);
  return finish(op, {x, words, scales, biases}, bias, s);
}

}  // namespace lattice
