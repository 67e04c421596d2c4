"""Geometry of every backend that is here against the oracle.

MLX operations, the extension, Metal and CUDA fulfil one protocol: one list of checks.
"""

from functools import partial

import cases
import mlx.core as mx
import numpy as np
import pytest
import reference as ref
from conftest import pair
from contractions import moved
from metal_checks import checked
from places import HERE, MetalHost, agreed
from reference_rows import table_of

from mlx_lattice import sync
from mlx_lattice.geometry import lattice
from mlx_lattice.geometry.lattice import Rule
from mlx_lattice.geometry.tables import BoxedRows
from mlx_lattice.kernel_spec import KernelSpec
from mlx_lattice.registry import GEOMETRY

LEAST, MOST = -(2**31), 2**31 - 1
DIMS = (1, 2, 3, 4)
STRIDES = {1: (2,), 2: (1, 3), 3: (2, 2, 2), 4: (1, 2, 1, 3)}
places = pytest.mark.parametrize("place", HERE, ids=lambda place: place.name)


def same(got, expected) -> None:
    assert got.dtype in (mx.int32, mx.uint32, mx.int64)
    np.testing.assert_array_equal(np.array(got), np.array(expected))


def rows(coords, d) -> mx.array:
    return mx.array(np.asarray(coords, np.int32).reshape(-1, 1 + d))


def launched_nothing(place) -> bool:
    """Whether a place's last call launched no kernel, where they are seen."""
    return not isinstance(place, MetalHost) or checked.launches == 0


def made(place, rule, coords, offsets, stride, shape=None, box_of=lattice.box_of):
    """Rows that a rule makes of others, in their box or in a grid."""
    box = box_of(rule, lattice.bounds_of(coords), offsets, stride)
    box = lattice.cut(box, shape)
    arguments = rule, coords, offsets, stride, box
    got = agreed(place, GEOMETRY[place.name].rule_rows, *arguments)
    # The same rows where their number is said.
    said = agreed(place, GEOMETRY[place.name].rule_rows, *arguments, len(got))
    same(said, got)
    return got


def cells(place, coords, stride):
    return made(place, Rule.CELL, coords, [(0,) * len(stride)], stride)


def index_of(place, coords):
    """A look-up that is settled, as a coordinate set has it."""
    index = GEOMETRY[place.name].index(coords)
    if len(coords):
        index.settle(sync.read(*index.facts()))
    return index


def table_between(place, coords, out, offsets, stride, **which):
    """The table of a rule between two sets."""

    def table():
        target = BoxedRows(out, lattice.bounds_of(out))
        return index_of(place, coords).table(target, offsets, stride, **which)

    return agreed(place, table)


def repeat_of(place, coords):
    """The earliest pair of equal rows, as a set is settled."""

    def pair_of_equals():
        index = GEOMETRY[place.name].index(coords)
        repeat = index.settle(sync.read(*index.facts()))[1]
        return mx.array(repeat or (-1, -1))

    if not len(coords):
        return None
    found = tuple(agreed(place, pair_of_equals).tolist())
    return None if found == (-1, -1) else found


def kernel(d, size=3):
    """Offsets of a kernel as the library has them and as the oracle does."""
    offsets = ref.kernel_offsets(size if d < 4 else min(size, 2), d)
    return [tuple(offset) for offset in offsets.tolist()], offsets


@places
@pytest.mark.parametrize("d", DIMS)
@pytest.mark.parametrize("name", cases.GEOMETRIES)
def test_rows_of_new_sets(place, name, d):
    coords = cases.geometry(name, d, 40)
    given, stride = rows(coords, d), STRIDES[d]
    offsets, exact = kernel(d)
    for rule, steps, expected in (
        (Rule.CELL, [(0,) * d], ref.cell_rows(coords, stride)),
        (Rule.REACH, offsets, ref.reach_rows(coords, exact, stride)),
        (Rule.EXPAND, offsets, ref.generative_rows(coords, exact, stride)),
    ):
        got = made(place, rule, given, steps, stride)
        same(got, ref.as_coords(expected, d))
        assert name != "empty" or launched_nothing(place)


def levels_of(geometry, given, strides, boxes):
    """All at once where that is to be had, as for a set that was read."""
    source = BoxedRows(given, lattice.bounds_of(given))
    started = geometry.start_levels(source, strides, boxes)
    if started is None:
        return geometry.levels(given, strides, boxes)
    return started.rows(sync.read(*started.counts), boxes)


