"""Functions that repeat their launches: on other arrays, while nothing else changes."""

import os

import cases
import mlx.core as mx
import mlx.nn
import numpy as np
import pytest

import mlx_lattice as ml
from mlx_lattice import nn, transformations
from mlx_lattice.backends import cpu_extension, cuda_compile, metal_host, registry
from mlx_lattice.routes import launch

pytestmark = pytest.mark.skipif(
    cpu_extension.extension is None, reason="the extension records launches"
)
COORDS = cases.geometry("surface", 3, 200, 0)


@pytest.fixture(autouse=True)
def lazy(monkeypatch):
    if os.environ.get("MLX_LATTICE_METAL") == "host":
        pytest.skip("launches of a stand-in are found at every call")
    # Tests before these may have left a stand-in for Metal.
    factories = mx.fast.metal_kernel, mx.fast.cuda_kernel
    monkeypatch.setattr(transformations, "_FACTORIES", factories)


class Doubling:
    """A function by a launch, that can say what it depends on, and counts its calls."""

    def __init__(self):
        self.calls, self.state = 0, "at first"
        self.function = transformations.Function(self.forward, lambda: self.state)
        self.function.vjp(lambda primals, dy, _: self.function(dy))

    def forward(self, x):
        self.calls += 1
        return registry.reductions().gather_sum(x, pairs(len(x)))


def pairs(rows: int) -> mx.array:
    """The table that takes each row twice."""
    return mx.broadcast_to(mx.arange(rows, dtype=mx.int32)[:, None], (rows, 2))


def rows(seed: int, shape=(5, 4), dtype=mx.float32) -> mx.array:
    return mx.array(np.random.default_rng(seed).normal(size=shape)).astype(dtype)


def test_python_finds_launches_twice():
    double = Doubling()
    for seed in range(5):
        x = rows(seed)
        assert mx.array_equal(double.function(x), 2 * x)
    assert double.calls == 2


def test_other_arrays_are_found_again():
    double = Doubling()
    for x in (rows(0), rows(1), rows(2, (3, 4)), rows(3), rows(4, dtype=mx.float16)):
        assert mx.array_equal(double.function(x), 2 * x)
    assert double.calls == 4  # once, recorded, and two that do not fit
    assert double.function(rows(5)).shape == (5, 4) and double.calls == 4


def test_nothing_is_repeated_of_another_state():
    double = Doubling()
    for state, calls in (("a", 1), ("a", 2), ("a", 2), ("b", 3), ("b", 4), ("b", 4)):
        double.state = state
        assert mx.array_equal(double.function(rows(0)), 2 * rows(0))
        assert double.calls == calls
    double.state = None
    for calls in (5, 6):
        mx.eval(double.function(rows(0)))
        assert double.calls == calls
    double.state = "b"
    mx.eval(double.function(rows(0)))
    assert double.calls == 6


def test_one_array_given_twice_stays_two():
    """Recorded with one array for both, launched on two."""
    add = transformations.Function(lambda a, b: a - 3 * b, lambda: True)
    a, b = rows(0), rows(1)
    for _ in range(2):
        assert mx.array_equal(add(a, a), a - 3 * a)
    assert mx.array_equal(add(a, b), a - 3 * b)


def test_a_result_that_is_no_launch_is_found_at_every_call():
    """What was there before the call, or was computed within it, is of no other."""
    held = []

    def eager(x):
        made = 2 * x
        mx.eval(made)
        held.append(made)
        return made

    for forward in (eager, lambda x: x):
        function = transformations.Function(forward, lambda: True)
        for seed in range(4):
            expected = forward(rows(seed))
            assert mx.array_equal(function(rows(seed)), expected)


def test_a_stand_in_for_mlx_is_not_passed_by(monkeypatch):
    double = Doubling()
    for _ in range(3):
        mx.eval(double.function(rows(0)))
    monkeypatch.setattr(mx.fast, "cuda_kernel", lambda **_: None)
    mx.eval(double.function(rows(0)))
    assert double.calls == 3


def test_a_rehearsal_is_not_repeated():
    """What it leaves out is zeros, for others to read."""
    double = Doubling()
    with cuda_compile.rehearsal():
        for calls in (1, 2, 3):
            mx.eval(double.function(rows(0)))
            assert double.calls == calls
    for calls in (4, 5, 5):
        assert mx.array_equal(double.function(rows(0)), 2 * rows(0))
        assert double.calls == calls


def test_another_stream_is_launched_on():
    double = Doubling()
    for _ in range(3):
        mx.eval(double.function(rows(0)))
    with mx.stream(mx.new_stream(mx.default_device())):
        mx.eval(double.function(rows(0)))
    assert double.calls == 3


def test_transformations_of_what_is_repeated():
    double = Doubling()
    once = mx.grad(lambda x: double.function(x).sum())
    twice = mx.grad(lambda x: mx.square(double.function(x)).sum())
    for seed in range(5):
        x = rows(seed)
        assert mx.array_equal(once(x), 2 + 0 * x)
        grown = mx.grad(lambda x: (twice(x) * x).sum())(x)
        assert mx.allclose(grown, 16 * x, rtol=1e-5)
        if mx.default_device() == mx.cpu:  # kernels of GPUs have no rule for it
            mapped = mx.vmap(double.function)(mx.stack([x, -x]))
            assert mx.array_equal(mapped[1], -2 * x)
        assert mx.array_equal(mx.compile(double.function)(x), 2 * x)


