"""Whether a pass can keep a limit, said before it runs."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from contextvars import ContextVar
from dataclasses import replace
from functools import wraps
from typing import NamedTuple

import mlx.core as mx
import mlx.nn

from ..backends import cpu_extension
from ..coordinates import CoordinateManager
from ..preparation import leaves
from ..routes import launch
from ..tensor import SparseTensor
from . import flight, limit, schedule, stages
from .limit import (
    LOOSE,
    SMALL,
    TIGHT,
    WHOLE,
    Admission,
    Limit,
    MemoryLimitError,
    Shares,
    memory_limit,
)
from .predict import Record, UnknownRows, recorded
from .sizes import said_bytes

# Of the room, what is left for all that is not known, such as cuBLAS's working memory.
MARGIN = 1 / 16
NEVER = 1 << 62  # bytes in use above which a host waits that never does
# Launches that take a host as long as a device has no work where the host waits for
# what it has just queued: until it knows, what was held is free, and more is launched.
DRAIN = 8
LITTLE = 1 / 8  # of a pass's launches: what drains may cost before blocks are cut
# Dry runs that look for the least limit; a larger limit has larger blocks.
TRIES = 5

_is_admitted: ContextVar[bool] = ContextVar("is_admitted", default=False)


def check_memory(
    net: Callable, *inputs: object, **options: object
) -> AbstractContextManager[None]:
    """Raise where a pass cannot keep the limit that holds here, before it runs.

    The nets of this package ask by themselves, when they are called under a limit. The
    pass is played through as ``predict_peak`` does, and takes what a device takes that
    works only when it is waited for. Where it then runs in the block that this returns,
    its stages begin and its blocks are cut as was found, and it keeps the limit.

    Args:
        net: a module, or any function of sparse tensors and arrays.
        *inputs, **options: what it is called with.

    Returns:
        A block for one pass of the net on these inputs.

    Raises:
        MemoryLimitError: it takes more; the error says the least that would do.
        RuntimeError: the compiled extension is not there.
        ValueError: the net reads values of features, to choose rows by them.
    """
    held = limit.active()
    if held is None:
        return nullcontext()
    if isinstance(net, mlx.nn.Module):
        mx.eval(net.parameters())
    mx.eval([each.feats for each in leaves(inputs) if isinstance(each, SparseTensor)])
    held.begin()
    return _admitted(held, admission_of(held, net, inputs, options))


def admission_of(held: Limit, net: Callable, inputs, options) -> Admission:
    """Return how a pass keeps a limit with the least work; see ``check_memory``."""
    takes = held.held + held.held // 16  # a guess; with no room blocks would be tiny
    found: list[tuple[int, Admission]] = []
    for shares in (WHOLE, LOOSE, SMALL, TIGHT) if held.held < held.bytes else ():
        record = _recorded(held, shares, net, inputs, options)
        played = Played.of(record, held)
        if played.most <= held.bytes:
            admission = Admission(shares, held.held, played.marks)
            idle = DRAIN * played.drains
            found.append((played.launches + idle, admission))
            if idle <= LITTLE * played.launches:
                break
        takes = played.most
        del record  # it holds tables
    if found:
        return min(found, key=lambda each: each[0])[1]
    least = _least(takes, net, inputs, options)
    would_do = said_bytes(least, up=True)
    raise MemoryLimitError(
        f"this pass cannot be kept below {held}, of which {said_bytes(held.held)} are "
        f"held before it begins; the least limit that would do is {would_do}",
        least,
    )


class Played(NamedTuple):
    """A pass under a limit, played through.

    Attributes:
        most: bytes that it takes where the host waits for each stage.
        marks: as of an ``Admission``.
        launches: of its work.
        drains: how often the host waits for the stage that it has just queued.
    """

    most: int
    marks: tuple[int, ...]
    launches: int
    drains: int

    @classmethod
    def of(cls, record: Record, held: Limit) -> Played:
        """Play a dry run through.

        Whatever the device's speed, a stage begins with no more than is left of those
        that are done, or of those that are queued without waiting; it adds what it
        adds to either.
        """
        nodes, stages, now = record.graph.nodes, record.stages, flight.current()
        waited = schedule.growths(nodes, stages, now)
        queued = [replace(stage, waits_above=NEVER) for stage in stages]
        ahead = schedule.growths(nodes, queued, now)
        free = held.bytes - int(held.room * MARGIN)
        own = [free - max(a.added, b.added) for a, b in zip(waited, ahead, strict=True)]
        marks: list[int] = []
        for stage, mark in zip(stages, own, strict=True):
            marks += [mark] * (stage.boundaries - len(marks))
        marks.append(own[-1])
        return cls(
            most=max(each.before + each.added for each in waited),
            marks=tuple(marks),
            launches=sum(each.launches for each in waited),
            drains=sum(
                each.before + each.added > mark
                for each, mark in zip(waited, own[1:], strict=False)
            ),
        )


def _recorded(held: Limit, shares: Shares, net: Callable, inputs, options) -> Record:
    """Return a dry run of a pass in blocks of some shares."""
    if shares is not WHOLE:  # tables that the run before would have kept
        for manager in _managers((inputs, options)):
            for relation in manager.relations:
                relation.release()
    before, held.shares = held.shares, shares
    try:
        return recorded(net, inputs, options)
    finally:
        held.shares = before


def _least(size: int, net: Callable, inputs, options) -> int:
    """Return a limit that a pass keeps, nearly the least, from a guess."""
    best = None
    for _ in range(TRIES):
        with limit.lifted(), memory_limit(size) as tried:
            record = _recorded(tried, TIGHT, net, inputs, options)
            takes = Played.of(record, tried).most
        if takes > size and best is not None:
            break
        if takes <= size:
            best = size
        if size * 49 // 50 <= takes <= size:
            break
        size = takes + takes // 64 if best is None else takes
    return (best or size) * 101 // 100


def admitted(call: Callable) -> Callable:
    """Wrap a net's call: where a limit holds, it is checked before anything runs.

    A net whose rows depend on values asks for its parts, see ``admit``.
    """

    @wraps(call)
    def checked(net, *inputs, **options):
        if limit.active() is None or _is_admitted.get():
            return call(net, *inputs, **options)
        with admit(net, net, *inputs, **options):
            return call(net, *inputs, **options)

    return checked


def admit(
    net: mlx.nn.Module, call: Callable, *inputs: object, **options: object
) -> AbstractContextManager:
    """Return a block for a pass that is checked now; what it calls is then not.

    A pass of as many rows is checked once. Where nothing can be said, since rows depend
    on values, the parts that are called inside the block are checked.

    Args:
        net: the module that runs; its weights are evaluated.
        call: it, or a function of its layers.
        *inputs, **options: what the pass is called with.

    Raises:
        MemoryLimitError: the limit that holds here cannot be kept.
    """
    held = limit.active()
    if held is None or _is_admitted.get() or stages.is_recording():
        return nullcontext()
    if launch.is_planning():  # nothing is computed
        return nullcontext()
    if cpu_extension.extension is None:
        return nullcontext()
    mx.eval(net.parameters())
    held.begin()
    name = getattr(call, "__name__", "")
    facts = name, held.bytes, held.held * 64 // held.bytes
    known = vars(net).setdefault("_admitted", {})
    before = *facts, *_sizes((inputs, options))
    if before not in known:
        try:
            admission = admission_of(held, call, inputs, options)
        except UnknownRows:
            if held.held >= held.bytes:
                raise MemoryLimitError(
                    f"{said_bytes(held.held)} are held before the pass begins, above "
                    f"the limit of {held}; the least limit that would do is larger",
                    held.held,
                ) from None
            admission = None
        # The dry run has made coarser rows, which are there at the next call.
        after = *facts, *_sizes((inputs, options))
        known[before] = known[after] = admission
    return nullcontext() if known[before] is None else _admitted(held, known[before])


@contextmanager
def _admitted(held: Limit, admission: Admission) -> Iterator[None]:
    token = _is_admitted.set(True)
    try:
        with held.following(admission):
            yield
    finally:
        _is_admitted.reset(token)


def _sizes(given: object) -> Iterator[object]:
    """Yield what the memory of a pass depends on beside the net and the limit."""
    for each in leaves(given):
        each = each.feats if isinstance(each, SparseTensor) else each
        if isinstance(each, mx.array):
            yield each.shape, str(each.dtype)  # a net can be copied and pickled
        elif isinstance(each, int):
            yield each
    for manager in _managers(given):
        yield tuple(len(rows) for rows in manager.sets)


def _managers(given: object) -> Iterable[CoordinateManager]:
    """Return the managers of the tensors that a pass is given."""
    tensors = [x for x in leaves(given) if isinstance(x, SparseTensor)]
    return {id(x.manager): x.manager for x in tensors}.values()
