"""Nets of users: saved by a script, read with ``code=`` and ``--code``, refused."""

import json
import re
import runpy
import shlex
import shutil
import subprocess
import sys
import types
from pathlib import Path

import mlx.core as mx
import numpy as np
import pytest

import mlx_lattice as ml
from mlx_lattice import cli, io, models, nn
from mlx_lattice.io import CheckpointError

SCRIPT = """
import mlx.core as mx
from mlx_lattice import models, nn

class TinyNet(models.Segmentor):
    def __init__(self, in_channels, num_classes, *, bias=True):
        super().__init__()
        self.conv = nn.SubmConv3d(in_channels, num_classes, 3, bias=bias)

    def __call__(self, x):
        return self.conv(x)

if __name__ == "__main__":
    net = TinyNet(1, num_classes=2, bias=False)
    net.about = models.About(models.VoxelRecipe(0.5), ("floor", "wall"))
    net.save_pretrained("runs/tiny")
"""


@pytest.fixture(scope="module")
def made(tmp_path_factory):
    """A folder with tiny.py and scan.ply, in which tiny.py ran as a script."""
    folder = tmp_path_factory.mktemp("made")
    (folder / "tiny.py").write_text(SCRIPT)
    subprocess.run([sys.executable, "tiny.py"], cwd=folder, check=True)
    points = np.random.default_rng(0).uniform(0, 4, (400, 3)).astype(np.float32)
    labels = (points[:, 2] > 2).astype(np.uint8)
    columns = dict(zip("xyz", points.T, strict=True)) | {"label": labels}
    io.write_ply(folder / "scan.ply", columns)
    return folder


@pytest.fixture
def work(tmp_path, monkeypatch):
    """An empty working folder; what is imported of it is forgotten afterwards."""
    monkeypatch.chdir(tmp_path)
    classes = dict(models.pretrained._CLASSES)
    monkeypatch.setattr(models.pretrained, "_CLASSES", classes)
    yield tmp_path
    for name, module in list(sys.modules.items()):
        if (getattr(module, "__file__", None) or "").startswith(str(tmp_path)):
            del sys.modules[name]


@pytest.fixture
def place(made, work):
    """A working folder with a copy of ``made``."""
    shutil.copytree(made, work, dirs_exist_ok=True)
    return work


def block(card: str, language: str) -> str:
    return card.split(f"```{language}\n")[1].split("```")[0]


def test_a_script_s_net_on_the_command_line(place, capsys):
    config = json.loads((place / "runs/tiny/config.json").read_text())
    assert config["model"] == "tiny:TinyNet"
    assert config["arguments"] == {"in_channels": 1, "num_classes": 2, "bias": False}
    for command in ("segment", "evaluate", "detect"):
        given = [command, "scan.ply", "--model", "runs/tiny"]
        assert cli.main(given)
        error = capsys.readouterr().err
        assert "runs/tiny needs the class tiny:TinyNet, which is not part of" in error
        assert "--code tiny.py on the command line" in error
    for command in ("segment", "evaluate"):
        given = [command, "scan.ply", "--model", "runs/tiny", "--code", "tiny.py"]
        assert cli.main(given) == 0
        printed = capsys.readouterr().out
        assert "floor" in printed and "wall" in printed
    assert cli.main(["detect", *given[1:]])
    assert "runs/tiny is a TinyNet, which finds no boxes" in capsys.readouterr().err


def test_the_card_s_lines_run(place, monkeypatch, capsys):
    card = (place / "runs/tiny/README.md").read_text()
    assert "`tiny.py` defines the class `TinyNet`: it is not part of" in card
    for name in ("tiny.py", "scan.ply"):
        (place / name).rename(place / "runs" / name)
    monkeypatch.chdir(place / "runs")
    names: dict = {}
    exec(block(card, "python"), names)
    assert type(names["net"]).__name__ == "TinyNet"
    assert names["net"].about.classes == ("floor", "wall")
    program, *given = shlex.split(block(card, "sh"))
    assert program == "mlx-lattice" and cli.main(given) == 0
    assert "400 points" in capsys.readouterr().err


