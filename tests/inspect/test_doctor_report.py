"""doctor: what its report says, keeps to itself, and compares."""

import json

import pytest
from doctor_cases import (  # noqa: F401 (fixtures)
    PLENTY,
    a_report,
    nothing_kept,
    short_list,
)

from mlx_lattice import cli, devices
from mlx_lattice.inspect.doctor import machine, report_page
from mlx_lattice.inspect.doctor.examine import Examination
from mlx_lattice.routes.plan import Plan


def test_nothing_of_the_owner_is_in_the_report(small, tmp_path, monkeypatch):
    monkeypatch.setattr(machine.getpass, "getuser", lambda: "jane.doe")
    monkeypatch.setattr(machine.socket, "gethostname", lambda: "janes-mac.local")
    monkeypatch.setenv("MLX_LATTICE_CACHE", str(tmp_path / "jane.doe"))
    machine._private.cache_clear()

    def fail(plan, *given):
        raise RuntimeError(
            "jane.doe on janes-mac: /Users/jane.doe/Secret plan/k.metal: and ~/x/y.h, "
            r"and C:\Users\jane.doe\z.cu"
        )

    monkeypatch.setattr(Plan, "__call__", fail)
    try:
        found = Examination(quick=True, seconds=PLENTY)()
        text = json.dumps(found.as_dict()) + str(found)
        text += report_page.page(found.as_dict())
    finally:
        machine._private.cache_clear()
    assert found.wrong
    for private in ("jane", "doe", "Users", "~/x", "Secret", str(tmp_path)):
        assert private not in text, private
    assert "k.metal" in text and "z.cu" in text


def test_scrubbing_leaves_what_is_said():
    said = "shape (3, 4) is not (4, 3): a/b = 0.5; float16, 3x3x3, and/or"
    assert machine.scrubbed(said) == said


def test_variables_that_times_hang_on_are_said(monkeypatch):
    monkeypatch.setenv("MLX_LATTICE_THREADS", "1")
    monkeypatch.setenv("MLX_LATTICE_CACHE", "/home/jane")
    found = machine.facts(devices.current())["environment"]
    assert found["MLX_LATTICE_THREADS"] == "1" and "MLX_LATTICE_CACHE" not in found


def test_the_table_has_prediction_and_publication():
    line = next(li for li in str(a_report()).splitlines() if "shell 64" in li)
    for text in ("2.000", "50%", "0.830 to 0.970", "500 us", "1.572", "1e-04"):
        assert text in line.replace("0.5 ms", "500 us")
    assert "published" in report_page.page(a_report().as_dict())
    wrong = a_report(good=False, ms=None, error=None, tflops=None, note="Error: <b>")
    assert "WRONG failed" in str(wrong) and "Error: <b>" in str(wrong)
    assert "Error: &lt;b&gt;" in report_page.page(wrong.as_dict())


def test_two_reports_are_compared(tmp_path, capsys):
    a, b = a_report(), a_report(ms=1.0, good=False, error=0.5)
    a.machine = dict(a.machine, chip="Apple M3 Max")
    paths = [tmp_path / "a.json", tmp_path / "b.json"]
    for found, path in zip((a, b), paths, strict=True):
        found.save(path)
    assert cli.main(["doctor", "--compare", *map(str, paths)]) == 0
    out = capsys.readouterr().out
    assert "chip: Apple M3 Max | " in out
    line = next(li for li in out.splitlines() if "sorted_implicit_gemm" in li)
    assert line.split()[-3:] == ["2.000", "1.000", "2.00"]
    assert "wrong in b only: forward of shell 64" in out
    assert "MLX matmul float16: 6 | 6 TFLOP/s" in out


@pytest.mark.parametrize(
    "text, said",
    [
        ("{}", "is no doctor.json of mlx_lattice"),
        ("nonsense", "is no doctor.json"),
        ("[1]", "is no doctor.json"),
        ('{"format": "mlx_lattice.doctor", "version": 99}', "has version 99"),
    ],
)
def test_other_files_are_refused(text, said, tmp_path, capsys):
    path = tmp_path / "a.json"
    path.write_text(text)
    assert cli.main(["doctor", "--compare", str(path), str(path)]) == 2
    assert said in capsys.readouterr().err
