"""CUDA's norms by channel, emulated on the CPU, against the oracle."""

import cases
import mlx.core as mx
import numpy as np
import pytest
import reference as ref
from contractions import exact
from cuda_emulation import emulated
from norm_checks import (
    FEW,
    GROUPS,
    Given,
    array,
    check_derivatives_of_groups,
    check_few_of_segments,
    check_groups,
)
from places import Place
from reference_norms import ACTIVATIONS

import mlx_lattice as ml
from mlx_lattice import ops, registry
from mlx_lattice.registry import COLUMN_SUMS, NORMS, RowSegments

pytestmark = emulated


@pytest.fixture
def place(emulator):
    """CUDA's kernels, emulated, as a place that checks of norms take."""
    here = Place()
    here.name, here.emulator = "cuda", emulator
    return here


@pytest.mark.parametrize("dtype", cases.DTYPES)
@pytest.mark.parametrize("shape", ((1, 1), (2, 3), (300, 8), (90, 17), (20, 264)))
def test_shapes(place, shape, dtype):
    x, values = array(shape, dtype, 0, 1.0, 1000.0)
    mean, var, *_ = NORMS["cuda"].moments(x)
    np.testing.assert_allclose(exact(mean)[0], values.mean(axis=0), 1e-6, 1e-6)
    np.testing.assert_allclose(exact(var)[0], values.var(axis=0), 2e-5, 1e-9)
    Given(shape, dtype, "relu").check(place, dtype)


@pytest.mark.parametrize("rows, dtype", ((2048, "float16"), (1024, "float32")))
def test_as_many_rows_as_registers_hold(place, rows, dtype):
    given = Given((rows, 4), dtype, "relu")
    more = mx.concatenate([given.x, given.x[:1]])
    few = NORMS["cuda"].of_few
    assert few(given.x) is not None and few(more) is None
    given.check_few(place, dtype)


@pytest.mark.parametrize("added", (False, True))
@pytest.mark.parametrize("act", ACTIVATIONS, ids=str)
def test_activations(place, act, added):
    Given((70, 16), "float16", act, added, added).check(place, "float16")


@pytest.mark.parametrize("groups, apart, channels, dtype", GROUPS)
def test_groups_and_parameters_of_segments(place, groups, apart, channels, dtype):
    check_groups(place, groups, apart, channels, dtype)


@pytest.mark.parametrize("facts", FEW, ids=str)
def test_few_rows_of_segments_are_one_launch(place, facts):
    check_few_of_segments(place, *facts)


@pytest.mark.parametrize("groups, apart", ((12, False), (6, True), (3, False)))
def test_derivatives_of_groups(place, monkeypatch, groups, apart):
    check_derivatives_of_groups(monkeypatch, "cuda", groups, apart)


@pytest.mark.parametrize("rows, launches", ((40, 1), (3000, 3)))
def test_launches_of_instances(place, monkeypatch, rows, launches):
    """One each way where elements have few rows, and none but it."""
    coords = np.stack([np.arange(rows) % 2, np.arange(rows)], axis=1)
    coords = coords[np.argsort(coords[:, 0], kind="stable")].astype(np.int32)
    feats, dy = (array((rows, 16), "float32", seed)[0] for seed in (1, 2))
    x = ml.SparseTensor(mx.array(coords), feats)
    ops.global_avg_pool(x)  # finds the rows of elements
    monkeypatch.setattr(registry, "serving", lambda: "cuda")
    place.emulator.launches.clear()
    mx.eval(mx.vjp(lambda a: ops.instance_norm(x.replace(a)).feats, [feats], [dy])[1])
    assert len(place.emulator.launches) == 2 * launches


def test_segments_and_fixed_statistics(place):
    of = np.random.default_rng(0).permutation(np.repeat([0, 2], [60, 9]))
    order = np.argsort(of, kind="stable").astype(np.int32)
    rows = mx.array(of.astype(np.int32))
    segments = RowSegments((0, 60, 60, 69), rows, mx.array(order))
    given = Given((69, 16), "float16", "silu", of=of)
    given.check(place, "float16", segments)
    mean, var = mx.zeros((1, 16)), mx.ones((1, 16))
    given = Given((69, 16), "float16", statistics=(exact(mean), exact(var)))
    given.check(place, "float16", None, (mean, var))


@pytest.mark.parametrize("dtype", cases.DTYPES)
@pytest.mark.parametrize("order", ("sorted", "shuffled"))
def test_means_of_batch_elements(place, monkeypatch, order, dtype):
    """Global pooling sums blocks of rows side by side; it launches no sum of all."""
    of = np.repeat([0, 2], [300, 70])
    if order == "shuffled":
        of = np.random.default_rng(0).permutation(of)
    coords = np.stack([of, np.arange(370)], axis=1).astype(np.int32)
    feats, values = array((370, 24), dtype, 0, 1.0, 3.0)
    x = ml.SparseTensor(mx.array(coords), feats, batch_size=4)
    ops.global_avg_pool(x)  # finds the rows of elements
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
        ((3, 8), "float16", "float16"),
        ((300, 33), "float16", "float32"),
        ((2048, 96), "bfloat16", "float32"),
        ((2049, 24), "float16", "float16"),
        ((9000, 5), "float32", "float32"),
    ),
)
def test_sums_of_columns(place, shape, dtype, kind):
    """One launch of few rows, and two of many."""
    x, values = array(shape, dtype, 0, 1.0, 0.25)
    y = COLUMN_SUMS["cuda"].sums(x, getattr(mx, kind))
    assert y.shape == shape[1:] and y.dtype == getattr(mx, kind)
    ref.assert_close(y, values.sum(axis=0), kind)
    assert len(place.emulator.launches) == (1 if shape[0] <= 2048 else 2)


def test_running_statistics_and_launches(place):
    x, values = array((400, 8), "float16")
    running = mx.zeros((8,)), mx.ones((8,))
    *_, mean, var = NORMS["cuda"].moments(x, None, running, 0.5)
    np.testing.assert_allclose(exact(mean)[0], values.mean(axis=0) / 2, atol=1e-6)
    wanted = 0.5 + values.var(axis=0, ddof=1) / 2
    np.testing.assert_allclose(exact(var)[0], wanted, rtol=1e-5)
    assert len(place.emulator.launches) == 2
    few = NORMS["cuda"].of_few(x)
    y, *_, mean, var = few.normalize(x, None, None, None, running, 0.5)
    np.testing.assert_allclose(exact(mean)[0], values.mean(axis=0) / 2, atol=1e-6)
    np.testing.assert_allclose(exact(var)[0], wanted, rtol=1e-5)
    assert len(place.emulator.launches) == 3
