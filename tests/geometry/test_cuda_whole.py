"""Relations of a net by CUDA's geometry, emulated as a whole, against NumPy."""

import cases
import mlx.core as mx
import numpy as np
import pytest
from cuda_emulation import emulated, emulating
from cuda_sets import (  # noqa: F401 (fixtures)
    STRIDES,
    check_tiles,
    counted_reads,
    whole_emulator,
)
from reference_rows import table_of

import mlx_lattice as ml
from mlx_lattice.backends.cuda import geometry as cuda_geometry
from mlx_lattice.kernel_spec import KernelSpec

pytestmark = emulated


def test_rows_that_feed_themselves_are_neither_searched_nor_sorted(emulator, reads):
    rows = mx.array(cases.geometry("surface", 3, 300))
    with emulating(emulator):
        manager = ml.CoordinateManager()
        key = manager.insert(rows)
        relation = manager.submanifold_kernel_relation(key, kernel_size=1)
        made, read = len(emulator.launches), len(reads)
        for each in (relation, relation.T, manager.kernel_relation(key, kernel_size=1)):
            pairs = np.array(cuda_geometry.pair_arrays(each)[0])
            np.testing.assert_array_equal(pairs, np.arange(len(rows))[:, None] + [0, 0])
            check_tiles(each)
            assert each.n_edges == len(rows)
        names = [name.split("_")[1:3] for name in emulator.launches[made:]]
        # Tiles of all, and the table that was asked for beside them.
        assert names == [["identity", "tiles"], ["unsort", "table"]]
        assert len(reads) == read
        check_edges(relation, np.arange(len(rows))[:, None])


@pytest.mark.parametrize("n", (1, 5, 32, 384, 385, 1000))
def test_tiles_of_rows_that_feed_themselves(emulator, n):
    """The values of their array are not read."""
    with emulating(emulator):
        tiles = cuda_geometry.identity_tiles(mx.full((n, 4), 7, dtype=mx.int32))
        pitch, launches = cuda_geometry.pitch_of(n), len(emulator.launches)
        expected = np.where(np.arange(pitch) < n, np.arange(pitch), -1)
        np.testing.assert_array_equal(np.array(tiles.table), expected[None])
        np.testing.assert_array_equal(np.array(tiles.rows), np.arange(n))
        used = (expected.reshape(-1, 32) >= 0).any(axis=1, keepdims=True)
        np.testing.assert_array_equal(np.array(tiles.masks), used)
        assert launches == 1 and not tiles.mirrored


def test_tiles_of_no_rows_are_those_of_an_empty_table(emulator):
    none = mx.zeros((0,), dtype=mx.int32)
    table, masks = mx.zeros((27, 128), dtype=mx.int32), mx.zeros((4, 1), mx.uint32)
    with emulating(emulator):
        empty = cuda_geometry.table_of(cuda_geometry.Sorted(table, none, masks))
    assert empty.shape == (0, 27) and empty.dtype == mx.int32


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
    rows = cuda_geometry.pair_arrays(relation)[0]
    for each, columns in ((relation, [0, 1, 2]), (relation.T, [1, 0, 2])):
        found = pairs_by_offset(*map(np.array, cuda_geometry.pair_arrays(each)))
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
        assert relations[0].edges.size and relations[0].kept("table") is None
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
