"""Project pages: the issue forms, the citation, links and metadata agree."""

import re
from pathlib import Path

import pytest

from mlx_lattice import distribution

yaml = pytest.importorskip("yaml")

ROOT = Path(__file__).parents[2]
PROJECT = (ROOT / "pyproject.toml").read_text()
FORMS = sorted((ROOT / ".github" / "ISSUE_TEMPLATE").glob("*.yml"))


@pytest.mark.parametrize("path", FORMS, ids=lambda p: p.stem)
def test_forms_have_what_github_asks_for(path):
    form = yaml.safe_load(path.read_text())
    assert {"name", "description", "body"} <= set(form)
    fields = [part for part in form["body"] if part["type"] != "markdown"]
    assert len({part["id"] for part in fields}) == len(fields) > 0
    for part in form["body"]:
        assert part["type"] in ("markdown", "textarea", "input", "dropdown")
        assert "label" in part["attributes"] or "value" in part["attributes"]
        assert set(part) <= {"type", "id", "attributes", "validations"}
    text = path.read_text()
    assert "mlx-lattice info" in text and "doctor.json" in text


def test_the_citation_is_of_this_version_and_repository():
    citation = yaml.safe_load((ROOT / "CITATION.cff").read_text())
    assert citation["version"] == distribution.__version__
    urls = re.search(r"^\[project.urls\]\n(.*?)\n\n", PROJECT, re.M | re.S)[1]
    urls = dict(re.findall(r'^(\w+) = "(.*)"$', urls, re.M))
    assert citation["repository-code"] == urls["Repository"]
    for url in urls.values():
        assert url.startswith(urls["Repository"])
        name = url.partition("/blob/main/")[2]
        assert not name or (ROOT / name).is_file()


def test_readme_and_contributing_name_every_page():
    texts = [(ROOT / n).read_text() for n in ("README.md", "docs/contributing.md")]
    for name in ("CODE_OF_CONDUCT.md", "SECURITY.md", "CITATION.cff"):
        assert all(name in text for text in texts), name
