"""The ``run`` of the plans of contraction kernels, on Metal and CUDA alike.

A Plan has decided all numbers. Here stands, once for each interface of ``signatures``,
how one pass becomes several dispatches, with the steps before and after each: which
inputs a kernel gets, how they are padded, and how partial sums are added.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import cache, lru_cache
from math import prod
from typing import Any

import mlx.core as mx

from ... import registry
from ...checks import DTYPES
from ...devices import CUDA, METAL
from ...epilogue import ARRAYS as EPILOGUE
from ...epilogue import EpilogueFacts, finished
from ...problem import ARRAYS, COPIED, MLX_LAYOUT, Plan, Problem
from ...problem import WEIGHT_GRAD as WEIGHT_GRAD_PASS
from ...problem import finished as finished_integers
from ...quantized import IntegerWeight, QuantizedWeight
from ...registry import Fit
from ...relation import Relation
from .kernel import GpuKernel, Interface, in_device_space
from .reductions import padded, zero_padded


def view_of(plan: Plan, relation: Relation) -> Sequence[mx.array]:
    """Return the arrays of a relation that a plan reads, as its kernels take them."""
    view = plan.read(relation)
    if plan.backend != METAL:
        return view
    return [in_device_space(array) if array.size else array for array in view]


def input_flags(plan: Plan, *last: bool) -> tuple[bool, ...]:
    """Return which inputs a kernel gets: all but the ``last`` ones that are False."""
    return (True,) * (len(plan.gpu.interface.inputs) - len(last)) + last


def usual_inputs(plan: Plan) -> tuple[bool, ...]:
    """Return which arrays usually follow the weight: the epilogue's, or a bias."""
    if not computes_after(plan):
        return (True,)
    return tuple([name in plan.problem.epilogue.there for name in EPILOGUE])


def padded_weight(plan: Plan, w: mx.array) -> mx.array:
    """Return a weight whose channels are filled up to the plan's multiple."""
    pad = padding_of(plan)
    for axis in (0, 2) if plan.layout == MLX_LAYOUT else (1, 2):
        w = pad(w, axis, plan.multiple)
    return w


def padding_of(plan: Plan) -> Callable[[mx.array, int, int], mx.array]:
    """Return the function that pads an axis with zeros up to a multiple."""
    return padded if plan.backend == CUDA else zero_padded


def has_padding(plan: Plan) -> bool:
    """Whether channels are padded."""
    p, multiple = plan.problem, plan.multiple
    return bool(p.c_in % multiple or p.c_out % multiple)


def adder(
    plan: Plan,
    named: Sequence[str],
    splits: int,
    grid: tuple[int, ...],
    shape: tuple[int, ...],
    dtype: mx.Dtype,
    first: int = 0,
    lines: int = 0,
) -> Callable[[list[mx.array]], list[mx.array]]:
    """Return what adds partial sums in order."""
    given = tuple([name in named for name in plan.add.interface.inputs])
    sizes = {"lines": prod(shape[:-1]), "channels": shape[-1], "splits": splits}
    outputs = ((shape, dtype),)
    if lines:
        outputs = *outputs, ((lines, 3, shape[-1]), mx.float32)
    return plan.add.launcher(given, outputs, grid, first=first, **sizes)


def has_no_edges(plan: Plan, view: Sequence[mx.array]) -> bool:
    """Whether there is nothing to add up; rows there are."""
    return plan.problem.edges == 0 or 0 in [array.size for array in view]


def without_edges(plan: Plan) -> Callable[..., mx.array]:
    """Return what computes the bias, or the epilogue, of sums of nothing."""
    p = replace(plan.problem, epilogue=None) if plan.then else plan.problem
    return lambda x, w, *added: without_sums(p, [a for a in added if a is not None])


