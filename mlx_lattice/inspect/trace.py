"""trace(): every convolution of a net, forward and backward, as it was launched."""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from time import perf_counter

import mlx.core as mx

from .. import devices
from ..devices import Device
from ..problem import Problem
from ..relation import Relation
from ..routes import launch
from ..routes.launch import Launch
from ..routes.selection import Choice
from .cost import Cost, cost
from .explain import Explanation, LayerNames

SCHEMA = 1


@dataclass(frozen=True)
class Record:
    """One contraction of a trace.

    Attributes:
        index: its place in the order of launches.
        layer: path of its layer in the model, else class and index, else "call".
        problem: its facts, edges counted.
        choice: the Choice that was executed.
        inputs: shapes of what was contracted.
        output: shape of the result.
        cost: operations, bytes and roofline.
        degrees: number of output rows with 0, 1, ... edges.
        milliseconds: what it took, or None.
        note: why there is no time where one was asked for.
    """

    index: int
    layer: str
    problem: Problem
    choice: Choice
    inputs: tuple[tuple[int, ...], ...]
    output: tuple[int, ...]
    cost: Cost
    degrees: tuple[int, ...] = ()
    milliseconds: float | None = None
    note: str | None = None

    @property
    def explanation(self) -> Explanation:
        """The record as ``explain`` prints it."""
        return Explanation(self.problem, self.choice, self.cost, self.layer)

    def as_dict(self) -> dict:
        """Return the record as ``Trace.to_json`` writes it."""
        choice = self.choice
        return {
            "index": self.index,
            "layer": self.layer,
            "pass": self.problem.pass_,
            "route": choice.route.name,
            "idea": choice.route.idea,
            "parameters": dict(choice.parameters),
            "view": choice.view,
            "forced": choice.forced,
            "measured": [{"route": r, "milliseconds": t} for r, t in choice.measured],
            "rejected": [{"route": r, "reason": why} for r, why in choice.rejected],
            "below": [{"route": r, "reason": why} for r, why in choice.below],
            "problem": asdict(self.problem) | {"summary": str(self.problem)},
            "inputs": [list(shape) for shape in self.inputs],
            "output": list(self.output),
            "cost": self.cost.as_dict(),
            "degrees": list(self.degrees),
            "milliseconds": self.milliseconds,
            "note": self.note,
        }


class Trace:
    """The records of a ``with ml.trace()`` block.

    Attributes:
        records: one a contraction, in the order of launches.
        device: the profile that MLX ran on.
        timed: whether times were asked for.
    """

    def __init__(self, device: Device, timed: bool):
        self.device, self.timed = device, timed
        self.records: list[Record] = []

    def __len__(self) -> int:
        return len(self.records)

    def __iter__(self) -> Iterator[Record]:
        return iter(self.records)

    def __str__(self) -> str:
        return self.table()

    def table(self) -> str:
        """Return a row a contraction; drawn by rich where it is installed."""
        from . import page

        return page.table(self)

    def as_dict(self) -> dict:
        """Return what ``to_json`` writes, as Python objects."""
        return {
            "format": "mlx_lattice.trace",
            "version": SCHEMA,
            "mlx": mx.__version__,
            "device": asdict(self.device),
            "timed": self.timed,
            "records": [record.as_dict() for record in self.records],
        }

    def to_json(self) -> str:
        """Return the trace as JSON.

        ``format`` is "mlx_lattice.trace", ``version`` an integer that grows when a
        field changes its meaning; fields may be added without that. ``device`` is
        the profile and ``timed`` whether times were asked for. Each of ``records``
        has ``index``, ``layer``, ``pass``, ``route``, ``idea``, ``parameters``,
        ``view`` (the relation's, that is read), ``forced``, ``measured`` (route,
        milliseconds), ``rejected`` and ``below`` (route, reason), ``problem`` (every
        field of ``Problem`` and a ``summary``), ``inputs`` and ``output`` (shapes),
        ``cost`` (every field of ``Cost``, with ``roofline_ms`` and ``bound``),
        ``degrees`` (output rows with 0, 1, ... edges), ``milliseconds`` and ``note``.
        What is not known is null.
        """
        return json.dumps(self.as_dict(), indent=1, default=str)

    def save(self, path: str | Path) -> None:
        """Write a page (.html; needs jinja2) or the JSON (.json).

        Raises:
            ImportError: jinja2 is not installed; the message has the command.
            ValueError: the suffix is another one.
        """
        from . import page

        path = Path(path)
        writers = {".html": page.page, ".json": Trace.to_json}
        if path.suffix not in writers:
            raise ValueError(f"a trace is saved as .html or .json; got {path.name!r}")
        path.write_text(writers[path.suffix](self), encoding="utf-8")


@contextmanager
def trace(model=None, time: bool = False) -> Iterator[Trace]:
    """Record every convolution in the block, gradients included.

    Inside ``mx.compile`` a function is seen once, when it is traced: later calls run
    the compiled graph and record nothing.

    Args:
        model: a net whose ``named_modules`` give layers their paths.
        time: run each contraction a second time, from evaluated inputs to an
            evaluated result, and take that time. Under ``mx.compile`` and ``mx.vmap``
            nothing can be evaluated: the time is then None, and the note says so.

    Yields:
        The Trace. Edges are counted and costs known once the block has ended.
    """
    names, found = LayerNames(model), Trace(devices.current(), time)
    relations: list[Relation | None] = []

    def keep(launched: Launch) -> None:
        taken, note = _timed(launched) if time else (None, None)
        found.records.append(
            Record(
                index=len(found.records),
                layer=names.of(launched.scope),
                problem=launched.problem,
                choice=launched.choice,
                inputs=tuple(tuple(a.shape) for a in launched.inputs),
                output=tuple(launched.result.shape),
                cost=cost(
                    launched.problem, launched.choice.device, choice=launched.choice
                ),
                milliseconds=taken,
                note=note,
            )
        )
        relations.append(launched.relation)

    with launch.observe(keep):
        yield found
    counted: dict[int, tuple[int, ...]] = {}
    for at, (record, relation) in enumerate(zip(found.records, relations, strict=True)):
        if relation is not None:
            found.records[at] = _complete(record, relation, counted)


def _timed(launched: Launch) -> tuple[float | None, str | None]:
    route = launched.choice.route.name
    try:
        # The first run also builds the relation's views and compiles kernels.
        mx.eval(launched.result, *launched.inputs)
        start = perf_counter()
        mx.eval(launched.repeat(route))
        return 1e3 * (perf_counter() - start), None
    except ValueError:
        return None, "no time: mx.compile and mx.vmap allow no evaluation"


def _complete(
    record: Record, relation: Relation, counted: dict[int, tuple[int, ...]]
) -> Record:
    """Return the record with what is read from its relation."""
    problem, choice = record.problem, record.choice
    data = id(relation._data), relation._swapped  # relations share data with their .T
    if problem.pointwise:
        degrees = (0, problem.n_out)
    else:
        if data not in counted:
            counted[data] = relation.coverage().out_degrees
        degrees = counted[data]
    counts = cost(problem, choice.device, choice=choice, relation=relation)
    problem = replace(problem, edges=counts.edges)
    return replace(record, problem=problem, cost=counts, degrees=degrees)
