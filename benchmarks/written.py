"""How benchmarks write what they found: JSON lines, as they come, and Markdown."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path


def write_line(row: dict, out: Path | None) -> None:
    """Print a row as a JSON line, and add it to a file, if there is one.

    Line by line: what was measured is kept where a run is stopped.
    """
    line = json.dumps(row)
    print(line, flush=True)
    add_line(line, out)


def add_line(line: str, out: Path | None) -> None:
    """Add a line to a file, if there is one."""
    if out:
        with out.open("a") as file:
            file.write(line + "\n")


def markdown(names: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """Return a table of numbers, aligned to the right."""
    lines = [names, ["--:"] * len(names), *rows]
    return "\n".join("| " + " | ".join(line) + " |" for line in lines)
