"""trace(): record every convolution of a net; a trace as table, page and JSON."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import asdict, dataclass, fields, replace
from datetime import datetime
from functools import partial
from html import escape
from importlib import resources
from pathlib import Path
from time import perf_counter
from typing import Any, TypeVar

import mlx.core as mx
from mlx.nn import Module

from .. import devices, memory
from ..cache_files import atomic_write
from ..channel_kernels import Fused, norm_observers
from ..devices import Device
from ..distribution import __version__, install
from ..epilogue import EpilogueFacts
from ..ops.attention_calls import Attended, attention_observers
from ..problem import IntegerFacts, Plan, Problem
from ..relation import Relation
from ..routes import launch
from ..routes.launch import Launch
from ..routes.selection import Choice, Route
from ..tensor import SparseTensor
from .explain import Cost, Explanation, LayerNames, cost, milliseconds, operations, size

FORMAT, SCHEMA = "mlx_lattice.trace", 1
REPEATS = 3  # runs of a contraction that is timed
_Facts = TypeVar("_Facts")


@dataclass(frozen=True)
class Record:
    """One contraction of a trace."""

    index: int  # in the order of launches
    layer: str  # path in the model, else class and index, else "call"
    problem: Problem
    choice: Choice
    inputs: tuple[tuple[int, ...], ...]
    output: tuple[int, ...]
    cost: Cost
    milliseconds: float | None = None  # the measured time
    note: str | None = None  # why a requested time is missing
    rounding_error: float | None = None  # of a calibrated integer layer

    @property
    def explanation(self) -> Explanation:
        """The record as ``explain`` prints it."""
        facts = self.problem, self.choice, self.cost, self.layer
        return Explanation(*facts, rounding_error=self.rounding_error)

    def __repr__(self) -> str:
        """Return the record in one line."""
        cells = _cells(self)
        facts = (f"{cells[name]} {name}" for name in ("channels", "rows"))
        time = "" if self.milliseconds is None else f", {cells['time']}"
        of = f"{cells['pass']} of {self.layer}, {cells['kernel']}"
        return f"<{of}, {', '.join(facts)}: {cells['route']}{time}>"

    def as_dict(self) -> dict[str, Any]:
        """Return the record as ``Trace.to_json`` writes it."""
        return {
            "index": self.index,
            **self.explanation.as_dict(),
            "inputs": [list(shape) for shape in self.inputs],
            "output": list(self.output),
            "milliseconds": self.milliseconds,
            "note": self.note,
        }

    @classmethod
    def from_dict(cls, row: dict[str, Any], device: Device) -> Record:
        """Return the record that ``as_dict`` wrote; its plan prints and cannot run."""
        facts, after = dict(row["problem"]), row["problem"]["integer"]
        if facts["epilogue"]:
            facts["epilogue"] = EpilogueFacts(*_tuples(facts["epilogue"]))
        facts["integer"] = after and _restored(IntegerFacts, after)
        problem = _restored(Problem, facts)
        dense = problem.dense if row["plan"]["expanded"] > 1 else problem
        reasons = [
            tuple((r["route"], r["reason"]) for r in row[name])
            for name in ("rejected", "below")
        ]
        choice = Choice.from_facts(
            Route(row["route"], (row["pass"],), (), row["idea"]),
            device,
            Plan.from_facts(dense, _tuples(row["plan"])),
            tuple(reasons),
            row["forced"],
            tuple((r["route"], r["milliseconds"]) for r in row["measured"]),
        )
        cost = _restored(Cost, row["cost"])
        return _restored(
            cls, row | {"problem": problem, "choice": choice, "cost": cost}
        )


@dataclass(frozen=True)
class NormRecord:
    """One norm of a trace, with its layer's path and what was fused into it."""

    layer: str
    norm: Fused

    def as_dict(self) -> dict[str, Any]:
        """Return the record as ``Trace.to_json`` writes it."""
        return {"layer": self.layer, **_facts_of(self.norm)}

    @classmethod
    def from_dict(cls, row: dict[str, Any]) -> NormRecord:
        """Return the record that ``as_dict`` wrote."""
        return cls(row["layer"], _restored(Fused, row, scope=None, pass_=row["pass"]))


@dataclass(frozen=True)
class AttentionRecord:
    """One attention of a trace, with its layer's path."""

    layer: str
    attention: Attended

    def as_dict(self) -> dict[str, Any]:
        """Return the record as ``Trace.to_json`` writes it."""
        facts = _facts_of(self.attention)
        return {"layer": self.layer, **facts, "padding": self.attention.padding}

    @classmethod
    def from_dict(cls, row: dict[str, Any]) -> AttentionRecord:
        """Return the record that ``as_dict`` wrote."""
        facts = _restored(Attended, row, scope=None, pass_=row["pass"])
        return cls(row["layer"], facts)


