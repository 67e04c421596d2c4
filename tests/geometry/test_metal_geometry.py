"""Metal geometry against the oracle and the portable builders, with every check."""

import cases
import mlx.core as mx
import numpy as np
import pytest
import reference as ref
from conftest import KINDS, pair
from metal_checks import bounded, checked, host

from mlx_lattice.backends import (
    dispatch_bounds,
    gpu_kernel,
    metal_geometry,
    metal_views,
)
from mlx_lattice.backends.metal_geometry import MetalGeometry, RowTable
from mlx_lattice.geometry import curves, keys, output_rows, sync, unique
from mlx_lattice.geometry.output_rows import Rule
from mlx_lattice.geometry.protocol import BoxedRows
from mlx_lattice.kernel_spec import KernelSpec

host.require()

metal = MetalGeometry()
LEAST, MOST = -(2**31), 2**31 - 1
DIMS = (1, 2, 3, 4)
STRIDES = {1: (2,), 2: (1, 3), 3: (2, 2, 2), 4: (1, 2, 1, 3)}


def same(got, expected) -> None:
    assert got.dtype in (mx.int32, mx.uint32, mx.int64)
    np.testing.assert_array_equal(np.array(got), np.array(expected))


def rows(coords, d) -> mx.array:
    return mx.array(np.asarray(coords, np.int32).reshape(-1, 1 + d))


def made(rule, coords, offsets, stride, shape=None):
    """Rows that a rule makes of others, in their box or in a grid."""
    bounds = keys.bounds_of(coords)
    box = output_rows.cut(output_rows.box_of(rule, bounds, offsets, stride), shape)
    return metal.made_rows(rule, coords, offsets, stride, box, shape is not None)


def cells(coords, stride):
    return made(Rule.CELL, coords, [(0,) * len(stride)], stride)


def table_between(coords, out, offsets, stride, **which):
    """The table of a rule between two sets; no compiled look-up reads their box."""
    return RowTable(coords).table(BoxedRows(out, None), offsets, stride, **which)


def repeat_of(coords):
    """The earliest pair of equal rows, as a set is settled."""
    index = RowTable(coords)
    return index.settle(sync.read(*index.facts()))[1] if len(coords) else None


def kernel(d, size=3):
    """Offsets of a kernel as the library has them and as the oracle does."""
    offsets = ref.kernel_offsets(size if d < 4 else min(size, 2), d)
    return [tuple(offset) for offset in offsets.tolist()], offsets


@pytest.mark.parametrize("d", DIMS)
@pytest.mark.parametrize("name", cases.GEOMETRIES)
def test_rows_of_new_sets(name, d):
    coords = cases.geometry(name, d, 40)
    given, stride = rows(coords, d), STRIDES[d]
    offsets, exact = kernel(d)
    for rule, steps, expected in (
        (Rule.CELL, [(0,) * d], ref.cell_rows(coords, stride)),
        (Rule.REACH, offsets, ref.reach_rows(coords, exact, stride)),
        (Rule.EXPAND, offsets, ref.generative_rows(coords, exact, stride)),
    ):
        got = checked(made, rule, given, steps, stride)
        same(got, ref.as_coords(expected, d))
        assert name != "empty" or checked.launches == 0


@pytest.mark.parametrize("d", DIMS)
@pytest.mark.parametrize("name", cases.GEOMETRIES)
def test_tables(name, d):
    coords = cases.geometry(name, d, 40)
    given, stride = rows(coords, d), STRIDES[d]
    offsets, _ = kernel(d)
    facts = {"kernel_size": 3 if d < 4 else 2, "stride": stride}
    forward = ref.relation("forward", coords, **facts)
    out = rows(forward.out_coords, d)
    table = checked(table_between, given, out, offsets, stride)
    same(table, forward.out_in)
    back = checked(table_between, out, given, offsets, stride, transposed=True)
    same(back, forward.in_out)
    subm = ref.relation("submanifold", coords, kernel_size=facts["kernel_size"])
    ones = (1,) * d
    same(checked(table_between, given, given, offsets, ones), subm.out_in)


@pytest.mark.parametrize("d", DIMS)
def test_symmetric_offsets_over_one_set(d):
    coords = cases.geometry("block", d, 60)
    far = (5, -2, 1, -4)[:d]
    pair_of = [tuple(-v for v in far), far]
    one, box = (1,) + (0,) * (d - 1), ref.kernel_offsets(3, d)
    for offsets in (
        [(0,) * d],
        [tuple(-v for v in one), one],
        [pair_of[0], (0,) * d, pair_of[1]],
        cases.CROSS[d],
        [tuple(offset) for offset in box.tolist()],
    ):
        expected = ref.relation("submanifold", coords, offsets=offsets)
        given, ones = rows(coords, d), (1,) * d
        # Crosses list their offsets in another order: those are searched in full.
        mirrored = KernelSpec.of(d, offsets=offsets).is_symmetric
        table = checked(table_between, given, given, offsets, ones, mirrored=mirrored)
        same(table, expected.out_in)


def test_a_symmetric_kernel_is_searched_by_halves():
    given = rows(cases.geometry("block", 3, 60), 3)
    offsets, _ = kernel(3)
    with host.recording(checked=True) as record:
        mx.eval(table_between(given, given, offsets, (1, 1, 1), mirrored=True))
    (search,) = (r for r in record.report.launches if "table" in r.kernel)
    assert "submanifold" in search.kernel
    assert search.counts.threads == 13 * given.shape[0]


@pytest.mark.parametrize("case", KINDS, ids=str)
def test_views(case):
    relation, expected = pair(case)
    check_views(relation.out_in, expected)


