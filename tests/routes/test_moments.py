"""Statistics of the rows that a convolution writes, summed in its kernel for the norm
that follows: against float64, and a net's training with them and without.
"""

import cases
import mlx.core as mx
import mlx.nn
import numpy as np
import pytest
import reference as ref
from conftest import bits, mappable
from contractions import Point, exact, work
from mlx.utils import tree_flatten
from norm_checks import joined, lines_of, moments
from places import HERE, Cuda, agreed

import mlx_lattice as ml
from mlx_lattice import nn
from mlx_lattice.backends import cpu
from mlx_lattice.backends.gpu import norms as gpu_norms
from mlx_lattice.epilogue import Moments
from mlx_lattice.nn import fused
from mlx_lattice.problem import FORWARD
from mlx_lattice.registry import NORMS
from mlx_lattice.routes import launch

# The routes that sum them.
ROUTES = {
    "cpu": ("blocked_gather_gemm",),
    "metal": ("sorted_implicit_gemm", "tensor_ops"),
    "cuda": ("sorted_implicit_gemm",),
}
SHAPES = ((3, 5), (16, 16), (33, 40), (64, 64), (40, 96), (8, 136), (130, 32))
SCENES = (
    "surface",
    "even",
    "63_rows",
    "64_rows",
    "129_rows",
    "forward",
    "reach",
    "target",
    "transposed",
    "generative",
    "one",
    "some",
    "unrelated",
    "no_inputs",
    "no_outputs",
    "empty",
)
PLACES = tuple(place for place in HERE if place.name in ROUTES)


@pytest.fixture(autouse=True)
def few_rows_too(monkeypatch):
    """Few rows count as many; those that were planned otherwise are forgotten."""
    monkeypatch.setattr(gpu_norms, "ONE_LAUNCH_NORM", 0)
    monkeypatch.setattr(cpu, "ONE_TILE", 0)


def points() -> list:
    """(place, chip, route, point): each scene and shape in every place."""
    found = []
    for place in PLACES:
        for route in ROUTES[place.name]:
            dtypes = cases.DTYPES[1:] if route == "tensor_ops" else cases.DTYPES
            for at, scene in enumerate(SCENES):
                shape = SHAPES[at % len(SHAPES)]
                given = {"dtype": dtypes[at % len(dtypes)], "bias": bool(at % 2)}
                point = Point(scene, (*shape, 1), **given)
                for chip in place.chips[:2]:
                    name = f"{place.name}-{chip or 'usual'}-{route}-{point}"
                    found.append(pytest.param(place, chip, route, point, id=name))
    return found


@pytest.mark.parametrize("place, chip, route, point", points())
def test_they_are_those_of_the_rows(place, chip, route, point):
    given = work(point, FORWARD)
    planned = []

    def run():
        asked = Moments()
        facts = {"groups": given.groups, "bias": given.bias}
        with ml.routes.only(f"forward={route}"):
            with launch.observe(planned.append):
                y = ml.conv(given.x, given.w, given.relation, epilogue=asked, **facts)
            alone = ml.conv(given.x, given.w, given.relation, **facts)
        return y, alone, *([] if asked.lines is None else [asked.lines])

    for results in place.run(run, chip=chip).values():
        (y, alone, *lines), *others = results
        assert bits(y) == bits(alone)
        ref.assert_close(y, given.wanted, point.dtype)
        plan = planned[-1].choice.plan
        assert plan.moments == (len(lines[0]) if lines else 0)
        # Of padding, of older GPUs' tiles and of Metal's splits the norm sums them.
        own = plan.splits == 1 or isinstance(place, Cuda)
        if isinstance(place, Cuda):
            is_whole = point.shape[1] % plan.multiple == 0
            own = is_whole and (plan.splits > 1 or plan.variant != "mma")
        # Nor are there any where there is nothing to sum.
        assert bool(lines) == (own and given.relation.n_edges > 0)
        if lines:
            for found, wanted in zip(joined(lines[0]), moments(y), strict=True):
                most = 1e-5 * (1 + np.abs(exact(y)).max())
                np.testing.assert_allclose(found, wanted, 1e-4, most)
            assert all(bits(other[2]) == bits(lines[0]) for other in others)


@pytest.mark.parametrize("place", PLACES, ids=lambda place: place.name)
def test_a_large_mean_cancels_nothing(place):
    given = work(Point("some", (16, 32, 1), "float32"), FORWARD)
    bias = mx.full((32,), 4096.0)

    def run():
        asked = Moments()
        with ml.routes.only(f"forward={ROUTES[place.name][0]}"):
            y = ml.conv(given.x, given.w, given.relation, bias=bias, epilogue=asked)
        return y, asked.lines

    for results in place.run(run, chip=place.chips[:2][-1]).values():
        y, lines = results[0]
        if lines is None:  # few rows of float32 are not Hopper's tiles
            assert isinstance(place, Cuda)
            continue
        np.testing.assert_allclose(joined(lines)[2], moments(y)[2], rtol=1e-3)


@pytest.mark.parametrize("place", PLACES, ids=lambda place: place.name)
def test_a_nan_stays(place):
    given = work(Point("some", (16, 32, 1), "float16"), FORWARD)
    w = mx.where(mx.arange(32) == 5, mx.nan, given.w).astype(mx.float16)

    def run():
        asked = Moments()
        with ml.routes.only(f"forward={ROUTES[place.name][0]}"):
            y = ml.conv(given.x, w, given.relation, epilogue=asked)
        return y, asked.lines

    for results in place.run(run, chip=place.chips[:2][-1]).values():
        for found in joined(results[0][1])[1:]:
            assert np.isnan(found[5]) and np.isfinite(np.delete(found, 5)).all()


