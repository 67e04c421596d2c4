"""Names of libraries: install, uninstall, replacement, and the command run."""

import importlib
import subprocess
import sys
import textwrap

import pytest
from torch_scenes import torch

import mlx_lattice
from mlx_lattice import compat
from mlx_lattice.cli import main

LIBRARIES = "spconv", "flex_gemm", "flash_attn"


@pytest.fixture(autouse=True)
def clean():
    """Leave no names behind."""
    yield
    compat.uninstall(*LIBRARIES)


def python(code: str) -> str:
    """What a new process prints."""
    run = [sys.executable, "-c", textwrap.dedent(code)]
    return subprocess.run(run, check=True, capture_output=True, text=True).stdout


def test_importing_the_package_imports_neither_torch_nor_compat():
    code = """
    import sys, mlx_lattice
    print("torch" in sys.modules, "mlx_lattice.compat" in sys.modules)
    from mlx_lattice import compat
    print("torch" in sys.modules)
    """
    assert python(code).split() == ["False"] * 3


def test_installed_names_are_found_by_every_kind_of_import():
    compat.install("spconv")
    compat.install("spconv")  # does nothing
    import spconv.pytorch as spconv
    from spconv.core import ConvAlgo
    from spconv.pytorch import functional as fsp
    from spconv.pytorch.conv import SparseConvolution
    from spconv.pytorch.modules import SparseModule, is_spconv_module

    names = "constants", "pytorch.utils", "pytorch.pool", "pytorch.core", "modules"
    for name in names:
        importlib.import_module(f"spconv.{name}")
    layer = spconv.SubMConv3d(2, 3, 3, algo=ConvAlgo.Native)
    assert isinstance(layer, SparseConvolution) and isinstance(layer, SparseModule)
    assert is_spconv_module(layer) and callable(fsp.sparse_add)
    assert spconv is mlx_lattice.compat.spconv.pytorch
    version = importlib.import_module("spconv").__version__
    assert float(version[2:]) >= 2.2 and len(version.split(".")) == 3


def test_the_other_libraries():
    compat.install("flex_gemm", "flash_attn")
    import flash_attn
    import flex_gemm
    from flash_attn.flash_attn_interface import flash_attn_varlen_func

    assert flash_attn_varlen_func is flash_attn.flash_attn_varlen_func
    assert callable(flex_gemm.ops.spconv.sparse_submanifold_conv3d)
    assert callable(flex_gemm.ops.grid_sample.grid_sample_3d)


def test_what_is_missing_is_an_import_error():
    compat.install("spconv")
    with pytest.raises(ImportError):
        importlib.import_module("spconv.pytorch.quantization")
    with pytest.raises(ImportError):
        exec("from spconv.pytorch import NoSuchLayer")


def test_an_unknown_library():
    with pytest.raises(ValueError, match="no library 'torch_scatter'; it has spconv"):
        compat.install("torch_scatter")


@pytest.fixture
def another(tmp_path, monkeypatch):
    """A library named flash_attn that is installed."""
    (tmp_path / "flash_attn").mkdir()
    text = "mine = False\n"
    (tmp_path / "flash_attn" / "__init__.py").write_text(text)
    (tmp_path / "flash_attn" / "inner.py").write_text(text)
    monkeypatch.syspath_prepend(str(tmp_path))
    yield tmp_path
    for name in ("flash_attn", "flash_attn.inner"):
        sys.modules.pop(name, None)


def test_an_installed_library_is_not_replaced_unless_told(another):
    with pytest.raises(ImportError, match=r"installed at .*replace=True.*--replace"):
        compat.install("flash_attn")
    assert "flash_attn" not in sys.modules
    importlib.import_module("flash_attn.inner")
    with pytest.raises(ImportError, match="imported already, from"):
        compat.install("flash_attn")
    compat.install("flash_attn", replace=True)
    import flash_attn

    assert not hasattr(flash_attn, "mine")
    assert "flash_attn.inner" not in sys.modules
    compat.uninstall("flash_attn")
    assert importlib.import_module("flash_attn").mine is False


def test_uninstall_leaves_other_libraries(another):
    importlib.import_module("flash_attn")
    compat.uninstall("flash_attn")
    assert "flash_attn" in sys.modules


def test_a_folder_without_code_is_no_library(tmp_path, monkeypatch):
    (tmp_path / "flash_attn").mkdir()
    monkeypatch.syspath_prepend(str(tmp_path))
    compat.install("flash_attn")
    import flash_attn

    assert callable(flash_attn.flash_attn_func)


