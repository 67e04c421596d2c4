"""The demo on few digits, and on a scan: it runs, forward and backward, and writes."""

import sys
from pathlib import Path
from statistics import mean

import numpy as np
import pytest

pytest.importorskip("sklearn")

import mlx.core as mx  # noqa: E402

from mlx_lattice.commands import demo  # noqa: E402
from mlx_lattice.commands.demo import MOST_LOST, score_table, scores  # noqa: E402
from mlx_lattice.io import read_points  # noqa: E402

ROOT = Path(__file__).parents[2]
SCAN = ROOT.parent / "shared" / "data" / "small_gicp_target.ply"
sys.path.append(str(ROOT / "examples"))
import train_segmenter as surfaces  # noqa: E402


@pytest.mark.native
def test_few_digits(tmp_path, monkeypatch, capsys):
    (train, labels), (test, test_labels) = demo.load_digits()
    few = (train[:48], labels[:48]), (test[:16], test_labels[:16])
    monkeypatch.setattr(demo, "load_digits", lambda seed: few)
    quick = {"epochs": 1, "batch_size": 24}
    accuracy = demo.run(tmp_path, **quick, goal=0.0)
    assert 0.0 <= accuracy <= 1.0
    written = {path.name for path in tmp_path.iterdir()}
    assert {"run.html", "digits.safetensors"} <= written
    printed = capsys.readouterr().out
    for text in ("test accuracy", "time per step", "weight_grad", "int8", "W4A8"):
        assert text in printed


@pytest.mark.native
def test_surfaces_of_a_scan_in_integers():
    """As right as the demo's table promises, on a real scan if one is there."""
    points = surfaces.room()
    if SCAN.exists():
        points = np.asarray(read_points(SCAN).points, np.float32)
    size = demo.fitting_voxel_size(points, 3000)
    scan = surfaces.labelled(points, size)
    assert 1500 < len(scan.x) <= 3300 and set(scan.labels) == {0, 1, 2}
    taught = []
    for seed in range(3):  # what one net loses of so few voxels hangs on chance
        mx.random.seed(seed)
        net = surfaces.untaught()
        # Enough steps for a room, where no scan is there.
        surfaces.teach(net, [scan], 100)
        found = scores(net, [scan.x], lambda net: surfaces.right(net, [scan]))
        assert found["float32"].right > 0.6
        taught.append(found)
    for name, most in MOST_LOST.items():
        lost = mean(each["float32"].right - each[name].right for each in taught)
        assert lost <= most / 100, name
    lines = score_table(found).splitlines()
    assert [line.split()[0] for line in lines] == [name.split()[0] for name in found]
    assert f"{found['W8A8'].right:.2%}" in lines[3]
