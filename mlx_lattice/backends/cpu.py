"""The contractions of the C++ extension: a planner for each route.

The extension's function of a route has its name; that of its gradient ends in
``_weight_grad``.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import mlx.core as mx

from .. import sync
from ..checks import DTYPES, INT32_LIMIT
from ..devices import CPU, Device, extension
from ..geometry import lattice
from ..geometry.lattice import (
    Bounds,
    Curve,
    Offsets,
    Rule,
    UniqueRows,
    box_of,
    join,
    true_positions,
)
from ..geometry.lattice import rule_rows as rows_within
from ..geometry.tables import Geometry, Keep, RelationViews, RowIndex, Rows
from ..problem import (
    FORWARD,
    IN_KERNEL,
    IN_TILES,
    MLX_LAYOUT,
    WEIGHT_GRAD,
    Plan,
    Planner,
    Problem,
    integers_unpacked,
)
from ..quantized import IntegerWeight, QuantizedWeight
from ..registry import BatchRows, Fit, Norms, Residual, RowSegments, Running
from ..relation import Relation
from .mlx import MlxReductions, divided, take

# Rows that the extension has in one tile, at most, and of a line of statistics.
ONE_TILE, LINE_ROWS = 512, 64


def _csr_columns(relation: Relation) -> tuple[mx.array, ...]:
    """Return where the edges of each output row begin, their inputs and offsets."""

    def columns():
        csr = relation.output_csr
        return csr.indptr, *(mx.contiguous(csr.edges[:, c]) for c in (0, 2))

    return relation.view("output_csr_columns", columns)


# What a function of the extension gets of a relation, by the view that it reads.
EDGES: dict[str, Callable[[Relation], tuple[Any, ...]]] = {
    "out_in": lambda relation: (relation.out_in,),
    "edges": lambda relation: (relation.edges, relation.n_out),
    "output_csr": _csr_columns,
    "none": lambda relation: (),
}


def _options(p: Problem, view: str) -> dict[str, object]:
    """Return the arguments that say how channels and weights are stored."""
    packing = {}
    if p.bits and p.pass_ == FORWARD:
        packing = {"bits": p.bits, "group_size": p.group_size}
    if view == "none":
        return packing or {"transpose": p.transposed}
    return {"groups": p.groups, **(packing or {"transpose_weight": p.transposed})}


def _forward(plan: Plan, relation: Relation) -> Callable[..., mx.array]:
    """Return y, or y and statistics of its rows, by the route's function."""
    p, after, is_pointwise = plan.problem, plan.problem.epilogue, plan.view == "none"
    edges, options = EDGES[plan.view](relation), _options(p, plan.view)
    function = getattr(extension, plan.kernel)
    if plan.moments:
        function, after = extension.blocked_gather_gemm_moments, None
        options = {"groups": p.groups}

    def call(x, w, bias=None, *arrays):
        weights = w.arrays if isinstance(w, QuantizedWeight) else (w,)
        if is_pointwise:  # squeezed it is a view; an index gathers a copy
            weights = [a.squeeze(0) for a in weights]
        if after is None:
            return function(x, *weights, *edges, bias, **options)
        epilogue = (*arrays, after.act.code, after.eps)
        return function(x, *weights, *edges, bias, epilogue=epilogue, **options)

    return call


def _gradient(plan: Plan, relation: Relation) -> Callable[..., mx.array]:
    """Return dW over the kernel-major edges, or over the rows of a lone offset."""
    p, function = plan.problem, getattr(extension, f"{plan.kernel}_weight_grad")
    edges = () if plan.view == "none" else (relation.edges, relation.volume)
    options = {"groups": p.groups, "output_major": p.layout == MLX_LAYOUT}
    return lambda x, dy, _=None: function(x, dy, *edges, **options)


