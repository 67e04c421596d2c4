"""Relations of a net by CUDA's geometry, emulated as a whole, against NumPy."""

import itertools

import cases
import mlx.core as mx
import numpy as np
import pytest
from cuda_emulation import Emulator, emulated, emulating
from reference_rows import table_of, tile_order

import mlx_lattice as ml
from mlx_lattice import ops, relations_ahead
from mlx_lattice.backends import (
    cuda_levels,
    cuda_lookups,
    cuda_pairs,
    cuda_sort,
    cuda_tables,
    cuda_views,
    registry,
)
from mlx_lattice.backends.cuda_tiles_together import SETS, TilesTogether
from mlx_lattice.geometry import sync
from mlx_lattice.geometry.rows import FoundRows
from mlx_lattice.geometry.search import Search
from mlx_lattice.kernel_spec import KernelSpec
from mlx_lattice.relations_ahead import Read
from mlx_lattice.routes import thresholds

STRIDES = (2, (1, 2, 2), 3, 2)

pytestmark = emulated


@pytest.fixture
def emulator(cuda_programs):
    """For blocks of ``emulating``: what is expected is of the CPU."""
    return Emulator(cuda_programs)


@pytest.fixture
def reads(monkeypatch):
    real, seen = sync.read, []

    def read(*arrays):
        seen.append(len(arrays))
        return real(*arrays)

    monkeypatch.setattr(sync, "read", read)
    return seen


def check_tiles(relation):
    """Sorted rows are the table's, in the order of their Gray ranks."""
    view, table = cuda_views.sorted_rows(relation), np.array(relation.out_in)
    order, placed = np.array(view.rows), np.array(view.table)[:, : len(table)].T
    placed = placed[:, ::-1] if view.mirrored else placed
    np.testing.assert_array_equal(placed, table[order])
    if not view.mirrored:
        np.testing.assert_array_equal(order, tile_order(table >= 0))


def test_rows_that_feed_themselves_are_neither_searched_nor_sorted(emulator, reads):
    rows = mx.array(cases.geometry("surface", 3, 300))
    with emulating(emulator):
        manager = ml.CoordinateManager()
        key = manager.insert(rows)
        relation = manager.submanifold_kernel_relation(key, kernel_size=1)
        made, read = len(emulator.launches), len(reads)
        for each in (relation, relation.T, manager.kernel_relation(key, kernel_size=1)):
            pairs = np.array(cuda_pairs.pair_arrays(each)[0])
            np.testing.assert_array_equal(pairs, np.arange(len(rows))[:, None] + [0, 0])
            check_tiles(each)
            assert each.n_edges == len(rows)
        names = [name.split("_")[1:3] for name in emulator.launches[made:]]
        # Tiles of all, and the table that was asked for beside them.
        assert names == [["identity", "tiles"], ["unsort", "table"]]
        assert len(reads) == read
        check_edges(relation, np.arange(len(rows))[:, None])


