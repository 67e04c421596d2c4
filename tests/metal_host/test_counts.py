"""Counted launches: arithmetic, matrix loads and lines, as kernels planted them."""

import mlx.core as mx
import pytest
from metal_checks import kernel, sized

from metal import host

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
        ("o[i] = x0[i] % x1[i];", (1, 0, 0, 0)),
        ("o[i] = uint(x0[i]) / uint(x1[i]);", (1, 0, 0, 0)),
        ("o[i] = short(x0[i]) / short(x1[i]);", (1, 0, 0, 0)),
        ("o[i] = int(long(x0[i]) / long(x1[i] + 1L));", (0, 1, 0, 0)),
        ("o[i] = int(ulong(x0[i]) % ulong(x1[i] + 1L));", (0, 1, 0, 0)),
        ("o[i] = x0[i] * x1[i];", (0, 0, 1, 0)),
        ("o[i] = int((long(x0[i]) * x1[i]) >> 16);", (0, 0, 0, 1)),
        ("o[i] = x0[i] / 7;", (0, 0, 1, 0)),
        ("o[i] = x0[i] % 7;", (0, 0, 2, 0)),
        ("o[i] = uint(x0[i]) / 8 + uint(x0[i]) % 8 + x0[i] * 4;", (0, 0, 0, 0)),
        ("o[i] = x0[i] / 8;", (0, 0, 0, 0)),
        ("o[i] = x0[i] >> x1[i];", (0, 0, 0, 0)),
    ],
)
def test_arithmetic_is_counted(body, expected):
    assert arithmetic_of(body) == expected


def test_arithmetic_is_counted_as_often_as_it_runs():
    loop = "int s = 0; for (int j = 0; j < x0[i]; ++j) s += j / x1[j]; o[i] = s;"
    expected = sum(range(N)) / N
    assert arithmetic_of(loop)[:2] == (expected, 0)
    branch = "int v = x0[i]; if (v < 16) v = v / x1[i]; o[i] = v;"
    assert arithmetic_of(branch)[:2] == (16 / N, 0)


def test_functions_that_are_called_are_counted():
    header = "int third(int a, int b) __attribute__((noinline)) { return a / b; }\n"
    c = arithmetic_of("o[i] = third(x0[i], x1[i]);", header=header)
    assert c == (1, 0, 0, 0)


@pytest.mark.parametrize(
    ("body", "expected"),
    [
        ("o[i] = float(x0[i]);", 1),
        ("o[i] = float(uint(x0[i]) & 15u) + float(x0[i] >> 4);", 2),
        ("float4 v = float4(uint4(x0[i]) & uint4(15u)); o[i] = v.x + v.w;", 4),
        ("o[i] = x0[i] < 16 ? float(x0[i]) : 0.5f;", None),
        ("o[i] = float(half(0.5f)) + 1.0f;", 0),
    ],
)
def test_integers_that_become_floats_are_counted(body, expected):
    x = mx.arange(N, dtype=mx.int32)
    found = counts(body, x, out=mx.float32).conversions / N
    # Both compilers may compute both sides of a choice.
    assert found in ((16 / N, 1) if expected is None else (expected,))


def test_other_modes_count_no_arithmetic():
    body = "o[i] = x0[i] / x1[i];"
    assert arithmetic_of(body, counted=False) == (0, 0, 0, 0)


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


def test_a_counted_launch_finds_what_a_checked_one_does():
    source = "uint i = thread_position_in_grid.x; o[i] = x[i + 1];"
    inputs, size = [mx.ones((N,))], sized(N, N, (N,), mx.float32)
    beyond = kernel("beyond", "x", source)
    _, report = host.run(beyond, inputs=inputs, **size, counted=True)
    assert [f.kind for f in report.faults] == ["device read out of bounds"]
    assert report.faults[0].place
