"""How matrix tiles on Metal are planned: their order, their sizes, their dispatches.

Every number comes from ``tuning``; nothing here launches a kernel but the masks of
``tiles``.
"""

from __future__ import annotations

from typing import NamedTuple

import mlx.core as mx

from ..devices import Device, current
from ..geometry.views import SortedRows
from ..problem import INPUT_GRAD, WEIGHT_GRAD, Problem
from ..relation import Relation
from ..routes import thresholds
from . import dispatch_bounds, registry
from .metal_kernels import ceil_div, cuts
from .metal_views import occupancy_masks

TILE_ROWS, BLOCK_ROWS, THREADS = 64, 8, 128
WIDTHS = (128, 64, 32, 16)
GRAD_HEIGHTS, GRAD_WIDTHS = (16, 32, 64, 128), (16, 32, 64)
# A TensorOps product has 32 columns, and those of a weight gradient 64 rows.
TENSOR_COLUMNS, TENSOR_GRAD = 32, ((64, 128), (32, 64))
SORTED_ROUTES = {
    "sorted_implicit_gemm": 16,
    "quantized_sorted": 16,
    "tensor_ops": TENSOR_COLUMNS,
    "quantized_tensor_ops": TENSOR_COLUMNS,
}
GRAD_ROUTES = {
    "sorted_implicit_gemm": (GRAD_HEIGHTS, GRAD_WIDTHS),
    "grouped_gemm": (GRAD_HEIGHTS, GRAD_WIDTHS),
    "dense_channel": (GRAD_HEIGHTS, GRAD_WIDTHS),
    "cout16": (GRAD_HEIGHTS, GRAD_WIDTHS),
    "tensor_ops": TENSOR_GRAD,
}
# One kernel serves them all, but for TensorOps.
GRAD_KERNELS = dict.fromkeys(GRAD_ROUTES, "grouped_weight_grad")
GRAD_KERNELS["tensor_ops"] = "tensor_ops_weight_grad"

# Rows in the order of tiles, and the table in that order.
TileRows = tuple[mx.array, mx.array]


def work_limit() -> int:
    """Return the multiply-adds of one dispatch."""
    return dispatch_bounds.matrix_limit(current())


