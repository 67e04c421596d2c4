"""The ``run`` of the plans of contraction kernels, on Metal and CUDA alike.

A Plan has decided all numbers. Here stands, once for each interface of ``signatures``,
how one pass becomes several dispatches, with the steps before and after each: which
inputs a kernel gets, how they are padded, and how partial sums are added.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from math import prod
from typing import NamedTuple

import mlx.core as mx

from ..devices import CUDA, METAL
from ..dtypes import DTYPES
from ..epilogue import ARRAYS as EPILOGUE
from ..epilogue import finished
from ..integer_facts import ARRAYS
from ..integer_facts import finished as finished_integers
from ..problem import MLX_LAYOUT
from ..quantized import QuantizedWeight
from ..relation import Relation
from ..routes.plan import Plan
from . import gpu_joins
from .gpu_kernel import GpuKernel
from .kernel_launches import in_device_space
from .signatures import AFTER, LINES, computes_after, rounded_up


def view_of(plan: Plan, relation: Relation) -> Sequence[mx.array]:
    """Return the arrays of a relation that a plan reads, as its kernels take them.

    What launches would make longer is made so once, for all that are settled with it.
    """
    view = plan.read(relation)
    if plan.backend != METAL:
        return view
    return [in_device_space(array) if array.size else array for array in view]


def inputs_given(plan: Plan, *last: bool) -> tuple[bool, ...]:
    """Return which inputs a kernel gets: all, but of the last ones as is said."""
    return (True,) * (len(plan.gpu.interface.inputs) - len(last)) + last


def usually_there(plan: Plan) -> tuple[bool, ...]:
    """Return which arrays most calls give after the weight.

    Those that the epilogue of the plan's kernels has, or a bias.
    """
    if not computes_after(plan):
        return (True,)
    return tuple([name in plan.problem.epilogue.there for name in EPILOGUE])


def weight_arrays(plan: Plan) -> Callable[..., Sequence[mx.array]]:
    """Return what gives a kernel's weights: packed arrays, or a dense one padded."""
    axes, padded = (), padding_of(plan)
    if has_padding(plan):
        axes = (0, 2) if plan.layout == MLX_LAYOUT else (1, 2)

    def arrays(w: mx.array | QuantizedWeight) -> Sequence[mx.array]:
        if isinstance(w, QuantizedWeight):
            return w.arrays
        for axis in axes:
            w = padded(w, axis, plan.multiple)
        return (w,)

    return arrays


def padding_of(plan: Plan) -> Callable[[mx.array, int, int], mx.array]:
    """Return what fills an axis up to a multiple of channels with zeros."""
    return gpu_joins.padded if plan.backend == CUDA else gpu_joins.zero_padded


def has_padding(plan: Plan) -> bool:
    """Whether channels are padded."""
    p, multiple = plan.problem, plan.multiple
    return bool(p.c_in % multiple or p.c_out % multiple)


class Adder(NamedTuple):
    """What adds partial sums in order: a kernel of the interface ADD_SPLITS.

    Attributes:
        kernel: of ``Plan.add``.
        given: which of its inputs there are.
        read: their names.
    """

    kernel: GpuKernel
    given: tuple[bool, ...]
    read: list[str]

    @classmethod
    def of(cls, plan: Plan, named: Sequence[str]) -> Adder:
        """Return what adds by a plan; ``named``: what there is that it may read."""
        names = plan.add.interface.inputs
        given = tuple([name in named for name in names])
        return cls(plan.add, given, [name for name in names if name in named])

    def __call__(
        self,
        splits: int,
        grid: tuple[int, ...],
        shape: tuple[int, ...],
        dtype: mx.Dtype,
        first: int = 0,
        lines: int = 0,
    ) -> Callable[[dict[str, mx.array | None]], list[mx.array]]:
        """Return what adds arrays that it is given by name.

        Args:
            splits: how many partial sums there are.
            grid: threads of the kernel.
            shape: of the sum.
            dtype: of the sum.
            first: the line of the whole result that the sum starts with.
            lines: of statistics of its rows, where the kernel writes them.
        """
        sizes = {"lines": prod(shape[:-1]), "channels": shape[-1], "splits": splits}
        outputs = ((shape, dtype),)
        if lines:
            outputs = *outputs, ((lines, 3, shape[-1]), mx.float32)
        launch = self.kernel.launcher(self.given, outputs, grid, first=first, **sizes)
        read = self.read
        return lambda arrays: launch([arrays[name] for name in read])


def has_no_edges(plan: Plan, view: Sequence[mx.array]) -> bool:
    """Whether there is nothing to add up; rows there are."""
    return plan.problem.edges == 0 or 0 in [array.size for array in view]


def _bias_alone(
    shape: tuple[int, int], dtype: mx.Dtype, bias: mx.array | None = None
) -> mx.array:
    """Return what a contraction gives where there is nothing to add up."""
    zeros = mx.zeros(shape, dtype=dtype)
    return zeros if bias is None else zeros + bias


def without_edges(
    plan: Plan, shape: tuple[int, int], dtype: mx.Dtype, *added: mx.array | None
) -> mx.array:
    """Return the bias, or an epilogue, where there is nothing to add up."""
    if plan.problem.integer:
        facts, own = plan.problem.integer, DTYPES[plan.problem.dtype]
        return finished_integers(mx.zeros(shape), facts, own, *added[:-1])
    if plan.problem.epilogue is None or plan.then:
        return _bias_alone(shape, dtype, *added)
    after = plan.problem.epilogue
    given = after.named([a for a in added if a is not None])
    return finished(mx.zeros(shape, dtype=dtype), after, *given)


def joined(parts: Sequence[mx.array]) -> mx.array:
    """Return what the dispatches wrote, in order, as one array."""
    return parts[0] if len(parts) == 1 else mx.concatenate(parts)


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
    known: dict[tuple[bool, ...], tuple] = {}  # dispatches, by what is given

    def call(x, w, *added) -> mx.array | tuple[mx.array, mx.array]:
        """Return y, and statistics of its rows if the plan sums them."""
        given, there = added, tiles.usual
        if len(added) != tiles.count or (len(added) == 1 and added[0] is None):
            given = [a for a in added if a is not None] if len(added) > 1 else ()
            there = tuple([a is not None for a in added]) if given else tiles.nothing
        steps = known.get(there)
        if steps is None:
            steps = known[there] = _dispatched(plan, tiles, n, there)
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
            y = y[mx.argsort(view[1][:n])]
        y = y if tiles.wide == tiles.width else y[:, : tiles.width]
        return (y, joined(lines)[:, :, : tiles.width]) if lines else y

    return call


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

    def call(x, dy, _=None) -> mx.array:
        parts, dw = [], None
        if grad.is_padded:
            padded, multiple = padding_of(plan), plan.multiple
            x, dy = padded(x, 1, multiple), padded(dy, 1, multiple)
        arrays = [x, dy, *view]
        for launch, add in steps:
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

    return call
