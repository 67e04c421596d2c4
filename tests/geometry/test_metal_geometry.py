"""Metal geometry against the oracle and the portable builders, with every check."""

import cases
import mlx.core as mx
import numpy as np
import pytest
import reference as ref
from conftest import KINDS, pair
from metal_checks import bounded, checked, host

from mlx_lattice.backends import dispatch_bounds, metal, metal_kernels
from mlx_lattice.geometry import curves, portable

host.require()

LEAST, MOST = -(2**31), 2**31 - 1
DIMS = (1, 2, 3, 4)
STRIDES = {1: (2,), 2: (1, 3), 3: (2, 2, 2), 4: (1, 2, 1, 3)}


def same(got, expected) -> None:
    assert got.dtype in (mx.int32, mx.uint32, mx.int64)
    np.testing.assert_array_equal(np.array(got), np.array(expected))


def rows(coords, d) -> mx.array:
    return mx.array(np.asarray(coords, np.int32).reshape(-1, 1 + d))


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
    made = (
        (metal.cell_rows, (stride,), ref.cell_rows(coords, stride)),
        (
            metal.reached_rows,
            (offsets, stride),
            ref.reach_rows(coords, exact, stride),
        ),
        (
            metal.expanded_rows,
            (offsets, stride),
            ref.generative_rows(coords, exact, stride),
        ),
    )
    for build, arguments, expected in made:
        same(checked(build, given, *arguments), ref.as_coords(expected, d))
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
    table = checked(metal.neighbour_table, given, out, offsets, stride, False)
    same(table, forward.out_in)
    back = checked(metal.neighbour_table, out, given, offsets, stride, True)
    same(back, forward.in_out)
    subm = ref.relation("submanifold", coords, kernel_size=facts["kernel_size"])
    ones = (1,) * d
    table = checked(metal.neighbour_table, given, given, offsets, ones, False)
    same(table, subm.out_in)


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
        table = checked(metal.neighbour_table, given, given, offsets, ones, False)
        same(table, expected.out_in)


def test_a_symmetric_kernel_is_searched_by_halves():
    given = rows(cases.geometry("block", 3, 60), 3)
    offsets, _ = kernel(3)
    with host.recording(checked=True) as record:
        mx.eval(metal.neighbour_table(given, given, offsets, (1, 1, 1), False))
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
    n_in, (n_out, volume) = len(expected.in_coords), table.shape
    same(checked(metal.transpose_table, table, n_in), expected.in_out)
    same(checked(metal.edges, table), expected.edges)
    starts, listed = checked(metal.output_csr, table)
    by_row = expected.edges[np.lexsort((expected.edges[:, 2], expected.edges[:, 1]))]
    same(listed, by_row)
    degrees = np.bincount(expected.edges[:, 1], minlength=n_out)
    same(starts, np.concatenate([[0], np.cumsum(degrees)]))
    used = table >= 0
    for block in (1, 16):
        masks = checked(metal.occupancy_masks, table, block)
        same(masks, curves.mask_words(used, block))
    rank = curves.gray_order(used)
    same(checked(metal.gray_order, table), rank)
    sorted_rows = checked(metal.sorted_rows, table)
    same(sorted_rows.rows, rank)
    same(sorted_rows.table, np.array(table)[np.array(rank)].reshape(n_out, volume))
    same(sorted_rows.masks, curves.mask_words(sorted_rows.table >= 0, 16))


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
    unique = checked(metal.unique_rows, repeated)
    expected = portable.unique_rows(repeated)
    same(unique.rows, expected.rows)
    same(unique.inverse, expected.inverse)
    pairs = [checked(metal.first_duplicate, r) for r in (repeated, rows(coords, d))]
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
    unique = checked(metal.unique_rows, twice)
    same(unique.rows, coords)
    same(unique.rows[unique.inverse], twice)
    cells = ref.cell_rows(coords, (2, 3, 1, 5))
    same(checked(metal.cell_rows, given, (2, 3, 1, 5)), ref.as_coords(cells, 4))
    offsets = [(1, 0, 0, 0), (-1, 0, 0, 0), (0, 0, 0, 0)]
    table = checked(metal.neighbour_table, given, given, offsets, (1, 1, 1, 1), False)
    expected = ref.relation("submanifold", np.array(given), offsets=offsets)
    same(table, expected.out_in)
    wide = checked(metal.neighbour_table, given, given, offsets, (3, 3, 3, 3), False)
    scaled = ref.forward_edges(
        np.array(given), np.array(given), np.array(offsets), (3,) * 4
    )
    same(checked(metal.edges, wide), scaled)


