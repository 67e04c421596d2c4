"""The examples run, and shares of a batch give the gradients of the whole batch."""

import importlib.util
import os
import sys
from pathlib import Path

import numpy as np
import pytest
from processes import RING, launch, needs, on_the_cpu_alone, run

ROOT = Path(__file__).parents[2]
EXAMPLES = ROOT / "examples"
SETTINGS = {
    "decode_shape.py": ["--bits", "8", "--group-size", "32"],
    "inspect_scan.py": ["--points", "500", "--channels", "4", "--voxel-size", "1"],
    "quantise.py": ["--points", "200", "--batches", "1"],
    "train_compiled.py": ["--scenes", "2", "--voxels", "300", "--epochs", "3"],
    "train_detector.py": ["--steps", "2", "--voxel-size", "0.4", "--bits", "8"],
    "train_segmenter.py": ["--steps", "3", "--voxel-size", "0.5", "--bits", "8"],
    "train_distributed.py": ["--digits", "48", "--epochs", "1", "--batch-size", "32"],
}

pytestmark = on_the_cpu_alone


def loaded(name: str):
    """An example as a module."""
    spec = importlib.util.spec_from_file_location(name, EXAMPLES / f"{name}.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_every_example_has_a_test():
    assert {p.name for p in EXAMPLES.glob("*.py")} == set(SETTINGS)
    assert all(os.access(EXAMPLES / name, os.X_OK) for name in SETTINGS)


@pytest.mark.parametrize("name", SETTINGS)
def test_examples_run(name, tmp_path):
    out = run(sys.executable, EXAMPLES / name, *SETTINGS[name], folder=tmp_path)
    expected = {
        "decode_shape.py": "wrote shape.npz",
        "inspect_scan.py": "inputs with no edge",
        "quantise.py": "relative error of the output",
        "train_compiled.py": "compiled, 2 scenes kept",
        "train_detector.py": "objects at other places",
        "train_segmenter.py": "right in the half that was not taught",
        "train_distributed.py": "1 processes, test accuracy",
    }
    assert expected[name] in out


@needs(RING)
def test_training_runs_on_two_processes(tmp_path):
    script = EXAMPLES / "train_distributed.py"
    out = launch(script, *SETTINGS[script.name], folder=tmp_path)
    assert out.count("2 processes, test accuracy") == 1


def test_shares_are_a_partition():
    share = loaded("train_distributed").share
    for count in (0, 1, 7, 64):
        parts = [share(np.arange(count), rank, 3) for rank in range(3)]
        assert sorted(np.concatenate(parts)) == list(range(count))
        assert max(map(len, parts)) - min(map(len, parts)) <= 1