@pytest.mark.parametrize(
    "case",
    (
        cases.Case("submanifold", 3, 1),
        cases.Case("submanifold", 3, 4),
        cases.Case("submanifold", 4, 3),
        cases.Case("submanifold", 3, 5),
        cases.Case("submanifold", 3, 7),
    ),
    ids=str,
)
@pytest.mark.parametrize("name", ("empty", "one", "block", "surface"))
def test_views_of_every_volume(case, name):
    relation, expected = pair(case, name, 30)
    check_views(relation.out_in, expected)
    assert name != "empty" or checked.launches == 0


def check_views(table, expected):
    n_in = len(expected.in_coords)
    same(checked(metal.transpose_table, table, n_in), expected.in_out)
    same(checked(metal.edges, table), expected.edges)
    used = table >= 0
    for block in (1, 16):
        masks = checked(metal_views.occupancy_masks, table, block)
        same(masks, curves.mask_words(used, block))
    rank = curves.gray_order(used)
    same(checked(metal.gray_order, table), rank)


def test_edges_over_many_blocks_of_rows():
    rng = np.random.default_rng(0)
    table = rng.integers(-2, 900, (3 * 64 + 5, 9)).clip(-1).astype(np.int32)
    o, k = np.nonzero(table.T >= 0)[::-1]
    same(checked(metal.edges, mx.array(table)), np.stack([table[o, k], o, k], axis=1))


@pytest.mark.parametrize("d", DIMS)
@pytest.mark.parametrize("name", cases.GEOMETRIES)
def test_unique_rows(name, d):
    coords = cases.geometry(name, d, 40)
    again = np.concatenate([coords, coords[::2], coords[:3]])
    repeated = rows(np.random.default_rng(0).permutation(again), d)
    got = checked(metal.unique_rows, repeated)
    expected = unique.unique_rows(repeated)
    same(got.rows, expected.rows)
    same(got.inverse, expected.inverse)
    pairs = [checked(repeat_of, each) for each in (repeated, rows(coords, d))]
    listed = ref.rows_of(repeated)
    later = [i for i, row in enumerate(listed) if row in listed[:i]]
    assert pairs[0] == ((listed.index(listed[later[0]]), later[0]) if later else None)
    assert pairs[1] is None


def test_rows_anywhere_in_int32():
    rng = np.random.default_rng(0)
    values = np.array([LEAST, LEAST + 1, -1, 0, 1, MOST - 1, MOST])
    coords = np.unique(
        np.c_[rng.integers(0, 3, 60), rng.choice(values, (60, 4))], axis=0
    )
    given = rows(rng.permutation(coords), 4)
    twice = mx.concatenate([given, given])
    got = checked(metal.unique_rows, twice)
    same(got.rows, coords)
    same(got.rows[got.inverse], twice)
    expected = ref.as_coords(ref.cell_rows(coords, (2, 3, 1, 5)), 4)
    same(checked(cells, given, (2, 3, 1, 5)), expected)
    offsets = [(1, 0, 0, 0), (-1, 0, 0, 0), (0, 0, 0, 0)]
    table = checked(table_between, given, given, offsets, (1, 1, 1, 1))
    expected = ref.relation("submanifold", np.array(given), offsets=offsets)
    same(table, expected.out_in)
    wide = checked(table_between, given, given, offsets, (3, 3, 3, 3))
    scaled = ref.forward_edges(
        np.array(given), np.array(given), np.array(offsets), (3,) * 4
    )
    same(checked(metal.edges, wide), scaled)


@pytest.mark.parametrize("rule", (Rule.REACH, Rule.EXPAND))
def test_rows_beyond_the_box_are_left_out(rule):
    given = rows([[0, MOST, 0], [0, LEAST, 1]], 2)
    kept = checked(made, rule, given, [(1, 0), (-1, 0)], (1, 1), (2**31, 5))
    assert ref.rows_of(kept) == [(0, MOST - 1, 0)]


@pytest.mark.parametrize("shape", ((4, 3), (0, 3), (9, 9)), ids=str)
def test_rows_are_cut_to_a_grid(shape):
    coords = cases.geometry("negative", 2, 40)
    offsets, exact = kernel(2)
    reached = checked(made, Rule.REACH, rows(coords, 2), offsets, (2, 1), shape)
    same(reached, ref.as_coords(ref.reach_rows(coords, exact, (2, 1), shape), 2))
    more = checked(made, Rule.EXPAND, rows(coords, 2), offsets, (2, 1), shape)
    same(more, ref.as_coords(ref.generative_rows(coords, exact, (2, 1), shape), 2))


def test_candidates_in_parts_and_bounded_dispatches(monkeypatch):
    monkeypatch.setitem(dispatch_bounds.METAL_CUTS, "candidates", 200)
    bounded(monkeypatch, "probes", 100)
    test_rows_of_new_sets("scattered", 3)
    test_rows_of_new_sets("one", 3)
    test_tables("scattered", 3)
    assert checked.launches > 3


@pytest.mark.parametrize("seed", range(4))
def test_the_hash_survives_exchanges_that_fail(seed):
    given = np.random.default_rng(seed).integers(0, 5, (300, 3))
    with host.recording(checked=True, order="random", seed=seed) as record:
        got = cells(rows(given, 2), (1, 1))
        found = RowTable(rows(given, 2)).find(rows(given, 2)).tolist()
    assert record.report.faults == ()
    listed = given.tolist()
    assert found == [listed.index(row) for row in listed]
    same(got, np.unique(given, axis=0))


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


def test_of_equal_rows_the_first_is_found():
    given = rows([[0, 5], [1, 5], [0, 5], [0, 6], [1, 5], [0, 5]], 1)
    wanted = rows([[0, 5], [1, 5], [0, 6], [0, 7]], 1)
    found = checked(lambda: RowTable(given).find(wanted))
    assert found.tolist() == [0, 1, 3, -1]
