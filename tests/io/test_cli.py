"""The command line, and backend_info."""

import ast
import json
import logging
import os
import re
import runpy
import shutil
import subprocess
import sys
import warnings
from pathlib import Path

import mlx.core as mx
import pytest

import mlx_lattice as ml
from mlx_lattice import cli, devices, settings
from mlx_lattice.commands import Result, bar, log
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
    code = cli.main(line.split())
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
        ("fly", "invalid choice: 'fly'"),
        ("segmnt a.ply", "; did you mean segment in place of segmnt?"),
        ("segment a.ply --modle b", "did you mean --model in place of --modle?"),
        ("evaluate a.ply --jsno", "did you mean --json in place of --jsno?"),
        ("explain --rows 5", "required: --channels"),
        (f"{EXPLAIN} --device m9", "invalid choice: 'm9' (choose from "),
        (f"{EXPLAIN} --device m4 --only nothing", "invalid choice: 'nothing'"),
        (f"{EXPLAIN} --device m4 --groups 3", "multiple of groups = 3"),
        (f"{EXPLAIN} --device m4 --kernel 0", "--kernel: must be 1 or more; got 0"),
        (f"{EXPLAIN} --edges {10**400}", "edges of a submanifold relation must be"),
        ("detect a.ply --model b --centre 0 inf 0", "--centre: must be finite"),
        (f"{EXPLAIN} --device m4 --stride a", "invalid int value: 'a'"),
        (f"{EXPLAIN} --device m4 --kernel 3 3", "--kernel takes 1 or 3 sizes; got 2"),
        (f"{EXPLAIN} --device m4 --edges -5", "--edges: must be 0 or more; got -5"),
        (f"{EXPLAIN} --device m4 --rows 99999999999999", "n_in must be at most 21474"),
        (
            f"{EXPLAIN} --device m4 --kind submanifold --stride 2",
            "keeps its rows: stride is 1",
        ),
        (f"{EXPLAIN} --device m4 --kind submanifold --rows 9 8", "and 9 -> 8. Kind"),
        (f"{EXPLAIN} --device m4 --rows 5 --edges 136", "0 to n_out * K = 135"),
        ("detect a.ply --model b --score nan", "--score: must be 0 to 1; got nan"),
        ("segment a.ply --model b --up -y", "a dash, write --option=value"),
        ("segment a.ply --model b --overlap 2", "--overlap needs --tile"),
        ("segment a.ply --model b --out c.pcd", "labels are written to .las"),
        ("decode a.b --model b --out c.stl", "must end in one of .glb"),
        ("decode a.b --model b --memory 9kg", "a number and a unit of B, kB"),
        ("models --path a", "--out and --path need NAME"),
        ("models nothing", "there are no published weights"),
        ("evaluate a.ply", "pass either --model"),
        ("convert a.pt b.c --library spconv", "must be a .safetensors file"),
        ("convert a.pt b --library spconv", "name the net with --model or --config"),
    ],
)
def test_bad_input_is_one_sentence_and_exit_code_2(line, text, capsys):
    code, out, err = command(line, capsys)
    assert (code, out) == (2, "")
    assert text in err and err.startswith("mlx-lattice")
    assert err.count("\n") == 1 and "Traceback" not in err


@pytest.mark.parametrize(
    "line, text",
    [
        (f"{EXPLAIN} --device m4 --only vec4", "features are float16, not float32"),
        ("segment none.ply --model none", "there is no folder none"),
        ("detect none.ply --model none", "there is no folder none"),
        ("evaluate none.ply --predicted a.ply", "there is no file none.ply"),
        ("run --as spconv none.py", "there is no file none.py"),
    ],
)
def test_a_failure_is_one_sentence_and_exit_code_1(line, text, capsys):
    code, out, err = command(line, capsys)
    assert (code, out) == (1, "") and text in err
    assert err.startswith("mlx-lattice") and err.count("\n") == 1
    code, out, err = command(f"-v {line}", capsys)
    assert code == 1 and "Traceback" in err and text in err.splitlines()[-1]


