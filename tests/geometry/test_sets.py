"""Set operations on coordinates: gradients through masks, strides of bare rows."""

from fractions import Fraction

import mlx.core as mx
import pytest

import mlx_lattice as ml
from mlx_lattice import ops

ROWS = [[0, 1, 2, 3], [1, 0, 0, 0], [0, -1, 5, 5]]


def tensor(rows=ROWS, channels=1):
    n = len(rows)
    feats = mx.arange(1, n * channels + 1).reshape(n, channels).astype(mx.float32)
    return ml.SparseTensor(mx.array(rows), feats)


def test_a_mask_may_come_from_the_features():
    x = tensor()

    def kept(feats):
        y = x.replace(feats)
        return ops.prune(y, feats[:, 0] > 1.5).feats.sum()

    assert mx.grad(kept)(x.feats).tolist() == [[0.0], [1.0], [1.0]]

    def best(feats):
        return (ops.top_k(x.replace(feats), feats[:, 0], 1).feats * 2).sum()

    assert mx.grad(best)(x.feats).tolist() == [[0.0], [2.0], [2.0]]


@pytest.mark.parametrize("factor", [2, 3, 7])
def test_bare_target_rows_get_an_exact_stride(factor):
    x = tensor()
    w = mx.ones((factor**3, 1, 1))
    fine = mx.array([[0, factor, 2 * factor, 3 * factor]])
    y = ops.conv_transpose3d(x, w, kernel_size=factor, stride=factor, coordinates=fine)
    assert y.stride == (Fraction(1, factor),) * 3
    assert y.feats.tolist() == [[1.0]]


def test_set_operations_by_value():
    x = tensor()
    y = tensor([ROWS[2], ROWS[0], ROWS[1]])
    assert (x + y).feats.tolist() == [[3.0], [5.0], [4.0]]
    assert ops.cat([x, y]).feats.tolist() == [[1.0, 2.0], [2.0, 3.0], [3.0, 1.0]]
    part = ops.crop(x, 0, 4)
    assert part.coords.tolist() == ROWS[:2]
    assert ops.difference(x, part).coords.tolist() == ROWS[2:]
    assert ops.intersection(part, y).feats.tolist() == [[2.0], [6.0]]
    joined = ops.union(part, y)
    assert joined.coords.tolist() == sorted(ROWS)
    assert joined.feats.tolist() == [[1.0], [3.0], [5.0]]
    assert ops.lookup(x, mx.array([ROWS[1], [0, 0, 0, 0]])).tolist() == [1, -1]
    with pytest.raises(ValueError, match=r"2 and 3 rows; \(0, -1, 5, 5\) is in one"):
        x + part


def test_batch_and_unbatch_keep_empty_elements():
    x = tensor()
    both = ops.batch([x, tensor([[0, 4, 4, 4]])])
    assert both.batch_size == 3 and both.coords[-1].tolist() == [2, 4, 4, 4]
    apart = ops.unbatch(ops.prune(both, both.coords[:, 0] != 1))
    assert [len(t) for t in apart] == [2, 0, 1]