def test_code_of_a_folder_does_not_run(place):
    for name in ("tiny.py", "my_net.py"):
        (place / "runs/tiny" / name).write_text("raise SystemExit('it ran')")
    with pytest.raises(CheckpointError, match=r'code="tiny.py"\), or --code tiny.py'):
        models.from_pretrained("runs/tiny")
    with pytest.raises(CheckpointError, match="TinyNet, which other.py does not def"):
        (place / "other.py").write_text("")
        models.from_pretrained("runs/tiny", code="other.py")
    net = models.from_pretrained("runs/tiny", code="tiny.py")
    assert type(net).__module__ == "tiny" and str(place) not in sys.path
    again = models.from_pretrained("runs/tiny")  # its class is imported
    assert type(again) is type(net)
    again.save_pretrained("again")  # as a package's class as well
    assert (place / "again/config.json").read_text() == (
        place / "runs/tiny/config.json"
    ).read_text()


def test_a_file_of_a_package(place):
    package = place / "project/nets"
    package.mkdir(parents=True)
    (package / "__init__.py").write_text("")
    (package / "parts.py").write_text("width = 1")
    (package / "tiny.py").write_text("from .parts import width\n" + SCRIPT)
    net = models.from_pretrained("runs/tiny", code="project/nets/tiny.py")
    assert type(net).__module__ == "nets.tiny"
    net.save_pretrained("new")
    assert 'code="nets/tiny.py"' in (place / "new/README.md").read_text()


@pytest.mark.parametrize(
    ("name", "text", "said"),
    (
        ("a.py", "x = 1\nx = y", r"^a.py, line 2: NameError: name 'y' is not defined"),
        ("b.py", "x = (", "^b.py: SyntaxError: .*line 1"),
        ("c.py", "\nimport nowhere_to_be_found", "^c.py, line 2: ModuleNotFoundError"),
        ("d.py", "import sys; sys.exit(3)", "^d.py, line 1: SystemExit: 3"),
        ("json.py", SCRIPT, "^json.py has the name of a module that Python has"),
        ("tiny.txt", SCRIPT, r"code must be a Python file, \*.py; got tiny.txt"),
    ),
)
def test_code_that_does_not_import(name, text, said, place):
    (place / name).write_text(text)
    with pytest.raises(ImportError, match=said):
        models.from_pretrained("runs/tiny", code=name)


def test_code_that_is_missing(place):
    with pytest.raises(FileNotFoundError, match="there is no file none.py; code is"):
        models.from_pretrained("runs/tiny", code="none.py")


def test_a_net_of_a_notebook(tmp_path, monkeypatch):
    notebook = types.ModuleType("__main__")  # which has no file
    monkeypatch.setitem(sys.modules, "__main__", notebook)
    exec(SCRIPT.partition("if __name__")[0], vars(notebook))
    notebook.TinyNet(1, 2).save_pretrained(tmp_path)
    assert type(models.from_pretrained(tmp_path)) is notebook.TinyNet
    models.pretrained._CLASSES.pop((False, "TinyNet"))
    said = "needs the class TinyNet, which was defined in a notebook. Run the cell"
    with pytest.raises(CheckpointError, match=said):
        models.from_pretrained(tmp_path)
    text = (tmp_path / "README.md").read_text()
    assert "was defined in a notebook: copy it to `my_net.py`" in text


def test_a_class_named_as_one_of_the_package(tmp_path):
    class MinkUNet(models.Segmentor):
        def __init__(self, width):
            super().__init__()
            self.conv = nn.SubmConv3d(1, width, 3)

    MinkUNet(2).save_pretrained(tmp_path / "own")
    models.MinkUNet14(1, 2, plan="A").save_pretrained(tmp_path / "other")
    assert type(models.from_pretrained(tmp_path / "own")) is MinkUNet
    assert type(models.from_pretrained(tmp_path / "other")) is models.MinkUNet14
    with pytest.raises(CheckpointError, match="is of a MinkUNet, not of a MinkUNet"):
        models.MinkUNet.from_pretrained(tmp_path / "own")