def without_sums(p: Problem, added: Sequence[mx.array]) -> mx.array:
    """Return the result of a pass without edges: zeros, and what follows the sums."""
    if p.integer:
        sums, after = mx.zeros((p.n_out, p.c_out)), p.integer.named(added)[:-1]
        return finished_integers(sums, p.integer, DTYPES[p.dtype], *after)
    if p.epilogue:
        return finished(zeros(p), p.epilogue, *p.epilogue.named(added))
    return zeros(p) + added[0] if added else zeros(p)


def zeros(p: Problem) -> mx.array:
    """Return zeros in the shape and dtype that the pass writes."""
    shape, dtype = (p.rows_written, p.channels[1]), DTYPES[p.dtype]
    if p.pass_ == WEIGHT_GRAD_PASS:
        shape = p.volume, p.c_in // p.groups, p.c_out
        shape = (shape[2], *shape[:2]) if p.layout == MLX_LAYOUT else shape
    if p.integer:
        dtype = p.integer.out_dtype(dtype)
    return mx.zeros(shape, dtype=dtype)


def joined(parts: Sequence[mx.array]) -> mx.array:
    """Return what the dispatches wrote, in order, as one array."""
    return parts[0] if len(parts) == 1 else mx.concatenate(parts)


def per_row(plan: Plan, relation: Relation) -> Callable[..., mx.array]:
    """Return y, (N_out, C_y), by a kernel of the interface PER_ROW."""
    view, sizes = view_of(plan, relation), dict(plan.sizes)
    width, dtype = plan.problem.channels[1], DTYPES[plan.problem.dtype]
    rows = relation.n_out
    if plan.partials:
        rows, dtype = plan.partials[0], mx.float32
    if has_no_edges(plan, view):
        if plan.partials:
            return lambda x, w: mx.zeros((rows, width))
        return without_edges(plan)
    usual, is_padded = usual_inputs(plan), has_padding(plan)
    count, nothing, known = sum(usual), (False,) * len(usual), {}

    def launches(there: tuple[bool, ...]) -> list[Callable]:
        return [
            plan.gpu.launcher(
                input_flags(plan, *there),
                [((d.count, width), dtype)],
                d.grid,
                plan.threadgroup,
                first=d.first,
                rows=d.count,
                **sizes,
            )
            for d in plan.dispatches
        ]

    def call(x, w, *added) -> mx.array:
        given = [a for a in added if a is not None]
        there = usual if len(given) == count else nothing
        if there not in known:
            known[there] = launches(there)
        if isinstance(w, QuantizedWeight):
            arrays = [x, *w.arrays, *view, *given]
        else:
            w = padded_weight(plan, w) if is_padded else w
            arrays = [x, w, *view, *given]
        return joined([launch(arrays)[0] for launch in known[there]])

    return call


def sorted_tiles(plan: Plan, relation: Relation) -> Callable[..., mx.array]:
    """Return y, (N_out, C_y), by a kernel of the interface SORTED_TILES."""
    view, n, p = view_of(plan, relation), relation.n_out, plan.problem
    width, dtype = p.channels[1], DTYPES[p.dtype]
    if p.integer:
        dtype = p.integer.out_dtype(dtype)
    if has_no_edges(plan, view):
        return without_edges(plan)
    names = ARRAYS if p.integer else AFTER if computes_after(plan) else AFTER[:1]
    usual, rows = usual_inputs(plan), ()
    if plan.add is not None and "rows" in plan.add.interface.inputs:
        rows = (view[1],) if plan.placed or p.integer else ()
    count, nothing, is_padded = sum(usual), (False,) * len(names), has_padding(plan)
    wide = rounded_up(width, plan.multiple)
    known: dict[tuple[bool, ...], tuple] = {}  # dispatches, by what is given

    def call(x, w, *added) -> mx.array | tuple[mx.array, mx.array]:
        given, there = added, usual
        if len(added) != count or (len(added) == 1 and added[0] is None):
            given = [a for a in added if a is not None] if len(added) > 1 else ()
            there = tuple([a is not None for a in added]) if given else nothing
        steps = known.get(there)
        if steps is None:
            summed = [n for n, t in zip(names, there, strict=True) if t]
            steps = known[there] = _dispatched(plan, n, summed, rows, (wide, dtype))
        if is_padded:
            pad, multiple = padding_of(plan), plan.multiple
            x = pad(x, 1, multiple)
            given = [pad(a, -1, multiple) for a in given]
        if isinstance(w, QuantizedWeight):
            arrays = [x, *w.arrays, *view]
        else:
            w = padded_weight(plan, w) if is_padded else w
            arrays = [x, w, *view]
        parts, lines = [], []
        if plan.splits == 1:
            arrays += given
        for launch, add in steps:
            y, *more = launch(arrays)
            if add is not None:
                y, *more = add([y, *rows, *given])
            parts.append(y)
            lines += more
        y = parts[0] if len(parts) == 1 else joined(parts)
        if not plan.placed:
            y = y[mx.argsort(view[1][:n])]
        y = y if wide == width else y[:, :width]
        return (y, joined(lines)[:, :, :width]) if lines else y

    return call


