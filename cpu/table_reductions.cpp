// Memory-bound reductions over the rows that a table (N_out, K) names: pooling, weighted interpolation, and their
// transposes.
//
// Each output row is one accumulator of C floats in L1; x rows are read once per edge, y is written once; no atomics,
// so results do not depend on threads. Rows without edges give 0 (and index -1).
#include <algorithm>

#include "operations.h"
#include "thread_pool.h"
#include "widen.h"

namespace lattice {
namespace {

// Returns the row i of a table's entry, which may be -1; fails where there is no such row.
int64_t checked(const char* who, int64_t i, int64_t n) {
  if (i >= n)
    fail(who, "an edge names row " + std::to_string(i) + ", but there are " + std::to_string(n) + " rows.");
  return i;
}

// Least rows of a unit of work, for rows of so many elements.
int64_t row_grain(int64_t width) { return 1 + 8192 / std::max<int64_t>(width, 1); }

// y[o, c] = max over j of x[table[o, j], c], and the row that it came from; 0 and -1 where there is none.
struct GatherMax {
  static constexpr const char* name = "gather_max";
  bool operator==(const GatherMax&) const = default;
  std::vector<mx::Shape> shapes(const std::vector<array>& in) const {
    mx::Shape s{in[1].shape(0), in[0].shape(1)};
    return {s, s};
  }
  std::vector<mx::Dtype> dtypes(const std::vector<array>& in) const { return {in[0].dtype(), mx::int32}; }

  void evaluate(const std::vector<Tensor>& in, const std::vector<Tensor>& out) const {
    auto& loops = inner_loops();
    Type type = type_of(in[0].dtype);
    int64_t n_in = in[0].dim(0), c = in[0].dim(1), volume = in[1].dim(1), size = bytes_of(type);
    parallel_range(in[1].dim(0), row_grain(c * volume), [&](int64_t begin, int64_t end) {
      float* best = scratch<float>(2, c);
      for (int64_t o = begin; o < end; ++o) {
        int32_t* index = out[1].as<int32_t>() + o * c;
        std::fill(best, best + c, 0.0f);
        std::fill(index, index + c, -1);
        for (int64_t k = 0; k < volume; ++k) {
          int64_t i = checked("gather_max", in[1].as<int32_t>()[o * volume + k], n_in);
          if (i >= 0) loops.maximum(type, in[0].as<char>() + i * c * size, c, int32_t(i), best, index);
        }
        loops.store(type, best, c, out[0].as<char>() + o * c * size);
      }
    });
  }
};

// dx[i, c] = sum over the outputs o = in_out[i, :] of dy[o, c] where index[o, c] == i.
struct MaxPoolBackward {
  static constexpr const char* name = "max_pool_backward";
  bool operator==(const MaxPoolBackward&) const = default;
  std::vector<mx::Shape> shapes(const std::vector<array>& in) const { return {{in[2].shape(0), in[0].shape(1)}}; }
  std::vector<mx::Dtype> dtypes(const std::vector<array>& in) const { return {in[0].dtype()}; }

  void evaluate(const std::vector<Tensor>& in, const std::vector<Tensor>& out) const {
    auto& loops = inner_loops();
    Type type = type_of(in[0].dtype);
    int64_t n_out = in[0].dim(0), c = in[0].dim(1), volume = in[2].dim(1), size = bytes_of(type);
    parallel_range(in[2].dim(0), row_grain(c * volume), [&](int64_t begin, int64_t end) {
      float *sum = scratch<float>(2, c), *row = scratch<float>(3, c);
      for (int64_t i = begin; i < end; ++i) {
        std::fill(sum, sum + c, 0.0f);
        const int32_t* reached = in[2].as<int32_t>() + i * volume;
        for (int64_t k = 0; k < volume; ++k) {
          int64_t o = checked("max_pool_backward", reached[k], n_out);
          // An arbitrary relation may reach one output through two offsets; its gradient counts once.
          if (o < 0 || std::find(reached, reached + k, o) != reached + k) continue;
          loops.load(type, in[0].as<char>() + o * c * size, c, row);
          const int32_t* index = in[1].as<int32_t>() + o * c;
          for (int64_t j = 0; j < c; ++j) sum[j] += index[j] == i ? row[j] : 0.0f;
        }
        loops.store(type, sum, c, out[0].as<char>() + i * c * size);
      }
    });
  }
};

// y[o] = sum over j of weights[o, j] * x[table[o, j]], weights 1 where none are given.
struct GatherSum {
  static constexpr const char* name = "gather_sum";
  bool weighted;
  bool operator==(const GatherSum&) const = default;
  std::vector<mx::Shape> shapes(const std::vector<array>& in) const { return {{in[1].shape(0), in[0].shape(1)}}; }
  std::vector<mx::Dtype> dtypes(const std::vector<array>& in) const { return {in[0].dtype()}; }

