"""Kernels by backend: what each family provides, and those of the current device."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import cached_property, lru_cache
from itertools import accumulate, chain, pairwise
from typing import Any, NamedTuple, Protocol, runtime_checkable

import mlx.core as mx

from . import sync
from .devices import current, serves
from .epilogue import NONE, Activation

MLX = "mlx"  # MLX operations, which run on every device


def serving() -> str:
    """Return the backend whose kernels run now: the device's own, or MLX."""
    backend = current().backend
    return backend if serves(backend) else MLX


class Family(dict[str, Any]):
    """Kernels of one kind by backend; ``backends`` adds them when it is imported.

    A call returns those of the current device. Without any, MLX operations serve.
    """

    def __call__(self) -> Any:
        """Return the kernels of the current device, or None."""
        return self.get(serving())


GEOMETRY = geometry = Family()  # every backend has one: ``geometry.tables.Geometry``
REDUCTIONS = reductions = Family()  # every backend has ``Reductions``
NORMS = norms = Family()
HEADS = heads = Family()  # normalize and rotate attention heads
POINTS = points = Family()  # weigh the cells around points
PATCHES = patches = Family()  # lay out patches
UPDATES = updates = Family()  # optimizers
JOINS = joins = Family()  # join channels

# ``ops.pool.BatchRows``: element b has the rows ``order[starts[b]:starts[b + 1]]``.
BatchRows = Any


@runtime_checkable
class Reductions(Protocol):
    """Sums and maxima over tables of rows, and over batch elements.

    ``x`` is (N, C), ``y`` and ``dy`` are (M, C), ``table`` is (M, K) int32, and
    ``weights`` are (M, K) float32, all 1 where there are none. Sums are divided by
    int32 ``divisors`` before they are rounded; those below 1 count as 1.
    """

    def gather_sum(
        self,
        x: mx.array,
        table: mx.array,
        weights: mx.array | None = None,
        divisors: mx.array | None = None,
    ) -> mx.array:
        """Return (M, C) ``y[o] = sum over k of weights[o, k] * x[table[o, k]]``."""

    def scatter_sum(
        self,
        y: mx.array,
        table: mx.array,
        rows: int,
        weights: mx.array | None = None,
        order: tuple[mx.array, ...] = (),
        divisors: mx.array | None = None,
    ) -> mx.array:
        """Return (rows, C) ``x[i] = sum over table[o, k] == i of w[o, k] * y[o]``.

        ``order``: of the table, or nothing: it is found then.
        """

    def order(
        self, table: mx.array, rows: int, longest: int | None = None
    ) -> tuple[mx.array, ...]:
        """Return what ``scatter_sum`` finds out of a table, to keep for other calls.

        No row is named more often than ``longest``; by default one may be by all.
        """

    def counts(
        self, table: mx.array, rows: int, order: tuple[mx.array, ...]
    ) -> mx.array:
        """Return (rows,) int32: how often a table, of that order, names each row."""

    def gather_max(self, x: mx.array, table: mx.array) -> tuple[mx.array, mx.array]:
        """Return the (M, C) greatest of x's rows in a table's row, and which, or -1."""

    def scatter_max(
        self, x: mx.array, table: mx.array, rows: int
    ) -> tuple[mx.array, mx.array]:
        """Return the greatest of the rows o with ``table[o, 0] == i``, and which."""

    def max_pool_backward(
        self, dy: mx.array, rows: mx.array, back: mx.array
    ) -> mx.array:
        """Return ``x[i] = sum over o = back[i, :] of dy[o] where rows[o] == i``.

        ``rows``: (M, C) int32, as the maxima return them. ``back``: (N, K) int32,
        outputs that each row may have won, none of them twice.
        """

    def segment_max(self, x: mx.array, rows: BatchRows) -> tuple[mx.array, mx.array]:
        """Return the (batch_size, C) maxima of each element, and their int32 rows."""


# Numbers of an array that kernels read, at least: Metal has fewer in another address
# space than a kernel may name, and MLX keeps 8 bytes in the host's memory, where a GPU
# waits for them.
LEAST_NUMBERS = 8


@dataclass(frozen=True, eq=False)
class RowSegments:
    """Rows of each segment: ``order[starts[s]:starts[s + 1]]``.

    ``of`` is the (N,) int32 segment of each row; ``order`` is None if rows of a segment
    follow each other.
    """

    starts: tuple[int, ...]
    of: mx.array
    order: mx.array | None = None
    _pieces: dict = field(default_factory=dict, compare=False, repr=False)

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
    def counts(self) -> mx.array:
        """(S, 1) float32: rows of each segment, at least 1."""
        sizes = [max(1, stop - start) for start, stop in pairwise(self.starts)]
        return sync.complete(mx.array(sizes, dtype=mx.float32).reshape(-1, 1))

    def pieces(self, length: int) -> tuple[mx.array, mx.array, int]:
        """Cut segments into P >= 1 pieces of at most ``length`` rows.

        Returns int32 where pieces begin, and the first piece of each segment, each
        with its end, and at least ``LEAST_NUMBERS``; and P.
        """
        if length not in self._pieces:
            bounds, firsts = [], [0]
            for start, stop in pairwise(self.starts):
                bounds += range(start, stop, length)
                firsts.append(len(bounds))
            bounds.append(self.starts[-1])
            self._pieces[length] = *_from_host(bounds, firsts), len(bounds) - 1
        return self._pieces[length]


