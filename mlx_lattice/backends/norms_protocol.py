"""What a backend's norms by channel are: every member that the library calls.

Statistics are those of segments of rows: one of all rows, or the batch elements. S is
their number. Functions take and return arrays, lazily, and have no derivatives of their
own: those stand in ``mlx_lattice.ops.channel_norms``. All inside is float32; the same
input gives the same bits. Rows and channels are at least one.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from itertools import accumulate, chain
from typing import NamedTuple, Protocol, runtime_checkable

import mlx.core as mx

from ..activations import NONE, Activation
from ..geometry import sync

# Of an array that kernels read: Metal has fewer in another address space than a kernel
# may name, and MLX those of 8 bytes in the host's memory, where a GPU waits.
LEAST_NUMBERS = 8


def from_host(*lists: Sequence[int]) -> list[mx.array]:
    """Return int32 arrays of numbers, each with its last one again where they are few.

    They are parts of one: a GPU fetches what is from the host once.
    """
    wide = [[*a, *a[-1:] * (LEAST_NUMBERS - len(a))] for a in lists]
    ends = list(accumulate(map(len, wide)))
    whole = mx.array([*chain(*wide)], dtype=mx.int32)
    return sync.complete(mx.split(whole, ends[:-1]))


@dataclass(frozen=True, eq=False)
class RowSegments:
    """Rows of each segment: ``order[starts[s]:starts[s + 1]]``.

    Attributes:
        starts: (S + 1,) where segments begin.
        of: (N,) int32, contiguous: the segment of each row.
        order: (N,) int32, or None where rows of a segment follow each other.
        make_begins: returns ``begins``, where it is made with that of others.
    """

    starts: tuple[int, ...]
    of: mx.array
    order: mx.array | None = None
    make_begins: Callable[[], mx.array] | None = None
    _cut: dict = field(default_factory=dict, compare=False, repr=False)

    @property
    def size(self) -> int:
        """Number of segments."""
        return len(self.starts) - 1

    @cached_property
    def read(self) -> tuple[mx.array, mx.array | None]:
        """``of`` and ``order``, of at least ``LEAST_NUMBERS``, for kernels."""
        short = LEAST_NUMBERS - self.of.size
        if short <= 0:
            return self.of, self.order
        order = self.order if self.order is None else mx.pad(self.order, (0, short))
        return sync.complete((mx.pad(self.of, (0, short)), order))

    @cached_property
    def begins(self) -> mx.array:
        """``starts``, int32, at least ``LEAST_NUMBERS``, for kernels."""
        return self.make_begins() if self.make_begins else from_host(self.starts)[0]

    @cached_property
    def longest(self) -> int:
        """Rows of the largest segment."""
        pairs = zip(self.starts, self.starts[1:], strict=False)
        return max([stop - start for start, stop in pairs])

    @cached_property
    def counts(self) -> mx.array:
        """(S, 1) float32: rows of each segment, at least 1."""
        sizes = [
            max(1, stop - start)
            for start, stop in zip(self.starts, self.starts[1:], strict=False)
        ]
        return sync.complete(mx.array(sizes, dtype=mx.float32).reshape(-1, 1))

    def pieces(self, length: int) -> tuple[mx.array, mx.array, int]:
        """Cut segments into pieces of at most ``length`` rows.

        Returns:
            int32 where P pieces begin, and the first piece of each of S segments, each
            with its end, and at least ``LEAST_NUMBERS``; P, which is at least 1.
        """
        if length not in self._cut:
            bounds, firsts = [], [0]
            for start, stop in zip(self.starts, self.starts[1:], strict=False):
                bounds += range(start, stop, length)
                firsts.append(len(bounds))
            bounds.append(self.starts[-1])
            self._cut[length] = *from_host(bounds, firsts), len(bounds) - 1
        return self._cut[length]


class Fit(NamedTuple):  # made once a call, faster than a dataclass
    """What normalises channels: ``act((x - mean) / sqrt(var + eps) * weight + bias)``.

    Attributes:
        mean, var: (S, C) float32.
        weight, bias: (C,) of one floating dtype, or None; (S, C) where each segment has
            its own.
        eps: added to the variance.
        act: what follows.
        segments: the rows of each line of the statistics, or None for all.
    """

    mean: mx.array
    var: mx.array
    weight: mx.array | None
    bias: mx.array | None
    eps: float
    act: Activation = Activation()
    segments: RowSegments | None = None

    @property
    def dtype(self) -> mx.Dtype:
        """The dtype of weight and bias."""
        one = self.bias if self.weight is None else self.weight
        return mx.float32 if one is None else one.dtype

    @property
    def is_apart(self) -> bool:
        """Whether each segment has a weight and a bias of its own."""
        one = self.bias if self.weight is None else self.weight
        return one is not None and one.ndim == 2


@runtime_checkable
class BatchNorms(Protocol):
    """Norms by statistics of few rows, all or a segment's: one launch each way."""

    def normalize(
        self,
        x: mx.array,
        weight: mx.array | None = None,
        bias: mx.array | None = None,
        residual: mx.array | None = None,
        running: tuple[mx.array, mx.array] | None = None,
        momentum: float = 0.0,
        eps: float = 1e-5,
        act: Activation = NONE,
        segments: RowSegments | None = None,
        groups: int | None = None,
    ) -> tuple[mx.array, mx.array, mx.array, mx.array, mx.array]:
        """Return rows normalised by their statistics, and these.

        Args:
            x: (N, C).
            weight, bias: (C,) of one floating dtype, or None.
            residual: (N, C), added before ``act``, or None.
            running, momentum: as of ``Norms.moments``.
            eps: added to the variance.
            act: what follows.
            segments: rows of each line of the results; by default all rows are one.
                Then weight and bias may be (S, C), and no statistics are moved.
            groups: of neighbouring channels that share statistics, with segments.

        Returns:
            (N, C) in the dtype of x, then what ``Norms.moments`` returns.
        """

    def gradient(
        self,
        dy: mx.array,
        x: mx.array,
        fit: Fit,
        residual: mx.array | None = None,
        groups: int | None = None,
    ) -> tuple[mx.array, mx.array | None, mx.array | None, mx.array]:
        """Return the gradients of x, weight, bias and residual, through statistics.

        Args:
            dy: (N, C) in the dtype of x.
            x: what was normalised.
            fit: by what, statistics of all rows or of segments.
            residual: what was added.
            groups: as of ``normalize``, of segments.

        Returns:
            (N, C) in the dtype of x; twice the shape and dtype of the weight, (C,) or
            nothing where there is none; (N, C), without a meaning where no residual was
            added.
        """


