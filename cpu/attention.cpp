// Attention among the rows of each group, forward and back, with no padding and no scores in memory.
//
// A group is a list of rows, which are its keys; the first of them are its queries too, or there is a second list, of
// rows of another array. Every such row is a query of one group; without keys its result is 0. Keys come in blocks, whose softmax is joined to that of the blocks before (Dao et al., FlashAttention,
// 2022): a tile of scores stays in the caches. The way back computes the scores again, from the logarithm of each
// query's sum. A row's result depends on its group alone, and not on threads: keys are added in their order.
#include <algorithm>
#include <cmath>

#include "operations.h"
#include "thread_pool.h"

namespace lattice {
namespace {

constexpr int64_t key_block = 256, query_tile = 24, query_chunk = 384, back_tile = 48;

// Rows of an (N, heads, D) array as floats, whatever its strides.
class Heads {
 public:
  explicit Heads(const Tensor& t) : t_(t), type_(type_of(t.dtype)) {}
  int64_t width() const { return t_.dim(2); }
  void read(int64_t row, int64_t head, float* to) const {
    auto& loops = inner_loops();
    int64_t size = bytes_of(type_);
    const char* at = t_.as<char>() + (row * t_.strides[0] + head * t_.strides[1]) * size;
    if (t_.strides[2] == 1 || width() == 1) return loops.load(type_, at, width(), to);
    for (int64_t i = 0; i < width(); ++i) loops.load(type_, at + i * t_.strides[2] * size, 1, to + i);
  }
  // The given rows, `ld` floats apart, with zeros behind each.
  void read(const int32_t* rows, int64_t n, int64_t head, float* to, int64_t ld, float factor = 1.0f) const {
    for (int64_t e = 0; e < n; ++e, to += ld) {
      read(rows[e], head, to);
      for (int64_t i = 0; factor != 1.0f && i < width(); ++i) to[i] *= factor;
      std::fill(to + width(), to + ld, 0.0f);
    }
  }

 private:
  const Tensor& t_;
  Type type_;
};

// Writes a row of a contiguous (rows, heads, D) array.
void write(const Tensor& t, int64_t row, int64_t head, const float* from) {
  int64_t at = (row * t.dim(1) + head) * t.dim(2);
  Type type = type_of(t.dtype);
  inner_loops().store(type, from, t.dim(2), t.as<char>() + at * bytes_of(type));
}

// Working memory of a unit, handed out in pieces of whole cache lines.
class Pieces {
 public:
  explicit Pieces(std::initializer_list<int64_t> lengths) {
    int64_t all = 0;
    for (int64_t n : lengths) all += lines(n);
    next_ = scratch<float>(0, all);
  }
  float* take(int64_t n) {
    float* here = next_;
    next_ += lines(n);
    return here;
  }

 private:
  static int64_t lines(int64_t n) { return (n + 15) / 16 * 16; }
  float* next_;
};

// The groups: keys are rows[starts[g]:starts[g + 1]]; queries[g] queries are the first of them, or those from
// asked[begins[g]] on.
struct Groups {
  const int32_t *rows, *starts, *queries, *asked, *begins;
  int64_t count;
  Groups(const std::vector<Tensor>& in, size_t at)
      : rows(in[at].as<int32_t>()), starts(in[at + 1].as<int32_t>()), queries(in[at + 2].as<int32_t>()),
        asked(in.size() > at + 3 ? in[at + 3].as<int32_t>() : rows),
        begins(in.size() > at + 3 ? in[at + 4].as<int32_t>() : starts), count(in[at + 2].dim(0)) {}
  const int32_t* of(int64_t g) const { return rows + starts[g]; }
  const int32_t* queries_of(int64_t g) const { return asked + begins[g]; }
  int64_t keys(int64_t g) const { return starts[g + 1] - starts[g]; }
};

const float* zeros() {
  static const std::vector<float> values(std::max<int64_t>(key_block, 1 << 12) + 64, 0.0f);
  return values.data();
}
const int32_t* numbers() {
  static const std::vector<int32_t> values = [] {
    std::vector<int32_t> v(std::max(query_tile, back_tile));
    for (size_t i = 0; i < v.size(); ++i) v[i] = int32_t(i);
    return v;
  }();
  return values.data();
}

// y (N, heads, D_v), and (N, heads) logarithms of the sums of exponentials.
struct Attention {
  static constexpr const char* name = "attention";
  float scale;
  bool operator==(const Attention&) const = default;
  bool reads_strides(size_t input) const { return input < 3; }
  std::vector<mx::Shape> shapes(const std::vector<array>& in) const {
    int n = in[0].shape(0), heads = in[0].shape(1);
    return {{n, heads, in[2].shape(2)}, {n, heads}};
  }
  std::vector<mx::Dtype> dtypes(const std::vector<array>& in) const { return {in[0].dtype(), mx::float32}; }