@places
@pytest.mark.parametrize("d", DIMS)
@pytest.mark.parametrize("name", cases.GEOMETRIES)
def test_levels_of_cells(place, name, d):
    """Of strides that differ by axis, and of 1: each the cells of the one before."""
    coords = cases.geometry(name, d, 60)
    given, step = rows(coords, d), np.ones(d, int)
    strides, boxes, expected = [], [], []
    for chain in ((2,) * d, STRIDES[d], (3,) * d, (1,) * d):
        step = step * chain
        strides.append(tuple(step.tolist()))
        still, bounds = [(0,) * d], lattice.bounds_of(given)
        boxes.append(lattice.box_of(Rule.CELL, bounds, still, strides[-1]))
        expected.append(ref.as_coords(ref.cell_rows(coords, strides[-1]), d))
    for count in (1, 2, 4):
        facts = given, strides[:count], boxes[:count]
        got = agreed(place, partial(levels_of, GEOMETRY[place.name]), *facts)
        assert len(got) == count
        for level, wanted in zip(got, expected, strict=False):
            same(level, wanted)


@places
@pytest.mark.parametrize("d", DIMS)
@pytest.mark.parametrize("name", cases.GEOMETRIES)
def test_tables(place, name, d):
    coords = cases.geometry(name, d, 40)
    given, stride = rows(coords, d), STRIDES[d]
    offsets, _ = kernel(d)
    facts = {"kernel_size": 3 if d < 4 else 2, "stride": stride}
    forward = ref.relation("forward", coords, **facts)
    out = rows(forward.out_coords, d)
    table = table_between(place, given, out, offsets, stride)
    same(table, forward.out_in)
    back = table_between(place, out, given, offsets, stride, transposed=True)
    same(back, forward.in_out)
    subm = ref.relation("submanifold", coords, kernel_size=facts["kernel_size"])
    ones = (1,) * d
    same(table_between(place, given, given, offsets, ones), subm.out_in)


@places
@pytest.mark.parametrize("d", DIMS)
def test_symmetric_offsets_over_one_set(place, d):
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
        table = table_between(place, given, given, offsets, ones, mirrored=mirrored)
        same(table, expected.out_in)


@places
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
def test_views_of_every_volume(place, case, name):
    relation, expected = pair(case, name, 30)
    check_views(place, relation.out_in, expected)
    assert name != "empty" or launched_nothing(place)


@places
@pytest.mark.parametrize("d", DIMS)
@pytest.mark.parametrize("name", cases.GEOMETRIES)
def test_unique_rows(place, name, d):
    coords = cases.geometry(name, d, 40)
    again = np.concatenate([coords, coords[::2], coords[:3]])
    repeated = rows(np.random.default_rng(0).permutation(again), d)
    got = agreed(place, GEOMETRY[place.name].unique_rows, repeated)
    expected = lattice.unique_rows(repeated)
    same(got.rows, expected.rows)
    same(got.inverse, expected.inverse)
    pairs = [repeat_of(place, each) for each in (repeated, rows(coords, d))]
    listed = ref.rows_of(repeated)
    later = [i for i, row in enumerate(listed) if row in listed[:i]]
    assert pairs[0] == ((listed.index(listed[later[0]]), later[0]) if later else None)
    assert pairs[1] is None


@places
@pytest.mark.parametrize("share", (0.0, 0.4, 1.0))
@pytest.mark.parametrize("d", DIMS)
@pytest.mark.parametrize("n", (1, 7, 300))
def test_kept_rows(place, n, d, share):
    """Some rows, none, and all; of one tile and of more than one block."""
    rng = np.random.default_rng(n)
    coords = rng.integers(LEAST, MOST, (n, 1 + d), np.int32)
    mask = rng.random(n) < share

    def keep():
        given = mx.array(mask), mx.array(coords)
        started = GEOMETRY[place.name].start_masked(*given)
        ((count,),) = sync.read(started.count)
        return started.rows(count)

    rows, places, kept = agreed(place, keep)
    same(rows, np.flatnonzero(mask))
    same(places, np.where(mask, mask.cumsum() - 1, -1))
    same(kept, coords[mask])
    assert {each.dtype for each in (rows, places, kept)} == {mx.int32}


