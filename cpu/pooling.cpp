// Memory-bound reductions over rows: pooling over a neighbour table, segments of a CSR, weighted interpolation.
//
// Each output row is one accumulator of C floats in L1; x rows are read once per edge, y is written once; no atomics, so
// results do not depend on threads. Rows without edges give 0 (and index -1), never a leaked initial value.
#include <algorithm>
#include <limits>

#include "operations.h"
#include "thread_pool.h"

namespace lattice {
namespace {

int64_t checked(const char* who, int64_t i, int64_t n) {
  if (i >= n)
    fail(who, "an edge names row " + std::to_string(i) + ", but there are " + std::to_string(n) + " rows.");
  return i;
}

int64_t row_grain(int64_t width) { return 1 + 8192 / std::max<int64_t>(width, 1); }

struct PoolMax {
  static constexpr const char* name = "PoolMax";
  bool operator==(const PoolMax&) const = default;
  std::vector<mx::Shape> shapes(const std::vector<array>& in) const {
    mx::Shape s{in[1].shape(0), in[0].shape(1)};
    return {s, s};
  }
  std::vector<mx::Dtype> dtypes(const std::vector<array>& in) const { return {in[0].dtype(), mx::int32}; }

  void run(const std::vector<Tensor>& in, const std::vector<Tensor>& out) const {
    auto& kernel = kernels();
    Type type = type_of(in[0].dtype);
    int64_t n_in = in[0].dim(0), c = in[0].dim(1), volume = in[1].dim(1), size = bytes_of(type);
    parallel_range(in[1].dim(0), row_grain(c * volume), [&](int64_t begin, int64_t end) {
      float* best = scratch<float>(2, c);
      for (int64_t o = begin; o < end; ++o) {
        int32_t* index = out[1].as<int32_t>() + o * c;
        std::fill(best, best + c, 0.0f);
        std::fill(index, index + c, -1);
        for (int64_t k = 0; k < volume; ++k) {
          int64_t i = checked("pool_max", in[1].as<int32_t>()[o * volume + k], n_in);
          if (i >= 0) kernel.maximum(type, in[0].as<char>() + i * c * size, c, int32_t(i), best, index);
        }
        kernel.store(type, best, c, out[0].as<char>() + o * c * size);
      }
    });
  }
};

// dx[i, c] = sum over o = in_out[i, :] of dy[o, c] where index[o, c] == i.
struct PoolMaxGrad {
  static constexpr const char* name = "PoolMaxGrad";
  bool operator==(const PoolMaxGrad&) const = default;
  std::vector<mx::Shape> shapes(const std::vector<array>& in) const { return {{in[2].shape(0), in[0].shape(1)}}; }
  std::vector<mx::Dtype> dtypes(const std::vector<array>& in) const { return {in[0].dtype()}; }

  void run(const std::vector<Tensor>& in, const std::vector<Tensor>& out) const {
    auto& kernel = kernels();
    Type type = type_of(in[0].dtype);
    int64_t n_out = in[0].dim(0), c = in[0].dim(1), volume = in[2].dim(1), size = bytes_of(type);
    parallel_range(in[2].dim(0), row_grain(c * volume), [&](int64_t begin, int64_t end) {
      float *sum = scratch<float>(2, c), *row = scratch<float>(3, c);
      for (int64_t i = begin; i < end; ++i) {
        std::fill(sum, sum + c, 0.0f);
        const int32_t* reached = in[2].as<int32_t>() + i * volume;
        for (int64_t k = 0; k < volume; ++k) {
          int64_t o = checked("pool_max_grad", reached[k], n_out);
          // An arbitrary relation may reach one output through two offsets; its gradient counts once.
          if (o < 0 || std::find(reached, reached + k, o) != reached + k) continue;
          kernel.load(type, in[0].as<char>() + o * c * size, c, row);
          const int32_t* index = in[1].as<int32_t>() + o * c;
          for (int64_t j = 0; j < c; ++j) sum[j] += index[j] == i ? row[j] : 0.0f;
        }
        kernel.store(type, sum, c, out[0].as<char>() + i * c * size);
      }
    });
  }
};

// y[o] = sum over j of weights[o, j] * x[table[o, j]], weights 1 where none are given.
struct PoolSum {
  static constexpr const char* name = "PoolSum";
  bool weighted;
  bool operator==(const PoolSum&) const = default;
  std::vector<mx::Shape> shapes(const std::vector<array>& in) const { return {{in[1].shape(0), in[0].shape(1)}}; }
  std::vector<mx::Dtype> dtypes(const std::vector<array>& in) const { return {in[0].dtype()}; }

