// Norms by channel: BatchNorm, and GroupNorm and InstanceNorm by batch element, with the activation and the sum that
// follow. The four functions of the Norms protocol, as the GPU kernels of the same names.
//
// Sums are taken over blocks of rows whose length depends on sizes only, and added in their order, so results do not
// depend on threads. Statistics are taken about the first row of each block and joined by their means: a large mean
// cancels nothing. Rows are read once a pass in their dtype, and nothing of their size is kept.
#include <algorithm>
#include <cmath>

#include "operations.h"
#include "thread_pool.h"

namespace lattice {
namespace {

// Rows of one segment that are added up in one go.
struct Block {
  int64_t first, count, segment;
};

// Cuts segments into blocks; without `starts` all rows are one segment.
std::vector<Block> blocks_of(const std::vector<int>& starts, int64_t rows, int64_t channels) {
  std::vector<int> whole{0, int(rows)};
  const auto& bounds = starts.empty() ? whole : starts;
  // Enough for many threads, but few sums to add.
  int64_t length = std::max<int64_t>({rows / 64 + 1, 16384 / std::max<int64_t>(channels, 1), 16});
  std::vector<Block> blocks;
  for (size_t s = 0; s + 1 < bounds.size(); ++s)
    for (int64_t first = bounds[s]; first < bounds[s + 1]; first += length)
      blocks.push_back({first, std::min<int64_t>(length, bounds[s + 1] - first), int64_t(s)});
  return blocks;
}

// Least rows of a unit of work that writes rows.
int64_t written_rows(int64_t channels) { return 1 + 16384 / std::max<int64_t>(channels, 1); }

// A norm's arrays, some of which are not given; in[k] is the next that is.
struct Arrays {
  const std::vector<Tensor>& in;
  size_t next;
  const Tensor* take(bool given) { return given ? &in[next++] : nullptr; }
};

// What a norm does: which arrays there are beside x, mean and var, and what follows.
struct Fit {
  bool weight, bias, residual, of;
  Act act;
  float eps;
  bool operator==(const Fit&) const = default;
};

// The lines of the segments, ready for the inner loops.
class Lines {
 public:
  Lines(const Fit& fit, const float* mean, const float* var, const float* weight, const float* bias,
        const float* terms, int64_t segments, int64_t c)
      : values_(6 * segments * c), c_(c), plane_(segments * c) {
    float* v = values_.data();
    for (int64_t at = 0; at < plane_; ++at) {
      float rstd = 1.0f / std::sqrt(var[at] + fit.eps);
      v[at] = mean[at];
      v[plane_ + at] = rstd;
      v[2 * plane_ + at] = weight ? rstd * weight[at] : rstd;
      v[3 * plane_ + at] = bias ? bias[at] : 0.0f;
      v[4 * plane_ + at] = terms ? terms[at] * rstd : 0.0f;
      v[5 * plane_ + at] = terms ? terms[plane_ + at] * rstd * rstd : 0.0f;
    }
  }
  NormLine operator[](int64_t segment) const {
    const float* v = values_.data() + segment * c_;
    return {v, v + plane_, v + 2 * plane_, v + 3 * plane_, v + 4 * plane_, v + 5 * plane_};
  }

 private:
  std::vector<float> values_;
  int64_t c_, plane_;
};

// Calls range(first, count, line) on ranges of rows of one segment, in threads.
template <class F>
void each_segment_range(int64_t rows, int64_t channels, const int32_t* of, const Lines& lines, F range) {
  parallel_range(rows, written_rows(channels), [&](int64_t begin, int64_t end) {
    while (begin < end) {
      int64_t stop = of ? begin + 1 : end;
      while (of && stop < end && of[stop] == of[begin]) ++stop;
      range(begin, stop - begin, lines[of ? of[begin] : 0]);
      begin = stop;
    }
  });
}

// mean, var, and running statistics moved by them, each (segments, C).
struct ChannelMoments {
  static constexpr const char* name = "channel_moments";
  std::vector<int> starts;
  bool order, running;
  float momentum;
  bool operator==(const ChannelMoments&) const = default;
  int segments() const { return starts.empty() ? 1 : int(starts.size()) - 1; }
  std::vector<mx::Shape> shapes(const std::vector<array>& in) const {
    return std::vector<mx::Shape>(4, {segments(), in[0].shape(1)});
  }
  std::vector<mx::Dtype> dtypes(const std::vector<array>&) const { return std::vector<mx::Dtype>(4, mx::float32); }

