"""The demo on few digits, and on a scan: it runs, forward and backward, and writes."""

import numpy as np
import pytest

pytest.importorskip("sklearn")
pytest.importorskip("matplotlib")

from mlx_lattice import demo  # noqa: E402


def test_digits_become_columns_of_voxels():
    image = np.zeros((8, 8))
    image[2, 5] = 3
    assert demo.digit_voxels(image).tolist() == [[2, 5, z] for z in range(4)]


def test_few_digits(tmp_path, monkeypatch, capsys):
    (train, labels), (test, test_labels) = demo.load_digits()
    few = (train[:48], labels[:48]), (test[:16], test_labels[:16])
    monkeypatch.setattr(demo, "load_digits", lambda seed: few)
    accuracy = demo.run(tmp_path, epochs=1, batch_size=24, goal=0.0)
    assert 0.0 <= accuracy <= 1.0
    written = {path.name for path in tmp_path.iterdir()}
    assert {"run.html", "loss.png", "digits.png", "digits.safetensors"} <= written
    printed = capsys.readouterr().out
    for text in ("test accuracy", "time per step", "weight_grad", "int8", "int4"):
        assert text in printed


def test_an_accuracy_below_the_goal_is_an_error(tmp_path, monkeypatch):
    (train, labels), (test, test_labels) = demo.load_digits()
    few = (train[:24], labels[:24]), (test[:8], test_labels[:8])
    monkeypatch.setattr(demo, "load_digits", lambda seed: few)
    with pytest.raises(RuntimeError, match="below the demo's goal of 101%"):
        demo.run(tmp_path, epochs=1, batch_size=24, goal=1.01)


def test_a_scan(tmp_path, capsys):
    points = np.random.default_rng(0).normal(size=(400, 3)).astype(np.float32)
    np.save(tmp_path / "scan.npy", points)
    demo.run_points(str(tmp_path / "scan.npy"), out=str(tmp_path), voxel_size=0.5)
    assert (tmp_path / "run.html").exists()
    printed = capsys.readouterr().out
    assert "400 points" in printed and "MinkUNet14" in printed