def tile_rows(relation: Relation, row_bytes: int, device: Device) -> TileRows:
    """Return the rows region by region, in each by the Gray-code rank of their mask.

    Regions are runs of rows, which lie near one another where rows are sorted. Runs on
    any machine.

    Args:
        relation: has a neighbour table.
        row_bytes: of a feature row that is gathered, which sets the regions' size.
        device: whose tiles.
    """
    region = thresholds.region_rows(row_bytes, device)

    def build() -> TileRows:
        table, n = relation.out_in, relation.n_out
        rows = registry.geometry().gray_order(table)
        regions = (rows // region).astype(mx.int64)
        rows = rows[mx.argsort(regions * n + mx.arange(n, dtype=mx.int64))]
        return rows, mx.take(table, rows, axis=0)

    if relation.n_out <= region:
        return relation.sorted.rows, relation.sorted.table
    return relation.view(f"tile_rows_{region}", build)


def tiles(relation: Relation, row_bytes: int) -> SortedRows:
    """Return ``tile_rows`` with a mask for every eight of them."""
    device = current()
    region = min(thresholds.region_rows(row_bytes, device), relation.n_out)

    def build() -> SortedRows:
        rows, table = tile_rows(relation, row_bytes, device)
        return SortedRows(rows, table, occupancy_masks(table, BLOCK_ROWS), BLOCK_ROWS)

    return relation.view(f"tiles_{region}", build)


class SortedPlan(NamedTuple):
    """How a contraction over sorted tiles of 64 rows is cut.

    Attributes:
        slices: of the channels of wide rows.
        row_bytes: of a feature row, or of its slice.
        columns: of a tile.
        splits: partial sums of each tile.
    """

    slices: int
    row_bytes: int
    columns: int
    splits: int


def sorted_plan(
    rows: int,
    channels: tuple[int, int],
    volume: int,
    item: int,
    narrowest: int,
    device: Device,
) -> SortedPlan:
    """Return the plan for rows of (C_x, C_y) channels of ``item`` bytes each."""
    c_x, c_y = channels
    slices = channel_slices(c_x * item, device)
    row_bytes = ceil_div(c_x * item, slices)
    columns = tile_columns(c_y, row_bytes, volume, narrowest, device)
    groups = ceil_div(c_y, columns) * ceil_div(rows, TILE_ROWS)
    splits = sum_splits(groups, volume * ceil_div(c_x * item, 64), device)
    return SortedPlan(slices, row_bytes, columns, splits)


def parameters(
    route: str, p: Problem, device: Device
) -> tuple[tuple[str, object], ...]:
    """Return what a route's tiles are launched with, as a Choice says it."""
    if 0 in (p.n_in, p.n_out, p.c_in, p.c_out):
        return ()
    if p.pass_ == WEIGHT_GRAD:
        if route not in GRAD_ROUTES:
            return ()
        high, wide = grad_tile(p.c_in, p.c_out, *GRAD_ROUTES[route])
        return (("kernel", GRAD_KERNELS[route]), ("tile", f"{high} x {wide}"))
    if route not in SORTED_ROUTES:
        return ()
    backward = p.pass_ == INPUT_GRAD
    channels = (p.c_out, p.c_in) if backward else (p.c_in, p.c_out)
    rows, narrowest = p.n_in if backward else p.n_out, SORTED_ROUTES[route]
    plan = sorted_plan(rows, channels, p.volume, p.itemsize, narrowest, device)
    said = [("tile", f"{TILE_ROWS} x {plan.columns}")]
    if plan.splits > 1:
        said.append(("split-K", plan.splits))
    elif plan.slices > 1:
        said.append(("channel slices", plan.slices))
    return tuple(said)


def sum_splits(groups: int, steps: int, device: Device) -> int:
    """Return into how many partial sums too few threadgroups are cut."""
    filling = thresholds.value(thresholds.FILLING, device)
    return max(1, min(filling // groups, thresholds.SPLITS["*"], steps))


def tile_columns(
    c_y: int, row_bytes: int, volume: int, narrowest: int, device: Device
) -> int:
    """Return the columns of a tile: as many as waste little and stay in cache.

    Args:
        c_y: channels written.
        row_bytes: of a feature row, or of its slice.
        volume: K.
        narrowest: the least that a kernel has.
        device: whose tiles.
    """
    widths = [w for w in WIDTHS if w >= narrowest]
    least = min(ceil_div(c_y, w) * w for w in widths)
    fitting = [w for w in widths if 3 * ceil_div(c_y, w) * w <= 4 * least]
    cached = thresholds.value(thresholds.CACHED_WEIGHTS, device)
    return next(
        (w for w in fitting if w <= 64 or volume * row_bytes * w <= cached), fitting[-1]
    )


def channel_slices(row_bytes: int, device: Device) -> int:
    """Return into how many slices the channels of wide rows are cut.

    A column's weights of a slice then stay in cache while tiles of rows pass.
    """
    return ceil_div(row_bytes, thresholds.value(thresholds.SLICE_BYTES, device))


def tiles_together(weight_bytes: int, row_bytes: int) -> int:
    """Return how many tiles of rows pass a column of tiles before the next column.

    One, where all weights stay in cache; else those of a region, so that the weights of
    a column stay, and as much of the region's features as fits.
    """
    device = current()
    if weight_bytes <= thresholds.value(thresholds.CACHED_WEIGHTS, device):
        return 1
    return thresholds.region_rows(row_bytes, device) // TILE_ROWS


def dispatches(
    count: int, row_bytes: int, work: int
) -> tuple[list[tuple[int, int]], bool]:
    """Return the (first, length) tiles of each dispatch, and whether regions are cut.

    Rows of whole regions are a run of the output, which is then written in place.
    """
    limit = work_limit()
    region = thresholds.region_rows(row_bytes, current()) // TILE_ROWS
    if work * min(region, count) > limit * count:
        return list(cuts(count, work, limit)), True
    regions = cuts(ceil_div(count, region), work, limit)
    return [
        (f * region, min(n * region, count - f * region)) for f, n in regions
    ], False


def grad_tile(
    c_in: int,
    c_out: int,
    heights: tuple[int, ...] = GRAD_HEIGHTS,
    widths: tuple[int, ...] = GRAD_WIDTHS,
) -> tuple[int, int]:
    """Return the smallest tile of dW[k] that holds the channels, or the largest."""
    high = next(t for t in heights if t >= min(c_in, heights[-1]))
    return high, next(t for t in widths if t >= min(c_out, widths[-1]))


def grad_parts(
    edges: int,
    features: int,
    shape: tuple[int, ...],
    tiles: int,
    item: int = 2,
    device: Device | None = None,
) -> int:
    """Return into how many ranges of output rows the edges are cut.

    Enough to fill the GPU, and for the features of a range, or those of one offset in
    it, to stay in cache, whichever moves fewer bytes with the partials.

    Args:
        edges: of all offsets.
        features: bytes of both sides.
        shape: (K, C_in, C_out).
        tiles: threadgroups for one part of one offset.
        item: bytes of an element.
        device: whose tiles; by default the one that MLX runs on.
    """
    volume, c_in, c_out = shape
    device = device or current()
    cached = thresholds.value(thresholds.CACHED_FEATURES, device)
    gathered, partial = edges * (c_in + c_out) * item, volume * c_in * c_out * 8
    # One offset's tiles pass the side with fewer channels first: that one has to stay,
    # at an edge a row.
    staying = features * min(c_in, c_out) // (c_in + c_out)
    together, apart = ceil_div(features, cached), ceil_div(staying, cached)
    if gathered + apart * partial < features + together * partial:
        together = apart
    filling = thresholds.value(thresholds.FILLING, device) // (volume * tiles)
    # Edges that make a part worth its partial; partials within 8 times the features.
    worth = ceil_div(edges, volume * thresholds.value(thresholds.PART_EDGES, device))
    return max(1, min(max(filling, together), worth, 16 * features // partial))