  void evaluate(const std::vector<Tensor>& in, const std::vector<Tensor>& out) const {
    auto& loops = inner_loops();
    Type type = type_of(in[0].dtype);
    int64_t n_in = in[0].dim(0), c = in[0].dim(1), volume = in[1].dim(1), size = bytes_of(type);
    parallel_range(in[1].dim(0), row_grain(c * volume), [&](int64_t begin, int64_t end) {
      float* sum = scratch<float>(2, c);
      for (int64_t o = begin; o < end; ++o) {
        std::fill(sum, sum + c, 0.0f);
        for (int64_t k = 0; k < volume; ++k) {
          int64_t i = checked("gather_sum", in[1].as<int32_t>()[o * volume + k], n_in);
          float weight = weighted ? in[2].as<float>()[o * volume + k] : 1.0f;
          if (i >= 0) loops.accumulate(type, in[0].as<char>() + i * c * size, c, weight, sum);
        }
        loops.store(type, sum, c, out[0].as<char>() + o * c * size);
      }
    });
  }
};

// y[r] = sum (or max) over the (q, k) with table[q, k] == r of weights[q, k] * x[q], weights 1 where none are given:
// the transpose of GatherSum. Each piece owns a range of r and reads the whole table, so a row adds in (q, k) order.
struct Scatter {
  const char* name;
  bool max, weighted;
  int rows;
  bool operator==(const Scatter&) const = default;
  std::vector<mx::Shape> shapes(const std::vector<array>& in) const {
    mx::Shape s{rows, in[0].shape(1)};
    return max ? std::vector<mx::Shape>{s, s} : std::vector<mx::Shape>{s};
  }
  std::vector<mx::Dtype> dtypes(const std::vector<array>& in) const {
    return max ? std::vector<mx::Dtype>{in[0].dtype(), mx::int32} : std::vector<mx::Dtype>{in[0].dtype()};
  }

  void evaluate(const std::vector<Tensor>& in, const std::vector<Tensor>& out) const {
    auto& loops = inner_loops();
    Type type = type_of(in[0].dtype);
    int64_t n = in[0].dim(0), c = in[0].dim(1), volume = in[1].dim(1), size = bytes_of(type);
    const int32_t* table = in[1].as<int32_t>();
    const float* weights = weighted ? in[2].as<float>() : nullptr;
    int32_t* index = max ? out[1].as<int32_t>() : nullptr;
    Floats memory;
    if (type != Type::f32) memory = aligned_floats(rows * c);
    float* sums = type == Type::f32 ? out[0].as<float>() : memory.get();
    int64_t pieces = std::clamp<int64_t>((n * volume + rows) * c / 16384, 1, num_threads());
    parallel_for(pieces, [&](int64_t p) {
      int64_t begin = rows * p / pieces, end = rows * (p + 1) / pieces;
      std::fill(sums + begin * c, sums + end * c, 0.0f);
      if (max) std::fill(index + begin * c, index + end * c, -1);
      for (int64_t q = 0; q < n; ++q) {
        const char* x = in[0].as<char>() + q * c * size;
        for (int64_t e = q * volume; e < (q + 1) * volume; ++e) {
          int64_t r = checked(name, table[e], rows);
          if (r < begin || r >= end) continue;
          if (max)
            loops.maximum(type, x, c, int32_t(q), sums + r * c, index + r * c);
          else
            loops.accumulate(type, x, c, weights ? weights[e] : 1.0f, sums + r * c);
        }
      }
      if (type != Type::f32)
        loops.store(type, sums + begin * c, (end - begin) * c, out[0].as<char>() + begin * c * size);
    });
  }
};

void check(const char* who, const array& x, const array& table) {
  want_rank(who, "x", x, 2, "(N, C)");
  want_float(who, "x", x);
  want_rank(who, "table", table, 2, "(N_out, K)");
  want_dtype(who, "table", table, mx::int32);
}

void check_weights(const char* who, const array& weights, const array& table) {
  want_dtype(who, "weights", weights, mx::float32);
  if (weights.shape() != table.shape())
    fail(who, "weights must have the table's shape " + text(table.shape()) + ", but has " + text(weights.shape()) + ".");
}

void check_scatter(const char* who, const array& x, const array& table, int rows) {
  check(who, x, table);
  if (rows < 0) fail(who, "rows must not be negative.");
  if (table.shape(0) != x.shape(0))
    fail(who, "x and table must have one row each, but have shapes " + text(x.shape()) + " and " +
                  text(table.shape()) + ".");
}

}  // namespace

std::tuple<array, array> gather_max(const array& x, const array& table, Stream s) {
  check("gather_max", x, table);
  auto out = build(GatherMax{}, {x, table}, s);
  return {out[0], out[1]};
}

array max_pool_backward(const array& dy, const array& index, const array& in_out, Stream s) {
  check("max_pool_backward", dy, in_out);
  want_dtype("max_pool_backward", "index", index, mx::int32);
  if (index.shape() != dy.shape())
    fail("max_pool_backward", "index must have dy's shape " + text(dy.shape()) + ", but has " + text(index.shape()) + ".");
  return build(MaxPoolBackward{}, {dy, index, in_out}, s)[0];
}

array gather_sum(const array& x, const array& table, const MaybeArray& weights, Stream s) {
  check("gather_sum", x, table);
  std::vector<array> inputs{x, table};
  if (weights) {
    check_weights("gather_sum", *weights, table);
    inputs.push_back(*weights);
  }
  return build(GatherSum{weights.has_value()}, std::move(inputs), s)[0];
}

array scatter_sum(const array& x, const array& table, int rows, const MaybeArray& weights, Stream s) {
  check_scatter("scatter_sum", x, table, rows);
  std::vector<array> inputs{x, table};
  if (weights) {
    check_weights("scatter_sum", *weights, table);
    inputs.push_back(*weights);
  }
  return build(Scatter{"scatter_sum", false, weights.has_value(), rows}, std::move(inputs), s)[0];
}

std::tuple<array, array> scatter_max(const array& x, const array& table, int rows, Stream s) {
  check_scatter("scatter_max", x, table, rows);
  auto out = build(Scatter{"scatter_max", true, false, rows}, {x, table}, s);
  return {out[0], out[1]};
}

}  // namespace lattice
