"""Pages that are made while the site is built: the route table and the API.

MkDocs calls ``on_page_markdown`` for every page; a line ``<!-- routes -->``,
``<!-- thresholds -->``, ``<!-- weights -->`` or ``<!-- api mlx_lattice.nn -->`` is
replaced.
"""

from __future__ import annotations

import importlib
import inspect
import re
from collections.abc import Iterator
from types import ModuleType

import mlx_lattice
from mlx_lattice import models, routes
from mlx_lattice.backends.cuda import thresholds as cuda_thresholds
from mlx_lattice.backends.cuda import tiles as cuda_tiles
from mlx_lattice.backends.gpu import kernel as gpu_kernel
from mlx_lattice.backends.metal import tiles as metal_thresholds
from mlx_lattice.devices import BACKENDS
from mlx_lattice.problem import MLX
from mlx_lattice.routes import needs

# What classes have of bases that are not public, and users call.
INHERITED = {"CoordinateManager": ("cells", "finer", "insert", "key_of", "sets")}


def first_line(text: str | None) -> str:
    """Return the first sentence of a docstring, on one line."""
    return " ".join((text or "").strip().split("\n\n")[0].split())


def need_text(need: routes.Route) -> str:
    """Return a need as the table writes it, and what it asks for."""
    name = need.__qualname__.partition(".")[0]
    arguments = inspect.getclosurevars(need).nonlocals if need.__closure__ else {}
    values = [repr(v) for v in arguments.values()]
    # A tuple stands for the arguments that were given one by one.
    lone = next(iter(arguments.values()), None)
    if len(arguments) == 1 and isinstance(lone, tuple):
        values = [repr(v) for v in lone]
    call = f"{name}({', '.join(values)})" if arguments else name
    doc = getattr(needs, name, need).__doc__
    return f"`{call}`: {first_line(doc)}"


def planned_on(route: routes.Route, mlx: bool) -> tuple[str, ...]:
    """Return the backends that run it, and for which pass if not all.

    Args:
        route: the row.
        mlx: by MLX operations, else by their own kernels.
    """
    found = []
    for backend in BACKENDS:
        if mlx and backend not in route.mlx_on:
            continue
        kind = MLX if mlx else backend
        able = [p for p in route.passes if route.planner(kind, p)]
        if able:
            some = len(able) < len(route.passes)
            found.append(f"{backend} ({', '.join(able)})" if some else backend)
    return tuple(found)


def listed(names: tuple[str, ...]) -> str:
    """Return names as code, or a dash."""
    return ", ".join(f"`{n}`" for n in names) or "none"


def route_lines() -> Iterator[str]:
    """Yield the table in short, then a section a row."""
    yield "| | route | passes | own kernels | MLX operations |"
    yield "|---|---|---|---|---|"
    for place, route in enumerate(routes.TABLE, 1):
        passes = "all" if len(route.passes) == 3 else ", ".join(route.passes)
        portable = planned_on(route, mlx=True)
        cells = [passes, ", ".join(planned_on(route, mlx=False))]
        cells.append("all" if portable == BACKENDS else ", ".join(portable))
        name = f"[`{route.name}`](#{route.name})"
        yield f"| {place} | {name} | {' | '.join(c or '-' for c in cells)} |"
    for route in routes.TABLE:
        yield f"\n### `{route.name}` {{ #{route.name} }}\n"
        yield f"{route.idea[0].upper()}{route.idea[1:]}.\n"
        yield f"- passes: {listed(route.passes)}"
        yield f"- own kernels: {listed(planned_on(route, mlx=False))}"
        yield f"- MLX operations: {listed(planned_on(route, mlx=True))}"
        lists = (("needs", "cannot run without"), ("pays", "preferred only with"))
        for field, title in lists:
            if wanted := getattr(route, field):
                yield f"- {title} (`{field}`):\n"
                yield from (f"    - {need_text(need)}" for need in wanted)
                yield ""


def threshold_lines() -> Iterator[str]:
    """Yield the tables of numbers, with the comments that stand above them."""
    for module in (
        needs,
        metal_thresholds,
        cuda_thresholds,
        cuda_tiles,
        gpu_kernel,
    ):
        yield from tables_of(module)


def tables_of(module: ModuleType) -> Iterator[str]:
    """Yield the tables of a module, each under its name."""
    source = inspect.getsource(module)
    comments = dict(
        (name, " ".join(line.lstrip("# ") for line in text.splitlines()))
        for text, name in re.findall(r"((?:^#.*\n)+)^([A-Z_0-9]+)\b.*=", source, re.M)
    )
    tables = {
        name: value
        for name, value in vars(module).items()
        if re.search(rf"^{name}\b", source, re.M)  # not imported
        and name.isupper()
        and isinstance(value, dict)
        and not re.search("^_|SMALL|ITSELF", name)  # tiles by edges: not a table
    }
    for name, table in tables.items():
        yield f"\n### `{name}`\n\n{comments.get(name, '')}\n"
        nested = any(isinstance(row, dict) for row in table.values())
        if nested:
            families = sorted({f for row in table.values() for f in row})
            yield f"| | {' | '.join(map(family_name, families))} |"
            yield "|---" * (len(families) + 1) + "|"
            for key, row in table.items():
                words = ", ".join(key) if isinstance(key, tuple) else key
                cells = (number(row[f]) if f in row else "" for f in families)
                yield f"| {words} | {' | '.join(cells)} |"
        else:
            yield f"| {' | '.join(map(family_name, table))} |"
            yield "|---" * len(table) + "|"
            yield f"| {' | '.join(map(number, table.values()))} |"


