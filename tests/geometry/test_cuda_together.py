"""Look-ups and tiles of several sets in few launches of CUDA's, emulated."""

import itertools

import cases
import mlx.core as mx
import numpy as np
import pytest
from cuda_emulation import emulated, emulating
from cuda_sets import (  # noqa: F401 (fixtures)
    check_tiles,
    counted_reads,
    read,
    whole_emulator,
)
from reference_rows import table_of, tile_order

import mlx_lattice as ml
from mlx_lattice import ops, relations_ahead
from mlx_lattice.backends import (
    cuda_lookups,
    cuda_sort,
    cuda_tables,
    cuda_views,
    registry,
)
from mlx_lattice.backends.cuda_tiles_together import SETS, TilesTogether
from mlx_lattice.geometry.rows import FoundRows
from mlx_lattice.geometry.search import Search
from mlx_lattice.kernel_spec import KernelSpec
from mlx_lattice.routes import thresholds

pytestmark = emulated


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