def test_without_torch_a_sentence_says_what_to_install():
    code = """
    import sys
    sys.modules["torch"] = None
    from mlx_lattice import compat
    try:
        compat.install("spconv")
    except ImportError as error:
        print(error)
    """
    assert "compat's spconv needs torch" in python(code)


SCRIPT = """
import multiprocessing, os, subprocess, sys
import spconv.pytorch as spconv

CODE = "import flash_attn; print(flash_attn.__file__)"


def name(_):
    import spconv.pytorch
    return spconv.pytorch.__name__


if __name__ == "__main__":
    print(spconv.SubMConv3d.__module__, *sys.argv[1:])
    print(os.path.dirname(os.path.abspath(__file__)) == sys.path[0])
    with multiprocessing.get_context("spawn").Pool(1) as pool:
        print(*pool.map(name, [0]))
    child = [sys.executable, "-c", CODE]
    print(subprocess.run(child, capture_output=True, text=True, check=True).stdout)
    if "raise" in sys.argv:
        raise ValueError("of the script")
    sys.exit(len(sys.argv))
"""


def run_command(path, *arguments, options=()):
    names = "spconv,flash_attn"
    command = [sys.executable, "-m", "mlx_lattice", "run", "--as", names, *options]
    return subprocess.run(
        [*command, str(path), *arguments], capture_output=True, text=True
    )


@pytest.mark.native
def test_the_command_runs_a_script_and_has_its_exit_code(tmp_path):
    script = tmp_path / "train.py"
    script.write_text(SCRIPT)
    done = run_command(script, "--epochs", "3")
    assert done.returncode == 3, done.stderr
    lines = done.stdout.split("\n")
    assert lines[0] == "mlx_lattice.compat.spconv.pytorch.conv --epochs 3"
    assert lines[1] == "True"
    assert lines[2] == "mlx_lattice.compat.spconv.pytorch"
    assert "mlx_lattice/compat/flash_attn.py" in lines[3]


@pytest.mark.native
def test_an_error_of_the_script_has_its_own_traceback(tmp_path):
    (tmp_path / "bad.py").write_text("import spconv\n\n\nraise ValueError('of mine')\n")
    done = run_command(tmp_path / "bad.py")
    assert done.returncode == 1
    assert "bad.py" in done.stderr and "ValueError: of mine" in done.stderr
    assert "runpy" not in done.stderr and "commands/run.py" not in done.stderr


def run_here(monkeypatch, *arguments) -> int:
    """The command in this process."""
    monkeypatch.setattr(sys, "path", sys.path[:])
    return main(["run", *map(str, arguments)])


def test_the_command_in_this_process(tmp_path, monkeypatch, capsys):
    script, argv = tmp_path / "show.py", sys.argv
    script.write_text("import sys, flash_attn\nprint(*sys.argv[1:])\n")
    assert run_here(monkeypatch, "--as", "flash_attn", script, "--as", "x", "-h") == 0
    assert capsys.readouterr().out == "--as x -h\n"
    assert sys.argv is argv
    assert run_here(monkeypatch, "--as", "flash_attn", tmp_path / "none.py") == 1
    assert "there is no file" in capsys.readouterr().err
    assert run_here(monkeypatch, "--as", "flash", script) == 2
    assert "no library 'flash'" in capsys.readouterr().err


def test_the_command_does_not_replace_unless_told(tmp_path, monkeypatch, capsys):
    (tmp_path / "flash_attn.py").write_text("print('theirs')\n")
    script = tmp_path / "show.py"
    script.write_text("import flash_attn\nprint(flash_attn.__name__)\n")
    assert run_here(monkeypatch, "--as", "flash_attn", script) == 1
    assert "--replace" in capsys.readouterr().err
    assert run_here(monkeypatch, "--as", "flash_attn", "--replace", script) == 0
    assert capsys.readouterr().out == "mlx_lattice.compat.flash_attn\n"


def test_a_module_by_its_name(tmp_path, monkeypatch, capsys):
    folder = tmp_path / "net_of_mine"
    folder.mkdir()
    (folder / "__init__.py").write_text("")
    text = "import sys, flash_attn\nprint(__package__, sys.argv[1:])\n"
    (folder / "train.py").write_text(text)
    monkeypatch.chdir(tmp_path)
    assert (
        run_here(monkeypatch, "--as", "flash_attn", "-m", "net_of_mine.train", "7") == 0
    )
    assert capsys.readouterr().out == "net_of_mine ['7']\n"


def test_torch_is_an_extra_of_the_package():
    assert torch.__version__ and compat.LIBRARIES["spconv"]["spconv"] == "spconv"
