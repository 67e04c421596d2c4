// The tiled contraction behind every forward route: y[o] = sum over edges (i, o, k) of x[i] @ W[k].
//
//   tile      up to 512 output rows; their edges grouped by offset (edge_lists.h), so no multiply is spent on an
//             absent neighbour; per offset one gathered GEMM adds x[in] @ W[k] to the tile's float32 sums.
//   memory    W is packed into float32 panels in each call (never kept: it cannot go stale), which fit L2, as a tile's
//             sums do; x rows are read once per edge, mostly from cache where rows are spatially sorted; y is written
//             once. Half x is converted once (widen.h) or, where rows are wide or have few edges, as it is gathered.
//   order     a row's sum adds over k, then over the edges of (o, k), then over c_in: the same for any tile and thread
//             count, so results are equal bit by bit.
//   few rows  are one tile, and units of work are blocks of output channels, which pack their panels as they go.
//   wins      everywhere on the CPU. Depthwise weights take a memory-bound loop of their own.
#include "contraction.h"

#include <algorithm>
#include <bit>
#include <cmath>

#include "widen.h"

namespace lattice {
namespace {

// The weights of the layer: one float array, or packed words with their scales and biases.
struct Weights {
  bool quantized, transposed;
  int bits, group_size, groups;
  int64_t c_in, c_out;  // channels of one group
  const Tensor* arrays;

  // Writes the panel of offset k and group g, of its n output channels from `first` on.
  void pack(int64_t k, int64_t g, int64_t first, int64_t n, float* panel) const {
    auto& loops = inner_loops();
    if (quantized) {
      int64_t row = k * groups * c_out + g * c_out + first;
      // Whole groups of channels are stored; the panel has only those of x.
      int64_t scales = (c_in + group_size - 1) / group_size, stored = scales * group_size, words = stored * bits / 32;
      Type t = type_of(arrays[1].dtype);
      int64_t skip = row * scales * bytes_of(t);
      loops.dequantize(arrays[0].as<uint32_t>() + row * words, t, arrays[1].as<char>() + skip,
                       arrays[2].as<char>() + skip, bits, group_size, stored, c_in, n, panel);
      return;
    }
    // The panel's element (c, j) is at from[c * down + j * across]: any view of a weight is packed without a copy.
    const Tensor& w = arrays[0];
    Type t = type_of(w.dtype);
    int64_t rank = int64_t(w.shape.size()), down = w.strides[rank - 2], across = w.strides[rank - 1];
    int64_t start = (rank == 3 ? k * w.strides[0] : 0) + g * (transposed ? c_in : c_out) * across;
    if (transposed) std::swap(down, across);
    const char* from = w.as<char>() + (start + first * across) * bytes_of(t);
    if (across == 1 || n == 1) return loops.pack(t, from, down, false, c_in, n, panel);
    if (down == 1 || c_in == 1) return loops.pack(t, from, across, true, c_in, n, panel);
    float* whole = scratch<float>(5, c_in * n);
    for (int64_t c = 0; c < c_in; ++c)
      for (int64_t j = 0; j < n; ++j)
        loops.load(t, from + (c * down + j * across) * bytes_of(t), 1, whole + c * n + j);
    loops.pack(Type::f32, whole, n, false, c_in, n, panel);
  }
};

struct Contraction {
  static constexpr int64_t line_rows = 64;  // of a line of statistics, whatever the threads
  const char* name;  // of the route
  Form form;
  bool quantized = false, transposed = false, has_bias = false;
  bool has_epilogue = false, has_scale = false, has_mean = false, has_var = false, has_residual = false;
  bool has_moments = false;
  Act act = {};
  float eps = 0.0f;
  int groups = 1, bits = 0, group_size = 0;
  int n_out = 0;  // of Form::edges, whose indices do not hold it
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
    if (form == Form::table) rows = in[1 + weight_arrays()].shape(0);
    if (form == Form::edges) rows = n_out;
    if (form == Form::csr) rows = in[1 + weight_arrays()].shape(0) - 1;
    int c_out = int(out_channels(in[1].shape()));
    if (has_moments) return {{int(rows), c_out}, {int((rows + line_rows - 1) / line_rows), 3, c_out}};
    return {{int(rows), c_out}};
  }
  std::vector<mx::Dtype> dtypes(const std::vector<array>& in) const {
    if (has_moments) return {in[0].dtype(), mx::float32};
    return {in[0].dtype()};
  }