def _planner(name: str, view: str, grad_view: str = "") -> Planner:
    """Return the planner of a route that the extension runs."""

    def plan(problem: Problem, device: Device) -> Plan:
        if problem.pass_ == WEIGHT_GRAD:
            return Plan(problem, CPU, name, grad_view, _gradient, reads_stored=True)
        weights = IN_TILES if problem.bits else ""
        facts = {"epilogue": IN_KERNEL if problem.epilogue else "", "weights": weights}
        is_long = problem.sums_moments and problem.n_out > ONE_TILE
        if is_long and name == "blocked_gather_gemm":
            facts["moments"] = -(-problem.n_out // LINE_ROWS)
        return Plan(problem, CPU, name, view, _forward, **facts)

    plan.__doc__ = f"Plan {name} by the extension."
    return plan


blocked_gather_gemm: Planner = _planner("blocked_gather_gemm", "out_in", "edges")
grouped_gemm: Planner = _planner("grouped_gemm", "edges", "edges")
relation_traversal: Planner = _planner("relation_traversal", "output_csr", "edges")
native_pointwise: Planner = _planner("native_pointwise", "none", "none")
quantized_pointwise: Planner = _planner("quantized_pointwise", "none")
quantized_sorted: Planner = _planner("quantized_sorted", "out_in")
quantized_traversal: Planner = _planner("quantized_traversal", "edges")


class CpuIndex(RowIndex):
    """Finds the rows of one coordinate set; each table hashes them again."""

    def __init__(self, coords: mx.array):
        self.coords = coords

    @property
    def arrays(self) -> tuple[mx.array, ...]:
        """The arrays that ``find`` and ``table`` read."""
        return (self.coords,)

    def facts(self) -> list[mx.array]:
        """Return nothing: the extension reads rows where they are."""
        return []

    def settle(self, facts: list[Any]) -> tuple[Bounds, tuple[int, int] | None]:
        """Return the bounds and the earliest pair of equal rows."""
        return _bounds(self.coords), extension.first_duplicate(self.coords)

    def table(
        self,
        out: Rows,
        offsets: Offsets,
        stride: Sequence[int],
        *,
        transposed: bool = False,
        mirrored: bool = False,
        keep: Keep | None = None,
        wanted: str | None = None,
    ) -> mx.array:
        """Return the (N_out, K) int32 neighbour table, -1 if there is no edge."""
        return extension.neighbour_table(
            self.coords, out.coords, offsets, stride, transposed
        )


def _bounds(coords: mx.array) -> Bounds:
    with sync.values():
        low, high = extension.bounds(coords)
    return tuple(low), tuple(high)


class CpuGeometry(Geometry):
    """The geometry of the CPU's extension; see ``Geometry``."""

    bounds = staticmethod(_bounds)

    def unique_rows(
        self, coords: mx.array, box: Bounds | None = None, count: int | None = None
    ) -> UniqueRows:
        """Return the sorted unique rows, and the place of each row among them."""
        with sync.values():
            rows, inverse, _ = extension.unique_rows(coords)
        return UniqueRows(rows, inverse)

    def rule_rows(
        self,
        rule: Rule,
        coords: mx.array,
        offsets: Offsets,
        stride: Sequence[int],
        box: Bounds,
        count: int | None = None,
    ) -> mx.array:
        """Return the sorted unique int32 rows within a box that a rule makes."""
        bounds = box_of(rule, _bounds(coords), offsets, stride)
        if rule == Rule.ITSELF:
            rows = self.unique_rows(coords).rows
        elif rule == Rule.CELL:
            rows = extension.cells(coords, stride)
        elif rule == Rule.REACH:
            # The extension takes a box beyond int32 for rows there, which a stride
            # may have left out; its own box is up to a cell wider.
            if min(bounds[0]) <= -INT32_LIMIT or max(bounds[1]) >= INT32_LIMIT - 1:
                return rows_within(rule, coords, offsets, stride, box, count)
            rows = extension.reach(coords, offsets, stride)
        else:
            rows = extension.expand(coords, offsets, stride)
        if join(bounds, box) == box:
            return rows
        low, high = (mx.array(list(end)) for end in box)
        return rows[true_positions(mx.all((rows >= low) & (rows <= high), axis=1))]

    def index(self, coords: mx.array, box: Bounds | None = None) -> CpuIndex:
        """Return the look-up of (N, 1 + D) int32 rows."""
        return CpuIndex(coords)

    def transpose_table(self, table: mx.array, n_in: int) -> mx.array:
        """Return (n_in, K) int32: the row of ``table`` that holds each entry, or -1."""
        return extension.transpose_table(table, n_in)

    def edge_count(self, relation: RelationViews) -> None:
        """Return None: the extension lists edges without a count."""

    def edges(self, table: mx.array, relation: RelationViews | None = None) -> mx.array:
        """Return the (E, 3) int32 edges (i, o, k) of a table, sorted by (k, o)."""
        return extension.edges(table)[0]

    def curve_order(self, coords: mx.array, curve: Curve) -> mx.array:
        """Return the (N,) int32 order of rows by batch, then along a curve."""
        if not curve.is_numbered:
            return lattice.curve_order(coords, curve)
        low, bits, _, is_hilbert, is_swapped = curve
        return extension.curve_order(coords, low, bits, is_hilbert, is_swapped)


class CpuReductions(MlxReductions):
    """The reductions of the CPU's extension, products by MLX; see ``Reductions``."""

    def gather_sum(
        self,
        x: mx.array,
        table: mx.array,
        weights: mx.array | None = None,
        divisors: mx.array | None = None,
    ) -> mx.array:
        """Return the (weighted) sums of the rows that a table names, or their means."""
        if divisors is None:
            return extension.gather_sum(x, table, weights)
        sums = extension.gather_sum(x.astype(mx.float32), table, weights)
        return divided(sums, divisors).astype(x.dtype)

    def scatter_sum(
        self,
        y: mx.array,
        table: mx.array,
        rows: int,
        weights: mx.array | None = None,
        order: tuple[mx.array, ...] = (),
        divisors: mx.array | None = None,
    ) -> mx.array:
        """Return the (weighted) sums of the rows that name each of ``rows``."""
        if divisors is None:
            return extension.scatter_sum(y, table, rows, weights)
        sums = extension.scatter_sum(y.astype(mx.float32), table, rows, weights)
        return divided(sums, divisors).astype(y.dtype)

    def gather_max(self, x: mx.array, table: mx.array) -> tuple[mx.array, mx.array]:
        """Return the maxima over the rows that a table names, and their rows."""
        return extension.gather_max(x, table)

    def scatter_max(
        self, x: mx.array, table: mx.array, rows: int
    ) -> tuple[mx.array, mx.array]:
        """Return the maxima over the rows that name each of ``rows``, and which."""
        return extension.scatter_max(x, table, rows)

    def max_pool_backward(
        self, dy: mx.array, rows: mx.array, back: mx.array
    ) -> mx.array:
        """Return to each row the sum of the results that it won."""
        return extension.max_pool_backward(dy, rows, back)

    def segment_max(self, x: mx.array, rows: BatchRows) -> tuple[mx.array, mx.array]:
        """Return the maxima over batch elements, by blocks, and their rows."""
        best, places = extension.scatter_max(x, rows.blocks, len(rows.block_batch))
        y, block = extension.scatter_max(best, rows.block_batch, rows.size)
        return y, take(places + 1, block) - 1


class CpuNorms(Norms):
    """The norms of the CPU's extension; see ``Norms``."""

    sums_columns = True

    def moments(
        self,
        x: mx.array,
        segments: RowSegments | None = None,
        running: Running = None,
        momentum: float = 0.0,
        lines: mx.array | None = None,
    ) -> tuple[mx.array, mx.array, mx.array, mx.array]:
        """Return mean and biased variance, and running statistics moved by them."""
        if lines is not None:
            given = running or (None, None)
            return extension.combine_moments(lines, *given, momentum=momentum)
        rest = *_rows(segments), *(running or (None, None))
        return extension.channel_moments(x, *rest, momentum=momentum)

    def normalize(self, x: mx.array, fit: Fit, residual: Residual = None) -> mx.array:
        """Return (N, C) rows; a residual is added before the activation."""
        given = *_arrays(fit, residual), _of(fit)
        return extension.normalize_channels(x, *given, **_after(fit))

    def gradient_sums(
        self, dy: mx.array, x: mx.array, fit: Fit, residual: Residual = None
    ) -> tuple[mx.array, mx.array, mx.array, mx.array]:
        """Return sums over rows of g and of g xhat; g = dy times act's derivative."""
        given = _arrays(fit, residual if fit.act.changes else None)
        sums, terms = extension.channel_gradient_sums(
            dy, x, *given, *_rows(fit.segments), **_after(fit)
        )
        dbias, dweight = (a.squeeze(0).astype(fit.dtype) for a in mx.split(sums, 2))
        return sums, terms, dweight, dbias

    def gradient(
        self,
        dy: mx.array,
        x: mx.array,
        fit: Fit,
        residual: Residual = None,
        terms: mx.array | None = None,
    ) -> tuple[mx.array, mx.array]:
        """Return ``rstd * (weight * g - terms[0] - xhat * terms[1])``, and g."""
        given = _arrays(fit, residual if fit.act.changes else None)
        given = *given, _of(fit), terms
        found = extension.channel_gradient(dy, x, *given, **_after(fit))
        return found[0], found[1] if len(found) > 1 else dy


def _arrays(fit: Fit, residual: mx.array | None) -> tuple[mx.array | None, ...]:
    def wide(a: mx.array | None) -> mx.array | None:
        return None if a is None else a.astype(mx.float32)

    return *map(wide, (fit.mean, fit.var, fit.weight, fit.bias)), residual


def _rows(segments: RowSegments | None) -> tuple[list[int], mx.array | None]:
    return ([], None) if segments is None else (list(segments.starts), segments.order)


def _of(fit: Fit) -> mx.array | None:
    return None if fit.segments is None else fit.segments.of


def _after(fit: Fit) -> dict[str, float]:
    return {"act": fit.act.kind, "eps": fit.eps, "slope": fit.act.slope}


def int8_blocked(problem: Problem, device: Device) -> Plan:
    """Plan int8_blocked by the extension."""
    weights = integers_unpacked(problem)
    facts = {"epilogue": IN_KERNEL, "weights": weights}
    view = "none" if problem.pointwise else "out_in"
    return Plan(problem, CPU, "int8_blocked", view, _bind, **facts)


def _bind(plan: Plan, relation: Relation) -> Callable[..., mx.array]:
    """Return y, in tiles over the neighbour table, or over the rows themselves."""
    p = plan.problem
    options = {"activation": p.integer.act.code, "dtype": DTYPES[p.dtype]}
    options["groups"] = p.groups
    table = None if p.pointwise else relation.out_in

    def call(x: mx.array, w: IntegerWeight, *after: mx.array | None) -> mx.array:
        arrays = w.values, table, *after
        return extension.int8_blocked(x, *arrays, w.multipliers, **options)

    return call


def quantise(x: mx.array, scale: mx.array) -> mx.array:
    """Return (N, C) floats as int8, by one scale (1,) float32."""
    return extension.quantise(x, scale)


def quantise_rows(x: mx.array) -> tuple[mx.array, mx.array]:
    """Return (N, C) floats as int8, and the (N,) float32 scales of their rows."""
    return extension.quantise_rows(x)
