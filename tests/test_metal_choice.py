"""The route that a Choice names is the kernel that was launched on Metal."""

import mlx.core as mx
import numpy as np
import pytest
import reference as ref
from cases import features, in_grid
from metal_checks import host

import mlx_lattice as ml
from mlx_lattice import routes
from mlx_lattice.backends import metal_host

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


@pytest.mark.parametrize("route", ROUTES)
def test_the_kernel_launched_is_the_route_reported(route):
    dtype, channels, groups = ROUTES[route]
    with ml.metal("host"), ml.waive_determinism(), routes.only(f"forward={route}"):
        x, w, relation = problem(dtype, channels, groups)
        mx.eval(relation.out_in, relation.sorted, relation.output_csr, relation.edges)
        with host.recording(checked=True) as record, ml.trace() as t:
            y = ml.conv(x, w, relation, groups=groups)
            mx.eval(y)
    (traced,) = t.records
    assert traced.choice.route.name == route
    assert dict(traced.choice.parameters)["code"] == "Metal"
    kernels = [launch.kernel for launch in record.report.launches]
    assert any(route in kernel for kernel in kernels), kernels
    with ml.routes.only("gather_gemm_scatter"):
        exact = ml.conv(
            x.astype(mx.float32), w.astype(mx.float32), relation, groups=groups
        )
    tolerance = {mx.float32: "float32", mx.float16: "float16"}.get(dtype, "bfloat16")
    assert ref.TOLERANCE[tolerance] >= relative(y, exact)


def relative(y, exact) -> float:
    y, exact = (np.array(a.astype(mx.float32), np.float64) for a in (y, exact))
    return float(np.abs(y - exact).max() / np.linalg.norm(exact))


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
