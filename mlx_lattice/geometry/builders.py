"""Geometry by the fastest builder of the device: compiled where there is one.

Compiled builders and the portable ones of ``geometry`` give the same rows.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from types import ModuleType

import mlx.core as mx

from .. import backends
from . import curves, portable
from . import output_rows as rules
from .portable import INT32_LIMIT, Bounds, RowIndex, UniqueRows

Offsets = Sequence[Sequence[int]]
Keep = Callable[[str, object], None]


class HashIndex:
    """Finds rows by value through a compiled builder, which hashes them.

    Args:
        native: the compiled backend.
        coords: (N, 1 + D) int32.
    """

    def __init__(self, native: ModuleType, coords: mx.array):
        self.native, self.coords = native, coords
        # Some backends keep a set's hash table for all of its relations.
        kept = getattr(native, "RowTable", None)
        self.rows = kept and kept(coords)

    def facts(self) -> list[mx.array]:
        """Return small arrays for ``settle``, launched but not waited for."""
        return self.rows.facts() if self.rows is not None else []

    def settle(self, facts: list) -> tuple[Bounds, tuple[int, int] | None]:
        """Return the bounds and the earliest pair of equal rows, from read facts."""
        if self.rows is not None:
            return self.rows.settle(facts)
        found = self.native.first_duplicate(self.coords)
        return portable.bounds_of(self.coords), found

    def find(self, rows: mx.array, bounds: Bounds | None = None) -> mx.array:
        """Return for each row its (Q,) int32 place in the set, or -1."""
        if rows.dtype != mx.int32:  # rows beyond int32 are not to be wrapped
            own = portable.bounds_of(self.coords)
            return RowIndex.of(self.coords, own).find(rows, bounds)
        dims = rows.shape[1] - 1
        return self.table(rows, [[0] * dims], [1] * dims)[:, 0]

    def table(
        self,
        out_coords: mx.array,
        offsets: Offsets,
        stride: Sequence[int],
        transposed: bool = False,
        mirrored: bool = False,
        keep: Keep | None = None,
        wanted: str | None = None,
    ) -> mx.array:
        """Return the (N_out, K) neighbour table; see ``builders.table``."""
        if self.rows is None:
            return self.native.neighbour_table(
                self.coords, out_coords, offsets, stride, transposed
            )
        if mirrored and hasattr(self.rows, "submanifold_table"):
            return self.rows.submanifold_table(offsets)
        counts = hasattr(self.native, "survey_table")
        more = {"keep": keep, "wanted": wanted} if counts else {}
        return self.rows.table(out_coords, offsets, stride, transposed, **more)


def index(coords: mx.array) -> RowIndex | HashIndex:
    """Return the look-up of (N, 1 + D) int32 rows, launched but not waited for.

    It is to be settled before a portable one is searched.
    """
    native = backends.native()
    if native is not None:
        return HashIndex(native, coords)
    return RowIndex.of(coords, None if coords.shape[0] else portable.bounds_of(coords))


def unique_rows(coords: mx.array) -> UniqueRows:
    """Return the sorted unique rows of (N, 1 + D) int32 coordinates."""
    native = backends.native()
    build = native.unique_rows if native is not None else portable.unique_rows
    return build(coords)


def made_rows(
    rule: str,
    coords: mx.array,
    bounds: Bounds,
    offsets: Offsets,
    stride: Sequence[int],
    spatial_shape: Sequence[int] | None = None,
) -> tuple[mx.array, Bounds]:
    """Return the sorted unique rows that a rule of ``made_rows`` makes, and their box.

    Reads one size.

    Args:
        rule: CELL, REACH or EXPAND.
        coords: (N, 1 + D) int32.
        bounds: bounds of ``coords``, or of a box that holds them.
        offsets: the K offsets.
        stride: lattice step.
        spatial_shape: keep only the rows in ``[0, spatial_shape)``.

    Raises:
        ValueError: a row would lie beyond int32.
    """
    box = rules.box_of(rule, bounds, offsets, stride)
    if len(coords) and not rules.fits_int32(box):
        # The box may be wider than what is reached: only then look at every row.
        rows, counts = rules.candidates(coords, rule, offsets, stride)
        if counts is not None:
            rows = rows[portable.true_positions(counts)]
        if rows.size:
            portable.as_int32(rows, rules.WHAT[rule])
        least, most = -INT32_LIMIT, INT32_LIMIT - 1
        box = tuple(tuple(min(max(v, least), most) for v in end) for end in box)
    box = rules.cut(box, spatial_shape)
    native = backends.native()
    if native is None or rules.is_empty(box):
        return rules.made_rows(coords, rule, offsets, stride, box), box
    if rule == rules.CELL:
        return native.cell_rows(coords, stride, bounds=bounds), box
    build = native.reached_rows if rule == rules.REACH else native.expanded_rows
    made = build(coords, offsets, stride, spatial_shape=spatial_shape, bounds=bounds)
    return made, box


def table(
    found: RowIndex | HashIndex,
    coords: mx.array,
    out_coords: mx.array,
    out_bounds: Bounds | None,
    offsets: Offsets,
    stride: Sequence[int],
    *,
    transposed: bool,
    mirrored: bool,
    keep: Keep | None = None,
    wanted: str | None = None,
) -> mx.array:
    """Return the (N_out, K) int32 neighbour table, -1 where there is no edge.

    Args:
        found: the look-up of ``coords``.
        coords: (N_in, 1 + D) int32 input rows.
        out_coords: (N_out, 1 + D) int32 output rows, with their bounds.
        out_bounds: bounds of the output rows; compiled look-ups need none.
        offsets: the K offsets.
        stride: lattice step.
        transposed: whether ``out = in * stride + offset_k``, not the forward rule.
        mirrored: whether the sets are one and the offsets point-symmetric, so that
            half of them need no search.
        keep: called with the name and the value of what a backend counts beside it.
        wanted: the name of a view that a backend may make beside it.
    """
    if isinstance(found, HashIndex):
        return found.table(
            out_coords, offsets, stride, transposed, mirrored, keep, wanted
        )
    if mirrored:
        return portable.submanifold_table(found, coords, offsets)
    build = portable.transposed_table if transposed else portable.forward_table
    return build(found, out_coords, out_bounds, offsets, stride)


def transpose_table(out_in: mx.array, n_in: int) -> mx.array:
    """Return (n_in, K) with the row of ``out_in`` that holds each entry, or -1."""
    native = backends.native()
    build = native.transpose_table if native is not None else portable.transpose_table
    return build(out_in, n_in)


def counts_edges() -> bool:
    """Whether the backend counts the edges of every table, both ways round."""
    return hasattr(backends.native(), "survey_table")


def edges(out_in: mx.array, relation=None) -> mx.array:
    """Return the (E, 3) edges (i, o, k) of a table, sorted by (k, o).

    A backend that counted the edges with the relation's table does not read it again.
    """
    native = backends.native()
    if relation is not None and counts_edges():
        return native.edges(out_in, relation)
    build = native.edges if native is not None else portable.table_edges
    return build(out_in)


def start(relation) -> mx.array | None:
    """Build a relation's views that a backend will want, unevaluated.

    So they are evaluated together with what the host waits for.

    Returns:
        The number of edges, still on the device, where the backend counts them.
    """
    native = backends.native()
    return native.start(relation) if hasattr(native, "start") else None


def gray_order(out_in: mx.array) -> mx.array:
    """Return the (N,) order of a table's rows by the Gray-code rank of their mask."""
    native = backends.native()
    if native is not None:
        return native.gray_order(out_in)
    return curves.gray_order(out_in >= 0)
