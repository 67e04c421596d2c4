"""A trace for people: a table in the terminal, a page in the browser."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from importlib import resources
from io import StringIO

import mlx.core as mx

from .cost import milliseconds, operations, size
from .record import Record, Records

COLUMNS = (
    ("#", "right"),
    ("layer", "left"),
    ("pass", "left"),
    ("route", "left"),
    ("kernel", "left"),
    ("channels", "right"),
    ("dtype", "left"),
    ("rounded", "right"),
    ("rows", "right"),
    ("edges/row", "right"),
    ("work", "right"),
    ("moves", "right"),
    ("roofline", "right"),
    ("time", "right"),
)
OPTIONAL = "rounded", "time"  # columns that are left out if no record has a value
NORM_COLUMNS = (
    ("norm", "left"),
    ("pass", "left"),
    ("fused", "left"),
    ("channels", "right"),
    ("dtype", "left"),
    ("rows", "right"),
)
ATTENTION_COLUMNS = (
    ("attention", "left"),
    ("pass", "left"),
    ("ran", "left"),
    ("heads", "right"),
    ("dtype", "left"),
    ("rows", "right"),
)


@dataclass(frozen=True)
class Totals:
    """Sums over the records of a trace; None where a part is not known."""

    flops: int | None
    bytes_moved: int | None
    roofline_ms: float | None
    milliseconds: float | None

    @classmethod
    def of(cls, trace: Records) -> Totals:
        """Add up a trace."""
        costs = [record.cost for record in trace]
        return cls(
            _sum(c.useful_flops for c in costs),
            _sum(c.bytes_moved for c in costs),
            _sum(c.roofline_ms for c in costs),
            _sum(record.milliseconds for record in trace),
        )


def _sum(values):
    values = list(values)
    return None if None in values else sum(values)


def _or_dash(value, write) -> str:
    return "-" if value is None else write(value)


def rows_of(record: Record) -> str:
    """Return "1,000", or "1,000 > 200" where a layer changes its rows."""
    p = record.problem
    return f"{p.n_out:,}" if p.n_in == p.n_out else f"{p.n_in:,} > {p.n_out:,}"


def cells(record: Record) -> tuple[str, ...]:
    """Return a record as the table's row of text."""
    p, c = record.problem, record.cost
    groups = f" /{p.groups}" if p.groups > 1 else ""
    return (
        str(record.index),
        record.layer,
        p.pass_,
        str(record.choice.route) + (" (forced)" if record.choice.forced else ""),
        f"{p.kind} {p.kernel}",
        f"{p.c_in} > {p.c_out}{groups}",
        p.operands,
        _or_dash(record.rounding_error, "{:.2%}".format),
        rows_of(record),
        _or_dash(c.edges_per_row, "{:.1f}".format),
        _or_dash(c.useful_flops, operations),
        _or_dash(c.bytes_moved, size),
        _or_dash(c.roofline_ms, milliseconds),
        _or_dash(record.milliseconds, milliseconds),
    )


def summary(trace: Records) -> str:
    """Return the totals in one line."""
    total, device = Totals.of(trace), trace.device
    rates = "estimated rates" if device.estimated else "measured rates"
    time = "" if total.milliseconds is None else milliseconds(total.milliseconds)
    return (
        f"{len(trace)} contractions on {device.name}: "
        f"{_or_dash(total.flops, operations)}, "
        f"{_or_dash(total.bytes_moved, size)} must move, roofline "
        f"{_or_dash(total.roofline_ms, milliseconds)} ({rates})"
        + (f", took {time}" if trace.timed and time else "")
    )


def table(trace: Records) -> str:
    """Return a row a contraction; drawn by rich where it is installed."""
    rows = [cells(record) for record in trace]
    shown = [
        at
        for at, (name, _) in enumerate(COLUMNS)
        if name not in OPTIONAL or any(row[at] != "-" for row in rows)
    ]
    rows = [[row[at] for at in shown] for row in rows]
    columns = [COLUMNS[at] for at in shown]
    notes = sorted({record.note for record in trace if record.note})
    more = *norms(trace), *attention(trace)
    return "\n".join([drawn(columns, rows), summary(trace), *notes, *more])


