// The inner loops and the sort of the CPU backend against plain loops: a program, so that it can be compiled for another
// processor and run by an emulator. It names what differs and returns how many checks failed.
#include <cmath>
#include <cstdio>
#include <limits>
#include <random>
#include <vector>

#include "kernel_table.h"
#include "sort.h"

namespace lattice::baseline {
extern const Kernels table;
}
using namespace lattice;

namespace {

const Kernels& kernels_here = baseline::table;
std::mt19937 random_bits(0);
int failures = 0;

void check(bool right, const char* what, int64_t a, int64_t b = 0) {
  if (right) return;
  ++failures;
  std::printf("%s is wrong at %lld, %lld\n", what, (long long)a, (long long)b);
}

std::vector<float> numbers(int64_t n) {
  std::vector<float> v(n);
  for (auto& x : v) x = std::uniform_real_distribution<float>(-1, 1)(random_bits);
  return v;
}

bool near(double a, double b, double size) { return std::abs(a - b) <= 1e-5 * (size + 1); }

// Every half value and back; odd lengths, so that vectors and their tails are both used.
void half_types() {
  for (Type type : {Type::f16, Type::bf16}) {
    std::vector<uint16_t> all(65536), back(65536);
    std::vector<float> wide(65536);
    for (int i = 0; i < 65536; ++i) all[i] = uint16_t(i);
    for (int64_t first = 0; first < 65536; first += 37) {
      int64_t n = std::min<int64_t>(37, 65536 - first);
      kernels_here.load(type, &all[first], n, &wide[first]);
      kernels_here.store(type, &wide[first], n, &back[first]);
    }
    int mantissa = type == Type::f16 ? 10 : 7, bias = type == Type::f16 ? 15 : 127;
    for (int i = 0; i < 65536; ++i) {
      int exponent = (i & 0x7fff) >> mantissa, rest = i & ((1 << mantissa) - 1);
      if (exponent == 2 * bias + 1 && rest) {
        check(std::isnan(wide[i]), "NaN", i);
        continue;
      }
      double value = exponent == 2 * bias + 1 ? std::numeric_limits<double>::infinity()
                     : exponent ? std::ldexp(1 + std::ldexp(rest, -mantissa), exponent - bias)
                                : std::ldexp(rest, 1 - bias - mantissa);
      check(wide[i] == float(i & 0x8000 ? -value : value), "load", i, int(type));
      check(back[i] == all[i], "store", i, int(type));
    }
  }
}

void products() {
  for (int64_t c_in : {1, 3, 16, 33, 130})
    for (int64_t c_out : {1, 5, 16, 31, 64, 70}) {
      int64_t rows = 23, width = kernels_here.padded(c_out);
      auto x = numbers(rows * c_in), w = numbers(c_in * c_out), dy = numbers(rows * c_out);
      std::vector<float> panel(c_in * width), y(rows * width, 0.5f);
      std::vector<int32_t> in(rows), out(rows);
      for (int e = 0; e < rows; ++e) in[e] = int32_t(random_bits() % rows), out[e] = e;
      kernels_here.pack(Type::f32, w.data(), c_out, false, c_in, c_out, panel.data());
      kernels_here.gather_gemm(x.data(), c_in, in.data(), out.data(), rows, panel.data(), c_in, c_out, y.data(), width);
      for (int e = 0; e < rows; ++e)
        for (int64_t n = 0; n < c_out; ++n) {
          double sum = 0.5;
          for (int64_t c = 0; c < c_in; ++c) sum += double(x[in[e] * c_in + c]) * w[c * c_out + n];
          check(near(y[e * width + n], sum, double(c_in)), "gather_gemm", c_in, c_out);
        }
      std::vector<float> dw(c_in * width, 0.25f), dy_panel(rows * width);
      std::vector<const float*> pointers(rows);
      for (int e = 0; e < rows; ++e) pointers[e] = &x[in[e] * c_in];
      kernels_here.gather_panel(Type::f32, dy.data(), c_out, out.data(), rows, 0, c_out, dy_panel.data());
      kernels_here.outer(pointers.data(), dy_panel.data(), rows, c_in, c_out, dw.data(), width);
      for (int64_t c = 0; c < c_in; ++c)
        for (int64_t n = 0; n < c_out; ++n) {
          double sum = 0.25;
          for (int e = 0; e < rows; ++e) sum += double(x[in[e] * c_in + c]) * dy[e * c_out + n];
          check(near(dw[c * width + n], sum, double(rows)), "outer", c_in, c_out);
        }
    }
}

void order() {
  for (int extent : {7, 40'000, 2'000'000'000}) {
    constexpr int64_t n = 5000;
    std::vector<int32_t> rows(4 * n), sorted;
    for (auto& v : rows) v = int32_t(random_bits() % uint32_t(extent)) - extent / 2;
    for (int repeats : {1, 0}) {  // whole rows twice, then every row its own
      for (int64_t i = 0; i < n && !repeats; ++i) rows[4 * i + 3] = int32_t(i);
      auto at = [&](int32_t i) { return &rows[4 * i]; };
      sorted = sorted_order(rows.data(), n, 4);
      for (int64_t i = 1; i < n; ++i) {
        bool less = std::lexicographical_compare(at(sorted[i - 1]), at(sorted[i - 1]) + 4, at(sorted[i]), at(sorted[i]) + 4);
        bool equal = std::equal(at(sorted[i]), at(sorted[i]) + 4, at(sorted[i - 1]));
        check(less || (equal && sorted[i - 1] < sorted[i]), "sorted_order", extent, i);
      }
    }
  }
}

}  // namespace

int main() {
  half_types();
  products();
  order();
  std::printf("%d lanes, %d failures\n", kernels_here.lanes, failures);
  return failures != 0;
}