@places
def test_rows_anywhere_in_int32(place):
    rng = np.random.default_rng(0)
    values = np.array([LEAST, LEAST + 1, -1, 0, 1, MOST - 1, MOST])
    coords = np.unique(
        np.c_[rng.integers(0, 3, 60), rng.choice(values, (60, 4))], axis=0
    )
    given = rows(rng.permutation(coords), 4)
    twice = mx.concatenate([given, given])
    got = agreed(place, GEOMETRY[place.name].unique_rows, twice)
    same(got.rows, coords)
    same(got.rows[got.inverse], twice)
    expected = ref.as_coords(ref.cell_rows(coords, (2, 3, 1, 5)), 4)
    same(cells(place, given, (2, 3, 1, 5)), expected)
    offsets = [(1, 0, 0, 0), (-1, 0, 0, 0), (0, 0, 0, 0)]
    table = table_between(place, given, given, offsets, (1, 1, 1, 1))
    expected = ref.relation("submanifold", np.array(given), offsets=offsets)
    same(table, expected.out_in)
    wide = table_between(place, given, given, offsets, (3, 3, 3, 3))
    scaled = ref.forward_edges(
        np.array(given), np.array(given), np.array(offsets), (3,) * 4
    )
    same(agreed(place, GEOMETRY[place.name].edges, wide), scaled)


@places
@pytest.mark.parametrize("rule", (Rule.REACH, Rule.EXPAND))
def test_rows_beyond_the_box_are_left_out(place, rule):
    """Or refused, by the extension: rows at both ends of int32 are moved beyond."""
    given = rows([[0, MOST, 0], [0, LEAST, 1]], 2)
    if place.name == "cpu" and rule == Rule.EXPAND:
        with pytest.raises(ValueError, match="which int32 cannot"):
            made(place, rule, given, [(1, 0), (-1, 0)], (1, 1), (2**31, 5))
        return
    kept = made(place, rule, given, [(1, 0), (-1, 0)], (1, 1), (2**31, 5))
    assert ref.rows_of(kept) == [(0, MOST - 1, 0)]


@places
def test_tables_of_rows_times_huge_strides(place):
    """Products of which one column alone takes as many bits as a key has."""
    rng = np.random.default_rng(0)
    stride, offsets = (2**30, MOST), [(0, 0), (1, -1), (-2, 5)]
    coarse = rng.permutation(
        np.c_[np.arange(60) % 2, rng.integers(LEAST, MOST, 60), rng.integers(-1, 2, 60)]
    )
    coarse[:20, 1] = rng.permutation(20) % 5 - 2
    coarse = np.unique(coarse, axis=0)
    fine = np.array(
        [
            (b, x * stride[0] + i, y * stride[1] + j)
            for b, x, y in coarse.tolist()
            for i, j in offsets
            if abs(x) < 2 and abs(y * stride[1] + j) <= MOST
        ]
    )
    fine = rng.permutation(np.unique(fine, axis=0))
    up = table_between(
        place, rows(coarse, 2), rows(fine, 2), offsets, stride, transposed=True
    )
    same(up, table_of(coarse, fine, offsets, stride, True))
    down = table_between(place, rows(fine, 2), rows(coarse, 2), offsets, stride)
    same(down, table_of(fine, coarse, offsets, stride, False))
    assert (np.array(up) >= 0).sum() == (np.array(down) >= 0).sum() > 20


@places
@pytest.mark.parametrize("shape", ((4, 3), (0, 3), (9, 9)), ids=str)
def test_rows_are_cut_to_a_grid(place, shape):
    coords = cases.geometry("negative", 2, 40)
    offsets, exact = kernel(2)
    reached = made(place, Rule.REACH, rows(coords, 2), offsets, (2, 1), shape)
    same(reached, ref.as_coords(ref.reach_rows(coords, exact, (2, 1), shape), 2))
    more = made(place, Rule.EXPAND, rows(coords, 2), offsets, (2, 1), shape)
    same(more, ref.as_coords(ref.generative_rows(coords, exact, (2, 1), shape), 2))


@places
def test_of_equal_rows_the_first_is_found(place):
    given = rows([[0, 5], [1, 5], [0, 5], [0, 6], [1, 5], [0, 5]], 1)
    wanted = rows([[0, 5], [1, 5], [0, 6], [0, 7]], 1)
    found = agreed(place, lambda: index_of(place, given).find(wanted))
    assert found.tolist() == [0, 1, 3, -1]