@pytest.mark.parametrize("volume", (3, 32, 33, 64, 65))
@pytest.mark.parametrize("dims", (1, 2, 3, 4))
def test_look_ups_and_tiles_of_several_sets(emulator, dims, volume):
    """Of one row and of many, in order or not, by every kind of search."""
    rng, axis = np.random.default_rng(dims), np.eye(dims, dtype=int)[0]
    offsets = tuple(tuple(map(int, (k - 1) * axis)) for k in range(volume))
    sets, ones, twos = [], (1,) * dims, (2,) * dims
    for n in (1, 7, 300, 65):
        rows = rng.integers(-9, 9, (n, 1 + dims))
        rows[:, 0] %= 2
        sets.append(np.unique(rows, axis=0).astype(np.int32))
    sets[2] = rng.permutation(sets[2])
    with emulating(emulator):
        arrays = list(map(mx.array, sets))
        found = cuda_lookups.RowTable.of_each(arrays, 12345)
        assert not np.array(found[0].take_scratch(12344)).any()
        held = [FoundRows(a, table) for a, table in zip(arrays, found, strict=True)]
        rules = itertools.cycle(((ones, False), (twos, False), (twos, True)))
        searches = []
        for at, (stride, is_turned) in zip(range(6), rules, strict=False):
            spec = KernelSpec.of(dims, stride=stride, offsets=offsets)
            searches.append(Search(at % 4, (at + 1) % 4, is_turned, spec))
        if volume <= 32:  # of rows that feed themselves: they are not looked up
            one = KernelSpec.of(dims, kernel_size=1)
            searches.insert(1, Search.of("submanifold", 2, 2, one))
        together = TilesTogether(held, tuple(searches))
        together.launch(cuda_sort.cleared(together.scratch))
        made = together.views()
        assert len(emulator.launches) == 2
        for search, (counts, tiles) in zip(searches, made, strict=True):
            a, b = sets[search.source], sets[search.target]
            rule = np.array(search.offsets), search.stride, search.transposed
            expected = table_of(a, b, *rule)
            if search.identity:
                assert (expected[:, 0] == np.arange(len(a))).all()
            check_counts_and_tiles(counts.alone(), tiles, expected)
        for rows, table in zip(sets, found, strict=True):  # what one alone finds
            facts = [fact.tolist() for fact in table.facts()]
            assert facts[0][0] == -1
            np.testing.assert_array_equal(
                facts[1:], np.stack((rows.min(0), rows.max(0)), 1)
            )


def check_counts_and_tiles(counts, tiles, expected):
    """They are those of a table."""
    n, used = len(expected), expected >= 0
    assert counts.edges.tolist() == [used.sum()]
    bands = np.add.reduceat(used, range(0, n, 64), axis=0)
    np.testing.assert_array_equal(np.array(counts.bands), bands.T)
    order = tile_order(used)
    np.testing.assert_array_equal(np.array(tiles.rows), order)
    placed = np.array(tiles.table)
    assert placed.shape[1] == cuda_tables.pitch_of(n)
    np.testing.assert_array_equal(placed[:, :n].T, expected[order])
    assert (placed[:, n:] == -1).all()
    words = np.packbits(used[order], axis=1, bitorder="little")
    words = np.pad(words, ((0, -n % 32), (0, -words.shape[1] % 4)))
    masks = np.bitwise_or.reduce(words.reshape(-1, 32, words.shape[1]), axis=1)
    found = np.array(tiles.masks)
    np.testing.assert_array_equal(found[: len(masks)], masks.view(np.uint32))
    assert not found[len(masks) :].any()