def integer_tiles(
    plan: Plan, relation: Relation, unpacker: Callable[..., Callable[..., Any]]
) -> Callable[..., mx.array]:
    """Return y by tiles over int8 features; int4 weights become int8 before."""
    call = sorted_tiles(plan, relation)

    def unpacked(x: mx.array, w: IntegerWeight, *added: mx.array | None) -> mx.array:
        values = w.values
        if w.bits == 4:
            values = unpacker(values.shape, w.group_size)(list(w.arrays))[0]
        return call(x, values, *added)

    return unpacked


def _dispatched(
    plan: Plan,
    n: int,
    summed: Sequence[str],
    rows: Sequence[mx.array],
    out: tuple[int, mx.Dtype],
) -> tuple[tuple[Callable, Callable | None], ...]:
    """Return (launch, add_splits) for each dispatch over n rows."""
    splits, height, (wide, dtype), made = plan.splits, plan.tile[0], out, []
    own = [name for name in plan.gpu.interface.inputs if name in (*AFTER, *ARRAYS)]
    given = input_flags(plan, *[name in summed and splits == 1 for name in own])
    partial = mx.int32 if plan.problem.integer else mx.float32
    named = ["partial", *["rows"] * bool(rows), *summed]
    all_tiles = sum([d.count for d in plan.dispatches])
    for d in plan.dispatches:
        top = d.first * height
        count = min(n - top, d.count * height)
        whole, add = (count, wide), None
        outputs = ((whole, dtype),)
        if splits > 1:
            outputs = (((splits, *whole), partial),)
        if LINES in plan.gpu.interface.outputs:
            lines = plan.moments * d.count // all_tiles
            outputs = *outputs, ((lines, 3, wide), mx.float32)
        launch = plan.gpu.launcher(
            given,
            outputs,
            d.grid,
            plan.threadgroup,
            first=d.first,
            rows=top + count,
            **dict(plan.sizes),
        )
        if splits > 1:
            facts = splits, d.add, whole, dtype, top, plan.moments
            add = adder(plan, named, *facts)
        made.append((launch, add))
    return tuple(made)


