// int8_blocked against loops of 64-bit integers, on the instruction set that is in use. Exits with 1 at the first fault.
#include <algorithm>
#include <cmath>
#include <cstdio>
#include <cstdlib>
#include <random>

#include "instruction_set.h"
#include "operations.h"

using namespace lattice;

namespace {

std::mt19937 generator(11);

array random_int8(mx::Shape shape, int64_t row = 1, int64_t used = 1) {
  std::vector<int> values(mx::array(shape, mx::float32, nullptr, {}).size());
  for (size_t i = 0; i < values.size(); ++i)
    values[i] = int64_t(i) % row < used ? int(generator() % 255) - 127 : 0;
  return mx::astype(array(values.begin(), shape, mx::int32), mx::int8);
}

array random_floats(mx::Shape shape, float most) {
  std::uniform_real_distribution<float> uniform(0.0f, most);
  std::vector<float> values(mx::array(shape, mx::float32, nullptr, {}).size());
  for (auto& v : values) v = uniform(generator);
  return array(values.begin(), shape, mx::float32);
}

void expect(bool right, const char* what, int c_in, int c_out) {
  if (right) return;
  std::printf("%s: int8_blocked %s of %d to %d channels is wrong\n", isa(), what, c_in, c_out);
  std::exit(1);
}

void check(int n_out, int c_in, int c_out) {
  constexpr int n_in = 70, volume = 11;
  constexpr int none = 0, relu = 1;  // as activation codes of epilogues
  int stored = (c_in + 31) / 32 * 32;
  std::vector<int> table(n_out * volume, -1);
  for (auto& t : table)
    if (generator() % 3 == 0) t = int(generator() % n_in);
  array x = random_int8({n_in, c_in}), w = random_int8({volume, c_out, stored}, stored, c_in);
  array t(table.begin(), {n_out, volume}, mx::int32), residual = random_int8({n_out, c_out});
  array scale = random_floats({c_out}, 1e-3f), shift = random_floats({c_out}, 3.0f), rows = random_floats({n_in}, 2.0f);
  array residual_scale = random_floats({1}, 0.1f), inverse = random_floats({1}, 9.0f);
  array plain = int8_blocked(x, w, t, scale, shift, {}, {}, {}, {}, {}, 1, none, mx::float32, {});
  array small = int8_blocked(x, w, t, scale, shift, residual, residual_scale, inverse, {}, {}, 1, relu, mx::float32, {});
  array dynamic = int8_blocked(x, w, t, scale, {}, {}, {}, {}, rows, {}, 1, none, mx::float32, {});
  mx::eval(x, w, scale, shift, rows, residual, residual_scale, inverse, plain, small, dynamic);
  for (int o = 0; o < n_out; ++o)
    for (int n = 0; n < c_out; ++n) {
      int64_t sum = 0;
      volatile float scaled = 0.0f;  // volatile: each operation is rounded by itself
      for (int k = 0; k < volume; ++k) {
        int i = table[o * volume + k];
        if (i < 0) continue;
        int64_t dot = 0;
        for (int c = 0; c < c_in; ++c)
          dot += int64_t(x.data<int8_t>()[i * c_in + c]) * w.data<int8_t>()[(k * c_out + n) * stored + c];
        sum += dot;
        volatile float part = float(dot) * rows.data<float>()[i];
        scaled = scaled + part;
      }
      int64_t at = int64_t(o) * c_out + n;
      volatile float v = float(sum) * scale.data<float>()[n];
      v = v + shift.data<float>()[n];
      expect(plain.data<float>()[at] == v, "to float32", c_in, c_out);
      volatile float added = float(residual.data<int8_t>()[at]) * residual_scale.data<float>()[0];
      v = v + added;
      v = std::max(float(v), 0.0f) * inverse.data<float>()[0];
      float level = std::clamp(std::nearbyint(float(v)), -127.0f, 127.0f);
      expect(small.data<int8_t>()[at] == int(level), "to int8", c_in, c_out);
      scaled = scaled * scale.data<float>()[n];
      expect(dynamic.data<float>()[at] == scaled, "by row scales", c_in, c_out);
    }
}

}  // namespace

int check_int8() {
  int cases = 0;
  for (auto [n_out, c_in, c_out] : {std::tuple{90, 3, 5}, {400, 32, 64}, {1, 65, 33}, {50, 130, 17}, {90, 8, 24}}) {
    check(n_out, c_in, c_out);
    cases += 3;
  }
  return cases;
}