def _facts_of(fact: Fused | Attended) -> dict:
    named = {f.name: getattr(fact, f.name) for f in fields(fact)}
    facts = {"pass": fact.pass_, **named}
    return {k: v for k, v in facts.items() if k not in ("scope", "pass_", "forms")}


def _tuples(value):
    """Return a value of JSON with tuples for lists."""
    if isinstance(value, dict):
        return {k: _tuples(v) for k, v in value.items()}
    return tuple(map(_tuples, value)) if isinstance(value, list) else value


def _restored(cls: type[_Facts], row: dict, **others) -> _Facts:
    """Return a dataclass whose fields are entries of a row."""
    values = row | others
    return cls(
        **{f.name: _tuples(values[f.name]) for f in fields(cls) if f.name in values}
    )


class Trace:
    """Hold what ran in a ``with ml.trace()`` block. Prints as a table, and pickles.

    Attributes:
        records: one for each contraction, in the order of launches.
        norms: one for each norm by channel, with what was fused into it.
        attention: one for each call of attention, with its padding.
        device: the profile that MLX ran on.
        timed: whether times were requested.
        net: the class of the traced net, "" if none was named. Set another name to
            tell several traces of a net apart in ``compare``.
        date: when the block began, in ISO 8601 with the offset from UTC.
        versions: of "mlx_lattice" and "mlx".
    """

    def __init__(self, device: Device, timed: bool, net: str = ""):
        self.device: Device = device
        self.timed: bool = timed
        self.net: str = net
        self.date: str = datetime.now().astimezone().isoformat(timespec="seconds")
        self.versions: dict[str, Any] = {
            "mlx_lattice": __version__,
            "mlx": mx.__version__,
        }
        self.records: list[Record] = []
        self.norms: list[NormRecord] = []
        self.attention: list[AttentionRecord] = []

    def __len__(self) -> int:
        return len(self.records)

    def __iter__(self) -> Iterator[Record]:
        return iter(self.records)

    def __str__(self) -> str:
        return self.table()

    def __repr__(self) -> str:
        """Return the title and the totals in one line."""
        return f"<Trace of {self.net or 'a block'}, {self.date}: {_summary(self)}>"

    def _repr_html_(self) -> str | None:
        """Return the page in a frame, for notebooks; None without the extra viz."""
        return framed(page, self)

    @property
    def title(self) -> str:
        """As "MinkUNet18 on cpu, 2026-05-17 14:05"."""
        date = datetime.fromisoformat(self.date)
        return f"{self.net or 'a block'} on {self.device.name}, {date:%Y-%m-%d %H:%M}"

    def table(self) -> str:
        """Return a row for each contraction, norm and attention."""
        return table(self)

    def as_dict(self) -> dict[str, Any]:
        """Return what ``to_json`` writes, as Python objects."""
        return {
            "format": FORMAT,
            "version": SCHEMA,
            **self.versions,
            "net": self.net,
            "date": self.date,
            "device": asdict(self.device),
            "timed": self.timed,
            "records": [record.as_dict() for record in self.records],
            "norms": [record.as_dict() for record in self.norms],
            "attention": [record.as_dict() for record in self.attention],
        }

    def to_json(self) -> str:
        """Return the trace as JSON.

        ``format`` is "mlx_lattice.trace"; ``version`` grows when a field changes its
        meaning, and fields may be added without that. ``records``, ``norms`` and
        ``attention`` have the fields of the objects here, with "pass" for ``pass_``.
        Unknown values are null.
        """
        return json.dumps(self.as_dict(), indent=1, default=str)

    @classmethod
    def from_dict(cls, facts: dict[str, Any]) -> Trace:
        """Return the trace that ``as_dict`` wrote. Its plans print and cannot run."""
        device = Device(**facts["device"])
        trace = cls(device, facts["timed"], facts["net"])
        trace.date = facts["date"]
        trace.versions = {name: facts[name] for name in trace.versions}
        trace.records = [Record.from_dict(row, device) for row in facts["records"]]
        trace.norms = [NormRecord.from_dict(row) for row in facts["norms"]]
        trace.attention = [AttentionRecord.from_dict(r) for r in facts["attention"]]
        return trace

    @classmethod
    def load(cls, path: str | Path) -> Trace:
        """Read a trace from the JSON that ``save`` wrote.

        It prints, saves and compares as the saved one did; its plans cannot run.

        Examples:
            >>> trace = ml.Trace.load("run.json")  # doctest: +SKIP

        Raises:
            FileNotFoundError: there is no such file.
            ValueError: the file has no trace, or one of another version.
        """
        path = Path(path)
        try:
            facts = json.loads(path.read_text(encoding="utf-8"))
        except ValueError:
            facts = None
        if not isinstance(facts, dict) or facts.get("format") != FORMAT:
            raise ValueError(
                f"{path.name} has no trace; pass the .json that trace.save wrote"
            )
        try:
            return cls.from_dict(facts)
        except (KeyError, TypeError, ValueError) as error:
            raise ValueError(
                f"{path.name} was written by mlx_lattice {facts.get('mlx_lattice')}, "
                f"and {__version__} cannot read it ({error}); trace the net again"
            ) from error

    def save(self, path: str | Path) -> None:
        """Write a page (.html; needs the extra viz) or JSON for ``load`` (.json).

        Raises an ImportError without jinja2, and a ValueError for another suffix.
        """
        path = check_page(path)
        text = page(self) if path.suffix == ".html" else self.to_json()
        with atomic_write(path) as draft:
            draft.write_text(text, encoding="utf-8")


