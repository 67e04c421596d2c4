"""What all native kernels owe: exact conversions, streams, layouts, memory, errors."""

import os
import threading
import types
import warnings

import mlx.core as mx
import native
import numpy as np
import pytest
from native import (
    cpu,
    each_dtype,
    each_isa,
    random_table,
    same_bits,
)

from mlx_lattice import LatticeWarning, devices

cpu_device = native.cpu_device


@each_isa
def test_half_conversions_are_exact(isa):
    cpu.set_isa(isa)
    one = mx.array([[1.0]])
    bits = np.arange(1 << 16, dtype=np.uint16).reshape(-1, 1)
    values = mx.array(bits).view(mx.float16)
    same = cpu.native_pointwise(
        values, one.astype(mx.float16)
    )  # x * 1: loads and stores
    expected = np.array(values)
    np.testing.assert_array_equal(np.array(same), np.where(expected == 0, 0, expected))
    rng = np.random.default_rng(0)
    odd = rng.integers(0, 1 << 32, 200_000, dtype=np.uint32).view(np.float32)
    odd = np.concatenate([odd, np.float32([65519.9, 65520, 2**-25, 3 * 2**-26, 1e-8])])
    odd = odd[np.isfinite(odd)].reshape(-1, 1)
    # A float32 sum stored as half: conv of halves cannot make these, so add a bias.
    for dtype in (mx.float16, mx.bfloat16):
        bias = mx.array(odd[:, 0])
        got = cpu.native_pointwise(
            mx.zeros((1, 1), dtype), mx.zeros((1, len(odd)), dtype), bias
        )
        np.testing.assert_array_equal(
            np.array(got.view(mx.uint16)),
            np.array(bias[None].astype(dtype).view(mx.uint16)),
        )


def test_compile_streams_threads_and_layouts():
    rng = np.random.default_rng(0)
    table = mx.array(random_table(rng, 64, 64, 27))
    x = mx.array(rng.standard_normal((64, 8)), mx.float32)
    w = mx.array(rng.standard_normal((27, 8, 8)), mx.float32)
    expected = cpu.blocked_gather_gemm(x, w, table)
    compiled = mx.compile(
        lambda x, w, t: (
            cpu.blocked_gather_gemm(mx.exp(mx.log(x)), w, t)
            + cpu.blocked_gather_gemm(x, w, t)
        ),
    )
    positive = mx.abs(x)
    twice = 2 * cpu.blocked_gather_gemm(positive, w, table)
    assert mx.allclose(compiled(positive, w, table), twice, rtol=1e-4, atol=1e-4)
    shapeless = mx.compile(
        lambda x, w, t: cpu.blocked_gather_gemm(x, w, t) + 1, shapeless=True
    )
    for n in (64, 10):
        assert mx.allclose(shapeless(x, w, table[:n]), expected[:n] + 1)
    strided = mx.array(np.array(x).T.copy()).T
    same_bits([expected, cpu.blocked_gather_gemm(strided, w, table)])
    stream = mx.new_stream(mx.cpu)
    same_bits([expected, cpu.blocked_gather_gemm(x, w, table, stream=stream)])
    found = []
    mx.eval(x, w, table)

    def work():
        found.append(np.array(cpu.blocked_gather_gemm(x, w, table, stream=mx.cpu)))

    threads = [threading.Thread(target=work) for _ in range(4)]
    for t in threads:
        t.start()
    for t in threads:
        t.join()
    assert len(found) == 4
    for f in found:
        np.testing.assert_array_equal(f, np.array(expected))


def test_refusals_and_errors_are_sentences():
    x, w = mx.zeros((4, 8)), mx.zeros((27, 8, 8))
    table = mx.zeros((4, 27), mx.int32)
    with pytest.raises(Exception, match="no rule for vjp"):
        mx.grad(lambda x: cpu.blocked_gather_gemm(x, w, table).sum())(x)
    mapped = mx.vmap(lambda x: cpu.blocked_gather_gemm(x, w, table))(mx.ones((2, 4, 8)))
    assert mx.array_equal(mapped[1], cpu.blocked_gather_gemm(mx.ones((4, 8)), w, table))
    none = mx.vmap(lambda x: cpu.blocked_gather_gemm(x, w, table))(mx.ones((0, 4, 8)))
    assert none.shape == (0, 4, 8)
    with pytest.raises(ValueError, match="x is float32 but the weight is float16"):
        cpu.blocked_gather_gemm(x, w.astype(mx.float16), table)
    with pytest.raises(ValueError, match="x has 7 channels"):
        cpu.blocked_gather_gemm(x[:, :7], w, table)
    with pytest.raises(ValueError, match="table has 26 offsets"):
        cpu.blocked_gather_gemm(x, w, table[:, 1:])
    with pytest.raises(ValueError, match="bias must have shape"):
        cpu.blocked_gather_gemm(x, w, table, mx.zeros(3))
    with pytest.raises(RuntimeError, match="names input row 99"):
        mx.eval(cpu.blocked_gather_gemm(x, w, table + 99))
    with pytest.raises(
        RuntimeError, match=r"edge 0 is \(99, 0, 0\): it is out of range"
    ):
        edges = mx.array([[99, 0, 0]], dtype=mx.int32)
        mx.eval(cpu.relation_traversal_weight_grad(x, x, edges, 27))
    with pytest.raises(RuntimeError, match="not sorted"):
        edges = mx.array([[0, 0, 1], [0, 0, 0]], dtype=mx.int32)
        mx.eval(cpu.grouped_gemm_weight_grad(x, x, edges, 27))


@pytest.mark.parametrize("rows", (1, 7, 50_000))
@each_dtype
def test_results_are_aligned_and_donated(rows, dtype):
    x, w = mx.ones((rows, 3), dtype), mx.ones((3, 30), dtype)
    y = cpu.native_pointwise(x, w)
    mx.eval(y)
    buffer = np.frombuffer(memoryview(y.view(mx.uint16)), np.uint16)
    assert buffer.__array_interface__["data"][0] % 64 == 0
    # MLX may write a result's successor into its memory, as after its own operations.
    mx.reset_peak_memory()
    before = mx.get_active_memory()
    z = -cpu.native_pointwise(x, w)
    mx.eval(z)
    assert mx.get_peak_memory() - before < 2 * z.nbytes + 4096
    assert mx.array_equal(z, mx.full((rows, 30), -3, dtype))


def test_no_unsorted_list_is_added_up():
    rng = np.random.default_rng(0)
    x = mx.ones((50, 4))
    for _ in range(50):
        edges = rng.integers(0, (50, 50, 3), (60, 3)).astype(np.int32)
        with pytest.raises(RuntimeError, match="not sorted"):
            mx.eval(cpu.grouped_gemm_weight_grad(x, x, mx.array(edges), 3))
        cpu.settle()  # else MLX may wait for tasks that it lost count of


@pytest.mark.parametrize("text", ("abc", "0", "-1", "100000", "4abc", "²"))
def test_a_number_of_threads_that_is_none_is_said(text, monkeypatch):
    set_to = []
    fake = types.SimpleNamespace(set_num_threads=set_to.append)
    monkeypatch.setenv("MLX_LATTICE_THREADS", text)
    with pytest.warns(LatticeWarning, match=f"must be 1 to 1024; got '{text}'"):
        devices._check_threads(fake)
    assert set_to == [os.cpu_count()]


def test_numbers_of_threads_are_taken(monkeypatch):
    for text in ("", "1", " 8 ", "1024"):
        monkeypatch.setenv("MLX_LATTICE_THREADS", text)
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            devices._check_threads(None)
