"""Sets and relations by CUDA's geometry, emulated: reads, rows, views."""

import itertools

import cases
import mlx.core as mx
import numpy as np
import pytest
from cuda_emulation import Emulator, emulated, emulating
from reference_rows import table_of, tile_order

import mlx_lattice as ml
from mlx_lattice import registry, sync
from mlx_lattice.backends.cuda import geometry as cuda_geometry
from mlx_lattice.geometry import lattice
from mlx_lattice.geometry.lattice import Rule
from mlx_lattice.kernel_spec import KernelSpec

pytestmark = emulated


STRIDES = (2, (1, 2, 2), 3, 2)


@pytest.fixture(name="emulator")
def whole_emulator(cuda_programs):
    """For blocks of ``emulating``: what is expected is of the CPU."""
    return Emulator(cuda_programs)


@pytest.fixture(name="reads")
def counted_reads(monkeypatch):
    real, seen = sync.read, []

    def read(*arrays):
        seen.append(len(arrays))
        return real(*arrays)

    monkeypatch.setattr(sync, "read", read)
    return seen


def check_tiles(relation):
    """Sorted rows are the table's, in the order of their Gray ranks."""
    view, table = cuda_geometry.sorted_rows(relation), np.array(relation.out_in)
    order, placed = np.array(view.rows), np.array(view.table)[:, : len(table)].T
    placed = placed[:, ::-1] if view.mirrored else placed
    np.testing.assert_array_equal(placed, table[order])
    if not view.mirrored:
        np.testing.assert_array_equal(order, tile_order(table >= 0))


