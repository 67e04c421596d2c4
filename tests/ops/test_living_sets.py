"""What an operation returns does not depend on which other tensors are alive."""

import mlx.core as mx
import mlx.nn
import numpy as np
import pytest

import mlx_lattice as ml
from mlx_lattice import nn, ops

ROWS = mx.array([[0, i, i % 3, 0] for i in range(12)])
EVEN = mx.arange(12) % 2 == 0
FEATS = mx.array(np.random.default_rng(0).normal(size=(12, 64)), dtype=mx.float32)


def layers(stride: int):
    """Layers that look for a finer set, by name."""
    up = nn.ConvTranspose3d(64, 64, 3, stride, padding=1)
    yield "transposed", up
    yield "generative", nn.GenerativeConvTranspose3d(64, 64, 3, stride, padding=1)
    yield "quantised", up.to_quantized(group_size=32, bits=4)
    yield "sum_pool_transpose", lambda x: ops.sum_pool_transpose3d(x, 3, stride)
    yield "avg_pool_transpose", lambda x: ops.avg_pool_transpose3d(x, 3, stride)
    for mode in ("nearest", "linear"):
        yield mode, nn.Upsample3d(stride, mode=mode)
    net = mlx.nn.Sequential(up)
    yield "prepared", lambda x: (ml.prepare(net, x), net(x))[1]


def result(layer, x):
    try:
        y = layer(x)
    except ValueError as error:
        return str(error).split("#")[0]
    return y.coords.tolist(), np.array(y.feats)


def same(a, b) -> bool:
    if isinstance(a, str) or isinstance(b, str):
        return a == b
    return a[0] == b[0] and np.array_equal(a[1], b[1])


@pytest.mark.parametrize("stride", (1, 2))
@pytest.mark.parametrize("name", [name for name, _ in layers(1)])
def test_some_rows_are_upsampled_as_a_tensor_of_their_own(name, stride):
    layer = dict(layers(stride))[name]
    at = mx.arange(0, 12, 2)
    # Twice the lattice: a set of stride 1 lives, and one of stride 2 is upsampled.
    first = nn.MaxPool3d(2, 2)(ml.SparseTensor(ROWS * 2, FEATS))
    alone = ml.SparseTensor(first.coords[at], first.feats[at], first.stride)
    wanted = result(layer, alone)
    if stride == 1 or name == "generative":
        assert not isinstance(wanted, str)
    some = ops.prune(first, EVEN)
    assert same(result(layer, some), wanted)
    others = [ops.prune(first, mx.arange(12) < n) for n in (3, 5)]
    others += [some.manager.insert(ROWS[:n]) for n in (4, 6)]
    assert same(result(layer, some), wanted)
    if stride == 1:
        rows = wanted[0]
        assert name == "generative" or rows == alone.coords.tolist()


@pytest.mark.parametrize("name", [name for name, _ in layers(1) if name != "prepared"])
def test_pooled_rows_go_back_up_whatever_else_lives(name):
    layer, x = dict(layers(2))[name], ml.SparseTensor(ROWS, FEATS)
    pooled = nn.MaxPool3d(3, 2, padding=1)(x)
    wanted = result(layer, pooled)
    assert name == "generative" or wanted[0] == ROWS.tolist()
    others = [ops.prune(x, mx.arange(12) < n) for n in (3, 5)]
    coarse = [nn.MaxPool3d(3, 2, padding=1)(y) for y in others]
    assert same(result(layer, pooled), wanted)
    del x, others, coarse
    ops.prune(pooled, mx.arange(len(pooled)) > 0)  # drops sets that nothing holds
    assert same(result(layer, pooled), wanted)
