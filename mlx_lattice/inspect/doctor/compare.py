"""Two reports side by side: what became faster, slower, right or wrong."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path

from ..page import drawn
from .report import FORMAT, VERSION, headline, ms_of

FACTS = ("chip", "system", "release", "mlx", "python", "memory_gb")


def read(path: str | Path) -> dict:
    """Return a report of a file.

    Raises:
        ValueError: the file is no ``doctor.json`` of this version.
    """
    path = Path(path)
    try:
        found = json.loads(path.read_text(encoding="utf-8"))
        kind, version = found["format"], found["version"]
    except (ValueError, KeyError, TypeError):
        kind, version = None, None
    if kind != FORMAT:
        raise ValueError(f"{path.name} is no doctor.json of mlx_lattice")
    if version != VERSION:
        raise ValueError(
            f"{path.name} has version {version} of the format; this library reads "
            f"{VERSION}: run the doctor again"
        )
    return found


def compared(a: Mapping, b: Mapping) -> str:
    """Return two reports as tables: facts that differ, then times, then proofs."""
    parts = [f"a  {headline(a)}", f"b  {headline(b)}"]
    for name in FACTS:
        one, two = a["machine"].get(name), b["machine"].get(name)
        if one != two:
            parts.append(f"{name}: {one} | {two}")
    parts += _rates(a, b)
    if rows := _timed(a, b):
        columns = [
            ("", "left"),
            ("a ms", "right"),
            ("b ms", "right"),
            ("a / b", "right"),
        ]
        parts.append(drawn(columns, rows))
    parts += _proved(a, b)
    only = [len(_times(x).keys() - _times(y).keys()) for x, y in ((a, b), (b, a))]
    if any(only):
        parts.append(f"timed in one only: {only[0]} in a, {only[1]} in b")
    return "\n".join(parts)


def _times(found: Mapping) -> dict[tuple, float | None]:
    """Return the milliseconds of everything that was timed, by what it is."""
    times: dict[tuple, float | None] = {}
    for row in found["layers"]:
        times[row["layer"], row["pass_"], row["route"]] = row["ms"]
    for built in found["relations"]:
        times["relation", built["relation"], ""] = built["ms"]
    return times


def _rates(a: Mapping, b: Mapping) -> list[str]:
    """Return what MLX itself reaches in each."""
    one, two = (
        {r["what"].partition(",")[0]: r for r in found["rates"]} for found in (a, b)
    )
    return [
        f"MLX {what}: {rate['value']:.3g} | {two[what]['value']:.3g} {rate['unit']}"
        for what, rate in one.items()
        if what in two and rate["unit"] == "TFLOP/s"
    ]


def _timed(a: Mapping, b: Mapping) -> list[tuple[str, ...]]:
    one, two = _times(a), _times(b)
    rows = []
    for key in one:
        if key not in two:
            continue
        x, y = one[key], two[key]
        ratio = f"{x / y:.2f}" if x and y else "-"
        rows.append((" ".join(part for part in key if part), ms_of(x), ms_of(y), ratio))
    return rows


def _proved(a: Mapping, b: Mapping) -> list[str]:
    """Return what is wrong in one of them only."""
    lines = []
    for name, found, other in (("a", a, b), ("b", b, a)):
        for line in found["wrong"]:
            where = "in both" if line in other["wrong"] else f"in {name} only"
            if name == "a" or line not in other["wrong"]:
                lines.append(f"wrong {where}: {line}")
    return lines
