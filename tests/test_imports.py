"""Imports go downwards, inside functions too: no circle of files, floors of rooms."""

import ast
import importlib
import subprocess
import sys
from collections import Counter
from itertools import count
from pathlib import Path

import pytest

PACKAGE = Path(__file__).resolve().parents[1] / "mlx_lattice"


# A room is a folder, or a file at the root. Each imports rooms that stand before it.
# Not counted are imports for type checking, and those of the files that gather names.
FLOORS = [
    *("checks", "settings", "distribution", "cache_files", "devices", "scene"),
    *("sync", "epilogue", "kernel_spec", "problem", "quantized"),
    *("registry", "transformations", "reductions", "geometry"),
    *("coordinate_set", "relation", "coordinates", "tensor"),
    *("backends/gpu", "backends/metal", "backends/cuda", "backends"),
    *("routes", "channel_kernels", "optimizers", "contraction", "int8", "memory"),
    *("ops", "nn", "inspect", "compiled", "prepare"),
    *("io", "models", "models/detection", "models/trellis2", "models/catalogue"),
    *("mesh", "compat", "compat/cumm", "compat/spconv", "compat/spconv/pytorch"),
    *("compat/flex_gemm/ops", "compat/MinkowskiEngine"),
    *("compat/MinkowskiEngine/modules", "compat/torchsparse"),
    "compat/torchsparse_1_4",
    *("commands", "cli"),
]
GATHERING = "__init__.py", "__main__.py"


def room(path: Path) -> str:
    """The room of a file of the package."""
    inside = path.relative_to(PACKAGE).with_suffix("")
    return str(inside if inside.parent == Path(".") else inside.parent)


def modules(package: Path) -> dict[str, Path]:
    """Every file of a package by the name that it is imported by."""
    named = {}
    for path in package.rglob("*.py"):
        parts = path.relative_to(package.parent).with_suffix("").parts
        named[".".join(parts[:-1] if parts[-1] == "__init__" else parts)] = path
    return named


def imported(name: str, path: Path, text: str, known) -> set[str]:
    """The modules that a file names in any import, wherever it stands.

    A name that is no module stands for the module that it is taken from.
    """
    package = name if path.name == "__init__.py" else name.rpartition(".")[0]
    found, tree, for_types = set(), ast.parse(text), set()
    for node in ast.walk(tree):
        if isinstance(node, ast.If) and "TYPE_CHECKING" in ast.dump(node.test):
            for_types |= set(ast.walk(node))
    for node in ast.walk(tree):
        if node in for_types:
            continue
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            above = package.split(".")[: len(package.split(".")) - node.level + 1]
            base = ".".join(above) if node.level else ""
            module = ".".join(filter(None, (base, node.module)))
            for alias in node.names:
                inside = f"{module}.{alias.name}"
                found.add(inside if inside in known else module)
    return (found & set(known)) - {name}


def circles(graph: dict[str, set[str]]) -> list[list[str]]:
    """Sets of files that reach each other, by Tarjan's algorithm."""
    number, index, low, stack, found = count(), {}, {}, [], []

    def visit(name):
        index[name] = low[name] = next(number)
        stack.append(name)
        for other in graph[name]:
            if other not in index:
                visit(other)
                low[name] = min(low[name], low[other])
            elif other in stack:
                low[name] = min(low[name], index[other])
        if low[name] == index[name]:
            at = stack.index(name)
            if len(stack) - at > 1:
                found.append(sorted(stack[at:]))
            del stack[at:]

    for name in graph:
        if name not in index:
            visit(name)
    return found


def graph_of(package: Path) -> dict[str, set[str]]:
    """What each file of a package imports of it."""
    named = modules(package)
    return {
        name: imported(name, path, path.read_text(), named)
        for name, path in named.items()
    }


def test_no_circle_of_files():
    graph = graph_of(PACKAGE)
    assert len(graph) > 50 and sum(map(len, graph.values())) > 200
    assert circles(graph) == []


def test_imports_go_to_lower_floors():
    named = modules(PACKAGE)
    files = {n: p for n, p in named.items() if p.name not in GATHERING}
    assert {room(path) for path in files.values()} == set(FLOORS)
    for name, path in files.items():
        at = room(path)
        for other in imported(name, path, path.read_text(), named):
            place = "." if other == PACKAGE.name else room(named[other])
            if place not in (".", at):
                below = FLOORS.index(place) < FLOORS.index(at)
                assert below, f"{path.name} of {at} imports {other}, which is above it"


@pytest.mark.parametrize(
    "text",
    (
        "from . import a",
        "from .a import thing",
        "import package.a",
        "def f():\n    from . import a",
        "from package.a import thing",
    ),
)
def test_a_circle_is_found_wherever_it_is_imported(text, tmp_path):
    package = tmp_path / "package"
    package.mkdir()
    (package / "__init__.py").write_text("")
    (package / "a.py").write_text("from .b import thing")
    (package / "b.py").write_text("from .c import thing")
    (package / "c.py").write_text("")
    assert circles(graph_of(package)) == []
    (package / "c.py").write_text(text)
    assert circles(graph_of(package)) == [["package.a", "package.b", "package.c"]]


IMPORTS = """
import os, warnings
import mlx.core as mx, mlx.nn

def settings():
    limits = mx.set_cache_limit(0), mx.set_memory_limit(1 << 40)
    mx.set_cache_limit(limits[0]), mx.set_memory_limit(limits[1])
    return dict(os.environ), limits, mlx.nn.Linear.__init__, mx.random.state[0].tolist()

before = settings()
warnings.simplefilter("error")
import mlx_lattice
assert settings() == before
"""


def test_importing_changes_nothing():
    subprocess.run([sys.executable, "-c", IMPORTS], check=True)


PUBLIC = "mlx_lattice", "mlx_lattice.nn", "mlx_lattice.ops", "mlx_lattice.io"


@pytest.mark.parametrize("name", PUBLIC)
def test_a_module_lists_its_public_names_alone(name):
    module = importlib.import_module(name)
    assert dir(module) == sorted(set(module.__all__)) == sorted(module.__all__)
    for public in module.__all__:
        assert getattr(module, public) is not None


def test_every_public_name_has_one_place():
    modules = [importlib.import_module(name) for name in PUBLIC]
    places = Counter(name for module in modules for name in module.__all__)
    assert [name for name, count in places.items() if count > 1] == []
