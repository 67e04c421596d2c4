"""Contractions in blocks of output rows, over relations that live as long as a block.

Under a limit a large neighbour table, and what a GPU sorts of it, is not kept: rows are
looked up block by block, and the block's table goes with it. A row's sum adds its edges
in one order whatever rows are beside it, so bits stay the same as long as a block is
computed as all rows would be; where it would not, blocks grow until it is.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import nullcontext
from typing import NamedTuple

import mlx.core as mx

from .. import contraction, devices
from ..devices import CPU
from ..epilogue import Epilogue
from ..geometry import sync
from ..geometry.rows import BoxedRows
from ..numerics import asked_precision
from ..problem import FORWARD, weight_axes
from ..quantized import QuantizedWeight
from ..relation import Relation
from ..routes import launch
from ..routes.plan import MLX, Plan
from ..routes.selection import choose
from . import limit
from .blocks import block_rows, cut, joined
from .stages import is_recording

# Kinds whose output rows look their neighbours up.
CUT = ("submanifold", "forward", "target")
# Views that plans read of tables, a row at a time; what others list has another order.
VIEWS = ("out_in", "sorted")


class Layer(NamedTuple):
    """A contraction, but its features and rows.

    Attributes:
        w: the weight, float or packed.
        bias: (C_out,), or None.
        groups: channel groups.
        after: an epilogue, or None.
    """

    w: mx.array | QuantizedWeight
    bias: mx.array | None = None
    groups: int = 1
    after: Epilogue | None = None

    def __call__(self, x: mx.array, relation: Relation) -> mx.array:
        """Return y of all rows of a relation."""
        return contraction.conv(
            x,
            self.w,
            relation,
            groups=self.groups,
            bias=self.bias,
            epilogue=self.after,
        )

    def rows(self, first: int, last: int) -> Layer:
        """Return the layer for a block of its output rows."""
        if self.after is None or self.after.residual is None:
            return self
        residual = self.after.residual[first:last]
        return self._replace(after=self.after._replace(residual=residual))


def conv(x: mx.array, layer: Layer, relation: Relation) -> mx.array:
    """Return y, (N_out, C_out), with a table in blocks where a limit asks for it."""
    if limit.active() is None or keeps(relation):
        return layer(x, relation)
    return joined(blocks(x, layer, relation), relation.n_out)


def keeps(relation: Relation) -> bool:
    """Whether a relation's table is kept here, as it is where no limit holds."""
    held = limit.active()
    if held is None or relation.kind not in CUT or relation.is_transposed:
        return True
    if relation.is_identity or relation.sets is None:
        return True
    if relation.kept("table") is not None:
        return True
    return relation.n_out * _table_bytes(relation) <= held.share("kept")


def _table_bytes(relation: Relation) -> int:
    """Return what a row of a table takes, with what GPUs sort of it."""
    views = 1 if devices.current().backend == CPU else 2
    return 4 * relation.volume * views


def blocks(
    x: mx.array, layer: Layer, relation: Relation
) -> Iterator[tuple[int, mx.array]]:
    """Yield (first row, y) of blocks of output rows; all at once where none is cut.

    Args:
        x: (N_in, C_in).
        layer: its weight and what follows.
        relation: of the layer, from a manager.
    """
    n, c_out = relation.n_out, weight_axes(tuple(layer.w.shape))[3]
    # What reads a block has one of its own beside it.
    each = block_rows(n, 2 * c_out * x.itemsize + _table_bytes(relation))
    while each < n and not _same_sums(x, layer, relation, each):
        each *= 2
    if each >= n:
        yield 0, layer(x, relation)
        return
    scope = launch.current_scope()  # that of now, whenever a block is asked for
    for first, last in cut(n, each):
        part = _rows_of(relation, first, last)
        # A dry run would hold the tables of all blocks at once: there they stay lazy.
        lazy = sync.lazy() if is_recording() else nullcontext()
        with launch.scope(scope), lazy:
            y = layer.rows(first, last)(x, part)
        part.release()  # derivatives, which nobody takes, would hold its table
        yield first, y
        del part, y


def _rows_of(relation: Relation, first: int, last: int) -> Relation:
    """Return the relation of a block of output rows; nobody keeps it."""
    source, target = relation.sets
    rows, spec = target.coords[first:last], relation.spec
    held, box = relation.kept("table"), target.box

    def table(keep, wanted: str | None) -> mx.array:
        if held is not None:
            return held[first:last]
        out = BoxedRows(rows, box)
        return source.index.table(
            out, spec.offsets, spec.stride, keep=keep, wanted=wanted
        )

    return Relation(
        relation.kind,
        relation.volume,
        relation.n_in,
        last - first,
        table,
        spec=spec,
        in_coords=relation.in_coords,
        out_coords=rows,
        sets=relation.sets,
    )


def _same_sums(x: mx.array, layer: Layer, relation: Relation, each: int) -> bool:
    """Whether blocks of so many rows are added up as all rows are."""
    w, n, after = layer.w, relation.n_out, layer.after
    layout, _, _, c_out = weight_axes(tuple(w.shape))
    if after is not None and layer.bias is not None:
        after = after.biased(layer.bias)
    packing = w.packing if isinstance(w, QuantizedWeight) else None
    asked = asked_precision(), packing, layout
    facts = x.shape[1], c_out, x.dtype, layer.groups, *asked
    given = None if after is None else after.facts
    problem = launch.Pass(FORWARD, relation, facts, given).problem()
    device = devices.current()
    plan = choose(problem, device)[0].plan
    if plan.view not in VIEWS or plan.backend == MLX:
        return False
    if plan.splits > 1 and not plan.sliced:  # of the offsets that a tile's rows use
        return False
    sizes = {each, n - (n - 1) // each * each}
    # Nobody counts the edges of a block.
    parts = [problem.counted(problem.n_in, size, None) for size in sizes]
    return all(_order(choose(p, device)[0].plan) == _order(plan) for p in parts)


def _order(plan: Plan) -> tuple:
    """Return what the order and the rounding of a row's sum depend on."""
    return (
        plan.backend,
        plan.kernel,
        plan.variant,
        plan.view,
        plan.tile,
        plan.splits,
        plan.sliced,
        plan.multiple,
        plan.products,
        plan.dequantised,
        plan.expanded,
        plan.epilogue,
    )
