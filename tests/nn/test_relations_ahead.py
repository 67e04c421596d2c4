"""Relations of a net's next scan are built before its layers, and started together."""

import copy
import io
import pickle
from contextlib import contextmanager
from unittest.mock import patch
from weakref import ref

import cases
import mlx.core as mx
import mlx.nn
import numpy as np
import pytest
from cuda_recorder import no_small_tiles, recording
from mlx.utils import tree_flatten

import mlx_lattice as ml
from mlx_lattice import (
    devices,
    held_sets,
    models,
    ops,
    preparation,
    relations_ahead,
)
from mlx_lattice.backends import registry
from mlx_lattice.geometry import sync
from mlx_lattice.preparation import leaves
from mlx_lattice.routes import selection


def net(kind=models.MinkUNet14, dtype=mx.float32):
    mx.random.seed(0)
    made = kind(4, 3)
    made.set_dtype(dtype)
    made.eval()
    mx.eval(made.parameters())
    return made


def scan(seed, rows=250, dtype=mx.float32):
    """A new scan each time, rows and all."""
    coords = mx.array(cases.geometry("surface", 3, rows, seed))
    feats = mx.random.normal((len(coords), 4), key=mx.random.key(seed)).astype(dtype)
    return ml.SparseTensor(coords, feats)


@pytest.fixture
def starts(monkeypatch):
    """How many arrays each start has."""
    real, seen = sync.start_all, []

    def start(arrays):
        seen.append(len(arrays))
        real(arrays)

    monkeypatch.setattr(sync, "start_all", start)
    return seen


def asked(net):
    """What the layer keeps that is asked first."""
    (found,) = {
        id(m._asked): m._asked for m in net.modules() if hasattr(m, "_asked")
    }.values()
    return found


def last(net):
    """What the last scan was asked, of every dtype and mode."""
    return {
        facts: relations_ahead.Reads.of(record, record.first)
        for facts, record in asked(net)._last.items()
    }


@contextmanager
def recording_on_portable_geometry():
    """CUDA's plans over sets whose sizes are read one by one, as CUDA's all at once."""
    portable = registry.GEOMETRY[registry.MLX]
    with recording(), patch.object(registry, "geometry", lambda: portable):
        yield


def views(x):
    """The views of a scan's relations: names, and what they hold."""
    return [
        (str(relation), sorted(map(str, relation.built)))
        for relation in x.manager.relations
    ]


@pytest.mark.parametrize("kind", (models.MinkUNet14, lambda *c: models.SpUNet(*c)))
def test_the_second_scan_starts_its_views_together(kind, starts):
    with recording():
        made = net(kind, mx.float16)
        first, second = (scan(seed, 300, mx.float16) for seed in (1, 2))
        made(first)
        one_by_one = len(starts)
        starts.clear()
        made(second)
    # The stem's, those of the input's rows and of the next level, and all others.
    assert one_by_one > 10 and len(starts) <= 4
    assert max(starts) > 20


def test_views_of_the_input_start_while_its_levels_are_read(monkeypatch):
    real, seen = held_sets.levels, []

    def levels(source, strides):
        made = real(source, strides)
        seen.append([str(relation) for relation in x.manager.relations])
        return made

    monkeypatch.setattr(held_sets, "levels", levels)
    with recording_on_portable_geometry():
        known = net()
        for seed in (1, 2):
            x = scan(seed)
            mx.eval(known(x).feats)
    one_by_one, *_, ahead = seen
    assert len(seen) == 5  # of the first scan each level is read when a layer asks
    assert len(one_by_one) == 1 < len(ahead)
    assert all("2x2x2" not in relation for relation in ahead)


def test_a_scan_that_is_new_within_a_gradient():
    """There MLX starts nothing, and a read waits by itself."""

    def loss(net, x):
        return net(x).feats.square().mean()

    with recording_on_portable_geometry():
        found = []
        known = net().train()
        mx.eval(mlx.nn.value_and_grad(known, loss)(known, scan(1)))
        for _ in range(2):  # with what was asked of the first, and without
            found.append(mlx.nn.value_and_grad(known, loss)(known, scan(2)))
            known = net().train()
    for one, other in zip(tree_flatten(found[0]), tree_flatten(found[1]), strict=True):
        assert mx.array_equal(one[1], other[1]), one[0]


