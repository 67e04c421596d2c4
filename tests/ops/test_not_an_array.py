"""What a SparseTensor says where MLX expects an array."""

import mlx.core as mx
import mlx.nn
import numpy as np
import pytest

import mlx_lattice as ml
from mlx_lattice import nn, ops

ROWS = mx.array([[0, 0, 0, 0], [0, 1, 2, 3], [1, 1, 2, 4]])
FEATS = mx.array(np.random.default_rng(0).normal(size=(3, 8)).astype(np.float32))
TARGETS, LABELS = mx.ones((3, 8)), mx.array([0, 1, 2])
losses = mlx.nn.losses

CALLS = {
    "cross_entropy": lambda x: losses.cross_entropy(x, LABELS),
    "cross_entropy of labels": lambda x: losses.cross_entropy(TARGETS, x),
    "mse_loss": lambda x: losses.mse_loss(x, TARGETS),
    "mse_loss of targets": lambda x: losses.mse_loss(TARGETS, x),
    "l1_loss": lambda x: losses.l1_loss(x, TARGETS),
    "smooth_l1_loss": lambda x: losses.smooth_l1_loss(x, TARGETS),
    "huber_loss": lambda x: losses.huber_loss(x, TARGETS),
    "kl_div_loss": lambda x: losses.kl_div_loss(x, TARGETS),
    "BatchNorm": mlx.nn.BatchNorm(8),
    "GroupNorm": mlx.nn.GroupNorm(2, 8),
    "InstanceNorm": mlx.nn.InstanceNorm(8),
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


X = ml.SparseTensor(ROWS, FEATS)


@pytest.mark.parametrize("call", CALLS)
def test_it_names_the_features(call):
    with pytest.raises((TypeError, AttributeError), match=r"Pass x\.feats to loss"):
        CALLS[call](X)


def test_eval_returns_the_tensor():
    assert X.eval() is X and "x.eval()" in ml.SparseTensor.__doc__


@pytest.mark.parametrize(
    ("sentence", "call"),
    (
        (r"with ml\.trace\(net\) as t: net\(x\)", lambda net, x: ml.trace(net, x)),
        (r"with ml\.trace\(net\) as t: net\(x\)", lambda net, x: ml.trace(x)),
        (r"with ml\.trace\(net\) as t: net\(x\)", lambda net, x: ml.trace(x, net)),
        (r"with ml\.verify\(model=net\): net\(x\)", lambda net, x: ml.verify(net, x)),
        (r"ml\.explain\(x, layer\)", lambda net, x: ml.explain(net, x)),
        (r"ml\.prepare\(net, x\)", lambda net, x: ml.prepare(x, net)),
        (
            r"with ml\.trace\(net\)",
            lambda net, x: ml.explain(x, nn.Sequential(net, net)),
        ),
    ),
)
def test_what_was_meant_is_said_at_the_call(sentence, call):
    with pytest.raises((TypeError, ValueError), match=sentence):
        call(nn.SubmConv3d(8, 8, 3), X)


OPERATIONS = {
    "add": lambda x, a: x + a,
    "subtract": lambda x, a: x - a,
    "multiply": lambda x, a: x * a,
    "divide": lambda x, a: x / a,
}


@pytest.mark.parametrize("operation", OPERATIONS)
@pytest.mark.parametrize("pool", ("sum", "avg", "max"))
def test_values_of_batch_elements_are_not_taken_for_rows(operation, pool):
    run, pool = OPERATIONS[operation], getattr(ops, f"global_{pool}_pool")
    with pytest.raises(ValueError, match=r"values\[x\.coords\[:, 0\]\]"):
        run(X, pool(X))  # 3 rows of 2 elements
    same = ml.SparseTensor(ROWS[:2], FEATS[:2], batch_size=2)  # 2 rows, 2 elements
    turned = ml.SparseTensor(ROWS[1:][::-1], FEATS[1:])
    for each in (same, turned):
        for values in (pool(each), pool(each)[:, :1]):
            with pytest.raises(ValueError, match="may belong to either"):
                run(each, values)
        with pytest.raises(ValueError, match="may belong to either"):
            mx.grad(lambda f, e=each: run(e.replace(f), pool(e)).feats.sum())(FEATS[:2])


@pytest.mark.parametrize("operation", OPERATIONS)
def test_values_that_can_belong_to_rows_alone_are_theirs(operation):
    run = OPERATIONS[operation]
    one = ml.SparseTensor(ROWS[1:], FEATS[1:])  # one row each, in order
    many = ml.SparseTensor(ROWS, FEATS)
    alone = ml.SparseTensor(ROWS[:2], FEATS[:2])
    for x, values in ((one, ops.global_sum_pool(one)), (many, TARGETS + 1)):
        wanted = run(np.array(x.feats, np.float64), np.array(values, np.float64))
        np.testing.assert_allclose(np.array(run(x, values).feats), wanted, rtol=1e-5)
    values = ops.global_sum_pool(alone)  # (1, 8): of the one element
    wanted = run(np.array(alone.feats, np.float64), np.array(values, np.float64))
    np.testing.assert_allclose(np.array(run(alone, values).feats), wanted, rtol=1e-5)
    spread = x.replace(run(many.feats, ops.global_sum_pool(many)[many.coords[:, 0]]))
    assert spread.shape == (3, 8)