def net() -> nn.Sequential:
    mx.random.seed(0)
    return nn.Sequential(
        nn.SubmConv3d(6, 8, 3, bias=False), nn.BatchNorm(8), nn.ReLU(),
        nn.Conv3d(8, 8, 2, stride=2), nn.BatchNorm(8), nn.GELU(),
        nn.SubmConv3d(8, 5, 3),
    )  # fmt: skip


def steps(model, tensors, labels) -> list[np.ndarray]:
    """Weights and statistics after a step on each tensor."""
    optimizer = mlx.optimizers.SGD(0.1, momentum=0.9)

    def loss(x, y):
        return mx.square(model(x).feats - y).mean()

    for x, y in zip(tensors, labels, strict=True):
        _, gradients = mlx.nn.value_and_grad(model, loss)(x, y)
        optimizer.update(model, gradients)
        mx.eval(model.state, optimizer.state)
    return [np.array(a) for _, a in mlx.utils.tree_flatten(model.parameters())]


def trained(repeats: bool, monkeypatch) -> tuple[list[np.ndarray], int]:
    """Steps on one scan, and how often Python found the launches of a pass.

    Of kept relations everything is repeated from step 4 on.
    """
    found, launched = [], launch.Pass.__call__

    def counted(self, *arrays):
        found.append(self.pass_)
        return launched(self, *arrays)

    monkeypatch.setattr(launch.Pass, "__call__", counted)
    monkeypatch.setattr(transformations, "_is_lazy", lambda: repeats)
    x = ml.SparseTensor(mx.array(COORDS), rows(0, (len(COORDS), 6)))
    of = [rows(seed, x.feats.shape) for seed in range(7)]
    n = len(net()(x))
    labels = [rows(seed, (n, 5)) for seed in range(7)]
    tensors = [x.replace(feats) for feats in of]
    if not repeats:
        tensors = [ml.SparseTensor(mx.array(COORDS), feats) for feats in of]
    return steps(net(), tensors, labels), len(found)


def check_training(monkeypatch):
    """The same bits, whether launches are repeated or found at every call."""
    repeated, few = trained(True, monkeypatch)
    each, all_ = trained(False, monkeypatch)
    assert few < all_ / 2
    for a, b in zip(repeated, each, strict=True):
        np.testing.assert_array_equal(a, b)


def test_training_is_that_of_new_relations_each_time(monkeypatch):
    check_training(monkeypatch)


@pytest.mark.skipif(metal_host.absence() is not None, reason="no Metal on the CPU")
def test_launches_of_metal_are_repeated_alike(monkeypatch):
    """The emulation's are nodes too, where nobody asks it to check them."""
    with ml.metal("host"):
        check_training(monkeypatch)


def test_layers_of_one_shape_share_no_weights_or_statistics():
    x = ml.SparseTensor(mx.array(COORDS), rows(0, (len(COORDS), 8)))
    layers = [nn.SubmConv3d(8, 8, 3, bias=i % 2 == 0) for i in range(4)]
    norms = [nn.BatchNorm(8) for _ in layers]
    first = [
        (conv(x).feats, norm(x).feats) for conv, norm in zip(layers, norms, strict=True)
    ]
    expected = [[np.array(a) for a in each] for each in first]
    for i, norm in enumerate(norms):
        norm.running_mean = mx.full((8,), float(i))
    for _ in range(3):
        for conv, norm, (y, z) in zip(layers, norms, expected, strict=True):
            np.testing.assert_array_equal(np.array(conv(x).feats), y)
            np.testing.assert_array_equal(np.array(norm(x).feats), z)
    means = [np.array(norm.running_mean) for norm in norms]
    for i, mean in enumerate(means[1:], 1):
        # Moved four times from i, with the same data.
        np.testing.assert_allclose(mean - means[0], i * 0.9**3, rtol=1e-4)


def test_what_decides_is_asked_at_every_call():
    x = ml.SparseTensor(mx.array(COORDS), rows(0, (len(COORDS), 8)))
    layer = nn.SubmConv3d(8, 8, 3)
    expected = [np.array(layer(x).feats) for _ in range(4)][0]
    refused = pytest.raises(ml.routes.RouteError, match="depthwise")
    with ml.routes.only("depthwise"), refused:
        layer(x)
    with ml.trace() as told:
        mx.eval(layer(x).feats)
    assert len(told) == 1
    np.testing.assert_array_equal(np.array(layer(x).feats), expected)


def test_a_linear_norm_of_segments_is_as_before():
    """Statistics of batch elements are not repeated: their rows are no arrays."""
    coords = np.concatenate([COORDS, COORDS + [1, 0, 0, 0]])
    x = ml.SparseTensor(mx.array(coords), rows(1, (len(coords), 8)))
    norm = nn.InstanceNorm(8)
    first = np.array(norm(x).feats)
    for _ in range(3):
        np.testing.assert_array_equal(np.array(norm(x).feats), first)
