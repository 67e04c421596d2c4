"""CUDA's layer norm, emulated on the CPU, forward and back, against the oracle."""

from dataclasses import replace

import mlx.core as mx
import numpy as np
import pytest
import reference as ref
from contractions import exact
from cuda_emulation import emulated
from norm_checks import array
from reference_norms import Norm

from mlx_lattice import ops, registry
from mlx_lattice.backends.cuda import norms as cuda_norms
from mlx_lattice.devices import PROFILES

pytestmark = emulated


KERNELS = registry.ROW_NORMS["cuda"]


@pytest.fixture
def launches(emulator, monkeypatch):
    """Have CUDA's kernels, emulated, serve; the names of what is launched."""
    monkeypatch.setattr(registry, "row_norms", lambda: KERNELS)
    return emulator.launches


def parameters(channels, kind, there):
    """Weight and bias, or None, and their float64 values."""
    for seed, letter in enumerate("wb", 3):
        if letter in there:
            a, values = array((1, channels), kind, seed, 0.5, 1.0)
            yield a[0], values[0]
        else:
            yield None, None


def check(shape, dtype, act, kind, there, shift=3.0):
    """Forward and back; of all but x, only what there is: "r" is a residual."""
    x, values = array(shape, dtype, 1, 2.0, shift)
    dy, along = array(shape, dtype, 2)
    (weight, w), (bias, b) = parameters(shape[1], kind, there)
    residual, r = array(shape, dtype, 5) if "r" in there else (None, None)
    of_rows = {"of": np.arange(shape[0]), "groups": 1, "eps": 1e-6}
    oracle = Norm(values, w, b, r, act, **of_rows)
    every = weight, bias, residual
    optional = [a for a in every if a is not None]

    def norm(x, *rest):
        rest = iter(rest)
        *given, added = [a if a is None else next(rest) for a in every]
        return ops.layer_norm(x, *given, 1e-6, residual=added, activation=act)

    (y,), found = mx.vjp(norm, [x, *optional], [dy])
    dx, *totals = oracle.back(along)
    totals = zip(totals, every, strict=True)
    wanted = [dx, *[total for total, a in totals if a is not None]]
    ref.assert_close(y, oracle.y, dtype, "y")
    names = ["dx", *there]
    for d, one, of, name in zip(found, wanted, [x, *optional], names, strict=True):
        assert d.dtype == of.dtype and d.shape == of.shape
        ref.assert_close(d, one, str(of.dtype), f"{name} of {shape}")


# Rows by a thread, by parts of a warp, by a warp; several vectors a thread, all or
# some of them whole.
@pytest.mark.parametrize(
    "channels, dtype, act, kind, there",
    (
        (8, "float16", "relu", "float32", "wbr"),
        (24, "float16", "leaky_relu", "float16", "wb"),
        (64, "float16", "gelu", "float32", "wb"),
        (96, "float16", "silu", "float32", "r"),
        (256, "float16", None, "float16", "br"),
        (264, "float16", "relu", "float32", "wbr"),
        (520, "float16", None, "float32", ""),
        (1024, "float16", "silu", "float32", "wb"),
        (4, "float32", "gelu", "float32", "wb"),
        (24, "float32", None, "float32", "wr"),
        (128, "float32", "silu", "float16", "wbr"),
        (512, "float32", "relu", "float32", "wb"),
        (8, "bfloat16", "silu", "bfloat16", "wbr"),
        (64, "bfloat16", None, "float32", "wb"),
        (640, "bfloat16", "gelu", "float32", "b"),
    ),
)
def test_rows_forward_and_back(
    launches, monkeypatch, channels, dtype, act, kind, there
):
    for rows in (1, 2, 33, 300):
        check((rows, channels), dtype, act, kind, there)
    few = replace(PROFILES["h200"], cores=1)
    monkeypatch.setattr(cuda_norms, "current", lambda: few)
    monkeypatch.setattr(cuda_norms, "BLOCKS", 1)
    check((700, channels), dtype, act, kind, there)  # blocks walk over rows
    sums = "w" in there or "b" in there
    assert len(launches) == 5 * (3 if sums else 2)


@pytest.mark.parametrize("dtype", ("float16", "float32"))
def test_a_common_offset_cancels(launches, dtype):
    check((33, 64), dtype, "silu", "float32", "wb", shift=100.0)


def test_rows_that_are_not_there_add_nothing(launches):
    """Without eps the deviation of no row would be divided by."""
    x, _ = array((3, 64), "float16")
    given = mx.ones((64,)), mx.zeros((64,))
    found = mx.vjp(lambda *a: ops.layer_norm(*a, 0.0), [x, *given], [x])[1]
    assert all(np.isfinite(exact(a)).all() for a in found)


class Energy:
    """The squares of a layer norm's rows, and derivatives; ``full``: all arrays."""

    def __init__(self, full):
        line = array((1, 16), seed=1)[0][0]
        added = array((9, 16), seed=2)[0]
        self.given = (array((9, 16))[0], *[added, line, line + 1] * full)
        which = list(range(len(self.given)))
        self.first = mx.grad(lambda *a: self.norm(*a).square().sum(), which)
        self.second = mx.grad(self.steepness, which)

    def norm(self, x, residual=None, *given):
        return ops.layer_norm(x, *given, residual=residual, activation="silu")

    def steepness(self, *given):
        return sum(d.square().sum() for d in self.first(*given))

    def derivatives(self):
        x, *rest = self.given
        of_rows = (lambda x: self.norm(x, *rest)), (lambda x: self.first(x, *rest)[0])
        along = [mx.jvp(f, [x], [mx.ones_like(x)])[1][0] for f in of_rows]
        return *self.first(*self.given), *self.second(*self.given), *along

    def mapped(self):
        x, *rest = self.given
        axes = 0, *[0] * bool(rest), *[None] * len(rest[1:])
        given = mx.stack([x, 2 * x]), *[mx.stack([a, a]) for a in rest[:1]], *rest[1:]
        return mx.vmap(self.norm, axes)(*given), *mx.vmap(self.first, axes)(*given)


@pytest.mark.parametrize("full", (False, True))
def test_derivatives_are_those_of_mlx(emulator, monkeypatch, full):
    energy = Energy(full)
    expected = energy.derivatives()
    assert not emulator.launches
    monkeypatch.setattr(registry, "row_norms", lambda: KERNELS)
    for one, wanted in zip(energy.derivatives(), expected, strict=True):
        ref.assert_close(one, exact(wanted))
    assert any("layer_norm_gradient" in name for name in emulator.launches)


@pytest.mark.parametrize("full", (False, True))
def test_vmap_is_that_of_mlx(monkeypatch, full):
    energy = Energy(full)
    expected = energy.mapped()

    # In place of kernels, which no vmap may follow: their rules do without them.
    def nothing(_, *given):
        return mx.zeros_like(given[0])

    def no_gradient(_, dy, *given):
        return tuple(a if a is None else mx.zeros_like(a) for a in given[:4])

    monkeypatch.setattr(type(KERNELS), "layer_norm", nothing)
    monkeypatch.setattr(type(KERNELS), "layer_norm_gradient", no_gradient)
    monkeypatch.setattr(registry, "row_norms", lambda: KERNELS)
    for one, wanted in zip(energy.mapped(), expected, strict=True):
        ref.assert_close(one, exact(wanted))