def test_an_unknown_class_lists_public_ones(tmp_path):
    nn_class = models.SparseResNet14(1, 2)
    nn_class.save_pretrained(tmp_path)
    path = tmp_path / "config.json"
    path.write_text(path.read_text().replace("SparseResNet14", "SparseResnet14"))
    with pytest.raises(CheckpointError) as error:
        models.from_pretrained(tmp_path)
    names = re.search(r"it has (.*)", str(error.value))[1].split(", ")
    assert {"SpUNet", "PTv3", "SparseVAEDecoder"} <= {*names}
    assert all(name in models.__all__ for name in names)


class Rows(models.Segmentor):
    """A net that returns what a function makes of its input."""

    def __init__(self):
        super().__init__()
        self.weight = mx.ones((1, 3))
        self.about = models.About(models.VoxelRecipe(0.5))

    def __call__(self, x):
        return self.result(x)


def test_a_net_that_is_no_segmentor():
    with pytest.raises(TypeError, match="must be a models.Segmentor; got SubmConv3d"):
        models.segment_points(nn.SubmConv3d(1, 2, 3), np.zeros((3, 3)))


def test_what_a_net_returns():
    net = Rows()
    points = mx.array(np.random.default_rng(0).uniform(0, 4, (50, 3)))
    net.result = lambda x: x.feats @ net.weight
    with pytest.raises(TypeError, match="must return a SparseTensor .* got array"):
        net.score_points(points)
    net.result = lambda x: nn.Conv3d(1, 3, 2, 2)(x)
    with pytest.raises(ValueError, match=r"its input's \d+ voxels; got Sparse.*Upsam"):
        net.score_points(points)

    def place_scores(x):
        return x.replace(feats=x.coords[:, 1:].astype(mx.float32))

    net.result = place_scores
    expected = net.score_points(points)
    net.result = lambda x: place_scores(
        ml.SparseTensor(x.coords[::-1], x.feats[::-1])  # the rows in another order
    )
    assert mx.array_equal(net.score_points(points), expected)
    net.about = models.About(net.about.voxels, ("floor", "wall"))
    with pytest.raises(
        ValueError, match="names 2 classes, but Rows returns .* 3 classes"
    ):
        net.score_points(points)
    assert net.dtype == mx.float32
    net.set_dtype(mx.float16)  # it has no batch norm
    assert net.dtype == mx.float16


@pytest.mark.native  # it trains 60 steps, and routes do not matter
def test_the_page(work, monkeypatch, capsys):
    """Write the files of docs/own_net.md, run its commands; resume bit for bit."""
    monkeypatch.syspath_prepend(work)
    text = (Path(__file__).parents[2] / "docs/own_net.md").read_text()
    files = dict(re.findall(r'^```python title="(.*?)"\n(.*?)^```', text, re.M | re.S))
    for name, code in files.items():
        Path(name).write_text(code)

    def run_line(line):
        program, *given = shlex.split(line)
        monkeypatch.setattr(sys, "argv", given)
        if program == "python":
            return runpy.run_path(given[0], run_name="__main__")
        assert program == "mlx-lattice" and cli.main(given) == 0

    for block in re.findall(r"^```sh\n(.*?)^```", text, re.M | re.S):
        for line in block.splitlines():
            run_line(line)
    assert float(re.search(r"mean +([\d.]+)%", capsys.readouterr().out)[1]) > 80
    names = run_line("python predict.py")
    assert names["scores"].shape == (len(names["scan"]), 3)
    resumed = mx.load("rooms/model.safetensors")
    Path("checkpoint.safetensors").unlink()
    run_line("python train.py 40")
    straight = mx.load("rooms/model.safetensors")
    assert all(mx.array_equal(resumed[name], straight[name]) for name in straight)
