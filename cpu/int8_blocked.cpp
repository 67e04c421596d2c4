// Route int8_blocked: int8 features times int8 or int4 weights over the neighbour table, int32 sums.
//
//   tile      output rows whose edges are grouped by offset (edge_lists.h); per offset one gathered product adds
//             x[in] @ W[k] to the tile's int32 sums (integer_tiles.h), exact over all offsets and channels.
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
  bool has_multipliers = false, has_shift = false, has_residual = false, has_residual_scale = false;
  bool has_out_inverse = false, has_row_scales = false;
  Activation activation = Activation::none;
  mx::Dtype dtype = mx::float32;  // of the result
  bool operator==(const IntegerContraction&) const = default;

  // x, w, multipliers, table, scale, shift, residual, residual_scale, out_inverse, row_scales, as far as they are there
  size_t table() const { return has_multipliers ? 3 : 2; }
  std::vector<mx::Shape> shapes(const std::vector<array>& in) const {
    return {{in[table()].shape(0), in[1].shape(1)}};
  }
  std::vector<mx::Dtype> dtypes(const std::vector<array>&) const { return {dtype}; }

  // Writes the panel of offset k: int4 values are unpacked into scratch first.
  static void pack(const IntegerLoops& loops, const Tensor& w, const Tensor* multipliers, int64_t k, int64_t c_in,
                   char* panel) {
    int64_t c_out = w.dim(1), stored = w.dim(2);
    if (!multipliers) return loops.pack(w.as<int8_t>() + k * c_out * stored, stored, c_in, c_out, panel);
    stored *= 8;
    int64_t groups = multipliers->dim(2), words = stored / std::max<int64_t>(groups, 1) / 8;
    int8_t* values = scratch<int8_t>(4, c_out * stored + 1);
    const uint32_t* word = w.as<uint32_t>() + k * c_out * stored / 8;
    const int8_t* multiplier = multipliers->as<int8_t>() + k * c_out * groups;
    int8_t* to = values;
    for (int64_t g = 0; g < c_out * groups; ++g)
      for (int64_t j = 0; j < words; ++j, ++word)
        for (int shift = 28; shift >= 0; shift -= 4, ++to)
          *to = int8_t((int32_t(*word << shift) >> 28) * multiplier[g]);
    loops.pack(values, stored, c_in, c_out, panel);
  }

  void evaluate(const std::vector<Tensor>& in, const std::vector<Tensor>& out) const {
    const Tensor &x = in[0], &w = in[1], &y = out[0];
    const IntegerLoops& loops = integer_loops();
    int64_t n_in = x.dim(0), c_in = x.dim(1), n_out = y.dim(0), c_out = y.dim(1), volume = w.dim(0);
    if (n_out == 0 || c_out == 0) return;
    size_t next = table() + 1;
    auto given = [&](bool there) { return there ? &in[next++] : nullptr; };
    const Tensor *scale = given(true), *shift = given(has_shift), *residual = given(has_residual);
    const Tensor *residual_scale = given(has_residual_scale), *out_inverse = given(has_out_inverse);
    const Tensor* row_scales = given(has_row_scales);
    EdgeSource edges(name, Form::table, &in[table()], n_in, n_out, volume);

    // Rows as the loops read them, kept by the stream's thread from call to call where they are of moderate size.
    int64_t row_bytes = loops.row_bytes(c_in);
    bool as_given = loops.reads_as_given(c_in);
    int64_t copied = as_given ? 0 : n_in * row_bytes;
    constexpr int64_t most_kept = 64 << 20;
    Floats memory;
    if (copied > most_kept) memory = aligned_floats((copied + 3) / 4);
    char* own = as_given ? nullptr : memory ? reinterpret_cast<char*>(memory.get()) : scratch<char>(7, copied + 64);
    int32_t* row_sums = loops.is_shifted ? scratch<int32_t>(5, n_in + 1) : nullptr;
    if (own || row_sums)
      parallel_range(n_in, 1024, [&](int64_t begin, int64_t end) {
        loops.prepare(x.as<int8_t>() + begin * c_in, end - begin, c_in, own ? own + begin * row_bytes : nullptr,
                      row_sums ? row_sums + begin : nullptr);
      });

    // Few rows leave offsets without an edge, whose panels nobody reads.
    constexpr int64_t few_rows = 64;
    std::vector<char> used(volume, 1);
    if (n_out <= few_rows) {
      EdgeLists lists = edges.lists(0, n_out);
      for (int64_t k = 0; k < volume; ++k) used[k] = lists.end[k] > lists.begin[k];
    }
    int64_t padded = loops.padded(c_out), panel_size = row_bytes * padded;
    Floats panels = aligned_floats((volume * panel_size + 3) / 4);
    auto panel = [&](int64_t k) { return reinterpret_cast<char*>(panels.get()) + k * panel_size; };
    const Tensor* multipliers = has_multipliers ? &in[2] : nullptr;
    parallel_range(volume, 1 + (1 << 16) / std::max<int64_t>(panel_size, 1), [&](int64_t begin, int64_t end) {
      for (int64_t k = begin; k < end; ++k)
        if (used[k]) pack(loops, w, multipliers, k, c_in, panel(k));
    });

    auto channels = [&](const Tensor* from) {
      Floats to = aligned_floats(padded);
      std::fill(to.get(), to.get() + padded, 0.0f);
      if (from) std::copy(from->as<float>(), from->as<float>() + c_out, to.get());
      return to;
    };
    Floats scales = channels(scale), shifts = channels(shift);
    auto number = [](const Tensor* a) { return a ? a->as<float>() : nullptr; };
    IntegerFinish finish{scales.get(),
                         shift ? shifts.get() : nullptr,
                         activation,
                         type_of(y.dtype),
                         residual ? type_of(residual->dtype) : Type::f32,
                         number(residual_scale),
                         number(out_inverse)};

    // Tall tiles cut fewer edges of an offset short of a register tile; their sums take 128 KB.
    int64_t tile = std::clamp<int64_t>((32 << 10) / padded, 64, 512);
    tile = std::clamp<int64_t>(n_out / (4 * num_threads()), 48, tile);
    parallel_for((n_out + tile - 1) / tile, [&](int64_t t) {
      int64_t row = t * tile, rows = std::min(tile, n_out - row);
      int32_t* sums = scratch<int32_t>(2, rows * padded);
      int32_t* taken = scratch<int32_t>(3, rows);
      EdgeLists lists = edges.lists(row, rows);
      if (!loops.is_shifted || row_scales) std::fill(taken, taken + rows, 0);
      for (int64_t j = 0; j < lists.n_empty; ++j) {
        int32_t* none = sums + lists.empty_rows[j] * padded;
        std::fill(none, none + padded, 0);
        taken[lists.empty_rows[j]] = 0;
      }
      for (int64_t k = 0; k < volume; ++k) {
        int64_t first = lists.begin[k], n = lists.end[k] - first;
        if (n == 0) continue;
        IntegerEdges to_add{own ? own : x.as<char>(), row_bytes,           lists.in + first,
                            lists.out + first,        n,                   row_sums,
                            number(row_scales)};
        loops.gather_dot(to_add, panel(k), c_in, c_out, sums, padded, taken);
      }
      int64_t width = c_out * size_of(y.dtype), added = residual ? c_out * size_of(residual->dtype) : 0;
      for (int64_t r = 0; r < rows; ++r) {
        // Nothing but these stores waits for the lines of y.
        constexpr int64_t ahead = 8;
        char* later = y.as<char>() + (row + r + ahead) * width;
        for (int64_t line = 0; r + ahead < rows && line < width; line += 64) __builtin_prefetch(later + line, 1);
        loops.finish(finish, sums + r * padded, row_scales, taken[r],
                     residual ? residual->as<char>() + (row + r) * added : nullptr, c_out,
                     y.as<char>() + (row + r) * width);
      }
    });
  }
};

