"""The examples run, and shares of a batch give the gradients of the whole batch."""

import importlib.util
import os
import socket
import subprocess
import sys
from contextlib import ExitStack
from pathlib import Path

import mlx.core as mx
import mlx.nn
import numpy as np
import pytest
from mlx.utils import tree_flatten

from mlx_lattice import demo, nn

ROOT = Path(__file__).parents[2]
EXAMPLES = ROOT / "examples"
LAUNCH = Path(sys.executable).with_name("mlx.launch")
SETTINGS = {
    "decode_shape.py": ["--bits", "8", "--group-size", "32"],
    "inspect_scan.py": ["--points", "500", "--channels", "4", "--voxel-size", "1"],
    "quantise.py": ["--points", "200", "--batches", "1"],
    "train_distributed.py": ["--digits", "48", "--epochs", "1", "--batch-size", "32"],
}

# On the Metal stand-in a process compiles its kernels first: too slow for a smoke test.
pytestmark = pytest.mark.skipif(
    os.environ.get("MLX_LATTICE_METAL") == "host", reason="runs on the CPU alone"
)
needs_launch = pytest.mark.skipif(
    sys.platform == "win32" or not LAUNCH.exists(), reason="no mlx.launch here"
)


def environment() -> dict[str, str]:
    """The environment, without what an outer launch or a forced route left in it."""
    dropped = ("MLX_RANK", "MLX_HOSTFILE", "MLX_LATTICE_ROUTE")
    return {k: v for k, v in os.environ.items() if k not in dropped}


def run(*command, folder: Path) -> str:
    done = subprocess.run(
        list(map(str, command)),
        cwd=folder,
        env=environment(),
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def free_ports(count: int) -> int:
    """Return the first of as many consecutive ports of localhost that are free."""
    for _ in range(100):
        with ExitStack() as held:
            first = held.enter_context(socket.socket())
            first.bind(("127.0.0.1", 0))
            port = first.getsockname()[1]
            try:
                for later in range(port + 1, port + count):
                    held.enter_context(socket.socket()).bind(("127.0.0.1", later))
            except (OSError, OverflowError):
                continue
            return port
    raise RuntimeError("no consecutive ports of localhost are free")


def launch(script: Path, *arguments, folder: Path, processes: int = 2) -> str:
    """Run a script on several processes over localhost."""
    command = [LAUNCH, "-n", processes, "--backend", "ring", "--python", sys.executable]
    ports = ["--starting-port", free_ports(processes)]
    return run(*command, *ports, script, *arguments, folder=folder)


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
        "train_distributed.py": "1 processes, test accuracy",
    }
    assert expected[name] in out


@needs_launch
def test_training_runs_on_two_processes(tmp_path):
    script = EXAMPLES / "train_distributed.py"
    out = launch(script, *SETTINGS[script.name], folder=tmp_path)
    assert out.count("2 processes, test accuracy") == 1


# What each process of the equality test does: one step on a batch of its own order.
STEP = """
import sys
sys.path[:0] = [{examples!r}]
import mlx.core as mx
import numpy as np
from mlx.utils import tree_flatten
import train_distributed as example
from mlx_lattice import demo

group = mx.distributed.init()
# Each process draws other parameters: the first one's must win.
mx.random.seed(group.rank())
net = example.layer_norms(demo.DigitNet())
example.first_process_state(net, group)
(voxels, labels), _ = demo.load_digits()
for count in {counts}:
    loss, grads = example.share_step(net, voxels, labels, np.arange(count), group)
    arrays = dict(tree_flatten(grads)) | {{"loss": loss}}
    mx.save_safetensors(f"{{count}}_{{group.rank()}}.safetensors", arrays)
"""


@needs_launch
def test_two_processes_give_the_gradients_of_one(tmp_path):
    """Also where shares differ in length (7 samples) and where one is empty (1)."""
    counts = (8, 7, 1)
    script = tmp_path / "step.py"
    script.write_text(STEP.format(examples=str(EXAMPLES), counts=counts))
    launch(script, folder=tmp_path)

    example = loaded("train_distributed")
    mx.random.seed(0)
    net = example.layer_norms(demo.DigitNet())
    (voxels, labels), _ = demo.load_digits()

    def whole(net, x, y):
        return mlx.nn.losses.cross_entropy(net(x), y, reduction="mean")

    for count in counts:
        x, y = demo.digit_batch(voxels[:count]), mx.array(labels[:count])
        loss, grads = mlx.nn.value_and_grad(net, whole)(net, x, y)
        expected = dict(tree_flatten(grads)) | {"loss": loss}
        found = [mx.load(str(tmp_path / f"{count}_{r}.safetensors")) for r in (0, 1)]
        assert found[0].keys() == expected.keys()
        for name, value in expected.items():
            # Both processes hold the same bits; sums of shares round otherwise.
            assert mx.array_equal(found[0][name], found[1][name]), name
            scale = max(float(mx.linalg.norm(value.flatten())), 1e-6)
            error = float(mx.linalg.norm((found[0][name] - value).flatten()))
            assert error <= 1e-5 * scale, (count, name, error / scale)


def test_no_norm_of_the_batch_is_left():
    example = loaded("train_distributed")
    net = example.layer_norms(demo.DigitNet())
    kinds = [type(m) for _, m in net.named_modules()]
    assert nn.BatchNorm not in kinds and kinds.count(nn.LayerNorm) == 4


def test_shares_are_a_partition():
    share = loaded("train_distributed").share
    for count in (0, 1, 7, 64):
        parts = [share(np.arange(count), rank, 3) for rank in range(3)]
        assert sorted(np.concatenate(parts)) == list(range(count))
        assert max(map(len, parts)) - min(map(len, parts)) <= 1
