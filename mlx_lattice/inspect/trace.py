"""trace(): every convolution of a net, forward and backward, as it was launched."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager
from dataclasses import replace
from pathlib import Path
from time import perf_counter

import mlx.core as mx

from .. import devices, memory
from ..atomic_write import atomic_write
from ..ops import observed
from ..ops.observed import Attended, Fused
from ..relation import Relation
from ..routes import launch
from ..routes.launch import Launch
from ..tensor import SparseTensor
from . import page
from .cost import cost
from .explain import LayerNames
from .record import AttentionRecord, NormRecord, Record, Records


class Trace(Records):
    """The records of a ``with ml.trace()`` block, which people can read."""

    def __str__(self) -> str:
        return self.table()

    def table(self) -> str:
        """Return a row a contraction; drawn by rich where it is installed."""
        return page.table(self)

    def save(self, path: str | Path) -> None:
        """Write a page (.html; needs jinja2) or the JSON (.json).

        Raises:
            ImportError: jinja2 is not installed; the message has the command.
            ValueError: the suffix is another one.
        """
        path = check_page(path)
        text = _WRITERS[path.suffix](self)
        with atomic_write(path) as draft:
            draft.write_text(text, encoding="utf-8")


_WRITERS = {".html": page.page, ".json": Records.to_json}


def check_page(path: str | Path) -> Path:
    """Return the path that a trace can be saved to.

    Raises:
        ImportError: a page is asked for, and jinja2 is not installed.
        ValueError: the suffix is none that ``Trace.save`` takes.
    """
    path = Path(path)
    if path.suffix not in _WRITERS:
        raise ValueError(f"a trace is saved as .html or .json; got {path.name!r}")
    if path.suffix == ".html":
        page.environment()  # here, before the work whose page it is
    return path


def trace(model=None, time: bool = False) -> AbstractContextManager[Trace]:
    """Record every convolution, norm and attention in the block, gradients included.

    Of ``LayerNorm`` and ``RMSNorm`` those that run on MLX's own kernels have no record.
    Inside ``mx.compile`` a function is seen once, when it is traced: later calls run
    the compiled graph and record nothing.

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
                rounding_error=getattr(launched.scope, "rounding_error", None),
            )
        )
        # Under a limit what it drops must not be kept: its edges stay uncounted.
        relations.append(launched.relation if memory.active() is None else None)

    def keep_norm(norm: Fused) -> None:
        found.norms.append(NormRecord(names.of(norm.scope), norm))

    def keep_attention(told: Attended) -> None:
        found.attention.append(AttentionRecord(names.of(told.scope), told))

    with (
        launch.observe(keep),
        observed.norms.observe(keep_norm),
        observed.attention.observe(keep_attention),
    ):
        yield found
    counted: dict[int, tuple[int, ...]] = {}
    for at, (record, relation) in enumerate(zip(found.records, relations, strict=True)):
        if relation is not None:
            found.records[at] = _complete(record, relation, counted)


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
    return replace(record, cost=counts, degrees=degrees)
