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


CALLS = {  # of a tensor of stride 2, onto rows of another
    "conv": (
        4,
        lambda x, to: ops.conv3d(x, W, kernel_size=2, stride=2, coordinates=to),
    ),
    "same": (2, lambda x, to: ops.conv3d(x, W, kernel_size=2, coordinates=to)),
    "pool": (4, lambda x, to: ops.max_pool3d(x, 2, coordinates=to)),
    "transposed": (1, lambda x, to: ops.conv_transpose3d(x, W, coordinates=to)),
    "generative": (
        1,
        lambda x, to: ops.generative_conv_transpose3d(x, W, coordinates=to),
    ),
    "spread": (1, lambda x, to: ops.sum_pool_transpose3d(x, 2, coordinates=to)),
    "nearest": (1, lambda x, to: ops.upsample_nearest3d(x, 2, to)),
    "linear": (1, lambda x, to: ops.upsample_linear3d(x, 2, to)),
    "channels": (
        1,
        lambda x, to: ops.channel_to_space(
            x.replace(mx.tile(x.feats, (1, 8))), coordinates=to
        ),
    ),
}
W = mx.ones((8, 1, 1))


@pytest.mark.parametrize("name", CALLS)
def test_rows_of_another_stride_count_other_cells(name):
    """Their numbers were taken for cells of the stride that the step makes."""
    right, call = CALLS[name]
    first = tensor()
    levels = {1: first}
    for stride in (2, 4, 8):
        levels[stride] = ops.max_pool3d(levels[stride // 2], 2)
    x = levels[2]
    for stride, level in levels.items():
        for to in (level, level.key):
            if stride == right:
                assert call(x, to).key == level.key
                continue
            with pytest.raises(
                ValueError, match=rf"have stride {right} .*got stride {stride}\."
            ):
                call(x, to)
    # Of bare rows, and of another manager's, it is known that they are meant.
    for to in (levels[8].coords, ml.SparseTensor(levels[8].coords, levels[8].feats)):
        assert len(call(x, to)) == len(levels[8])
    none = ops.prune(first, first.feats[:, 0] < 0)
    assert len(call(none, none)) == 0
