"""A report as one self-contained HTML page."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping
from itertools import groupby

from ..page import environment
from . import published
from .report import left_out, ms_of, notes, predicted_of, relation_cells, state


def page(found: Mapping) -> str:
    """Return the page of a report, as ``doctor.json`` holds it.

    Raises:
        ImportError: jinja2 is not installed.
    """
    template = environment().get_template("doctor.html")
    rows = found["layers"]
    groups = groupby(rows, lambda row: (row["layer"], row["pass_"]))
    return template.render(
        found=found,
        groups=[_group(rows) for _, rows in groups],
        predicted=any(row["predicted"] for row in rows),
        published=any(row["published_ms"] for row in rows),
        source=published.SHELL_SOURCE,
        kernels=_kernels(found),
        skipped=left_out(found["skipped"]),
        state=state(found),
        notes=notes(found),
        right=lambda proofs: sum(p["good"] for p in proofs["kernels"]),
        ms=ms_of,
        predicted_of=predicted_of,
        relation_cells=relation_cells,
    )


def _group(rows: Iterable[Mapping]) -> tuple[list[Mapping], float]:
    """Return the routes of a layer's pass, and the milliseconds of the slowest."""
    held = list(rows)
    return held, max([row["ms"] or 0.0 for row in held]) or 1.0


def _kernels(found: Mapping) -> list[tuple[str, int, int]]:
    """Return (route and pass, right, run) of what was proved."""
    run, good = Counter(), Counter()
    for proof in (*found["proofs"]["kernels"], *found["features"]["kernels"]):
        name = f"{proof['kernel']} {proof['pass_']}".strip()
        run[name] += 1
        good[name] += proof["good"]
    return [(name, good[name], count) for name, count in run.items()]
