"""The command line, and backend_info."""

import os
import re
import subprocess
import sys
from pathlib import Path

import mlx.core as mx
import pytest

import mlx_lattice as ml
from mlx_lattice import cli, devices, settings
from mlx_lattice.problem import PASSES

EXPLAIN = "explain --kernel 3 --channels 64 64 --rows 500000 --dtype float16"


@pytest.fixture(autouse=True)
def no_variables(monkeypatch):
    for name in settings.VARIABLES:
        monkeypatch.setitem(settings.environment, name, None)


def test_the_package_is_run():
    """``python -m mlx_lattice`` is the command, its exit codes too."""
    line = [sys.executable, "-m", "mlx_lattice"]
    done = subprocess.run([*line, "--version"], capture_output=True, text=True)
    assert done.returncode == 0 and done.stdout.endswith(f" {ml.__version__}\n")
    done = subprocess.run([*line, "nothing"], capture_output=True, text=True)
    assert done.returncode == 2 and done.stderr.startswith("mlx-lattice: ")


def command(line, capsys):
    """Exit code, output and errors of a command line."""
    try:
        code = cli.main(line.split())
    except SystemExit as end:
        code = end.code
    captured = capsys.readouterr()
    return code, captured.out, captured.err


def test_explain_prints_what_explain_gives(capsys):
    line = f"{EXPLAIN} --device m5-max --edges 8000000"
    code, out, _ = command(line, capsys)
    problem = ml.Problem.forward(
        c_in=64, c_out=64, n_in=500_000, dtype="float16", edges=8_000_000
    )
    assert code == 0
    assert out == f"{ml.explain(problem, device='m5-max')}\n"


@pytest.mark.parametrize(
    "options, text",
    [
        ("--pass weight_grad", "weight_grad: submanifold 3x3x3"),
        ("--device h200 --kind forward --stride 2", "forward 3x3x3, stride 2"),
        ("--device cpu --only gather_gemm_scatter", "MLX operations): forced"),
        ("--bits 4", "int4 weight"),
        ("--groups 64", "64 groups"),
        ("--dims 2 --kernel 3 5", "3x5"),
        ("--rows 500000 100000", "500,000 -> 100,000 rows"),
    ],
)
def test_explain_takes_every_fact(options, text, capsys):
    device = "" if "--device" in options else "--device m4"
    code, out, err = command(f"{EXPLAIN} {device} {options}", capsys)
    assert code == 0, err
    assert text in out


@pytest.mark.parametrize(
    "line, text",
    [
        ("", "the following arguments are required: command"),
        ("fly", "invalid choice: 'fly'"),
        ("explain --rows 5", "required: --channels"),
        (f"{EXPLAIN} --device m9", "no device profile is named 'm9'"),
        (f"{EXPLAIN} --device m4 --only nothing", "no route is named 'nothing'"),
        (f"{EXPLAIN} --device m4 --only vec4", "features are float16, not float32"),
        (f"{EXPLAIN} --device m4 --groups 3", "multiple of groups = 3"),
        (f"{EXPLAIN} --device m4 --kernel 0", "sizes must be positive"),
        (f"{EXPLAIN} --device m4 --kernel 3 3", "--kernel takes 1 or 3 sizes; got 2"),
        (f"{EXPLAIN} --device m4 --edges -5", "rows and edges 0 or more"),
        (f"{EXPLAIN} --device m4 --rows 99999999999999", "n_in must be at most 21474"),
        (
            f"{EXPLAIN} --device m4 --kind submanifold --stride 2",
            "keeps its rows: stride is 1",
        ),
        (f"{EXPLAIN} --device m4 --kind submanifold --rows 9 8", "and 9 -> 8. Kind"),
        (f"{EXPLAIN} --device m4 --rows 5 --edges 136", "0 to n_out * K = 135"),
    ],
)
def test_bad_input_is_one_sentence_and_exit_code_2(line, text, capsys):
    code, out, err = command(line, capsys)
    assert (code, out) == (2, "")
    assert text in err and err.startswith("mlx-lattice")
    assert err.count("\n") == 1 and "Traceback" not in err


def test_what_is_interrupted_ends_in_one_line(capsys, monkeypatch):
    def stopped(given):
        raise KeyboardInterrupt

    monkeypatch.setattr(cli, "_doctor", stopped)
    code, out, err = command("doctor", capsys)
    assert (code, out, err) == (130, "", "mlx-lattice doctor: interrupted\n")


