"""verify: wrong routes are found, and right ones pass."""

import mlx.core as mx
import pytest
from planted import plant
from test_inspect import tensor, weight

import mlx_lattice as ml
from mlx_lattice import nn, ops, routes
from mlx_lattice.problem import WEIGHT_GRAD

pytestmark = pytest.mark.usefixtures("unforced")


def run(x, w, groups=1):
    def loss(feats, w):
        y = ops.subm_conv3d(x.replace(feats), w, groups=groups)
        return y.feats.astype(mx.float32).square().sum()

    mx.eval(mx.grad(loss, argnums=(0, 1))(x.feats, w))


ROUTES = ("gather_gemm_scatter", "explicit_gemm", "grouped_gemm")


@pytest.mark.parametrize("dtype", [mx.float32, mx.float16, mx.bfloat16], ids=str)
@pytest.mark.parametrize("route", ROUTES)
def test_right_routes_pass(route, dtype):
    x, w = tensor(dtype=dtype), weight(27, 8, 16, dtype=dtype)
    with routes.only(route), ml.verify():
        run(x, w)


def wrong_row(row):
    def wrong(right):
        y = right()
        return y.at[row].add(mx.full(y.shape[1:], 0.5, dtype=y.dtype))

    return wrong


@pytest.mark.usefixtures("portable_only")
@pytest.mark.parametrize("route", ROUTES)
@pytest.mark.parametrize("groups", [1, 4])
def test_a_planted_error_is_found(route, groups, monkeypatch):
    if groups > 1 and route != "gather_gemm_scatter":
        pytest.skip("the route takes one group")
    x, w = tensor(), weight(27, 8 // groups, 16)
    plant(monkeypatch, (route,), wrong_row(7))
    layer = nn.SubmConv3d(8, 16, 3, groups=groups, bias=False)
    with (
        routes.only(f"forward={route}"),
        pytest.raises(ml.VerificationError, match=f"on route {route} is off") as caught,
        ml.verify(),
    ):
        layer(x)
    found = caught.value
    assert (found.route, found.row) == (route, 7)
    assert found.layer == "SubmConv3d 0" and found.error > 1e-5
    with (
        pytest.raises(ml.VerificationError, match="forward of call"),
        ml.verify(0.0),
        routes.only(f"forward={route}"),
    ):
        run(x, w, groups)
    with routes.only(f"forward={route}"), ml.verify(tolerance=10.0):
        run(x, w, groups)


@pytest.mark.usefixtures("portable_only")
def test_a_planted_gradient_and_a_planted_nan_are_found(monkeypatch):
    x, w = tensor(), weight(27, 8, 16)
    plant(monkeypatch, ("grouped_gemm",), wrong_row(3), WEIGHT_GRAD)
    with (
        pytest.raises(ml.VerificationError, match="weight_grad") as caught,
        routes.only("weight_grad=grouped_gemm"),
        ml.verify(),
    ):
        run(x, w)
    assert caught.value.row == 3

    def nan(right):
        y = right()
        y[11, 0] = mx.nan
        return y

    plant(monkeypatch, ("grouped_gemm",), nan)
    with (
        pytest.raises(ml.VerificationError) as caught,
        routes.only("forward=grouped_gemm"),
        ml.verify(),
    ):
        run(x, w)
    assert caught.value.row == 11


def test_nan_and_infinite_inputs_are_no_error():
    x = tensor()
    feats = mx.array(x.feats)
    feats[0, 0], feats[1, 1] = mx.nan, mx.inf
    with ml.verify():
        mx.eval(ops.subm_conv3d(x.replace(feats), weight(27, 8, 16)).feats)


@pytest.mark.usefixtures("portable_only")
def test_arithmetic_over_the_edges_has_the_epilogue():
    conv, norm = nn.SubmConv3d(8, 8, 3, groups=2, bias=False), nn.BatchNorm(8)
    norm.running_mean, norm.weight = mx.arange(8) / 10, 1 + mx.arange(8) / 3
    net, x = nn.Sequential(conv, norm, nn.ReLU()), tensor()
    net.eval()
    with ml.trace() as trace, ml.verify():
        mx.eval(net(x).feats)
    assert trace.records[0].problem.epilogue.parts == ("BatchNorm", "ReLU")


def test_verify_names_paths_and_refuses_compiled_functions():
    class Net(nn.Module):
        def __init__(self):
            super().__init__()
            self.stem = nn.SubmConv3d(8, 16, 3)

        def __call__(self, x):
            return self.stem(x)

    x, net = tensor(), Net()
    with (
        pytest.raises(ml.VerificationError, match="forward of stem"),
        ml.verify(tolerance=-1.0, model=net),
    ):
        net(x)
    with pytest.raises(RuntimeError, match="mx.compile"), ml.verify():
        mx.compile(lambda f: net(x.replace(f)).feats)(x.feats)
