"""The examples run, and shares of a batch give the gradients of the whole batch."""

import importlib.util
import os
import sys
from pathlib import Path

import mlx.core as mx
import mlx.nn
import numpy as np
import pytest
from mlx.utils import tree_flatten
from processes import RING, launch, needs, on_the_cpu_alone, run

from mlx_lattice.commands import demo

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


# What each process of the equality test does: a step on each of some batches.
STEP = """
import sys
sys.path[:0] = [{examples!r}]
import mlx.core as mx
import numpy as np
from mlx.utils import tree_flatten
import train_distributed as example
from mlx_lattice import nn
from mlx_lattice.commands import demo

group = mx.distributed.init()
# Each process draws other parameters: the first one's must win.
mx.random.seed(group.rank())
net = nn.convert_sync_batchnorm(demo.DigitNet())
example.first_process_state(net, group)
(voxels, labels), _ = demo.load_digits()
for count in {counts}:
    loss, grads = example.share_step(net, voxels, labels, np.arange(count), group)
    arrays = dict(tree_flatten([grads, net.parameters(), loss]))
    mx.save_safetensors(f"{{count}}_{{group.rank()}}.safetensors", arrays)
"""


@needs(RING)
def test_two_processes_give_the_gradients_of_one(tmp_path):
    """Also where shares differ in length (7 samples) and where one is empty (1).

    The net has BatchNorms, whose running statistics are those of one process too.
    """
    counts = (8, 7, 1)
    script = tmp_path / "step.py"
    script.write_text(STEP.format(examples=str(EXAMPLES), counts=counts))
    launch(script, folder=tmp_path)

    mx.random.seed(0)
    net = demo.DigitNet()
    (voxels, labels), _ = demo.load_digits()

    def whole(net, x, y):
        return mlx.nn.losses.cross_entropy(net(x), y, reduction="mean")

    for count in counts:
        x, y = demo.digit_batch(voxels[:count]), mx.array(labels[:count])
        loss, grads = mlx.nn.value_and_grad(net, whole)(net, x, y)
        expected = dict(tree_flatten([grads, net.parameters(), loss]))
        found = [mx.load(str(tmp_path / f"{count}_{r}.safetensors")) for r in (0, 1)]
        assert found[0].keys() == expected.keys()
        for name, value in expected.items():
            # Both processes hold the same bits; sums of shares round otherwise.
            assert mx.array_equal(found[0][name], found[1][name]), name
            scale = max(float(mx.linalg.norm(value.flatten())), 1e-6)
            error = float(mx.linalg.norm((found[0][name] - value).flatten()))
            assert error <= 1e-5 * scale, (count, name, error / scale)


def test_shares_are_a_partition():
    share = loaded("train_distributed").share
    for count in (0, 1, 7, 64):
        parts = [share(np.arange(count), rank, 3) for rank in range(3)]
        assert sorted(np.concatenate(parts)) == list(range(count))
        assert max(map(len, parts)) - min(map(len, parts)) <= 1
