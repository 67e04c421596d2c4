"""The README and the docs: snippets run, links hold, pictures are up to date."""

import importlib
import importlib.util
import re
import shlex
from pathlib import Path

import mlx.core as mx
import pytest
from PIL import Image

import mlx_lattice as ml
from metal import host
from mlx_lattice import cli, io, models, nn, ops, routes
from mlx_lattice.routes import needs

ROOT = Path(__file__).parents[2]
DOCS = ROOT / "docs"
PAGES = [ROOT / "README.md", ROOT / "CHANGELOG.md", *sorted(DOCS.rglob("*.md"))]
MODULES = {"ml": ml, "nn": nn, "ops": ops, "io": io, "models": models}


def snippets(page: Path) -> list[tuple[int, str]]:
    """Return (line, code) of every Python block."""
    text = page.read_text()
    return [
        (text[: match.start(1)].count("\n"), match.group(1))
        for match in re.finditer(r"^```python\n(.*?)^```", text, re.S | re.M)
    ]


def script(name: str):
    """A script of the docs as a module."""
    spec = importlib.util.spec_from_file_location(f"docs_{name}", DOCS / f"{name}.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


# A net of 39 million parameters, and a training.
LARGE = {"segmentation.md": pytest.mark.native, "data.md": pytest.mark.native}
NEEDS_TORCH = {"unmodified.md"}


@pytest.mark.parametrize(
    "page",
    [pytest.param(p, marks=LARGE.get(p.name, ())) for p in PAGES],
    ids=lambda p: str(p.relative_to(ROOT)),
)
def test_snippets_run(page, tmp_path, monkeypatch):
    if 'ml.metal("host")' in page.read_text() and not mx.metal.is_available():
        host.require()
    if page.name in NEEDS_TORCH:
        pytest.importorskip("torch", reason="the page's code needs PyTorch installed")
    monkeypatch.chdir(tmp_path)
    namespace: dict = {}
    table = routes.TABLE
    for line, code in snippets(page):
        # Blank lines in front keep the page's line numbers in a traceback.
        exec(compile("\n" * line + code, str(page), "exec"), namespace)
    assert routes.TABLE is table, "a page changes the table within blocks only"


# On the package index the name mlx-lattice is another project's, with our import name.
ANOTHERS = re.compile(r"mlx-lattice\\?\[|pip install (?:-\S+ )*[\"']?mlx[-_]lattice")
FOLDERS = [
    ".github",
    "mlx_lattice",
    "benchmarks",
    "cpu",
    "cuda",
    "docs",
    "examples",
    "metal",
    "tests",
]
FILES = ("CMakeLists.txt", "Makefile", "pyproject.toml", ".ci/run", "mkdocs.yml")
TEXTS = [*(ROOT / name for name in FILES), *PAGES] + [
    path
    for folder in FOLDERS
    for path in sorted((ROOT / folder).rglob("*"))
    if path.suffix in (".py", ".html", ".txt", ".cpp", ".h", ".cuh", ".metal", ".yml")
]


def test_nothing_names_the_package_index_for_this_project():
    found = [str(path) for path in TEXTS if ANOTHERS.search(path.read_text())]
    assert len(TEXTS) > 200 and found == []
    for text in ('"mlx-{}[cuda]"', "pip install mlx-{}", "pip install -U 'mlx-{}'"):
        assert ANOTHERS.search(text.format("lattice"))


def test_commands_in_the_text_are_taken_by_the_parser():
    seen = set()
    for page in PAGES:
        for block in re.findall(r"^```sh\n(.*?)^```", page.read_text(), re.S | re.M):
            for line in block.replace("\\\n", " ").splitlines():
                words = shlex.split(line, comments=True)
                if words[:1] == ["mlx-lattice"]:
                    # One that is not taken exits.
                    seen.add(cli.parser().parse_args(words[1:]).command)
                for word in words:
                    if word.startswith("examples/"):
                        assert (ROOT / word).exists(), f"{page.name}: {word}"
    known = cli.parser()._subparsers._group_actions[0].choices
    assert seen == set(known)


def test_relative_links_exist():
    for page in PAGES:
        text = page.read_text()
        targets = re.findall(r"\]\((?!http)([^)#]+)", text)
        targets += re.findall(r'(?:src|srcset|href)="(?!http)([^"#]+)"', text)
        for target in targets:
            assert (page.parent / target).exists(), f"{page.name} links to {target}"


def test_names_in_the_text_exist():
    """What stands in backticks as ``nn.Conv3d`` or ``ops.cat`` is there."""
    found = 0
    for page in PAGES:
        text = re.sub(r"^```.*?^```", "", page.read_text(), flags=re.S | re.M)
        for code in re.findall(r"`([^`\n]+)`", text):
            for module, name in re.findall(r"(?<![\w./])(\w+)\.([A-Za-z]\w*)", code):
                if module in MODULES:
                    found += 1
                    assert hasattr(MODULES[module], name), f"{page.name}: {code}"
    assert found > 40


def test_every_page_is_in_the_navigation():
    listed = set(re.findall(r"[\w/]+\.md", (ROOT / "mkdocs.yml").read_text()))
    pages = {str(page.relative_to(DOCS)) for page in DOCS.rglob("*.md")}
    pages |= {f"tutorials/{p.stem}.md" for p in (DOCS / "tutorials").glob("*.ipynb")}
    assert listed == pages


def test_make_targets_that_the_docs_name_exist():
    targets = set(re.findall(r"^([a-z-]+):", (ROOT / "Makefile").read_text(), re.M))
    for page in PAGES:
        for name in re.findall(r"`make ([a-z-]+)`", page.read_text()):
            assert name in targets, f"{page.name}: make {name}"


def test_pictures_are_what_the_script_draws(tmp_path):
    figures = script("figures")
    figures.main(tmp_path)
    made = {path.name: path.read_text() for path in tmp_path.iterdir()}
    kept = {path.name: path.read_text() for path in (DOCS / "images").glob("*.svg")}
    assert made == kept, "run: .venv/bin/python docs/figures.py"


def test_the_chart_shows_what_the_result_files_say():
    charts = script("charts")
    for scheme in charts.SCHEMES:
        with Image.open(DOCS / "images" / f"speed-{scheme}.png") as picture:
            said = picture.text["Source"]
        assert said == charts.digest(), "run: .venv/bin/python docs/charts.py"


def test_the_page_of_predictions_is_what_the_benchmark_writes(monkeypatch):
    monkeypatch.syspath_prepend(ROOT / "benchmarks")
    predictions = importlib.import_module("predictions")
    run = "run: python benchmarks/predictions.py"
    assert predictions.PAGE.read_text() == predictions.page(), run


def test_the_route_page_has_every_row_need_and_threshold():
    page = script("reference").on_page_markdown((DOCS / "routes.md").read_text())
    assert "<!--" not in page
    for route in routes.TABLE:
        section = page.split(f"### `{route.name}`")[1].split("\n### ")[0]
        assert f"{route.idea[1:]}." in section
        for name in route.passes:
            assert f"`{name}`" in section
        for backend in route.on:
            assert f"`{backend}" in section
        for need in (*route.needs, *route.pays):
            assert f"`{need.__qualname__.partition('.')[0]}" in section
    for route, pass_ in needs.ROWS:
        assert f"| {route}, {pass_} | " in page
    for name in (
        "ROWS",
        "IM2COL_CHANNELS",
        "IM2COL_BYTES",
        "GROUPED_OFFSETS",
        "DISPATCH",
    ):
        comment = page.split(f"### `{name}`")[1].strip()
        assert comment[0].isupper(), f"{name} is explained in needs.py"


def test_the_page_of_weights_has_every_entry():
    page = script("reference").on_page_markdown((DOCS / "weights.md").read_text())
    assert "<!--" not in page
    assert all(f"| `{name}` | `models." in page for name in models.list())


def test_the_reference_has_every_public_name_once():
    reference = script("reference")
    try:
        public = reference.public_names()
    except ImportError as error:
        pytest.skip(str(error))  # mlx_lattice.mesh needs an extra
    pages = [path.read_text() for path in sorted((DOCS / "api").glob("*.md"))]
    words = [re.findall(r"<!-- api (.+?) -->", page, re.S) for page in pages]
    listed = [name for page in words for w in page for name in reference.selected(w)]
    wrong = sorted(name for name in public if listed.count(name) != 1)
    assert wrong == [], f"list once in docs/api/*.md: {', '.join(wrong)}"
    page = reference.on_page_markdown("<!-- api nn.Conv* ops.relu io.LIBRARIES -->")
    for entry in (
        "| [`nn.Conv1d` to `4d`](#mlx_lattice.nn.convolution.Conv) | ",
        'heading: "nn.Conv, nn.Conv1d, nn.Conv2d, nn.Conv3d, nn.Conv4d"',
        "::: mlx_lattice.ops.channels.relu",
        "## io.LIBRARIES",
    ):
        assert entry in page
