"""How tiles of sorted rows on Metal are planned: order, sizes, dispatches.

Every number comes from ``thresholds``; nothing here launches a kernel but
``tiles``.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import cache, partial
from typing import NamedTuple

import mlx.core as mx

from ..devices import Device
from ..relation import Relation
from ..routes import thresholds
from ..routes.thresholds import TileShape
from . import dispatch_bounds, registry
from .dispatch_bounds import ceil_div, cuts
from .metal_views import LANES, ordered_table

TILE_ROWS, BLOCK_ROWS, THREADS = 64, 8, 128
WIDTHS = (128, 64, 32, 16)
# A simdgroup of TensorOps has 64, 32 or 16 rows and 32 columns; its threadgroup has the
# simdgroups of 64 rows, eight at most. A step has 128 bytes of a row, 64 where sums of
# 64 rows leave fewer registers for the operands, or 32 channels.
TENSOR_HEIGHTS, TENSOR_WIDTH, TENSOR_SIMDGROUPS = (64, 32, 16), 32, 8
TENSOR_STEPS, TENSOR_BYTES = (128, 64, 32), {64: 64, 32: 128, 16: 128}
# A kernel proves itself with so many channels beyond a tile.
PROOF_TAIL = 13


def tile_order(relation: Relation, region: int) -> mx.array:
    """Return the (N,) int32 rows region by region, in each by Gray rank of their mask.

    Regions are rows in succession, which lie near one another where rows are sorted.
    Works on any machine.

    Args:
        relation: has a neighbour table.
        region: rows of a region.
    """
    region = min(region, relation.n_out)
    return relation.view(
        f"tile_order_{region}",
        lambda: registry.geometry().gray_order(relation.out_in, region or None),
    )


def tile_table(relation: Relation, region: int) -> mx.array:
    """Return the table in ``tile_order``. Works on any machine."""
    return mx.take(relation.out_in, tile_order(relation, region), axis=0)


def tiles(relation: Relation, region: int) -> tuple[mx.array, mx.array, mx.array]:
    """Return the table in ``tile_order``, that order, a mask for every eight rows.

    Args:
        relation: has a neighbour table.
        region: rows of a region.
    """
    region = min(region, relation.n_out)

    def build() -> tuple[mx.array, mx.array, mx.array]:
        rows = tile_order(relation, region)
        table, masks = ordered_table(relation.out_in, rows, BLOCK_ROWS)
        return table, rows, masks

    return relation.view(f"tiles_{region}", build)


@cache
def tiles_of(region: int) -> Callable[[Relation], tuple[mx.array, ...]]:
    """Return ``tiles`` for a size of regions: one function for equal sizes."""
    return partial(tiles, region=region)


class SortedTile(NamedTuple):
    """How a contraction over sorted tiles of 64 rows is cut.

    Attributes:
        slices: of the channels of wide rows.
        region: rows that are sorted together.
        columns: of a tile.
        splits: partial sums of each tile.
        height: rows of a simdgroup of TensorOps; else 0.
        step: channels that it multiplies at a time; else 0.
        shape: of simdgroup matrices; None for TensorOps.
    """

    slices: int
    region: int
    columns: int
    splits: int
    height: int = 0
    step: int = 0
    shape: TileShape | None = None

    @property
    def threads(self) -> int:
        """Of a threadgroup."""
        if self.shape:
            return LANES * self.shape.simdgroups
        return LANES * (TILE_ROWS // self.height) * (self.columns // TENSOR_WIDTH)

    @property
    def partial_sums(self) -> tuple[bool, int]:
        """Whether they are of channel slices, not of edges; and how many there are."""
        sliced = self.splits == 1 and self.slices > 1
        return sliced, self.slices if sliced else self.splits

    @property
    def said(self) -> str:
        """TensorOps' simdgroups in words."""
        each = f"{self.height} x {TENSOR_WIDTH}"
        return f"simdgroups of {each}, steps of {self.step} channels"


class Matrices(NamedTuple):
    """What simdgroup matrices are of.

    Attributes:
        across: whether weights are read across.
        in_float: whether they are multiplied in float32.
    """

    across: bool
    in_float: bool