def test_an_error_in_a_user_s_file_has_its_traceback(tmp_path, capsys, monkeypatch):
    code = tmp_path / "my_net.py"
    code.write_text("def run(parsed):\n    raise ValueError('mine')\n")
    monkeypatch.setattr(cli, "_call", runpy.run_path(str(code))["run"])
    found, out, err = command(f"segment a.ply --model b --code {code}", capsys)
    assert (found, out) == (1, "") and 'my_net.py", line 2' in err
    assert err.endswith("\nmlx-lattice segment: mine\n")


def test_what_is_interrupted_ends_in_one_line(capsys, monkeypatch):
    def stopped(given):
        raise KeyboardInterrupt

    monkeypatch.setattr(cli, "_info", stopped)
    code, out, err = command("info", capsys)
    assert (code, out, err) == (130, "", "mlx-lattice info: interrupted\n")


# Help, JSON, messages, completion.


def actions():
    """Each option of each command."""
    whole = cli.parser()
    commands = whole._subparsers._group_actions[0].choices
    return [
        (name, action)
        for name, each in {"": whole, **commands}.items()
        for action in each._actions
        if action.dest not in ("help", "command")
    ]


def test_every_option_has_help_and_its_default():
    seen = actions()
    assert len(seen) > 100
    for name, action in seen:
        where = f"{name} {action.dest}"
        assert action.help, where
        takes_value = action.option_strings and action.nargs != 0
        if takes_value and not action.required and action.dest != "print_completion":
            assert "(default: " in action.help or action.dest == "model", where


def test_every_command_has_a_description_and_an_example(capsys):
    commands = cli.parser()._subparsers._group_actions[0].choices
    page = (Path(__file__).parents[2] / "docs" / "cli.md").read_text()
    assert re.findall(r"^## (\w+)$", page, re.M) == list(commands)
    for name, each in commands.items():
        assert f"<!-- options {name} -->" in page
        assert each.description.endswith("."), name
        (line,) = re.findall(r"^example:\n  mlx-lattice (.*)$", each.epilog, re.M)
        assert cli.parser().parse_args(line.split()).command == name
    assert command("", capsys) == command("--help", capsys)
    code, out, _ = command("", capsys)
    assert code == 0 and all(f"\n    {name} " in out for name in commands)


@pytest.mark.parametrize(
    "line, key",
    (
        ("info", "backends"),
        (f"{EXPLAIN} --device m4 --edges 9", "rejected"),
        ("models spunet.scannet20.pointcept", "name"),
    ),
)
def test_json_is_one_document(line, key, capsys):
    code, out, err = command(f"{line} --json", capsys)
    assert code == 0 and key in json.loads(out) and err == ""
    text = command(line, capsys)[1]
    assert text != out and not text.startswith("{")


def test_json_and_what_other_code_prints(capsys, monkeypatch):
    """What a user's net prints goes to stderr."""

    def prints(parsed):
        print("hello")
        return Result("text", {"a": 1})

    monkeypatch.setattr(cli, "_info", prints)
    code, out, err = command("info --json", capsys)
    assert (code, json.loads(out), err) == (0, {"a": 1}, "hello\n")


@pytest.mark.parametrize("before", (True, False))
@pytest.mark.parametrize("option, notes", (("--quiet", 0), ("", 1), ("-v", 2)), ids=str)
def test_how_much_is_written(option, notes, before, capsys, monkeypatch):
    def noisy(parsed):
        log = logging.getLogger("mlx_lattice")
        log.debug("a detail")
        log.info("a note")
        warnings.warn("mind this", ml.LatticeWarning, stacklevel=2)
        return Result("the result", {})

    monkeypatch.setattr(cli, "_info", noisy)
    shown, level = warnings.showwarning, logging.getLogger("mlx_lattice").level
    line = f"{option} info" if before else f"info {option}"
    code, out, err = command(line, capsys)
    assert (code, out) == (0, "the result\n")
    assert "mlx-lattice info: warning: mind this\n" in err and ".py" not in err
    assert ("a note" in err) + ("a detail" in err) == notes
    # The process is left as it was.
    assert warnings.showwarning is shown
    log = logging.getLogger("mlx_lattice")
    assert (log.level, log.handlers) == (level, [])


