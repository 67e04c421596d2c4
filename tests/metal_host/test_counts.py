"""What is counted of a launch, estimated of registers, and modelled of tiles."""

import sys
from pathlib import Path

import mlx.core as mx
import numpy as np
import pytest
from metal_checks import kernel, sized

from metal import host
from metal.host import pressure
from mlx_lattice import devices

host.require()

N = 64


def counts(body, *inputs, out=mx.int32, size=N, threads=N, header="", **settings):
    """The counts of a kernel of N threads, one for each element of o."""
    names = " ".join(f"x{i}" for i in range(len(inputs)))
    body = "uint i = thread_position_in_grid.x;\n" + body
    _, report = host.run(
        kernel("counted", names, body, header=header),
        inputs=list(inputs),
        **sized(threads, threads, (size,), out),
        **{"counted": True} | settings,
    )
    report.raise_faults()
    return report.counts


def arithmetic_of(body, **settings):
    """(32- and 64-bit divisions, multiplications) a thread; x0 is i, x1 is all 3."""
    x = mx.arange(N, dtype=mx.int32), mx.full((N,), 3, dtype=mx.int32)
    c = counts(body, *x, **settings)
    each = c.divisions32, c.divisions64, c.multiplications32, c.multiplications64
    return tuple(n / N for n in each)


@pytest.mark.parametrize(
    ("body", "expected"),
    [
        ("o[i] = x0[i] / x1[i];", (1, 0, 0, 0)),
        ("o[i] = uint(x0[i]) / uint(x1[i]);", (1, 0, 0, 0)),
        ("o[i] = int(long(x0[i]) / long(x1[i] + 1L));", (0, 1, 0, 0)),
        ("o[i] = x0[i] * x1[i];", (0, 0, 1, 0)),
        ("o[i] = int((long(x0[i]) * x1[i]) >> 16);", (0, 0, 0, 1)),
        ("o[i] = x0[i] / 7;", (0, 0, 1, 0)),
        ("o[i] = x0[i] % 7;", (0, 0, 2, 0)),
        ("o[i] = uint(x0[i]) / 8 + uint(x0[i]) % 8 + x0[i] * 4;", (0, 0, 0, 0)),
    ],
)
def test_arithmetic_is_counted(body, expected):
    assert arithmetic_of(body) == expected


PRODUCT = """
simdgroup_matrix<float, 8, 8> a, b, c = make_filled_simdgroup_matrix<float, 8, 8>(0);
simdgroup_load(a, x0);
for (int k = 0; k < 3; ++k) {
  simdgroup_load(b, x0, 8, ulong2(0, 0), true);
  simdgroup_multiply_accumulate(c, a, b, c);
}
simdgroup_store(c, o);
"""


def test_matrix_accesses_are_counted_once_a_simdgroup():
    x = mx.ones((8, 8))
    c = counts(PRODUCT, x, out=mx.float32, threads=32, header="")
    assert (c.matrix_loads, c.matrix_stores, c.matrix_multiplies) == (4, 1, 3)
    # Where an element lies is the hardware's arithmetic.
    assert c.multiplications64 == 0


@pytest.mark.parametrize("order", ["forward", "random"])
def test_a_line_is_counted_once_in_a_step(order):
    x = mx.arange(32 * N, dtype=mx.int32)
    # A line of its own for each thread; 8 bytes of it are asked for.
    c = counts("o[i] = x0[32 * i] + x0[32 * i + 1];", x, order=order)
    read, written = c.buffers["x0"], c.buffers["o"]
    assert (read.read_lines, read.read_line_bytes) == (N, 8 * N)
    assert read.asked_of_line == 8
    # 32 threads of a simdgroup fill a line.
    assert (written.written_lines, written.written_line_bytes) == (2, 4 * N)


def test_a_barrier_ends_a_step():
    x = mx.arange(N, dtype=mx.int32)
    body = """int a = x0[i % 32];
    threadgroup_barrier(mem_flags::mem_threadgroup);
    o[i] = a + x0[i % 32 + 1];"""
    read = counts(body, x).buffers["x0"]
    # Two simdgroups: a line each before it, two lines each behind it.
    assert (read.read_lines, read.read_line_bytes) == (6, 2 * 2 * 128)


# Registers, estimated from clang's output

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


# The model of a tile's steps, in benchmarks/

BENCHMARKS = str(Path(__file__).resolve().parents[2] / "benchmarks")


@pytest.fixture(scope="module")
def scripts():
    sys.path.insert(0, BENCHMARKS)
    try:
        import apple_model
        import metal_counts
        import tile_model
        import tile_steps
        import tile_times
    finally:
        sys.path.remove(BENCHMARKS)
    return metal_counts, tile_model, tile_steps, tile_times, apple_model


@pytest.mark.parametrize(
    "chip, channels",
    [("m1", (8, 24)), ("m1", (72, 136)), ("m5", (72, 136))],
)
def test_the_model_gives_what_a_launch_does(scripts, chip, channels):
    metal_counts, tile_model, *_ = scripts
    coords = np.random.default_rng(sum(channels)).integers(0, 7, (90, 3))
    built = metal_counts.relation(np.unique(coords, axis=0))
    with tile_model.on(devices.profile(chip)):
        models = metal_counts.models(built)
        # Raises SystemExit where a count of the launch is not the model's.
        counted = metal_counts.execute(built, models, *channels)
    for pass_ in metal_counts.PASSES:
        assert (counted[pass_]["products_a_load"] or 0) > -(chip == "m5")
        assert chip == "m1" or counted[pass_]["barriers"] == 0
        # What begins a split or a range of rows is found in 32 bits.
        assert counted[pass_]["divisions"][1] == 0