@pytest.mark.parametrize("build", (metal.reached_rows, metal.expanded_rows))
def test_rows_beyond_int32_raise(build):
    given = rows([[0, MOST, 0], [0, LEAST, 1]], 2)
    with pytest.raises(ValueError, match="beyond int32"):
        checked(build, given, [(1, 0), (-1, 0)], (1, 1))
    kept = checked(build, given, [(1, 0), (-1, 0)], (1, 1), (2**31, 5))
    assert ref.rows_of(kept) == [(0, MOST - 1, 0)]


@pytest.mark.parametrize("shape", ((4, 3), (0, 3), (9, 9)), ids=str)
def test_rows_are_cut_to_a_grid(shape):
    coords = cases.geometry("negative", 2, 40)
    offsets, exact = kernel(2)
    reached = checked(metal.reached_rows, rows(coords, 2), offsets, (2, 1), shape)
    same(reached, ref.as_coords(ref.reach_rows(coords, exact, (2, 1), shape), 2))
    made = checked(metal.expanded_rows, rows(coords, 2), offsets, (2, 1), shape)
    same(made, ref.as_coords(ref.generative_rows(coords, exact, (2, 1), shape), 2))


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
        made = metal.cell_rows(rows(given, 2), (1, 1))
        found = metal.RowTable(rows(given, 2)).find(rows(given, 2)).tolist()
    assert record.report.faults == ()
    listed = given.tolist()
    assert found == [listed.index(row) for row in listed]
    same(made, np.unique(given, axis=0))


@pytest.fixture
def plant(monkeypatch):
    """Changes a line of hash_table.metal; gives the number of the line."""
    source = metal_kernels.source

    def change(old: str, new: str) -> int:
        text = source("hash_table")
        assert text.count(old) == 1
        changed = {"hash_table": text.replace(old, new)}
        monkeypatch.setattr(
            metal_kernels, "source", lambda f: changed.get(f) or source(f)
        )
        metal_kernels._build.cache_clear()
        return 1 + text[: text.index(old)].count("\n")

    yield change
    metal_kernels._build.cache_clear()


def test_a_hash_that_trusts_the_exchange_is_found_wrong(plant):
    plant("      continue;  //", "      slot = next_slot(slot, part);  //")
    with pytest.raises(AssertionError):
        for seed in range(4):
            test_the_hash_survives_exchanges_that_fail(seed)


def test_a_fault_is_reported_with_its_line_in_the_file(plant):
    line = plant("  int id = slots[slot];", "  int id = slots[slot + 100];")
    with host.recording(checked=True) as record:
        mx.eval(metal.cell_rows(rows([[0, 5], [1, 5]], 1), (1,)))
    fault = record.report.faults[0]
    assert fault.kind == "device read out of bounds"
    assert "collect_candidates" in fault.kernel
    assert fault.place == f"hash_table.metal:{line}"


def test_of_equal_rows_the_first_is_found():
    given = rows([[0, 5], [1, 5], [0, 5], [0, 6], [1, 5], [0, 5]], 1)
    wanted = rows([[0, 5], [1, 5], [0, 6], [0, 7]], 1)
    found = checked(lambda: metal.RowTable(given).find(wanted))
    assert found.tolist() == [0, 1, 3, -1]
