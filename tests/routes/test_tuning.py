"""Measured choices: checked, cached, explained; no effect outside the block."""

import json

import cases
import mlx.core as mx
import numpy as np
import pytest
from planted import counting, plant

import mlx_lattice as ml
from mlx_lattice import cache_files, ops, routes
from mlx_lattice.cache_files import EntryFile
from mlx_lattice.problem import PASSES
from mlx_lattice.routes import selection

pytestmark = pytest.mark.usefixtures("portable_only")


@pytest.fixture(autouse=True)
def folder(monkeypatch, tmp_path):
    for name in ("MLX_LATTICE_ROUTE", "MLX_LATTICE_TUNE"):
        monkeypatch.setitem(ml.settings.environment, name, None)
    monkeypatch.setitem(ml.settings.environment, "MLX_LATTICE_CACHE", str(tmp_path))
    monkeypatch.setattr(EntryFile, "unwritten", {})
    return tmp_path


@pytest.fixture
def counted(monkeypatch):
    """The number of times that each route ran."""
    return counting(monkeypatch)


def tensor(n=200, channels=4):
    coords = cases.in_grid((8, 8, 8), n, 0)
    feats = cases.features(len(coords), channels, 0).astype(np.float32)
    return ml.SparseTensor(mx.array(coords), mx.array(feats))


def gradient(x, w):
    def loss(feats, w):
        return ops.subm_conv3d(x.replace(feats), w).feats.square().sum()

    mx.eval(mx.grad(loss, argnums=(0, 1))(x.feats, w))


def entries(folder):
    return json.loads((folder / "routes.json").read_text())["entries"]


def traced(function):
    with ml.trace() as t:
        function()
    return {r.problem.pass_: r.choice for r in t}


W = mx.random.normal((27, 4, 8), key=mx.random.key(3))


def test_the_measured_choice_is_run_and_explained(folder):
    x = tensor()
    with ml.tune():
        ran = traced(lambda: gradient(x, W))
        for pass_ in PASSES:
            explained = ml.explain(x, W, pass_=pass_)
            assert explained.choice == ran[pass_]
            choice = explained.choice
            fastest = choice.measured[0]
            assert choice.route.name == fastest[0] and fastest[1] > 0
            assert {name for name, _ in choice.measured} == set(
                r.name for r in selection.candidates(explained.problem, choice.device)
            )
            text = str(explained)
            assert "measured, " in text
            for name, ms in choice.measured[1:]:
                assert f"measured at {ms:.3g} ms" in text and name in text
    assert len(entries(folder)) == 3


def test_a_key_is_measured_once(counted):
    x = tensor()
    with ml.tune():
        ops.subm_conv3d(x, W)
        first = dict(counted)
        assert min(first[name] for name in ("explicit_gemm", "gather_gemm_scatter")) > 1
        choice = ml.explain(x, W).choice
        ops.subm_conv3d(tensor(), W)
    first[choice.route.name] += 1
    assert counted == first


def test_a_new_process_reads_the_file(counted, folder):
    x = tensor()
    with ml.tune():
        ops.subm_conv3d(x, W)
        choice = ml.explain(x, W).choice
        cache_files._entries.cache_clear()
        ml.settings.note_change()
        counted.clear()
        assert ml.select(ml.explain(x, W).problem) == choice
    assert not counted


def test_nothing_happens_outside_the_block(counted, folder, monkeypatch):
    x = tensor()
    with ml.tune():
        ops.subm_conv3d(x, W)
    counted.clear()
    ops.subm_conv3d(x, W)
    assert sum(counted.values()) <= 1
    assert not ml.explain(x, W).choice.measured
    monkeypatch.setitem(ml.settings.environment, "MLX_LATTICE_TUNE", "1")
    assert ml.explain(x, W).choice.measured
    with ml.tune(False):
        assert not ml.explain(x, W).choice.measured
    monkeypatch.setitem(ml.settings.environment, "MLX_LATTICE_TUNE", "0")
    assert not ml.explain(x, W).choice.measured
    monkeypatch.setitem(ml.settings.environment, "MLX_LATTICE_TUNE", "yes")
    ml.settings.note_change()
    with pytest.raises(ValueError, match="MLX_LATTICE_TUNE must be 0 or 1; got 'yes'"):
        ops.subm_conv3d(x, W)


@pytest.mark.parametrize("planted", ["wrong", "nan", "raises"])
def test_a_wrong_candidate_cannot_win(planted, monkeypatch, folder):
    def fast_and_wrong(right):
        if planted == "raises":
            raise RuntimeError("no such kernel")
        y = mx.zeros((len(x), W.shape[2]))
        return y if planted == "wrong" else mx.full(y.shape, mx.nan)

    plant(monkeypatch, ("explicit_gemm", "grouped_gemm"), fast_and_wrong)
    x = tensor()
    with ml.tune(), pytest.warns(UserWarning, match="explicit_gemm (is off|failed)"):
        y = ops.subm_conv3d(x, W)
        choice = ml.explain(x, W).choice
    assert choice.route.name not in ("explicit_gemm", "grouped_gemm")
    reasons = dict(choice.rejected) | dict(choice.below)
    assert ("explicit_gemm", None) in choice.measured
    assert "it failed, or did not give the floor's result" in reasons["explicit_gemm"]
    with routes.only("gather_gemm_scatter"):
        assert mx.allclose(y.feats, ops.subm_conv3d(x, W).feats, atol=1e-4)


# The file.


@pytest.mark.parametrize("change", [{"version": 0}, {"mlx": "0.1"}])
def test_an_old_file_is_ignored_with_a_warning_and_replaced(change, folder):
    x = tensor()
    with ml.tune():
        ops.subm_conv3d(x, W)
    held = json.loads((folder / "routes.json").read_text())
    (folder / "routes.json").write_text(json.dumps(held | change))
    with ml.tune(), pytest.warns(ml.LatticeWarning, match="was written by"):
        ops.subm_conv3d(x, W)
    fresh = json.loads((folder / "routes.json").read_text())
    assert {k: fresh[k] for k in change} == {k: held[k] for k in change}


def test_a_failed_write_leaves_the_old_file(folder, monkeypatch):
    selection._file().add("a", {"pointwise": 1.0})
    before = (folder / "routes.json").read_text()

    def fail(*args):
        raise OSError("the disk is full")

    monkeypatch.setattr(cache_files.os, "replace", fail)
    with pytest.warns(ml.LatticeWarning, match="cannot be written .*the disk is full"):
        selection._file().add("b", {"pointwise": 1.0})
    assert (folder / "routes.json").read_text() == before
    assert {p.name for p in folder.iterdir()} == {"routes.json", ".lock"}


def test_folders_by_block_environment_and_platform(tmp_path, monkeypatch):
    assert cache_files.folder() == tmp_path
    with ml.cache(tmp_path / "a"):
        assert cache_files.folder() == tmp_path / "a"
        with ml.cache(str(tmp_path / "b")):
            assert selection.cache_file() == tmp_path / "b" / "routes.json"
    assert cache_files.folder() == tmp_path
    monkeypatch.setitem(ml.settings.environment, "MLX_LATTICE_CACHE", None)
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.setattr(cache_files.sys, "platform", "darwin")
    assert cache_files.folder() == tmp_path / "Library" / "Caches" / "mlx-lattice"
    monkeypatch.setattr(cache_files.sys, "platform", "linux")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "x"))
    assert cache_files.folder() == tmp_path / "x" / "mlx-lattice"
