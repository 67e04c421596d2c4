"""The tutorials: every notebook runs, and has the outputs that the site shows."""

import json
import runpy
from pathlib import Path

import pytest

DOCS = Path(__file__).parents[2] / "docs"
SCRIPT = runpy.run_path(str(DOCS / "notebooks.py"))
NOTEBOOKS = sorted(SCRIPT["FOLDER"].glob("*.ipynb"))
NEEDS = {"move_a_net": "torch", "segment_a_volume": "nilearn"}


@pytest.mark.native
@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.stem)
def test_a_notebook_runs(path):
    if package := NEEDS.get(path.stem):
        pytest.importorskip(package, reason=f"the tutorial needs {package} installed")
    SCRIPT["run"](path)


@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.stem)
def test_a_notebook_has_the_outputs_of_one_run(path):
    cells = json.loads(path.read_text())["cells"]
    code = [cell for cell in cells if cell["cell_type"] == "code"]
    run = "run: .venv/bin/python docs/notebooks.py"
    assert [c["execution_count"] for c in code] == [*range(1, len(code) + 1)], run
    outputs = [output for cell in code for output in cell["outputs"]]
    assert all(output["output_type"] != "error" for output in outputs), run
    assert path.stat().st_size < 400_000
    assert any("image/png" in output.get("data", {}) for output in outputs)


def test_every_notebook_is_a_page_of_the_site_and_in_the_list():
    navigation = (DOCS.parent / "mkdocs.yml").read_text()
    listed = (DOCS / "tutorials" / "index.md").read_text()
    for path in NOTEBOOKS:
        assert f"tutorials/{path.stem}.md" in navigation
        assert f"({path.name})" in listed
    assert len(NOTEBOOKS) == 6
