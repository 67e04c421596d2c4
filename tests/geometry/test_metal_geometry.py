"""What only Metal's geometry has: a hash whose exchanges may fail, halved searches."""

import mlx.core as mx
import numpy as np
import pytest
from metal_checks import host

from mlx_lattice.backends.gpu import kernel as gpu_kernel
from mlx_lattice.backends.metal import geometry as metal_geometry
from mlx_lattice.backends.metal.geometry import MetalGeometry, RowTable
from mlx_lattice.geometry import lattice
from mlx_lattice.geometry.lattice import Rule
from mlx_lattice.geometry.tables import BoxedRows

host.require()


def rows(coords, d) -> mx.array:
    return mx.array(np.asarray(coords, np.int32).reshape(-1, 1 + d))


def cells(coords, stride):
    bounds, still = lattice.bounds_of(coords), [(0,) * len(stride)]
    box = lattice.box_of(Rule.CELL, bounds, still, stride)
    return MetalGeometry().rule_rows(Rule.CELL, coords, still, stride, box)


@pytest.mark.parametrize("seed", range(4))
def test_the_hash_survives_exchanges_that_fail(seed):
    given = np.random.default_rng(seed).integers(0, 5, (300, 3))
    with host.recording(checked=True, order="random", seed=seed) as record:
        got = cells(rows(given, 2), (1, 1))
        found = RowTable(rows(given, 2)).find(rows(given, 2)).tolist()
    assert record.report.faults == ()
    listed = given.tolist()
    assert found == [listed.index(row) for row in listed]
    np.testing.assert_array_equal(np.array(got), np.unique(given, axis=0))


@pytest.fixture
def plant(monkeypatch):
    """Changes a line of hash_table.metal; gives the number of the line."""
    source = gpu_kernel.source

    def change(old: str, new: str) -> int:
        text = source("metal", "hash_table.metal")
        assert text.count(old) == 1
        changed = {"hash_table.metal": text.replace(old, new)}
        monkeypatch.setattr(
            gpu_kernel, "source", lambda b, f: changed.get(f) or source(b, f)
        )
        metal_geometry._kernel.cache_clear()
        return 1 + text[: text.index(old)].count("\n")

    yield change
    metal_geometry._kernel.cache_clear()


def test_a_hash_that_trusts_the_exchange_is_found_wrong(plant):
    plant("      continue;  //", "      slot = next_slot(slot, part);  //")
    with pytest.raises(AssertionError):
        for seed in range(4):
            test_the_hash_survives_exchanges_that_fail(seed)


FAR = 2**31 - 1
# Powers of two, which shift, and others; the last leave nothing or little of int32.
STEPS = 1, 2, 3, 8, 12, 2**30, 2**31 - 1


def at_the_ends(seed):
    """(N, 2) sorted unique int32 rows near zero and near the ends of int32."""
    near = np.random.default_rng(seed).integers(-9, 10, 60)
    values = [near, np.arange(4) + FAR - 3, np.arange(4) - FAR - 1, FAR // 3 + near]
    line = np.unique(np.concatenate(values))
    return np.stack([np.zeros_like(line), line], axis=1)


@pytest.mark.parametrize("step", STEPS)
@pytest.mark.parametrize("transposed", [False, True])
def test_strides_and_offsets_as_far_as_int32_goes(step, transposed):
    coords = at_the_ends(step)
    offsets = [-FAR - 1, -FAR, -step, -3, 0, 1, step, FAR]
    out = BoxedRows(rows(coords, 1), None)
    with host.recording(checked=True) as record:
        table = RowTable(out.coords).table(
            out, [(j,) for j in offsets], (step,), transposed=transposed
        )
        got = table.tolist()
    assert record.report.faults == ()
    places = {int(v): i for i, v in enumerate(coords[:, 1])}

    def found(out, offset):
        if not transposed:
            return places.get(out * step + offset, -1)
        whole, rest = divmod(out - offset, step)
        return places.get(whole, -1) if rest == 0 else -1

    expected = [[found(int(v), j) for j in offsets] for v in coords[:, 1]]
    assert got == expected
    assert (np.array(expected) >= 0).any()


@pytest.mark.parametrize("step", STEPS)
@pytest.mark.parametrize("rule", [Rule.CELL, Rule.REACH, Rule.EXPAND])
def test_rules_as_far_as_int32_goes(step, rule):
    coords = at_the_ends(step)
    offsets = [(0,)] if rule == Rule.CELL else [(-FAR - 1,), (-1,), (0,), (FAR,)]
    low, high = (0, -FAR - 1), (0, FAR)
    with host.recording(checked=True) as record:
        made = MetalGeometry().rule_rows(
            rule, rows(coords, 1), offsets, (step,), (low, high)
        )
        got = made[:, 1].tolist()
    assert record.report.faults == ()
    line = [int(v) for v in coords[:, 1]]
    pairs = [(v, j) for v in line for (j,) in offsets]
    values = {
        Rule.CELL: [v // step for v in line],
        Rule.REACH: [(v - j) // step for v, j in pairs if (v - j) % step == 0],
        Rule.EXPAND: [v * step + j for v, j in pairs],
    }[rule]
    inside = sorted({v for v in values if -FAR - 1 <= v <= FAR})
    assert got == inside
