"""The route that a Choice names is the kernel that was launched on Metal."""

import os
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import mlx.core as mx
import numpy as np
import pytest
from cases import features, in_grid
from metal_checks import host

import mlx_lattice as ml
from mlx_lattice import availability, devices, routes
from mlx_lattice.kept_files import EntryFile
from mlx_lattice.routes import measure

host.require()


@pytest.fixture(autouse=True)
def uninstalled():
    """Other tests look at MLX's own metal_kernel."""
    yield
    host.uninstall()
    availability.install_host.cache_clear()


def problem(dtype, channels, groups):
    coords = in_grid((6, 6, 6), 120, 0)
    x = features(len(coords), channels, 0).astype(np.float32)
    w = features(27 * channels // groups, channels, 1).reshape(27, -1, channels)
    t = ml.SparseTensor(mx.array(coords), mx.array(x).astype(dtype))
    relation = t.manager.submanifold_kernel_relation(t.key)
    return t.feats, mx.array(w.astype(np.float32)).astype(dtype), relation


BY_ENVIRONMENT = """
import mlx.core as mx
import mlx_lattice as ml
from mlx_lattice import nn
from mlx_lattice import availability
print(ml.backend_info().device.backend)
availability.install_host()
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


@pytest.mark.parametrize("value", ("gpu", "Host", "1"))
def test_other_values_of_the_environment_are_refused(value, monkeypatch):
    monkeypatch.setitem(ml.settings.environment, "MLX_LATTICE_METAL", value)
    with pytest.raises(ValueError, match=f"must be 'host' or empty; got '{value}'"):
        devices.current()
    with ml.metal("host"):  # a block says it first
        assert devices.metal_on_host()


def test_atomics_need_a_waiver():
    with ml.metal("host"), routes.only("forward=fp32_atomic"):
        x, w, relation = problem(mx.float32, 8, 1)
        with pytest.raises(ml.RouteError, match="determinism is not waived"):
            ml.conv(x, w, relation)


@pytest.mark.parametrize("device", ("m1", "m4-max", "a100", "h200"))
@pytest.mark.parametrize("channels", ((3, 16), (16, 16), (64, 64), (512, 96)), ids=str)
@pytest.mark.parametrize(
    "kernel",
    (
        {"kernel_size": 3, "edges": 30_000},
        {"kernel_size": 1, "stride": 2, "edges": 5000},
    ),
)
def test_weight_gradients_go_by_tiles_of_edges(kernel, channels, device):
    """Whatever K: one launch of tiles reads what a matmul an offset would copy."""
    c_in, c_out = channels
    facts = {"c_in": c_in, "c_out": c_out, "n_in": 5000, **kernel}
    for dtype in ("float16", "float32"):
        choice = ml.select(ml.Problem.weight_grad(dtype=dtype, **facts), device=device)
        assert choice.route.name == "grouped_gemm"


@pytest.mark.parametrize("device", ("m1", "m4-max", "m5", "a100", "h200"))
@pytest.mark.parametrize("channels", ((32, 32), (32, 512), (96, 64), (512, 512)))
@pytest.mark.parametrize("rows", (1, 10, 100, 300, 1000, 3000))
def test_any_number_of_rows_takes_tiles(rows, channels, device):
    """From 32 channels on; a traversal is for what nothing else can."""
    c_in, c_out = channels
    facts = {"c_in": c_in, "c_out": c_out, "n_in": rows, "edges": 5 * rows}
    tiles = {"sorted_implicit_gemm", "grouped_gemm"}
    if device == "m5":
        tiles.add("tensor_ops")
    for make in (ml.Problem.forward, ml.Problem.input_grad, ml.Problem.weight_grad):
        for dtype in ("float16", "float32"):
            choice = ml.select(make(dtype=dtype, **facts), device=device)
            assert choice.route.name in tiles


def test_few_rows_are_cut_into_splits_on_cuda():
    facts = {"c_in": 512, "c_out": 512, "dtype": "float16"}

    def plan(rows, **other):
        problem = ml.Problem.forward(n_in=rows, **{**facts, **other})
        return ml.select(problem, device="h200").plan

    hundred, thousands = plan(100, edges=1000), plan(3000, edges=30_000)
    assert hundred.splits > thousands.splits >= 1
    assert hundred.tile[0] == 64 < thousands.tile[0]
    assert plan(1, edges=1).splits == 1, "a row of one edge has nothing to split"
    # An edge a row: a tile of sorted rows uses an offset or two.
    assert plan(4500, edges=4500, kernel_size=2).splits == 1


def test_the_weight_gradient_of_sorted_rows_says_where_it_serves():
    facts = {"c_in": 64, "c_out": 64, "n_in": 1 << 19, "dtype": "float16"}

    def chosen(device="h200", only=None, **other):
        given = {"edges": 24 << 19, **facts, **other}
        problem = ml.Problem.weight_grad(**given)
        return ml.select(problem, device=device, only=only).route.name

    name = "sorted_implicit_gemm"
    assert chosen() == name
    few = {"n_in": 1000, "edges": 24_000}
    assert chosen(**few) == chosen(edges=20 << 19) == "grouped_gemm"
    for channels, least in ((16, 8), (32, 15)):  # fewer share a warpgroup's rows
        assert chosen(c_in=channels, edges=least << 19) == name
        assert chosen(c_in=channels, edges=(least - 1) << 19) == "grouped_gemm"
    assert chosen(**few, only=name) == name
    for device, other, why in (
        ("h200", {"c_in": 72}, "C_in = 72 is above 64"),
        ("h200", {"dtype": "float32"}, "takes 16 bits"),
        ("a100", {}, "has no wgmma"),
        ("m4", {}, "it has no weight_grad pass on metal"),
    ):
        assert chosen(device, **other) == "grouped_gemm"
        with pytest.raises(ml.RouteError, match=why):
            chosen(device, name, **other)


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
    assert any("grouped_gemm_weight_grad" in kernel for kernel in kernels), kernels


def test_a_measured_win_takes_a_route_that_the_table_does_not(monkeypatch, tmp_path):
    monkeypatch.setitem(ml.settings.environment, "MLX_LATTICE_CACHE", str(tmp_path))
    monkeypatch.setattr(EntryFile, "unwritten", {})
    with ml.metal("host"):
        p, mac = (
            ml.Problem.forward(c_in=64, c_out=64, n_in=9000),
            devices.profile("m3-max"),
        )
        name, usual = "dense_channel", ml.select(p, device=mac)
        assert usual.route.name != name
        measure._store(measure.key(p, mac), {usual.route.name: 2.0, name: 1.5})
        with ml.tune():
            choice, said = ml.select(p, device=mac), str(ml.explain(p, device=mac))
        assert choice.route.name == name and choice.measured[0] == (name, 1.5)
        assert "measured, " in said and name in said
        assert ml.select(p, device=mac) == usual
        odd = replace(p, c_in=60)
        measure._store(measure.key(odd, mac), {usual.route.name: 2.0, name: 1.5})
        with ml.tune():
            assert ml.select(odd, device=mac).route == usual.route