def check_page(path: str | Path, suffixes: Sequence[str] = (".html", ".json")) -> Path:
    """Return the path of a page; check it before the work starts.

    Raises the errors of ``Trace.save``.
    """
    path = Path(path)
    if path.suffix not in suffixes:
        allowed = " or ".join(suffixes)
        raise ValueError(f"the file must end in {allowed}; got {path.name!r}")
    if path.suffix == ".html":
        environment()
    return path


def trace(
    model: Module | None = None, time: bool = False
) -> AbstractContextManager[Trace]:
    """Record every convolution, norm and attention in the block, gradients included.

    ``LayerNorm`` and ``RMSNorm`` that run on MLX's own kernels have no record. A
    function inside ``mx.compile`` is recorded once, when it is traced.

    Args:
        model: a net whose ``named_modules`` give layers their paths.
        time: whether to run each contraction three more times, from evaluated inputs to
            an evaluated result, and take the shortest time. Under ``mx.compile`` and
            ``mx.vmap`` the time is None, and the note says so.

    Yields:
        The Trace. Edges are counted and costs known once the block has ended.

    Examples:
        >>> x = ml.SparseTensor.from_dense(mx.ones((1, 4, 4, 4, 8)))
        >>> net = nn.Sequential(nn.SubmConv3d(8, 8, 3), nn.SubmConv3d(8, 4, 3))
        >>> with ml.trace(net) as trace:
        ...     y = net(x)
        >>> [record.layer for record in trace.records]  # print(trace) shows the table
        ['layers.0', 'layers.1']
    """
    if isinstance(model, SparseTensor) or isinstance(time, SparseTensor | mx.array):
        raise TypeError(
            "ml.trace takes no input; call the net inside its block: "
            "with ml.trace(net) as t: net(x)"
        )
    return _trace(model, time)


@contextmanager
def _trace(model, time: bool) -> Iterator[Trace]:
    net = "" if model is None else type(model).__name__
    names, result = LayerNames(model), Trace(devices.current(), time, net)
    relations: list[Relation | None] = []

    def add_record(launched: Launch) -> None:
        taken, note = _timed(launched) if time else (None, None)
        problem, choice = launched.problem, launched.choice
        result.records.append(
            Record(
                index=len(result.records),
                layer=names.of(launched.scope),
                problem=problem,
                choice=choice,
                inputs=tuple(tuple(a.shape) for a in launched.inputs),
                output=tuple(launched.result.shape),
                cost=cost(problem, choice.device, choice=choice),
                milliseconds=taken,
                note=note,
                rounding_error=getattr(launched.scope, "rounding_error", None),
            )
        )
        # A memory limit frees relations, so their edges are not counted.
        relations.append(launched.relation if memory.active() is None else None)

    def add_norm(norm: Fused) -> None:
        # Without the layer: a pickle would contain its weights.
        facts = replace(norm, scope=None)
        result.norms.append(NormRecord(names.of(norm.scope), facts))

    def add_attention(attended: Attended) -> None:
        facts = replace(attended, scope=None)
        result.attention.append(AttentionRecord(names.of(attended.scope), facts))

    with (
        launch.observe(add_record),
        norm_observers.observe(add_norm),
        attention_observers.observe(add_attention),
    ):
        yield result
    for at, (record, relation) in enumerate(
        zip(result.records, relations, strict=True)
    ):
        if relation is not None:
            facts = {"choice": record.choice, "relation": relation}
            counts = cost(record.problem, record.choice.device, **facts)
            result.records[at] = replace(record, cost=counts)


