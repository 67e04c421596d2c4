"""A trace for people: a table in the terminal, a page in the browser."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence
from functools import partial
from importlib import resources

import mlx.core as mx

from .cost import milliseconds, operations, size

OPTIONAL = "rounded", "time"  # columns that are left out if no record has a value


def totals(trace) -> dict[str, float | None]:
    """Return sums over the records of a trace; None if a part is not known."""
    costs = [record.cost for record in trace]
    values = {
        "flops": [c.useful_flops for c in costs],
        "bytes_moved": [c.bytes_moved for c in costs],
        "roofline_ms": [c.roofline_ms for c in costs],
        "milliseconds": [record.milliseconds for record in trace],
    }
    return {k: None if None in some else sum(some) for k, some in values.items()}


def _or_dash(value, write) -> str:
    return "-" if value is None else write(value)


def _cells(record) -> dict[str, str]:
    p, c = record.problem, record.cost
    groups = f" /{p.groups}" if p.groups > 1 else ""
    changes = f"{p.n_in:,} > " if p.n_in != p.n_out else ""
    return {
        "#": str(record.index),
        "layer": record.layer,
        "pass": p.pass_,
        "route": str(record.choice.route) + " (forced)" * record.choice.forced,
        "kernel": f"{p.kind} {p.kernel}",
        "channels": f"{p.c_in} > {p.c_out}{groups}",
        "dtype": p.operands,
        "rounded": _or_dash(record.rounding_error, "{:.2%}".format),
        "rows": f"{changes}{p.n_out:,}",
        "edges/row": _or_dash(c.edges_per_row, "{:.1f}".format),
        "work": _or_dash(c.useful_flops, operations),
        "moves": _or_dash(c.bytes_moved, size),
        "roofline": _or_dash(c.roofline_ms, milliseconds),
        "time": _or_dash(record.milliseconds, milliseconds),
    }


LEFT = "layer", "pass", "route", "kernel", "dtype", "norm", "attention", "fused", "ran"


def _drawn(rows: Iterable[dict[str, str]]) -> list[str]:
    rows = list(rows)
    if not rows:
        return []
    shown = [
        name
        for name in rows[0]
        if name not in OPTIONAL or any(row[name] != "-" for row in rows)
    ]
    columns = [(name, "left" if name in LEFT else "right") for name in shown]
    return [drawn(columns, [[row[name] for name in shown] for row in rows])]


def table(trace) -> str:
    """Return a row for each contraction, norm and attention of a trace."""
    norms = _drawn(
        {
            "norm": record.layer,
            "pass": record.norm.pass_,
            "fused": str(record.norm),
            "channels": str(record.norm.channels),
            "dtype": str(record.norm.dtype).rpartition(".")[2],
            "rows": f"{record.norm.rows:,}",
        }
        for record in trace.norms
    )
    notes = sorted({record.note for record in trace if record.note})
    contractions = _drawn(map(_cells, trace))
    parts = *contractions, _summary(trace), *notes, *norms, *_attention(trace)
    return "\n".join(parts)


def _summary(trace) -> str:
    total, device = totals(trace), trace.device
    rates = "estimated rates" if device.estimated else "measured rates"
    time = ""
    if trace.timed and total["milliseconds"] is not None:
        time = f", took {milliseconds(total['milliseconds'])}"
    return (
        f"{len(trace)} contractions on {device.name}: "
        f"{_or_dash(total['flops'], operations)}, "
        f"{_or_dash(total['bytes_moved'], size)} must move, roofline "
        f"{_or_dash(total['roofline_ms'], milliseconds)} ({rates}){time}"
    )


def _attention(trace) -> list[str]:
    rows = _drawn(
        {
            "attention": record.layer,
            "pass": record.attention.pass_,
            "ran": str(record.attention),
            "heads": f"{record.attention.heads} x {record.attention.channels}",
            "dtype": str(record.attention.dtype).rpartition(".")[2],
            "rows": f"{record.attention.rows:,}",
        }
        for record in trace.attention
    )
    if not rows:
        return []
    calls = [record.attention for record in trace.attention]
    useful = sum(a.heads * a.pairs for a in calls)
    done = sum(a.heads * a.padded_pairs for a in calls)
    return [
        *rows,
        f"attention computed {done:.3g} pairs of queries and keys, {done / useful:.3g} "
        f"times the {useful:.3g} that are useful",
    ]


def drawn(columns: Sequence[tuple[str, str]], rows: Sequence[Sequence[str]]) -> str:
    """Return rows of texts as a table of (name, "left" or "right") columns."""
    widths = [
        max([len(name), *(len(row[at]) for row in rows)])
        for at, (name, _) in enumerate(columns)
    ]
    lines = [[name for name, _ in columns], ["-" * w for w in widths], *rows]
    return "\n".join(
        "  ".join(
            text.rjust(width) if side == "right" else text.ljust(width)
            for text, width, (_, side) in zip(line, widths, columns, strict=True)
        ).rstrip()
        for line in lines
    )


def environment():
    """Return the jinja2 environment of the pages: templates and number filters.

    Raises:
        ImportError: jinja2 is not installed.
    """
    try:
        import jinja2
    except ImportError as error:
        raise ImportError(
            "writing a page needs jinja2; run: pip install jinja2"
        ) from error
    folder = resources.files(__package__).joinpath("templates")
    jinja = jinja2.Environment(
        autoescape=True,
        trim_blocks=True,
        lstrip_blocks=True,
        undefined=jinja2.StrictUndefined,
        loader=jinja2.FunctionLoader(
            lambda name: folder.joinpath(name).read_text(encoding="utf-8")
        ),
    )
    jinja.filters |= {
        "operations": partial(_or_dash, write=operations),
        "size": partial(_or_dash, write=size),
        "milliseconds": partial(_or_dash, write=milliseconds),
    }
    return jinja


def page(trace) -> str:
    """Return one self-contained HTML page.

    Raises:
        ImportError: jinja2 is not installed.
    """
    return (
        environment()
        .get_template("trace.html")
        .render(
            trace=trace,
            totals=totals(trace),
            routes=_shares(trace),
            passes=list(dict.fromkeys(r.problem.pass_ for r in trace)),
            longest=max([1e-12, *(r.cost.roofline_ms or 0.0 for r in trace)]),
            slowest=max([1e-12, *(r.milliseconds or 0.0 for r in trace)]),
            bars=_bars,
            mlx=mx.__version__,
        )
    )


def _shares(trace) -> list[tuple[str, int, float]]:
    """Return (route, contractions, share of the time), largest first.

    The time is the measured one if every contraction has one, else the roofline.
    """
    timed = totals(trace)["milliseconds"] is not None
    counts, times = Counter(), Counter()
    for record in trace:
        name = record.choice.route.name
        counts[name] += 1
        times[name] += (record.milliseconds if timed else record.cost.roofline_ms) or 0
    whole = sum(times.values()) or 1.0
    shares = [(name, count, times[name] / whole) for name, count in counts.items()]
    return sorted(shares, key=lambda share: -share[2])


def _bars(degrees: tuple[int, ...], most: int = 40) -> list[tuple[str, int, float]]:
    """Return (label, rows, height from 0 to 1) of a histogram of at most 40 bars."""
    step = -(-len(degrees) // most) or 1
    bars = [
        (
            str(at) if step == 1 else f"{at} to {min(at + step, len(degrees)) - 1}",
            sum(degrees[at : at + step]),
        )
        for at in range(0, len(degrees), step)
    ]
    highest = max([count for _, count in bars], default=0) or 1
    return [(label, count, count / highest) for label, count in bars]