def test_views_are_those_of_layers_that_ask():
    with recording():
        known, other = net(), net()
        known(scan(1))
        x, y = scan(2), scan(2)
        known(x), other(y)
    # Relations may come in another order; each has what layers made of it.
    assert sorted(views(x)) == sorted(views(y)) and len(views(x)) > 10


def test_results_are_those_of_layers_that_ask():
    known, other = net(), net()
    known(scan(1))
    assert mx.array_equal(known(scan(2)).feats, other(scan(2)).feats)


@pytest.mark.parametrize("kind", (models.MinkUNet14, lambda *c: models.SpUNet(*c)))
@pytest.mark.parametrize("rows", ((250, 0, 1, 250), (0, 250, 0), (1, 250)), ids=str)
def test_scans_of_no_rows_and_of_one(kind, rows):
    with recording():
        made = net(kind)
        for seed, n in enumerate(rows):
            x = scan(seed, 300)
            kept = slice(0, n)
            x = ml.SparseTensor(x.coords[kept], x.feats[kept])
            assert made(x).feats.shape[0] == len(x) == min(n, len(x))
            assert (x.manager.record.first is None) == (n == 0)


def test_what_the_last_scan_read_is_made_for_the_next():
    with recording():
        made, other = net(), net()
        with ml.routes.only("relation_traversal"):
            made(scan(1))
        forced = last(made)
        made(scan(2)), other(scan(2))
    assert last(made) == last(other) != forced


def test_a_traced_graph_takes_no_relation_in():
    """What a view is made of is no part of what is traced with it."""

    def is_pending(array):
        text = io.StringIO()
        mx.export_to_dot(text, array)
        return "->" in text.getvalue()

    assert is_pending(mx.arange(3))
    pending = []
    for is_known in (False, True):
        with recording():
            made, x = net(), scan(2)
            if is_known:
                made(scan(1))
            found = set()

            @mx.compile
            def forward(feats, made=made, x=x, found=found):
                y = made(x.replace(feats)).feats
                for relation in x.manager.relations:
                    for name, view in relation.built.items():
                        arrays = [a for a in leaves((view,)) if type(a) is mx.array]
                        if any(map(is_pending, arrays)):
                            found.add((str(relation), *name))
                return y

            forward(x.feats)
            pending.append(found)
    # What is counted beside a table starts with it, or is read by nobody.
    assert pending[0] == pending[1]
    assert not any("cuda_sorted" in name for name in pending[0])


def test_a_net_with_what_it_read_is_copied_and_pickled():
    with recording():
        made = net()
        made(scan(1))
        assert last(made)
        for twin in (copy.deepcopy(made), pickle.loads(pickle.dumps(made))):
            assert not last(twin)
            y = twin(scan(2))
            assert last(twin) == last(made) and len(y) > 0
    assert not any("_asked" in name for name, _ in tree_flatten(made.parameters()))


def test_another_dtype_and_training_are_apart():
    with recording():
        made = net()
        made(scan(1))
        made(scan(2))
        assert len(last(made)) == 1
        made.train()
        made(scan(1))
        made.eval()
        made.set_dtype(mx.float16)
        made(scan(1, dtype=mx.float16))
    assert len(last(made)) == 3


def test_under_a_limit_layers_ask_one_by_one():
    made = net()
    made(scan(1))
    x = scan(2)
    with ml.memory_limit("1GB"):
        y = made(x)
        mx.eval(y.feats)
    assert mx.array_equal(y.feats, made(scan(2)).feats)


def test_a_wrong_scan_raises_as_ever():
    made = net()
    made(scan(1))
    rows = np.concatenate([np.array(scan(2).coords)] * 2)
    with pytest.raises(ValueError, match="coordinates must be unique"):
        made(ml.SparseTensor(mx.array(rows), mx.zeros((len(rows), 4))))


def test_what_was_only_planned_or_watched_is_not_kept():
    with recording():
        made = net()
        with ml.trace():
            made(scan(1))
        assert set(last(made).values()) == {None}
        x = scan(1)
        relations_ahead.begin(made.stem.layers[0].conv, x)
        assert not x.manager.relations


def facts(x):
    """What plans depend on, of each relation, and the views."""
    counted = [(str(r), r.counted) for r in x.manager.relations]
    return sorted(counted, key=str), sorted(views(x))


