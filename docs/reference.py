"""Pages that are made while the site is built: the route table and the API.

MkDocs calls ``on_page_markdown`` for every page; a line ``<!-- routes -->``,
``<!-- thresholds -->``, ``<!-- weights -->``, ``<!-- commands -->``,
``<!-- options segment -->`` or ``<!-- api nn.linear -->`` is replaced.
"""

from __future__ import annotations

import importlib
import inspect
import re
from collections.abc import Iterator
from fnmatch import fnmatchcase
from functools import cache
from pathlib import Path
from types import ModuleType

import mlx_lattice
from mlx_lattice import cli, models, routes
from mlx_lattice.backends.cuda import thresholds as cuda_thresholds
from mlx_lattice.backends.cuda import tiles as cuda_tiles
from mlx_lattice.backends.gpu import kernel as gpu_kernel
from mlx_lattice.backends.metal import tiles as metal_thresholds
from mlx_lattice.devices import BACKENDS
from mlx_lattice.problem import MLX
from mlx_lattice.routes import needs

# Modules whose public names the reference has. A name in two modules is shown under
# the first.
PUBLIC = (
    "", "nn", "nn.losses", "nn.metrics", "ops", "models", "models.trellis2", "io",
    "mesh", "optimizers", "routes", "compat",
)  # fmt: skip

# What users call of classes that have more methods for this package than for them.
MEMBERS = {
    "CoordinateManager": (
        "insert", "key_of", "sets", "relations", "kernel_relation",
        "target_kernel_relation", "submanifold_kernel_relation",
        "transposed_kernel_relation", "generative_relation", "relation",
    ),
    "KernelSpec": (
        "of", "dims", "volume", "offsets", "is_pointwise", "output_shape",
        "transposed_output_shape",
    ),
    "Problem": ("forward", "input_grad", "weight_grad", "of"),
    "Relation": (
        "from_edges", "n_in", "n_out", "volume", "keys", "T", "out_in", "in_out",
        "edges", "counts", "n_edges", "output_csr", "input_csr", "kernel_csr",
        "sorted", "coverage",
    ),
    "Route": ("on",),
}  # fmt: skip


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
        and not re.search("^_|SMALL|ITSELF|^SHORT$", name)  # not tables of numbers
    }
    for name, table in tables.items():
        yield f"\n### `{name}`\n\n{comments.get(name, '')}\n"
        kinds = {type(row) for row in table.values() if hasattr(row, "_fields")}
        for kind in sorted(kinds, key=lambda kind: kind.__name__):
            yield f"`{kind.__name__}`: {', '.join(kind._fields)}\n"
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
        cells = (f"({number(v)})" if isinstance(v, tuple) else number(v) for v in value)
        return ", ".join(cells)
    return f"{value:,}" if isinstance(value, int) else f"{value:g}"


@cache
def public_names() -> dict[str, object]:
    """Return every public name, as ``nn.Linear``, and what it names."""
    found: dict[str, object] = {}
    for part in PUBLIC:
        module = importlib.import_module(f"mlx_lattice.{part}".rstrip("."))
        for name in sorted(module.__all__):
            thing = getattr(module, name)
            if not inspect.ismodule(thing) and all(
                thing is not other for other in found.values()
            ):
                found[f"{part or 'ml'}.{name}"] = thing
    return found


def written(thing: object) -> object:
    """Return the class or function that a name for 1 to 4 axes is made of."""
    if inspect.isclass(thing):
        base = thing.__mro__[1]
        return (
            base if re.fullmatch(rf"{base.__name__}[1-4]d", thing.__name__) else thing
        )
    return inspect.unwrap(thing) if callable(thing) else thing


def selected(words: str) -> dict[str, object]:
    """Return the public names that the words of an ``api`` marker select, in order.

    Args:
        words: files, as ``nn.linear``, for the public names written there; patterns
            of names, as ``nn.Quantized*``; either after ``!`` to leave names out.
    """
    public, chosen = public_names(), {}
    for word in words.split():
        pattern = word.removeprefix("!")
        taken = [name for name in public if fnmatchcase(name, pattern)]
        if not taken:
            module = importlib.import_module(f"mlx_lattice.{pattern}")
            there = [vars(module)[name] for name in getattr(module, "__all__", ())]
            taken = [
                name
                for name, thing in public.items()
                if getattr(written(thing), "__module__", "") == module.__name__
                or any(thing is other for other in there)
            ]
        for name in taken:
            if word != pattern:
                chosen.pop(name, None)
            else:
                chosen[name] = public[name]
    return chosen


def source_of(thing: object) -> object | None:
    """Return the class or function that mkdocstrings finds in this package's source."""
    found = written(thing)
    home, name = getattr(found, "__module__", ""), getattr(found, "__name__", "")
    if not home.startswith("mlx_lattice") or not hasattr(
        importlib.import_module(home), name
    ):
        return None
    try:
        first = inspect.getsource(found).split("\n", 1)[0]
    except (OSError, TypeError):  # made by a factory
        return None
    return found if re.search(rf"\b{name}\b|^@", first) else None


def comment_of(name: str) -> str:
    """Return the comment above the assignment of a public constant."""
    part, _, name = name.rpartition(".")
    root = Path(mlx_lattice.__file__).parent
    pattern = re.compile(rf"((?:^# .*\n)+)^(?:[\w, ]+= )?{name}\b.*=", re.M)
    nearest = root.joinpath(*part.split(".")).rglob("*.py")
    for path in (*sorted(nearest), *sorted(root.glob("*.py"))):
        if found := pattern.search(path.read_text()):
            return " ".join(line.lstrip("# ") for line in found[1].splitlines())
    return ""