def edges_to_weight_grad(plan: Plan, relation: Relation) -> Callable[..., mx.array]:
    """Return dW by a kernel of the interface WEIGHT_GRAD."""
    view, p, dispatches = view_of(plan, relation), plan.problem, plan.dispatches
    dtype, names = DTYPES[p.dtype], plan.gpu.interface.inputs
    # Channels are padded only if there is one group.
    is_padded, sizes = has_padding(plan), dict(plan.sizes)
    shape = whole = p.volume, p.c_in // p.groups, p.c_out
    if is_padded:
        whole = shape[0], *(rounded_up(c, plan.multiple) for c in shape[1:])
    if plan.layout == MLX_LAYOUT:
        shape, whole = ((s[2], s[0], s[1]) for s in (shape, whole))
    if has_no_edges(plan, view):
        return lambda x, dy, _=None: mx.zeros(shape, dtype=dtype)
    kind = mx.float32 if plan.partials else dtype
    several = len(dispatches) > 1 and sum([bool(d.add) for d in dispatches]) > 1
    summed = mx.float32 if several else dtype
    steps, held, named = [], 0, ("partial", *names)
    read = plan.add.interface.inputs if plan.add else ()
    read = [names.index(name) for name in read if name in names]
    for d in dispatches:
        made = d.count, whole[2]
        if len(dispatches) == 1:
            made = plan.partials or whole
        launch = plan.gpu.launcher(
            (True,) * len(names),
            ((made, kind),),
            d.grid,
            plan.threadgroup,
            first=d.first,
            **sizes,
        )
        held, add = held + prod(made), None
        if d.add:
            if plan.add is not None:
                add = adder(plan, named, held // prod(whole), d.add, whole, summed)
            held, named = 0, ("partial", *names, "before")
        steps.append((launch, add))

    def call(x, dy, _=None) -> mx.array:
        parts, dw = [], None
        if is_padded:
            pad, multiple = padding_of(plan), plan.multiple
            x, dy = pad(x, 1, multiple), pad(dy, 1, multiple)
        arrays = [x, dy, *view]
        for launch, add in steps:
            parts += launch(arrays)
            if add is not None:
                before = [] if dw is None else [dw]
                (dw,) = add([joined(parts), *[arrays[i] for i in read], *before])
                parts = []
        if plan.partials and plan.add is None:
            dw = joined(parts).reshape(plan.partials).sum(axis=0)
        elif parts:
            dw = joined(parts)
        if dw.dtype != dtype or dw.ndim != 3:
            dw = dw.astype(dtype).reshape(whole)
        return dw if whole == shape else dw[: shape[0], : shape[1], : shape[2]]

    return call


# Where a float weight stands, in elements: from an offset to the next, from a row of
# the array to the next, and from a channel group to the next.
# Zero for packed ones. Kernels get TRANSPOSED where rows run along summed channels.
W_OFFSET, W_ROW, W_GROUP = "w_offset_stride", "w_row_stride", "w_group_stride"
# The arrays of an epilogue; a bias is its shift, or is alone.
AFTER = "bias", *EPILOGUE[1:]
# Statistics of the rows of y, (lines, 3, C_y): see ``Moments`` of epilogue.py.
LINES = "lines"
# y[o] = sum over the edges (i, o, k) of x[i] @ W[k] + bias, row by row. A dispatch
# covers `rows` rows from `first` on; y has just those. Channels are those of a group.
PER_ROW = Interface(
    "PerRow",
    ("x", "w", "table", "bias"),
    ("y",),
    (
        ("first", "0"),
        ("rows", "table_shape[0]"),
        ("volume", "table_shape[1]"),
        ("groups", "1"),
        ("c_x", "x_shape[1]"),
        ("c_y", "w_shape[2]"),
        (W_OFFSET, "0"),
        (W_ROW, "0"),
        (W_GROUP, "0"),
    ),
)
# The same over edges by output row: starts has one entry more than rows.
PER_ROW_OF_EDGES = Interface(
    PER_ROW.name,
    ("x", "w", "starts", "edges", "bias"),
    ("y",),
    (
        ("first", "0"),
        ("rows", "starts_shape[0] - 1"),
        ("volume", "w_shape[0]"),
        *PER_ROW.sizes[3:],
    ),
)
# y by tiles over sorted rows: `table` is in sorted order, `rows` says which row each
# is, `masks` which offsets a block of rows uses. A dispatch covers the tiles from
# `first` on, up to the sorted row `rows`. With splits, y is (splits, rows, C_y).
SORTED_TILES = Interface(
    "SortedTiles",
    ("x", "w", "table", "rows", "masks", "bias"),
    ("y",),
    (
        ("first", "0"),
        ("rows", "rows_shape[0]"),
        ("volume", "table_shape[0]"),
        ("c_x", "x_shape[1]"),
        ("c_y", "w_shape[2]"),
        ("splits", "gridDim.y"),
        (W_OFFSET, "0"),
        (W_ROW, "0"),
    ),
)
# dW[k] = sum over the edges (i, o, k) of x[i]^T dy[o], edges by offset. Splits are
# (splits, K, C_in, C_out); a dispatch covers `rows` lines of C_out from `first` on.
# Channels are those of a group, `n_out` the rows of dy.
WEIGHT_GRAD = Interface(
    "WeightGrad",
    ("x", "dy", "starts", "edges"),
    ("dw",),
    (
        ("first", "0"),
        ("splits", "1"),
        ("n_out", "dy_shape[0]"),
        ("volume", "starts_shape[0] - 1"),
        ("groups", "1"),
        ("c_in", "x_shape[1]"),
        ("c_out", "dy_shape[1]"),
    ),
)
# y = before + partial[0] + partial[1] + ... + bias, in that order, each of `rows` lines
# of `channels`. Where `rows` is given, line n is written to rows[first + n] - first.
ADD_SPLITS = Interface(
    "AddSplits",
    ("partial", "rows", "bias", "before"),
    ("y",),
    (
        ("first", "0"),
        ("lines", "partial_shape[1]"),
        ("channels", "partial_shape[2]"),
        ("splits", "partial_shape[0]"),
    ),
)
PACKED = ("words", "scales", "biases")


def computes_after(plan: Plan) -> bool:
    """Whether the plan's kernels compute an epilogue."""
    return plan.problem.epilogue is not None and plan.then is None


def finishing(interface: Interface) -> Interface:
    """Return the interface of kernels that compute an epilogue: all of ``AFTER``."""
    at, given = interface.inputs.index("bias"), interface.inputs
    inputs = given[:at] + AFTER + given[at + 1 :]
    return Interface(interface.name, inputs, interface.outputs, interface.sizes)


def with_moments(interface: Interface) -> Interface:
    """Return the interface of kernels that write statistics of the rows of y, too."""
    return replace(interface, outputs=(*interface.outputs, LINES))


def packed(interface: Interface) -> Interface:
    """Return the interface with packed weights in the place of ``w``."""
    at = interface.inputs.index("w")
    inputs = interface.inputs[:at] + PACKED + interface.inputs[at + 1 :]
    return replace(interface, inputs=inputs)


def copied(p: Problem) -> str:
    """Return what a Plan says of weights whose kernel reads one layout."""
    return COPIED if p.layout == MLX_LAYOUT else ""


@cache
def interned(kernel: GpuKernel) -> GpuKernel:
    """Return the first of all equal kernels, which MLX builds once."""
    return kernel


def rounded_up(count: int, multiple: int) -> int:
    """Return the count, up to a multiple."""
    return -(-count // multiple) * multiple


@lru_cache(maxsize=256)
def _line(value: float, channels: int) -> mx.array:
    """Return a value for each channel, cached so that no call copies it to the GPU."""
    return mx.array([value] * channels)


def launched(
    sums: mx.array,
    facts: EpilogueFacts,
    shift: mx.array | None = None,
    scale: mx.array | None = None,
    mean: mx.array | None = None,
    var: mx.array | None = None,
    residual: mx.array | None = None,
) -> mx.array:
    """Return an epilogue of sums, rounded ones, by the kernel of norms."""
    if not sums.size:
        return sums
    eps, channels = facts.eps, sums.shape[1]
    if var is None:  # no norm: divide by exactly 1
        var, eps = _line(1.0, channels), 0.0
    if mean is None:
        mean = _line(0.0, channels)
    mean, var = (a.reshape(1, channels) for a in (mean, var))
    fit = Fit(mean, var, scale, shift, eps, facts.act)
    return registry.norms().normalize(sums, fit, residual)
