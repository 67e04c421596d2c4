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


def read(name: str) -> dict:
    workflow = yaml.safe_load((FOLDER / f"{name}.yml").read_text())
    workflow["on"] = workflow.pop(True)  # YAML's word for true
    return workflow


def steps(job: dict) -> list[dict]:
    return job.get("steps", [])


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


def test_nanobind_and_mlx_are_pinned_alike_wherever_they_stand():
    for name in ("nanobind", "mlx(?:\\[cpu\\])?"):
        (version,) = set(re.findall(rf'"{name}==([\d.]+)', PROJECT))
    assert version == distribution.MLX
    # The extension of a wheel loads with the version that it was built for alone.
    least, _, patch = version.rpartition(".")
    bounds = set(re.findall(r'"mlx(?:\[\w+\])?(>=.*?)"', PROJECT))
    assert bounds == {f">={version},<{least}.{int(patch) + 1}"}
