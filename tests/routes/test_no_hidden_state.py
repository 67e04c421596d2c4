"""What a layer's plan depends on is a fact of its relation from the making on.

And what a Choice says of the other routes is what was true when it was made.
"""

import cases
import mlx.core as mx
import numpy as np
import pytest
from conftest import KINDS, pair

import mlx_lattice as ml
from mlx_lattice import ops
from mlx_lattice.routes import launch

# Few edges a row and many; made by a manager, by hand, and of rows the library made.
SCENES = ("far", "surface")


def explain(relation, x, w):
    ml.explain(x, w, kind="submanifold")
    for pass_ in ("input_grad", "weight_grad"):
        ml.explain(x, w, kind="submanifold", pass_=pass_)


def trace(relation, x, w):
    with ml.trace(time=True) as t:
        ops.sparse_conv(x.feats, w, relation)
    assert t.table()


def backward(relation, x, w):
    def loss(feats, w):
        return ops.sparse_conv(feats, w, relation).square().sum()

    mx.eval(mx.grad(loss, (0, 1))(x.feats, w))


def edges(relation, x, w):
    mx.eval(relation.edges, relation.T.edges, relation.counts, relation.sorted.rows)
    assert relation.coverage().edges == relation.n_edges


def run(relation, x, w):
    """The plans of a forward and backward pass, and the bits of their results."""
    seen = []

    def loss(feats, w):
        return ops.sparse_conv(feats, w, relation).square().sum()

    with launch.observe(seen.append):
        y = ops.sparse_conv(x.feats, w, relation)
        dx, dw = mx.grad(loss, (0, 1))(x.feats, w)
        mx.eval(y, dx, dw)
    bits = [np.array(a.astype(mx.float32)).tobytes() for a in (y, dx, dw)]
    return [(each.problem, each.choice) for each in seen], bits


@pytest.mark.parametrize("dtype", cases.DTYPES)
@pytest.mark.parametrize("scene", SCENES)
@pytest.mark.parametrize("between", (explain, trace, backward, edges))
def test_nothing_that_is_asked_in_between_changes_a_plan_or_a_bit(
    between, scene, dtype
):
    coords = pair(KINDS[0], scene, 300)[0].in_coords
    feats = mx.random.normal((len(coords), 64), key=mx.random.key(0))
    x = ml.SparseTensor(coords, feats.astype(getattr(mx, dtype)))
    w = mx.random.normal((27, 64, 64), key=mx.random.key(1)).astype(x.dtype)
    relation = x.manager.submanifold_kernel_relation(x.key, kernel_size=3)
    seen = []
    with launch.observe(seen.append):
        first = ops.sparse_conv(x.feats, w, relation)
    plan = seen[0].choice.plan
    between(relation, x, w)
    plans, bits = run(relation, x, w)
    assert plans[0][1].plan == plan
    assert np.array(first.astype(mx.float32)).tobytes() == bits[0]
    between(relation, x, w)
    again, same = run(relation, x, w)
    assert again == plans and same == bits
