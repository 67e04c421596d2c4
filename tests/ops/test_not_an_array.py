"""The error of a SparseTensor where MLX expects an array."""

import cases
import mlx.core as mx
import mlx.nn
import pytest

import mlx_lattice as ml
from mlx_lattice import nn

ROWS = mx.array([[0, 0, 0, 0], [0, 1, 2, 3], [1, 1, 2, 4]])
TARGETS, LABELS = mx.ones((3, 8)), mx.array([0, 1, 2])
X = ml.SparseTensor(ROWS, mx.array(cases.features(3, 8)))
losses = mlx.nn.losses

CALLS = {
    "cross_entropy": lambda x: losses.cross_entropy(x, LABELS),
    "cross_entropy of labels": lambda x: losses.cross_entropy(TARGETS, x),
    "mse_loss": lambda x: losses.mse_loss(x, TARGETS),
    "mse_loss of targets": lambda x: losses.mse_loss(TARGETS, x),
    "kl_div_loss": lambda x: losses.kl_div_loss(x, TARGETS),
    "BatchNorm": mlx.nn.BatchNorm(8),
    "Linear without bias": mlx.nn.Linear(8, 4, bias=False),
    "Dropout": mlx.nn.Dropout(0.5),
    "MultiHeadAttention": lambda x: mlx.nn.MultiHeadAttention(8, 2)(x, x, x),
    "Upsample": mlx.nn.Upsample(2),
    "exp": mx.exp,
    "array": mx.array,
    "left operand": lambda x: TARGETS * x,
    "matmul": lambda x: x @ TARGETS.T,
    "power": lambda x: x**2,
    "greater": lambda x: x > 0,
    "mean": lambda x: x.mean(),
    "reshape": lambda x: x.reshape(-1),
    "item": lambda x: x.item(),
}


@pytest.mark.parametrize("name", CALLS)
def test_it_names_the_features(name):
    with pytest.raises((TypeError, AttributeError), match=r"Pass x\.feats to loss"):
        CALLS[name](X)


@pytest.mark.parametrize("name", ("to", "cuda", "detach", "F"))
def test_names_of_other_libraries_are_referred_to_a_page(name):
    with pytest.raises(AttributeError, match=r"coming_from\.md has the names"):
        getattr(X, name)


def test_eval_returns_the_tensor():
    assert X.eval() is X
    assert "x.eval()" in ml.SparseTensor.__doc__


@pytest.mark.parametrize(
    ("sentence", "call"),
    (
        (r"with ml\.trace\(net\) as t: net\(x\)", lambda net, x: ml.trace(net, x)),
        (r"with ml\.trace\(net\) as t: net\(x\)", lambda net, x: ml.trace(x)),
        ("must be a net; got int", lambda net, x: ml.trace(3).__enter__()),
        (r"with ml\.verify\(model=net\): net\(x\)", lambda net, x: ml.verify(net, x)),
        (r"ml\.explain\(x, layer\)", lambda net, x: ml.explain(net, x)),
        (r"ml\.prepare\(net, x\)", lambda net, x: ml.prepare(x, net)),
        (
            r"with ml\.trace\(net\)",
            lambda net, x: ml.explain(x, nn.Sequential(net, net)),
        ),
    ),
)
def test_the_right_call_is_shown(sentence, call):
    with pytest.raises((TypeError, ValueError), match=sentence):
        call(nn.SubmConv3d(8, 8, 3), X)
