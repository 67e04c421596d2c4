"""What layers fuse by themselves, and that it is what they compute apart."""

import copy
import pickle
from contextlib import contextmanager
from unittest.mock import patch

import mlx.core as mx
import mlx.nn
import numpy as np
import pytest
from conftest import drawn
from contractions import exact

from mlx_lattice import nn, ops
from mlx_lattice.channel_kernels import norm_observers
from mlx_lattice.nn import fused


def tensor():
    return drawn("batches", n=60, channels=6)


@contextmanager
def apart():
    """A block in which nothing is fused."""
    none = set()
    with patch.object(fused, "FUSING", none), fused.unfused():
        yield


def told(call):
    """What a call returns, and the parts of the norms that it ran."""
    seen = []
    with norm_observers.observe(seen.append):
        result = call()
    return result, [norm.parts for norm in seen]


FOLLOWERS = {
    "relu layer": (nn.ReLU(), "ReLU"),
    "relu of mlx": (mlx.nn.ReLU(), "ReLU"),
    "relu function": (ops.relu, "ReLU"),
    "relu function of mlx": (mlx.nn.relu, "ReLU"),
    "gelu": (nn.GELU(), "GELU"),
    "gelu by tanh": (nn.GELU("precise"), "GELU(tanh)"),
    "its function": (mlx.nn.gelu_approx, "GELU(tanh)"),
    "silu": (nn.SiLU(), "SiLU"),
    "leaky": (nn.LeakyReLU(0.2), "LeakyReLU"),
    "elu": (nn.ELU(0.5), "ELU"),
    "elu of mlx": (mlx.nn.ELU(), "ELU"),
    "elu function": (ops.elu, "ELU"),
}
NORMS = {
    "BatchNorm": lambda: nn.BatchNorm(6),
    "GroupNorm": lambda: nn.GroupNorm(2, 6),
    "InstanceNorm": lambda: nn.InstanceNorm(6, affine=True),
}


@pytest.mark.parametrize("norm", NORMS)
@pytest.mark.parametrize("follower", FOLLOWERS)
def test_a_norm_and_what_follows_are_one_call(norm, follower):
    after, name = FOLLOWERS[follower]
    net = nn.Sequential(nn.SubmConv3d(6, 6, 3), nn.Sequential(NORMS[norm]()), after)
    x = tensor()
    for mode in (True, False):
        net.train(mode)

        def step(net=net):
            loss = nn_loss(net, x)
            return loss(net.trainable_parameters())

        (value, grads), parts = told(step)
        assert (norm, name) in parts
        with apart():
            (wanted, expected), parts = told(step)
        assert (norm,) in parts
        assert abs(value - wanted).item() <= 1e-4 * abs(wanted).item()
        flat = zip(leaves(grads), leaves(expected), strict=True)
        for got, other in flat:
            np.testing.assert_allclose(exact(got), exact(other), atol=2e-4)


def leaves(tree):
    return [array for _, array in mlx.utils.tree_flatten(tree)]


def nn_loss(net, x):
    def loss(parameters):
        net.update(parameters)
        return mx.square(net(x).feats).sum()

    return mx.value_and_grad(loss)


class Louder(nn.ReLU):
    def __call__(self, x):
        return super().__call__(x) * 2


class Doubled(nn.BatchNorm):
    def __call__(self, x):
        return super().__call__(x) * 2


class Between(nn.Sequential):
    def __call__(self, x):
        return super().__call__(x) * 2


@pytest.mark.parametrize(
    "layers",
    (
        lambda: (nn.BatchNorm(6), Louder()),
        lambda: (Doubled(6), nn.ReLU()),
        lambda: (mlx.nn.BatchNorm(6), nn.ReLU()),
        lambda: (nn.BatchNorm(6), nn.GELU("fast")),
        lambda: (nn.BatchNorm(6), nn.Tanh()),
        lambda: (nn.BatchNorm(6), nn.LeakyReLU(1.5)),
        lambda: (Between(nn.BatchNorm(6)), nn.ReLU()),
        lambda: (nn.LayerNorm(6), nn.ReLU()),
    ),
    ids=(
        "activation", "norm", "norm of mlx", "approximation", "tanh", "steep",
        "container", "row norm",
    ),
)  # fmt: skip
def test_what_may_mean_something_else_is_called_as_it_is(layers):
    net, x = nn.Sequential(*layers()), tensor()
    y, parts = told(lambda: net(x))
    assert all(len(each) == 1 for each in parts)
    wanted = x
    for layer in net.layers:
        wanted = fused.called(layer, wanted)
    np.testing.assert_allclose(exact(y.feats), exact(wanted.feats), atol=1e-5)


def test_an_epilogue_is_kept_while_the_arrays_of_its_norm_are_the_same():
    x, net = tensor(), nn.Sequential(nn.SubmConv3d(6, 6, 3), nn.BatchNorm(6), nn.ReLU())
    net.eval()
    norm, names = net.layers[1], ("weight", "bias", "running_mean", "running_var")

    def check():
        with fused.unfused():
            wanted = exact(net(x).feats)
        for _ in range(2):
            np.testing.assert_allclose(exact(net(x).feats), wanted, atol=1e-5)

    check()
    for seed, name in enumerate(names):
        norm[name] = mx.random.uniform(0.5, 2, (6,), key=mx.random.key(seed))
        check()
    norm.weight[2] = 5.0  # in place
    check()
    norm.eps = 1.0
    check()
    net.load_weights([("layers.1.weight", mx.full((6,), 3.0))], strict=False)
    check()
    assert norm._epilogue
    for again in (copy.deepcopy(net), pickle.loads(pickle.dumps(net))):
        assert not again.layers[1]._epilogue
        np.testing.assert_array_equal(exact(again(x).feats), exact(net(x).feats))


def test_scale_and_shift_are_the_norm_in_evaluation():
    norm, x = nn.BatchNorm(6), tensor()
    norm.weight, norm.bias = mx.arange(6) * 0.5, mx.arange(6) - 2.0
    norm(x)
    norm.eval()
    scale, shift = norm.scale_shift()
    assert scale.dtype == shift.dtype == mx.float32
    wanted = exact(x.feats) * exact(scale) + exact(shift)
    np.testing.assert_allclose(exact(norm(x).feats), wanted, atol=1e-5)
    with pytest.raises(ValueError, match="track_running_stats=False"):
        nn.BatchNorm(6, track_running_stats=False).scale_shift()
