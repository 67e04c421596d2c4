"""ml.compile of nets of which a part trains, or draws random numbers, in evaluation."""

import copy

import mlx.core as mx
import mlx.nn
import numpy as np
import pytest
from compiled_cases import tensor

import mlx_lattice as ml
from mlx_lattice import nn


def test_statistics_move_where_only_the_norm_trains():
    net = nn.Sequential(nn.SubmConv3d(4, 8, 3), nn.BatchNorm(8), nn.SubmConv3d(8, 3, 3))
    net.eval().layers[1].train()
    twin, fast = copy.deepcopy(net), ml.compile(net)
    x = tensor()
    for _ in range(4):
        near = {"rtol": 1e-4, "atol": 1e-5}
        np.testing.assert_allclose(fast(x).feats, twin(x).feats, **near)
        for name in ("running_mean", "running_var"):
            found, wanted = (each.layers[1][name] for each in (net, twin))
            np.testing.assert_allclose(found, wanted, **near)


def test_modes_of_a_net_that_a_function_calls_are_noticed():
    """Its weights are constants, as nothing is said of them."""
    net, x = nn.Sequential(nn.SubmConv3d(4, 8, 3), nn.Dropout(0.5)).eval(), tensor()
    state = [mx.random.state]
    fast = ml.compile(lambda x: mx.abs(net(x).feats), state, state)
    plain = np.abs(np.array(net(x).feats))
    for training in (False, True, False):
        net.train(training)
        for _ in range(3):
            assert ((np.array(fast(x)) == 0).mean() > 0.3) == training
    np.testing.assert_allclose(fast(x), plain, rtol=1e-4, atol=1e-5)
    assert len(fast) == 2


class Noisy(mlx.nn.Module):
    """Adds noise in evaluation too."""

    def __call__(self, x):
        return x.replace(x.feats + mx.random.normal(x.shape))


@pytest.mark.parametrize("part", (nn.Dropout(0.5).train(), Noisy()))
def test_every_call_draws_other_numbers(part):
    net = nn.Sequential(nn.SubmConv3d(4, 8, 3), nn.ReLU(), mlx.nn.Module())
    net.eval().layers[2] = part
    fast, x = ml.compile(net), tensor()
    found = [np.array(fast(x).feats) for _ in range(5)]
    assert all((a != b).any() for a, b in zip(found[1:], found, strict=False))
    mx.random.seed(3)
    again = np.array(fast(x).feats)
    mx.random.seed(3)
    assert (again == fast(x).feats).all()
    mx.eval(mx.random.uniform())  # MLX's key is no stand-in