  void evaluate(const std::vector<Tensor>& in, const std::vector<Tensor>& out) const {
    auto& loops = inner_loops();
    Type type = type_of(in[0].dtype);
    int64_t c = in[0].dim(1);
    Arrays rest{in, 1};
    const Tensor *rows = rest.take(order), *old_mean = rest.take(running), *old_var = rest.take(running);
    auto blocks = blocks_of(starts, in[0].dim(0), c);
    std::vector<float> means(blocks.size() * c), squares(blocks.size() * c);
    parallel_for(int64_t(blocks.size()), [&](int64_t b) {
      auto [first, count, segment] = blocks[b];
      const int32_t* at = rows ? rows->as<int32_t>() : nullptr;
      float *about = scratch<float>(2, c), *sum = &means[b * c], *square = &squares[b * c];
      loops.load(type, in[0].as<char>() + (at ? at[first] : first) * c * bytes_of(type), c, about);
      loops.column_moments(type, in[0].data, at, first, count, c, about, sum, square);
      for (int64_t i = 0; i < c; ++i) {
        float d = sum[i] / float(count), m2 = square[i] - sum[i] * d;
        sum[i] = about[i] + d;
        square[i] = m2 < 0.0f ? 0.0f : m2;
      }
    });
    for (int64_t s = 0, b = 0; s < segments(); ++s) {
      size_t end = b;
      while (end < blocks.size() && blocks[end].segment == s) ++end;
      std::vector<float> counts;
      for (; b < int64_t(end); ++b) counts.push_back(float(blocks[b].count));
      int64_t first = (b - int64_t(counts.size())) * c;
      combine(counts, means.data() + first, squares.data() + first, c, c, s, old_mean, old_var, momentum, out);
    }
  }

  // Joins the statistics of some rows each, lines of `pitch` floats.
  static void combine(const std::vector<float>& counts, const float* means, const float* squares, int64_t pitch,
                      int64_t c, int64_t segment, const Tensor* old_mean, const Tensor* old_var, float momentum,
                      const std::vector<Tensor>& out) {
    float rows = 0.0f;
    for (float count : counts) rows += count;
    for (int64_t i = 0; i < c; ++i) {
      float about = counts.empty() ? 0.0f : means[i], moved = 0.0f, total = 0.0f;
      for (size_t b = 0; b < counts.size(); ++b) moved += counts[b] * (means[b * pitch + i] - about);
      float mean = rows > 0.0f ? about + moved / rows : 0.0f;
      for (size_t b = 0; b < counts.size(); ++b) {
        float d = means[b * pitch + i] - mean;
        total += squares[b * pitch + i] + counts[b] * d * d;
      }
      int64_t at = segment * c + i;
      float var = rows > 0.0f ? total / rows : 0.0f, unbiased = rows > 1.0f ? total / (rows - 1.0f) : var;
      out[0].as<float>()[at] = mean;
      out[1].as<float>()[at] = var;
      if (old_mean) {
        float before = old_var->as<float>()[at];
        mean = (1.0f - momentum) * old_mean->as<float>()[at] + momentum * mean;
        unbiased = rows > 1.0f ? (1.0f - momentum) * before + momentum * unbiased : before;
      }
      out[2].as<float>()[at] = mean;
      out[3].as<float>()[at] = unbiased;
    }
  }
};

// The same of all rows, from lines of their statistics: how many rows, means, and squares about these.
struct CombineMoments {
  static constexpr const char* name = "combine_moments";
  bool running;
  float momentum;
  bool operator==(const CombineMoments&) const = default;
  std::vector<mx::Shape> shapes(const std::vector<array>& in) const {
    return std::vector<mx::Shape>(4, {1, in[0].shape(2)});
  }
  std::vector<mx::Dtype> dtypes(const std::vector<array>&) const { return std::vector<mx::Dtype>(4, mx::float32); }

  void evaluate(const std::vector<Tensor>& in, const std::vector<Tensor>& out) const {
    int64_t c = in[0].dim(2);
    const float* lines = in[0].as<float>();
    std::vector<float> counts;
    for (int64_t b = 0; b < in[0].dim(0); ++b) counts.push_back(lines[b * 3 * c]);
    const Tensor *old_mean = running ? &in[1] : nullptr, *old_var = running ? &in[2] : nullptr;
    ChannelMoments::combine(counts, lines + c, lines + 2 * c, 3 * c, c, 0, old_mean, old_var, momentum, out);
  }
};

// y = act(norm(x) + residual).
struct NormalizeChannels {
  static constexpr const char* name = "normalize_channels";
  Fit fit;
  bool operator==(const NormalizeChannels&) const = default;
  std::vector<mx::Shape> shapes(const std::vector<array>& in) const { return {in[0].shape()}; }
  std::vector<mx::Dtype> dtypes(const std::vector<array>& in) const { return {in[0].dtype()}; }

