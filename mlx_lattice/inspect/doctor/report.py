"""The doctor's report: as data that anybody may publish, and as tables."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path

from ... import kept_files
from ...devices import CPU, Device
from ..cost import milliseconds
from ..page import drawn
from .proofs import Proof
from .rates import Rate
from .timings import Built, Row, Skipped

FORMAT, VERSION = "mlx_lattice.doctor", 1
ON_HOST = (
    "Metal's kernels ran on this machine's CPU: they were proved, and their times mean "
    "nothing."
)


@dataclass
class Report:
    """What the doctor found.

    Attributes:
        machine: facts of the machine, none of its owner.
        device: the profile in use.
        quick: whether it was the short form.
        limit: seconds that it was allowed.
        seconds: that it took.
        rates: what MLX itself reaches.
        proofs: of each contraction kernel, None where it was left out.
        features: of relations, norms and pools, alike.
        layers: a row a route and pass of a layer.
        relations: builds.
        experiments: their results, by number.
        skipped: what was left out, and why.
        unfinished: what ran when the report was written, None at the end.
    """

    machine: Mapping
    device: Device
    quick: bool
    limit: float
    seconds: float = 0.0
    rates: list[Rate] = field(default_factory=list)
    proofs: list[Proof | None] = field(default_factory=list)
    features: list[Proof | None] = field(default_factory=list)
    layers: list[Row] = field(default_factory=list)
    relations: list[Built] = field(default_factory=list)
    experiments: list = field(default_factory=list)
    skipped: list[Skipped] = field(default_factory=list)
    unfinished: str | None = None

    @property
    def wrong(self) -> list[str]:
        """What gave a wrong result, or none, in words."""
        failed = [p for p in (*self.proofs, *self.features) if p and not p.good]
        found = [f"{p.kernel} {p.pass_} ({p.facts}): {_why(p)}" for p in failed]
        for row in self.layers:
            if not row.good:
                why = row.note or f"off the floor by {row.error:.1e}"
                found.append(f"{row.pass_} of {row.layer} by {row.route}: {why}")
        found += [f"{b.relation}: {b.note}" for b in self.relations if b.note]
        found += [f"{e.title}: {e.wrong}" for e in self.experiments if e.wrong]
        return found

    def as_dict(self) -> dict:
        """Return what ``doctor.json`` holds; every field is data."""
        return {
            "format": FORMAT,
            "version": VERSION,
            "machine": dict(self.machine),
            "device": asdict(self.device),
            "quick": self.quick,
            "limit": self.limit,
            "seconds": round(self.seconds, 2),
            "wrong": self.wrong,
            "rates": [r.as_dict() for r in self.rates],
            "proofs": {
                "left_out": self.proofs.count(None),
                "kernels": [p.as_dict() for p in self.proofs if p],
            },
            "features": {
                "left_out": self.features.count(None),
                "kernels": [p.as_dict() for p in self.features if p],
            },
            "layers": [row.as_dict() for row in self.layers],
            "relations": [b.as_dict() for b in self.relations],
            "experiments": [e.as_dict() for e in self.experiments],
            "skipped": [s.as_dict() for s in self.skipped],
            "unfinished": self.unfinished,
        }

    def save(self, path: Path) -> None:
        """Write ``doctor.json``, all of it or nothing."""
        text = json.dumps(self.as_dict(), indent=1, allow_nan=False, default=str)
        kept_files.write_whole(path, text.encode())

    def __str__(self) -> str:
        """Return the tables as a person reads them."""
        return text_of(self.as_dict())


def _why(proof: Proof) -> str:
    return proof.note or f"off by {proof.error:.1e}, at most {proof.tolerance:.1e}"


def text_of(found: Mapping) -> str:
    """Return a report, as ``doctor.json`` holds it, as tables."""
    parts = [headline(found), *notes(found)]
    if found["rates"]:
        parts.append(_table(RATE_COLUMNS, [_rate(r) for r in found["rates"]]))
    for name, what in (("proofs", "contraction kernels"), ("features", "other checks")):
        if found[name]["kernels"] or found[name]["left_out"]:
            parts.append(f"{what}: {counted(found[name])}")
    if found["layers"]:
        rows = [layer_cells(row, found) for row in found["layers"]]
        parts.append(_table(LAYER_COLUMNS, rows))
    if found["relations"]:
        parts.append(
            _table(RELATION_COLUMNS, [relation_cells(b) for b in found["relations"]])
        )
    for e in found["experiments"]:
        parts.append(experiment_text(e))
    parts += left_out(found["skipped"])
    wrong = found["wrong"]
    parts += [f"WRONG: {line}" for line in wrong[:20]]
    if len(wrong) > 20:
        parts.append(f"and {len(wrong) - 20} more that are wrong")
    return "\n".join(parts)


def headline(found: Mapping) -> str:
    """Return the chip, the software and what came of it, in one line."""
    m, d = found["machine"], found["device"]
    release = f" {m['release']}" if m["release"] else ""
    return (
        f"{m['chip']} ({d['name']}, {d['backend']}), {m['system']}{release}, MLX "
        f"{m['mlx']}: {state(found)}, {found['seconds']:.0f} s of {found['limit']:.0f}"
    )


def state(found: Mapping) -> str:
    """Return how many results are wrong, and whether times can be trusted."""
    wrong, busy = len(found["wrong"]), found["machine"].get("busy")
    if not busy:
        return f"{wrong} wrong" if wrong else "nothing wrong"
    return f"{wrong or 'no'} wrong results, times of a busy machine"


def notes(found: Mapping) -> list[str]:
    """Return what a reader must know before the tables."""
    m, lines = found["machine"], []
    if m["on_host"]:
        lines.append(ON_HOST)
    if busy := m.get("busy"):
        lines.append(
            f"The machine is busy: {busy}. Rates and times are worse than it is "
            "capable of: close other programs, then run the doctor again."
        )
    if (target := m.get("metal_target")) is not None:
        lines.append(
            "Metal compiles kernels with __ENVIRONMENT_OS_VERSION_MIN_REQUIRED__ = "
            f"{target}; TensorOps (M5) need 260200 or later."
        )
    if found["unfinished"]:
        lines.append(f"Stopped in: {found['unfinished']}")
    return lines


def counted(proofs: Mapping) -> str:
    """Return how many proofs are good, wrong and left out, in words."""
    good = sum(p["good"] for p in proofs["kernels"])
    wrong, out = len(proofs["kernels"]) - good, proofs["left_out"]
    left = f", {out} left out (no time)" if out else ""
    return f"{good} right, {wrong} wrong{left}"


def left_out(skipped: list[Mapping]) -> list[str]:
    """Return what was left out, by reason, with the first few by name."""
    whys = Counter("no time" if "left" in s["why"] else s["why"] for s in skipped)
    lines = []
    for why, count in whys.items():
        names = [
            s["what"]
            for s in skipped
            if s["why"] == why or (why == "no time" and "left" in s["why"])
        ]
        more = f" and {count - 3} more" if count > 3 else ""
        lines.append(f"left out ({why}): {'; '.join(names[:3])}{more}")
    return lines


RATE_COLUMNS = (
    ("MLX itself", "left"),
    ("reached", "right"),
    ("peak", "right"),
    ("share", "right"),
)
LAYER_COLUMNS = (
    ("layer", "left"),
    ("pass", "left"),
    ("route", "left"),
    ("ms", "right"),
    ("TFLOP/s", "right"),
    ("of matmul", "right"),
    ("predicted ms", "right"),
    ("roofline", "right"),
    ("published ms", "right"),
    ("error", "right"),
)
RELATION_COLUMNS = (
    ("relation", "left"),
    ("rows", "right"),
    ("edges", "right"),
    ("ms", "right"),
    ("for training", "right"),
    ("first", "right"),
)


def _table(columns, rows) -> str:
    """Return a table without the columns that say nothing."""
    kept = [at for at in range(len(columns)) if any(row[at] != "-" for row in rows)]
    return drawn([columns[at] for at in kept], [[r[at] for at in kept] for r in rows])


def _or_dash(value, form: str) -> str:
    return "-" if value is None else format(value, form)


def ms_of(value: float | None) -> str:
    """Return milliseconds as a column has them."""
    if value is None:
        return "-"
    if value < 0.01:
        return f"{value:.1g}"
    return f"{value:.3f}" if value < 10 else f"{value:,.1f}"


def _rate(rate: Mapping) -> tuple[str, ...]:
    unit = rate["unit"]
    share = f"{100 * rate['value'] / rate['peak']:.0f}%"
    value, peak = figure(rate["value"]), figure(rate["peak"])
    return rate["what"], f"{value} {unit}", peak, share


def figure(value: float) -> str:
    """Return three digits of a rate, and no power of ten."""
    return f"{value:,.0f}" if value >= 100 else f"{value:.3g}"


def matmul_rate(found: Mapping, dtype: str) -> float | None:
    """Return the TFLOP/s that MLX's matmul reached in a dtype, if it was measured."""
    for rate in found["rates"]:
        if rate["what"].startswith(f"matmul {dtype},"):
            return rate["value"]
    return None


