"""Kernels by backend: what each family provides, and those of the current device."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from itertools import accumulate, chain
from typing import TYPE_CHECKING, NamedTuple, Protocol, runtime_checkable

import mlx.core as mx

from . import sync
from .availability import extension, serves
from .devices import CPU, current
from .epilogue import GELU, GELU_TANH, NONE, SILU, Activation

if TYPE_CHECKING:  # geometry asks for the kernels that it is built by
    from .backends.cuda.norms import CudaColumnSums, CudaRowNorms
    from .backends.gpu.attention import GpuHeads, GpuPatches
    from .backends.gpu.joins import GpuJoins
    from .backends.gpu.optimizers import GpuUpdates
    from .backends.gpu.reductions import GpuPoints
    from .geometry.protocol import Geometry

MLX = "mlx"  # MLX operations, which run on every device
# Families of kernels by backend. ``backends`` fills them when the package is imported.
GEOMETRY: dict[str, Geometry] = {}
REDUCTIONS: dict[str, Reductions] = {}
# Without kernels, norms are MLX operations.
NORMS: dict[str, Norms] = {}
# Norms of single rows; elsewhere MLX's own kernel normalizes them.
ROW_NORMS: dict[str, CudaRowNorms] = {}
# The CPU extension's activations by kind: ``kernel(x)`` is the activation,
# ``kernel(x, dy)`` its derivative times dy.
CPU_ACTIVATIONS = {GELU: "gelu", GELU_TANH: "gelu_tanh", SILU: "silu"}
# Elsewhere MLX operations normalize and rotate attention heads.
HEADS: dict[str, GpuHeads] = {}
# Elsewhere MLX operations find the cells of points and their interpolation weights.
POINTS: dict[str, GpuPoints] = {}
# Elsewhere MLX operations, or the CPU's attention kernel, lay out patches.
PATCHES: dict[str, GpuPatches] = {}
# Without kernels, MLX's own optimizers run.
UPDATES: dict[str, GpuUpdates] = {}
# Elsewhere the kernels of norms sum columns, or MLX.
COLUMN_SUMS: dict[str, CudaColumnSums] = {}
# Elsewhere MLX operations join channels.
JOINS: dict[str, GpuJoins] = {}


def serving() -> str:
    """Return the backend whose kernels serve now: the device's own, or MLX's."""
    backend = current().backend
    return backend if serves(backend) else MLX


def geometry() -> Geometry:
    """Return the geometry of the device that MLX runs on now."""
    return GEOMETRY[serving()]


def reductions() -> Reductions:
    """Return the reductions of the device that MLX runs on now."""
    return REDUCTIONS[serving()]


def norms() -> Norms | None:
    """Return the norms of the device that MLX runs on now, if it has kernels."""
    return NORMS.get(serving())


def row_norms() -> CudaRowNorms | None:
    """Return what normalises rows in one launch on the device of now, if any does."""
    return ROW_NORMS.get(serving())


def activation(kind: int) -> Callable[..., mx.array] | None:
    """Return the kernel of an activation on the current device, if it has one."""
    name = CPU_ACTIVATIONS.get(kind)
    return getattr(extension, name) if name and serving() == CPU else None


def heads() -> GpuHeads | None:
    """Return what prepares heads for attention on the device of now, if any does."""
    return HEADS.get(serving())


def points() -> GpuPoints | None:
    """Return what finds cells of points on the device of now, if any kernel does."""
    return POINTS.get(serving())


def patches() -> GpuPatches | None:
    """Return what lays filled patches out on the device of now, if a kernel does."""
    return PATCHES.get(serving())


def updates() -> GpuUpdates | None:
    """Return the optimizers' steps of the device that MLX runs on now, if any."""
    return UPDATES.get(serving())


def joins() -> GpuJoins | None:
    """Return what joins channels on the device that MLX runs on now, if any does."""
    return JOINS.get(serving())


class BatchRows(Protocol):
    """The rows of each batch element: ``order[starts[b]:starts[b + 1]]``."""

    starts: tuple[int, ...]  # (batch_size + 1,)
    order: mx.array | None  # (N,) int32, or None where the rows are contiguous

    @property
    def size(self) -> int:
        """Number of batch elements."""

    @property
    def block_batch(self) -> mx.array:
        """(B, 1) int32: the element of each block of its rows."""

    @property
    def blocks(self) -> mx.array:
        """(N, 1) int32: the block of each row."""


@runtime_checkable
class Reductions(Protocol):
    """Sums and maxima over tables of rows, and over batch elements."""

    def gather_sum(
        self,
        x: mx.array,
        table: mx.array,
        weights: mx.array | None = None,
        divisors: mx.array | None = None,
    ) -> mx.array:
        """Return (M, C) ``y[o] = sum over k of weights[o, k] * x[table[o, k]]``.

        Args:
            x: (N, C).
            table: (M, K) int32.
            weights: (M, K) float32; all 1 where there are none.
            divisors: (M,) int32: y is divided by them before it is rounded; those
                below 1 count as 1.
        """

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

        Args:
            y: (M, C).
            table: (M, K) int32, values below ``rows``.
            rows: rows of the result.
            weights: w, (M, K) float32; all 1 where there are none.
            order: of the table, or nothing: it is found then.
            divisors: (rows,) int32: x is divided by them before it is rounded; those
                below 1 count as 1.
        """

    def order(
        self, table: mx.array, rows: int, longest: int | None = None
    ) -> tuple[mx.array, ...]:
        """Return what ``scatter_sum`` finds out of a table, to keep for other calls.

        Nothing where it finds out nothing.

        Args:
            table, rows: as there.
            longest: no row is named more often; by default one may be by all.
        """

    def counts(
        self, table: mx.array, rows: int, order: tuple[mx.array, ...]
    ) -> mx.array:
        """Return (rows,) int32: how often a table names each row.

        ``order``: of the table.
        """

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

        Args:
            dy: (M, C).
            rows: (M, C) int32, as the maxima return them.
            back: (N, K) int32: outputs that each row may have won, none of them twice.
        """

    def row_products(self, x: mx.array, y: mx.array, table: mx.array) -> mx.array:
        """Return (M, K) float32 ``x[table[o, k]] . y[o]``, 0 without a row."""

    def segment_max(self, x: mx.array, rows: BatchRows) -> tuple[mx.array, mx.array]:
        """Return the (batch_size, C) maxima of each element, and their int32 rows."""


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
