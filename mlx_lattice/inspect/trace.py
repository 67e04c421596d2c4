"""trace(): every convolution of a net, forward and backward, as it was launched."""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager
from dataclasses import asdict, dataclass, fields, replace
from pathlib import Path
from time import perf_counter

import mlx.core as mx

from .. import devices, memory
from ..devices import Device
from ..kept_files import atomic_write
from ..ops import observed
from ..ops.observed import Attended, Fused
from ..problem import Problem
from ..relation import Relation
from ..routes import launch
from ..routes.launch import Launch
from ..routes.selection import Choice
from ..tensor import SparseTensor
from . import page
from .cost import Cost, cost
from .explain import Explanation, LayerNames

SCHEMA = 1


@dataclass(frozen=True)
class Record:
    """One contraction of a trace.

    Attributes:
        index: its place in the order of launches.
        layer: path of its layer in the model, else class and index, else "call".
        problem: the facts that it was chosen by.
        choice: the Choice that was executed.
        inputs: shapes of the arrays that were contracted.
        output: shape of the result.
        cost: operations, bytes and roofline.
        degrees: number of output rows with 0, 1, ... edges.
        milliseconds: the measured time, or None.
        note: why a requested time is missing.
        rounding_error: for a calibrated integer layer, the error that rounding causes,
            relative to the norm of the output; else None.
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
    rounding_error: float | None = None

    @property
    def explanation(self) -> Explanation:
        """The record as ``explain`` prints it."""
        facts = self.problem, self.choice, self.cost, self.layer
        return Explanation(*facts, rounding_error=self.rounding_error)

    def as_dict(self) -> dict:
        """Return the record as ``Trace.to_json`` writes it."""
        choice, facts = self.choice, self.explanation.facts
        return {
            "index": self.index,
            "layer": self.layer,
            "pass": self.problem.pass_,
            "route": choice.route.name,
            "idea": choice.route.idea,
            "parameters": dict(choice.parameters),
            "view": choice.view,
            "precision": choice.precision,
            "forced": choice.forced,
            "measured": [{"route": r, "milliseconds": t} for r, t in choice.measured],
            "rejected": [{"route": r, "reason": why} for r, why in choice.rejected],
            "below": [{"route": r, "reason": why} for r, why in choice.below],
            "problem": asdict(facts) | {"summary": str(facts)},
            "inputs": [list(shape) for shape in self.inputs],
            "output": list(self.output),
            "cost": self.cost.as_dict(),
            "degrees": list(self.degrees),
            "milliseconds": self.milliseconds,
            "note": self.note,
            "rounding_error": self.rounding_error,
        }


@dataclass(frozen=True)
class NormRecord:
    """One norm of a trace, with its layer's path and what was fused into it."""

    layer: str
    norm: Fused

    def as_dict(self) -> dict:
        """Return the record as ``Trace.to_json`` writes it."""
        return {"layer": self.layer, **_facts_of(self.norm)}


@dataclass(frozen=True)
class AttentionRecord:
    """One attention of a trace, with its layer's path."""

    layer: str
    attention: Attended

    def as_dict(self) -> dict:
        """Return the record as ``Trace.to_json`` writes it."""
        facts = _facts_of(self.attention)
        return {"layer": self.layer, **facts, "padding": self.attention.padding}


def _facts_of(fact: Fused | Attended) -> dict:
    named = {f.name: getattr(fact, f.name) for f in fields(fact)}
    dtype = str(fact.dtype).rpartition(".")[2]  # int8 too
    facts = {"pass": fact.pass_, **named, "dtype": dtype}
    return {k: v for k, v in facts.items() if k not in ("scope", "pass_", "forms")}


