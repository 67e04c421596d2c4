"""What calls contraction kernels, on Metal and CUDA alike: the ``run`` of their Plans.

A Plan has decided all numbers. Here stands, once for each interface of ``signatures``,
how one pass becomes several dispatches; ``runner_steps`` has what comes before and
after each.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from math import prod
from typing import NamedTuple

import mlx.core as mx

from ..dtypes import DTYPES
from ..integer_facts import ARRAYS
from ..problem import MLX_LAYOUT
from ..relation import Relation
from ..routes.plan import Plan
from .runner_steps import (
    Adder,
    has_no_edges,
    has_padding,
    inputs_given,
    joined,
    padding_of,
    usually_there,
    view_of,
    weight_arrays,
    without_edges,
)
from .signatures import AFTER, LINES, computes_after, rounded_up


class Runner:
    """The ``run`` of a Plan in two steps: what is settled for a relation, then calls.

    Args:
        settle: ``settle(plan, relation)`` reads the view and returns
            ``call(x, w, bias)``, which holds the view and not the relation. Where the
            plan has an epilogue, its arrays take the place of the bias, those that
            there are or all, in order, with None for others.
    """

    def __init__(self, settle: Callable[[Plan, Relation], Callable[..., mx.array]]):
        self.settle = settle
        self.__doc__ = settle.__doc__

    def __call__(self, plan: Plan, relation: Relation, *arrays) -> mx.array:
        """Settle and call at once."""
        return self.settle(plan, relation)(*arrays)


@Runner
def per_row(plan: Plan, relation: Relation) -> Callable[..., mx.array]:
    """Return y, (N_out, C_y), by a kernel of the interface PER_ROW.

    Float32 where the plan has partial sums: then rows are those of ``plan.partials``,
    and nothing follows.
    """
    view, sizes = view_of(plan, relation), dict(plan.sizes)
    width, dtype = plan.problem.channels[1], DTYPES[plan.problem.dtype]
    rows = relation.n_out
    if plan.partials:
        rows, dtype = plan.partials[0], mx.float32
    if has_no_edges(plan, view):
        return lambda x, w, *added: without_edges(plan, (rows, width), dtype, *added)
    weights, usual = plan.once(weight_arrays), plan.once(usually_there)
    count, nothing, known = sum(usual), (False,) * len(usual), {}

    def launches(there: tuple[bool, ...]) -> list[Callable]:
        return [
            plan.gpu.launcher(
                inputs_given(plan, *there),
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
        arrays = [x, *weights(w), *view, *given]
        there = usual if len(given) == count else nothing
        if there not in known:
            known[there] = launches(there)
        return joined([launch(arrays)[0] for launch in known[there]])

    return call


class _Tiles(NamedTuple):
    """What tiles over sorted rows settle for all relations of a layer.

    Attributes:
        sizes: numbers that the kernel gets.
        dtype: of y.
        out: of what tiles write.
        width: of y.
        wide: the same, with padding.
        is_padded: whether channels are padded.
        is_split: whether sums are split.
        has_moments: whether tiles write statistics of y's rows, too.
        weights: gives the arrays of a weight.
        names: of what may follow the sums.
        own: those of them that the tiles' kernel may take.
        usual: which of them most calls give.
        count: how many they are.
        nothing: the same of calls that give none.
        known: by which there are, their names, which inputs the kernel gets, and what
            adds splits.
    """

    sizes: dict[str, int]
    dtype: mx.Dtype
    out: mx.Dtype
    width: int
    wide: int
    is_padded: bool
    is_split: bool
    has_moments: bool
    weights: Callable[..., Sequence[mx.array]]
    names: tuple[str, ...]
    own: tuple[str, ...]
    usual: tuple[bool, ...]
    count: int
    nothing: tuple[bool, ...]
    known: dict[tuple[bool, ...], tuple[list[str], tuple[bool, ...], Adder | None]]

    @classmethod
    def of(cls, plan: Plan) -> _Tiles:
        """Return what a plan settles, whatever its rows."""
        p, facts, of_split = plan.problem, plan.problem.integer, mx.float32
        dtype, width, is_split = DTYPES[p.dtype], p.channels[1], plan.splits > 1
        if facts:
            dtype, of_split = facts.out_dtype(dtype), mx.int32
        names = ARRAYS if facts else AFTER if computes_after(plan) else AFTER[:1]
        usual = usually_there(plan)
        return cls(
            dict(plan.sizes),
            dtype,
            of_split if is_split else dtype,
            width,
            rounded_up(width, plan.multiple),
            has_padding(plan),
            is_split,
            LINES in plan.gpu.interface.outputs,
            weight_arrays(plan),
            names,
            tuple(n for n in plan.gpu.interface.inputs if n in (*AFTER, *ARRAYS)),
            usual,
            sum(usual),
            (False,) * len(names),
            {},
        )

    def given(self, plan: Plan, there: tuple[bool, ...]) -> tuple:
        """Return the names of what there is, the kernel's inputs, and the adder."""
        found = self.known.get(there)
        if found is None:
            summed, add = [n for n, t in zip(self.names, there, strict=True) if t], None
            in_kernel = [name in summed and not self.is_split for name in self.own]
            if self.is_split:
                is_sorted = plan.placed or bool(plan.problem.integer)
                add = Adder.of(plan, ["partial", *["rows"] * is_sorted, *summed])
            found = self.known[there] = summed, inputs_given(plan, *in_kernel), add
        return found