def test_bars(monkeypatch, capsys):
    """They show on a terminal, unless --quiet is given or tqdm is missing."""
    with bar(3) as shown:
        shown.update()
    assert capsys.readouterr().err == ""
    monkeypatch.setattr(sys.stderr, "isatty", lambda: True)
    for level, is_shown in (("INFO", True), ("WARNING", False)):
        monkeypatch.setattr(log, "level", getattr(logging, level))
        log.manager._clear_cache()
        with bar(3, "tile") as shown:
            shown.update()
        assert ("tile" in capsys.readouterr().err) == is_shown
    monkeypatch.setitem(sys.modules, "tqdm.auto", None)
    with bar(3) as shown:
        shown.set_postfix(loss=1)
        shown.update()
    assert capsys.readouterr().err == ""


def test_completion(monkeypatch, capsys):
    pytest.importorskip("shtab")
    for shell, name in (
        ("bash", "-F _shtab_mlx_lattice"),
        ("zsh", "#compdef mlx-lattice"),
    ):
        code, out, err = command(f"--print-completion {shell}", capsys)
        assert (code, err) == (0, "") and name in out
        assert "--texture-model" in out and "segment" in out
        if shutil.which(shell):  # it is valid in its shell
            subprocess.run([shell, "-n"], input=out, text=True, check=True)
    monkeypatch.setitem(sys.modules, "shtab", None)
    code, out, err = command("--print-completion zsh", capsys)
    assert (code, out) == (1, "") and err.count("\n") == 1
    assert "shell completion needs shtab; " in err and "[completion]" in err


def test_every_warning_has_the_category_of_the_package():
    root = Path(ml.__file__).parent
    texts = {path: path.read_text() for path in root.rglob("*.py")}
    found = [path for path in texts if re.search(r"warn\(|print\(", texts[path])]
    assert len(found) > 10
    for path in found:
        for node in ast.walk(ast.parse(texts[path])):
            if isinstance(node, ast.Call) and ast.unparse(node.func) == "warnings.warn":
                given = [ast.unparse(argument) for argument in node.args[1:]]
                assert given == ["LatticeWarning"], f"{path.name}:{node.lineno}"
            is_print = isinstance(node, ast.Call) and ast.unparse(node.func) == "print"
            assert not is_print or path.name in ("cli.py", "demo.py"), path.name


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
    assert (code, out) == (1, "")
    assert "/proc takes no new files (No such file or directory)" in err
    assert err.count("\n") == 1


@pytest.mark.parametrize(
    "line, missing, extra",
    (
        ("segment scan.ply --model net", "matplotlib", "demo"),
        ("detect scan.ply --model net", "matplotlib", "demo"),
        ("demo", "sklearn", "demo"),
        ("decode a.safetensors --model net", "xatlas", "mesh"),
        ("segment scan.ply --model net", "k3d", "viz"),
        ("view scan.ply", "k3d", "viz"),
    ),
)
def test_what_a_command_ends_with_is_found_missing_first(
    line, missing, extra, capsys, monkeypatch
):
    monkeypatch.setitem(sys.modules, missing, None)
    for name in [name for name in sys.modules if name.startswith("mlx_lattice.")]:
        package, _, module = name.rpartition(".")
        if module in ("segment", "detect", "decode", "demo", "view") or ".mesh" in name:
            monkeypatch.delitem(sys.modules, name)
            monkeypatch.delattr(sys.modules.get(package), module, raising=False)
    code, out, err = command(line, capsys)
    assert (code, out) == (1, "") and f"needs {missing}; " in err
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
    page = Path(__file__).parents[2] / "docs" / "environment.md"
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
