"""compare(): traces of a net beside each other; a table and a page."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from string import ascii_uppercase
from typing import Any

from ..cache_files import atomic_write
from .explain import milliseconds
from .trace import (
    Record,
    Trace,
    check_page,
    drawn,
    environment,
    framed,
    or_dash,
    totals,
)


@dataclass(frozen=True)
class Row:
    """One contraction in each of the traces.

    Attributes:
        layer: its path in the net.
        pass_: "forward", "input_grad" or "weight_grad".
        records: its record in each trace, None if a trace lacks it.
        times: milliseconds in each trace, None if unknown; see ``Comparison.measured``.
    """

    layer: str
    pass_: str
    records: tuple[Record | None, ...]
    times: tuple[float | None, ...]

    @property
    def routes(self) -> tuple[str | None, ...]:
        """The name of the route in each trace."""
        return tuple(r and r.choice.route.name for r in self.records)

    @property
    def speedups(self) -> tuple[float | None, ...]:
        """The first trace's time over each later trace's: 2.0 is twice as fast."""
        return _speedups(self.times)


def _speedups(times: tuple[float | None, ...]) -> tuple[float | None, ...]:
    first, *others = times
    return tuple(first / t if first is not None and t else None for t in others)


@dataclass(frozen=True)
class Comparison:
    """Several traces beside each other. Prints as a table.

    Attributes:
        traces: the traces, in the order of the letters A, B, ... in table and page.
        rows: one for each layer and pass: in the order of the first trace, then those
            that it lacks. A layer that runs several times has several rows.
        measured: whether times are measured. They are rooflines if a trace was recorded
            without ``time=True``.
    """

    traces: tuple[Trace, ...]
    rows: tuple[Row, ...]
    measured: bool

    def __iter__(self) -> Iterator[Row]:
        return iter(self.rows)

    def __len__(self) -> int:
        return len(self.rows)

    @property
    def letters(self) -> str:
        """The letters of the traces."""
        return ascii_uppercase[: len(self.traces)]

    @property
    def title(self) -> str:
        """The nets, as "2 traces of MinkUNet18 and MinkUNet34"."""
        nets = dict.fromkeys(trace.net or "a block" for trace in self.traces)
        return f"{len(self.traces)} traces of {' and '.join(nets)}"

    @property
    def totals(self) -> tuple[float, ...]:
        """Milliseconds of each trace, over the rows whose time every trace has."""
        every = range(len(self.traces))
        return tuple(sum(row.times[at] for row in self.common) for at in every)

    @property
    def common(self) -> tuple[Row, ...]:
        """The rows whose time every trace has."""
        return tuple(row for row in self.rows if None not in row.times)

    @property
    def sentences(self) -> list[str]:
        """What the totals say of each trace after the first, and how times were got."""
        (first, *others), found = self.totals, []
        for letter, total, speedup in zip(
            self.letters[1:], others, _speedups(self.totals), strict=True
        ):
            if speedup is None:
                continue
            factor = f"{max(speedup, 1 / speedup):.3g}"
            word = "slower" if speedup < 1 else "faster"
            than = "as fast as" if factor == "1" else f"{factor}x {word} than"
            found.append(
                f"{letter} is {than} A: {milliseconds(total)} instead of "
                f"{milliseconds(first)}"
            )
        if len(self.common) < len(self):
            found.append(
                f"these totals are over {len(self.common)} of {len(self)} rows: the "
                "others have no time in every trace"
            )
        if not self.measured:
            found.append(
                "times are rooflines; for measured times record every trace with "
                "ml.trace(net, time=True)"
            )
        return found

    def _repr_html_(self) -> str | None:
        """Return the page in a frame, for notebooks; None without the extra viz."""
        return framed(page, self)

    def as_dict(self) -> dict[str, Any]:
        """Return traces, rows and totals as plain Python values, for JSON."""
        return {
            "measured": self.measured,
            "traces": [
                {"net": t.net, "device": t.device.name, "date": t.date, **t.versions}
                for t in self.traces
            ],
            "rows": [
                {
                    "layer": row.layer,
                    "pass": row.pass_,
                    "routes": list(row.routes),
                    "milliseconds": list(row.times),
                    "speedups": list(row.speedups),
                }
                for row in self.rows
            ],
            "totals": list(self.totals),
            "sentences": self.sentences,
        }

    def table(self) -> str:
        """Return a row for each layer and pass, and a line for each trace."""
        columns = [("layer", "left"), ("pass", "left")]
        time = "time" if self.measured else "roofline"
        for letter in self.letters:
            columns += [(f"route {letter}", "left"), (f"{time} {letter}", "right")]
        columns += [(f"speedup {letter}", "right") for letter in self.letters[1:]]
        rows = []
        for row in self.rows:
            cells = [row.layer, row.pass_]
            for route, taken in zip(row.routes, row.times, strict=True):
                cells += [route or "-", or_dash(taken, milliseconds)]
            cells += [or_dash(each, "{:.3g}x".format) for each in row.speedups]
            rows.append(cells)
        named = [
            f"{letter}: {trace.title}, {len(trace)} contractions"
            for letter, trace in zip(self.letters, self.traces, strict=True)
        ]
        return "\n".join([drawn(columns, rows), *named, *self.sentences])

    def __str__(self) -> str:
        return self.table()

    def __repr__(self) -> str:
        """Return the title and the totals in one line."""
        return f"<{self.title}: {'; '.join(self.sentences)}>"

    def save(self, path: str | Path) -> None:
        """Write one self-contained page (.html; needs the extra viz).

        Raises an ImportError without jinja2, and a ValueError for another suffix.
        """
        path = check_page(path, (".html",))
        text = page(self)
        with atomic_write(path) as draft:
            draft.write_text(text, encoding="utf-8")


def page(comparison: Comparison) -> str:
    """Return one self-contained HTML page."""
    times = [t for row in comparison for t in row.times if t is not None]
    return (
        environment()
        .get_template("compare.html")
        .render(
            comparison=comparison,
            passes=list(dict.fromkeys(row.pass_ for row in comparison)),
            longest=max([1e-12, *times]),
        )
    )


def compare(*traces: Trace | str | Path) -> Comparison:
    """Compare traces of a net: the route and the time of each layer and pass.

    Layers are matched by their paths, so record each trace with its net:
    ``ml.trace(net, time=True)``.

    Args:
        *traces: two or more traces, or paths of the .json files of saved ones. Speedups
            are relative to the first.

    Returns:
        The Comparison, which prints as a table; its ``save`` writes a page.

    Examples:
        >>> x = ml.SparseTensor.from_points(mx.random.normal((500, 3)), voxel_size=0.3)
        >>> net = nn.SubmConv3d(1, 8, 3)
        >>> with ml.trace(net, time=True) as a:
        ...     y = net(x)
        >>> with ml.trace(net, time=True) as b, ml.routes.only("gather_gemm_scatter"):
        ...     y = net(x)
        >>> found = ml.compare(a, b)
        >>> found.rows[0].layer, found.rows[0].routes[1]
        ('SubmConv3d', 'gather_gemm_scatter')

    Raises:
        FileNotFoundError: there is no file of that name.
        TypeError: an argument is neither a trace nor a path.
        ValueError: a file has no trace, there are fewer than two traces or more than
            26, or they have no layer in common.
    """
    loaded = tuple(_trace(trace) for trace in traces)
    if not 2 <= len(loaded) <= len(ascii_uppercase):
        raise ValueError(
            f"compare takes 2 to {len(ascii_uppercase)} traces; got {len(loaded)}"
        )
    by_place = [_places(trace) for trace in loaded]
    places = list(dict.fromkeys(place for each in by_place for place in each))
    if not any(all(place in each for each in by_place) for place in places):
        raise ValueError(
            f"the traces have no layer in common: {_names(loaded)}. Compare traces of "
            "one net, each recorded with ml.trace(net)"
        )
    measured = all(totals(trace)["milliseconds"] is not None for trace in loaded)
    rows = []
    for place in places:
        records = tuple(each.get(place) for each in by_place)
        times = tuple(r and _time(r, measured) for r in records)
        rows.append(Row(place[0], place[1], records, times))
    return Comparison(loaded, tuple(rows), measured)


def _trace(given: Trace | str | Path) -> Trace:
    if isinstance(given, Trace):
        return given
    if isinstance(given, str | Path):
        return Trace.load(given)
    more = "; pass each as an argument" if isinstance(given, list | tuple) else ""
    raise TypeError(
        "compare takes traces, or paths of the .json files that trace.save wrote; got "
        f"{type(given).__name__}{more}"
    )


def _places(trace: Trace) -> dict[tuple[str, str, int], Record]:
    """Return the records by layer, pass, and how often both came before."""
    seen: Counter[tuple[str, str]] = Counter()
    places = {}
    for record in trace:
        key = record.layer, record.problem.pass_
        places[(*key, seen[key])] = record
        seen[key] += 1
    return places


def _names(traces: tuple[Trace, ...]) -> str:
    """Return the first layer of each trace."""
    firsts = (
        f"starts with {t.records[0].layer}" if len(t) else "is empty" for t in traces
    )
    return ", ".join(
        f"{letter} {first}"
        for letter, first in zip(ascii_uppercase, firsts, strict=False)
    )


def _time(record: Record, measured: bool) -> float | None:
    return record.milliseconds if measured else record.cost.roofline_ms
