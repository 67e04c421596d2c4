"""Linear layers of tensors, called by hand or in a Sequential: what follows is computed
with them, and nobody can tell but by the launches.
"""

import re
from io import StringIO

import cases
import mlx.core as mx
import mlx.nn
import mlx.utils
import numpy as np
import pytest
from contractions import exact

import mlx_lattice as ml
from mlx_lattice import devices, nn, ops, pending
from mlx_lattice.nn import fused, linear
from mlx_lattice.pending import Pending

C = 32
# On this machine a linear layer is a contraction, with a route, or MLX's own matmul.
IS_CONTRACTION = linear.is_contraction(mx.zeros((1, C)))
contraction = pytest.mark.skipif(not IS_CONTRACTION, reason="MLX's own matmul serves")
KINDS = "float32", "float16", "8 bits", "no bias"


def tensor(dtype=mx.float32, seed=0):
    coords = cases.geometry("batches", 3, 80)
    feats = mx.array(cases.features(len(coords), C, seed)).astype(dtype)
    return ml.SparseTensor(mx.array(coords), feats)


class Net(nn.Module):
    """Linear layers, and ways in which they are followed."""

    def __init__(self, kind="float32"):
        super().__init__()
        mx.random.seed(0)
        bias = kind != "no bias"
        self.wide, self.narrow = nn.Linear(C, 2 * C, bias), nn.Linear(2 * C, C, bias)
        self.one, self.norm, self.relu = (
            nn.Linear(C, C, bias),
            nn.BatchNorm(C),
            nn.ReLU(),
        )
        self.norm.weight = mx.random.uniform(0.5, 2, (C,))
        self.norm.running_mean, self.norm.bias = mx.random.normal((2, C))
        if kind == "8 bits":
            for name in ("wide", "narrow", "one"):
                self[name] = self[name].to_quantized(group_size=32, bits=8)
        if kind == "float16":
            self.set_dtype(mx.float16)

    def activated(self, x):
        return ops.silu(self.wide(x))

    def beside_a_skip(self, x):
        return x + self.one(x)

    def followed_twice(self, x):
        return self.relu(self.one(x) + x)

    def an_mlp(self, x):
        return nn.Sequential(self.wide, mlx.nn.GELU(), self.narrow)(x) + x

    def normalised(self, x):
        return self.relu(self.norm(self.one(x)) + x)

    def in_a_sequential(self, x):
        return nn.Sequential(self.one, self.norm, mlx.nn.SiLU())(x)


# What contractions compute besides sums, in evaluation.
WAYS = {
    "activated": ["+ shift + SiLU"],
    "beside_a_skip": ["+ shift + residual"],
    "followed_twice": ["+ shift + residual + ReLU"],
    "an_mlp": ["+ shift + GELU", "+ shift + residual"],
    "normalised": ["+ BatchNorm + residual + ReLU"],
    "in_a_sequential": ["+ BatchNorm + SiLU"],
}


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("name", WAYS)
def test_what_follows_is_computed_with_it(name, kind):
    net = Net(kind).eval()
    x = tensor(mx.float16 if kind == "float16" else mx.float32)
    with ml.trace() as trace:
        y = getattr(net, name)(x)
    with pending.apart():
        wanted = getattr(net, name)(x)
    assert y.key == x.key and y.dtype == x.dtype
    most = 0.02 if kind == "float16" else 1e-5
    np.testing.assert_allclose(exact(y.feats), exact(wanted.feats), most, most)
    if IS_CONTRACTION:
        after = [str(record.problem.epilogue or "") for record in trace]
        shift = "+ shift " if kind == "no bias" else ""
        assert after == [each.replace(shift, "") for each in WAYS[name]]


@pytest.mark.parametrize("training", (True, False))
@pytest.mark.parametrize("kind", ("float32", "8 bits", "no bias"))
@pytest.mark.parametrize("name", WAYS)
def test_gradients_and_second_ones(name, kind, training):
    x = tensor()
    net, by = Net(kind).train(training), mx.array(cases.features(len(x), C, 5))
    packed = {"scales", "biases"} if kind == "8 bits" else set()
    for layer in (net.wide, net.narrow, net.one):
        layer.freeze(keys=[*packed, "weight"] if packed else [])
    held = net.parameters()

    def total(parameters, feats):
        net.update(parameters)
        y = getattr(net, name)(x.replace(feats)).feats
        return mx.sin(y).sum()

    def slope(feats):
        found = mx.grad(total, argnums=1)(net.trainable_parameters(), feats)
        return (found * by).sum()

    def found():
        net.update(held)
        made = mx.value_and_grad(total, argnums=(0, 1))
        first = made(net.trainable_parameters(), x.feats)
        net.update(held)
        return mlx.utils.tree_flatten((first, mx.grad(slope)(x.feats)))

    got = found()
    with pending.apart():
        wanted = found()
    for (at, a), (_, b) in zip(got, wanted, strict=True):
        most = 1e-4 * (1 + np.abs(exact(b)).max())
        np.testing.assert_allclose(exact(a), exact(b), 1e-3, most, err_msg=at)