def names_of_runs(launches, *runs):
    """The names of what each net launches over its rows."""
    found = []
    for net, rows in runs:
        launches.clear()
        net(rows)
        found.append([launch.name for launch in launches])
    return found


class TestPrepared:
    """A net that was prepared before is prepared for a scan by that, uncalled."""

    @pytest.fixture
    def called(self, monkeypatch):
        """How often a net was planned by a call."""
        real, calls = preparation._plan, []

        def plan(net, *given):
            calls.append(net)
            return real(net, *given)

        monkeypatch.setattr(preparation, "_plan", plan)
        return calls

    def test_it_is_what_a_call_would_make(self, called):
        def new(seed):
            return scan(seed, 3000, mx.float16)  # the stem's rows are sorted, too

        with recording() as launches:
            known, other = net(dtype=mx.float16), net(dtype=mx.float16)
            ml.prepare(known, new(1)), called.clear()
            known(new(1)), other(new(1))
            x, y, z = new(2), new(2), new(2)
            quick = ml.prepare(known, x)
            assert not called
            other(y)
            assert facts(x) == facts(y)
            slow = ml.prepare(net(dtype=mx.float16), z)
            assert len(called) == 1
            assert quick.kernels and set(quick.kernels) == set(slow.kernels)
            assert sorted(quick.levels) == sorted(slow.levels)
            before = facts(x)
            runs = names_of_runs(launches, (known, x), (other, y))
        assert facts(x) == before and runs[0] == runs[1] != []

    def test_a_view_that_no_plan_names_is_made_by_a_call(self, called):
        with recording():
            made = net()
            made(scan(1))
            ml.prepare(made, scan(2))
            assert called

    def test_a_kernel_that_is_new_is_compiled_by_a_call(self, called, monkeypatch):
        with recording():
            made = net(dtype=mx.float16)
            ml.prepare(made, scan(1, 3000, mx.float16)), called.clear()
            made(scan(1, 3000, mx.float16))
            ml.prepare(made, scan(2, 3000, mx.float16))
            assert not called
            no_small_tiles(monkeypatch)
            selection._settled.cache_clear()
            ml.prepare(made, scan(3, 3000, mx.float16))
            assert called
        selection._settled.cache_clear()

    def test_what_may_differ_is_asked_by_a_call(self, called):
        with recording():
            made = net(dtype=mx.float16)
            made(scan(1, 3000, mx.float16))
            with ml.routes.only("relation_traversal"):
                ml.prepare(made, scan(2, 3000, mx.float16))
            assert len(called) == 1
            ml.prepare(made, scan(2, 3000, mx.float16), training=True)
            ml.prepare(made.train(), scan(2, 3000, mx.float16))
        assert len(called) == 3


class OwnUNet(mlx.nn.Module):
    """A net as users write them, of which nothing is known."""

    def __init__(self, size=3, halves=2):
        super().__init__()
        self.stem = ml.nn.SubmConv3d(4, 16, size)
        self.down = [ml.nn.Conv3d(16, 16, 2, stride=2) for _ in range(halves)]
        self.deep = ml.nn.SubmConv3d(16, 16, 3)
        self.up = [ml.nn.ConvTranspose3d(16, 16, 2, stride=2) for _ in range(halves)]
        self.head = ml.nn.SubmConv3d(16, 3, 1)

    def __call__(self, x):
        x = self.stem(x)
        for layer in (*self.down, self.deep, *self.up):
            x = layer(x)
        return self.head(x)