@runtime_checkable
class Norms(Protocol):
    """Statistics of columns, normalisation, and the two passes back."""

    def moments(
        self,
        x: mx.array,
        segments: RowSegments | None = None,
        running: tuple[mx.array, mx.array] | None = None,
        momentum: float = 0.0,
        lines: mx.array | None = None,
    ) -> tuple[mx.array, mx.array, mx.array, mx.array]:
        """Return mean and biased variance, and running statistics moved by them.

        Args:
            x: (N, C).
            segments: rows of each line of the results; by default all rows are one.
            running: (C,) float32 mean and variance that are moved; without them the
                last results are the mean and the unbiased variance. A single row moves
                the mean alone.
            momentum: how far they move.
            lines: (L, 3, C) float32, if whatever wrote x summed it: how many rows,
                their mean and the sum of squares about it, of some rows each, all rows
                once; then x is not read. Without segments alone.

        Returns:
            Four (S, C) float32; zeros of an empty segment.
        """

    def group_moments(
        self, x: mx.array, segments: RowSegments, groups: int
    ) -> tuple[mx.array, mx.array]:
        """Return (S, C) mean and biased variance over groups of neighbouring channels.

        Args:
            x: (N, C).
            segments: rows of each line of the results.
            groups: a divisor of C.
        """

    def normalize(
        self, x: mx.array, fit: Fit, residual: mx.array | None = None
    ) -> mx.array:
        """Return (N, C) in the dtype of x; ``residual`` is added before ``fit.act``."""

    def gradient_sums(
        self, dy: mx.array, x: mx.array, fit: Fit, residual: mx.array | None = None
    ) -> tuple[mx.array, mx.array, mx.array, mx.array]:
        """Return sums over rows of g and of g xhat; g = dy times act's derivative.

        Args:
            dy: (N, C) in the dtype of x.
            x: what was normalised.
            fit: by what.
            residual: what was added.

        Returns:
            (2, S, C) float32 sums; (2, S, C) float32 of their means over the rows,
            times the weight; (S, C) of g xhat and of g in the dtype of the weight.
        """

    def group_terms(
        self, fit: Fit, sums: mx.array, terms: mx.array, groups: int
    ) -> tuple[mx.array, mx.array, mx.array]:
        """Return what ``gradient`` takes where groups of channels share statistics.

        Args:
            fit: by what was normalised, with segments.
            sums, terms: (2, S, C) that ``gradient_sums`` returned.
            groups: a divisor of C.

        Returns:
            (2, S, C) float32 means of the terms over each group; the gradients of
            weight and bias, in their shape and dtype: (C,) where there are none.
        """

    def gradient(
        self,
        dy: mx.array,
        x: mx.array,
        fit: Fit,
        residual: mx.array | None = None,
        terms: mx.array | None = None,
    ) -> tuple[mx.array, mx.array]:
        """Return ``rstd * (weight * g - terms[0] - xhat * terms[1])``, and g.

        Args:
            dy: (N, C) in the dtype of x.
            x: what was normalised.
            fit: by what.
            residual: what was added.
            terms: (2, S, C) float32, or None for zeros: fixed statistics.

        Returns:
            Two (N, C) in the dtype of x; without a residual the second has no meaning.
        """

    def of_few(
        self,
        x: mx.array,
        segments: RowSegments | None = None,
        groups: int | None = None,
    ) -> BatchNorms | None:
        """Return what takes one launch each way for (N, C), if anything does.

        Args:
            x: (N, C).
            segments: of the rows; by default they are one.
            groups: of neighbouring channels that share statistics, with segments.
        """