  void evaluate(const std::vector<Tensor>& in, const std::vector<Tensor>& out) const {
    struct Unit {
      int64_t group, head, first, count;
    };
    Groups groups(in, 3);
    std::vector<Unit> units;
    for (int64_t g = 0; g < groups.count; ++g)
      for (int64_t h = 0; h < in[0].dim(1); ++h)
        for (int64_t first = 0; first < groups.queries[g]; first += query_chunk)
          units.push_back({g, h, first, std::min<int64_t>(query_chunk, groups.queries[g] - first)});
    parallel_for(int64_t(units.size()), [&](int64_t u) {
      auto [group, head, first, count] = units[u];
      attend(in, out, groups.of(group), groups.keys(group), groups.queries_of(group) + first, count, head);
    });
  }

 private:
  void attend(const std::vector<Tensor>& in, const std::vector<Tensor>& out, const int32_t* rows, int64_t keys,
              const int32_t* asked, int64_t count, int64_t head) const {
    auto& loops = inner_loops();
    Heads q(in[0]), k(in[1]), v(in[2]);
    int64_t d = q.width(), e = v.width(), width = loops.padded(e), heads = in[0].dim(1);
    int64_t source = head / (heads / in[1].dim(1)), block = std::min(keys, key_block);
    int64_t wide = loops.padded(block), most = std::max(d, e);
    Pieces pieces{count * d, count * width, count, count, block * most, d * wide, block * width, query_tile * wide};
    float *queries = pieces.take(count * d), *y = pieces.take(count * width), *peak = pieces.take(count);
    float *total = pieces.take(count), *plain = pieces.take(block * most), *key_panel = pieces.take(d * wide);
    float *value_panel = pieces.take(block * width), *scores = pieces.take(query_tile * wide);
    q.read(asked, count, head, queries, d, scale);
    std::fill(y, y + count * width, 0.0f);
    std::fill(peak, peak + count, -INFINITY);
    std::fill(total, total + count, 0.0f);
    for (int64_t at = 0; at < keys; at += block) {
      int64_t n = std::min(block, keys - at), ld = loops.padded(n);
      k.read(rows + at, n, source, plain, d);
      loops.pack(Type::f32, plain, d, true, d, n, key_panel);
      v.read(rows + at, n, source, plain, e);
      loops.pack(Type::f32, plain, e, false, n, e, value_panel);
      for (int64_t t = 0; t < count; t += query_tile) {
        int64_t some = std::min(query_tile, count - t);
        loops.gather_gemm(queries + t * d, d, nullptr, nullptr, some, key_panel, d, n, zeros(), scores, ld);
        loops.soften(scores, ld, some, n, peak + t, total + t, y + t * width, width);
        loops.gather_gemm(scores, ld, nullptr, numbers(), some, value_panel, n, e, zeros(), y + t * width, width);
      }
    }
    for (int64_t i = 0; i < count; ++i) {
      int64_t row = asked[i];
      for (int64_t c = 0; keys > 0 && c < e; ++c) y[i * width + c] /= total[i];
      write(out[0], row, head, y + i * width);
      out[1].as<float>()[row * heads + head] = peak[i] + std::log(total[i]);
    }
  }
};

// dq (N, heads, D), and dk and dv of each place in `rows`: (S, kv_heads, D) and (S, kv_heads, D_v).
struct AttentionGradient {
  static constexpr const char* name = "attention_gradient";
  float scale;
  bool operator==(const AttentionGradient&) const = default;
  bool reads_strides(size_t input) const { return input < 4; }
  std::vector<mx::Shape> shapes(const std::vector<array>& in) const {
    int places = in[6].shape(0), heads = in[2].shape(1);
    return {in[1].shape(), {places, heads, in[2].shape(2)}, {places, heads, in[3].shape(2)}};
  }
  std::vector<mx::Dtype> dtypes(const std::vector<array>& in) const {
    return {in[1].dtype(), in[1].dtype(), in[1].dtype()};
  }