@Runner
def sorted_tiles(plan: Plan, relation: Relation) -> Callable[..., mx.array]:
    """Return y, (N_out, C_y), by a kernel of the interface SORTED_TILES.

    Of int8 features too. Splits are added in order, by ``plan.add``. Where the plan
    does not place rows, its dispatches cut regions of rows apart: sorted rows are then
    put in order at the end.
    """
    view, tiles, n = view_of(plan, relation), plan.once(_Tiles.of), relation.n_out
    if has_no_edges(plan, view):
        shape = n, tiles.width
        return lambda x, w, *added: without_edges(plan, shape, tiles.dtype, *added)
    return _SortedCall(plan, tiles, view, n)


class _SortedCall:
    """What a plan of tiles over sorted rows calls for one relation.

    Args:
        plan: of the relation's rows.
        tiles: what it has for all relations.
        view: the relation's.
        n: rows of y.
    """

    __slots__ = "_known", "_n", "_plan", "_tiles", "_view"

    def __init__(self, plan: Plan, tiles: _Tiles, view: Sequence[mx.array], n: int):
        self._plan, self._tiles, self._view, self._n = plan, tiles, view, n
        # Which arrays the last call gave after the weight, and its dispatches.
        self._known: tuple[tuple[bool, ...] | None, Sequence[tuple]] = None, ()

    def __call__(self, x, w, *added) -> mx.array | tuple[mx.array, mx.array]:
        """Return y, and statistics of its rows where the plan sums them."""
        plan, tiles, view = self._plan, self._tiles, self._view
        given, there = added, tiles.usual
        if len(added) != tiles.count or (len(added) == 1 and added[0] is None):
            given = [a for a in added if a is not None] if len(added) > 1 else ()
            there = tuple([a is not None for a in added]) if given else tiles.nothing
        before, steps = self._known
        if before != there:
            steps = _dispatched(plan, tiles, self._n, there)
            self._known = there, steps
        if tiles.is_padded:
            padded, multiple = padding_of(plan), plan.multiple
            x = padded(x, 1, multiple)
            given = [padded(a, -1, multiple) for a in given]
        arrays, parts, lines = [x, *tiles.weights(w), *view], [], []
        if not tiles.is_split:
            arrays += given
        for launch, add, summed in steps:
            y, *more = launch(arrays)
            if add is not None:
                after = zip(summed, given, strict=True)
                y, *more = add({"partial": y, "rows": view[1], **dict(after)})
            parts.append(y)
            lines += more
        y = joined(parts)
        if not plan.placed:
            y = y[mx.argsort(view[1][: self._n])]
        y = y if tiles.wide == tiles.width else y[:, : tiles.width]
        return (y, joined(lines)[:, :, : tiles.width]) if lines else y


def _dispatched(
    plan: Plan, tiles: _Tiles, n: int, there: tuple[bool, ...]
) -> tuple[tuple[Callable, Callable | None, list[str]], ...]:
    """Return what launches each dispatch over n rows, what adds its splits, of what."""
    (summed, given, adder), made = tiles.given(plan, there), []
    splits, height = plan.splits, plan.tile[0]
    all_tiles = sum([d.count for d in plan.dispatches])
    for d in plan.dispatches:
        top = d.first * height
        count = min(n - top, d.count * height)
        whole, add = (count, tiles.wide), None
        outputs = (((splits, *whole) if tiles.is_split else whole, tiles.out),)
        if tiles.has_moments:
            lines = plan.moments * d.count // all_tiles
            outputs = *outputs, ((lines, 3, tiles.wide), mx.float32)
        launch = plan.gpu.launcher(
            given,
            outputs,
            d.grid,
            plan.threadgroup,
            first=d.first,
            rows=top + count,
            **tiles.sizes,
        )
        if adder is not None:
            add = adder(splits, d.add, whole, tiles.dtype, top, plan.moments)
        made.append((launch, add, summed))
    return tuple(made)