def sorted_tile(
    rows: int,
    edges: int,
    channels: tuple[int, int],
    volume: int,
    item: int,
    narrowest: int,
    device: Device,
    matrices: Matrices,
) -> SortedTile:
    """Return the tile for rows of (C_x, C_y) channels of ``item`` bytes each.

    edges: of the rows, or as many as there may be.
    """
    c_x, c_y = channels
    slices = channel_slices(c_x * item, device)
    row_bytes = ceil_div(c_x * item, slices)
    columns = tile_columns(c_y, row_bytes, volume, narrowest, device)
    groups = ceil_div(c_y, columns) * max(1, ceil_div(rows, TILE_ROWS))
    shape = tile_shape(columns, matrices, device)
    region = thresholds.region_rows(row_bytes, device)
    tile = SortedTile(slices, region, columns, 1, shape=shape)
    # Threadgroups of fewer simdgroups count for less.
    filled = max(1, groups * tile.threads // THREADS)
    steps = ceil_div(c_x * item, shape.step)
    most = min(volume * steps, thresholds.value(thresholds.SPLITS, device))
    work = edges * c_x * c_y
    least = work / (1e12 * device.tflops)
    splits = sum_splits(filled, most, least, rows * c_y, device)
    return tile._replace(splits=splits)


def tensor_tile(
    rows: int,
    shared: int,
    channels: tuple[int, int],
    volume: int,
    device: Device,
    item: int = 2,
) -> SortedTile:
    """Return the tile of TensorOps for rows of (C_x, C_y) channels.

    Simdgroups are as high as rows share the weights of an offset and as leaves enough
    of them for the GPU's cores; then sums are split.

    Args:
        rows: of the result.
        shared: rows that share the weights of an offset, on average.
        channels: C_x and C_y.
        volume: K.
        device: whose tiles.
        item: bytes of a channel: 2, or 1 of int8.
    """
    c_x, c_y = channels
    slices = channel_slices(c_x * item, device)
    row_bytes = ceil_div(c_x * item, slices)
    across = ceil_div(c_y, TENSOR_WIDTH)
    filling = thresholds.value(thresholds.TENSOR_FILLING, device) * device.cores
    height = next(
        (
            h
            for h in TENSOR_HEIGHTS
            if shared > thresholds.SHARED_ROWS.get(h, -1)
            and ceil_div(rows, h) * across >= filling
        ),
        TENSOR_HEIGHTS[-1],
    )
    cached = thresholds.value(thresholds.CACHED_WEIGHTS, device)
    widest = 4 if volume * row_bytes * 4 * TENSOR_WIDTH <= cached else 2
    widest = min(widest, TENSOR_SIMDGROUPS * height // TILE_ROWS)
    columns = TENSOR_WIDTH * ceil_div(across, ceil_div(across, widest))
    steps = [s for s in TENSOR_STEPS if s * item <= TENSOR_BYTES[height]]
    step = next((s for s in steps if c_x % s == 0), steps[-1])
    simdgroups, steps = max(1, ceil_div(rows, height)) * across, ceil_div(c_x, step)
    most = min(thresholds.value(thresholds.SPLITS, device), volume * steps)
    splits = min(filling // simdgroups, most)
    region = thresholds.region_rows(row_bytes, device)
    return SortedTile(slices, region, columns, max(1, splits), height, step)


def tile_shape(columns: int, matrices: Matrices, device: Device) -> TileShape:
    """Return the shape of simdgroup matrices in tiles of so many columns."""
    shapes = {}
    if matrices.across:
        floats = matrices.in_float
        shapes = thresholds.FLOAT_ACROSS_SHAPES if floats else thresholds.ACROSS_SHAPES
    return thresholds.value(
        shapes.get(columns, thresholds.TILE_SHAPES[columns]), device
    )


def sum_splits(groups: int, most: int, least: float, sums: int, device: Device) -> int:
    """Return into how many partial sums too few threadgroups are cut.

    As many as take the least time: a GPU half full takes twice as long for the
    products, and every split's sums are written and read.

    Args:
        groups: threadgroups of four simdgroups.
        most: splits that a tile may have.
        least: seconds of all multiply-adds, an operation each, at the peak rate.
        sums: of the result.
        device: whose cores are to be filled.
    """
    filling = thresholds.value(thresholds.FILLING, device)
    share = thresholds.value(thresholds.FULL_SHARE, device)
    full = 2 * least / share
    moved = thresholds.value(thresholds.PARTIAL_ITEM, device) * sums
    wait = thresholds.value(thresholds.SPLIT_WAIT, device)

    def seconds(splits: int) -> float:
        taken = full * max(1.0, filling / (groups * splits))
        if splits > 1:
            taken += splits * moved / (1e9 * device.bandwidth) + wait
        return taken

    return min(range(1, max(1, min(filling // groups, most)) + 1), key=seconds)


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


def tiles_together(weight_bytes: int, region: int, device: Device) -> int:
    """Return how many tiles of rows pass a column of tiles before the next column.

    One, where all weights stay in cache; else those of a region, so that the weights of
    a column stay, and as much of the region's features as fits.
    """
    if weight_bytes <= thresholds.value(thresholds.CACHED_WEIGHTS, device):
        return 1
    return region // TILE_ROWS


def tile_dispatches(
    rows: int, region: int, work: int, device: Device
) -> tuple[list[tuple[int, int]], bool]:
    """Return the (first, length) tiles of each dispatch, and whether rows are placed.

    Rows of whole regions are those of the output in succession, which is then written
    in place.

    Args:
        rows: to be written.
        region: rows that are sorted together.
        work: multiply-adds of all.
        device: whose tiles.
    """
    limit, count = dispatch_bounds.matrix_limit(device), ceil_div(rows, TILE_ROWS)
    together = region // TILE_ROWS
    if work * min(together, count) > limit * count:
        return list(cuts(count, work, limit)), False
    regions = cuts(ceil_div(count, together), work, limit)
    return [
        (f * together, min(n * together, count - f * together)) for f, n in regions
    ], True


def matrix_dtype(dtype: str, device: Device) -> str:
    """Return the dtype of the matrices that features of a dtype are multiplied as."""
    if dtype != "bfloat16":
        return dtype
    return thresholds.value(thresholds.BFLOAT_MATRICES, device)