def family_name(name: str) -> str:
    """Return a chip family as people read it."""
    return "any other" if name == "*" else str(name)


def number(value: float | str | tuple) -> str:
    """Return a number with its thousands apart, or several; a word as it is."""
    if isinstance(value, str):
        return value
    if isinstance(value, tuple):
        return ", ".join(map(number, value))
    return f"{value:,}" if isinstance(value, int) else f"{value:g}"


def source_of(name: str, thing: object) -> object | None:
    """Return what stands in this package's source for a public name, if anything does.

    That is what a family, 1d to 4d, is made of, where it has the docstring and the
    arguments; else the thing itself. What other factories make is nowhere.
    """
    made_of = thing.__mro__[1] if inspect.isclass(thing) else None
    for found in (getattr(thing, "__wrapped__", made_of), thing):
        home = getattr(found, "__module__", "")
        if not home.startswith("mlx_lattice") or found.__doc__ != thing.__doc__:
            continue
        written = getattr(found, "__name__", name)
        if getattr(importlib.import_module(home), written, None) is not found:
            continue
        try:
            first = inspect.getsource(found).split("\n", 1)[0]
        except (OSError, TypeError):
            continue
        same = found is thing or f"{written}3d" == f"{name[:-2]}3d"
        if same and re.search(rf"\b{written}\b|^@", first):
            return found
    return None


def api_lines(module_name: str) -> Iterator[str]:
    """Yield an entry for each public name of a module; a family's names share one."""
    module = importlib.import_module(module_name)
    written: dict[object, list[str]] = {}
    made: dict[str, list[tuple[str, object]]] = {}
    for name in sorted(module.__all__):
        thing = getattr(module, name)
        if inspect.ismodule(thing):
            continue
        if source := callable(thing) and source_of(name, thing):
            written.setdefault(source, []).append(name)
        else:
            doc = inspect.cleandoc(thing.__doc__ or "") if callable(thing) else name
            made.setdefault(doc, []).append((name, thing))
    for source, names in written.items():
        yield f"\n::: {source.__module__}.{source.__qualname__}"
        options = []
        if names != [source.__qualname__]:
            heading = ", ".join(names)
            options = [f'heading: "{heading}"']
            options += [f'toc_label: "{names[0]} to {names[-1]}"']
        if inherited := INHERITED.get(source.__qualname__):
            options += [f"inherited_members: [{', '.join(inherited)}]"]
        if options:
            yield "\n      ".join(["    options:", *options])
    for doc, things in made.items():
        names = ", ".join(f"`{name}`" for name, _ in things)
        yield f"\n## {names} {{ #{module_name}.{things[0][0]} }}\n"
        if not callable(things[0][1]):
            yield ", ".join(f"`{key}`" for key in things[0][1])
            continue
        try:
            signature = inspect.signature(things[-1][1])
        except (TypeError, ValueError):
            signature = "(...)"
        yield f"```text\n{things[-1][0]}{signature}\n\n{doc}\n```"


def weight_lines() -> Iterator[str]:
    """Yield the table of published weights, with links to their files."""
    yield "| name | net | files | trained with | licence | result |"
    yield "|---|---|---|---|---|---|"
    for entry in map(models.published, models.list()):
        links = ", ".join(f"[{n}]({f})" for n, f in enumerate(entry.files, 1))
        facts = entry.about.version, entry.about.licence, entry.metric
        cells = [f"`{entry.name}`", f"`models.{entry.kind}`", links]
        yield f"| {' | '.join([*cells, *(fact or 'unknown' for fact in facts)])} |"


def on_page_markdown(markdown: str, **_) -> str:
    """Replace the markers of a page. Called by MkDocs."""
    markdown = markdown.replace("<!-- routes -->", "\n".join(route_lines()))
    markdown = markdown.replace("<!-- thresholds -->", "\n".join(threshold_lines()))
    markdown = markdown.replace("<!-- weights -->", "\n".join(weight_lines()))
    return re.sub(
        r"<!-- api ([\w.]+) -->",
        lambda found: "\n".join(api_lines(found[1])),
        markdown,
    )


def on_config(config, **_):
    """Show the version beside the name of the site. Called by MkDocs."""
    config.site_name += f" {mlx_lattice.__version__}"
    return config