def norms(trace: Records) -> list[str]:
    """Return a table of the norms and what was fused into them, if there are any."""
    rows = [
        (
            record.layer,
            record.norm.pass_,
            str(record.norm),
            f"{record.norm.channels}",
            str(record.norm.dtype).rpartition(".")[2],
            f"{record.norm.rows:,}",
        )
        for record in trace.norms
    ]
    return [drawn(NORM_COLUMNS, rows)] * bool(rows)


def attention(trace: Records) -> list[str]:
    """Return a table of attention and its padding, if there is any."""
    rows = [
        (
            record.layer,
            record.attention.pass_,
            str(record.attention),
            f"{record.attention.heads} x {record.attention.channels}",
            str(record.attention.dtype).rpartition(".")[2],
            f"{record.attention.rows:,}",
        )
        for record in trace.attention
    ]
    if not rows:
        return []
    told = [record.attention for record in trace.attention]
    useful, done = (
        sum(a.heads * pairs(a) for a in told)
        for pairs in (lambda a: a.pairs, lambda a: a.padded_pairs)
    )
    total = (
        f"attention computed {done:.3g} pairs of queries and keys, {done / useful:.3g} "
        f"times the {useful:.3g} that are useful"
    )
    return [drawn(ATTENTION_COLUMNS, rows), total]


def drawn(columns: Sequence[tuple[str, str]], rows: Sequence[Sequence[str]]) -> str:
    """Return rows of texts as a table; drawn by rich where it is installed.

    Args:
        columns: (name, side) of each, "left" or "right".
        rows: a text a column.
    """
    try:
        return _rich(columns, rows)
    except ImportError:
        return _plain(columns, rows)


def _rich(columns, rows) -> str:
    from rich import box
    from rich.console import Console
    from rich.table import Table

    drawn = Table(box=box.SIMPLE_HEAD, pad_edge=False)
    for name, side in columns:
        drawn.add_column(name, justify=side, no_wrap=True)
    for row in rows:
        drawn.add_row(*row)
    width = 8 + sum(
        max(len(name), *(len(row[at]) for row in rows), 0) + 3
        for at, (name, _) in enumerate(columns)
    )
    console = Console(file=StringIO(), width=width, color_system=None, markup=False)
    console.print(drawn)
    lines = console.file.getvalue().splitlines()
    return "\n".join(line.rstrip() for line in lines if line.strip())


def _plain(columns, rows) -> str:
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
    """Return jinja2's environment of the pages: their templates, and how numbers read.

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
    made = jinja2.Environment(
        autoescape=True,
        trim_blocks=True,
        lstrip_blocks=True,
        undefined=jinja2.StrictUndefined,
        loader=jinja2.FunctionLoader(
            lambda name: folder.joinpath(name).read_text(encoding="utf-8")
        ),
    )
    made.filters |= {
        "operations": partial(_or_dash, write=operations),
        "size": partial(_or_dash, write=size),
        "milliseconds": partial(_or_dash, write=milliseconds),
        "rows": rows_of,
    }
    return made


def page(trace: Records) -> str:
    """Return one self-contained HTML page.

    Raises:
        ImportError: jinja2 is not installed.
    """
    template = environment().get_template("trace.html")
    rooflines = [r.cost.roofline_ms or 0.0 for r in trace]
    times = [r.milliseconds or 0.0 for r in trace]
    return template.render(
        trace=trace,
        totals=Totals.of(trace),
        routes=_shares(trace),
        passes=list(dict.fromkeys(r.problem.pass_ for r in trace)),
        longest=max([*rooflines, 1e-12]),
        slowest=max([*times, 1e-12]),
        bars=_bars,
        mlx=mx.__version__,
    )


def _shares(trace: Records) -> list[tuple[str, int, float]]:
    """Return (route, contractions, share of the time), largest first.

    The time is the measured one where every contraction has one, else the roofline.
    """
    timed = Totals.of(trace).milliseconds is not None
    counts: dict[str, int] = {}
    times: dict[str, float] = {}
    for record in trace:
        name = record.choice.route.name
        took = record.milliseconds if timed else record.cost.roofline_ms
        counts[name] = counts.get(name, 0) + 1
        times[name] = times.get(name, 0.0) + (took or 0.0)
    whole = sum(times.values()) or 1.0
    shares = [(name, counts[name], times[name] / whole) for name in counts]
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
