"""The workflows: machines, Pythons, the doctor, and one way to publish."""

import re
from pathlib import Path

import pytest

from mlx_lattice import distribution

yaml = pytest.importorskip("yaml")

ROOT = Path(__file__).parents[2]
FOLDER = ROOT / ".github" / "workflows"
PROJECT = (ROOT / "pyproject.toml").read_text()
FILES = sorted(FOLDER.glob("*.yml"))
EVERY_PYTHON = ["3.10", "3.11", "3.12", "3.13", "3.14"]


def read(name: str) -> dict:
    workflow = yaml.safe_load((FOLDER / f"{name}.yml").read_text())
    workflow["on"] = workflow.pop(True)  # YAML's word for true
    return workflow


def steps(job: dict) -> list[dict]:
    return job.get("steps", [])


def test_these_are_the_workflows():
    assert [path.stem for path in FILES] == ["release", "suite", "test"]


@pytest.mark.parametrize("path", FILES, ids=lambda p: p.stem)
def test_actions_are_pinned_and_rights_are_few(path):
    workflow = read(path.stem)
    assert workflow["permissions"] == {"contents": "read"}
    for name, job in workflow["jobs"].items():
        assert job.get("permissions") in (None, {"id-token": "write"}), name
        for step in steps(job):
            # What publishes follows its maintainers' branch, as they ask.
            pin = step.get("uses", "@" + "0" * 40).partition("@")[2]
            assert re.fullmatch(r"[0-9a-f]{40}", pin) or name == "publish", step
            if "checkout" in step.get("uses", ""):
                assert step["with"] == {"persist-credentials": False}


@pytest.mark.parametrize("path", FILES, ids=lambda p: p.stem)
def test_no_host_and_no_secret_is_named(path):
    text = path.read_text()
    assert "://" not in text and "secrets." not in text
    assert not re.search(r"\b[\w-]+\.(org|io|com|dev)\b", text)


def test_the_suite_runs_on_every_system():
    jobs = read("test")["jobs"]
    matrix = jobs["hosted"]["strategy"]["matrix"]
    assert set(matrix["runner"]) == {
        *("macos-15", "macos-26", "ubuntu-24.04", "ubuntu-24.04-arm")
    }
    assert "MACOS_14" in jobs["macos-14"]["if"]
    for job in jobs.values():
        assert job["strategy"]["fail-fast"] is False
        pythons = job["strategy"]["matrix"]["python"]
        assert pythons == [EVERY_PYTHON[0], EVERY_PYTHON[-1]]
        # One that YAML would read as 3.1 is a string.
        assert all(isinstance(p, str) for p in pythons)
        assert job["uses"] == "./.github/workflows/suite.yml"


def test_every_mac_runs_the_doctor_and_keeps_what_it_found():
    workflow = read("suite")
    inputs = set(workflow["on"]["workflow_call"]["inputs"])
    for job in read("test")["jobs"].values():
        assert set(job["with"]) == inputs
    names = {step.get("name"): step for step in steps(workflow["jobs"]["suite"])}
    doctor, kept = names["doctor"], names["keep doctor.json"]
    assert doctor["run"] == '.venv/bin/mlx-lattice doctor --out "$RUNNER_TEMP"'
    assert "macOS" in doctor["if"] and "!cancelled()" in kept["if"]
    assert "${{ runner.temp }}/doctor.json" in kept["with"]["path"]
    assert "inputs.runner" in kept["with"]["name"]
    assert names["suite"]["run"] == ".ci/run" and "cancelled" in names["suite"]["if"]
    assert (ROOT / ".ci" / "run").stat().st_mode & 0o111


def test_only_a_tag_that_was_checked_is_published():
    workflow = read("release")
    assert workflow["on"] == {"push": {"tags": ["v*"]}, "workflow_dispatch": None}
    jobs = workflow["jobs"]
    publish = jobs["publish"]
    assert publish["if"] == "github.ref_type == 'tag'"
    assert publish["needs"] == ["check"]
    assert set(jobs["check"]["needs"]) == {"wheels", "sources"}
    assert publish["permissions"] == {"id-token": "write"} and publish["environment"]
    assert [name for name, job in jobs.items() if "permissions" in job] == ["publish"]
    runs = "\n".join(s.get("run", "") for s in steps(jobs["check"]))
    assert "twine check --strict" in runs
    assert "check.py --install --native --demo dist/*" in runs
    assert jobs["check"]["strategy"]["matrix"]["python"] == EVERY_PYTHON
    sources = "\n".join(s.get("run", "") for s in steps(jobs["sources"]))
    assert "MLX_LATTICE_PURE=1 python -m build" in sources
    assert "${GITHUB_REF_NAME#v}" in sources


def test_wheels_are_built_for_every_python_on_three_systems():
    matrix = read("release")["jobs"]["wheels"]["strategy"]["matrix"]
    assert set(matrix["runner"]) == {"macos-15", "ubuntu-24.04", "ubuntu-24.04-arm"}
    assert 'build = "cp31{0,1,2,3,4}-*"' in PROJECT
    assert 'MACOSX_DEPLOYMENT_TARGET = "14.0"' in PROJECT
    assert "auditwheel repair --exclude libmlx.so" in PROJECT
    assert 'requires-python = ">=3.10"' in PROJECT


def test_nanobind_and_mlx_are_pinned_alike_wherever_they_stand():
    for name in ("nanobind", "mlx(?:\\[cpu\\])?"):
        (version,) = set(re.findall(rf'"{name}==([\d.]+)', PROJECT))
    assert version == distribution.MLX
    # The extension of a wheel loads with the version that it was built for alone.
    least, _, patch = version.rpartition(".")
    bounds = set(re.findall(r'"mlx(?:\[\w+\])?(>=.*?)"', PROJECT))
    assert bounds == {f">={version},<{least}.{int(patch) + 1}"}