class Trace:
    """What ran in a ``with ml.trace()`` block. Prints as a table.

    Attributes:
        records: one for each contraction, in the order of launches.
        norms: one for each norm by channel, with what was fused into it.
        attention: one for each call of attention, with its padding.
        device: the profile that MLX ran on.
        timed: whether times were requested.
    """

    def __init__(self, device: Device, timed: bool):
        self.device, self.timed = device, timed
        self.records: list[Record] = []
        self.norms: list[NormRecord] = []
        self.attention: list[AttentionRecord] = []

    def __len__(self) -> int:
        return len(self.records)

    def __iter__(self) -> Iterator[Record]:
        return iter(self.records)

    def __str__(self) -> str:
        return self.table()

    def table(self) -> str:
        """Return a row for each contraction, norm and attention."""
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
            "norms": [record.as_dict() for record in self.norms],
            "attention": [record.as_dict() for record in self.attention],
        }

    def to_json(self) -> str:
        """Return the trace as JSON.

        ``format`` is "mlx_lattice.trace", ``version`` an integer that grows when a
        field changes its meaning; fields may be added without that. ``device`` is
        the profile and ``timed`` whether times were asked for. Each of ``records``
        has ``index``, ``layer``, ``pass``, ``route``, ``idea``, ``parameters``,
        ``view`` (the relation's, that is read), ``precision`` (why TF32, if it was
        asked for, changes nothing), ``forced``, ``measured`` (route,
        milliseconds), ``rejected`` and ``below`` (route, reason), ``problem`` (every
        field of ``Problem`` and a ``summary``), ``inputs`` and ``output`` (shapes),
        ``cost`` (every field of ``Cost``, with ``roofline_ms`` and ``bound``),
        ``degrees`` (output rows with 0, 1, ... edges), ``milliseconds``, ``note``
        and ``rounding_error`` (of a calibrated integer layer).
        Each of ``norms`` has ``layer``, ``pass``, ``parts`` (what one norm computes, in
        order), ``backend``, ``launches``, ``rows``, ``channels`` and ``dtype``. Each of
        ``attention`` has ``layer``, ``pass``, ``rule`` (full, window or patches),
        ``backend``, ``kernel`` and ``calls`` of it, ``rows``, ``groups``, ``heads``,
        ``channels`` (of a head), ``pairs`` of queries and keys, ``padded_pairs`` that
        were computed, ``padding`` (the latter over the former), ``dtype``, and of calls
        of MLX's attention how many are ``fused``.
        Unknown values are null.
        """
        return json.dumps(self.as_dict(), indent=1, default=str)

    def save(self, path: str | Path) -> None:
        """Write a page (.html; needs jinja2) or the JSON (.json).

        Raises:
            ImportError: jinja2 is not installed; the message has the command.
            ValueError: the suffix is another one.
        """
        path = check_page(path)
        text = page.page(self) if path.suffix == ".html" else self.to_json()
        with atomic_write(path) as draft:
            draft.write_text(text, encoding="utf-8")


def check_page(path: str | Path) -> Path:
    """Return the path that a trace can be saved to, before the work that it shows.

    Raises:
        ImportError: the suffix is .html, and jinja2 is not installed.
        ValueError: the suffix is neither .html nor .json.
    """
    path = Path(path)
    if path.suffix not in (".html", ".json"):
        raise ValueError(f"a trace is saved as .html or .json; got {path.name!r}")
    if path.suffix == ".html":
        page.environment()
    return path


def trace(model=None, time: bool = False) -> AbstractContextManager[Trace]:
    """Record every convolution, norm and attention in the block, gradients included.

    ``LayerNorm`` and ``RMSNorm`` that run on MLX's own kernels have no record. Inside
    ``mx.compile`` a function is seen once, when it is traced: later calls run the
    compiled graph and record nothing.

    Args:
        model: a net whose ``named_modules`` give layers their paths.
        time: run each contraction a second time, from evaluated inputs to an
            evaluated result, and take that time. Under ``mx.compile`` and ``mx.vmap``
            nothing can be evaluated: the time is then None, and the note says so.

    Yields:
        The Trace. Edges are counted and costs known once the block has ended.

    Raises:
        TypeError: an input is passed, which belongs into a call inside the block.
    """
    if isinstance(model, SparseTensor) or isinstance(time, SparseTensor | mx.array):
        raise TypeError(
            "ml.trace takes no input; call the net inside its block: "
            "with ml.trace(net) as t: net(x)"
        )
    return _trace(model, time)


@contextmanager
def _trace(model, time: bool) -> Iterator[Trace]:
    names, result = LayerNames(model), Trace(devices.current(), time)
    relations: list[Relation | None] = []

    def keep(launched: Launch) -> None:
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
        # A memory limit drops relations: their edges stay uncounted.
        relations.append(launched.relation if memory.active() is None else None)

    def keep_norm(norm: Fused) -> None:
        result.norms.append(NormRecord(names.of(norm.scope), norm))

    def keep_attention(attended: Attended) -> None:
        result.attention.append(AttentionRecord(names.of(attended.scope), attended))

    with (
        launch.observe(keep),
        observed.norms.observe(keep_norm),
        observed.attention.observe(keep_attention),
    ):
        yield result
    counted: dict[tuple, tuple[int, ...]] = {}
    for at, (record, relation) in enumerate(
        zip(result.records, relations, strict=True)
    ):
        if relation is not None:
            result.records[at] = _complete(record, relation, counted)


def _timed(launched: Launch) -> tuple[float | None, str | None]:
    plan = launched.choice.plan
    try:
        # The first call also builds the relation's views and compiles GPU kernels.
        mx.eval(launched.result, *launched.inputs)
        start = perf_counter()
        mx.eval(launched.run(plan, *launched.inputs, *launched.bias))
        return 1e3 * (perf_counter() - start), None
    except ValueError:
        return None, "no time: mx.compile and mx.vmap allow no evaluation"


def _complete(
    record: Record, relation: Relation, counted: dict[tuple, tuple[int, ...]]
) -> Record:
    problem, choice = record.problem, record.choice
    data = id(relation._data), relation._swapped  # relations share data with their .T
    if problem.pointwise:
        degrees = (0, problem.n_out)
    else:
        if data not in counted:
            counted[data] = relation.coverage().out_degrees
        degrees = counted[data]
    counts = cost(problem, choice.device, choice=choice, relation=relation)
    return replace(record, cost=counts, degrees=degrees)