  void evaluate(const std::vector<Tensor>& in, const std::vector<Tensor>& out) const {
    Groups groups(in, 6);
    int64_t heads = in[2].dim(1);
    parallel_for(groups.count * heads, [&](int64_t u) { go_back(in, out, groups, u / heads, u % heads); });
  }

 private:
  void go_back(const std::vector<Tensor>& in, const std::vector<Tensor>& out, const Groups& groups, int64_t group,
               int64_t source) const {
    auto& loops = inner_loops();
    Heads dy(in[0]), q(in[1]), k(in[2]), v(in[3]), y(in[4]);
    const float* lse = in[5].as<float>();
    const int32_t *rows = groups.of(group), *asked = groups.queries_of(group);
    int64_t keys = groups.keys(group), count = groups.queries[group], heads = in[1].dim(1);
    int64_t shared = heads / in[2].dim(1), d = q.width(), e = v.width();
    int64_t dw = loops.padded(d), ew = loops.padded(e), block = std::min(keys, key_block);
    int64_t wide = loops.padded(block), all = shared * count;
    Pieces pieces{all * dw, all * dw, all * ew, all, all, block * std::max(dw, ew), d * wide, e * wide, block * dw,
                  back_tile * wide, back_tile * wide, block * dw, block * ew};
    float *queries = pieces.take(all * dw), *dq = pieces.take(all * dw), *dys = pieces.take(all * ew);
    float *sums = pieces.take(all), *delta = pieces.take(all), *plain = pieces.take(block * std::max(dw, ew));
    float *key_panel = pieces.take(d * wide), *value_panel = pieces.take(e * wide), *back = pieces.take(block * dw);
    float *p = pieces.take(back_tile * wide), *ds = pieces.take(back_tile * wide);
    float *dk = pieces.take(block * dw), *dv = pieces.take(block * ew);
    for (int64_t s = 0; s < shared; ++s) {
      int64_t head = source * shared + s;
      q.read(asked, count, head, queries + s * count * dw, dw, scale);
      dy.read(asked, count, head, dys + s * count * ew, ew);
      for (int64_t i = 0; i < count; ++i) {
        y.read(asked[i], head, plain);
        float sum = 0.0f;
        for (int64_t c = 0; c < e; ++c) sum += plain[c] * dys[(s * count + i) * ew + c];
        delta[s * count + i] = sum;
        sums[s * count + i] = lse[asked[i] * heads + head];
      }
    }
    std::fill(dq, dq + all * dw, 0.0f);
    const float *at_x[back_tile], *at_dy[back_tile];
    for (int64_t at = 0; at < keys; at += block) {
      int64_t n = std::min(block, keys - at), ld = loops.padded(n);
      k.read(rows + at, n, source, plain, d);
      loops.pack(Type::f32, plain, d, true, d, n, key_panel);
      loops.pack(Type::f32, plain, d, false, n, d, back);
      v.read(rows + at, n, source, plain, e);
      loops.pack(Type::f32, plain, e, true, e, n, value_panel);
      std::fill(dk, dk + n * dw, 0.0f);
      std::fill(dv, dv + n * ew, 0.0f);
      for (int64_t t = 0; t < all; t += back_tile) {
        int64_t some = std::min(back_tile, all - t);
        loops.gather_gemm(queries + t * dw, dw, nullptr, nullptr, some, key_panel, d, n, zeros(), p, ld);
        loops.gather_gemm(dys + t * ew, ew, nullptr, nullptr, some, value_panel, e, n, zeros(), ds, ld);
        loops.soften_gradient(p, ds, ld, some, n, sums + t, delta + t);
        loops.gather_gemm(ds, ld, nullptr, numbers(), some, back, n, d, zeros(), dq + t * dw, dw);
        for (int64_t i = 0; i < some; ++i) at_x[i] = p + i * ld, at_dy[i] = dys + (t + i) * ew;
        loops.outer(at_x, at_dy, some, n, e, nullptr, dv, ew);
        for (int64_t i = 0; i < some; ++i) at_x[i] = ds + i * ld, at_dy[i] = queries + (t + i) * dw;
        loops.outer(at_x, at_dy, some, n, d, nullptr, dk, dw);
      }
      for (int64_t i = 0; i < n; ++i) {
        write(out[1], groups.starts[group] + at + i, source, dk + i * dw);
        write(out[2], groups.starts[group] + at + i, source, dv + i * ew);
      }
    }
    for (int64_t i = 0; i < all; ++i) {
      for (int64_t c = 0; c < d; ++c) dq[i * dw + c] *= scale;
      write(out[0], asked[i % count], source * shared + i / count, dq + i * dw);
    }
  }
};

void check_heads(const char* who, const char* what, const array& a, const array& q, bool same_rows = true) {
  want_rank(who, what, a, 3, "(N, heads, D)");
  want_float(who, what, a);
  want_same_dtype(who, what, a, "q", q);
  if (same_rows && a.shape(0) != q.shape(0)) fail(who, std::string(what) + " must have the rows of q.");
}

// What the groups are made of, the optional lists where they are there.
std::vector<array> check(const char* who, const array& q, const array& k, const array& v, const array& rows,
                         const array& starts, const array& queries, const MaybeArray& asked, const MaybeArray& begins) {
  check_heads(who, "q", q, q);
  check_heads(who, "k", k, q, !asked);
  check_heads(who, "v", v, q, !asked);
  if (k.shape(2) != q.shape(2) || k.shape(1) != v.shape(1) || k.shape(1) < 1 || q.shape(1) % k.shape(1))
    fail(who, "k must have the channels of q and the heads of v, which divide those of q.");
  if (k.shape(0) != v.shape(0)) fail(who, "k and v must have the same rows.");
  std::vector<array> lists{rows, starts, queries};
  if (asked.has_value() != begins.has_value()) fail(who, "asked and begins go together.");
  if (asked) lists.insert(lists.end(), {*asked, *begins});
  for (size_t i = 0; i < lists.size(); ++i) {
    const char* names[] = {"rows", "starts", "queries", "asked", "begins"};
    want_rank(who, names[i], lists[i], 1, "(S,)");
    want_dtype(who, names[i], lists[i], mx::int32);
  }
  if (starts.shape(0) != queries.shape(0) + 1) fail(who, "starts must have one entry more than queries.");
  if (begins && begins->shape(0) < queries.shape(0)) fail(who, "begins must have an entry for each of queries.");
  return lists;
}

}  // namespace

std::tuple<array, array> attention(const array& q, const array& k, const array& v, const array& rows,
                                   const array& starts, const array& queries, const MaybeArray& asked,
                                   const MaybeArray& begins, float scale, Stream s) {
  std::vector<array> in{q, k, v};
  auto lists = check("attention", q, k, v, rows, starts, queries, asked, begins);
  in.insert(in.end(), lists.begin(), lists.end());
  auto out = build(Attention{scale}, in, s);
  return {out[0], out[1]};
}

std::tuple<array, array, array> attention_gradient(const array& dy, const array& q, const array& k, const array& v,
                                                   const array& y, const array& lse, const array& rows,
                                                   const array& starts, const array& queries, const MaybeArray& asked,
                                                   const MaybeArray& begins, float scale, Stream s) {
  const char* who = "attention_gradient";
  auto lists = check(who, q, k, v, rows, starts, queries, asked, begins);
  check_heads(who, "dy", dy, q);
  check_heads(who, "y", y, q);
  want_dtype(who, "lse", lse, mx::float32);
  mx::Shape wanted{q.shape(0), q.shape(1), v.shape(2)};
  if (dy.shape() != wanted || y.shape() != wanted || lse.shape() != mx::Shape{wanted[0], wanted[1]})
    fail(who, "dy and y must have shape " + text(wanted) + ", lse one value a row and head.");
  std::vector<array> in{dy, q, k, v, y, lse};
  in.insert(in.end(), lists.begin(), lists.end());
  auto out = build(AttentionGradient{scale}, in, s);
  return {out[0], out[1], out[2]};
}

}  // namespace lattice
