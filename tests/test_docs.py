"""Every Python snippet of the README and the docs runs, in order, page by page."""

import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md"))]


def snippets(page: Path) -> list[tuple[int, str]]:
    """Return (line, code) of every Python block."""
    text = page.read_text()
    return [
        (text[: match.start(1)].count("\n"), match.group(1))
        for match in re.finditer(r"^```python\n(.*?)^```", text, re.S | re.M)
    ]


@pytest.mark.parametrize("page", PAGES, ids=lambda p: str(p.relative_to(ROOT)))
def test_snippets_run(page, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    namespace: dict = {}
    for line, code in snippets(page):
        # Blank lines in front keep the page's line numbers in a traceback.
        exec(compile("\n" * line + code, str(page), "exec"), namespace)


def test_readme_names_the_two_commands():
    readme = (ROOT / "README.md").read_text()
    commands = re.search(r"^```sh\n(.*?)^```", readme, re.S | re.M).group(1)
    assert [line.split("#")[0].strip() for line in commands.splitlines()] == [
        "make demo",
        "make test",
    ]


def test_relative_links_exist():
    for page in PAGES:
        for target in re.findall(r"\]\((?!http)([^)#]+)", page.read_text()):
            assert (page.parent / target).exists(), f"{page.name} links to {target}"
