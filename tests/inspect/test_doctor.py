"""doctor: a run, its files, its exit code, and how it keeps to its time."""

import json
import re
import subprocess
import sys
import threading
from types import SimpleNamespace

import mlx.core as mx
import pytest
from doctor_cases import (  # noqa: F401 (fixtures)
    a_report,
    each_place,
    nothing_kept,
    short_list,
)

from mlx_lattice import cli
from mlx_lattice.inspect.doctor import command, compare, report
from mlx_lattice.inspect.doctor.examine import Examination
from mlx_lattice.routes.plan import Plan


def test_a_run_and_its_files(small, place, tmp_path, capsys):
    code = command.run(tmp_path / "out", seconds=240, keep=False)
    out = capsys.readouterr().out
    assert code == 0 and "nothing wrong" in out
    found = json.loads((tmp_path / "out" / "doctor.json").read_text())
    assert found == compare.read(tmp_path / "out" / "doctor.json")
    assert (found["format"], found["version"]) == ("mlx_lattice.doctor", 1)
    assert found["wrong"] == [] and found["unfinished"] is None
    assert found["device"]["name"] == place.name
    assert found["machine"]["on_host"] == (place.name == "metal-host")
    assert ("mean nothing" in out) == (place.name == "metal-host")
    assert len(found["proofs"]["kernels"]) == 8 and found["layers"]
    assert {r["unit"] for r in found["rates"]} == {"TFLOP/s", "GB/s"}
    assert "of matmul" in out or place.backend == "cpu"
    pytest.importorskip("jinja2")
    page = (tmp_path / "out" / "doctor.html").read_text()
    assert not re.search(r"https?:|@import|url\(", page)
    for row in found["layers"]:
        assert row["layer"] in page and row["route"] in page


def test_a_wrong_kernel_makes_the_exit_code_1(small, tmp_path, capsys, monkeypatch):
    called = Plan.__call__
    monkeypatch.setattr(
        Plan, "__call__", lambda plan, *given: called(plan, *given) * 1.5
    )
    assert command.run(tmp_path, quick=True, seconds=60) == 1
    out = capsys.readouterr().out
    assert "WRONG: " in out and re.search("off float64 by 5.0e-01|its proof", out)
    assert "wrong" in (tmp_path / "doctor.html").read_text()


@pytest.mark.parametrize("seconds", (1.0, 3.0))
def test_it_takes_no_longer_than_it_may(seconds, tmp_path):
    """The whole list, far too long for it: what does not fit is left out."""
    if mx.cuda.is_available() and seconds < 3:
        pytest.skip("one kernel of CUDA takes seconds to compile")
    examination = Examination(quick=True, seconds=seconds)
    found = examination()
    most = 4 if mx.cuda.is_available() else 2
    assert found.seconds < most * seconds + 1, "one part cannot be cut"
    assert found.skipped or None in found.proofs
    said = str(found)
    assert "left out" in said
    for skip in found.skipped:
        assert skip.why


def test_a_kernel_that_hangs_is_given_up(tmp_path, capsys):
    examination = Examination(seconds=0.1)
    examination._tell("layers", 0, 1, "the one that hangs")
    left = threading.Event()
    codes = []

    def leave(code):
        codes.append(code)
        left.set()

    with command.given_up(examination, tmp_path / "doctor.json", leave):
        assert left.wait(20)
    assert codes == [command.HUNG]
    assert "in layers: the one that hangs" in capsys.readouterr().err
    found = compare.read(tmp_path / "doctor.json")
    assert found["unfinished"] == "layers: the one that hangs"
    assert "Stopped in: layers" in report.text_of(found)
    with command.given_up(examination, tmp_path / "x.json", codes.append, grace=100):
        pass
    assert codes == [command.HUNG] and not (tmp_path / "x.json").exists()


def test_the_report_is_written_while_it_runs(tmp_path):
    examination = SimpleNamespace(report=a_report())
    examination.report.unfinished = "proofs: vec4"
    heard = []
    path = tmp_path / "doctor.json"
    watch = command._saving(lambda *told: heard.append(told), examination, path)
    watch("proofs", 0, 9, "vec4")
    assert heard == [("proofs", 0, 9, "vec4")]
    assert compare.read(path)["unfinished"] == "proofs: vec4"


def test_progress_on_no_terminal_is_a_line_a_part(capsys):
    with command.progress() as watch:
        for at in range(3):
            watch("proofs", at, 3, "name")
        watch("layers", 0, 1, "name")
    assert capsys.readouterr().err == "proofs: 3\nlayers: 1\n"


def test_it_needs_neither_rich_nor_jinja2(small, tmp_path, monkeypatch, capsys):
    for name in ("rich", "rich.progress", "rich.console", "jinja2"):
        monkeypatch.setitem(sys.modules, name, None)
    assert command.run(tmp_path, quick=True, seconds=30) == 0
    assert "no page: writing a page needs jinja2" in capsys.readouterr().out
    assert (tmp_path / "doctor.json").exists()


def test_the_command(tmp_path):
    line = [sys.executable, "-m", "mlx_lattice.cli", "doctor", "--quick"]
    # A single kernel of CUDA may take seconds to compile.
    line += ["--seconds", "30" if mx.cuda.is_available() else "3"]
    line += ["--out", str(tmp_path)]
    done = subprocess.run(line, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert "nothing wrong" in done.stdout and "proofs: " in done.stderr
    assert (tmp_path / "doctor.json").exists()


@pytest.mark.parametrize("seconds", ("0", "-3", "1e9", "nan"))
def test_senseless_seconds_are_refused(seconds, capsys):
    assert cli.main(["doctor", "--seconds", seconds]) == 2
    assert "--seconds takes 1 to 3600" in capsys.readouterr().err
