"""The records of a trace, one per contraction, as Python objects or as JSON."""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import asdict, dataclass, fields

import mlx.core as mx

from ..devices import Device
from ..dtypes import dtype_name
from ..ops.observed import Attended, Fused
from ..problem import Problem
from ..routes.selection import Choice
from .cost import Cost
from .explain import Explanation

SCHEMA = 1


@dataclass(frozen=True)
class Record:
    """One contraction of a trace.

    Attributes:
        index: its place in the order of launches.
        layer: path of its layer in the model, else class and index, else "call".
        problem: the facts that it was chosen by.
        choice: the Choice that was executed.
        inputs: shapes of what was contracted.
        output: shape of the result.
        cost: operations, bytes and roofline.
        degrees: number of output rows with 0, 1, ... edges.
        milliseconds: the measured time, or None.
        note: why there is no time where one was asked for.
        rounding_error: of a calibrated integer layer, what rounding did to the norm of
            its output; else None.
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
    """One norm of a trace, with what was fused into it.

    Attributes:
        layer: path of its layer in the model, else class and index, else "call".
        norm: what ran.
    """

    layer: str
    norm: Fused

    def as_dict(self) -> dict:
        """Return the record as ``Trace.to_json`` writes it."""
        norm = self.norm
        return {
            "layer": self.layer,
            "pass": norm.pass_,
            "parts": list(norm.parts),
            "backend": norm.backend,
            "launches": norm.launches,
            "rows": norm.rows,
            "channels": norm.channels,
            "dtype": str(norm.dtype).rpartition(".")[2],  # int8 too
        }


@dataclass(frozen=True)
class AttentionRecord:
    """One attention of a trace.

    Attributes:
        layer: path of its layer in the model, else class and index, else "call".
        attention: what ran.
    """

    layer: str
    attention: Attended

    def as_dict(self) -> dict:
        """Return the record as ``Trace.to_json`` writes it."""
        told = self.attention
        aside = "scope", "pass_", "forms"
        names = (f.name for f in fields(told) if f.name not in aside)
        facts = {name: getattr(told, name) for name in names}
        facts |= {"dtype": dtype_name(told.dtype), "padding": told.padding}
        return {"layer": self.layer, "pass": told.pass_, **facts}


class Records:
    """The contractions of a block, in the order of launches, and their facts as data.

    Attributes:
        records: one a contraction.
        norms: one a norm by channel, with what was fused into it.
        attention: one a call of attention, with its padding.
        device: the profile that MLX ran on.
        timed: whether times were asked for.
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
        ``view`` (the relation's, that is read), ``precision`` (why TF32 changes
        nothing, where it was asked for), ``forced``, ``measured`` (route,
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
        of MLX's attention how many are ``fused`` and the ``width`` of their heads.
        What is not known is null.
        """
        return json.dumps(self.as_dict(), indent=1, default=str)