def check_views(place, table, expected):
    n_in = len(expected.in_coords)
    same(
        agreed(place, GEOMETRY[place.name].transpose_table, table, n_in),
        expected.in_out,
    )
    same(agreed(place, GEOMETRY[place.name].edges, table), expected.edges)
    used = table >= 0
    rank = lattice.gray_order(used)
    same(agreed(place, GEOMETRY[place.name].gray_order, table), rank)


@places
@pytest.mark.parametrize("n", (1, 63, 64, 65, 4097))
@pytest.mark.parametrize("volume", (1, 27, 32, 33, 65))
def test_orders_and_edges(place, volume, n):
    """The ranks ascend, and equal ones keep their order."""
    rng = np.random.default_rng(volume)
    table = rng.integers(-400, 500, (n, volume)).clip(-1).astype(np.int32)
    order = agreed(place, GEOMETRY[place.name].gray_order, mx.array(table))
    same(order, lattice.gray_order(mx.array(table >= 0)))
    in_regions = agreed(place, GEOMETRY[place.name].gray_order, mx.array(table), 60)
    order = np.array(order)
    same(in_regions, order[np.argsort(order // 60, kind="stable")])
    o, k = np.nonzero(table.T >= 0)[::-1]
    edges = agreed(place, GEOMETRY[place.name].edges, mx.array(table))
    same(edges, np.stack([table[o, k], o, k], axis=1))


@places
@pytest.mark.parametrize("before", (0, 1, 2))
@pytest.mark.parametrize("volume", (1, 2, 3, 27, 33))
def test_views_of_a_table_at_any_address(place, volume, before):
    """Blocks of four rows, with and without a tail; no rows, one row."""
    rng = np.random.default_rng(volume)
    for n in (0, 1, 2, 4, 7, 66, 131):
        ranks = [rng.permutation(n + 3)[:n] for _ in range(volume)]
        table = np.stack(ranks, axis=1).astype(np.int32).reshape(n, volume)
        table[rng.random(table.shape) < 0.4] = -1
        given = moved(mx.array(table), before) if before else mx.array(table)
        back = agreed(place, GEOMETRY[place.name].transpose_table, given, n + 3)
        wanted = np.full((n + 3, volume), -1)
        o, k = np.nonzero(table.T >= 0)[::-1]
        wanted[table[o, k], k] = o
        same(back, wanted)
        edges = agreed(place, GEOMETRY[place.name].edges, given)
        same(edges, np.stack([table[o, k], o, k], axis=1))


@places
@pytest.mark.parametrize("d", (1, 3, 4))
@pytest.mark.parametrize("extent", (6, 500, 1 << 20), ids=("dense", "sparse", "wide"))
def test_sets_of_many_rows(place, extent, d):
    """Keys of 32 and of 64 bits, and more of them than a block of a sort takes."""
    rng = np.random.default_rng(d)
    given = rng.integers(-extent, extent, (9000, 1 + d)).astype(np.int32)
    given[:, 0] = rng.integers(0, 3, len(given))
    got = agreed(place, lambda: GEOMETRY[place.name].unique_rows(mx.array(given))[:2])
    expected, inverse = np.unique(given, axis=0, return_inverse=True)
    same(got[0], expected)
    same(got[1], inverse.ravel())
    box = tuple(zip(*((-extent, extent) for _ in range(1 + d)), strict=True))
    for known in ((box,), (box, len(expected)), (None, len(expected))):
        got = agreed(place, GEOMETRY[place.name].unique_rows, mx.array(given), *known)
        same(got[0], expected)
        same(got[1], inverse.ravel())
    floors = given // np.array([1] + [3] * d)
    same(cells(place, mx.array(given), (3,) * d), np.unique(floors, axis=0))


@places
@pytest.mark.parametrize("before", (1, 2, 3))
def test_rows_at_any_address(place, before):
    coords = cases.geometry("batches", 3, 60)
    given, (offsets, _) = moved(coords, before), kernel(3)
    subm = ref.relation("submanifold", coords, kernel_size=3)
    same(table_between(place, given, given, offsets, (1, 1, 1)), subm.out_in)
    got = agreed(place, lambda: GEOMETRY[place.name].unique_rows(given)[:1])
    same(got[0], np.unique(coords, axis=0))
