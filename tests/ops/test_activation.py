"""Activations of no rows: legal on every backend, gradients included."""

import mlx.core as mx
import pytest

import mlx_lattice as ml
from mlx_lattice import nn, ops
from mlx_lattice.epilogue import ARRAYS, EpilogueFacts, finished
from mlx_lattice.nn import activations

EMPTY = ml.SparseTensor(mx.zeros((0, 4), mx.int32), mx.zeros((0, 6)))


@pytest.mark.parametrize("name", activations.__all__)
def test_a_layer_of_no_rows(name):
    layer = getattr(nn, name)()
    some = layer(mx.ones((2, 6)))
    assert layer(EMPTY).feats.tolist() == [] == layer(EMPTY.feats).tolist()
    assert layer(EMPTY).feats.shape == (0, some.shape[1])
    dx = mx.grad(lambda feats: layer(feats).sum())(EMPTY.feats)
    mx.eval(dx)
    assert dx.shape == EMPTY.feats.shape


@pytest.mark.parametrize("name", ("relu", "gelu", "silu", "glu", "softmax"))
def test_a_function_of_no_rows(name):
    y = getattr(ops, name)(EMPTY)
    assert y.key == EMPTY.key and y.feats.tolist() == []


@pytest.mark.parametrize("activation", ("", "relu", "gelu", "silu"))
def test_norms_and_epilogues_of_no_rows(activation):
    feats, one = EMPTY.feats, mx.ones((6,))
    facts = EpilogueFacts(ARRAYS, activation, eps=1e-5)
    assert finished(feats, facts, one, one, one, one, feats).tolist() == []
    layers = {"relu": nn.ReLU, "gelu": nn.GELU, "silu": nn.SiLU}
    net = nn.Sequential(
        nn.BatchNorm(6), *([layers[activation]()] if activation else [])
    )
    for training in (True, False):
        assert net.train(training)(EMPTY).feats.tolist() == []
