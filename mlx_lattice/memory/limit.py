"""memory_limit: a bound on the memory of forward passes, and what layers ask of it.

MLX keeps what is queued, and a host that runs ahead of its device queues much. Under a
limit each stage of a net is queued apart (``stages.boundary``); where memory in use
leaves no room for the next one the oldest stages under way are waited for; wide
intermediates are computed in blocks of rows that are shares of the limit. The blocks
depend on the limit and on sizes alone, never on timing.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from threading import Lock
from typing import NamedTuple

import mlx.core as mx

from .. import devices
from .sizes import parse_bytes, said_bytes
from .stages import evaluating


class MemoryLimitError(MemoryError):
    """A limit that cannot be kept. The message says the least that would do.

    Attributes:
        least: the least limit in bytes.
    """

    def __init__(self, message: str, least: int):
        super().__init__(message)
        self.least = least


class Shares(NamedTuple):
    """Shares of the room that a limit leaves beside what was held.

    Attributes:
        whole: of an intermediate that is computed at once.
        block: of a block of a larger one.
        kept: of a neighbour table, and what is sorted of it, that is kept.
        dropped: of the tables of a level that are dropped when nothing reads them
            again.
        lazy: of results that stay lazy together.
        waits: of memory in use, above which the oldest stages are waited for where
            nothing was checked.
    """

    whole: float
    block: float
    kept: float
    dropped: float = 1 / 64
    lazy: float = 1 / 256
    waits: float = 1 / 2


# From those that cost no time to those that take the least memory.
WHOLE = Shares(1, 1 / 4, 2 / 3, dropped=1 / 16)
LOOSE = Shares(1 / 2, 1 / 8, 1 / 3, dropped=1 / 16)
MIDDLE = Shares(1 / 3, 1 / 8, 1 / 4)  # where nothing was checked
SMALL = Shares(1 / 8, 1 / 16, 1 / 8)
TIGHT = Shares(1 / 16, 1 / 32, 1 / 16)
CACHE = 1 / 32  # of a limit, for MLX's cache on the CPU
MOST_STAGES = 64  # under way that are waited for one by one
# Seconds until what a stage held is free when it is done, looked at in steps.
PATIENCE, STEP = 4e-4, 2e-5


class Admission(NamedTuple):
    """How a pass keeps a limit, as it was found before it runs.

    Attributes:
        shares: by which its blocks are cut.
        held: bytes that were held before it.
        marks: of each boundary (see ``stages``), the bytes in use below which the stage
            that has it may begin; none where that is a share.
    """

    shares: Shares
    held: int = 0
    marks: tuple[int, ...] = ()


class LazyResults:
    """Bytes of results that a limit leaves lazy: a stage is queued when they are many.

    The first stage is queued whatever it holds. A dry run asks the same.
    """

    def __init__(self):
        self._bytes: int | None = None

    def queues(self, arrays: Sequence[mx.array], most: int) -> bool:
        """Return whether a stage that ends with these is queued now."""
        if self._bytes is not None:
            self._bytes += sum(array.nbytes for array in arrays)
            if self._bytes < most:
                return False
        self._bytes = 0
        return True


class Limit:
    """A limit on memory, as ``memory_limit`` gives it to its block.

    Attributes:
        bytes: of all that MLX holds: weights and inputs too, and its cache.
        held: those of weights, inputs and all else before a pass.
        shares: of the rest; where a pass was checked, those that it keeps it with.
    """

    def __init__(self, size: int):
        self.bytes, self.held, self.shares = size, 0, MIDDLE
        self._lazy, self._marks, self._boundaries = LazyResults(), (), 0
        self._nothing = mx.zeros(1)
        mx.eval(self._nothing)
        # An array for each stage under way: it is there when the stage is done.
        self._ends: deque[mx.array] = deque(maxlen=MOST_STAGES)
        self.begin()

    def begin(self) -> None:
        """Take what is held now for what is held beside a pass."""
        mx.synchronize()
        self._ends.clear()
        self.held = mx.get_active_memory()

    def __str__(self) -> str:
        """Return it as it is printed: "8 GB"."""
        return said_bytes(self.bytes)

    @property
    def room(self) -> int:
        """Bytes that it leaves beside what was held."""
        return self.bytes - self.held

    def share(self, name: str) -> int:
        """Return the bytes of one of its shares."""
        return max(1, int(self.room * getattr(self.shares, name)))

    @contextmanager
    def following(self, admission: Admission) -> Iterator[None]:
        """Run a pass inside the block as it was admitted, from its first boundary."""
        before = self.shares, self.held, self._marks, self._boundaries, self._lazy
        self.shares, self.held, self._marks = admission
        self._boundaries, self._lazy = 0, LazyResults()
        try:
            yield
        finally:
            self.shares, self.held, self._marks, self._boundaries, self._lazy = before

    def end_stage(self, *arrays: mx.array) -> None:
        """Queue what ends a stage; wait for the oldest until the next one has room.

        Raises:
            MemoryLimitError: what is held then is above the limit.
            RuntimeError: in a gradient or a compiled function, whose graph is kept.
        """
        self._boundaries += 1
        if not self._lazy.queues(arrays, self.share("lazy")):
            return
        end = mx.expand_dims(self._nothing, 0)  # a view: nothing is launched for it
        try:
            mx.async_eval(*arrays, end)
        except ValueError as error:
            raise RuntimeError(
                "memory_limit bounds forward passes that are evaluated as they run; a "
                "gradient, or a function that mx.compile traces, keeps its whole "
                "graph. Take the limit off it, or the transformation"
            ) from error
        self._ends.append(end)
        mark = self._mark()
        while mx.get_active_memory() > mark:
            if not self._ends:
                self._settle()
                return
            mx.eval(self._ends.popleft())
            if self._ends:
                _await(mark)

    def _mark(self) -> int:
        """Return the bytes in use below which the next stage may begin."""
        if self._marks:
            return self._marks[min(self._boundaries, len(self._marks) - 1)]
        return self.held + self.share("waits")

    def _settle(self) -> None:
        """Wait until all is done and freed; raise where more is held than may be."""
        mx.synchronize()
        found = mx.get_active_memory()
        if found > self.bytes:  # of what nobody checked
            raise MemoryLimitError(
                f"{said_bytes(found)} are held where a layer ends, above the limit of "
                f"{self}; ml.check_memory says the least that would do before a pass "
                "runs",
                found,
            )


def _await(mark: int) -> None:
    """Wait a little until memory in use is below a mark.

    MLX frees what a GPU is done with in a thread of its own.
    """
    end = time.perf_counter() + PATIENCE
    while mx.get_active_memory() > mark and time.perf_counter() < end:
        time.sleep(STEP)


class _Process:
    """MLX's own limits, which are the process's: the least of all blocks' that run.

    Blocks of several threads end in any order; after the last MLX's are as before.
    """

    def __init__(self):
        self._lock, self._running, self._before = Lock(), [], (0, 0)

    @contextmanager
    def bounded(self, memory: int, cache: int) -> Iterator[None]:
        """Bound memory, and what MLX keeps of freed memory, inside the block."""
        own = [memory, cache]  # told apart from others by identity
        with self._lock:
            if not self._running:
                self._before = mx.set_memory_limit(memory), mx.set_cache_limit(0)
            self._running.append(own)
            self._apply()
        try:
            yield
        finally:
            with self._lock:
                self._running = [each for each in self._running if each is not own]
                self._apply()

    def _apply(self) -> None:
        memory, cache = self._before
        mx.set_memory_limit(min([each[0] for each in self._running], default=memory))
        mx.set_cache_limit(min([cache, *(each[1] for each in self._running)]))


_process = _Process()
_limit: ContextVar[Limit | None] = ContextVar("limit", default=None)


# The limit that holds here, None where there is none; every layer asks.
active = _limit.get


@contextmanager
def lifted() -> Iterator[None]:
    """Hold no limit inside the block."""
    token = _limit.set(None)
    try:
        with evaluating(False):
            yield
    finally:
        _limit.reset(token)


@contextmanager
def memory_limit(size: str | float) -> Iterator[Limit]:
    """Keep the forward passes inside the block below so much memory.

    Layers then compute wide intermediates in blocks of rows, large neighbour tables
    are made again where they are read in place of being kept, and every stage is
    evaluated before much more is queued, however fast the host is. Weights, inputs and
    MLX's cache count; what is held when the block begins counts too.

    The nets of ``ml.models`` give the same bits with a limit as without. A net that
    calls a convolution, a norm and an activation one by one may differ in the last
    bit: under a limit each of these layers rounds its result.

    Nested limits hold together: the smaller one decides. For inference: a gradient,
    and a function compiled by ``mx.compile``, raise a RuntimeError.

    Args:
        size: ``"8GB"`` (10^9 bytes each), ``"8 GiB"`` (2^30), or a number of bytes.

    Raises:
        TypeError, ValueError: the size is none.
    """
    own = parse_bytes(size)
    outer = _limit.get()
    limit = Limit(own if outer is None else min(own, outer.bytes))
    token = _limit.set(limit)
    # On the CPU MLX's own limit does not bound the cache; on GPUs it does, but for what
    # is cached already: that goes at the next allocation.
    on_cpu = devices.current().backend == devices.CPU
    most = limit.bytes * CACHE if on_cpu else limit.bytes - mx.get_active_memory()
    try:
        with (
            _process.bounded(limit.bytes, max(0, int(most))),
            evaluating(evaluate=limit.end_stage),
        ):
            yield limit
    finally:
        _limit.reset(token)