def _from_host(*lists: Sequence[int]) -> list[mx.array]:
    """Return int32 arrays of numbers, a last one repeated if they are few."""
    wide = [[*a, *a[-1:] * (LEAST_NUMBERS - len(a))] for a in lists]
    ends = list(accumulate(map(len, wide)))
    whole = mx.array([*chain(*wide)], dtype=mx.int32)
    return sync.complete(mx.split(whole, ends[:-1]))


class Fit(NamedTuple):  # created once a call, faster than a dataclass
    """What normalises rows: ``act((x - mean) / sqrt(var + eps) * weight + bias)``.

    Mean and variance are (S, C) float32, a line of each segment, or None for kernels
    that compute them; weight and bias are (S, C), or (C,) for one segment, or None.
    """

    mean: mx.array | None
    var: mx.array | None
    weight: mx.array | None = None
    bias: mx.array | None = None
    eps: float = 0.0
    act: Activation = NONE
    segments: RowSegments | None = None

    @property
    def dtype(self) -> mx.Dtype:
        """The dtype of weight and bias."""
        one = self.bias if self.weight is None else self.weight
        return mx.float32 if one is None else one.dtype


@lru_cache(maxsize=256)
def standard(channels: int, lines: int = 1) -> tuple[mx.array, mx.array]:
    """Return (lines, C) means of 0 and variances of 1, which change no bit."""
    found = mx.zeros((lines, channels)), mx.ones((lines, channels))
    sync.compute(found)
    return found


Running = tuple[mx.array, mx.array] | None  # mean and variance, if they are kept
Residual = mx.array | None


class Norms:
    """Sums over rows and what is applied to each row: statistics, norms, gradients.

    x and dy are (N, C) of one dtype, and so is a residual, which was added before
    ``fit.act``. A backend has the first four methods.
    """

    sums_columns = False  # whether ``column_sums`` is faster than MLX

    def moments(
        self,
        x: mx.array,
        segments: RowSegments | None = None,
        running: Running = None,
        momentum: float = 0.0,
        lines: mx.array | None = None,
    ) -> tuple[mx.array, mx.array, mx.array, mx.array]:
        """Return mean and biased variance, and running statistics moved by them.

        Four (S, C) float32, a line of each of ``segments``; by default all rows are
        one. Without ``running``, (C,) float32 mean and variance, the last two are the
        mean and the unbiased variance; a single row moves the mean alone. ``lines``,
        (L, 3, C) float32 of the convolution that wrote x, are the number of some rows
        each, their mean and the sum of squares about it: then x is not read.
        """
        raise NotImplementedError

    def normalize(self, x: mx.array, fit: Fit, residual: Residual = None) -> mx.array:
        """Return (N, C) in the dtype of x."""
        raise NotImplementedError

    def gradient_sums(
        self, dy: mx.array, x: mx.array, fit: Fit, residual: Residual = None
    ) -> tuple[mx.array, mx.array, mx.array, mx.array]:
        """Return sums over rows of g and of g xhat; g = dy times act's derivative.

        They are (2, S, C) float32 sums; (2, S, C) float32 of their means over the rows,
        times the weight; (S, C) of g xhat and of g in the dtype of the weight.
        """
        raise NotImplementedError

    def gradient(
        self,
        dy: mx.array,
        x: mx.array,
        fit: Fit,
        residual: Residual = None,
        terms: mx.array | None = None,
    ) -> tuple[mx.array, mx.array]:
        """Return ``rstd * (weight * g - terms[0] - xhat * terms[1])``, and g.

        ``terms``: (2, S, C) float32, or None for zeros: fixed statistics. The second
        result has no meaning without a residual.
        """
        raise NotImplementedError

    def is_one_launch(self, x: mx.array) -> bool:
        """Whether ``batch_norm`` of (N, C) is one launch, and its gradient another."""
        return False

    def batch_norm(
        self,
        x: mx.array,
        fit: Fit,
        residual: Residual = None,
        running: Running = None,
        momentum: float = 0.0,
        lines: mx.array | None = None,
    ) -> tuple[mx.array, ...]:
        """Return rows normalised by their statistics, and what ``moments`` returns."""
        mean, var, *moved = self.moments(x, None, running, momentum, lines)
        y = self.normalize(x, fit._replace(mean=mean, var=var), residual)
        return y, mean, var, *moved

    def batch_norm_gradient(
        self, dy: mx.array, x: mx.array, fit: Fit, residual: Residual = None
    ) -> tuple[mx.array, ...]:
        """Return the gradients of x, weight, bias and residual, through statistics."""
        _, terms, dweight, dbias = self.gradient_sums(dy, x, fit, residual)
        dx, dresidual = self.gradient(dy, x, fit, residual, terms)
        return dx, dweight, dbias, dresidual

    def normalizes_rows(self, x: mx.array, fit: Fit) -> bool:
        """Whether ``layer_norm`` and ``layer_norm_gradient`` take these arrays."""
        return False

    def column_sums(self, x: mx.array, dtype: mx.Dtype) -> mx.array:
        """Return the (C,) sums over the rows of (N, C) in a dtype; float32 inside."""
        sums = self.gradient_sums(x, x, Fit(*standard(x.shape[1])))[3]
        return sums.reshape(-1).astype(dtype)