  // Statistics of y's rows from `first` on, a line for each line_rows of them: how many, their means, and the sums of
  // squares about these. About the first row, so that a large mean cancels nothing.
  void sum_moments(const Tensor& y, const Tensor& lines, int64_t first, int64_t rows) const {
    auto& loops = inner_loops();
    Type type = type_of(y.dtype);
    int64_t c = y.dim(1);
    float* about = scratch<float>(6, c);
    for (int64_t r = first; r < first + rows; r += line_rows) {
      int64_t count = std::min(line_rows, first + rows - r);
      float *counts = lines.as<float>() + r / line_rows * 3 * c, *means = counts + c, *squares = means + c;
      loops.load(type, y.as<char>() + r * c * bytes_of(type), c, about);
      std::fill(means, means + 2 * c, 0.0f);
      loops.column_moments(type, y.data, nullptr, r, count, c, about, means, squares);
      for (int64_t i = 0; i < c; ++i) {
        float d = means[i] / float(count);
        squares[i] = std::max(squares[i] - means[i] * d, 0.0f);
        means[i] = about[i] + d;
        counts[i] = float(count);
      }
    }
  }

  void evaluate(const std::vector<Tensor>& in, const std::vector<Tensor>& out) const {
    const Tensor& y = out[0];
    auto& loops = inner_loops();
    int64_t n_rows = y.dim(0), out_width = y.dim(1), in_width = in[0].dim(1);
    if (n_rows == 0 || out_width == 0) return;

    int64_t volume = in[1].shape.size() == 2 ? 1 : in[1].dim(0);
    Floats memory;
    const Tensor x = widened(in[0], form != Form::identity && pays_to_widen(volume, in_width), 7, memory);
    Type type = type_of(x.dtype), out_type = type_of(y.dtype);
    int64_t c_in = in_width / groups, c_out = out_width / groups, padded = loops.padded(c_out);
    Weights weights{quantized, transposed, bits, group_size, groups, c_in, c_out, &in[1]};
    bool depthwise = !quantized && c_in == 1 && c_out == 1 && groups > 1;

    std::optional<EdgeSource> edges;
    if (form != Form::identity) edges.emplace(name, form, &in[1 + weight_arrays()], x.dim(0), n_rows, volume);
    // Few rows make one tile, and a unit of work is a block of its output channels: it packs the panel of an offset just
    // before it multiplies by it, so that weights come from memory once and panels stay in L2. Units are as many for
    // each thread, or enough.
    constexpr int64_t tile_alone = 512;
    int64_t block = loops.lanes * loops.vectors, blocks = (c_out + block - 1) / block;
    bool balanced = blocks % num_threads() == 0 || blocks >= 2 * num_threads();
    bool by_columns = !depthwise && groups == 1 && n_rows <= tile_alone && balanced && !has_moments;
    // Few rows leave offsets without an edge, whose panels nobody reads.
    constexpr int64_t few_rows = 64;
    std::vector<char> used(volume, 1);
    if (edges && n_rows <= few_rows && !by_columns) {
      EdgeLists lists = edges->lists(0, n_rows);
      for (int64_t k = 0; k < volume; ++k) used[k] = lists.end[k] > lists.begin[k];
    }

    // Sums are (rows, groups, padded) float32; where that is the layout of y, they are in y itself. A sum begins with
    // zero or the bias: the first edge of a row reads `start` in place of the sum.
    int64_t ldy = depthwise ? groups : groups * padded, group_stride = depthwise ? 1 : padded;
    bool direct = out_type == Type::f32 && ldy == out_width;

    // Panels that fit no cache would come from memory for every tile: then some offsets at a time, for all tiles. Their
    // sums are kept between, in y or apart. Else all panels at once, unless weights so unpacked would take more memory
    // than packing saved.
    int64_t panel_size = c_in * padded, all = volume * groups * panel_size, together = volume;
    constexpr int64_t cached = 2 << 20, most_dequantized = 8 << 20;
    if (form != Form::identity && !depthwise && !by_columns && all > 2 * cached && (direct || n_rows * ldy <= all))
      together = std::min(volume, std::max<int64_t>(cached / (groups * panel_size), num_threads()));
    bool in_parts = together < volume, whole = in_parts || (!by_columns && (!quantized || all <= most_dequantized));
    Floats panels, kept;
    if (in_parts && !direct) kept = aligned_floats(n_rows * ldy);
    if (depthwise) {
      panels = aligned_floats(volume * groups);
      Type t = type_of(in[1].dtype);
      const auto& strides = in[1].strides;
      for (int64_t p = 0; p < volume * groups; ++p) {
        int64_t at = p / groups * strides[0] + p % groups * strides[2];
        loops.load(t, in[1].as<char>() + at * bytes_of(t), 1, panels.get() + p);
      }
    } else if (whole) {
      panels = aligned_floats(together * groups * panel_size);
    }
    int64_t first_offset = 0;
    auto pack = [&](int64_t offsets) {  // those from first_offset on
      auto one = [&](int64_t p) {
        int64_t k = first_offset + p / groups;
        if (used[k]) weights.pack(k, p % groups, 0, c_out, panels.get() + p * panel_size);
      };
      parallel_range(offsets * groups, 1 + 16384 / std::max<int64_t>(panel_size, 1), [&](int64_t begin, int64_t end) {
        for (int64_t p = begin; p < end; ++p) one(p);
      });
    };
    auto panel = [&](int64_t k, int64_t g, int64_t column, int64_t n) -> const float* {
      if (whole) return panels.get() + ((k - first_offset) * groups + g) * panel_size;
      float* own = scratch<float>(4, c_in * loops.padded(n));
      weights.pack(k, g, column, n, own);
      return own;
    };

    auto channels = [&](const Tensor* from, float otherwise) {
      Floats to = aligned_floats(ldy);
      std::fill(to.get(), to.get() + ldy, otherwise);
      for (int g = 0; from && g < groups; ++g) {
        Type t = type_of(from->dtype);
        loops.load(t, from->as<char>() + g * c_out * bytes_of(t), c_out, to.get() + g * group_stride);
      }
      return to;
    };
    const Tensor* last = in.data() + in.size();
    const Tensor* residual = has_residual ? --last : nullptr;
    const Tensor* var = has_var ? --last : nullptr;
    const Tensor* mean = has_mean ? --last : nullptr;
    const Tensor* scale = has_scale ? --last : nullptr;
    const Tensor* bias = has_bias ? --last : nullptr;
    Floats start = channels(has_epilogue ? nullptr : bias, 0.0f);
    Floats shifts, scales;  // of the epilogue, laid out as the sums of a row
    if (has_epilogue) {
      shifts = channels(bias, 0.0f), scales = channels(scale, 1.0f);
      Floats means = channels(mean, 0.0f), vars = channels(var, 1.0f);
      for (int64_t c = 0; c < ldy; ++c) {
        if (var) scales.get()[c] /= std::sqrt(vars.get()[c] + eps);
        shifts.get()[c] -= means.get()[c] * scales.get()[c];
      }
    }
    // A tall tile reads the panels less often; a short one keeps a table's edge lists in L1.
    int64_t short_tile = std::max(2 * ldy, 3456 / std::max<int64_t>(volume, 1));
    int64_t tile = form == Form::table ? std::clamp<int64_t>(short_tile, 128, 512) : 512;
    tile = std::clamp<int64_t>((256 << 10) / ldy, 48, tile);
    tile = by_columns ? n_rows : std::clamp<int64_t>(n_rows / (4 * num_threads()), 48, tile);
    if (has_moments) tile = (tile + line_rows - 1) / line_rows * line_rows;
    // How many rows of half features are converted into scratch at a time.
    int64_t gathered = type == Type::f32 ? tile : std::clamp<int64_t>((4 << 10) / std::max<int64_t>(c_in, 1), 48, 512);

    auto multiply = [&](int64_t unit, int64_t end_offset) {  // the offsets from first_offset on
      // A tile of rows, of all output channels; or all rows, of n output channels from `column` on.
      int64_t row = by_columns ? 0 : unit * tile, rows = std::min(tile, n_rows - row);
      int64_t column = by_columns ? unit * block : 0, n = std::min(by_columns ? block : c_out, c_out - column);
      int64_t width = by_columns ? loops.padded(n) : ldy, ld = direct ? ldy : width;  // of sums
      float* sums = direct ? y.as<float>() + row * ld + column
                    : kept ? kept.get() + row * ld
                           : scratch<float>(2, rows * ld);
      const float* first_sums = start.get() + column;
      auto begin = [&](int64_t r) { std::copy(first_sums, first_sums + width, sums + r * ld); };

      auto add = [&](int64_t k, const int32_t* from, const int32_t* to, int64_t first, int64_t count) {
        // Adds `count` edges of offset k; where there are no lists (identity), they are rows first, first + 1, ...
        if (depthwise)
          return loops.gather_multiply(type, x.data, in_width, from, to, count, panels.get() + k * groups, groups,
                                       start.get(), sums, ld);
        for (int g = 0; g < groups; ++g) {
          const float* weight = panel(k, g, column, n);
          for (int64_t e = 0; e < count; e += gathered) {
            int64_t m = std::min(gathered, count - e), skip = (from ? 0 : first + e) * in_width + g * c_in, lda = in_width;
            const int32_t* rows_in = from ? from + e : nullptr;
            const float* a = x.as<float>() + skip;
            if (type != Type::f32) {
              float* wide = scratch<float>(3, m * c_in);
              loops.gather(type, x.as<char>() + skip * 2, in_width, rows_in, m, c_in, wide, c_in);
              a = wide;
              rows_in = nullptr;
              lda = c_in;
            }
            loops.gather_gemm(a, lda, rows_in, to ? to + e : nullptr, m, weight, c_in, n, first_sums + g * padded,
                              sums + (to ? 0 : e * ld) + g * padded, ld);
          }
        }
      };
      if (in_width == 0) {
        for (int64_t r = 0; r < rows; ++r) begin(r);
      } else if (form == Form::identity) {
        add(0, nullptr, nullptr, row, rows);
      } else {
        EdgeLists lists = edges->lists(row, rows);
        for (int64_t j = 0; j < lists.n_empty && first_offset == 0; ++j) begin(lists.empty_rows[j]);
        for (int64_t k = first_offset; k < end_offset; ++k) {
          int64_t first = lists.begin[k], count = lists.end[k] - first;
          if (count > 0) add(k, lists.in + first, lists.out + first, 0, count);
        }
      }
      if (end_offset < volume) return;
      // Sums without padding are side by side, as those of one group.
      int64_t parts = ldy == out_width ? 1 : groups, own = parts == 1 && !by_columns ? out_width : n;
      char* to = y.as<char>() + (row * out_width + column) * bytes_of(out_type);
      const char* added = nullptr;
      if (residual) added = residual->as<char>() + (row * out_width + column) * bytes_of(out_type);
      for (int64_t r = 0; r < rows && (has_epilogue || !direct); ++r)
        for (int64_t g = 0; g < parts; ++g) {
          float* sum = sums + r * ld + g * padded;
          int64_t skip = (r * out_width + g * c_out) * bytes_of(out_type);
          if (has_epilogue)
            loops.finish(act, scales.get() + column + g * padded, shifts.get() + column + g * padded, out_type,
                         added ? added + skip : nullptr, own, sum);
          if (!direct) loops.store(out_type, sum, own, to + skip);
        }
      if (has_moments) sum_moments(y, out[1], row, rows);
    };
    do {
      int64_t end_offset = std::min(volume, first_offset + together);
      if (whole && !depthwise) pack(end_offset - first_offset);
      parallel_for(by_columns ? blocks : (n_rows + tile - 1) / tile, [&](int64_t u) { multiply(u, end_offset); });
      first_offset += together;
    } while (first_offset < volume);
  }
};

// Checks that x, the weights, the bias and the groups fit.
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

// Checks what names the edges of a relation.
void check_indices(const Contraction& op, const std::vector<array>& indices, const array& w) {
  const char* who = op.name;
  if (op.form == Form::table) {
    const array& table = indices[0];
    want_rank(who, "table", table, 2, "(N_out, K)");
    want_dtype(who, "table", table, mx::int32);
    if (table.shape(1) != w.shape(0))
      fail(who, "table has " + std::to_string(table.shape(1)) + " offsets, but the weight has " +
                    std::to_string(w.shape(0)) + ".");
  }
  if (op.form == Form::edges) {
    const array& edges = indices[0];
    want_rank(who, "edges", edges, 2, "(E, 3)");
    want_dtype(who, "edges", edges, mx::int32);
    if (edges.shape(1) != 3) fail(who, "edges must have shape (E, 3), but has " + text(edges.shape()) + ".");
    if (op.n_out < 0) fail(who, "n_out must not be negative.");
  }
  if (op.form == Form::csr) {
    const array &starts = indices[0], &rows = indices[1], &offsets = indices[2];
    for (auto [what, a] : {std::pair{"starts", &starts}, {"rows", &rows}, {"offsets", &offsets}}) {
      want_rank(who, what, *a, 1, "(n,)");
      want_dtype(who, what, *a, mx::int32);
    }
    if (starts.shape(0) < 1) fail(who, "starts must hold N_out + 1 values, but is empty.");
    if (rows.shape() != offsets.shape())
      fail(who, "rows and offsets must have one value per edge, but have shapes " + text(rows.shape()) + " and " +
                    text(offsets.shape()) + ".");
  }
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
    fail(who, "scales and biases must have one value per group of " + std::to_string(group_size) +
                  " channels of words " + text(words.shape()) + ", but have shapes " + text(scales.shape()) + " and " + text(biases.shape()) +
                  ".");
}

std::vector<array> finish(Contraction op, std::vector<array> inputs, const std::vector<array>& indices,
                          const MaybeArray& bias, const Epilogue& epilogue, Stream s) {
  check_indices(op, indices, inputs[1]);
  int64_t c_out = op.out_channels(inputs[1].shape());
  inputs.insert(inputs.end(), indices.begin(), indices.end());
  int64_t rows = op.shapes(inputs)[0][0];
  if (bias) inputs.push_back(*bias);
  if (epilogue) {
    auto& [scale, mean, var, residual, code, eps] = *epilogue;
    op.has_epilogue = true;
    op.act = activation_of(op.name, code);
    op.eps = eps;
    op.has_scale = scale.has_value();
    op.has_mean = mean.has_value();
    op.has_var = var.has_value();
    op.has_residual = residual.has_value();
    for (auto [what, a] : {std::pair{"scale", &scale}, {"mean", &mean}, {"var", &var}}) {
      if (!*a) continue;
      const array& given = **a;
      want_float(op.name, what, given);
      if (given.ndim() != 1 || given.shape(0) != c_out)
        fail(op.name, std::string(what) + " must have shape (" + std::to_string(c_out) + ",), but has " +
                          text(given.shape()) + ".");
      inputs.push_back(given);
    }
    if (residual) {
      want_same_dtype(op.name, "x", inputs[0], "residual", *residual);
      mx::Shape expected{int(rows), int(c_out)};
      if (residual->shape() != expected)
        fail(op.name, "residual must have shape " + text(expected) + ", but has " + text(residual->shape()) + ".");
      inputs.push_back(*residual);
    }
  }
  return build(op, std::move(inputs), s);
}

std::vector<array> of_floats(Contraction op, const array& x, const array& w, const std::vector<array>& indices,
                             int n_out, const MaybeArray& bias, int groups, bool transposed, const Epilogue& epilogue,
                             Stream s) {
  op.transposed = transposed;
  op.has_bias = bias.has_value();
  op.groups = groups;
  op.n_out = n_out;
  size_t rank = op.form == Form::identity ? 2 : 3;
  want_rank(op.name, "the weight", w, rank, rank == 2 ? "(C_in, C_out)" : "(K, C_in / groups, C_out)");
  want_same_dtype(op.name, "x", x, "the weight", w);
  check(op.name, op, x, w, bias);
  return finish(op, {x, w}, indices, bias, epilogue, s);
}

}  // namespace

