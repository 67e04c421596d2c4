"""ml.prepare leaves the modules that it calls as they were."""

from functools import partial

import cases
import mlx.core as mx
import mlx.nn
import numpy as np
import pytest
from mlx.utils import tree_flatten

import mlx_lattice as ml
from mlx_lattice import nn
from mlx_lattice.compiled import reached
from mlx_lattice.nn.layers import ModuleCache
from mlx_lattice.prepare import ModuleSnapshot

REHEARSALS = {
    "prepare": ml.prepare,
    "prepare to train": partial(ml.prepare, training=True),
}


def scan(channels=8):
    coords = mx.array(cases.geometry("surface", 3, 120, 1))
    feats = 1 + mx.random.normal((len(coords), channels), key=mx.random.key(1))
    return ml.SparseTensor(coords, feats)


class FromData(mlx.nn.Module):
    """Its factors are those of the first features that it sees."""

    def __init__(self):
        super().__init__()
        self.ready, self.factors = False, mx.ones(8)

    def __call__(self, x):
        if not self.ready:
            self.factors, self.ready = 1 / mx.abs(x.feats).mean(0), True
        return x.replace(x.feats * self.factors)


class Late(mlx.nn.Module):
    """Makes its layer at its first call."""

    def __call__(self, x):
        if "layer" not in self:
            self.layer = nn.Linear(x.channels, 8)
        return self.layer(x)


class Log(mlx.nn.Module):
    """Counts its calls, in three ways, and keeps what it saw."""

    def __init__(self):
        super().__init__()
        self.calls, self.count, self._seen = 0, mx.array(0), {"means": []}

    def __call__(self, x):
        self.calls += 1
        self.count += 1
        self._seen["means"].append(x.feats.mean())
        self.last = x
        return x


def net_of(part):
    return nn.Sequential(nn.SubmConv3d(8, 8, 3), nn.BatchNorm(8), part, nn.ReLU())


@pytest.fixture(params=REHEARSALS)
def rehearse(request):
    """Something that calls a net and computes nothing."""
    return REHEARSALS[request.param]


@pytest.mark.parametrize("wrap", (lambda f: f, lambda f: lambda x: f(x), ml.compile))
def test_running_statistics_stay(rehearse, wrap):
    net, x = net_of(nn.BatchNorm(8)).train(), scan()
    before = [np.array(a) for _, a in tree_flatten(net.parameters())]
    rehearse(wrap(net), x)
    after = [a for _, a in tree_flatten(net.parameters())]
    assert all(np.array_equal(a, b) for a, b in zip(before, after, strict=True))


def test_what_a_module_takes_from_data_is_of_its_first_call(rehearse):
    net, x = net_of(FromData()), scan()
    rehearse(net, x)
    found = net.layers[2]
    assert not found.ready and (np.array(found.factors) == 1).all()
    seen = net.layers[1](net.layers[0](x)).feats
    net(x)
    wanted = 1 / np.abs(np.array(seen)).mean(0)
    np.testing.assert_allclose(found.factors, wanted, rtol=1e-4)


def test_what_is_made_is_made_at_its_first_call(rehearse):
    net, x = net_of(Late()), scan()
    names = [name for name, _ in tree_flatten(net.parameters())]
    rehearse(net, x)
    assert names == [name for name, _ in tree_flatten(net.parameters())]
    mx.eval(net(x).feats)


def test_counts_and_lists_stay(rehearse):
    net, x = net_of(Log()), scan()
    net(x)
    log, last = net.layers[2], net.layers[2].last
    rehearse(net, x)
    assert log.calls == log.count.item() == 1 and log.last is last
    assert np.isfinite(np.array(log._seen["means"])).all()
    assert len(log._seen["means"]) == 1


def test_what_the_library_keeps_stays():
    net = net_of(Log())
    snapshot, norm = ModuleSnapshot([net]), net.layers[1]
    norm._found, norm._kept, norm.more = [1], ModuleCache(a=1), mx.ones(3)
    net.layers.append(nn.ReLU())
    net.eval(), norm.freeze()
    del net.layers[0]["bias"]
    snapshot.restore()
    assert "_found" not in vars(norm) and "more" not in norm and norm._kept == {"a": 1}
    assert len(net.layers) == 4 and net.layers[1].training and "bias" in net.layers[0]
    assert set(norm.trainable_parameters()) == {"weight", "bias"}


def test_modules_are_reached_by_what_a_function_asks_for():
    net = net_of(nn.ReLU())
    calls = net, net.__call__, partial(net), lambda x: [net(x)], ml.compile(net)
    for call in calls:
        assert net in list(reached(call))
