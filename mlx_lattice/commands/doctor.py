"""The command doctor: prove and time this machine's kernels, print the report."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from ..cache_files import check_writable
from ..inspect import doctor
from ..inspect.explain import milliseconds
from ..inspect.trace import drawn
from . import Result, bar, log


def run(out: str | Path = ".", quick: bool = False) -> Result:
    """Run the doctor, write ``doctor.json`` into a folder and return its report."""
    path = Path(out) / "doctor.json"
    check_writable(path)
    path.parent.mkdir(parents=True, exist_ok=True)
    with bar(None, bar_format="{desc}", leave=False) as shown:
        examined = doctor.Doctor(quick, path, show=shown.set_description_str)()
    examined.save()
    log.info(f"wrote {path}")
    facts = examined.report
    return Result(report(facts), facts, 1 if facts["wrong"] else 0)


# Reports as text; each takes what ``doctor.json`` holds.

COLUMNS = (
    *((name, "left") for name in ("layer", "pass", "route")),
    *((name, "right") for name in ("ms", "TFLOP/s", "roofline", "error")),
)


def headline(facts: Mapping[str, Any]) -> str:
    """Return the chip, the software and the verdict in one line."""
    m, device, wrong = facts["machine"], facts["device"], len(facts["wrong"])
    verdict = f"{wrong} wrong" if wrong else "nothing wrong"
    return (
        f"{m['chip']} ({device['name']}, {device['backend']}), {m['system']}"
        f"{m['release'] or ''}, MLX {m['mlx']}: {verdict}, {facts['seconds']:.0f} s"
    )


def report(facts: Mapping[str, Any]) -> str:
    """Return a report as a person reads it."""
    m, parts = facts["machine"], [headline(facts)]
    if m["on_host"]:
        parts.append("Metal's kernels run on the CPU here: nothing was timed.")
    bad = sum(p["wrong"] is not None for p in facts["proofs"])
    right = len(facts["proofs"]) - bad
    parts.append(f"kernels and operations: {right} right, {bad} wrong")
    if facts["layers"]:
        parts.append(drawn(COLUMNS, [_cells(row) for row in facts["layers"]]))
    for name, most in (("left_out", 3), ("wrong", 20)):
        label, lines = name.replace("_", " ").upper(), facts[name]
        parts += [f"{label}: {line}" for line in lines[:most]]
        if len(lines) > most:
            parts.append(f"{label}: {len(lines) - most} more, in doctor.json")
    return "\n".join(parts)


def _cells(row: Mapping) -> tuple[str, ...]:
    """Return a row's texts, by ``COLUMNS``; ">" marks the chosen route."""

    def text(name: str, form: Callable[[float], str]) -> str:
        return "-" if row.get(name) is None else form(row[name])

    error = text("error", "{:.0e}".format)
    return (
        row["layer"],
        row["pass"],
        f"{'>' if row.get('chosen') else ' '} {row['route']}".rstrip(),
        text("ms", _ms),
        text("tflops", "{:.3g}".format),
        text("roofline_ms", milliseconds),
        f"WRONG {error}" if row.get("wrong") else error,
    )


def _ms(value: float) -> str:
    return f"{value:.3f}" if value < 10 else f"{value:,.1f}"
