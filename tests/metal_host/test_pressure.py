"""Registers that are estimated from clang's output, of kernels whose need is known."""

import pytest

from metal import host
from metal.host import pressure

host.require()

HEAD = """
#include <metal_stdlib>
using namespace metal;
[[kernel]] void pressed(
    const device T* x [[buffer(0)]], device T* y [[buffer(1)]],
    const constant int& n [[buffer(2)]], uint id [[thread_position_in_grid]],
    uint lane [[thread_index_in_simdgroup]]) {
"""
# N values that all rounds of a loop need.
KEPT = """
  T kept[N];
  for (int j = 0; j < N; ++j) kept[j] = x[id * N + j];
  for (int i = 1; i < n; ++i)
    for (int j = 0; j < N; ++j) kept[j] = kept[j] * kept[(j + 1) % N] + x[i * N + j];
  for (int j = 0; j < N; ++j) y[id * N + j] = kept[j];
}
"""
# N matrices of sums, two elements a lane each, of products of two more.
MATRICES = """
  simdgroup_matrix<float, 8, 8> sums[N];
  simdgroup_matrix<T, 8, 8> a, b;
  for (int j = 0; j < N; ++j) sums[j] = make_filled_simdgroup_matrix<float, 8, 8>(0);
  for (int i = 0; i < n; ++i) {
    simdgroup_load(a, x + i * 64, 8);
    for (int j = 0; j < N; ++j) {
      simdgroup_load(b, x + (i + j) * 64, 8);
      simdgroup_multiply_accumulate(sums[j], a, b, sums[j]);
    }
  }
  for (int j = 0; j < N; ++j)
    simdgroup_store(sums[j], (device float*)y + id / 32 * 64 * N + j * 64, 8);
}
"""
# What depends on no thread is in no lane's registers, nor is what is soon made again.
UNIFORM = """
  T sum = 0;
  const int a = n * 3, b = n / 7, c = n * n, d = n ^ 5, e = n - 9;
  for (int i = 0; i < n; ++i)
    sum += x[id * 8] * T(a + i * b) + x[id * 8 + 4] * T(c - i * d) + T(e);
  y[id] = sum;
}
"""
# Loops, the thread's place, products on their way, and addresses, about.
BESIDE = 14


def registers(body, count, kind="float"):
    macros = f"#define T {kind}\n#define N {count}\n"
    return pressure.registers(macros + HEAD + body)


@pytest.mark.parametrize("kind, each", (("float", 1), ("half", 0.5)))
@pytest.mark.parametrize("count", (8, 32, 96))
def test_values_of_a_loop(count, kind, each):
    assert 0 <= registers(KEPT, count, kind) - each * count <= BESIDE


@pytest.mark.parametrize("count", (4, 16))
def test_matrices_have_two_elements_a_lane(count):
    assert 0 <= registers(MATRICES, count, "half") - 2 * count <= BESIDE


def test_what_all_threads_share_takes_none():
    assert registers(UNIFORM, 0) <= BESIDE