@contraction
@pytest.mark.parametrize("name", ("ReLU", "SiLU", "GELU"))
def test_a_gradient_does_not_multiply_again_for_an_activation(name):
    """Forward, by rows and by weights; as of convolutions, ReLU is in the launch."""
    net, x, act = Net(), tensor(), getattr(nn, name)()
    with ml.trace() as trace:
        mx.grad(lambda feats: act(net.one(x.replace(feats))).feats.sum())(x.feats)
    after = [str(record.problem.epilogue or "") for record in trace]
    assert after[0] == ("+ shift + ReLU" if name == "ReLU" else "")
    assert [record.problem.pass_ for record in trace] == [
        "forward", "input_grad", "weight_grad",
    ]  # fmt: skip


def operations(call):
    """The names of what a call would start, but for views."""
    written = StringIO()
    mx.export_to_dot(written, call().feats)
    views = "Contiguous|Broadcast|Full|Reshape|Transpose|ExpandDims|Squeeze|Copy"
    names = re.findall(r'\d+ \[label ="(\w+)', written.getvalue())
    return [name for name in names if not re.fullmatch(views, name)]


@pytest.mark.skipif(IS_CONTRACTION, reason="there all is in its launch")
@pytest.mark.parametrize(
    "name, kind, most",
    (
        ("activated", "8 bits", 2),
        ("activated", "float32", 2),
        ("followed_twice", "8 bits", 2),
        ("an_mlp", "8 bits", 4),
    ),
)
def test_what_follows_a_matmul_and_its_bias_is_one_launch(name, kind, most):
    net, x = Net(kind).eval(), tensor()
    mx.eval(net.parameters(), getattr(net, name)(x).feats)
    names = operations(lambda: getattr(net, name)(x))
    # On CUDA a launch of ours unpacks a weight before MLX multiplies.
    is_unpacked = kind == "8 bits" and devices.current().backend == devices.CUDA
    unpacked = names.count("Matmul") if is_unpacked else 0
    assert len(names) - unpacked == most, names


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("name", WAYS)
def test_compiled_and_no_rows(name, kind):
    net = Net(kind).eval()
    x = tensor(mx.float16 if kind == "float16" else mx.float32)
    compiled = mx.compile(lambda feats: getattr(net, name)(x.replace(feats)).feats)
    wanted = exact(getattr(net, name)(x).feats)
    most = 0.02 if kind == "float16" else 1e-4
    for _ in range(2):
        np.testing.assert_allclose(exact(compiled(x.feats)), wanted, most, most)
    none = ml.SparseTensor(x.coords[:0], x.feats[:0], batch_size=3)
    assert getattr(net, name)(none).feats.shape == (0, wanted.shape[1])


def test_a_result_is_of_the_parameters_that_there_were():
    for kind in ("float32", "8 bits"):
        net, x = Net(kind).eval(), tensor()
        with pending.apart():
            wanted = exact(net.relu(net.one(x)).feats)
        y = net.one(x)
        assert y.shape == (len(x), C)
        assert (type(y) is Pending) == (IS_CONTRACTION or kind == "8 bits")
        net.one.bias = net.one.bias + 1
        net.one.weight = net.one.weight * 0
        np.testing.assert_allclose(exact(net.relu(y).feats), wanted, 1e-5, 1e-5)


def test_what_is_held_is_computed_once():
    net, x = Net().eval(), tensor()
    y = net.one(x)
    z = net.relu(y)
    np.testing.assert_array_equal(exact(z.feats), np.maximum(exact(y.feats), 0))


def test_bad_input_raises_at_once():
    with pytest.raises(TypeError, match="float16"):
        nn.Linear(C, C)(tensor(mx.float16))
    for layer in (nn.Linear(C + 8, C), nn.Linear(2 * C, C).to_quantized(32, 8)):
        with pytest.raises(ValueError):
            layer(tensor())


@pytest.mark.parametrize("kind", KINDS)
def test_rows_without_a_tensor(kind):
    """As the blocks of ``models`` call it: a sum, an activation, both, and neither."""
    net = Net(kind)
    x = tensor(mx.float16 if kind == "float16" else mx.float32).feats
    most = 0.02 if kind == "float16" else 1e-5
    for residual in (None, x):
        for act in (None, mlx.nn.relu, mlx.nn.silu):
            y = fused.linear(net.one, x, act, residual)
            wanted = net.one(x) if residual is None else net.one(x) + residual
            wanted = wanted if act is None else act(wanted)
            np.testing.assert_allclose(exact(y), exact(wanted), most, most)
