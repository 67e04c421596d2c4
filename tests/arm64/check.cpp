// The extension's contractions and reductions against float64 loops, as a program: it needs no Python of the target
// machine. Prints the instruction set and the number of cases; exits with 1 at the first fault.
#include <cmath>
#include <cstdio>
#include <cstdlib>
#include <random>

#include "instruction_set.h"
#include "operations.h"
#include "thread_pool.h"

using namespace lattice;

namespace {

using Numbers = std::vector<double>;
std::mt19937 generator(7);
int n_cases = 0;

array random_array(mx::Shape shape, mx::Dtype dtype) {
  std::normal_distribution<float> normal;
  std::vector<float> values(mx::array(shape, mx::float32, nullptr, {}).size());
  for (auto& v : values) v = normal(generator);
  return mx::astype(array(values.begin(), shape, mx::float32), dtype);
}

Numbers numbers(const array& a) {
  array wide = mx::contiguous(mx::astype(a, mx::float32));
  wide.eval();
  return Numbers(wide.data<float>(), wide.data<float>() + wide.size());
}

array integers(const std::vector<int>& values, mx::Shape shape) { return array(values.begin(), shape, mx::int32); }

void agrees(const char* what, const array& got, const Numbers& wanted) {
  Numbers values = numbers(got);
  double error = 0, norm = 1e-30;
  for (size_t i = 0; i < wanted.size(); ++i) {
    error += (values.at(i) - wanted[i]) * (values[i] - wanted[i]);
    norm += wanted[i] * wanted[i];
  }
  double most = got.dtype() == mx::float32 ? 1e-5 : got.dtype() == mx::float16 ? 2e-3 : 1.6e-2;
  ++n_cases;
  if (values.size() == wanted.size() && std::sqrt(error) <= most * std::sqrt(norm)) return;
  std::printf("%s of %s is off by %g of its norm, more than %g\n", what, text(got.dtype()).c_str(),
              std::sqrt(error / norm), most);
  std::exit(1);
}

struct Edge {
  int i, o, k;
};

// y[o] = bias + sum of x[i] @ w[k], w (K, C_in / groups, C_out).
Numbers conv_oracle(const Numbers& x, const Numbers& w, const Numbers& bias, const std::vector<Edge>& edges, int rows,
                    int c_in, int c_out, int groups) {
  int a = c_in / groups, b = c_out / groups;
  Numbers y(size_t(rows) * c_out);
  for (int j = 0; j < rows * c_out; ++j) y[j] = bias[j % c_out];
  for (auto [i, o, k] : edges)
    for (int n = 0; n < c_out; ++n)
      for (int c = 0; c < a; ++c) y[o * c_out + n] += x[i * c_in + n / b * a + c] * w[(k * a + c) * c_out + n];
  return y;
}

Numbers weight_oracle(const Numbers& x, const Numbers& dy, const std::vector<Edge>& edges, int volume, int c_in,
                      int c_out, int groups) {
  int a = c_in / groups, b = c_out / groups;
  Numbers w(size_t(volume) * a * c_out);
  for (auto [i, o, k] : edges)
    for (int n = 0; n < c_out; ++n)
      for (int c = 0; c < a; ++c) w[(k * a + c) * c_out + n] += x[i * c_in + n / b * a + c] * dy[o * c_out + n];
  return w;
}

void check(mx::Dtype dtype, int c_in, int c_out, int groups) {
  constexpr int n_in = 70, n_out = 90, volume = 11;
  std::vector<int> table(n_out * volume, -1), flat, starts{0}, rows, offsets;
  std::vector<Edge> edges;
  for (auto& t : table)
    if (generator() % 3 == 0) t = int(generator() % n_in);
  for (int k = 0; k < volume; ++k)
    for (int o = 0; o < n_out; ++o)
      if (int i = table[o * volume + k]; i >= 0) {
        edges.push_back({i, o, k});
        flat.insert(flat.end(), {i, o, k});
      }
  for (int o = 0; o < n_out; ++o) {
    for (int k = 0; k < volume; ++k)
      if (int i = table[o * volume + k]; i >= 0) rows.push_back(i), offsets.push_back(k);
    starts.push_back(int(rows.size()));
  }
  int n = int(edges.size());
  array t = integers(table, {n_out, volume}), e = integers(flat, {n, 3});
  array x = random_array({n_in, c_in}, dtype), dy = random_array({n_out, c_out}, dtype);
  array w = random_array({volume, c_in / groups, c_out}, dtype), bias = random_array({c_out}, dtype);

  Numbers y = conv_oracle(numbers(x), numbers(w), numbers(bias), edges, n_out, c_in, c_out, groups);
  agrees("blocked_gather_gemm", blocked_gather_gemm(x, w, t, bias, groups, false, {}, {}), y);
  agrees("grouped_gemm", grouped_gemm(x, w, e, n_out, bias, groups, false, {}, {}), y);
  array by_row = integers(starts, {n_out + 1}), in_rows = integers(rows, {n}), of_offset = integers(offsets, {n});
  agrees("relation_traversal", relation_traversal(x, w, by_row, in_rows, of_offset, bias, groups, false, {}, {}), y);
  Numbers dw = weight_oracle(numbers(x), numbers(dy), edges, volume, c_in, c_out, groups);
  agrees("grouped_gemm_weight_grad", grouped_gemm_weight_grad(x, dy, e, volume, groups, false, {}), dw);

  Numbers sums(n_out * c_in), values = numbers(x);
  for (auto [i, o, k] : edges)
    for (int c = 0; c < c_in; ++c) sums[o * c_in + c] += values[i * c_in + c];
  agrees("gather_sum", gather_sum(x, t, {}, {}), sums);

  if (groups > 1) return;
  std::vector<Edge> same;
  for (int i = 0; i < n_in; ++i) same.push_back({i, i, 0});
  array w0 = mx::contiguous(mx::slice(w, {0, 0, 0}, {1, c_in, c_out})), flat_w = mx::reshape(w0, {c_in, c_out});
  agrees("native_pointwise", native_pointwise(x, flat_w, bias, false, {}, {}),
         conv_oracle(values, numbers(w0), numbers(bias), same, n_in, c_in, c_out, 1));
  array dx = random_array({n_in, c_out}, dtype);
  agrees("native_pointwise_weight_grad", native_pointwise_weight_grad(x, dx, 1, false, {}),
         weight_oracle(values, numbers(dx), same, 1, c_in, c_out, 1));
  for (int bits : {4, 8}) {
    int stored = (c_in + 31) / 32 * 32;
    auto packed = mx::quantize(random_array({volume, c_out, stored}, dtype), 32, bits);
    array whole = mx::dequantize(packed[0], mx::astype(packed[1], mx::float32), mx::astype(packed[2], mx::float32), 32, bits);
    array dense = mx::transpose(mx::slice(whole, {0, 0, 0}, {volume, c_out, c_in}), {0, 2, 1});
    agrees("quantized_sorted", quantized_sorted(x, packed[0], packed[1], packed[2], t, bias, 1, bits, 32, {}, {}),
           conv_oracle(values, numbers(dense), numbers(bias), edges, n_out, c_in, c_out, 1));
  }
}

}  // namespace

int check_int8();  // check_int8.cpp: the number of its cases

int main() {
  mx::set_default_device(mx::Device(mx::Device::cpu));
  set_num_threads(3);
  for (auto dtype : {mx::float32, mx::float16, mx::bfloat16})
    for (auto [c_in, c_out, groups] : {std::tuple{3, 5, 1}, {32, 64, 1}, {65, 33, 1}, {50, 90, 1}, {130, 16, 1}, {8, 12, 2}, {21, 21, 21}})
      check(dtype, c_in, c_out, groups);
  std::printf("%s: %d cases agree with float64\n", isa(), n_cases);
  for (auto& name : isas()) {
    set_isa(name.c_str());
    std::printf("%s: %d cases of integers are exact\n", isa(), check_int8());
  }
}
