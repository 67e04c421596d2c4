"""benchmarks/routes.py: a row of the table is benchmarked by being there."""

import importlib.util
import json
import sys
from pathlib import Path

import pytest

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


def test_routes_and_passes_can_be_named(script, tmp_path):
    file = tmp_path / "cases.jsonl"
    asked = "--routes", "gather_gemm_scatter", "--passes", "weight_grad"
    few = "--rows", "20", "--budget", "0", "--scenes", "strided"
    script.main((*asked, *few, "--json", str(file)))
    cases = [json.loads(line) for line in file.read_text().splitlines()]
    assert {(c["route"], c["pass_"], c["scene"]) for c in cases} == {
        ("gather_gemm_scatter", "weight_grad", "strided")
    }