@pytest.mark.parametrize("line", ("info", "explain --help"))
def test_a_pipe_that_nobody_reads_ends_quietly(line):
    reader, writer = os.pipe()
    os.close(reader)
    whole = [sys.executable, "-m", "mlx_lattice.cli", *line.split()]
    done = subprocess.run(whole, stdout=writer, stderr=subprocess.PIPE)
    os.close(writer)
    # argparse itself passes over that its help was not read.
    assert done.stderr == b"" and done.returncode in (141, 0 if "help" in line else 141)


@pytest.mark.skipif(not os.path.isdir("/proc/self"), reason="a folder without files")
@pytest.mark.parametrize(
    "line",
    [
        "doctor --out /proc/a",
        "demo --out /proc/a",
        "segment none.ply --model none --out /proc/a/b",
        "detect none.ply --model none --out /proc/a",
        "decode none.safetensors --model none --out /proc/a/asset.glb",
        "generate --image-tokens none --model none --out /proc/a.safetensors",
        "convert none.pt /proc/a --library spconv --model spunet",
    ],
)
def test_places_that_take_no_files_are_found_first(line, capsys):
    if line.startswith("decode"):
        pytest.importorskip("fast_simplification")  # its extra is looked for first
    code, out, err = command(line, capsys)
    assert (code, out) == (2, "")
    assert "/proc takes no new files (No such file or directory)" in err
    assert err.count("\n") == 1


@pytest.mark.parametrize(
    "line, missing, extra",
    (
        ("segment scan.ply --model net", "matplotlib", "demo"),
        ("detect scan.ply --model net", "matplotlib", "demo"),
        ("demo", "sklearn", "demo"),
        ("decode a.safetensors --model net", "xatlas", "mesh"),
    ),
)
def test_what_a_command_ends_with_is_found_missing_first(
    line, missing, extra, capsys, monkeypatch
):
    monkeypatch.setitem(sys.modules, missing, None)
    for name in [name for name in sys.modules if name.startswith("mlx_lattice.")]:
        package, _, module = name.rpartition(".")
        if module in ("segment", "detect", "decode", "demo") or ".mesh" in name:
            monkeypatch.delitem(sys.modules, name)
            monkeypatch.delattr(sys.modules.get(package), module, raising=False)
    code, out, err = command(line, capsys)
    assert (code, out) == (2, "") and f"needs {missing}; " in err
    assert f'".[{extra}]"' in err and err.count("needs") == 1


# backend_info.


def test_info_prints_backend_info(capsys):
    code, out, _ = command("info", capsys)
    assert (code, out) == (0, f"{ml.backend_info()}\n")


def test_backend_info_says_what_is_here():
    info = ml.backend_info()
    assert info.mlx == mx.__version__
    assert info.device == devices.current()
    assert set(info.backends) == {"portable", "metal", "cuda", "cpu"}
    assert set(info.routes) == set(PASSES)
    for names in info.routes.values():
        assert "gather_gemm_scatter" in names
    assert not info.forced and not info.environment and not info.tuning
    text = str(info)
    for word in (mx.__version__, info.device.name, "routes.json", "none set"):
        assert word in text


def test_every_variable_of_the_docs_is_listed(monkeypatch):
    page = Path(__file__).parents[2] / "docs" / "index.md"
    names = set(re.findall(r"^\| `(MLX_LATTICE_\w+)", page.read_text(), re.MULTILINE))
    assert names == set(settings.VARIABLES)
    monkeypatch.setitem(settings.environment, "MLX_LATTICE_THREADS", "1")
    assert "MLX_LATTICE_THREADS=1" in str(ml.backend_info())


def test_overrides_in_force_are_listed(monkeypatch, tmp_path):
    monkeypatch.setitem(
        ml.settings.environment, "MLX_LATTICE_ROUTE", "forward=grouped_gemm"
    )
    with ml.cache(tmp_path), ml.tune(), ml.routes.only("weight_grad=explicit_gemm"):
        info = ml.backend_info()
    assert info.environment == {"MLX_LATTICE_ROUTE": "forward=grouped_gemm"}
    assert info.forced == {"forward": "grouped_gemm", "weight_grad": "explicit_gemm"}
    assert info.tuning and info.cache == str(tmp_path / "routes.json")
    assert "forward=grouped_gemm, weight_grad=explicit_gemm" in str(info)
