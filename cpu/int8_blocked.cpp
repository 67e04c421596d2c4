// Route int8_blocked: int8 features times int8 or int4 weights over the neighbour table, int32 sums.
//
//   tile      output rows whose edges are grouped by offset (edge_lists.h); per offset and channel group one gathered
//             product adds x[in] @ W[k] to the tile's int32 sums (integer_tiles.h), exact over all offsets and channels.
//   identity  a kernel of one offset over the same rows has no table: a tile's rows are read as they stand, once.
//   after     v = sum * scale + shift + residual, an activation, then a float type or int8, each operation rounded by
//             itself: bit-equal on every instruction set and backend. With row_scales, sums are float32:
//             += float(x[i] . W[k]) * row_scales[i], offsets in order.
//   memory    W is packed into panels in each call, a quarter of float's, int4 unpacked on the way; a row of x is
//             gathered once an edge, a quarter of float's bytes, mostly from cache; y is written once.
//   wins      over float32 wherever integers multiply faster: VNNI, dotprod, i8mm.
#include <algorithm>

#include "contraction.h"
#include "integer_loops.h"

namespace lattice {
namespace {

constexpr const char* name_ = "int8_blocked";

struct IntegerContraction {
  static constexpr const char* name = name_;
  int groups = 1;
  bool has_multipliers = false, has_table = false, has_shift = false, has_residual = false, has_residual_scale = false;
  bool has_out_inverse = false, has_row_scales = false;
  Act act = {};
  mx::Dtype dtype = mx::float32;  // of the result
  bool operator==(const IntegerContraction&) const = default;

  // x, w, multipliers, table, scale, shift, residual, residual_scale, out_inverse, row_scales, as far as they are there
  size_t table() const { return has_multipliers ? 3 : 2; }
  std::vector<mx::Shape> shapes(const std::vector<array>& in) const {
    return {{in[has_table ? table() : 0].shape(0), in[1].shape(1)}};
  }
  std::vector<mx::Dtype> dtypes(const std::vector<array>&) const { return {dtype}; }

  // The values of `count` rows of the weight from `row` on; those of int4 are unpacked into scratch.
  static const int8_t* values(const Tensor& w, const Tensor* multipliers, int64_t row, int64_t count) {
    if (!multipliers) return w.as<int8_t>() + row * w.dim(2);
    int64_t words = w.dim(2), shares = multipliers->dim(2);
    int8_t* unpacked = scratch<int8_t>(4, count * words * 8 + 1);
    integer_loops().unpack(w.as<uint32_t>() + row * words, count * shares, words / std::max<int64_t>(shares, 1),
                           multipliers->as<int8_t>() + row * shares, unpacked);
    return unpacked;
  }