  void run(const std::vector<Tensor>& in, const std::vector<Tensor>& out) const {
    auto& kernel = kernels();
    Type type = type_of(in[0].dtype);
    int64_t n_in = in[0].dim(0), c = in[0].dim(1), volume = in[1].dim(1), size = bytes_of(type);
    parallel_range(in[1].dim(0), row_grain(c * volume), [&](int64_t begin, int64_t end) {
      float* sum = scratch<float>(2, c);
      for (int64_t o = begin; o < end; ++o) {
        std::fill(sum, sum + c, 0.0f);
        for (int64_t k = 0; k < volume; ++k) {
          int64_t i = checked("pool_sum", in[1].as<int32_t>()[o * volume + k], n_in);
          float weight = weighted ? in[2].as<float>()[o * volume + k] : 1.0f;
          if (i >= 0) kernel.accumulate(type, in[0].as<char>() + i * c * size, c, weight, sum);
        }
        kernel.store(type, sum, c, out[0].as<char>() + o * c * size);
      }
    });
  }
};

enum class Reduction : int { sum, mean, max };

// y[s] = the reduction over e in [starts[s], starts[s + 1]) of weights[e] * x[rows[e]] (rows: e, weights: 1 by default).
struct SegmentReduce {
  static constexpr const char* name = "SegmentReduce";
  Reduction op;
  bool has_rows, has_weights;
  bool operator==(const SegmentReduce&) const = default;
  std::vector<mx::Shape> shapes(const std::vector<array>& in) const {
    return {{in[1].shape(0) - 1, in[0].shape(1)}};
  }
  std::vector<mx::Dtype> dtypes(const std::vector<array>& in) const { return {in[0].dtype()}; }

