"""Layer norms called by hand: what follows is part of their launch where a kernel takes
it, CUDA's here by the emulation; and nobody can tell but by the launches.
"""

import cases
import mlx.core as mx
import mlx.nn
import mlx.utils
import numpy as np
import pytest
from contractions import exact
from cuda_emulation import Emulator, emulated, emulating

import mlx_lattice as ml
from mlx_lattice import nn, ops, pending
from mlx_lattice.backends import registry
from mlx_lattice.pending import Pending

C = 16
KERNELS = registry.ROW_NORMS["cuda"]


@pytest.fixture(params=("here", pytest.param("cuda", marks=emulated)))
def place(request, monkeypatch, cuda_programs):
    """Where kernels are: the machine's own, or CUDA's, whose launches are named."""
    if request.param == "here":
        yield None
        return
    monkeypatch.setattr(registry, "row_norms", lambda: KERNELS)
    made = Emulator(cuda_programs, False)
    with emulating(made):
        yield made


def tensor(dtype="float32", seed=0):
    coords = cases.geometry("batches", 3, 60)
    feats = mx.array(cases.features(len(coords), C, seed) * 2 + 1)
    return ml.SparseTensor(mx.array(coords), feats.astype(getattr(mx, dtype)))


class Net(nn.Module):
    """A layer norm, and ways in which it is followed."""

    def __init__(self):
        super().__init__()
        mx.random.seed(0)
        self.norm, self.relu = nn.LayerNorm(C), nn.ReLU()
        self.norm.weight = mx.random.uniform(0.5, 2, (C,))
        self.norm.bias = mx.random.normal((C,))

    def activated(self, x):
        return ops.silu(self.norm(x))

    def in_a_sequential(self, x):
        return nn.Sequential(self.norm, mlx.nn.GELU())(x)

    def beside_a_skip(self, x):
        return x + self.norm(x)

    def followed_twice(self, x):
        return self.relu(self.norm(x) + x)

    def as_arguments(self, x):
        return self.norm(x, residual=x, activation="silu")


WAYS = {
    "activated": ("LayerNorm", "SiLU"),
    "in_a_sequential": ("LayerNorm", "GELU"),
    "beside_a_skip": ("LayerNorm", "residual"),
    "followed_twice": ("LayerNorm", "residual", "ReLU"),
    "as_arguments": ("LayerNorm", "residual", "SiLU"),
}


def of_mlx(net, name, x):
    """The same in MLX operations, in float32."""
    feats, norm = x.feats.astype(mx.float32), net.norm
    y = mx.fast.layer_norm(feats, norm.weight, norm.bias, norm.eps)
    parts = WAYS[name]
    y = y + feats if "residual" in parts else y
    act = {"SiLU": mlx.nn.silu, "GELU": mlx.nn.gelu, "ReLU": mlx.nn.relu}
    return act.get(parts[-1], lambda y: y)(y)


@pytest.mark.parametrize("dtype", ("float32", "float16"))
@pytest.mark.parametrize("name", WAYS)
def test_what_follows_is_part_of_it(place, name, dtype):
    net, x = Net(), tensor(dtype)
    with ml.trace(net) as trace:
        y = getattr(net, name)(x)
    assert y.dtype == x.dtype and y.key == x.key
    most = 1e-5 if dtype == "float32" else 0.02
    wanted = exact(of_mlx(net, name, x))
    np.testing.assert_allclose(exact(y.feats), wanted, most, most)
    if place:
        assert len(place.launches) == 1 and "layer_norm" in place.launches[0]
        (record,) = trace.norms
        assert (record.layer, record.norm.parts) == ("norm", WAYS[name])
        assert record.norm.launches == 1


@pytest.mark.parametrize("name", WAYS)
def test_gradients(place, name):
    x, found = tensor(), []

    def step(net, function):
        def loss(parameters, feats):
            net.update(parameters)
            y = function(x.replace(feats))
            return mx.sin(y if isinstance(y, mx.array) else y.feats).sum()

        made = mx.value_and_grad(loss, argnums=(0, 1))
        return made(net.trainable_parameters(), x.feats)

    net = Net()
    found = [step(net, getattr(net, name)), step(net, lambda x: of_mlx(net, name, x))]
    pairs = zip(*map(mlx.utils.tree_flatten, found), strict=True)
    for (at, got), (_, wanted) in pairs:
        most = 1e-4 * (1 + np.abs(exact(wanted)).max())
        np.testing.assert_allclose(exact(got), exact(wanted), 1e-3, most, err_msg=at)
    if place:
        assert len(place.launches) == 3  # forward, back, and the parameters' sums


@pytest.mark.parametrize("name", WAYS)
def test_second_derivatives(place, name):
    net, x = Net(), tensor()
    by = mx.array(cases.features(len(x), C, 5))

    def twice(function):
        def total(feats):
            y = function(x.replace(feats))
            return mx.square(y if isinstance(y, mx.array) else y.feats).sum()

        return mx.grad(lambda feats: (mx.grad(total)(feats) * by).sum())(x.feats)

    wanted = exact(twice(lambda x: of_mlx(net, name, x)))
    most = 1e-3 * (1 + np.abs(wanted).max())
    np.testing.assert_allclose(exact(twice(getattr(net, name))), wanted, 1e-3, most)


@pytest.mark.parametrize("name", WAYS)
def test_compiled_and_no_rows(name):
    net, x = Net(), tensor()
    compiled = mx.compile(lambda feats: getattr(net, name)(x.replace(feats)).feats)
    for _ in range(2):
        wanted = exact(of_mlx(net, name, x))
        np.testing.assert_allclose(exact(compiled(x.feats)), wanted, 1e-4, 1e-4)
    none = ml.SparseTensor(x.coords[:0], x.feats[:0], batch_size=3)
    assert getattr(net, name)(none).feats.shape == (0, C)


def test_what_is_held_is_computed_once(place):
    net, x = Net(), tensor()
    y = net.norm(x)
    assert (type(y) is Pending) == (registry.row_norms() is not None)
    z = net.relu(y)
    np.testing.assert_array_equal(exact(z.feats), np.maximum(exact(y.feats), 0))
    assert place is None or len(place.launches) == 1
    with pending.apart():
        assert type(net.norm(x)) is ml.SparseTensor


def test_a_residual_of_other_rows_or_channels_is_refused():
    x = tensor()
    with pytest.raises(ValueError, match="must have the shape of x"):
        ops.layer_norm(x.feats, residual=x.feats[:1])
    with pytest.raises(ValueError, match="on the rows of x"):
        ops.layer_norm(x, residual=tensor())