def test_scratch_that_is_kept_serves_once_and_no_traced_graph(emulator):
    rows = mx.array(cases.geometry("surface", 3, 300))
    words = cuda_sort.scratch_words(len(rows), 3)  # of 27 offsets
    with emulating(emulator):
        table = cuda_lookups.RowTable(rows)
        kept = table.scratch

        def traced(x):
            assert table.take_scratch(words).size == words
            return x.sum()

        for transformed in (mx.grad(traced), mx.compile(traced)):
            transformed(mx.ones((1,)))
        taken = [table.take_scratch(size) for size in (cuda_sort.HEADER, words)]
        starts = [np.array(each, copy=False).ctypes.data for each in (kept, *taken)]
        assert [(at - starts[0]) // 4 for at in starts[1:]] == [0, cuda_sort.HEADER]
        assert not any(np.array(each).any() for each in taken)
        table.settle([each.tolist() for each in table.facts()])
        assert table.scratch is None
        checked = cuda_lookups.RowTable(rows, True)
        kept = checked.scratch
        checked.find(rows)  # leaves the rest to the first relation's tiles
        taken = np.array(checked.take_scratch(words), copy=False)
        assert np.shares_memory(taken, np.array(kept, copy=False)) and not taken.any()
        assert checked.scratch is None


def test_no_two_launches_of_a_traced_graph_share_what_is_cleared(tmp_path):
    made = {}

    def traced(x):
        several = [cuda_sort.cleared(64) for _ in range(5)]
        return [mx.take(each, x + i) for i, each in enumerate(several)]

    for name, call in {"compiled": mx.compile(traced), "plain": traced}.items():
        graph = tmp_path / name
        mx.export_to_dot(str(graph), *call(mx.array([1])))
        made[name] = graph.read_text().count('"Full"')
    assert made == {"compiled": 5, "plain": 5}


def read(kind, ends, is_transposed=False, **kernel):
    """What a net is to have read between levels: tiles."""
    spec = KernelSpec.of(3, **kernel)
    return Read.of(kind, spec, ends, is_transposed, cuda_views.sorted_arrays, ())


def test_relations_between_more_sets_than_a_launch_takes(emulator):
    rows = mx.array(cases.geometry("surface", 3, 300))
    with emulating(emulator):
        manager = ml.CoordinateManager()
        key = manager.insert(rows)
        keys = key, *manager.cells(key, (2,) * SETS)
        begun = len(emulator.launches)
        wanted = [read("submanifold", (at, at)) for at in range(len(keys))]
        relations_ahead.start(manager, keys, wanted)
        made = [name for name in emulator.launches[begun:] if "tiles" in name]
        assert ["together" in name for name in made] == [True, False]
        assert len(manager.relations) == len(keys)
        for relation in manager.relations:
            check_tiles(relation)


@pytest.mark.parametrize("few", (3, 2))
def test_few_levels_and_many_rows(emulator, monkeypatch, few):
    """Look-ups that are not four are made one by one, tiles of too many rows alone."""
    rows = mx.array(cases.geometry("surface", 3, 300))
    with emulating(emulator):
        manager = ml.CoordinateManager()
        key = manager.insert(rows)
        keys = key, *manager.cells(key, (2, 2))
        most = len(manager[keys[3 - few]])  # the levels of few rows are together
        monkeypatch.setattr(thresholds, "CUDA_ROWS_TOGETHER", most)
        begun = len(emulator.launches)
        wanted = [read("submanifold", (at, at)) for at in range(3)]
        relations_ahead.start(manager, keys, wanted)
        made = emulator.launches[begun:]
        assert sum("hash_rows" in name for name in made) == 2, "of each level"
        tiles = ["together" in name for name in made if "tiles" in name]
        assert tiles == [True, *[False] * (3 - few)]
        for relation in manager.relations:
            check_tiles(relation)


def test_relations_that_are_there_are_not_launched_again(emulator):
    rows = mx.array(cases.geometry("surface", 3, 300))
    with emulating(emulator):
        manager = ml.CoordinateManager()
        keys = manager.insert(rows), *manager.cells(manager.insert(rows), (2, 2, 2))
        known = manager.submanifold_kernel_relation(keys[1])
        tiles, begun = cuda_views.sorted_rows(known), len(emulator.launches)
        wanted = [read("submanifold", (at, at)) for at in range(4)]
        relations_ahead.start(manager, keys, wanted)
        made = [name for name in emulator.launches[begun:] if "tiles" in name]
        assert ["together" in name for name in made] == [True]
        assert known.kept("cuda_sorted") is tiles
        for relation in manager.relations:
            check_tiles(relation)


@pytest.mark.parametrize("way", ("whole", "prunes", "strided first"))
def test_the_next_scan_is_built_ahead(emulator, reads, way):
    """By what the layer that is asked first was asked: in few launches and reads."""
    layer = ml.nn.SubmConv3d(1, 1, 3)

    def asked(seed):
        rows = mx.array(cases.geometry("surface", 3, 300, seed))
        x = ml.SparseTensor(rows, mx.ones((len(rows), 1)))
        begun, read = len(emulator.launches), len(reads)
        relations_ahead.begin(layer, x)
        manager, made = x.manager, []
        if way != "strided first":
            made.append(manager.submanifold_kernel_relation(x.key, kernel_size=3))
        key = x.key
        for _ in range(2):
            made.append(manager.kernel_relation(key, kernel_size=2, stride=2))
            key = made[-1].keys[1]
            made.append(manager.submanifold_kernel_relation(key, kernel_size=3))
        together = registry.geometry().together
        for relation in made:
            together(relation)
            relation.note_read(together, "a layer")
        counts = len(emulator.launches) - begun, len(reads) - read
        if way == "prunes":
            kept = ops.prune(x, mx.arange(len(x)) % 3 > 0)
            made.append(manager.submanifold_kernel_relation(kept.key, kernel_size=3))
        for relation in made:
            check_tiles(relation)
            source, target = (np.array(manager[k].coords) for k in relation.keys)
            offsets, stride = relation.spec.offsets, relation.spec.stride
            table = table_of(source, target, offsets, stride, False)
            np.testing.assert_array_equal(np.array(relation.out_in), table)
        return counts

    with emulating(emulator):
        # The second scan learns how wide keys of its levels are.
        first, _, *others = (asked(seed) for seed in (1, 2, 3, 4))
    assert others[0] == others[1]
    assert others[0][0] < first[0] and others[0][1] == 1 < first[1]


@pytest.mark.parametrize("n", (1, 5, 32, 384, 385, 1000))
def test_tiles_of_rows_that_feed_themselves(emulator, n):
    """The values of their array are not read."""
    with emulating(emulator):
        tiles = cuda_tables.identity_tiles(mx.full((n, 4), 7, dtype=mx.int32))
        pitch, launches = cuda_tables.pitch_of(n), len(emulator.launches)
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
        empty = cuda_views.table_of(cuda_views.Sorted(table, none, masks))
    assert empty.shape == (0, 27) and empty.dtype == mx.int32


def shared(first, rows):
    """Levels and relations of a set that is checked with them; and their manager."""
    manager = ml.CoordinateManager()
    key = manager.insert(mx.array(rows))
    one = ml.kernel_spec.KernelSpec.of(3, kernel_size=1)
    with manager.checked_later(key, "submanifold", first):
        relations = [
            manager.relation_of("forward", key, key, one),
            manager.submanifold_kernel_relation(key, kernel_size=5),
        ]
        chain = manager.cells(key, STRIDES)
    return manager, relations, chain


def test_a_set_is_checked_with_its_levels_by_one_read(emulator, reads):
    """Keys are as wide as an earlier scan's; too narrow ones are made again."""
    first = ml.kernel_spec.KernelSpec.of(3, kernel_size=3)
    near, far = (cases.geometry("surface", 3, 300, seed) for seed in (1, 2))
    far = np.array(far) * [1, 40_000, 40_000, 40_000] - [0, 9, 0, 0]
    beyond = near * [1, 1 << 24, 1 << 24, 1 << 24]  # what keys can number
    cuda_levels._bits_before.clear()
    with emulating(emulator):
        for rows, expected in (
            (near, [6, 4]),  # what is read alone, and all sizes
            (near, [10]),
            (far, [10, 4]),
            (near, [10]),
            (far, [10]),
            (beyond, None),  # level by level
            (near, [10]),
        ):
            rows = rows.astype(np.int32)
            reads.clear()
            manager, relations, chain = shared(first, rows)
            if expected is None:
                assert reads[0] == 10 and len(reads) > 1 + len(STRIDES)
            else:
                assert reads == expected
            step = np.ones(3, int)
            for stride, key in zip(STRIDES, chain, strict=True):
                step = step * np.array(stride)
                cells = np.unique(rows // np.array([1, *step]), axis=0)
                np.testing.assert_array_equal(np.array(manager[key].coords), cells)
            counted = manager.relations[0]
            assert counted.counted == (np.array(counted.out_in) >= 0).sum()
            assert [each.counted for each in relations] == [len(rows), None]


@pytest.mark.parametrize("n", (1, 300))
@pytest.mark.parametrize("dims", (1, 2, 3, 4))
def test_levels_of_a_set_that_nobody_has_read(emulator, reads, dims, n):
    """In every dimension, in two batches, with negative rows in any order."""
    rng = np.random.default_rng(dims)
    strides = np.array([(2, 3, 1, 2)[:dims], (3, 1, 2, 2)[:dims]])
    steps = list(map(tuple, strides.cumprod(axis=0).tolist()))
    cuda_levels._bits_before.clear()
    all_rows = rng.integers(-90, 90, (n, 1 + dims))
    all_rows[:, 0] %= 2
    all_rows = np.unique(all_rows, axis=0).astype(np.int32)
    for is_known in (False, True):
        rows = rng.permutation(all_rows)
        with emulating(emulator):
            manager = ml.CoordinateManager()
            reads.clear()
            key = manager.insert(mx.array(rows))
            chain = manager.cells(key, list(map(tuple, strides.tolist())))
            assert reads == ([dims + 4] if is_known else [dims + 2, 2])
            for step, level in zip(steps, chain, strict=True):
                cells = np.unique(rows // np.array([1, *step]), axis=0)
                np.testing.assert_array_equal(np.array(manager[level].coords), cells)


def test_relations_of_a_set_that_proves_wrong_are_not_kept(emulator):
    first = ml.kernel_spec.KernelSpec.of(3, kernel_size=3)
    rows = cases.geometry("surface", 3, 300)
    twice, early = np.concatenate([rows, rows[:3]]), rows - [5, 0, 0, 0]
    with emulating(emulator):
        shared(first, rows)
        for wrong, what in ((twice, "must be unique"), (early, "0 or more")):
            manager = ml.CoordinateManager()
            key = manager.insert(mx.array(wrong.astype(np.int32)))
            for _ in range(2):
                with (
                    pytest.raises(ValueError, match=what),
                    manager.checked_later(key, "submanifold", first),
                ):
                    manager.submanifold_kernel_relation(key, kernel_size=5)
                    manager.cells(key, STRIDES)
                assert not manager.relations and len(manager.sets) == 1
            with pytest.raises(ValueError, match=what):
                manager.submanifold_kernel_relation(key)


def check_edges(relation, table):
    """Table, edges and where each offset's start are those of a table by NumPy."""
    np.testing.assert_array_equal(np.array(relation.out_in), table)
    o, k = np.nonzero(table >= 0)
    edges = np.stack([table[o, k], o, k], axis=1)[np.lexsort((o, k))]
    np.testing.assert_array_equal(np.array(relation.edges), edges)
    starts = np.searchsorted(edges[:, 2], np.arange(relation.volume + 1))
    found = np.array(cuda_pairs.offset_starts(relation))
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
    for size in cuda_views.STAGE_PAIRS:
        firsts = np.append(0, np.cumsum(-(-counts // size)))
        found = np.array(cuda_pairs.first_stages(relation, size))
        np.testing.assert_array_equal(found, firsts)
    rows = cuda_pairs.pair_arrays(relation)[0]
    for each, columns in ((relation, [0, 1, 2]), (relation.T, [1, 0, 2])):
        found = pairs_by_offset(*map(np.array, cuda_pairs.pair_arrays(each)))
        wanted = edges[:, columns]
        assert set(map(tuple, found.tolist())) == set(map(tuple, wanted.tolist()))
        assert len(found) == len(wanted)
    middle = (edges[:, 2] == relation.volume // 2).sum() * (relation.volume % 2)
    half = (len(edges) + middle) // 2
    assert len(rows) == (half if relation.mirrored else len(edges))


@pytest.mark.parametrize("together", (False, True))
@pytest.mark.parametrize(
    ("name", "n"), (("negative", 60), ("batches", 200), ("surface", 900), ("far", 1))
)
def test_the_relations_of_a_net(emulator, reads, name, n, together):
    """Levels at once, a relation and its transposed use, 125 offsets, edge counts.

    With ``together`` tiles and look-ups are made by launches for several.
    """
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
        begun = len(emulator.launches)
        if together:
            wanted = [read(*n[:2], turned, **n[2]) for n in named for turned in (0, 1)]
            relations_ahead.start(manager, keys, [*wanted, *wanted])
        relations = [
            manager.relation_of(
                kind, keys[source], keys[target], KernelSpec.of(3, **kernel)
            )
            for kind, (source, target), kernel in named
        ]
        assert relations[0] is stem
        if together:
            made = emulator.launches[begun:]
            assert sum("hash_rows" in name for name in made) == 1, "of four sets"
            launched = [name for name in made if "tiles" in name]
            assert len(launched) == 2, "of 125 offsets by itself"
            begun = len(emulator.launches)
            for each in relations[1:]:
                cuda_views.sorted_arrays(each), cuda_views.sorted_arrays(each.T)
            assert len(emulator.launches) == begun, "all of them were made"
        cuda_views.sorted_rows(relations[0]), cuda_pairs.pairs(relations[0])
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


@pytest.mark.parametrize(
    ("n", "share"), ((1, 0.0), (1, 1.0), (300, 0.0), (300, 1.0), (9000, 0.3))
)
@pytest.mark.parametrize("dims", (1, 2, 3, 4))
def test_rows_that_a_mask_keeps(emulator, dims, n, share):
    """In one tile and in several, in two launches."""
    rng = np.random.default_rng(n)
    rows = rng.integers(-(2**31), 2**31, (n, 1 + dims)).astype(np.int32)
    mask = rng.random(n) < share
    with emulating(emulator):
        started = registry.geometry().start_kept(mx.array(mask), mx.array(rows))
        kept = started.kept(started.count.item())
        names = [name.split("_")[1:3] for name in emulator.launches]
    assert names == [["kept", "places"], ["kept", "rows"]][: 1 + mask.any()]
    np.testing.assert_array_equal(np.array(kept.rows), np.flatnonzero(mask))
    places = np.where(mask, mask.cumsum() - 1, -1)
    np.testing.assert_array_equal(np.array(kept.places), places)
    np.testing.assert_array_equal(np.array(kept.coords), rows[mask])


def test_a_pruned_set_is_read_once(emulator, reads):
    """Its size, with the check of the set that it is of; what is made of it is read."""
    rows = np.random.default_rng(0).permutation(cases.geometry("negative", 3, 200))
    keep = np.arange(len(rows)) % 3 > 0
    with emulating(emulator):
        x = ml.SparseTensor(mx.array(rows.astype(np.int32)), mx.ones((len(rows), 2)))
        y = ops.prune(x, mx.array(keep))
        assert reads == [6], "the bounds, whether rows repeat, and the size"
        table = y.manager.submanifold_kernel_relation(y.key).out_in
        assert len(reads) == 1
        cube = np.array(list(itertools.product((-1, 0, 1), repeat=3)))
        given = rows[keep], rows[keep], cube, (1, 1, 1), False
        np.testing.assert_array_equal(np.array(table), table_of(*given))


def test_bounds_of_rows_that_repeat_are_one_read(emulator, reads):
    """Which row repeats is not looked for: to merge rows nobody asks."""
    rows = np.repeat(cases.geometry("negative", 3, 80), 3, axis=0).astype(np.int32)
    with emulating(emulator):
        made = registry.geometry().unique_rows(mx.array(rows))
        np.testing.assert_array_equal(np.array(made.rows), np.unique(rows, axis=0))
        assert len(reads) == 2  # the bounds, and how many there are
        assert not any("band_counts" in name for name in emulator.launches)
        box = cuda_lookups.bounds(mx.array(rows))
        assert box == (tuple(rows.min(axis=0)), tuple(rows.max(axis=0)))


def test_the_check_of_a_set_tells_whether_its_rows_are_sorted(emulator, reads):
    """So that joins, alignments and batch elements need not look."""
    rows = np.unique(cases.geometry("batches", 3, 700), axis=0).astype(np.int32)
    mixed = rows.copy()
    mixed[[300, 301]] = rows[[301, 300]]
    with emulating(emulator):
        for given, is_sorted in ((rows, True), (mixed, False), (rows[:1], True)):
            x = ml.SparseTensor(mx.array(given), mx.ones((len(given), 2)))
            held = x.coordinate_set
            assert not held.is_sorted
            held.index  # noqa: B018
            assert held.is_sorted is is_sorted and reads == [5]
            reads.clear()