@pytest.mark.parametrize("n", (1, 300))
@pytest.mark.parametrize("dims", (1, 2, 3, 4))
def test_levels_of_a_set_that_nobody_has_read(emulator, reads, dims, n):
    """In every dimension, in two batches, with negative rows in any order."""
    rng = np.random.default_rng(dims)
    strides = np.array([(2, 3, 1, 2)[:dims], (3, 1, 2, 2)[:dims]])
    steps = list(map(tuple, strides.cumprod(axis=0).tolist()))
    all_rows = rng.integers(-90, 90, (n, 1 + dims))
    all_rows[:, 0] %= 2
    all_rows = np.unique(all_rows, axis=0).astype(np.int32)
    rows = rng.permutation(all_rows)
    with emulating(emulator):
        manager = ml.CoordinateManager()
        key = manager.insert(mx.array(rows))
        chain = manager.cells(key, list(map(tuple, strides.tolist())))
        assert reads == [dims + 4], "the set's check with the sizes of its levels"
        for step, level in zip(steps, chain, strict=True):
            cells = np.unique(rows // np.array([1, *step]), axis=0)
            np.testing.assert_array_equal(np.array(manager[level].coords), cells)


@pytest.mark.parametrize("extent", (6, 900))
def test_rows_that_rules_make(emulator, extent):
    """Keys of 32 and of 64 bits, in several tiles of the sort and in one."""
    rng, kernels = np.random.default_rng(extent), registry.GEOMETRY["cuda"]
    given = rng.integers(-extent, extent, (5000 if extent == 6 else 700, 4))
    given[:, 0] %= 3
    rows, stride = mx.array(given.astype(np.int32)), (2, 3, 1)
    cube = list(itertools.product((-1, 0, 2), repeat=3))[::3]
    bounds = lattice.bounds_of(rows)
    with emulating(emulator):
        for rule in (Rule.CELL, Rule.REACH, Rule.EXPAND):
            offsets = [(0, 0, 0)] if rule == Rule.CELL else cube
            low, high = lattice.box_of(rule, bounds, offsets, stride)
            # What lies beyond the box is left out.
            facts = rule, rows, offsets, stride, ((low[0], low[1] + 1, *low[2:]), high)
            made, wanted = kernels.rule_rows(*facts), lattice.rule_rows(*facts)
            np.testing.assert_array_equal(np.array(made), np.array(wanted))
        for made, wanted in zip(
            kernels.unique_rows(rows), lattice.unique_rows(rows), strict=True
        ):
            np.testing.assert_array_equal(np.array(made), np.array(wanted))


@pytest.mark.parametrize(("d", "extent"), ((2, 2**30), (3, 300), (4, 90)))
def test_orders_along_curves(emulator, d, extent):
    """Keys of 32 and of 64 bits, in several tiles of the sort."""
    rng = np.random.default_rng(d)
    rows = rng.integers(-extent // 2, extent // 2, (5000, 1 + d))
    rows[:, 0] = rng.integers(-2, 2, 5000)
    rows = mx.array(rng.permutation(np.unique(rows, axis=0)).astype(np.int32))
    for name in lattice.CURVES:
        curve = lattice.curve_of(name, lattice.bounds_of(rows))
        assert curve.is_numbered
        with emulating(emulator):
            order = registry.GEOMETRY["cuda"].curve_order(rows, curve)
        wanted = lattice.curve_order(rows, curve)
        np.testing.assert_array_equal(np.array(order), np.array(wanted))


def check_edges(relation, table):
    """Table, edges and where each offset's start are those of a table by NumPy."""
    np.testing.assert_array_equal(np.array(relation.out_in), table)
    o, k = np.nonzero(table >= 0)
    edges = np.stack([table[o, k], o, k], axis=1)[np.lexsort((o, k))]
    np.testing.assert_array_equal(np.array(relation.edges), edges)
    starts = np.searchsorted(edges[:, 2], np.arange(relation.volume + 1))
    found = np.array(cuda_geometry.offset_starts(relation))
    np.testing.assert_array_equal(found, starts)
    check_pairs(relation, edges)


def pairs_by_offset(rows, spans):
    """The edges (i, o, k) that pairs and their spans stand for."""
    found = [np.zeros((0, 3), np.int32)]
    for k, (begin, end) in enumerate(spans):
        part = rows[max(begin, ~begin) : end]
        part = part[:, ::-1] if begin < 0 else part
        found.append(np.insert(part, 2, k, axis=1))
    return np.concatenate(found)


def check_pairs(relation, edges):
    """Each offset's pairs are its edges, which a mirrored relation lists by halves."""
    counts = np.bincount(edges[:, 2], minlength=relation.volume)
    for size in cuda_geometry.STAGE_PAIRS:
        firsts = np.append(0, np.cumsum(-(-counts // size)))
        found = np.array(cuda_geometry.first_stages(relation, size))
        np.testing.assert_array_equal(found, firsts)
    rows = cuda_geometry.pairs(relation)[0]
    for each, columns in ((relation, [0, 1, 2]), (relation.T, [1, 0, 2])):
        found = pairs_by_offset(*map(np.array, cuda_geometry.pairs(each)))
        wanted = edges[:, columns]
        assert set(map(tuple, found.tolist())) == set(map(tuple, wanted.tolist()))
        assert len(found) == len(wanted)
    middle = (edges[:, 2] == relation.volume // 2).sum() * (relation.volume % 2)
    half = (len(edges) + middle) // 2
    assert len(rows) == (half if relation.mirrored else len(edges))


@pytest.mark.parametrize(
    ("name", "n"), (("negative", 60), ("batches", 200), ("surface", 900), ("far", 1))
)
def test_the_relations_of_a_net(emulator, reads, name, n):
    """Levels at once, a relation and its transposed use, 125 offsets, edge counts."""
    rows = np.random.default_rng(0).permutation(cases.geometry(name, 3, n))
    rows = rows.astype(np.int32)
    with emulating(emulator):
        manager = ml.CoordinateManager()
        before = manager.insert(mx.array(rows))
        stem = manager.submanifold_kernel_relation(before, kernel_size=5)
        chain = manager.cells(before, STRIDES)
        assert reads == [6, len(STRIDES)], "the set's check, then all sizes"
        step, named = np.ones(3, int), [("submanifold", (0, 0), {"kernel_size": 5})]
        for at, (stride, key) in enumerate(zip(STRIDES, chain, strict=True)):
            step = step * np.array(stride)
            cells = np.unique(rows // np.array([1, *step]), axis=0)
            np.testing.assert_array_equal(np.array(manager[key].coords), cells)
            strided = {"kernel_size": 2, "stride": stride}
            named += [
                ("forward", (at, at + 1), strided),
                ("transposed", (at + 1, at), strided),
                ("submanifold", (at + 1, at + 1), {"kernel_size": 3}),
                ("submanifold", (at + 1, at + 1), {"kernel_size": 2}),
            ]
        keys = before, *chain
        relations = [
            manager._between(
                kind, *(manager[keys[end]] for end in ends), KernelSpec.of(3, **kernel)
            )
            for kind, ends, kernel in named
        ]
        assert relations[0] is stem
        cuda_geometry.sorted_rows(relations[0]), cuda_geometry.pairs(relations[0])
        assert relations[0].edges.size
        for relation in relations:
            check_tiles(relation), check_tiles(relation.T)
        reads.clear()
        counts = [relation.n_edges for relation in relations]
        assert len(reads) == 1
        for relation, count in zip(relations, counts, strict=True):
            a, b = np.array(relation.in_coords), np.array(relation.out_coords)
            rule = relation.spec.offsets, relation.spec.stride
            upwards = relation.kind == "transposed"
            table = table_of(a, b, np.array(rule[0]), rule[1], upwards)
            back = table_of(b, a, np.array(rule[0]), rule[1], not upwards)
            assert count == (table >= 0).sum()
            check_edges(relation, table), check_edges(relation.T, back)
        assert len(reads) == 1
    tiled = [name for name in emulator.launches if "relation_tiles" in name]
    assert any("Read" in name for name in tiled), "of a large kernel's table, counted"