def _timed(launched: Launch) -> tuple[float | None, str | None]:
    plan = launched.choice.plan
    try:
        # The first call also builds the relation's views and compiles GPU kernels.
        mx.eval(launched.result, *launched.inputs)
    except ValueError:
        return None, "no time: mx.compile and mx.vmap allow no evaluation"
    times = []
    for _ in range(REPEATS):
        start = perf_counter()
        mx.eval(launched.run(plan, *launched.inputs, *launched.bias))
        times.append(1e3 * (perf_counter() - start))
    return min(times), None


OPTIONAL = "rounded", "time"  # columns that are left out if no record has a value


def totals(trace: Trace) -> dict[str, float | None]:
    """Return sums over the records of a trace; None if a part is not known."""
    costs = [record.cost for record in trace]
    values = {
        "flops": [c.useful_flops for c in costs],
        "bytes_moved": [c.bytes_moved for c in costs],
        "roofline_ms": [c.roofline_ms for c in costs],
        "milliseconds": [record.milliseconds for record in trace],
    }
    return {k: None if None in some else sum(some) for k, some in values.items()}


def or_dash(value: Any, write: Callable[..., str]) -> str:
    """Return a value as text, "-" if it is unknown."""
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
        "rounded": or_dash(record.rounding_error, "{:.2%}".format),
        "rows": f"{changes}{p.n_out:,}",
        "edges/row": or_dash(c.edges_per_row, "{:.1f}".format),
        "work": or_dash(c.useful_flops, operations),
        "moves": or_dash(c.bytes_moved, size),
        "roofline": or_dash(c.roofline_ms, milliseconds),
        "time": or_dash(record.milliseconds, milliseconds),
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


def table(trace: Trace) -> str:
    """Return a row for each contraction, norm and attention of a trace."""
    norms = _drawn(
        {
            "norm": record.layer,
            "pass": record.norm.pass_,
            "fused": str(record.norm),
            "channels": str(record.norm.channels),
            "dtype": record.norm.dtype,
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
        f"{or_dash(total['flops'], operations)}, "
        f"{or_dash(total['bytes_moved'], size)} must move, roofline "
        f"{or_dash(total['roofline_ms'], milliseconds)} ({rates}){time}"
    )


def _attention(trace) -> list[str]:
    rows = _drawn(
        {
            "attention": record.layer,
            "pass": record.attention.pass_,
            "ran": str(record.attention),
            "heads": f"{record.attention.heads} x {record.attention.channels}",
            "dtype": record.attention.dtype,
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


def environment() -> dict[str, Any]:
    """Return the jinja2 environment of the pages; an ImportError says how to get it."""
    try:
        import jinja2
        from markupsafe import Markup
    except ImportError as error:
        raise ImportError(f"a page needs jinja2; {install('viz')}") from error
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

    def dotted(path: str) -> str:
        """Let a browser break a layer's path after a dot."""
        return Markup(".<wbr>").join(path.split("."))

    jinja.filters |= {
        "dotted": dotted,
        "operations": partial(or_dash, write=operations),
        "size": partial(or_dash, write=size),
        "milliseconds": partial(or_dash, write=milliseconds),
        "number": lambda value: "" if value is None else f"{value:.6g}",
    }
    return jinja


# Columns of the page; the last one only if times were requested.
COLUMNS = (
    *("#", "layer", "pass", "route", "channels", "rows"),
    *("edges a row", "occupancy", "roofline", "time"),
)


def framed(page: Callable[..., str], shown: object) -> str | None:
    """Return ``page(shown)`` as a frame for notebooks; None without jinja2."""
    try:
        text = escape(page(shown))
    except ImportError:
        return None
    return (
        f'<iframe srcdoc="{text}" width="100%" height="640" style="border:0"></iframe>'
    )


def page(trace: Trace) -> str:
    """Return one self-contained HTML page."""
    return (
        environment()
        .get_template("trace.html")
        .render(
            trace=trace,
            totals=totals(trace),
            routes=_shares(trace),
            passes=list(dict.fromkeys(r.problem.pass_ for r in trace)),
            columns=COLUMNS[: None if trace.timed else -1],
            longest=max([1e-12, *(r.cost.roofline_ms or 0.0 for r in trace)]),
            slowest=max([1e-12, *(r.milliseconds or 0.0 for r in trace)]),
        )
    )


def _shares(trace) -> list[tuple[str, int, float]]:
    """Return (route, contractions, share of the time), largest first."""
    timed = totals(trace)["milliseconds"] is not None
    counts, times = Counter(), Counter()
    for record in trace:
        name = record.choice.route.name
        counts[name] += 1
        times[name] += (record.milliseconds if timed else record.cost.roofline_ms) or 0
    whole = sum(times.values()) or 1.0
    shares = [(name, count, times[name] / whole) for name, count in counts.items()]
    return sorted(shares, key=lambda share: -share[2])
