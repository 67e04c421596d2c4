"""Grouped problems that run as dense ones, with a block-diagonal weight."""

import cases
import mlx.core as mx
import numpy as np
import pytest
import reference as ref
from conftest import KINDS, Numbers, mappable, pair
from cuda_recorder import recording

import mlx_lattice as ml
from mlx_lattice import availability, nn
from mlx_lattice.plan import block_diagonal, diagonal_blocks
from mlx_lattice.problem import KERNEL_MAJOR, MLX_LAYOUT, PASSES, WEIGHT_GRAD, Problem
from mlx_lattice.routes.selection import select

SHAPES = ((6, 10, 2), (64, 64, 4), (12, 6, 3), (8, 16, 8), (9, 6, 3))
EXPANDING = ("h200", 64, 4), ("h200", 128, 64), ("m3-max", 64, 4), ("m5-max", 64, 8)


def problem(pass_, groups, channels=64, **facts):
    given = dict(c_in=channels, c_out=channels, n_in=120_000, dtype="float16")
    return getattr(Problem, pass_)(**{**given, **facts}, groups=groups)


@pytest.mark.parametrize("shape", SHAPES, ids=str)
@pytest.mark.parametrize("layout", (KERNEL_MAJOR, MLX_LAYOUT))
def test_weights_become_block_diagonal_and_back(shape, layout):
    c_in, c_out, groups = shape
    width, each = c_in // groups, c_out // groups
    w = np.random.default_rng(0).normal(size=(3, width, c_out)).astype(np.float32)
    w[0, 0, 0] = np.inf
    dense = np.zeros((3, c_in, c_out), np.float32)
    for g in range(groups):
        columns = slice(g * each, (g + 1) * each)
        dense[:, g * width : (g + 1) * width, columns] = w[:, :, columns]
    if layout == MLX_LAYOUT:
        w, dense = w.transpose(2, 0, 1), dense.transpose(2, 0, 1)
    w, dense = np.ascontiguousarray(w), np.ascontiguousarray(dense)
    assert np.array_equal(block_diagonal(mx.array(w), groups, layout), dense)
    other = np.where(dense == 0, 5, dense)
    for array in (mx.array(other), mx.array(np.pad(other, 1))[1:-1, 1:-1, 1:-1]):
        assert np.array_equal(diagonal_blocks(array, groups, layout), w)


@pytest.mark.parametrize("pass_", PASSES)
@pytest.mark.parametrize("device, channels, groups", EXPANDING)
def test_the_choice_is_that_of_the_dense_problem(device, channels, groups, pass_):
    if pass_ == WEIGHT_GRAD and device == "m3-max":
        groups = 2
    facts = {"channels": channels, "edges": 2_000_000}
    given, dense = problem(pass_, groups, **facts), problem(pass_, 1, **facts)
    made, wanted = select(given, device=device), select(dense, device=device)
    assert made.route == wanted.route and made.plan.expanded == groups
    assert made.plan.problem == dense and made.plan.gpu == wanted.plan.gpu
    bytes_ = 27 * channels**2 * 2
    assert made.plan.scratch == wanted.plan.scratch + bytes_
    assert f"groups {groups} in one block-diagonal weight" in str(made)
    cost, of_dense = (
        ml.explain(p, device=device, pass_=pass_).cost for p in (given, dense)
    )
    assert cost.useful_flops * groups == of_dense.useful_flops
    if cost.done_over_useful is not None:
        times = of_dense.done_over_useful * groups
        assert cost.done_over_useful == pytest.approx(times)
    weights = 2 * bytes_ + bytes_ // groups - bytes_
    assert cost.bytes_moved == of_dense.bytes_moved + weights


@pytest.mark.parametrize("pass_", PASSES)
@pytest.mark.parametrize("device", ("h200", "m3-max", "cpu"))
def test_depthwise_has_routes_of_its_own(device, pass_):
    plan = select(problem(pass_, 64, edges=2_000_000), device=device).plan
    assert plan.expanded == 1 and plan.problem.groups == 64


@pytest.mark.parametrize("device", ("m1", "m4", "m5-max"))
def test_many_groups_are_walked_on_metal(device):
    made = select(problem("forward", 32, edges=2_000_000), device=device)
    assert made.route.name == "relation_traversal" and made.plan.expanded == 1


def test_a_route_that_knows_groups_can_be_forced():
    made = select(problem("forward", 4), device="h200", only="relation_traversal")
    assert made.plan.expanded == 1 and made.plan.problem.groups == 4


@pytest.mark.parametrize("name", ("blocked_gather_gemm", "relation_traversal"))
@pytest.mark.parametrize("dtype", cases.DTYPES)
@pytest.mark.parametrize("shape", SHAPES, ids=str)
@pytest.mark.skipif(not availability.has_extension(), reason="routes of the extension")
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


@pytest.mark.skipif(
    not availability.has_extension(), reason="its relations are the CPU's"
)
def test_on_cuda_a_step_has_the_kernels_of_the_dense_layer():
    def kernels(groups):
        coords = mx.array(cases.geometry("surface", 3, 3000))
        with recording() as launches:
            x = ml.SparseTensor(coords, mx.zeros((len(coords), 64), mx.float16))
            layer = nn.SubmConv3d(64, 64, 3, groups=groups, bias=False)
            layer.set_dtype(mx.float16)
            mx.eval(layer(x).feats)
            launches.clear()

            def loss(feats, w):
                layer.weight = w
                return layer(x.replace(feats)).feats.sum()

            mx.eval(mx.grad(loss, argnums=(0, 1))(x.feats, layer.weight))
            return {launch.name for launch in launches}

    assert kernels(4) == kernels(1) != set()
