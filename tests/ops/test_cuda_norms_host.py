"""What CUDA alone has, emulated: norms of few rows, of rows, and sums of columns."""

from dataclasses import replace

import mlx.core as mx
import numpy as np
import pytest
import reference as ref
from contractions import exact
from cuda_emulation import emulated
from norm_checks import Given, array, batch
from places import Place
from reference_norms import Norm

from mlx_lattice import ops, registry
from mlx_lattice.backends.gpu import norms as gpu_norms
from mlx_lattice.devices import PROFILES
from mlx_lattice.registry import NORMS

pytestmark = emulated
KERNELS = NORMS["cuda"]


@pytest.fixture
def place(emulator):
    """CUDA's kernels, emulated, as a place that checks of norms take."""
    here = Place()
    here.name, here.emulator = "cuda", emulator
    return here


@pytest.fixture
def launches(emulator, monkeypatch):
    """Have CUDA's norms, emulated, run; the names of what is launched."""
    monkeypatch.setattr(registry, "norms", lambda: KERNELS)
    return emulator.launches


# Few rows, and sums


@pytest.mark.parametrize("rows, dtype", ((2048, "float16"), (1024, "float32")))
def test_as_many_rows_as_registers_hold(place, rows, dtype):
    given = Given((rows, 4), dtype, "relu")
    more = mx.concatenate([given.x, given.x[:1]])
    assert KERNELS.is_one_launch(given.x) and not KERNELS.is_one_launch(more)
    given.check_one_launch(place, dtype)


@pytest.mark.parametrize("order, dtype", (("sorted", "float32"), ("mixed", "float16")))
def test_means_of_batch_elements(place, monkeypatch, order, dtype):
    """Global pooling sums blocks of rows side by side, in two launches."""
    of = np.repeat([0, 2], [300, 70])
    if order == "mixed":
        of = np.random.default_rng(0).permutation(of)
    x, values = batch(of, 24, dtype, 4)
    place.emulator.launches.clear()
    monkeypatch.setattr(registry, "serving", lambda: "cuda")
    y = ops.global_avg_pool(x)
    assert len(place.emulator.launches) == 2 and y.dtype == x.dtype
    wanted = np.zeros((4, 24))
    for element in (0, 2):
        wanted[element] = values[of == element].mean(axis=0)
    ref.assert_close(y, wanted, dtype)


@pytest.mark.parametrize(
    "shape, dtype, kind",
    (
        ((1, 1), "float32", "float32"),
        ((300, 33), "float16", "float32"),
        ((2048, 96), "bfloat16", "float32"),
        ((2049, 24), "float16", "float16"),
        ((9000, 5), "float32", "float32"),
    ),
)
def test_sums_of_columns(place, shape, dtype, kind):
    """One launch for few rows, and two for many."""
    x, values = array(shape, dtype, 0, 1.0, 0.25)
    y = KERNELS.column_sums(x, getattr(mx, kind))
    assert y.shape == shape[1:] and y.dtype == getattr(mx, kind)
    ref.assert_close(y, values.sum(axis=0), kind)
    assert len(place.emulator.launches) == (1 if shape[0] <= 2048 else 2)


# By row


def check_rows(shape, dtype, act, kind, present, shift=3.0):
    """Forward and back; of all but x, what is ``present``: "r" is a residual."""
    x, values = array(shape, dtype, 1, 2.0, shift)
    dy, along = array(shape, dtype, 2)
    every, exacts = [], []
    for seed, letter in enumerate("wb", 3):
        a, v = array((1, shape[1]), kind, seed, 0.5, 1.0)
        every.append(a[0] if letter in present else None)
        exacts.append(v[0] if letter in present else None)
    residual, r = array(shape, dtype, 5) if "r" in present else (None, None)
    every.append(residual)
    oracle = Norm(values, *exacts, r, act, of=np.arange(shape[0]), groups=1, eps=1e-6)
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
    names = ["dx", *present]
    for d, one, of, name in zip(found, wanted, [x, *optional], names, strict=True):
        assert d.dtype == of.dtype and d.shape == of.shape
        ref.assert_close(d, one, str(of.dtype), f"{name} of {shape}")


# Rows by a thread, by parts of a warp, by a warp; several vectors a thread, all or
# some of them whole.
@pytest.mark.parametrize(
    "channels, dtype, act, kind, present",
    (
        (8, "float16", "relu", "float32", "wbr"),
        (24, "float16", "leaky_relu", "float16", "wb"),
        (96, "float16", "silu", "float32", "r"),
        (256, "float16", None, "float16", "br"),
        (520, "float16", None, "float32", ""),
        (1024, "float16", "silu", "float32", "wb"),
        (4, "float32", "gelu", "float32", "wb"),
        (24, "float32", None, "float32", "wr"),
        (128, "float32", "silu", "float16", "wbr"),
        (64, "bfloat16", None, "float32", "wb"),
        (640, "bfloat16", "gelu", "float32", "b"),
    ),
)
def test_rows_forward_and_back(
    launches, monkeypatch, channels, dtype, act, kind, present
):
    for rows in (1, 33, 300):
        check_rows((rows, channels), dtype, act, kind, present)
    few = replace(PROFILES["h200"], cores=1)
    monkeypatch.setattr(gpu_norms, "current", lambda: few)
    monkeypatch.setattr(gpu_norms, "BLOCKS", 1)
    check_rows((700, channels), dtype, act, kind, present)  # blocks walk over rows
    sums = "w" in present or "b" in present
    assert len(launches) == 4 * (3 if sums else 2)


def test_a_common_offset_cancels(launches):
    check_rows((33, 64), "float16", "silu", "float32", "wb", shift=100.0)


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


@pytest.mark.parametrize("full", (False, True))
def test_derivatives_are_those_of_mlx(emulator, monkeypatch, full):
    energy = Energy(full)
    expected = energy.derivatives()
    assert not emulator.launches
    monkeypatch.setattr(registry, "norms", lambda: KERNELS)
    for one, wanted in zip(energy.derivatives(), expected, strict=True):
        ref.assert_close(one, exact(wanted))
    assert any("layer_norm_gradient" in name for name in emulator.launches)
