"""Copies and pickles of tensors, managers, relations and compiled functions."""

import copy
import pickle
import subprocess
import sys

import cases
import mlx.core as mx
import mlx.nn
import numpy as np
import pytest
from conftest import bits

import mlx_lattice as ml
from mlx_lattice import nn

# The relations and rows of a tensor that another process pickled.
LOADED = """
import pickle, sys
import mlx_lattice as ml
ml.SparseTensor([[0, 7]], [[1.0]])  # has the serial of the first set there
x, y = pickle.load(sys.stdin.buffer)
print((x + y).feats.sum().item(), x.stride, x.batch_size)
"""


def pickled(value):
    return pickle.loads(pickle.dumps(value))


COPIES = pytest.mark.parametrize("copied", (copy.deepcopy, pickled))


def tensor(seed=0, channels=4, dtype=mx.float32, **facts) -> ml.SparseTensor:
    coords = cases.in_grid((9, 8, 7), 60, seed=seed)
    feats = mx.array(cases.features(len(coords), channels, seed)).astype(dtype)
    return ml.SparseTensor(mx.array(coords), feats, **facts)


def same(x: ml.SparseTensor, y: ml.SparseTensor) -> bool:
    facts = ("stride", "spatial_shape", "batch_size", "dtype", "shape", "dims")
    return (
        all(getattr(x, name) == getattr(y, name) for name in facts)
        and bits(x.coords) == bits(y.coords)
        and bits(x.feats) == bits(y.feats)
    )


@COPIES
@pytest.mark.parametrize("dtype", (mx.float32, mx.bfloat16), ids=str)
@pytest.mark.parametrize("used", (False, True), ids=("new", "used"))
def test_a_copy_is_the_same_tensor_of_its_own_manager(copied, dtype, used):
    facts = {"stride": (2, 1, 1), "spatial_shape": (9, 8, 7), "batch_size": 5}
    x = tensor(dtype=dtype, **facts)
    conv = nn.SubmConv3d(4, 6, 3)
    conv.set_dtype(dtype)
    if used:
        mx.eval(conv(x).feats)
    y = copied(x)
    assert type(y) is ml.SparseTensor and same(x, y)
    assert y.manager is not x.manager and y.key is not x.key
    assert not y.manager.relations and len(y.manager.sets) == 1
    assert bits(conv(y).feats) == bits(conv(x).feats)
    ours, rows = bits(x.feats), bits(x.coords)
    y.feats[0], y.coords[0] = 7, 7  # it has its own arrays
    assert bits(x.feats) == ours and bits(x.coords) == rows


@COPIES
def test_tensors_that_are_copied_together_are_aligned_by_their_rows(copied):
    x = tensor()
    y = nn.SubmConv3d(4, 4, 3)(x)
    a, b = copied((x, y))
    assert a.manager is not b.manager
    assert bits((a + b).feats) == bits((x + y).feats)


def test_pickles_are_read_in_another_process():
    x = tensor(stride=2, batch_size=5)
    y = x.replace(-x.feats)
    mx.eval(nn.SubmConv3d(4, 4, 3)(x).feats)
    command = sys.executable, "-c", LOADED
    given = pickle.dumps((x, y))
    out = subprocess.run(command, input=given, capture_output=True, check=True)
    assert out.stdout.decode().strip() == "0.0 (2, 2, 2) 5"


@COPIES
def test_managers_and_keys_are_not_copied(copied):
    x = tensor()
    with pytest.raises(TypeError, match="Manager cannot be copied .* tensors"):
        copied(x.manager)
    with pytest.raises(TypeError, match="CoordinateKey names a set of one manager"):
        copied(x.key)


@COPIES
def test_relations_are_not_copied(copied):
    x = tensor()
    relation = x.manager.submanifold_kernel_relation(x.key)
    for given in (relation, relation.T):
        with pytest.raises(TypeError, match="Relation cannot be copied .* its tensors"):
            copied(given)


@COPIES
def test_compiled_modules_are_copied_without_traces(copied):
    x, net = tensor(), nn.Sequential(nn.SubmConv3d(4, 4, 3), nn.ReLU())
    compiled = ml.compile(net, keep=3)
    for _ in range(3):
        expected = compiled(x)
    made = copied(compiled)
    assert made.function is not net and made.keep == 3 and len(made) == 0
    for _ in range(3):
        np.testing.assert_array_equal(made(x).feats, expected.feats)
    with pytest.raises(TypeError, match="compiled function cannot be copied"):
        copied(ml.compile(lambda x: net(x), inputs=net.state))


def used_net(kind: str) -> mlx.nn.Module:
    net = nn.Sequential(
        nn.SubmConv3d(16, 32, 3), nn.BatchNorm(32), nn.ReLU(),
        nn.Conv3d(32, 32, 2, stride=2), nn.LayerNorm(32), nn.GELU(),
        nn.ConvTranspose3d(32, 16, 2, stride=2), nn.Linear(16, 32),
    )  # fmt: skip
    if kind == "quantised":
        mlx.nn.quantize(net, group_size=32, bits=4, class_predicate=packs)
    return net


def packs(path: str, layer: mlx.nn.Module) -> bool:
    return hasattr(layer, "to_quantized") and layer.weight.shape[-1] % 32 == 0


@COPIES
@pytest.mark.parametrize("kind", ("plain", "quantised"))
def test_nets_that_were_used_are_copied(copied, kind):
    x, net = tensor(channels=16), used_net(kind)

    def loss(x):
        return net(x).feats.square().sum()

    ml.prepare(net, x, training=True)
    mx.eval(mlx.nn.value_and_grad(net, loss)(x), net(x).feats)
    net.eval()
    expected = net(x).feats
    twin, own = copied((net, x))
    assert bits(twin(own).feats) == bits(expected)
