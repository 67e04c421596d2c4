"""doctor: a run, its files, its exit code, and how it keeps to its time."""

import json
import re
import sys
import threading
import time
from types import SimpleNamespace

import mlx.core as mx
import pytest
from doctor_cases import (  # noqa: F401 (fixtures)
    PLENTY,
    a_report,
    each_place,
    nothing_kept,
    short_list,
)

from metal import host
from mlx_lattice import cli
from mlx_lattice.inspect.doctor import (
    command,
    compare,
    machine,
    report,
    report_page,
)
from mlx_lattice.inspect.doctor.examine import Examination
from mlx_lattice.routes.plan import Plan


def test_a_run_and_its_files(small, place, tmp_path, capsys):
    code = command.run(tmp_path / "out", seconds=PLENTY, keep=False)
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
    assert command.run(tmp_path, quick=True, seconds=PLENTY) == 1
    out = capsys.readouterr().out
    assert "WRONG: " in out and re.search("off float64 by 5.0e-01|its proof", out)
    assert "wrong" in (tmp_path / "doctor.html").read_text()


@pytest.mark.parametrize("seconds", (0.5, 3.0, PLENTY))
def test_what_does_not_fit_into_its_time_is_left_out(seconds, small, monkeypatch):
    """An evaluation takes 0.05 s of a clock that nothing else moves."""
    evaluate, taken = mx.eval, []
    monkeypatch.setattr(mx, "eval", lambda *args: (evaluate(*args), taken.append(0.05)))
    monkeypatch.setattr(time, "perf_counter", lambda: sum(taken))
    found = Examination(quick=True, seconds=seconds)()
    whole = seconds == PLENTY
    assert (not found.skipped and None not in found.proofs) == whole
    assert ("left out" in str(found)) != whole
    assert all(skip.why for skip in found.skipped)
    # No part begins when nothing is left; the longest, which is not cut, takes 30
    # evaluations. All of them take 10 s.
    assert found.seconds > 6 if whole else found.seconds < seconds + 1.5


@pytest.mark.parametrize(
    "ticks, average, said",
    [
        ([(1000, 500), (1040, 536)], 9.0, None),
        ([(1000, 500), (1040, 520)], 0.0, "50%"),
        ([(0, 0), (0, 0)], 0.7, None),
        ([(0, 0), (0, 0)], 9.0, "100%"),
    ],
)
def test_a_busy_machine_is_said(ticks, average, said, monkeypatch):
    monkeypatch.undo()
    monkeypatch.setattr(machine, "_ticks", iter(ticks).__next__)
    monkeypatch.setattr(machine.os, "getloadavg", lambda: (average, 0, 0))
    monkeypatch.setattr(machine.os, "cpu_count", lambda: 2)
    found = machine.busy()
    assert found == (said and f"other programs use {said} of its processors' time")


@pytest.mark.parametrize("when", (0, 1))
def test_times_of_a_busy_machine_are_not_trusted(when, small, tmp_path, monkeypatch):
    answers = iter([None] * when + ["other programs use 90%"])
    monkeypatch.setattr(machine, "busy", lambda: next(answers))
    examination = Examination(quick=True, seconds=PLENTY)
    text = str(examination())
    assert "nothing wrong" not in text
    assert "no wrong results, times of a busy machine" in text.splitlines()[0]
    assert "The machine is busy: other programs use 90%" in text
    page = report_page.page(examination.report.as_dict())
    assert "nothing wrong" not in page and "The machine is busy" in page
    examination.report.machine["on_host"] = False
    with pytest.raises(ValueError, match="busy machine are not kept: other programs"):
        examination.keep()


def test_the_macos_that_metal_compiles_for_is_said():
    found = a_report()
    for target in (None, 150000):
        found.machine["metal_target"] = target
        said = f"__ENVIRONMENT_OS_VERSION_MIN_REQUIRED__ = {target}; " in str(found)
        assert said == (target is not None)
    host.require()
    with host.recording():
        assert machine.metal_target() == 260200


def test_a_kernel_that_hangs_is_given_up(tmp_path, capsys):
    examination = Examination(seconds=0.1)
    examination._tell("layers", 0, 1, "the one that hangs")
    left = threading.Event()
    codes = []

    def leave(code):
        codes.append(code)
        left.set()

    with command.given_up(examination, tmp_path / "doctor.json", leave):
        left.wait()
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
    assert command.run(tmp_path, quick=True, seconds=PLENTY) == 0
    assert "no page: writing a page needs jinja2" in capsys.readouterr().out
    assert (tmp_path / "doctor.json").exists()


def test_the_command(small, tmp_path, capsys):
    line = ["doctor", "--quick", "--seconds", "3600", "--out", str(tmp_path)]
    assert cli.main(line) == 0
    captured = capsys.readouterr()
    assert "nothing wrong" in captured.out and "proofs: " in captured.err
    assert (tmp_path / "doctor.json").exists()


@pytest.mark.parametrize("seconds", ("0", "-3", "1e9", "nan"))
def test_senseless_seconds_are_refused(seconds, capsys):
    assert cli.main(["doctor", "--seconds", seconds]) == 2
    assert "--seconds takes 1 to 3600" in capsys.readouterr().err
