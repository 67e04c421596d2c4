"""Grouped problems that run as dense ones, with a block-diagonal weight."""

import cases
import mlx.core as mx
import pytest
import reference as ref
from conftest import KINDS, Numbers, mappable, pair

import mlx_lattice as ml
from mlx_lattice import devices, nn
from mlx_lattice.problem import MLX_LAYOUT, block_diagonal

SHAPES = ((6, 10, 2), (64, 64, 4), (12, 6, 3), (8, 16, 8), (9, 6, 3))


@pytest.mark.parametrize("name", ("blocked_gather_gemm", "relation_traversal"))
@pytest.mark.parametrize("dtype", cases.DTYPES)
@pytest.mark.parametrize("shape", SHAPES, ids=str)
@pytest.mark.skipif(not devices.has_extension(), reason="routes of the extension")
def test_results_are_those_of_the_oracle(shape, dtype, name):
    """Whatever the threshold: by both layouts, with the gradients of both."""
    c_in, c_out, groups = shape
    relation, expected = pair(KINDS[0], "surface", 60)
    numbers = Numbers(relation, c_in, c_out, groups, dtype)
    x, w, dy = numbers.exact
    wanted = (
        ref.conv(x, w, expected, groups=groups),
        ref.input_grad(dy, w, expected, groups=groups),
        ref.weight_grad(x, dy, expected, groups=groups),
    )

    def run(x, w):
        if w.shape[0] == c_out:
            w = w.reshape(c_out, *(3, 3, 3), -1)
        return ml.conv(x, w, relation, groups=groups)

    at = numbers.w, numbers.w.transpose(2, 0, 1)
    with ml.routes.only(name), mx.stream(mx.cpu):
        for is_mlx, weight in enumerate(at):
            (y,), (dx, dw) = mx.vjp(run, [numbers.x, weight], [numbers.dy])
            dw = dw.transpose(1, 2, 0) if is_mlx else dw
            for got, right in zip((y, dx, dw), wanted, strict=True):
                ref.assert_close(got, right, dtype)


def test_layers_under_transformations():
    coords = mx.array(cases.geometry("surface", 3, 80))
    x = ml.SparseTensor(coords, mx.random.normal((len(coords), 16)))
    layer = nn.SubmConv3d(16, 16, 3, groups=8, bias=False)
    w, feats = layer.weight, x.feats
    dense = block_diagonal(w.reshape(16, 27, 2), 8, MLX_LAYOUT).reshape(16, 3, 3, 3, 16)

    def run(feats, weight, groups=8):
        return ml.ops.subm_conv3d(x.replace(feats), weight, groups=groups).feats

    wanted = run(feats, dense, 1)
    ref.assert_close(run(feats, w), wanted)
    ref.assert_close(mx.compile(run)(feats, w), wanted)
    both = mx.stack([feats, 2 * feats])
    with mappable():
        ref.assert_close(mx.vmap(run, (0, None))(both, w)[1], 2 * wanted)
    ref.assert_close(mx.jvp(lambda w: run(feats, w), [w], [w])[1][0], wanted)
    w_grad = mx.grad(lambda w: (run(feats, w) ** 2).sum())
    again = mx.grad(lambda w: (w_grad(w) * w).sum())
    ref.assert_close(again(w), 2 * w_grad(w))
