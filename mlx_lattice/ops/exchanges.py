"""Exchanges between processes, in the order of the Python calls."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Sequence

import mlx.core as mx

from ..reductions import linear


class Exchanges:
    """Exchanges of a group of processes, in the order of the Python calls.

    Branches of a graph have no order, but all processes must exchange in the same
    order, also if their graphs differ. NCCL allows one exchange at a time. So each
    exchange also sends one number of the result of the exchange before it.

    Args:
        group: the processes.
        holder: keeps the result that the next exchange depends on, as ``_exchanged``;
            by default this object. The state of a module goes through ``mx.compile``.
        stream: of the exchanges; by default MLX's own choice.
    """

    # Returns the holder of the latest exchange of this process, if it is alive.
    _last: Callable[[], object | None] = staticmethod(lambda: None)

    def __init__(
        self,
        group: mx.distributed.Group,
        holder: object | None = None,
        stream: mx.Stream | None = None,
    ):
        self.group, self.stream, self._holder = group, stream, holder
        self._exchanged: mx.array | None = None

    def gather(self, *parts: mx.array) -> mx.array:
        """Return (P, W): the W numbers of each of the P processes."""
        return self._in_turn(mx.distributed.all_gather, parts)

    def add(self, *parts: mx.array) -> mx.array:
        """Return (W,): the numbers of all processes, added up."""
        return self._in_turn(mx.distributed.all_sum, parts)[0]

    def gathered(self, row: mx.array) -> mx.array:
        """Return ``gather(row)``, differentiable.

        Its gradient is that of the sum of all processes' losses.
        """
        rank = self.group.rank()

        def back(dy):
            return self.added(dy)[rank]

        return linear(self.gather, back, self.gathered)(row)

    def added(self, x: mx.array) -> mx.array:
        """Return the sum over processes, whose gradient is the sum of gradients.

        MLX's own rule takes this process's gradient alone.
        """

        def add(x):
            return self.add(x).reshape(x.shape)

        return linear(add, self.added, self.added)(x)

    def _in_turn(self, exchange: Callable, parts: Sequence[mx.array]) -> mx.array:
        previous = self if self._exchanged is not None else Exchanges._last()
        after = None if previous is None else previous._exchanged
        # CUDA graphs order launches by the arrays that they read, so ``mx.depends`` is
        # not enough. Every process sends as many numbers, also for a first exchange.
        number = mx.zeros((1,)) if after is None else after
        flat = [part.reshape(-1) for part in parts]
        row = mx.concatenate([*flat, number.astype(flat[0].dtype)])
        every = exchange(row, group=self.group, stream=self.stream)
        last = mx.stop_gradient(every.reshape(-1)[-1:])
        if self._holder is None:
            self._exchanged = last
        else:
            self._holder._exchanged = last.astype(mx.float32)
            Exchanges._last = staticmethod(weakref.ref(self._holder))
        return every.reshape(-1, row.size)[:, :-1]