  void evaluate(const std::vector<Tensor>& in, const std::vector<Tensor>& out) const {
    auto& loops = inner_loops();
    Type type = type_of(in[0].dtype);
    int64_t n = in[0].dim(0), c = in[0].dim(1);
    Arrays rest{in, 3};
    const Tensor *weight = rest.take(fit.weight), *bias = rest.take(fit.bias);
    const Tensor *residual = rest.take(fit.residual), *of = rest.take(fit.of);
    Lines lines(fit, in[1].as<float>(), in[2].as<float>(), weight ? weight->as<float>() : nullptr,
                bias ? bias->as<float>() : nullptr, nullptr, in[1].dim(0), c);
    each_segment_range(n, c, of ? of->as<int32_t>() : nullptr, lines,
                       [&](int64_t first, int64_t count, const NormLine& line) {
                         loops.normalize_rows(type, in[0].data, residual ? residual->data : nullptr, first, count, c,
                                              line, fit.act, out[0].data);
                       });
  }
};

// sums (2, segments, C) of g and g xhat, and their means times the weight.
struct ChannelGradientSums {
  static constexpr const char* name = "channel_gradient_sums";
  Fit fit;
  std::vector<int> starts;
  bool order;
  bool operator==(const ChannelGradientSums&) const = default;
  std::vector<mx::Shape> shapes(const std::vector<array>& in) const {
    return std::vector<mx::Shape>(2, {2, in[2].shape(0), in[2].shape(1)});
  }
  std::vector<mx::Dtype> dtypes(const std::vector<array>&) const { return {mx::float32, mx::float32}; }

  void evaluate(const std::vector<Tensor>& in, const std::vector<Tensor>& out) const {
    auto& loops = inner_loops();
    Type type = type_of(in[0].dtype);
    int64_t c = in[1].dim(1), segments = in[2].dim(0), plane = segments * c;
    Arrays rest{in, 4};
    const Tensor *weight = rest.take(fit.weight), *bias = rest.take(fit.bias);
    const Tensor *residual = rest.take(fit.residual), *rows = rest.take(order);
    const float* w = weight ? weight->as<float>() : nullptr;
    Lines lines(fit, in[2].as<float>(), in[3].as<float>(), w, bias ? bias->as<float>() : nullptr, nullptr, segments,
                c);
    auto blocks = blocks_of(starts, in[1].dim(0), c);
    std::vector<float> sums(blocks.size() * c), products(blocks.size() * c), counts(segments);
    parallel_for(int64_t(blocks.size()), [&](int64_t b) {
      auto [first, count, segment] = blocks[b];
      loops.norm_gradient_sums(type, in[0].data, in[1].data, residual ? residual->data : nullptr,
                               rows ? rows->as<int32_t>() : nullptr, first, count, c, lines[segment], fit.act,
                               &sums[b * c], &products[b * c]);
    });
    float *total = out[0].as<float>(), *terms = out[1].as<float>();
    std::fill(total, total + 2 * plane, 0.0f);
    for (size_t b = 0; b < blocks.size(); ++b) {
      float* to = total + blocks[b].segment * c;
      counts[blocks[b].segment] += float(blocks[b].count);
      for (int64_t i = 0; i < c; ++i) {
        to[i] += sums[b * c + i];
        to[plane + i] += products[b * c + i];
      }
    }
    for (int64_t at = 0; at < plane; ++at) {
      float share = (w ? w[at] : 1.0f) / std::max(counts[at / c], 1.0f);
      terms[at] = share * total[at];
      terms[plane + at] = share * total[plane + at];
    }
  }
};

// dx, and g where a residual has a gradient of its own.
struct ChannelGradient {
  static constexpr const char* name = "channel_gradient";
  Fit fit;
  bool terms;
  bool operator==(const ChannelGradient&) const = default;
  std::vector<mx::Shape> shapes(const std::vector<array>& in) const {
    return std::vector<mx::Shape>(fit.residual ? 2 : 1, in[0].shape());
  }
  std::vector<mx::Dtype> dtypes(const std::vector<array>& in) const {
    return std::vector<mx::Dtype>(fit.residual ? 2 : 1, in[0].dtype());
  }

