"""Examples in docstrings run and show what they say; what users call has one."""

import doctest
import inspect
import re
from pathlib import Path

import numpy as np
import pytest
from test_docs import DOCS, ROOT, script, snippets

reference = script("reference")
try:
    PUBLIC = reference.public_names()
except ImportError as error:  # mlx_lattice.mesh needs an extra
    pytest.skip(str(error), allow_module_level=True)
PARTS = set(reference.PUBLIC) - {"", "mesh", "routes", "compat"} | {"ml"}
# Errors, a report that ``import_checkpoint`` shows, and calls that need another machine
# or the files of another library.
WITHOUT = {
    "io.CheckpointError", "io.ImportReport", "io.PointFileError", "ml.metal",
    "models.published_arguments",
}  # fmt: skip


def is_ours(thing) -> bool:
    return getattr(reference.written(thing), "__module__", "").startswith("mlx_lattice")


def needs_example(name: str, thing) -> bool:
    """Functions, and the classes of nets, layers and files; not those of MLX."""
    part = name.rpartition(".")[0]
    if part not in PARTS or name in WITHOUT or not is_ours(thing):
        return False
    return part != "ml" if inspect.isclass(thing) else callable(thing)


def docstrings():
    """Yield the name and the docstring of public things and of their methods."""
    seen = set()
    for name, thing in PUBLIC.items():
        source = reference.written(thing)
        if not callable(source) or not is_ours(source) or id(source) in seen:
            continue
        seen.add(id(source))
        yield name, source.__doc__ or ""
        for method, value in vars(source).items() if inspect.isclass(source) else ():
            text = getattr(value, "__doc__", None)
            if method[0] != "_" and isinstance(text, str) and ">>>" in text:
                yield f"{name}.{method}", text


EXAMPLES = {name: text for name, text in docstrings() if ">>>" in text}
NUMBER = re.compile(r"-?\d+\.\d+(?:e[+-]?\d+)?")


class Rounded(doctest.OutputChecker):
    """Compares texts, and floating numbers in them to 3 digits."""

    def check_output(self, want, got, flags):
        wanted, found = (np.array(NUMBER.findall(text), float) for text in (want, got))
        same = NUMBER.sub("#", want) == NUMBER.sub("#", got)
        return same and np.allclose(wanted, found, rtol=1e-3, atol=1e-6)


@pytest.mark.native
@pytest.mark.parametrize("name", EXAMPLES)
def test_an_example_shows_what_runs(name, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    namespace = {"__name__": "example"}
    [(_, imports)] = snippets(DOCS / "api" / "index.md")
    exec(imports, namespace)
    text = EXAMPLES[name]
    example = doctest.DocTestParser().get_doctest(text, namespace, name, name, 0)
    said = []
    doctest.DocTestRunner(Rounded(), verbose=False).run(example, out=said.append)
    if "ImportError: " in "".join(said):
        pytest.skip("the example needs an extra that is not installed")
    assert not said, "".join(said)


def test_what_users_call_has_an_example():
    wanted = {name for name, thing in PUBLIC.items() if needs_example(name, thing)}
    without = [n for n in sorted(wanted) if ">>>" not in (PUBLIC[n].__doc__ or "")]
    assert without == [] and len(wanted) > 200


def test_sections_of_examples_have_the_title_that_the_reference_reads():
    for path in sorted(Path(ROOT, "mlx_lattice").rglob("*.py")):
        wrong = re.search(r"^ +Example:$", path.read_text(), re.M)
        assert not wrong, f"{path}: write Examples:, as griffe does"
