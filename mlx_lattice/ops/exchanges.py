"""Exchanges between processes: in one order, with as few launches as they can have."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Sequence
from typing import Protocol

import mlx.core as mx

from ..backends import registry
from ..reductions import linear


class Holder(Protocol):
    """Who keeps what its last exchange returned, for the next one to come after.

    A module is one: its arrays are state, which goes through ``mx.compile``.
    """

    _exchanged: mx.array


class Exchanges:
    """Exchanges of a group, each after the one before it in Python's order.

    Branches of a net have no order in a graph, but processes must exchange in the same
    order, also where routes, and so their graphs, differ. NCCL's exchanges are launches
    on the compute stream, in a graph of CUDA launches, and no two of them may run at
    once.

    Args:
        group: the processes.
        holder: who asks; by default nobody who outlives this.
        stream: of the exchanges; by default the one that MLX's backend has for them.
    """

    # Who asked for the last exchange of this process.
    _last: Callable[[], Holder | None] = staticmethod(lambda: None)

    def __init__(
        self,
        group: mx.distributed.Group,
        holder: Holder | None = None,
        stream: mx.Stream | None = None,
    ):
        self.group, self.stream, self._holder = group, stream, holder
        self._exchanged: mx.array | None = None

    def gather(self, *parts: mx.array) -> mx.array:
        """Return (P, W): what each of the P processes gave, in a row."""
        every = self._in_turn(mx.distributed.all_gather, parts)
        return every.reshape(self.group.size(), -1)

    def add(self, *parts: mx.array, factor: float = 1.0) -> mx.array:
        """Return (W,), the sum over processes of what they gave, times a factor."""
        return self._in_turn(mx.distributed.all_sum, parts, factor)

    def gathered(self, row: mx.array) -> mx.array:
        """Return (P, W) rows of (W,) ones, differentiable.

        Its gradient is that of the sum of all processes' losses.
        """
        rank = self.group.rank()

        def back(dy):
            return self.added(dy)[rank]

        return self._linear(self.gather, back, self.gathered)(row)

    def added(self, x: mx.array) -> mx.array:
        """Return the sum over processes, whose gradient is the sum of gradients.

        MLX's own rule takes this process's gradient alone.
        """

        def add(x):
            return self.add(x).reshape(x.shape)

        return self._linear(add, self.added, self.added)(x)

    def _linear(self, forward: Callable, back: Callable, itself: Callable) -> Callable:
        return linear(forward, back, itself)

    def _in_turn(
        self, exchange: Callable, parts: Sequence[mx.array], factor: float = 1.0
    ) -> mx.array:
        before = self if self._exchanged is not None else Exchanges._last()
        after = None if before is None else before._exchanged
        row = joined(parts, factor, after)
        y = exchange(row, group=self.group, stream=self.stream)
        if self._holder is None:
            self._exchanged = y
        else:
            # A view of one shape, whatever there was: mx.compile looks at shapes.
            self._holder._exchanged = mx.stop_gradient(y.reshape(-1)[:1])
            Exchanges._last = staticmethod(weakref.ref(self._holder))
        return y


def joined(
    parts: Sequence[mx.array], factor: float = 1.0, after: mx.array | None = None
) -> mx.array:
    """Return the elements of all arrays of one dtype, times a factor, in a row.

    Args:
        parts: the arrays; none is empty.
        factor: of all of them.
        after: what must be there before.
    """
    kernels = registry.exchanges()
    if kernels is not None and kernels.takes(parts):
        return kernels.join(parts, factor, after)
    row = mx.concatenate([part.reshape(-1) for part in parts])
    row = row if factor == 1 else row * factor
    return row if after is None else mx.depends(row, after)
