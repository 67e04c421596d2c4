"""The routes that are written in MLX operations and run on every backend.

All accumulate in float32. Where offsets are multiplied apart, half inputs are widened
before, since a partial sum that is stored in half would be rounded once an offset; a
single matmul on a GPU has float32 sums of its own.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator

import mlx.core as mx

from .. import devices
from ..checks import DTYPES
from ..devices import Device, serves
from ..geometry import lattice, tables
from ..geometry.lattice import bounds_of, unique_rows
from ..geometry.tables import Geometry, RelationViews, SortedIndex
from ..problem import (
    MLX,
    MOST,
    OPERATIONS,
    UNPACKED_ONCE,
    WEIGHT_GRAD,
    Plan,
    Planner,
    Problem,
    finished,
    integers_unpacked,
)
from ..quantized import IntegerWeight, QuantizedWeight
from ..reductions import padded, take
from ..registry import BatchRows
from ..relation import Relation
from .cuda.contraction import unpacked_weights


def grouped_matmul(a: mx.array, b: mx.array, groups: int) -> mx.array:
    """Return (E, C_out) of (E, C_in) and one offset's (C_in / groups, C_out)."""
    if groups == 1:
        return a @ b
    rows, per_group = a.shape[0], b.shape[0]
    if per_group == 1:  # depthwise: no sum over channels at all
        width = b.shape[1] // groups
        return (a[:, :, None] * b.reshape(1, groups, width)).reshape(rows, b.shape[1])
    c_out = b.shape[1]
    a = a.reshape(rows, groups, per_group).swapaxes(0, 1)
    b = b.reshape(per_group, groups, c_out // groups).swapaxes(0, 1)
    return (a @ b).swapaxes(0, 1).reshape(rows, c_out)


def _operand(a: mx.array, is_aligned: bool = False) -> mx.array:
    """Return an operand of a matmul that is the whole sum."""
    backend = devices.current().backend
    if a.dtype == mx.float32 or backend == devices.METAL:
        return a
    if backend == devices.CUDA and is_aligned:
        return a * 1
    return a.astype(mx.float32)


def _oriented(w: mx.array, groups: int, transposed: bool) -> mx.array:
    """Return (K, in / groups, out) weights, transposed if asked."""
    if not transposed:
        return w
    if groups == 1:
        return w.swapaxes(1, 2)
    volume, per_group, c_out = w.shape
    w = w.reshape(volume, per_group, groups, c_out // groups)
    return w.transpose(0, 3, 2, 1).reshape(volume, c_out // groups, -1)


def slices(relation: Relation) -> Iterator[tuple[int, mx.array, mx.array]]:
    """Yield (k, input rows, output rows) of every offset that has edges."""
    edges, start = relation.edges, 0
    for k, count in enumerate(relation.edge_counts):
        if count:
            part = edges[start : start + count]
            yield k, part[:, 0], part[:, 1]
        start += count


def _pointwise(x, w, relation, groups, transposed):
    """Return x @ W[0]: the rows feed themselves."""
    w = _oriented(_operand(w, True), groups, transposed).squeeze(0)  # [0] gathers
    return grouped_matmul(_operand(x, True), w, groups).astype(x.dtype)


def _pointwise_weight_grad(x, dy, relation, groups):
    """Return x.T @ dy for the lone offset."""
    if groups == x.shape[1]:  # no matmul
        x, dy = x.astype(mx.float32), dy.astype(mx.float32)
    return _outer(_operand(x, True), _operand(dy, True), groups)[None]


def _outer(a: mx.array, b: mx.array, groups: int) -> mx.array:
    """Return (C_in / groups, C_out) = sum over rows of a^T b within each group."""
    if groups == 1:
        return a.T @ b
    rows, per_group, width = a.shape[0], a.shape[1] // groups, b.shape[1] // groups
    if per_group == 1:
        product = a[:, :, None] * b.reshape(rows, groups, width)
        return product.sum(axis=0).reshape(1, -1)
    a = a.reshape(rows, groups, per_group).transpose(1, 2, 0)
    b = b.reshape(rows, groups, width).swapaxes(0, 1)
    return (a @ b).swapaxes(0, 1).reshape(per_group, -1)


def _gather_gemm_scatter(x, w, relation, groups, transposed):
    """Return y by one gather, matmul and scattered add an offset."""
    w = _oriented(w.astype(mx.float32), groups, transposed)
    wide = x.astype(mx.float32)
    shape = relation.n_out, w.shape[2]
    if not relation.has_table:
        products = [
            grouped_matmul(wide[i], w[k], groups) for k, i, _ in slices(relation)
        ]
        return sum_by_output(products, relation, shape).astype(x.dtype)
    y = mx.zeros(shape)
    for k, i, o in slices(relation):
        # Within one offset no output row comes twice, so the add has one order.
        y = y.at[o].add(grouped_matmul(wide[i], w[k], groups))
    return y.astype(x.dtype)


def sum_by_output(
    products: mx.array, relation: Relation, shape: tuple[int, int]
) -> mx.array:
    """Add edge products in edge order, one edge a row and step: deterministic."""
    if not products:
        return mx.zeros(shape)
    dtype = products[0].dtype
    products = mx.concatenate([*products, mx.zeros((1, shape[1]), dtype=dtype)])
    csr, none = relation.output_csr, relation.n_edges
    # The output-major edges are the kernel-major ones in order of these keys.
    i, o, k = (relation.edges[:, c].astype(mx.int64) for c in range(3))
    place = mx.argsort((o * relation.volume + k) * max(1, relation.n_in) + i)
    starts, ends = csr.indptr[:-1], csr.indptr[1:]
    y = mx.zeros(shape, dtype=dtype)
    for step in range(int((ends - starts).max().item())):
        at = starts + step
        edge = mx.where(at < ends, place[mx.minimum(at, none - 1)], none)
        y = y + products[edge]
    return y


def _gather_gemm_scatter_weight_grad(x, dy, relation, groups):
    """Return dW by two gathers and a matmul an offset."""
    shape = x.shape[1] // groups, dy.shape[1]
    x, dy = x.astype(mx.float32), dy.astype(mx.float32)
    blocks = {k: _outer(x[i], dy[o], groups) for k, i, o in slices(relation)}
    none = mx.zeros(shape)
    return mx.stack([blocks.get(k, none) for k in range(relation.volume)])


def _explicit_gemm(x, w, relation, groups, transposed):
    """Return y by im2col: the K neighbours of a row side by side, one matmul."""
    w = _oriented(_operand(w), 1, transposed)
    # One layout for MLX, so that both layouts of weights give the same bits.
    w = mx.contiguous(w.reshape(relation.volume * x.shape[1], w.shape[2]))
    return (_columns(x, relation) @ w).astype(x.dtype)


def _explicit_gemm_weight_grad(x, dy, relation, groups):
    """Return dW as im2col(x).T @ dy."""
    product = _columns(x, relation).T @ _operand(dy)
    return product.reshape(relation.volume, x.shape[1], dy.shape[1])


def _columns(x: mx.array, relation: Relation) -> mx.array:
    x = _operand(x)
    padded = mx.concatenate([x, mx.zeros((1, x.shape[1]), dtype=x.dtype)])
    table = relation.out_in
    table = mx.where(table >= 0, table, x.shape[0])
    return padded[table].reshape(relation.n_out, relation.volume * x.shape[1])


def _grouped_gemm(x, w, relation, groups, transposed):
    """Return y by one gathered matmul over all edges, then one sum a row."""
    w = _oriented(w.astype(mx.float32), 1, transposed)
    edges = relation.edges
    shape = relation.n_out, w.shape[2]
    if edges.shape[0] == 0:
        return mx.zeros(shape, dtype=x.dtype)
    # By reshape: of an axis that was put in, MLX's CUDA kernel misreads the stride.
    rows = x.astype(mx.float32)[edges[:, 0]].reshape(len(edges), 1, x.shape[1])
    products = mx.gather_mm(
        rows,
        w,
        rhs_indices=edges[:, 2].astype(mx.uint32),
        sorted_indices=True,
    )[:, 0]
    if not relation.has_table:
        return sum_by_output([products], relation, shape).astype(x.dtype)
    y, start = mx.zeros(shape), 0
    for count in relation.edge_counts:
        if count:
            rows = edges[start : start + count, 1]
            y = y.at[rows].add(products[start : start + count])
        start += count
    return y.astype(x.dtype)


def _grouped_gemm_weight_grad(x, dy, relation, groups):
    """Return dW by one segmented matmul over the kernel-major edges."""
    edges = relation.edges
    if edges.shape[0] == 0:
        return mx.zeros((relation.volume, x.shape[1], dy.shape[1]))
    ends = mx.cumsum(relation.counts)
    segments = mx.stack([ends - relation.counts, ends], axis=1).astype(mx.uint32)
    return mx.segmented_mm(
        x.astype(mx.float32)[edges[:, 0]].T,
        dy.astype(mx.float32)[edges[:, 1]],
        segments,
    )


# Where packed weights become floats before MLX multiplies by them. On CUDA MLX 0.32.4
# compiles its packed kernels for tens of seconds each, and one in float32 failed to
# launch on Hopper; unpacking them by a kernel of ours takes microseconds.
UNPACKING = frozenset({devices.CUDA})


def _quantized_pointwise(x, w, relation, groups, transposed):
    """Return x @ W[0] in the dtype of ``x``."""
    if x.shape[0] == 0:  # MLX divides by the number of rows
        return mx.zeros((0, w.shape[2]), dtype=x.dtype)
    backend = devices.current().backend
    if backend in UNPACKING:
        dense = unpacked_weights(w) if serves(backend) else w.dense(x.dtype)
        dense = dense.squeeze(0)  # [0] gathers: a copy
        if dense.shape != w.shape[1:]:  # padded
            dense = dense[: w.shape[1], : w.shape[2]]
        return x @ dense
    # MLX's CPU kernels add up in the dtype they are given, those of GPUs in float32.
    kind = mx.float32 if backend == devices.CPU else x.dtype
    y = mx.quantized_matmul(
        padded_features(x, w, 1).astype(kind),
        w.weight.squeeze(0),
        scales=w.scales.squeeze(0).astype(kind),
        biases=w.biases.squeeze(0).astype(kind),
        group_size=w.group_size,
        bits=w.bits,
    )
    return y.astype(x.dtype)


def padded_features(x: mx.array, w: QuantizedWeight, groups: int) -> mx.array:
    """Return x with zeros up to the padded channels of each group; x if they fit."""
    padding = w.padded_channels - w.in_channels
    if not padding:
        return x
    rows = x.shape[0]
    x = mx.pad(x.reshape(rows, groups, w.in_channels), [(0, 0), (0, 0), (0, padding)])
    return x.reshape(rows, groups * w.padded_channels)


# int8 features, exactly. MLX multiplies no integer matrices, but float32 matrices of
# int8 values add up exactly while a sum stays below 2**24; int32 adds the parts.

EXACT = 2**24 // MOST**2 // 8 * 8  # channels whose products float32 adds up exactly


def _integers(plan: Plan, relation: Relation) -> Callable[..., mx.array]:
    """Return y: an offset at a time, its rows gathered, multiplied and added."""
    p = plan.problem

    def call(x: mx.array, w: IntegerWeight, *added: mx.array | None) -> mx.array:
        *after, row_scales = added
        sums = _integer_sums(x, w, relation, p.groups, row_scales)
        return finished(sums, p.integer, DTYPES[p.dtype], *after)

    return call


def _integer_sums(
    x, w: IntegerWeight, relation: Relation, groups: int, row_scales
) -> mx.array:
    """Return (N_out, C_out) int32, or float32 where rows have scales of their own."""
    values = w.integers()[..., : w.in_channels].swapaxes(1, 2)
    shape = relation.n_out, values.shape[2]
    products = (
        (i, o, _integer_products(x[i], values[k], groups))
        for k, i, o in slices(relation)
    )
    if row_scales is not None:
        products = (
            (i, o, part.astype(mx.float32) * row_scales[i][:, None])
            for i, o, part in products
        )
    dtype = mx.int32 if row_scales is None else mx.float32
    if not relation.has_table:
        parts = [part for _, _, part in products]
        return sum_by_output(parts, relation, shape).astype(dtype)
    y = mx.zeros(shape, dtype=dtype)
    for _, o, part in products:
        # Within one offset no output row comes twice, so the add has one order.
        y = y.at[o].add(part)
    return y


def _integer_products(x: mx.array, w: mx.array, groups: int) -> mx.array:
    """Return int32 x @ w of int8 (E, C_in) and (C_in / groups, C_out)."""
    sums = 0
    x = x.reshape(x.shape[0], groups, -1)
    for first in range(0, w.shape[0], EXACT):
        of = slice(first, first + EXACT)
        a = x[:, :, of].astype(mx.float32).reshape(x.shape[0], -1)
        part = grouped_matmul(a, w[of].astype(mx.float32), groups)
        sums = sums + part.astype(mx.int32)
    return sums


# Plans


def _binder(forward, gradient) -> Callable[[Plan, Relation], Callable]:
    """Return the ``bind`` of a plan: a contraction, then the bias; or dW."""

    def bind(plan: Plan, relation: Relation) -> Callable[..., mx.array]:
        p = plan.problem

        def call(a, b, bias=None) -> mx.array:
            if p.pass_ == WEIGHT_GRAD:
                return gradient(a, b, relation, p.groups).astype(a.dtype)
            y = forward(a, b, relation, p.groups, p.transposed)
            return y if bias is None else y + bias

        return call

    return bind


def _planner(
    name: str, view: str, forward, gradient=None, count=None, scratch=None
) -> Planner:
    """Return the planner of a route that MLX operations run."""
    bind = _binder(forward, gradient)

    def plan(problem: Problem, device: Device) -> Plan:
        held = scratch(problem, device) if scratch else 0
        return Plan(problem, MLX, name, view, bind, count=count, scratch=held)

    plan.__doc__ = f"Plan {name} in MLX operations."
    return plan


def _whole_table(plan: Plan, _: Relation | None) -> int:
    """Return the multiply-adds of im2col: every entry of the table, edge or not."""
    p = plan.problem
    rows = p.n_in if p.transposed else p.n_out
    return rows * p.volume * p.c_in * p.c_out


pointwise: Planner = _planner("pointwise", "none", _pointwise, _pointwise_weight_grad)
_float_gather_gemm_scatter = _planner(
    "gather_gemm_scatter",
    "edges",
    _gather_gemm_scatter,
    _gather_gemm_scatter_weight_grad,
)
explicit_gemm: Planner = _planner(
    "explicit_gemm",
    "out_in",
    _explicit_gemm,
    _explicit_gemm_weight_grad,
    _whole_table,
    Problem.im2col_bytes,
)
grouped_gemm: Planner = _planner(
    "grouped_gemm", "edges", _grouped_gemm, _grouped_gemm_weight_grad
)


def quantized_pointwise(problem: Problem, device: Device) -> Plan:
    """Plan quantized_pointwise in MLX operations."""
    unpacks = device.backend in UNPACKING
    return Plan(
        problem,
        MLX,
        "quantized_pointwise",
        "none",
        _binder(_quantized_pointwise, None),
        weights=UNPACKED_ONCE if unpacks else "",
        scratch=problem.dense_weight_bytes if unpacks else 0,
    )


def gather_gemm_scatter(problem: Problem, device: Device) -> Plan:
    """Plan gather_gemm_scatter in MLX operations, for int8 features too."""
    if not problem.integer:
        return _float_gather_gemm_scatter(problem, device)
    facts = {"epilogue": OPERATIONS, "weights": integers_unpacked(problem)}
    return Plan(problem, MLX, "gather_gemm_scatter", "edges", _integers, **facts)


class MlxGeometry(Geometry):
    """The geometry in MLX operations; see ``Geometry``."""

    bounds = staticmethod(bounds_of)
    unique_rows = staticmethod(unique_rows)
    rule_rows = staticmethod(lattice.rule_rows)
    index = staticmethod(SortedIndex.of)
    transpose_table = staticmethod(tables.transpose_table)
    curve_order = staticmethod(lattice.curve_order)

    def edges(self, table: mx.array, relation: RelationViews | None = None) -> mx.array:
        """Return the (E, 3) int32 edges (i, o, k), sorted by (k, o). Reads one size."""
        return tables.table_edges(table)


_LEAST = -(1 << 31)
BLOCK = 1024  # rows that are added up in one go: one long sum drifts


def sort_keys(x: mx.array) -> mx.array:
    """Return int32 in the order of the floats; all NaN equal, above infinity."""
    # Adding zero makes one of the two zeros.
    bits = (x.astype(mx.float32) + 0.0).view(mx.int32)
    keys = mx.where(bits < 0, bits ^ 0x7FFFFFFF, bits)
    return mx.where(mx.isnan(x), 0x7FFFFFFF, keys)


def divided(x: mx.array, divisors: mx.array | None) -> mx.array:
    """Return (N, C) rows over their (N,) divisors, those below 1 taken as 1."""
    return x if divisors is None else x / mx.maximum(divisors, 1)[:, None]


def row_sum(x: mx.array) -> mx.array:
    """Return the sum of (N, C) over its rows, by blocks: one long sum drifts."""
    if x.shape[0] == 0:  # MLX's CPU sum of no rows may run for minutes
        return mx.zeros((x.shape[1],), dtype=x.dtype)
    whole = x.shape[0] // BLOCK
    total = x[whole * BLOCK :].sum(axis=0)
    if whole:
        blocks = x[: whole * BLOCK].reshape(whole, BLOCK, -1).sum(axis=1)
        total = total + (row_sum(blocks) if whole > BLOCK else blocks.sum(axis=0))
    return total


def group_means(values: mx.array, groups: int) -> mx.array:
    """Return for each channel the mean over its group, in MLX operations."""
    channels = values.shape[-1]
    if groups == channels:
        return values
    shape = *values.shape[:-1], groups, channels // groups
    means = values.reshape(shape).mean(axis=-1, keepdims=True)
    return mx.broadcast_to(means, shape).reshape(values.shape)


def _slices(x: mx.array, rows: BatchRows) -> list[mx.array]:
    x = x if rows.order is None else x[rows.order]
    pairs = zip(rows.starts, rows.starts[1:], strict=False)
    return [x[start:end] for start, end in pairs]


def segment_sum(x: mx.array, rows: BatchRows) -> mx.array:
    """Return the (batch_size, C) sums over batch elements, a slice an element."""
    sums = [row_sum(part) for part in _slices(x, rows)]
    return mx.stack(sums) if sums else mx.zeros((0, x.shape[1]), dtype=x.dtype)


class MlxReductions:
    """The reductions in MLX operations; see ``Reductions``."""

    def gather_sum(
        self,
        x: mx.array,
        table: mx.array,
        weights: mx.array | None = None,
        divisors: mx.array | None = None,
    ) -> mx.array:
        """Return the (weighted) sums of the rows that a table names, or their means."""
        wide = padded(x.astype(mx.float32))
        y = mx.zeros((table.shape[0], x.shape[1]))
        for k in range(table.shape[1]):
            part = wide[table[:, k]]
            y = y + (part if weights is None else weights[:, k : k + 1] * part)
        return divided(y, divisors).astype(x.dtype)

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
        x, wide = mx.zeros((rows + 1, y.shape[1])), y.astype(mx.float32)
        for k in range(table.shape[1] if y.size else 0):
            at = mx.where(table[:, k] < 0, rows, table[:, k])
            x = x.at[at].add(wide if weights is None else weights[:, k : k + 1] * wide)
        return divided(x[:rows], divisors).astype(y.dtype)

    def order(
        self, table: mx.array, rows: int, longest: int | None = None
    ) -> tuple[mx.array, ...]:
        """Return nothing: a table is added up as it is."""
        return ()

    def counts(
        self, table: mx.array, rows: int, order: tuple[mx.array, ...]
    ) -> mx.array:
        """Return how often a table names each row."""
        at = mx.where(table < 0, rows, table).flatten()
        return mx.zeros((rows + 1,), dtype=mx.int32).at[at].add(1)[:rows]

    def gather_max(self, x: mx.array, table: mx.array) -> tuple[mx.array, mx.array]:
        """Return the maxima over the rows that a table names, and their rows."""
        keys = padded(sort_keys(x), _LEAST)
        shape = table.shape[0], x.shape[1]
        rows, best = mx.full(shape, -1, mx.int32), mx.full(shape, _LEAST, mx.int32)
        for k in range(table.shape[1]):
            value = keys[table[:, k]]
            rows = mx.where(value > best, table[:, k : k + 1], rows)
            best = mx.maximum(value, best)
        return take(x, rows), rows

    def scatter_max(
        self, x: mx.array, table: mx.array, rows: int
    ) -> tuple[mx.array, mx.array]:
        """Return the maxima over the rows that name each of ``rows``, and which."""
        n, shape = x.shape[0], (rows, x.shape[1])
        if x.size == 0:
            return mx.zeros(shape, x.dtype), mx.full(shape, -1, mx.int32)
        at, keys = mx.where(table[:, 0] < 0, rows, table[:, 0]), sort_keys(x)
        more = rows + 1, x.shape[1]  # the last takes what belongs to no row
        best = mx.full(more, _LEAST, mx.int32).at[at].maximum(keys)
        places = mx.where(keys == best[at], mx.arange(n, dtype=mx.int32)[:, None], n)
        first = mx.full(more, n, mx.int32).at[at].minimum(places)[:rows]
        first = mx.where(first < n, first, -1)
        return take(x, first), first

    def max_pool_backward(
        self, dy: mx.array, rows: mx.array, back: mx.array
    ) -> mx.array:
        """Return to each row the sum of the results that it won."""
        wide, won = padded(dy.astype(mx.float32)), padded(rows, -1)
        x = mx.zeros((back.shape[0], dy.shape[1]))
        place = mx.arange(back.shape[0], dtype=mx.int32)[:, None]
        for k in range(back.shape[1]):
            at = back[:, k]
            x = x + mx.where(won[at] == place, wide[at], 0)
        return x.astype(dy.dtype)

    def segment_max(self, x: mx.array, rows: BatchRows) -> tuple[mx.array, mx.array]:
        """Return the maxima over batch elements, a slice an element, and their rows."""
        winners = []
        for start, part in zip(rows.starts, _slices(sort_keys(x), rows), strict=False):
            if part.size:
                winner = start + mx.argmax(part, axis=0).astype(mx.int32)
                winners.append(winner if rows.order is None else rows.order[winner])
            else:
                winners.append(mx.full((x.shape[1],), -1, dtype=mx.int32))
        none = mx.zeros((0, x.shape[1]), dtype=mx.int32)
        found = mx.stack(winners) if winners else none
        return take(x, found), found
