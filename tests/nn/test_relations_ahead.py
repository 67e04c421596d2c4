"""Relations of a net's next scan are built before its layers, and started together."""

import copy
import io
import pickle
from contextlib import contextmanager
from unittest.mock import patch

import mlx.core as mx
import mlx.nn
import numpy as np
import pytest
from cuda_recorder import recording
from mlx.utils import tree_flatten
from scans_anew import (  # noqa: F401 (a fixture)
    counted_starts,
    last,
    net,
    scan,
    views,
)

import mlx_lattice as ml
from mlx_lattice import held_sets, models, relations_ahead
from mlx_lattice.backends import registry
from mlx_lattice.preparation import leaves


@contextmanager
def recording_on_portable_geometry():
    """CUDA's plans over sets whose sizes are read one by one, as CUDA's all at once."""
    portable = registry.GEOMETRY[registry.MLX]
    with recording(), patch.object(registry, "geometry", lambda: portable):
        yield


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
