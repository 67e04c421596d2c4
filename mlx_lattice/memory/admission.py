"""Whether a pass can keep a limit, said before it runs."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from contextvars import ContextVar
from dataclasses import replace
from functools import wraps

import mlx.core as mx
import mlx.nn

from ..backends import cpu_extension
from ..coordinates import CoordinateManager
from ..preparation import leaves
from ..tensor import SparseTensor
from . import flight, limit, schedule, stages
from .limit import LOOSE, SMALL, TIGHT, Limit, MemoryLimitError, Shares, memory_limit
from .predict import Record, UnknownRows, recorded
from .sizes import said_bytes

# Shares of memory in use above which a stage is waited for: the first is taken with
# which the limit is kept, with the largest shares of rows that there is one for.
OFTEN, SELDOM, NEVER = 0.0, 0.5, 0.85
# Dry runs that look for the least limit; a larger limit has larger blocks.
TRIES = 5

_is_admitted: ContextVar[bool] = ContextVar("is_admitted", default=False)


def check_memory(net: Callable, *inputs: object, **options: object) -> None:
    """Raise where a pass cannot keep the limit that holds here, before it runs.

    The nets of this package ask by themselves, when they are called under a limit. The
    pass is played through as ``predict_peak`` does, and takes what a device takes that
    works only when it is waited for.

    Args:
        net: a module, or any function of sparse tensors and arrays.
        *inputs, **options: what it is called with.

    Raises:
        MemoryLimitError: it takes more; the error says the least that would do.
        RuntimeError: the compiled extension is not there.
        ValueError: the net reads values of features, to choose rows by them.
    """
    held = limit.active()
    if held is not None:
        shares_of(held, net, inputs, options)


def shares_of(held: Limit, net: Callable, inputs, options) -> Shares:
    """Return the first shares by which a pass keeps a limit; see ``check_memory``."""
    takes = held.held + held.held // 16  # a guess; with no room blocks would be tiny
    if held.held < held.bytes:
        for shares in (LOOSE, SMALL, TIGHT):
            record = _recorded(held, shares, net, inputs, options)
            for part in (NEVER, OFTEN, SELDOM):
                takes = _takes(record, held, part)
                if part == OFTEN and takes > held.bytes:
                    break
                # What is queued depends on timing: it was up to 13% of the room more.
                if part != OFTEN and takes <= held.bytes - held.room // 6:
                    return shares._replace(waits=part)
            else:
                return shares._replace(waits=OFTEN)
            del record  # it holds tables
    least = _least(takes, net, inputs, options)
    would_do = said_bytes(least, up=True)
    raise MemoryLimitError(
        f"this pass cannot be kept below {held}, of which {said_bytes(held.held)} are "
        f"held before it begins; the least limit that would do is {would_do}",
        least,
    )


def _recorded(held: Limit, shares: Shares, net: Callable, inputs, options) -> Record:
    """Return a dry run of a pass in blocks of some shares."""
    if shares is not LOOSE:  # tables that the run before would have kept
        for manager in _managers((inputs, options)):
            for relation in manager.relations:
                relation.release()
    before, held.shares = held.shares, shares
    try:
        return recorded(net, inputs, options)
    finally:
        held.shares = before


def _takes(record: Record, held: Limit, part: float) -> int:
    """Return the most that a pass takes, with stages waited for above a share."""
    above = held.held + int(part * (held.bytes - held.held))
    found = [replace(stage, waits_above=above) for stage in record.stages]
    return schedule.most(record.graph.nodes, found, flight.current())


def _least(size: int, net: Callable, inputs, options) -> int:
    """Return a limit that a pass keeps, nearly the least, from a guess."""
    best = None
    for _ in range(TRIES):
        with limit.lifted(), memory_limit(size) as tried:
            takes = _takes(_recorded(tried, TIGHT, net, inputs, options), tried, 0)
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
            shares = shares_of(held, call, inputs, options)
        except UnknownRows:
            if held.held < held.bytes:
                return nullcontext()
            raise MemoryLimitError(
                f"{said_bytes(held.held)} are held before the pass begins, above the "
                f"limit of {held}; the least limit that would do is larger",
                held.held,
            ) from None
        # The dry run has made coarser rows, which are there at the next call.
        after = *facts, *_sizes((inputs, options))
        known[before] = known[after] = shares
    return _admitted(held, known[before])


@contextmanager
def _admitted(held: Limit, shares: Shares) -> Iterator[None]:
    token, before = _is_admitted.set(True), held.shares
    held.shares = shares
    try:
        yield
    finally:
        _is_admitted.reset(token)
        held.shares = before


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
