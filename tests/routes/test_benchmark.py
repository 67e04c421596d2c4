"""benchmarks/routes.py: a row of the table is benchmarked by being there."""

import importlib.util
import json
import sys
from pathlib import Path

import pytest
from places import HERE, MetalHost

from mlx_lattice import devices
from mlx_lattice.routes import TABLE
from mlx_lattice.routes.needs import neural_accelerators

BENCHMARKS = Path(__file__).resolve().parents[2] / "benchmarks"


@pytest.fixture
def script(monkeypatch):
    monkeypatch.syspath_prepend(str(BENCHMARKS))
    spec = importlib.util.spec_from_file_location(
        "benchmark_of_routes", BENCHMARKS / "routes.py"
    )
    module = importlib.util.module_from_spec(spec)
    monkeypatch.setitem(sys.modules, spec.name, module)
    spec.loader.exec_module(module)
    return module


@pytest.mark.parametrize("place", HERE, ids=lambda place: place.name)
def test_every_row_that_can_run_is_benchmarked(place, script, tmp_path, capsys):
    file = tmp_path / "cases.jsonl"
    arguments = "--rows", "30", "--budget", "0", "--json", str(file)
    # Kernels are compiled for each layer: as few as every row takes one of.
    layers = "16", "depthwise", "int4", "w8a8"
    few = "--scenes", "surface", "pointwise", "--layers", *layers
    with place.inside():
        device = devices.current()
        able = {
            (route.name, pass_)
            for route in TABLE
            for pass_ in route.passes
            if place.runs(route, pass_)
            and route.code(device.backend, pass_)
            and (device.neural_accelerators or neural_accelerators not in route.needs)
        }
        script.main((*arguments, *few))
    cases = [json.loads(line) for line in file.read_text().splitlines()]
    assert {(case["route"], case["pass_"]) for case in cases} == able
    printed = capsys.readouterr().out
    assert all(name in printed for name, _ in able)
    for case in cases:
        if not isinstance(place, MetalHost):
            assert case["ms"] > 0
        elif case["executed"] is not None:
            # What the plan says is what the kernel did.
            assert case["executed"] == pytest.approx(case["done"])


def test_routes_and_passes_can_be_named(script, tmp_path):
    file = tmp_path / "cases.jsonl"
    asked = "--routes", "gather_gemm_scatter", "--passes", "weight_grad"
    few = "--rows", "20", "--budget", "0", "--scenes", "strided"
    script.main((*asked, *few, "--json", str(file)))
    cases = [json.loads(line) for line in file.read_text().splitlines()]
    assert {(c["route"], c["pass_"], c["scene"]) for c in cases} == {
        ("gather_gemm_scatter", "weight_grad", "strided")
    }