  void evaluate(const std::vector<Tensor>& in, const std::vector<Tensor>& out) const {
    auto& loops = inner_loops();
    Type type = type_of(in[0].dtype);
    int64_t n = in[1].dim(0), c = in[1].dim(1);
    Arrays rest{in, 4};
    const Tensor *weight = rest.take(fit.weight), *bias = rest.take(fit.bias);
    const Tensor *residual = rest.take(fit.residual), *of = rest.take(fit.of), *mean_terms = rest.take(terms);
    Lines lines(fit, in[2].as<float>(), in[3].as<float>(), weight ? weight->as<float>() : nullptr,
                bias ? bias->as<float>() : nullptr, mean_terms ? mean_terms->as<float>() : nullptr, in[2].dim(0), c);
    each_segment_range(n, c, of ? of->as<int32_t>() : nullptr, lines,
                       [&](int64_t first, int64_t count, const NormLine& line) {
                         loops.norm_gradient(type, in[0].data, in[1].data, residual ? residual->data : nullptr, first,
                                             count, c, line, fit.act, out[0].data,
                                             residual ? out[1].data : nullptr);
                       });
  }
};

void check_rows(const char* who, const array& x) {
  want_rank(who, "x", x, 2, "(N, C)");
  want_float(who, "x", x);
}

void check_like(const char* who, const char* what, const array& a, const array& x) {
  want_same_dtype(who, what, a, "x", x);
  if (a.shape() != x.shape())
    fail(who, std::string(what) + " must have the shape of x, " + text(x.shape()) + ", but has " + text(a.shape()) +
                  ".");
}

void check_line(const char* who, const char* what, const array& a, const array& x, size_t rank) {
  want_rank(who, what, a, rank, rank == 1 ? "(C,)" : "(S, C)");
  want_dtype(who, what, a, mx::float32);
  if (a.shape(-1) != x.shape(1)) fail(who, std::string(what) + " must have the channels of x.");
}

void check_starts(const char* who, const std::vector<int>& starts, const array& x, const MaybeArray& order) {
  if (!starts.empty() && (starts.front() != 0 || starts.back() != x.shape(0) ||
                          !std::is_sorted(starts.begin(), starts.end())))
    fail(who, "starts must ascend from 0 to the rows of x.");
  if (!order) return;
  want_dtype(who, "order", *order, mx::int32);
  if (order->shape() != mx::Shape{x.shape(0)}) fail(who, "order must have one entry a row of x.");
}

// An activation of a norm by its kind: see mlx_lattice/epilogue.py.
Act activation_of(const char* who, int kind, float slope) {
  const int elu = int(Activation::leaky_relu) - 1;
  if (kind < 0 || kind > elu) fail(who, "act must be from 0 to " + std::to_string(elu) + ".");
  if (kind == elu) return {Activation::elu, slope};
  if (kind > 0) return {Activation(kind + 1)};
  return {slope == 0.0f ? Activation::relu : slope == 1.0f ? Activation::none : Activation::leaky_relu, slope};
}

// Checks a norm's optional arrays and appends those that are given.
Fit fitted(const char* who, std::vector<array>& inputs, const array& x, const array& mean, const array& var,
           const MaybeArray& weight, const MaybeArray& bias, const MaybeArray& residual, const MaybeArray& of, int act,
           float eps, float slope) {
  check_rows(who, x);
  check_line(who, "mean", mean, x, 2);
  check_line(who, "var", var, x, 2);
  if (mean.shape() != var.shape()) fail(who, "mean and var must have one shape.");
  for (auto [what, line] : {std::pair{"weight", &weight}, std::pair{"bias", &bias}}) {
    if (!*line) continue;
    check_line(who, what, **line, x, (*line)->ndim() == 1 ? 1 : 2);
    if ((*line)->size() != mean.size()) fail(who, std::string(what) + " must have a line a segment.");
  }
  if (residual) check_like(who, "residual", *residual, x);
  if (of) want_dtype(who, "of", *of, mx::int32);
  if (of && of->shape() != mx::Shape{x.shape(0)}) fail(who, "of must have one entry a row of x.");
  for (auto* maybe : {&weight, &bias, &residual, &of})
    if (*maybe) inputs.push_back(**maybe);
  return {weight.has_value(), bias.has_value(), residual.has_value(), of.has_value(), activation_of(who, act, slope), eps};
}

}  // namespace

std::tuple<array, array, array, array> channel_moments(const array& x, const std::vector<int>& starts,
                                                       const MaybeArray& order, const MaybeArray& running_mean,
                                                       const MaybeArray& running_var, float momentum, Stream s) {
  const char* who = "channel_moments";
  check_rows(who, x);
  check_starts(who, starts, x, order);
  std::vector<array> inputs{x};
  if (order) inputs.push_back(*order);
  if (running_mean.has_value() != running_var.has_value()) fail(who, "give both running statistics, or neither.");
  if (running_mean) {
    check_line(who, "running_mean", *running_mean, x, 1);
    check_line(who, "running_var", *running_var, x, 1);
    if (!starts.empty()) fail(who, "running statistics are of all rows, not of segments.");
    inputs.insert(inputs.end(), {*running_mean, *running_var});
  }
  auto out = build(ChannelMoments{starts, order.has_value(), running_mean.has_value(), momentum}, inputs, s);
  return {out[0], out[1], out[2], out[3]};
}

std::tuple<array, array, array, array> combine_moments(const array& lines, const MaybeArray& running_mean,
                                                       const MaybeArray& running_var, float momentum, Stream s) {
  const char* who = "combine_moments";
  want_rank(who, "lines", lines, 3, "(L, 3, C)");
  want_dtype(who, "lines", lines, mx::float32);
  if (lines.shape(1) != 3 || lines.shape(2) < 1) fail(who, "lines must have shape (L, 3, C).");
  if (running_mean.has_value() != running_var.has_value()) fail(who, "give both running statistics, or neither.");
  std::vector<array> inputs{lines};
  for (auto* maybe : {&running_mean, &running_var}) {
    if (!*maybe) continue;
    want_dtype(who, "running statistics", **maybe, mx::float32);
    if ((*maybe)->shape() != mx::Shape{lines.shape(2)}) fail(who, "running statistics must have one value a channel.");
    inputs.push_back(**maybe);
  }
  auto out = build(CombineMoments{running_mean.has_value(), momentum}, inputs, s);
  return {out[0], out[1], out[2], out[3]};
}

array normalize_channels(const array& x, const array& mean, const array& var, const MaybeArray& weight,
                         const MaybeArray& bias, const MaybeArray& residual, const MaybeArray& of, int act, float eps,
                         float slope, Stream s) {
  std::vector<array> inputs{x, mean, var};
  auto fit = fitted("normalize_channels", inputs, x, mean, var, weight, bias, residual, of, act, eps, slope);
  return build(NormalizeChannels{fit}, inputs, s)[0];
}

std::tuple<array, array> channel_gradient_sums(const array& dy, const array& x, const array& mean, const array& var,
                                               const MaybeArray& weight, const MaybeArray& bias,
                                               const MaybeArray& residual, const std::vector<int>& starts,
                                               const MaybeArray& order, int act, float eps, float slope, Stream s) {
  const char* who = "channel_gradient_sums";
  std::vector<array> inputs{dy, x, mean, var};
  auto fit = fitted(who, inputs, x, mean, var, weight, bias, residual, {}, act, eps, slope);
  check_like(who, "dy", dy, x);
  check_starts(who, starts, x, order);
  if (mean.shape(0) != (starts.empty() ? 1 : int(starts.size()) - 1)) fail(who, "mean must have a line a segment.");
  if (order) inputs.push_back(*order);
  auto out = build(ChannelGradientSums{fit, starts, order.has_value()}, inputs, s);
  return {out[0], out[1]};
}

std::vector<array> channel_gradient(const array& dy, const array& x, const array& mean, const array& var,
                                    const MaybeArray& weight, const MaybeArray& bias, const MaybeArray& residual,
                                    const MaybeArray& of, const MaybeArray& terms, int act, float eps, float slope,
                                    Stream s) {
  const char* who = "channel_gradient";
  std::vector<array> inputs{dy, x, mean, var};
  auto fit = fitted(who, inputs, x, mean, var, weight, bias, residual, of, act, eps, slope);
  check_like(who, "dy", dy, x);
  if (terms) {
    check_line(who, "terms", *terms, x, 3);
    if (terms->shape(0) != 2 || terms->shape(1) != mean.shape(0)) fail(who, "terms must have shape (2, S, C).");
    inputs.push_back(*terms);
  }
  return build(ChannelGradient{fit, terms.has_value()}, inputs, s);
}

}  // namespace lattice
