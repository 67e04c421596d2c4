"""The route that a Choice names is the kernel that was launched on Metal."""

import os
import subprocess
import sys
from pathlib import Path

import mlx.core as mx
import numpy as np
import pytest
import reference as ref
from cases import features, in_grid
from metal_checks import host

import mlx_lattice as ml
from mlx_lattice import devices, routes
from mlx_lattice.backends import metal, metal_host
from mlx_lattice.routes import measure, selection, thresholds

host.require()

# The options under which each route may run: dtype, channels, groups.
ROUTES = {
    "relation_traversal": (mx.bfloat16, 8, 1),
    "vec4": (mx.float32, 8, 1),
    "fp16_gather": (mx.float16, 8, 1),
    "fp32_atomic": (mx.float32, 8, 1),
    "depthwise": (mx.float32, 8, 8),
    "sorted_implicit_gemm": (mx.float16, 8, 1),
    "dense_channel": (mx.float16, 16, 1),
    "cout16": (mx.float16, 16, 1),
}


@pytest.fixture(autouse=True)
def uninstalled():
    """Other tests look at MLX's own metal_kernel."""
    yield
    host.uninstall()
    metal_host.install.cache_clear()


def problem(dtype, channels, groups):
    coords = in_grid((6, 6, 6), 120, 0)
    x = features(len(coords), channels, 0).astype(np.float32)
    w = features(27 * channels // groups, channels, 1).reshape(27, -1, channels)
    t = ml.SparseTensor(mx.array(coords), mx.array(x).astype(dtype))
    relation = t.manager.submanifold_kernel_relation(t.key)
    return t.feats, mx.array(w.astype(np.float32)).astype(dtype), relation


# What a route's kernel is called where not after the route: the gradients of weights.
MATRIX_GRAD = "grouped_weight_grad"
SYMBOLS = {
    ("depthwise", "input_grad"): "depthwise_transposed",
    ("relation_traversal", "weight_grad"): "weight_grad_parts",
    ("depthwise", "weight_grad"): "depthwise_grad_parts",
    ("sorted_implicit_gemm", "weight_grad"): MATRIX_GRAD,
    ("dense_channel", "weight_grad"): MATRIX_GRAD,
    ("cout16", "weight_grad"): MATRIX_GRAD,
}


def of_pass(pass_, x, w, relation, groups) -> mx.array:
    """One pass of a convolution and nothing else."""

    def call(x, w):
        return ml.conv(x, w, relation, groups=groups)

    if pass_ == "forward":
        return call(x, w)
    dy = mx.ones((relation.n_out, w.shape[2]), dtype=x.dtype)
    dx, dw = mx.vjp(call, [x, w], [dy])[1]
    return dx if pass_ == "input_grad" else dw


@pytest.mark.parametrize(
    "route, pass_", [(r, p) for r in ROUTES for p in routes.named(r).passes]
)
def test_the_kernel_launched_is_the_route_reported(route, pass_):
    dtype, channels, groups = ROUTES[route]
    with ml.metal("host"), ml.waive_determinism(), routes.only(f"{pass_}={route}"):
        x, w, relation = problem(dtype, channels, groups)
        for view in (relation, relation.T):
            mx.eval(view.out_in, view.sorted, view.output_csr, view.kernel_csr)
        with host.recording(checked=True) as record, ml.trace() as t:
            y = of_pass(pass_, x, w, relation, groups)
            mx.eval(y)
    (traced,) = (r for r in t.records if r.problem.pass_ == pass_)
    assert traced.choice.route.name == route
    assert dict(traced.choice.parameters)["code"] == "Metal"
    assert record.report.faults == ()
    kernels = [launch.kernel for launch in record.report.launches]
    symbol = SYMBOLS.get((route, pass_), route)
    assert any(f"lattice_{symbol}" in kernel for kernel in kernels), kernels
    # No other route's kernel ran beside it.
    others = {*ROUTES, *SYMBOLS.values()} - {symbol}
    wrong = [k for k in kernels for o in others if k.startswith(f"custom_kernel_{o}")]
    assert wrong == []
    if pass_ != "forward":
        return
    with ml.routes.only("gather_gemm_scatter"):
        exact = ml.conv(
            x.astype(mx.float32), w.astype(mx.float32), relation, groups=groups
        )
    tolerance = {mx.float32: "float32", mx.float16: "float16"}.get(dtype, "bfloat16")
    assert ref.TOLERANCE[tolerance] >= relative(y, exact)


BY_ENVIRONMENT = """
import mlx.core as mx
import mlx_lattice as ml
from mlx_lattice import nn
from mlx_lattice.backends import metal_host
print(ml.backend_info().device.backend)
metal_host.install()
from metal import host
x = ml.SparseTensor(mx.array([[0, 0, 0, 0], [0, 0, 0, 1]]), mx.ones((2, 3)))
with host.recording(checked=False) as record:
    mx.eval(nn.Conv3d(3, 4, 3)(x).feats)
print(*(launch.kernel for launch in record.report.launches))
"""


@pytest.mark.parametrize("value, backend", (("host", "metal"), ("", "cpu")))
def test_the_environment_makes_it_the_backend(value, backend):
    run = subprocess.run(
        [sys.executable, "-c", BY_ENVIRONMENT],
        env=os.environ | {"MLX_LATTICE_METAL": value},
        cwd=Path(__file__).resolve().parents[2],
        capture_output=True,
        text=True,
    )
    found, kernels = (run.stdout.splitlines() + ["", run.stderr])[:2]
    assert found == backend, run.stderr
    assert ("insert_candidates" in kernels) == (value == "host"), run.stderr
    assert ("lattice_vec4" in kernels) == (value == "host")


def relative(y, exact) -> float:
    y, exact = (np.array(a.astype(mx.float32), np.float64) for a in (y, exact))
    return float(np.abs(y - exact).max() / np.linalg.norm(exact))


@pytest.mark.parametrize("route", ("sorted_implicit_gemm", "dense_channel", "cout16"))
def test_matrix_routes_add_the_bias_themselves(route):
    assert route in metal.FUSED_BIAS
    with ml.metal("host"), routes.only(f"forward={route}"):
        x, w, relation = problem(mx.float16, 16, 1)
        bias = mx.arange(16).astype(mx.float16)
        plain = ml.conv(x, w, relation)
        mx.eval(plain)
        with host.recording(checked=True) as record:
            y = ml.conv(x, w, relation, bias=bias)
            mx.eval(y)
    launches = {launch.kernel for launch in record.report.launches}
    assert any(route in kernel for kernel in launches)
    assert ref.TOLERANCE["float16"] >= relative(y, (plain + bias))


@pytest.mark.parametrize(
    "architecture, darwin, accelerated",
    [
        ("applegpu_g17s", "25.2.0", True),
        ("applegpu_g17g", "27.0.1", True),
        ("applegpu_g18p", "25.2.0", True),
        # A phone's part of that generation, and older systems.
        ("applegpu_g17p", "25.2.0", False),
        ("applegpu_g17s", "25.1.9", False),
        ("applegpu_g17s", "24.6.0", False),
        # Of another form: nothing is known, so nothing is there.
        ("applegpu_g17s_b0", "25.2.0", False),
        ("applegpu_g170s", "25.2.0", False),
        ("applegpu_g17", "25.2.0", False),
        ("applegpu_g17S", "25.2.0", False),
        ("applegpu_g17x", "25.2.0", False),
        ("applegpu_18gs", "25.2.0", False),
        ("AGXG17S", "25.2.0", False),
        ("applegpu_g\u0661\u0667s", "25.2.0", False),
        ("applegpu_g17s", "25", False),
        ("applegpu_g17s", "25.2 beta", False),
        ("applegpu_g17s", "x.25.2", False),
    ],
)
def test_the_capability_tier_fails_closed(architecture, darwin, accelerated):
    info = {"architecture": architecture, "device_name": "Apple M5 Max"}
    device = devices.from_metal_info(info, darwin)
    assert device.neural_accelerators == accelerated
    problem = ml.Problem.forward(
        kind="submanifold",
        kernel_size=3,
        c_in=64,
        c_out=64,
        n_in=100_000,
        n_out=100_000,
        dtype="float16",
    )
    chosen = routes.select(problem, device=device)
    assert (chosen.route.name == "tensor_ops") == accelerated
    if not accelerated:
        with pytest.raises(ml.RouteError, match="neural accelerators"):
            routes.select(problem, device=device, only="tensor_ops")


def test_atomics_need_a_waiver():
    with ml.metal("host"), routes.only("forward=fp32_atomic"):
        x, w, relation = problem(mx.float32, 8, 1)
        with pytest.raises(ml.RouteError, match="determinism is not waived"):
            ml.conv(x, w, relation)


@pytest.mark.parametrize("device", ("m4-max", "h200"))
def test_a_route_may_be_compiled_for_one_pass_only(device):
    facts = {"c_in": 64, "c_out": 64, "n_in": 5000}
    forced = {"device": device, "only": "grouped_gemm"}
    choice = ml.explain(ml.Problem.weight_grad(**facts), **forced).choice
    assert dict(choice.parameters)["code"] in ("Metal", "CUDA")
    if device == "h200":
        with pytest.raises(ml.RouteError, match="kernels are not written yet"):
            ml.explain(ml.Problem.forward(**facts), **forced)
        return
    choice = ml.explain(ml.Problem.forward(**facts), **forced).choice
    assert dict(choice.parameters)["code"] == "MLX operations"


def test_grouped_gemm_runs_its_kernel_where_it_has_one():
    with ml.metal("host"), routes.only("grouped_gemm"):
        x, w, relation = problem(mx.float16, 8, 1)
        mx.eval(relation.out_in, relation.kernel_csr)

        def loss(w):
            return ml.conv(x, w, relation).astype(mx.float32).sum()

        with host.recording(checked=True) as record, ml.trace() as t:
            mx.eval(mx.grad(loss)(w))
    assert {r.choice.route.name for r in t.records} == {"grouped_gemm"}
    for r in t.records:
        code = "Metal" if r.problem.pass_ == "weight_grad" else "MLX operations"
        assert dict(r.choice.parameters)["code"] == code
    assert "weight_grad" in {r.problem.pass_ for r in t.records}
    kernels = [launch.kernel for launch in record.report.launches]
    assert any("grouped_weight_grad" in kernel for kernel in kernels), kernels


def test_tuning_times_the_metal_routes_and_guards_them(monkeypatch, tmp_path):
    monkeypatch.setenv("MLX_LATTICE_CACHE", str(tmp_path))
    monkeypatch.setattr(measure, "_unwritten", {})

    def fast_and_wrong(x, w, relation, groups, transposed):
        return mx.zeros((relation.n_out, w.shape[2]))

    monkeypatch.setitem(metal.CONV, "vec4", fast_and_wrong)
    with ml.metal("host"), ml.tune(), ml.trace() as t:
        x, w, relation = problem(mx.float32, 8, 1)
        with pytest.warns(UserWarning, match="vec4 is off"):
            y = ml.conv(x, w, relation)
        mx.eval(y)
    choice = t.records[-1].choice
    times = dict(choice.measured)
    assert times["sorted_implicit_gemm"] > 0 and times["relation_traversal"] > 0
    assert times["vec4"] is None and choice.route.name != "vec4"
    assert choice.route.name == choice.measured[0][0]
    with ml.routes.only("gather_gemm_scatter"):
        assert ref.TOLERANCE["float32"] >= relative(y, ml.conv(x, w, relation))


TILED = [
    (route, pass_)
    for route in ("sorted_implicit_gemm", "quantized_sorted", "cout16")
    for pass_ in routes.named(route).passes
    if (route, pass_) != ("cout16", "forward")
]


@pytest.fixture(params=(1, 24), ids=("whole", "split"))
def filling(request, monkeypatch):
    """Threadgroups that fill the GPU; choices made before know another number."""
    monkeypatch.setitem(thresholds.FILLING, "*", request.param)
    selection._select.cache_clear()
    yield
    selection._select.cache_clear()


@pytest.mark.parametrize("channels", ((24, 16), (70, 16), (300, 16)), ids=str)
@pytest.mark.parametrize("route, pass_", TILED)
def test_the_tile_reported_is_the_tile_launched(route, pass_, channels, filling):
    with ml.metal("host"), routes.only(f"{pass_}={route}"):
        x, _, relation = problem(mx.float16, channels[0], 1)
        w = mx.ones((relation.volume, *channels), dtype=mx.float16)
        if route == "quantized_sorted":
            w = ml.quantize_weight(w, bits=8, group_size=32)
        with host.recording(checked=False) as record, ml.trace() as t:
            mx.eval(of_pass(pass_, x, w, relation, 1))
    (choice,) = (r.choice for r in t.records if r.problem.pass_ == pass_)
    said = dict(choice.parameters)
    high, wide = said["tile"].split(" x ")
    sizes = f"_{high}_{wide}_" if pass_ == "weight_grad" else f"_{wide}_"
    kernels = [launch.kernel for launch in record.report.launches]
    symbol = f"lattice_{said.get('kernel', route)}_"
    assert said.get("variant", route) == SYMBOLS.get((route, pass_), route)
    ran = [kernel for kernel in kernels if symbol in kernel]
    assert ran and all(sizes in kernel for kernel in ran), (said, ran)
    in_parts = any("lattice_add_splits" in kernel for kernel in kernels)
    assert in_parts == bool({"split-K", "channel slices"} & set(said))
