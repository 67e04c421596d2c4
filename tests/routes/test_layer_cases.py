"""benchmarks/layer_cases.py: rows of other libraries beside ours."""

import importlib
import json
from pathlib import Path

import mlx.core as mx
import numpy as np
import pytest

import mlx_lattice as ml

BENCHMARKS = Path(__file__).resolve().parents[2] / "benchmarks"


@pytest.fixture
def script(monkeypatch):
    monkeypatch.syspath_prepend(str(BENCHMARKS))
    return importlib.import_module


def test_the_best_of_the_others_stands_beside_a_case(script, tmp_path):
    layer_cases, file = script("layer_cases"), tmp_path / "rows.jsonl"
    first, second = (next(layer_cases.cases((rows,))) for rows in (2_000, 10_000))
    times = {"a": (0.3, 0.7), "b": (0.2, 0.9)}
    rows = [
        {"library": name, **case, "pass": "forward", "gpu_ms": ms}
        for name, both in times.items()
        for case, ms in zip((first, second), both, strict=True)
    ]
    rows.append({**first, "pass": "forward", "gpu_ms": 0.1})  # one of ours
    file.write_text("".join(json.dumps(row) + "\n" for row in rows))
    best = layer_cases.beside(file)
    found = {key[1]: (row["library"], row["gpu_ms"]) for key, row in best.items()}
    assert found == {2_000: ("b", 0.2), 10_000: ("a", 0.7)}


def test_ratios_are_summed_up_by_pass(script):
    rows = [("forward", 4.0), ("forward", 0.25), ("forward", 8.0), ("training", 3.0)]
    rows = [{"pass": pass_, "times_faster": ratio} for pass_, ratio in rows]
    said = script("layer_cases").summary(rows, "forward")
    assert said == (
        "forward: 2.00 times as fast (geometric mean of 3), least 0.25, 1 slower"
    )


def test_sites_are_the_first_of_the_least_scene_that_has_them(script, tmp_path):
    file, sites = tmp_path / "scenes.npz", script("layer_cases").sites
    small, large = np.arange(30).reshape(10, 3), np.arange(90).reshape(30, 3) + 7
    np.savez(file, large=large, small=small, W4=small[:9] + 99)  # scattered voxels
    assert np.array_equal(sites(8, file), small[:8])
    assert np.array_equal(sites(12, file), large[:12])
    with pytest.raises(ValueError, match="no scene of 31 voxels"):
        sites(31, file)


def test_sheets_are_sorted_voxels_beside_each_other(script):
    sites = script("scenes").sheets(20_000)
    assert sites.shape == (20_000, 4) and sites.dtype == np.int32
    keys = sites.astype(np.int64) @ (0, 1 << 40, 1 << 20, 1)
    assert (np.diff(keys) > 0).all()
    # Each voxel but those of the last columns has one beside it.
    beside = np.isin(keys + (1 << 40), keys) | np.isin(keys + (1 << 40) + 1, keys)
    beside |= np.isin(keys + (1 << 40) - 1, keys)
    inner = sites[:, 1] < sites[:, 1].max() - 1
    assert beside[inner].mean() > 0.9


@pytest.mark.parametrize("kind", ("subm", "strided", "inverse", "subm 3x1x3",
                                  "strided 3x3x3", "inverse 3x3x3"))  # fmt: skip
def test_a_layer_of_a_kind_has_its_geometry(script, kind):
    layer_cases, layers = script("layer_cases"), script("layers")
    rows = layer_cases.sites(400, None)
    x = ml.SparseTensor(mx.array(np.insert(rows, 0, 0, axis=1)), mx.ones((400, 1)))
    layer = layers.Layer(x, dict(kind=kind, rows=400, channels=16, dtype="float32"))
    facts, coarse = layer_cases.KINDS[kind], len(np.unique(rows // 2, axis=0))
    assert layer.conv.weight.shape == (16, *facts.size, 16)
    assert len(layer(x)) == (coarse if facts.writes_coarse else 400)
    assert len(layer._rows) == (coarse if facts.is_inverse else 400)