  void evaluate(const std::vector<Tensor>& in, const std::vector<Tensor>& out) const {
    const Tensor &x = in[0], &w = in[1], &y = out[0];
    const IntegerLoops& loops = integer_loops();
    int64_t n_in = x.dim(0), in_width = x.dim(1), n_out = y.dim(0), out_width = y.dim(1), volume = w.dim(0);
    if (n_out == 0 || out_width == 0) return;
    // A group a channel is no matrix: all channels are one part, multiplied channel by channel.
    bool depthwise = groups > 1 && groups == in_width && groups == out_width;
    int64_t parts = depthwise ? 1 : groups, c_in = in_width / parts, c_out = out_width / parts;
    bool is_shifted = loops.is_shifted && !depthwise;
    size_t next = table() + has_table;
    auto given = [&](bool there) { return there ? &in[next++] : nullptr; };
    const Tensor *scale = given(true), *shift = given(has_shift), *residual = given(has_residual);
    const Tensor *residual_scale = given(has_residual_scale), *out_inverse = given(has_out_inverse);
    const Tensor* row_scales = given(has_row_scales);
    std::optional<EdgeSource> edges;
    if (has_table) edges.emplace(name, Form::table, &in[table()], n_in, n_out, volume);

    // Rows as the loops read them, a part after another, and the sum of each part.
    bool as_given = depthwise || loops.reads_as_given(c_in);
    int64_t part_bytes = as_given ? c_in : loops.row_bytes(c_in), row_bytes = parts * part_bytes;
    auto prepare = [&](int64_t begin, int64_t rows, char* to, int32_t* sums) {
      if (to || sums) loops.prepare(x.as<int8_t>() + begin * in_width, rows * parts, c_in, to, sums);
    };
    // Those that a table may name again and again are prepared once; they are kept by the stream's thread from call to
    // call where they are of moderate size.
    constexpr int64_t most_kept = 64 << 20;
    Floats memory;
    char* own = nullptr;
    int32_t* row_sums = nullptr;
    if (has_table) {
      int64_t copied = as_given ? 0 : n_in * row_bytes;
      if (copied > most_kept) memory = aligned_floats((copied + 3) / 4);
      if (!as_given) own = memory ? reinterpret_cast<char*>(memory.get()) : scratch<char>(7, copied + 64);
      if (is_shifted) row_sums = scratch<int32_t>(5, n_in * parts + 1);
      parallel_range(n_in, 1024, [&](int64_t begin, int64_t end) {
        prepare(begin, end - begin, own ? own + begin * row_bytes : nullptr,
                row_sums ? row_sums + begin * parts : nullptr);
      });
    }

    // Few rows leave offsets without an edge, whose panels nobody reads.
    constexpr int64_t few_rows = 64;
    std::vector<char> used(volume, 1);
    if (edges && n_out <= few_rows) {
      EdgeLists lists = edges->lists(0, n_out);
      for (int64_t k = 0; k < volume; ++k) used[k] = lists.end[k] > lists.begin[k];
    }
    int64_t padded = loops.padded(c_out), panel_size = depthwise ? c_out : part_bytes * padded;
    Floats panels = aligned_floats((volume * parts * panel_size + 3) / 4);
    auto panel = [&](int64_t p) { return reinterpret_cast<char*>(panels.get()) + p * panel_size; };
    const Tensor* multipliers = has_multipliers ? &in[2] : nullptr;
    int64_t together = 1 + (1 << 16) / std::max<int64_t>(panel_size, 1);
    int64_t stored = w.dim(2) * (multipliers ? 8 : 1);
    parallel_range(volume * parts, together, [&](int64_t begin, int64_t end) {
      for (int64_t p = begin; p < end; ++p) {
        if (!used[p / parts]) continue;
        const int8_t* from = values(w, multipliers, p * c_out, c_out);
        if (!depthwise) loops.pack(from, stored, c_in, c_out, panel(p));
        for (int64_t c = 0; depthwise && c < c_out; ++c) panel(p)[c] = char(from[c * stored]);
      }
    });

    // Sums of a row are (parts, padded).
    int64_t width = parts * padded;
    auto channels = [&](const Tensor* from) {
      Floats to = aligned_floats(width);
      std::fill(to.get(), to.get() + width, 0.0f);
      for (int64_t g = 0; from && g < parts; ++g)
        std::copy_n(from->as<float>() + g * c_out, c_out, to.get() + g * padded);
      return to;
    };
    Floats scales = channels(scale), shifts = channels(shift);
    auto number = [](const Tensor* a) { return a ? a->as<float>() : nullptr; };
    std::vector<IntegerFinish> finishes;
    for (int64_t g = 0; g < parts; ++g)
      finishes.push_back({scales.get() + g * padded, shift ? shifts.get() + g * padded : nullptr, act,
                          type_of(y.dtype), residual ? type_of(residual->dtype) : Type::f32, number(residual_scale),
                          number(out_inverse)});

    // Tall tiles cut fewer edges of an offset short of a register tile; their sums take 128 KB.
    int64_t tile = std::clamp<int64_t>((32 << 10) / width, 64, 512);
    tile = std::clamp<int64_t>(n_out / (4 * num_threads()), 48, tile);
    parallel_for((n_out + tile - 1) / tile, [&](int64_t t) {
      int64_t row = t * tile, rows = std::min(tile, n_out - row);
      int32_t* sums = scratch<int32_t>(2, rows * width);
      int32_t* taken = scratch<int32_t>(3, rows * parts);  // (parts, rows)
      if (!is_shifted || row_scales) std::fill(taken, taken + rows * parts, 0);

      auto add = [&](IntegerEdges to_add, int64_t k) {
        if (depthwise) return loops.gather_multiply(to_add, panel(k), c_in, sums, width);
        for (int64_t g = 0; g < parts; ++g, to_add.x += part_bytes, to_add.row_sums += is_shifted)
          loops.gather_dot(to_add, panel(k * parts + g), c_in, c_out, sums + g * padded, width, taken + g * rows);
      };
      if (edges) {
        EdgeLists lists = edges->lists(row, rows);
        for (int64_t j = 0; j < lists.n_empty; ++j) {
          int64_t none = lists.empty_rows[j];
          std::fill_n(sums + none * width, width, 0);
          for (int64_t g = 0; g < parts; ++g) taken[g * rows + none] = 0;
        }
        for (int64_t k = 0; k < volume; ++k) {
          int64_t first = lists.begin[k], n = lists.end[k] - first;
          if (n > 0)
            add({own ? own : x.as<char>(), row_bytes, lists.in + first, lists.out + first, n, row_sums, parts,
                 number(row_scales)}, k);
        }
      } else {
        char* to = as_given ? nullptr : scratch<char>(7, rows * row_bytes + 64);
        int32_t* to_sums = is_shifted ? scratch<int32_t>(5, rows * parts + 1) : nullptr;
        prepare(row, rows, to, to_sums);
        add({to ? to : x.as<char>() + row * row_bytes, row_bytes, nullptr, nullptr, rows, to_sums, parts,
             row_scales ? row_scales->as<float>() + row : nullptr}, 0);
      }

      int64_t size = size_of(y.dtype), added = residual ? size_of(residual->dtype) : 0;
      int64_t line_bytes = out_width * size;
      for (int64_t r = 0; r < rows; ++r) {
        // Nothing but these stores waits for the lines of y.
        constexpr int64_t ahead = 8;
        char* later = y.as<char>() + (row + r + ahead) * line_bytes;
        for (int64_t b = 0; r + ahead < rows && b < line_bytes; b += 64) __builtin_prefetch(later + b, 1);
        for (int64_t g = 0; g < parts; ++g) {
          int64_t at = (row + r) * out_width + g * c_out;
          loops.finish(finishes[g], sums + r * width + g * padded, row_scales, taken[g * rows + r],
                       residual ? residual->as<char>() + at * added : nullptr, c_out, y.as<char>() + at * size);
        }
      }
    });
  }
};

void want_shape(const char* what, const array& a, const mx::Shape& shape) {
  if (a.shape() != shape)
    fail(name_, std::string(what) + " must have shape " + text(shape) + ", but has " + text(a.shape()) + ".");
}

// Checks x, the weight and the table.
void check(const array& x, const array& w, const MaybeArray& table, const MaybeArray& multipliers, int groups) {
  want_rank(name_, "x", x, 2, "(N, C_in)");
  want_dtype(name_, "x", x, mx::int8);
  want_rank(name_, "the weight", w, 3, multipliers ? "(K, C_out, words)" : "(K, C_out, channels)");
  want_dtype(name_, "the weight", w, multipliers ? mx::uint32 : mx::int8);
  if (groups < 1 || x.shape(1) % groups || w.shape(1) % groups)
    fail(name_, std::to_string(x.shape(1)) + " input and " + std::to_string(w.shape(1)) +
                    " output channels do not divide into " + std::to_string(groups) + " groups.");
  int64_t stored = int64_t(w.shape(2)) * (multipliers ? 8 : 1), own = x.shape(1) / groups;
  if (own > stored || stored % 32)
    fail(name_, "the weight must hold the " + std::to_string(own) + " channels of a group of x, padded to a multiple of "
                    "32, but holds " + std::to_string(stored) + ".");
  if (multipliers) {
    want_rank(name_, "multipliers", *multipliers, 3, "(K, C_out, groups)");
    want_dtype(name_, "multipliers", *multipliers, mx::int8);
    int64_t groups = multipliers->shape(2);
    if (multipliers->shape(0) != w.shape(0) || multipliers->shape(1) != w.shape(1) ||
        (groups ? stored % groups || stored / groups % 32 : stored))
      fail(name_, "multipliers must have one value per group of 32, 64 or 128 channels of words " + text(w.shape()) +
                      ", but have shape " + text(multipliers->shape()) + ".");
  }
  if (table) {
    want_rank(name_, "table", *table, 2, "(N_out, K)");
    want_dtype(name_, "table", *table, mx::int32);
  }
  int offsets = table ? table->shape(1) : 1;
  if (offsets != w.shape(0))
    fail(name_, std::string(table ? "table" : "a kernel without a table") + " has " + std::to_string(offsets) +
                    " offsets, but the weight has " + std::to_string(w.shape(0)) + ".");
  constexpr int64_t most = (int64_t(1) << 31) / (127 * 127);
  if (w.shape(0) * stored > most)
    fail(name_, "the sums of " + std::to_string(w.shape(0)) + " offsets and " + std::to_string(stored) +
                    " channels may leave 32 bits: at most " + std::to_string(most) + " products fit.");
}

}  // namespace

array int8_blocked(const array& x, const array& w, const MaybeArray& table, const array& scale, const MaybeArray& shift,
                   const MaybeArray& residual, const MaybeArray& residual_scale, const MaybeArray& out_inverse,
                   const MaybeArray& row_scales, const MaybeArray& multipliers, int groups,
                   int activation, mx::Dtype dtype, Stream s) {
  check(x, w, table, multipliers, groups);
  IntegerContraction op{groups, multipliers.has_value(), table.has_value(), shift.has_value(), residual.has_value(),
                        residual_scale.has_value(), out_inverse.has_value(), row_scales.has_value()};
  op.act = activation_of(name_, activation);
  op.dtype = out_inverse ? mx::int8 : dtype;
  if (dtype != mx::float32 && dtype != mx::float16 && dtype != mx::bfloat16)
    fail(name_, "dtype must be float32, float16 or bfloat16; out_inverse asks for int8.");
  std::vector<array> inputs{x, w};
  if (multipliers) inputs.push_back(*multipliers);
  if (table) inputs.push_back(*table);
  auto add = [&](const char* what, const MaybeArray& a, mx::Shape shape) {
    if (!a) return;
    want_shape(what, *a, shape);
    want_dtype(name_, what, *a, mx::float32);
    inputs.push_back(*a);
  };
  int rows = (table ? *table : x).shape(0), c_out = w.shape(1);
  add("scale", scale, {c_out});
  add("shift", shift, {c_out});
  if (residual) {
    want_shape("residual", *residual, {rows, c_out});
    if (residual_scale)
      want_dtype(name_, "residual", *residual, mx::int8);
    else
      want_float(name_, "residual", *residual);
    inputs.push_back(*residual);
  } else if (residual_scale) {
    fail(name_, "residual_scale is of an int8 residual, but there is no residual.");
  }
  add("residual_scale", residual_scale, {1});
  add("out_inverse", out_inverse, {1});
  add("row_scales", row_scales, {x.shape(0)});
  return build(op, std::move(inputs), s)[0];
}

}  // namespace lattice