class TestOwnNets:
    """What a net read when it was prepared is built for the next scan, uncalled."""

    called = TestPrepared.called

    @pytest.mark.parametrize("halves", (0, 1, 2))
    def test_the_next_scan_is_prepared_without_a_call(self, called, halves):
        with recording() as launches:
            made, other = OwnUNet(halves=halves), OwnUNet(halves=halves)
            for each in (made, other):
                each.set_dtype(mx.float16), each.eval()
            x, y, z = (scan(seed, 3000, mx.float16) for seed in (1, 2, 2))
            ml.prepare(made, x)
            made(x), other(scan(1, 3000, mx.float16))  # kernels are known
            assert len(called) == 1
            quick = ml.prepare(made, y)
            assert len(called) == 1, "it was called"
            slow = ml.prepare(other, z)
            assert facts(y) == facts(z)
            assert set(quick.kernels) == set(slow.kernels) != set()
            assert sorted(quick.levels) == sorted(slow.levels)
            before = facts(y)
            runs = names_of_runs(launches, (made, y), (other, z))
        assert facts(y) == before and runs[0] == runs[1] != []

    def test_sizes_of_its_levels_are_read_at_once(self, monkeypatch):
        made = OwnUNet().eval()
        real, reads = sync.read, []
        for seed in (1, 2):
            x = scan(seed)
            ml.prepare(made, x) if seed == 1 else None
            mx.eval(made(x).feats)
        monkeypatch.setattr(sync, "read", lambda *a: reads.append(a) or real(*a))
        x = scan(3)
        ml.prepare(made, x)
        ahead = len(reads)
        wanted = OwnUNet()
        wanted.update(made.parameters())
        y = made(x).feats
        assert len(reads) == ahead, "the call read again"
        assert mx.array_equal(y, wanted.eval()(scan(3)).feats)

    def test_a_net_that_has_changed_is_called(self, called):
        with recording():
            made = OwnUNet()
            made.set_dtype(mx.float16), made.eval()
            new = iter(range(1, 9))
            ml.prepare(made, scan(next(new), 3000, mx.float16))
            made(scan(next(new), 3000, mx.float16))
            ml.prepare(made, scan(next(new), 3000, mx.float16))
            assert len(called) == 1
            made.deep = ml.nn.SubmConv3d(16, 16, 3, dilation=2)
            made.set_dtype(mx.float16)
            x = scan(next(new), 3000, mx.float16)
            ml.prepare(made, x)
            assert len(called) == 2
            assert any("dilation" in str(r.spec) for r in x.manager.relations)
            made.train()
            ml.prepare(made, scan(next(new), 3000, mx.float16), training=True)
            assert len(called) == 3

    def test_what_another_route_read_is_not_what_is_made(self, called):
        with recording():
            made, other = OwnUNet(), OwnUNet()
            for each in (made, other):
                each.set_dtype(mx.float16), each.eval()
            with ml.routes.only("relation_traversal"):
                ml.prepare(made, scan(1, 3000, mx.float16))
            made(scan(1, 3000, mx.float16)), called.clear()
            for seed, calls in ((2, 1), (3, 1), (4, 1)):
                x, y = (scan(seed, 3000, mx.float16) for _ in "xy")
                ml.prepare(made, x)
                assert sum(each is made for each in called) == calls
                ml.prepare(other, y)
                assert seed == 2 or facts(x) == facts(y)

    def test_rows_that_are_chosen_are_asked_for(self, called):
        class Pruned(OwnUNet):
            def __call__(self, x):
                x = self.stem(x)
                return self.head(ml.ops.prune(x, x.feats[:, 0] >= 0))

        with recording():
            made = Pruned().eval()
            for seed in (1, 2):
                ml.prepare(made, scan(seed))
        assert len(called) == 2