  void run(const std::vector<Tensor>& in, const std::vector<Tensor>& out) const {
    auto& kernel = kernels();
    Type type = type_of(in[0].dtype);
    int64_t n_in = in[0].dim(0), c = in[0].dim(1), size = bytes_of(type);
    const int32_t* starts = in[1].as<int32_t>();
    const int32_t* rows = has_rows ? in[2].as<int32_t>() : nullptr;
    const float* weights = has_weights ? in.back().as<float>() : nullptr;
    int64_t n_edges = has_rows ? in[2].dim(0) : has_weights ? in.back().dim(0) : n_in;
    int64_t segments = in[1].dim(0) - 1;
    int64_t mean_length = n_edges / std::max<int64_t>(segments, 1) + 1;
    parallel_range(segments, row_grain(c * mean_length), [&](int64_t begin, int64_t end) {
      float* sum = scratch<float>(2, c);
      int32_t* index = scratch<int32_t>(3, c);
      for (int64_t s = begin; s < end; ++s) {
        if (starts[s] < 0 || starts[s + 1] < starts[s] || starts[s + 1] > n_edges)
          fail("segment_reduce", "starts must rise from 0 to the number of edges, but segment " + std::to_string(s) +
                                     " spans [" + std::to_string(starts[s]) + ", " + std::to_string(starts[s + 1]) +
                                     ") of " + std::to_string(n_edges) + " edges.");
        std::fill(sum, sum + c, 0.0f);
        std::fill(index, index + c, -1);
        for (int64_t e = starts[s]; e < starts[s + 1]; ++e) {
          int64_t i = checked("segment_reduce", rows ? rows[e] : e, n_in);
          if (i < 0) fail("segment_reduce", "rows must not be negative.");
          const char* x = in[0].as<char>() + i * c * size;
          if (op == Reduction::max)
            kernel.maximum(type, x, c, int32_t(i), sum, index);
          else
            kernel.accumulate(type, x, c, weights ? weights[e] : 1.0f, sum);
        }
        if (op == Reduction::mean && starts[s + 1] > starts[s])
          for (int64_t j = 0; j < c; ++j) sum[j] /= float(starts[s + 1] - starts[s]);
        kernel.store(type, sum, c, out[0].as<char>() + s * c * size);
      }
    });
  }
};

void check(const char* who, const array& x, const array& table) {
  want_rank(who, "x", x, 2, "(N, C)");
  want_float(who, "x", x);
  want_rank(who, "table", table, 2, "(N_out, K)");
  want_dtype(who, "table", table, mx::int32);
}

}  // namespace

std::tuple<array, array> pool_max(const array& x, const array& table, Stream s) {
  check("pool_max", x, table);
  auto out = build(PoolMax{}, {x, table}, s);
  return {out[0], out[1]};
}

array pool_max_grad(const array& dy, const array& index, const array& in_out, Stream s) {
  check("pool_max_grad", dy, in_out);
  want_dtype("pool_max_grad", "index", index, mx::int32);
  if (index.shape() != dy.shape())
    fail("pool_max_grad", "index must have dy's shape " + text(dy.shape()) + ", but has " + text(index.shape()) + ".");
  return build(PoolMaxGrad{}, {dy, index, in_out}, s)[0];
}

array pool_sum(const array& x, const array& table, const MaybeArray& weights, Stream s) {
  check("pool_sum", x, table);
  std::vector<array> inputs{x, table};
  if (weights) {
    want_dtype("pool_sum", "weights", *weights, mx::float32);
    if (weights->shape() != table.shape())
      fail("pool_sum", "weights must have the table's shape " + text(table.shape()) + ", but has " +
                           text(weights->shape()) + ".");
    inputs.push_back(*weights);
  }
  return build(PoolSum{weights.has_value()}, std::move(inputs), s)[0];
}

array segment_reduce(const array& x, const array& starts, const MaybeArray& rows, const MaybeArray& weights,
                     const std::string& op, Stream s) {
  const char* who = "segment_reduce";
  want_rank(who, "x", x, 2, "(N, C)");
  want_float(who, "x", x);
  want_rank(who, "starts", starts, 1, "(segments + 1,)");
  want_dtype(who, "starts", starts, mx::int32);
  if (starts.shape(0) < 1) fail(who, "starts must hold segments + 1 values, but is empty.");
  if (op != "sum" && op != "mean" && op != "max") fail(who, "op must be 'sum', 'mean' or 'max', but is '" + op + "'.");
  if (weights && op == "max") fail(who, "a maximum takes no weights.");
  std::vector<array> inputs{x, starts};
  if (rows) {
    want_rank(who, "rows", *rows, 1, "(E,)");
    want_dtype(who, "rows", *rows, mx::int32);
    inputs.push_back(*rows);
  }
  if (weights) {
    want_rank(who, "weights", *weights, 1, "(E,)");
    want_dtype(who, "weights", *weights, mx::float32);
    if (rows && rows->shape() != weights->shape())
      fail(who, "rows and weights must have one value per edge, but have shapes " + text(rows->shape()) + " and " +
                    text(weights->shape()) + ".");
    inputs.push_back(*weights);
  }
  Reduction reduction = op == "sum" ? Reduction::sum : op == "mean" ? Reduction::mean : Reduction::max;
  return build(SegmentReduce{reduction, rows.has_value(), weights.has_value()}, std::move(inputs), s)[0];
}

}  // namespace lattice
