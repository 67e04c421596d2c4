"""The distribution: one name, one version, one warning where another replaces it."""

import re
import subprocess
import sys
from pathlib import Path

import pytest

import mlx_lattice as ml
from mlx_lattice import cli, distribution

ROOT = Path(__file__).parents[2]
PROJECT = (ROOT / "pyproject.toml").read_text()


def test_the_name_is_ours_wherever_it_stands():
    assert re.findall('^name = "(.*)"$', PROJECT, re.M) == [distribution.NAME]
    assert distribution.NAME != distribution.ANOTHERS
    extras = re.findall(r'"([\w-]+)\[[\w,]+\]"', PROJECT)
    assert len(extras) >= 2 and set(extras) == {distribution.NAME}


def test_the_version_is_written_once(capsys):
    assert ml.__version__ == distribution.__version__
    assert re.fullmatch(r"\d+\.\d+\.\d+((a|b|rc)\d+)?", ml.__version__)
    assert re.search(r'^dynamic = \["version"\]$', PROJECT, re.M)
    assert cli.main(["--version"]) == 0
    assert capsys.readouterr().out == f"{distribution.NAME} {ml.__version__}\n"
    assert ml.backend_info().version == ml.__version__


def test_the_changelog_has_the_version():
    text = (ROOT / "CHANGELOG.md").read_text()
    newest = re.search(r"^## (\S+)", text, re.M)
    assert newest and newest[1] == ml.__version__


def recorded(folder: Path, *names: str) -> str:
    for name in names:
        (folder / name).mkdir(parents=True)
    return str(folder)


@pytest.mark.parametrize(
    "name, found",
    (
        ("mlx_lattice-0.6.3.dist-info", True),
        ("mlx_sparse_lattice-0.1.0.dist-info", False),
        ("mlx_lattice", False),
        ("mlx_lattice-extras-0.1.0.dist-info", False),
        ("mlx_lattice_more-0.1.0.dist-info", False),
    ),
)
def test_the_other_distribution_is_told_apart(name, found, tmp_path):
    folder = recorded(tmp_path / "a", name)
    empty = str(tmp_path / "none")
    got = distribution.others([empty, folder, folder])
    assert got == ([str(tmp_path / "a" / name)] if found else [])


def test_importing_beside_the_other_warns_once_and_says_what_to_do(tmp_path):
    folder = recorded(tmp_path, "mlx_lattice-0.6.3.dist-info")
    code = (
        f"import sys; sys.path += [{folder!r}, {str(ROOT)!r}]\n"
        "import mlx_lattice, mlx_lattice.cli\nfrom mlx_lattice import nn\n"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert done.stderr.count("the distribution mlx-lattice is installed too") == 1
    assert folder in done.stderr
    assert f"pip uninstall mlx-lattice {distribution.NAME}; then run" in done.stderr


def test_commands_are_of_the_checkout_or_of_the_name(monkeypatch):
    assert distribution.checkout() == ROOT
    here = "run in the project's folder: pip install "
    assert distribution.install() == f"{here}."
    assert distribution.install("cuda") == f'{here}".[cuda]"'
    monkeypatch.setattr(distribution, "checkout", lambda: None)
    name = distribution.NAME
    assert distribution.install("cpu") == f'run: pip install "{name}[cpu]"'
    assert distribution.install(options="-U") == f"run: pip install -U {name}"