@pytest.mark.parametrize("place", PLACES, ids=lambda place: place.name)
@pytest.mark.parametrize("channels", (3, 40))
def test_norms_join_them(place, channels):
    """Lines of no rows count for nothing."""
    values = 9 + cases.features(700, channels)
    lines = lines_of(values, (0, 1, 1, 300, 680, 700))
    x = mx.array(values.astype(np.float32))
    old = mx.zeros((channels,)), mx.ones((channels,))

    def run():
        kernels = NORMS[place.name]
        return kernels.moments(x, lines=lines), kernels.moments(
            x, None, old, 0.1, lines
        )

    (mean, var, *_), (_, _, *moved) = agreed(place, run)
    np.testing.assert_allclose(mean[0], values.mean(axis=0), 1e-5)
    np.testing.assert_allclose(var[0], values.var(axis=0), 1e-4)
    wanted = 0.1 * values.mean(axis=0), 0.9 + 0.1 * values.var(axis=0, ddof=1)
    for found, right in zip(moved, wanted, strict=True):
        np.testing.assert_allclose(found.flatten(), right, 1e-4)


def scan(rows=900, channels=8, dtype=mx.float32):
    coords = cases.geometry("surface", 3, rows, 0)
    feats = mx.array(cases.features(len(coords), channels).astype(np.float32))
    return ml.SparseTensor(mx.array(coords), feats.astype(dtype))


class Net(nn.Module):
    """Convolutions that norms follow: alone, with an activation, with a residual."""

    def __init__(self):
        super().__init__()
        self.first = nn.Sequential(nn.SubmConv3d(8, 16, 3), nn.BatchNorm(16), nn.ReLU())
        self.down = nn.Sequential(
            nn.Conv3d(16, 24, 2, stride=2, bias=False), nn.BatchNorm(24)
        )
        self.up = nn.ConvTranspose3d(24, 16, 2, stride=2, bias=False)
        self.norm = nn.BatchNorm(16, affine=False, track_running_stats=False)

    def __call__(self, x):
        fine = self.first(x)
        coarse = self.down(fine)
        return fused.convolved(
            self.up, self.norm, coarse, fine, activation=mlx.nn.gelu, residual=fine
        )


def trained(dtype, x=None) -> dict[str, mx.array]:
    """What a step gives: a loss, gradients, and the running statistics."""
    mx.random.seed(0)
    net, x = Net(), scan(dtype=dtype) if x is None else x
    net.set_dtype(dtype)

    def loss(net, feats):
        y = net(x.replace(feats)).feats.astype(mx.float32)
        return (y * mx.arange(16)).square().mean()

    value, (grads, dx) = mx.value_and_grad(
        lambda p, f: (net.update(p), loss(net, f))[1], (0, 1)
    )(net.trainable_parameters(), x.feats)
    state = {k: v for k, v in tree_flatten(net.parameters()) if "running" in k}
    return dict(tree_flatten(grads)) | {"x": dx, "loss": value} | state


@pytest.mark.parametrize("place", PLACES, ids=lambda place: place.name)
@pytest.mark.parametrize("dtype", cases.DTYPES)
def test_a_net_trains_as_without(place, dtype):
    kind = getattr(mx, dtype)

    def run():
        with fused.unfused():
            alone = trained(kind)
        return trained(kind), alone

    for results in place.run(run, chip=place.chips[:2][-1]).values():
        for made, alone in results[:1]:
            for name, wanted in alone.items():
                if name != "first.layers.0.bias":  # which a norm takes away: noise
                    found = exact(made[name])
                    ref.assert_close(found, exact(wanted), dtype, name)


def test_other_transformations_are_those_without():
    x = scan(200, 2)  # whose product MLX maps everywhere
    conv, norm = nn.SubmConv3d(2, 4, 3), nn.BatchNorm(4, track_running_stats=False)

    def layer(feats, w):
        conv.weight = w
        return fused.convolved(
            conv, norm, x.replace(feats), activation=mlx.nn.silu
        ).feats

    def alone(feats, w):
        with fused.unfused():
            return layer(feats, w)

    def second(function):
        def slope(feats, w):
            total = mx.grad(lambda f, w: function(f, w).square().sum(), (0, 1))(
                feats, w
            )
            return sum(a.square().sum() for a in total)

        return mx.grad(slope, (0, 1))(feats, w)

    feats, w = x.feats, conv.weight
    mx.eval(feats, w)
    tangents = [mx.ones_like(feats), mx.ones_like(w)]
    for found, wanted in zip(second(layer), second(alone), strict=True):
        ref.assert_close(exact(found), exact(wanted), "float32")
    found, wanted = (mx.jvp(f, [feats, w], tangents)[1][0] for f in (layer, alone))
    ref.assert_close(exact(found), exact(wanted), "float32")
    several = mx.stack([feats, 2 * feats])
    with mappable():
        mapped = mx.vmap(layer, in_axes=(0, None))(several, w)
        for at, each in enumerate(several):
            ref.assert_close(exact(mapped[at]), exact(alone(each, w)), "float32")
    compiled = mx.compile(layer)(feats, w)
    ref.assert_close(exact(compiled), exact(alone(feats, w)), "float32")