class _Grad(NamedTuple):
    """What a weight gradient settles for all relations of a layer.

    Attributes:
        dtype: of dW.
        shape: of dW.
        whole: the same, with padding.
        is_padded: whether channels are padded.
        sizes: numbers that the kernel gets.
        names: of its inputs.
        given: which of them there are: all.
        add: what adds partial sums, where a kernel does.
        add_more: the same of later dispatches, which add to the sum before.
    """

    dtype: mx.Dtype
    shape: tuple[int, ...]
    whole: tuple[int, ...]
    is_padded: bool
    sizes: dict[str, int]
    names: tuple[str, ...]
    given: tuple[bool, ...]
    add: Adder | None
    add_more: Adder | None

    @classmethod
    def of(cls, plan: Plan) -> _Grad:
        """Return what a plan settles, whatever its rows."""
        # Channels are padded only where there is one group.
        p, is_padded, names = plan.problem, has_padding(plan), plan.gpu.interface.inputs
        shape = whole = p.volume, p.c_in // p.groups, p.c_out
        if is_padded:
            whole = shape[0], *(rounded_up(c, plan.multiple) for c in shape[1:])
        if plan.layout == MLX_LAYOUT:
            shape, whole = ((s[2], s[0], s[1]) for s in (shape, whole))
        add = add_more = None
        if plan.add is not None:
            add = Adder.of(plan, ("partial", *names))
            add_more = Adder.of(plan, ("partial", *names, "before"))
        dtype, sizes, given = DTYPES[p.dtype], dict(plan.sizes), (True,) * len(names)
        return cls(dtype, shape, whole, is_padded, sizes, names, given, add, add_more)


@Runner
def edges_to_weight_grad(plan: Plan, relation: Relation) -> Callable[..., mx.array]:
    """Return dW by a kernel of the interface WEIGHT_GRAD.

    (K, C_in / groups, C_out), or, if the plan writes MLX's layout, (C_out, K, C_in /
    groups).

    Partial sums are added in order. Those of several dispatches are held, up to one
    that says how they are added; later ones are added to that sum.
    """
    view, grad = view_of(plan, relation), plan.once(_Grad.of)
    dispatches = plan.dispatches
    if has_no_edges(plan, view):
        return lambda x, dy, _=None: mx.zeros(grad.shape, dtype=grad.dtype)
    whole, kind = grad.whole, mx.float32 if plan.partials else grad.dtype
    several = len(dispatches) > 1 and sum([bool(d.add) for d in dispatches]) > 1
    summed = mx.float32 if several else grad.dtype
    steps, held, adder = [], 0, grad.add
    for d in dispatches:
        made = d.count, whole[2]
        if len(dispatches) == 1:
            made = plan.partials or whole
        launch = plan.gpu.launcher(
            grad.given,
            ((made, kind),),
            d.grid,
            plan.threadgroup,
            first=d.first,
            **grad.sizes,
        )
        held, add = held + prod(made), None
        if d.add:
            add = adder(held // prod(whole), d.add, whole, summed)
            held, adder = 0, grad.add_more
        steps.append((launch, add))
    return _GradCall(plan, grad, view, steps)


class _GradCall:
    """What a plan of a weight gradient calls for one relation.

    Args:
        plan: of the relation's rows.
        grad: what it has for all relations.
        view: the relation's.
        steps: what launches each dispatch, and what adds up to it, if anything.
    """

    __slots__ = "_grad", "_plan", "_steps", "_view"

    def __init__(
        self,
        plan: Plan,
        grad: _Grad,
        view: Sequence[mx.array],
        steps: Sequence[tuple[Callable, Callable | None]],
    ):
        self._plan, self._grad, self._view, self._steps = plan, grad, view, steps

    def __call__(self, x, dy, _=None) -> mx.array:
        """Return dW."""
        plan, grad, parts, dw = self._plan, self._grad, [], None
        if grad.is_padded:
            padded, multiple = padding_of(plan), plan.multiple
            x, dy = padded(x, 1, multiple), padded(dy, 1, multiple)
        arrays = [x, dy, *self._view]
        for launch, add in self._steps:
            parts += launch(arrays)
            if add is not None:
                named = dict(zip(grad.names, arrays, strict=True))
                (dw,) = add({**named, "partial": joined(parts), "before": dw})
                parts = []
        if plan.partials and plan.add is None:
            dw = joined(parts).reshape(plan.partials).sum(axis=0)
        elif parts:
            dw = joined(parts)
        dtype, whole, shape = grad.dtype, grad.whole, grad.shape
        if dw.dtype != dtype or dw.ndim != 3:
            dw = dw.astype(dtype).reshape(whole)
        return dw if whole == shape else dw[: shape[0], : shape[1], : shape[2]]