Act activation_of(const char* who, int code) {
  if (code >= 0 && code < int(Activation::leaky_relu)) return {Activation(code)};
  float slope = std::bit_cast<float>(code);
  if (slope > 0.0f && slope <= 1.0f) return {Activation::leaky_relu, slope};
  if (std::isfinite(slope) && slope < 0.0f) return {Activation::elu, -slope};
  fail(who, "the activation must be a code of mlx_lattice/epilogue.py, but is " + std::to_string(code) + ".");
}

array contract(const char* route, Form form, const array& x, const array& w, const std::vector<array>& indices,
               int n_out, const MaybeArray& bias, int groups, bool transposed, const Epilogue& epilogue,
               Stream s) {
  return of_floats({route, form}, x, w, indices, n_out, bias, groups, transposed, epilogue, s)[0];
}

std::tuple<array, array> contract_with_moments(const char* route, Form form, const array& x, const array& w,
                                               const std::vector<array>& indices, const MaybeArray& bias, int groups,
                                               Stream s) {
  Contraction op{route, form};
  op.has_moments = true;
  auto made = of_floats(op, x, w, indices, 0, bias, groups, false, {}, s);
  return {made[0], made[1]};
}

array contract_packed(const char* route, Form form, const array& x, const array& words, const array& scales,
                      const array& biases, const std::vector<array>& indices, int n_out, const MaybeArray& bias,
                      int groups, int bits, int group_size, const Epilogue& epilogue, Stream s) {
  Contraction op{route, form, true};
  op.has_bias = bias.has_value();
  op.groups = groups;
  op.bits = bits;
  op.group_size = group_size;
  op.n_out = n_out;
  check_packed(route, words, scales, biases, bits, group_size, form == Form::identity ? 2 : 3);
  check(route, op, x, words, bias);
  return finish(op, {x, words, scales, biases}, indices, bias, epilogue, s)[0];
}

}  // namespace lattice