def predicted_of(row: Mapping) -> str:
    """Return what was predicted of a row: "0.83 to 0.97"."""
    if not row["predicted"]:
        return "-"
    fast, slow = row["predicted"]
    return f"{ms_of(fast)} to {ms_of(slow)}"


def layer_cells(row: Mapping, found: Mapping) -> tuple[str, ...]:
    """Return a row's texts, by LAYER_COLUMNS."""
    dtype = row["layer"].rpartition(", ")[2]
    matmul, share = matmul_rate(found, dtype), "-"
    # On the CPU, MLX's own matmul may be that of a reference BLAS.
    if matmul and row["tflops"] and found["device"]["backend"] != CPU:
        share = f"{100 * row['tflops'] / matmul:.0f}%"
    roofline = row["roofline_ms"]
    error = "failed" if row["note"] else _or_dash(row["error"], ".0e")
    return (
        row["layer"],
        row["pass_"],
        ("> " if row["chosen"] else "  ") + row["route"],
        ms_of(row["ms"]),
        _or_dash(row["tflops"], ".3g"),
        share,
        predicted_of(row),
        "-" if roofline is None else milliseconds(roofline),
        _or_dash(row["published_ms"], "g"),
        error if row["good"] else f"WRONG {error}",
    )


def relation_cells(built: Mapping) -> tuple[str, ...]:
    """Return a build's texts, by RELATION_COLUMNS."""
    return (
        built["relation"],
        _or_dash(built["rows"], ","),
        _or_dash(built["edges"], ","),
        ms_of(built["ms"]),
        ms_of(built["training_ms"]),
        ms_of(built["first_ms"]),
    )


def experiment_text(experiment: Mapping) -> str:
    """Return an experiment: its question, how it was measured, what came of it."""
    e = experiment
    lines = [f"{e['number']}. {e['title']}: {e['question']}", f"   {e['how']}"]
    if e["rows"]:
        columns = [
            (name, "left" if at == 0 else "right")
            for at, name in enumerate(e["columns"])
        ]
        lines.append(drawn(columns, e["rows"]))
    lines.append(f"   -> {'WRONG: ' + e['wrong'] if e['wrong'] else e['result']}")
    return "\n".join(lines)