void want_shape(const char* what, const array& a, const mx::Shape& shape) {
  if (a.shape() != shape)
    fail(name_, std::string(what) + " must have shape " + text(shape) + ", but has " + text(a.shape()) + ".");
}

// Checks x, the weight and the table.
void check(const array& x, const array& w, const array& table, const MaybeArray& multipliers) {
  want_rank(name_, "x", x, 2, "(N, C_in)");
  want_dtype(name_, "x", x, mx::int8);
  want_rank(name_, "the weight", w, 3, multipliers ? "(K, C_out, words)" : "(K, C_out, channels)");
  want_dtype(name_, "the weight", w, multipliers ? mx::uint32 : mx::int8);
  want_rank(name_, "table", table, 2, "(N_out, K)");
  want_dtype(name_, "table", table, mx::int32);
  int64_t stored = int64_t(w.shape(2)) * (multipliers ? 8 : 1);
  if (x.shape(1) > stored || stored % 32)
    fail(name_, "the weight must hold the " + std::to_string(x.shape(1)) +
                    " channels of x, padded to a multiple of 32, but holds " + std::to_string(stored) + ".");
  if (multipliers) {
    want_rank(name_, "multipliers", *multipliers, 3, "(K, C_out, groups)");
    want_dtype(name_, "multipliers", *multipliers, mx::int8);
    int64_t groups = multipliers->shape(2);
    if (multipliers->shape(0) != w.shape(0) || multipliers->shape(1) != w.shape(1) ||
        (groups ? stored % groups || stored / groups % 32 : stored))
      fail(name_, "multipliers must have one value per group of 32, 64 or 128 channels of words " + text(w.shape()) +
                      ", but have shape " + text(multipliers->shape()) + ".");
  }
  if (table.shape(1) != w.shape(0))
    fail(name_, "table has " + std::to_string(table.shape(1)) + " offsets, but the weight has " +
                    std::to_string(w.shape(0)) + ".");
  constexpr int64_t most = (int64_t(1) << 31) / (127 * 127);
  if (w.shape(0) * stored > most)
    fail(name_, "the sums of " + std::to_string(w.shape(0)) + " offsets and " + std::to_string(stored) +
                    " channels may leave 32 bits: at most " + std::to_string(most) + " products fit.");
}

}  // namespace

array int8_blocked(const array& x, const array& w, const array& table, const array& scale, const MaybeArray& shift,
                   const MaybeArray& residual, const MaybeArray& residual_scale, const MaybeArray& out_inverse,
                   const MaybeArray& row_scales, const MaybeArray& multipliers, const std::string& activation,
                   mx::Dtype dtype, Stream s) {
  check(x, w, table, multipliers);
  IntegerContraction op{multipliers.has_value(),    shift.has_value(),       residual.has_value(),
                        residual_scale.has_value(), out_inverse.has_value(), row_scales.has_value()};
  op.activation = activation_of(name_, activation);
  op.dtype = out_inverse ? mx::int8 : dtype;
  if (dtype != mx::float32 && dtype != mx::float16 && dtype != mx::bfloat16)
    fail(name_, "dtype must be float32, float16 or bfloat16; out_inverse asks for int8.");
  std::vector<array> inputs{x, w};
  if (multipliers) inputs.push_back(*multipliers);
  inputs.push_back(table);
  auto add = [&](const char* what, const MaybeArray& a, mx::Shape shape) {
    if (!a) return;
    want_shape(what, *a, shape);
    want_dtype(name_, what, *a, mx::float32);
    inputs.push_back(*a);
  };
  int rows = table.shape(0), c_out = w.shape(1);
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
