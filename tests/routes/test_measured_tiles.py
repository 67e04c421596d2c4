"""Tiles that were measured on a machine: which layers use them, which files count."""

import json
from dataclasses import replace

import mlx.core as mx
import pytest
from metal_checks import host

import mlx_lattice as ml
from mlx_lattice import devices
from mlx_lattice.inspect import doctor
from mlx_lattice.routes import measure, measured_tiles

host.require()

TILES = (
    ("shape", measured_tiles.SHAPES["two of 64 x 32"], {"SIDE": 32, "GROUPS": 2}),
    ("height", 32, {"HEIGHT": 32}),
)


@pytest.mark.parametrize("what, tile, expected", TILES)
def test_tuning_plans_with_the_kept_tile(what, tile, expected, monkeypatch, tmp_path):
    monkeypatch.setenv("MLX_LATTICE_CACHE", str(tmp_path))
    device = devices.profile("m4" if what == "shape" else "m5")
    problem = ml.Problem.forward(
        c_in=64, c_out=64, n_in=300, dtype="float16", layout="mlx"
    )
    usual = ml.select(problem, device=device)
    assert usual.route.name == measured_tiles.ROUTES[what]
    assert measured_tiles.keep(problem, device, what, {tile: 1.0, 64: None}) == tile
    with ml.tune():
        choice = ml.select(problem, device=device)
        said = str(ml.explain(problem, device=device))
    assert expected.items() <= dict(choice.plan.gpu.template).items()
    assert "fastest when measured here" in said and "fastest" not in str(usual)
    with ml.tune():
        for change in ({"n_in": 9000, "n_out": 9000}, {"dtype": "float32"}):
            other = ml.select(replace(problem, **change), device=device)
            assert "fastest" not in str(other)


def test_a_layer_launches_the_kept_tile(monkeypatch, tmp_path):
    monkeypatch.setenv("MLX_LATTICE_METAL", "host")
    monkeypatch.setattr(measure, "record", lambda *given: None)  # the table decides
    relation = doctor.build_relation(doctor.shell(5), "submanifold")
    problem = ml.Problem.of("forward", relation, 64, 64, mx.float16, table=True)
    _, x, w = doctor.operands(problem, relation)
    results, kernels = [], []
    with ml.cache(tmp_path):  # compiled kernels stay where they are
        shape = measured_tiles.SHAPES["two of 64 x 32"]
        measured_tiles.keep(problem, devices.current(), "shape", {shape: 1.0})
        for tuned in (False, True):
            with ml.tune(tuned), host.recording(checked=True) as record:
                results.append(ml.conv(x, w, relation))
                mx.eval(results[-1])
            route = "sorted_implicit_gemm"
            ran = [r.kernel for r in record.report.launches if route in r.kernel]
            kernels.append(set(ran))
    assert mx.array_equal(*results), "the same sums in the same order"
    (usual,), (tuned,) = kernels
    assert "_32_4_64_1_" in usual and "_32_2_64_1_" in tuned


@pytest.mark.parametrize(
    "change, said",
    (
        ({"version": 2}, "was written by"),
        ({"mlx": "0.1"}, "was written by"),
        ({"entries": {"a": {"shape": [4, 32, 48, 1]}}}, "not a tile that kernels"),
        ({"entries": {"a": {"height": True}}}, "not a tile that kernels"),
        ({"entries": {"a": {"depth": 32}}}, "not a tile that kernels"),
    ),
)
def test_tiles_of_an_unknown_file_are_refused(change, said, monkeypatch, tmp_path):
    monkeypatch.setenv("MLX_LATTICE_CACHE", str(tmp_path))
    p, m5 = ml.Problem.forward(c_in=64, c_out=64, n_in=100), devices.profile("m5")
    kept = measured_tiles.keep(p, m5, "height", {64: 2.0, 32: 1.0, 16: None})
    assert measured_tiles.own(p, m5) == (("tensor_ops", kept),) == (("tensor_ops", 32),)
    assert measured_tiles.keep(p, m5, "height", {16: None}) is None
    file = tmp_path / "tiles.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | change))
    with pytest.warns(UserWarning, match=said):
        assert measured_tiles.own(p, m5) == ()
