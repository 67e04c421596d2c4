"""What only Metal's geometry has: a hash whose exchanges may fail, halved searches."""

import cases
import mlx.core as mx
import numpy as np
import pytest
import reference as ref
from metal_checks import host

import mlx_lattice as ml
from mlx_lattice import registry, sync
from mlx_lattice.backends.gpu import kernel as gpu_kernel
from mlx_lattice.backends.metal import geometry as metal_geometry
from mlx_lattice.backends.metal.geometry import MetalGeometry, RowTable
from mlx_lattice.geometry import lattice
from mlx_lattice.geometry.lattice import Rule
from mlx_lattice.geometry.protocol import BoxedRows

host.require()


def rows(coords, d) -> mx.array:
    return mx.array(np.asarray(coords, np.int32).reshape(-1, 1 + d))


def cells(coords, stride):
    bounds, still = lattice.bounds_of(coords), [(0,) * len(stride)]
    box = lattice.box_of(Rule.CELL, bounds, still, stride)
    return MetalGeometry().made_rows(Rule.CELL, coords, still, stride, box)


def test_a_symmetric_kernel_is_searched_by_halves():
    given = rows(cases.geometry("block", 3, 60), 3)
    offsets, out = ref.kernel_offsets(3, 3).tolist(), BoxedRows(given, None)
    with host.recording(checked=True) as record:
        mx.eval(RowTable(given).table(out, offsets, (1, 1, 1), mirrored=True))
    (search,) = (r for r in record.report.launches if "table" in r.kernel)
    assert "submanifold" in search.kernel
    assert search.counts.threads == 13 * given.shape[0]


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


def test_a_fault_is_reported_with_its_line_in_the_file(plant):
    line = plant("  int id = slots[slot];", "  int id = slots[slot + 100];")
    with host.recording(checked=True) as record:
        mx.eval(cells(rows([[0, 5], [1, 5]], 1), (1,)))
    fault = record.report.faults[0]
    assert fault.kind == "device read out of bounds"
    assert "collect_candidates" in fault.kernel
    assert fault.place == f"hash_table.metal:{line}"


# Offsets about the widths of keys, and of two of the widest.
@pytest.mark.parametrize("volume", (7, 8, 15, 16, 31, 32, 63, 64, 127, 128))
def test_keys_have_no_more_bits_than_ranks(volume):
    """Every offset used is the greatest rank but the keys that fill up a region."""
    rng = np.random.default_rng(volume)
    used = rng.random((100, volume)) < 0.4
    used[::9] = used[1]
    used[::7], used[::7, volume - 1] = False, True  # all bits of its rank
    table = mx.array(np.where(used, 5, -1).astype(np.int32))
    with host.recording(checked=True) as record:
        order = np.array(metal_geometry.gray_order(table, 34))
        ordered, masks = metal_geometry.ordered_table(table, mx.array(order), 8)
        mx.eval(ordered, masks)
    assert record.report.faults == ()
    keys = next(b for b in (8, 16, 32, 64) if volume < b or b == 64)
    assert f"uint{keys}_t" in record.report.launches[0].kernel
    every = np.array(lattice.gray_order(table >= 0))
    np.testing.assert_array_equal(order, every[np.argsort(every // 34, kind="stable")])
    np.testing.assert_array_equal(ordered, np.array(table)[order])
    np.testing.assert_array_equal(masks, lattice.mask_words(ordered >= 0, 8))


@pytest.mark.parametrize("cells", ((2, 1 << 20, 1 << 10), (2, 1 << 20, 1 << 11), None))
def test_rows_are_sorted_by_keys_of_as_many_bits_as_their_box_needs(cells):
    """32 bits, 64, and none: then by ranks."""
    rng = np.random.default_rng(3)
    low = np.array([-1, -(2**31), 2**31 - (1 << 20)])
    if cells is None:
        low, ends = np.full(3, -(2**31)), np.full(3, 2**31 - 1)
    else:
        ends = low + np.array(cells) - 1
    given = rng.integers(low, ends + 1, (60, 3))
    given = np.unique(np.concatenate([given, [low, ends]]), axis=0).astype(np.int32)
    mixed = rng.permutation(given)
    bounds = tuple(low.tolist()), tuple(ends.tolist())
    with host.recording(checked=True) as record:
        still, ones = [(0, 0)], (1, 1)
        made = MetalGeometry().made_rows(
            Rule.CELL, mx.array(mixed), still, ones, bounds
        )
        np.testing.assert_array_equal(np.array(made), given)
    assert record.report.faults == ()
    keyed = [r.kernel for r in record.report.launches if "collect" in r.kernel]
    assert len(keyed) == 1
    wide = cells is not None and cells[2] != 1 << 10
    assert ("__3_1_int64_t_" in keyed[0]) == wide


def test_levels_of_more_cells_than_keys_can_number_are_left_to_one_by_one():
    given = rows(cases.geometry("block", 3, 60), 3)
    wide, strides = ((0,) * 4, (1 << 20,) * 4), [(2,) * 3, (4,) * 3]
    with host.recording(checked=True):
        source = BoxedRows(given, lattice.bounds_of(given))
        assert MetalGeometry().start_levels(source, strides, [wide] * 2) is None
        started = MetalGeometry().start_levels(source, strides, None)
        assert started.rows(sync.read(*started.counts), [wide] * 2) is None


@pytest.mark.parametrize("n", (1, 300))
@pytest.mark.parametrize("dims", (1, 2, 3, 4))
def test_a_set_is_checked_with_its_levels_by_one_read(dims, n, monkeypatch):
    """Negative rows in any order, two batches."""
    rng, real, reads = np.random.default_rng(dims), sync.read, []
    given = rng.integers(-90, 90, (n, 1 + dims))
    given[:, 0] %= 2
    given = rng.permutation(np.unique(given, axis=0)).astype(np.int32)
    monkeypatch.setattr(sync, "read", lambda *a: reads.append(len(a)) or real(*a))
    monkeypatch.setattr(registry, "geometry", MetalGeometry)
    manager = ml.CoordinateManager()
    strides = [(2, 3, 1, 2)[:dims], (3, 1, 2, 2)[:dims]]
    with host.recording(checked=True) as record:
        key = manager.insert(mx.array(given))
        levels = manager.cells(key, strides)
        assert len(reads) == 1
        for step, level in zip(np.cumprod(strides, axis=0), levels, strict=True):
            cells = np.unique(given // np.array([1, *step]), axis=0)
            np.testing.assert_array_equal(np.array(manager[level].coords), cells)
    assert record.report.faults == ()
    made = [r.kernel for r in record.report.launches if "candidates" in r.kernel]
    assert len(made) == 3, "look-ups of the set; candidates of both levels, collected"


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
        made = MetalGeometry().made_rows(
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