class TestUncalled:
    """Nets as users write them, called scan after scan and never prepared."""

    def test_the_second_scan_starts_its_views_together(self, starts):
        with recording():
            made = OwnUNet().eval()
            made.set_dtype(mx.float16)
            counts = []
            for seed in (1, 2, 3):
                starts.clear()
                made(scan(seed, 300, mx.float16))
                counts.append(len(starts))
        assert counts[0] > counts[1] == counts[2] <= 3

    @pytest.mark.parametrize("rows", ((250, 0, 1, 250), (0, 250, 0, 1)), ids=str)
    def test_results_are_those_of_layers_that_ask(self, rows):
        made, other = OwnUNet(), OwnUNet()
        other.update(made.parameters())

        def loss(net, x):
            return net(x).feats.square().sum()

        for seed, n in enumerate(rows):
            parts = []
            for net in (made, other):
                x = scan(seed, 300)
                x = ml.SparseTensor(x.coords[:n], x.feats[:n])
                parts.append(mlx.nn.value_and_grad(net, loss)(net, x))
            other._asked = other.stem._asked = relations_ahead.Asked()
            for one, two in zip(*map(tree_flatten, parts), strict=True):
                assert mx.array_equal(one[1], two[1]), one[0]

    def test_another_view_of_the_same_relations_is_learnt(self):
        """As many are read by another route: what is known must not stay."""
        with recording():
            made, other = ml.nn.SubmConv3d(4, 16, 3), ml.nn.SubmConv3d(4, 16, 3)
            made.set_dtype(mx.float16), other.set_dtype(mx.float16)
            with ml.routes.only("relation_traversal"):
                for seed in (1, 2, 3):
                    mx.eval(made(scan(seed, 3000, mx.float16)).feats)
            forced = [*asked(made)._known.values()]
            for seed in (4, 5, 6):
                for net in (made, other):
                    mx.eval(net(scan(seed, 3000, mx.float16)).feats)
        known, wanted = ([*asked(net)._known.values()] for net in (made, other))
        assert known == wanted != forced and len(known) == len(forced) == 1

    def test_what_gradients_read_is_made_too(self):
        def views(step, x):
            mx.eval(step(x))
            (named,) = last(made).values()
            transposed = {r.is_transposed for stage in named.stages for r in stage}
            return transposed, len(x.manager.record.cells)

        with recording():
            made = OwnUNet().train()
            step = mlx.nn.value_and_grad(made, lambda x: made(x).feats.sum())
            found = [views(step, scan(seed, 300)) for seed in (1, 2)]
            x = scan(2, 300)

            def begun(array):
                relations_ahead.begin(made.stem, x)
                return array.sum()

            mx.grad(begun)(mx.ones((1,)))
        assert found[0] == found[1] and found[0][0] == {False, True}
        built = {k for r in x.manager.relations for k in r.built}
        assert any(swapped for _, swapped in built) and found[0][1] == 2

    def test_a_scan_that_is_only_looked_at_has_no_views_of_gradients(self):
        with recording():
            made = OwnUNet().train()
            step = mlx.nn.value_and_grad(made, lambda x: made(x).feats.sum())
            for seed in range(1, 7):  # in turns, as a net that is not put into eval
                x = scan(seed, 300)
                mx.eval(step(x) if seed % 2 else made(x).feats)
                kept = [r for r in x.manager.relations if r.kind == "submanifold"]
                views = {k for r in kept for k in r.built}
                assert any(swapped for _, swapped in views) == (seed % 2 == 1)

    def test_a_layer_holds_no_scan(self):
        made, x = OwnUNet(), scan(1)
        mx.eval(made(x).feats)
        kept = [
            ref(x.manager),
            *map(ref, x.manager.sets),
            *map(ref, x.manager.relations),
        ]
        del x
        assert not any(each() for each in kept)
        mx.eval(made(scan(2)).feats)

    def test_a_layer_that_is_first_on_several_ways(self):
        """What another way was asked is made, and what this one asks is right."""
        stem = ml.nn.SubmConv3d(4, 4, 3)
        down, deep = ml.nn.Conv3d(4, 4, 2, stride=2), ml.nn.SubmConv3d(4, 4, 3)
        ways = {
            "deep": lambda x: deep(down(down(stem(x)))),
            "flat": lambda x: deep(stem(x)),
            "reach": lambda x: ml.nn.Conv3d.__call__(reach, stem(x)),
            "pruned": lambda x: deep(ops.prune(stem(x), x.feats[:, 0] > 0)),
            "up": lambda x: ml.nn.GenerativeConvTranspose3d.__call__(up, stem(x)),
        }
        reach = ml.nn.Conv3d(4, 4, 3, stride=2, padding=1, support="reach")
        up = ml.nn.GenerativeConvTranspose3d(4, 4, 2, stride=2)
        for seed, name in enumerate(2 * [*ways] + [*ways][::-1]):
            x, y = scan(seed), scan(seed)
            found = ways[name](x)
            stem._asked, known = relations_ahead.Asked(), stem._asked
            wanted = ways[name](y)
            stem._asked = known
            assert mx.array_equal(found.coords, wanted.coords), name
            assert mx.array_equal(found.feats, wanted.feats), name

    def test_another_backend_is_apart(self):
        made = OwnUNet()
        mx.eval(made(scan(1)).feats)
        other = "a100" if devices.current().name == "h200" else "h200"
        with recording(other):
            made(scan(2))
        y = made(scan(3)).feats
        assert len(last(made)) == 2
        wanted = OwnUNet()
        wanted.update(made.parameters())
        assert mx.array_equal(y, wanted(scan(3)).feats)