def label_of(names: list[str]) -> str:
    """Return the names of one entry in short: ``nn.Conv1d`` to ``4d``."""
    numbered = [name for name in names if re.search(r"[1-4]d$", name)]
    short = [numbered[0], numbered[-1][-2:]] if len(names) > 1 else names
    return " to ".join(f"`{name}`" for name in short)


def api_lines(words: str) -> Iterator[str]:
    """Yield a table of the names that a marker selects, then an entry for each.

    The names of a family, 1d to 4d, share an entry.
    """
    entries: dict[int, tuple[object, list[str]]] = {}
    for name, thing in selected(words).items():
        source = source_of(thing)
        key = thing if source is None else source
        entries.setdefault(id(key), (key, []))[1].append(name)
    rows, sections = [], []
    for thing, names in entries.values():
        described = callable(thing)
        text = thing.__doc__ if described else comment_of(names[0])
        anchor = names[0]
        if source := source_of(thing):
            anchor = f"{source.__module__}.{source.__qualname__}"
            sections += mkdocstrings_lines(anchor, names)
        else:
            sections += made_lines(thing, names[0], text)
        what = first_line(text).replace("``", "`").replace("|", "\\|")
        rows.append(f"| [{label_of(names)}](#{anchor}) | {what} |")
    yield "| name | what it does |\n|---|---|"
    yield from rows
    yield from sections


def mkdocstrings_lines(path: str, names: list[str]) -> Iterator[str]:
    """Yield the marker by which mkdocstrings renders a class or function."""
    yield f"\n::: {path}"
    yield "    options:"
    yield f'      heading: "{", ".join(names)}"'
    yield f'      toc_label: "{label_of(names).replace("`", "")}"'
    if members := MEMBERS.get(path.rpartition(".")[2]):
        yield f"      members: [{', '.join(members)}]"
        yield f"      inherited_members: [{', '.join(members)}]"


def made_lines(thing: object, name: str, text: str) -> Iterator[str]:
    """Yield the entry of a name made at run time, or of a constant."""
    yield f"\n## {name} {{ #{name} }}\n"
    if not callable(thing):
        yield f"{text}\n" if text else ""
        yield ", ".join(f"`{getattr(item, 'name', item)}`" for item in thing)
        return
    try:
        signature = inspect.signature(thing)
    except (TypeError, ValueError):
        signature = "(...)"
    text, _, example = inspect.cleandoc(text).partition("\nExamples:\n")
    yield f"```python\n{name.rpartition('.')[2]}{signature}\n```\n\n{text}\n"
    if example:
        yield f"**Examples:**\n\n```pycon\n{inspect.cleandoc(example)}\n```"


def weight_lines() -> Iterator[str]:
    """Yield the table of published weights, with links to their files."""
    yield "| name | net | files | trained with | licence | result |"
    yield "|---|---|---|---|---|---|"
    for entry in map(models.published, models.list()):
        links = ", ".join(f"[{n}]({f})" for n, f in enumerate(entry.files, 1))
        facts = entry.about.version, entry.about.licence, entry.metric
        cells = [f"`{entry.name}`", f"`models.{entry.kind}`", links]
        yield f"| {' | '.join([*cells, *(fact or 'unknown' for fact in facts)])} |"


def command_lines() -> Iterator[str]:
    """Yield a row for each command of the command line."""
    for action in cli.parser()._subparsers._group_actions[0]._choices_actions:
        yield f"| [`{action.dest}`](#{action.dest}) | {action.help} |"


def option_lines(command: str) -> Iterator[str]:
    """Yield the table of a command's options, as its parser has them."""
    yield "| argument or option | meaning |"
    yield "|---|---|"
    for action in cli.parser()._subparsers._group_actions[0].choices[command]._actions:
        if action.dest in ("help", "as_json", "level"):
            continue
        value = action.metavar or action.choices or action.dest.upper()
        if not isinstance(value, str):
            value = (" " if action.nargs else ", ").join(map(str, value))
        names = ", ".join(f"`{name}`" for name in action.option_strings)
        if action.nargs != 0:
            names += f" `{value}`" + " ..." * (action.nargs in ("+", "..."))
        yield f"| {names.strip()} | {action.help % vars(action)} |"


def on_page_markdown(markdown: str, **_) -> str:
    """Replace the markers of a page. Called by MkDocs."""
    markdown = markdown.replace("<!-- routes -->", "\n".join(route_lines()))
    markdown = markdown.replace("<!-- thresholds -->", "\n".join(threshold_lines()))
    markdown = markdown.replace("<!-- weights -->", "\n".join(weight_lines()))
    markdown = markdown.replace("<!-- commands -->", "\n".join(command_lines()))
    markdown = re.sub(
        r"<!-- options (\w+) -->",
        lambda found: "\n".join(option_lines(found[1])),
        markdown,
    )
    return re.sub(
        r"<!-- api (.+?) -->",
        lambda found: "\n".join(api_lines(found[1])),
        markdown,
        flags=re.S,
    )


def on_config(config, **_):
    """Show the version beside the name of the site. Called by MkDocs."""
    config.site_name += f" {mlx_lattice.__version__}"
    return config
