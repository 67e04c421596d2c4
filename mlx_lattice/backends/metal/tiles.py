"""How contractions on Metal are cut: thresholds, tiles of sorted rows, dispatches.

In tables "*" is the default of chips without an entry.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import cache, partial
from typing import NamedTuple

import mlx.core as mx

from ... import devices, registry
from ...checks import DTYPES, dtype_name
from ...devices import METAL, Device
from ...geometry.lattice import used_by_blocks
from ...problem import MLX_LAYOUT, Dispatch, Plan, Problem
from ...relation import Relation
from ..gpu import kernel as gpu_kernel
from ..gpu.contraction import (
    ADD_SPLITS,
    PER_ROW,
    SORTED_TILES,
    W_GROUP,
    W_OFFSET,
    W_ROW,
    WEIGHT_GRAD,
    finishing,
    interned,
    rounded_up,
)
from ..gpu.kernel import GpuKernel, Interface, Value, ceil_div, cuts
from .geometry import LANES, ordered_table


def _by_cores(each: int) -> dict[str, int]:
    """Return ``each`` times the cores of every Apple GPU; "*" is the least of these."""
    chips = {
        d.name: each * d.cores for d in devices.PROFILES.values() if d.backend == METAL
    }
    return {"*": min(chips.values()), **chips}


# Metal: threadgroups of four simdgroups that fill a GPU: six for each core, as M1
# needs. With fewer tiles each sum is split (split-K).
FILLING = _by_cores(6)
# Metal: most partial sums into which a sum is split.
SPLITS = {"*": 16}

# Metal, for the number of splits: the share of its peak that a full GPU reaches.
FULL_SHARE = {"*": 0.6}
# Metal, for the number of splits: bytes that a partial sum moves.
PARTIAL_ITEM = {"*": 8}
# Metal, for the number of splits: seconds that the launch which adds them waits.
SPLIT_WAIT = {"*": 15e-6}

# Metal: fewest rows that fill a GPU, with tiles of 64 rows and 16 splits.
FILLING_ROWS = _by_cores(6 * 64 // 16)

# TensorOps: fewest mean rows that share an offset's weights, for simdgroups of 64 and
# of 32 rows; as in MLX's gathers on M5.
SHARED_ROWS = {64: 48, 32: 24}
# TensorOps: simdgroups that fill a core.
TENSOR_FILLING = {"*": 8}

# Rows of a region: rows are sorted by mask within regions. In larger regions more rows
# share a mask, so tiles multiply fewer absent edges. Smaller regions fit a cache.
REGION_ROWS = {"*": 28672}

# Matrix type for bfloat16 products. M1 and M2 have no bfloat16 arithmetic: bfloat16
# takes 1.1 to 1.8 times as long as half there, and float32 as long as half.
BFLOAT_MATRICES = {"*": "float32", "m3": "bfloat16", "m4": "bfloat16", "m5": "bfloat16"}

# Fewest elements of an array for which indices need 64 bits.
FAR_ELEMENTS = {"*": 1 << 32}

# Bytes of weights that fit the cache. For larger weights tiles have fewer columns.
CACHED_WEIGHTS = {"*": 4 << 20}

# Weight gradients: bytes of features that all offsets process together.
CACHED_FEATURES = {"*": 7_400_000}

# Weight gradients: threadgroups that run on a core at once.
GRAD_FILLING = {"*": 6}
# Weight gradients: the longest range of one offset, as a share of a threadgroup's
# edges. Without this limit, 64 channels would take 1.9 times as long on a base chip and
# 3.6 times on a Max.
LONGEST_RANGE = {"*": 0.5}

# Weight gradients: fewest edges of an offset for which a split pays.
SPLIT_EDGES = {"*": 512}
# Weight gradients: most bytes of partial sums at a time.
PARTIAL_BYTES = {"*": 1 << 28}

# Metal: fewest groups for which threads that walk edges beat matrix tiles of a
# block-diagonal weight: (y or dx, dW). Predicted for 64 channels and 120 000 rows.
GROUPS = {"half": (5, 3), "float32": (10, 4), "accelerated": (16, 11)}


# A contraction over edges, each added to its row of y: a dispatch has the edges from
# `first` on.
PER_EDGE = Interface(
    "PerEdge",
    ("x", "w", "edges"),
    ("y",),
    tuple((name, "0") for name in ("first", "c_x", "c_y", W_OFFSET, W_ROW)),
)
# Structs of sizes: a file's functions may name those of another interface.
_STRUCTS = PER_ROW, SORTED_TILES, WEIGHT_GRAD, ADD_SPLITS, PER_EDGE
# Where a thread is, and one of a kernel with threadgroup memory.
_THREAD = "thread_position_in_grid.xy"
TILE_PLACE = (
    "threadgroup_position_in_grid, int(simdgroup_index_in_threadgroup), "
    "int(thread_index_in_simdgroup)"
)


def kernel(
    symbol: str,
    files: tuple[str, ...],
    interface: Interface,
    memory: str = "",
    place: str = "",
    **template: Value,
) -> GpuKernel:
    """Return a kernel of ``metal/``."""
    return interned(
        GpuKernel(
            METAL,
            symbol,
            files,
            interface,
            tuple(template.items()),
            place=place or (TILE_PLACE if memory else _THREAD),
            memory=memory,
            also=_STRUCTS,
            atomic=interface is PER_EDGE,
        )
    )


def adding(dtype: mx.Dtype, **after: Value) -> GpuKernel:
    """Return the kernel that adds splits, in order, to a result of a dtype."""
    files = "matrix_tiles", "activations", "epilogue", "add_splits"
    return kernel("add_splits", files, finishing(ADD_SPLITS), T=dtype, **after)


def dispatched(
    count: int,
    work: int,
    limit: int,
    grid: Callable[[int], tuple[int, ...]],
    most: int | None = None,
) -> tuple[Dispatch, ...]:
    """Return the dispatches of ``count`` units; see ``gpu_kernel.cuts``."""
    slices = cuts(count, work, limit, most)
    return tuple(Dispatch(first, units, grid(units)) for first, units in slices)


def strides(p: Problem, layout: str, interface: Interface) -> dict[str, int]:
    """Return where a weight of a layout stands, as the interface names it."""
    c_in, each = p.c_in // p.groups, p.c_out // p.groups
    given = {W_OFFSET: c_in * p.c_out, W_ROW: p.c_out, W_GROUP: each}
    if layout == MLX_LAYOUT:
        row = p.volume * c_in
        given = {W_OFFSET: c_in, W_ROW: row, W_GROUP: each * row}
    packed = "w" not in interface.inputs
    names = [name for name, _ in interface.sizes if name in given]
    return {name: 0 if packed else given[name] for name in names}


def products(p: Problem, matrices: mx.Dtype) -> str:
    """Return the words for matrices of another type than the features'."""
    if matrices == DTYPES[p.dtype]:
        return ""
    return f"{p.dtype} as {dtype_name(matrices)}"


def table(relation: Relation) -> tuple[mx.array]:
    """Return what a kernel reads of a relation's neighbour table."""
    return (relation.out_in,)


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
    """Return the (N,) int32 rows by region, in each by Gray rank of their mask."""
    region = min(region, relation.n_out)
    return relation.view(
        f"tile_order_{region}",
        lambda: registry.geometry().gray_order(relation.out_in, region or None),
    )


def tile_table(relation: Relation, region: int) -> mx.array:
    """Return the table in ``tile_order``. Works on any machine."""
    return mx.take(relation.out_in, tile_order(relation, region), axis=0)


def tiles(relation: Relation, region: int) -> tuple[mx.array, mx.array, mx.array]:
    """Return the table in ``tile_order``, that order, a mask for every eight rows."""
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


class TileShape(NamedTuple):
    """Shape of a simdgroup's matrices in a tile of 64 rows and four simdgroups."""

    width: int  # columns; it has as many rows as four simdgroups leave it
    step: int  # bytes of a feature row that are staged at a time


class SortedTile(NamedTuple):
    """How a contraction over sorted tiles of 64 rows is cut."""

    region: int  # rows that are sorted together
    columns: int  # of a tile
    splits: int  # partial sums of each tile
    height: int = 0  # rows of a simdgroup of TensorOps; else 0
    step: int = 0  # channels that it multiplies at a time; else 0
    shape: TileShape | None = None  # of simdgroup matrices; None for TensorOps

    @property
    def threads(self) -> int:
        """Number of threads in a threadgroup."""
        if self.shape:
            return THREADS
        return LANES * (TILE_ROWS // self.height) * (self.columns // TENSOR_WIDTH)

    @property
    def description(self) -> str:
        """TensorOps' simdgroups, for plans that are printed."""
        each = f"{self.height} x {TENSOR_WIDTH}"
        return f"simdgroups of {each}, steps of {self.step} channels"


def sorted_tile(
    rows: int,
    edges: int,
    channels: tuple[int, int],
    volume: int,
    item: int,
    device: Device,
    in_float: bool,
) -> SortedTile:
    """Return the tile for rows of (C_x, C_y) channels of ``item`` bytes each."""
    c_x, c_y = channels
    row_bytes = c_x * item
    columns = tile_columns(c_y, row_bytes, volume, device)
    groups = ceil_div(c_y, columns) * max(1, ceil_div(rows, TILE_ROWS))
    shape = tile_shape(columns, in_float)
    region = devices.entry(REGION_ROWS, device)
    tile = SortedTile(region, columns, 1, shape=shape)
    steps = ceil_div(c_x * item, shape.step)
    most = min(volume * steps, devices.entry(SPLITS, device))
    work = edges * c_x * c_y
    least = work / (1e12 * device.tflops)
    splits = sum_splits(groups, most, least, rows * c_y, device)
    return tile._replace(splits=splits)


def tensor_tile(
    rows: int,
    shared: int,
    channels: tuple[int, int],
    volume: int,
    device: Device,
    item: int = 2,
) -> SortedTile:
    """Return the tile of TensorOps for rows of (C_x, C_y) channels."""
    c_x, c_y = channels
    row_bytes = c_x * item
    across = ceil_div(c_y, TENSOR_WIDTH)
    filling = devices.entry(TENSOR_FILLING, device) * device.cores
    height = next(
        (
            h
            for h in TENSOR_HEIGHTS
            if shared > SHARED_ROWS.get(h, -1) and ceil_div(rows, h) * across >= filling
        ),
        TENSOR_HEIGHTS[-1],
    )
    cached = devices.entry(CACHED_WEIGHTS, device)
    widest = 4 if volume * row_bytes * 4 * TENSOR_WIDTH <= cached else 2
    widest = min(widest, TENSOR_SIMDGROUPS * height // TILE_ROWS)
    columns = TENSOR_WIDTH * ceil_div(across, ceil_div(across, widest))
    steps = [s for s in TENSOR_STEPS if s * item <= TENSOR_BYTES[height]]
    step = next((s for s in steps if c_x % s == 0), steps[-1])
    simdgroups, steps = max(1, ceil_div(rows, height)) * across, ceil_div(c_x, step)
    most = min(devices.entry(SPLITS, device), volume * steps)
    splits = min(filling // simdgroups, most)
    region = devices.entry(REGION_ROWS, device)
    return SortedTile(region, columns, max(1, splits), height, step)


def tile_shape(columns: int, in_float: bool) -> TileShape:
    """Return the shape of simdgroup matrices in tiles of so many columns."""
    # In float, longer steps of 128 columns leave M1 and M2 too few registers.
    step = 32 if columns == 128 and in_float else 64
    return TileShape(16 if columns <= 32 else 32, step)


def sum_splits(groups: int, most: int, least: float, sums: int, device: Device) -> int:
    """Return into how many partial sums too few threadgroups are cut."""
    filling = devices.entry(FILLING, device)
    share = devices.entry(FULL_SHARE, device)
    full = 2 * least / share
    moved = devices.entry(PARTIAL_ITEM, device) * sums
    wait = devices.entry(SPLIT_WAIT, device)

    def seconds(splits: int) -> float:
        taken = full * max(1.0, filling / (groups * splits))
        if splits > 1:
            taken += splits * moved / (1e9 * device.bandwidth) + wait
        return taken

    return min(range(1, max(1, min(filling // groups, most)) + 1), key=seconds)


def tile_columns(c_y: int, row_bytes: int, volume: int, device: Device) -> int:
    """Return the columns of a tile: as many as waste little and stay in cache."""
    least = min(ceil_div(c_y, w) * w for w in WIDTHS)
    fitting = [w for w in WIDTHS if 3 * ceil_div(c_y, w) * w <= 4 * least]
    cached = devices.entry(CACHED_WEIGHTS, device)
    return next(
        (w for w in fitting if w <= 64 or volume * row_bytes * w <= cached), fitting[-1]
    )


def tile_dispatches(
    rows: int, region: int, work: int, device: Device
) -> tuple[list[tuple[int, int]], bool]:
    """Return (first, length) of each dispatch's tiles, and if rows are placed."""
    limit, count = gpu_kernel.matrix_limit(device), ceil_div(rows, TILE_ROWS)
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
    return devices.entry(BFLOAT_MATRICES, device)


# A product of simdgroup matrices, and one of TensorOps: rows, depth, columns.
EIGHTS, TENSOR = (BLOCK_ROWS, 8, 8), (16, 16, 32)


def sorted_multiply_adds(
    plan: Plan, relation: Relation | None, *, product: tuple[int, int, int], region: int
) -> int | None:
    """Return the multiply-adds of tiles over rows sorted in regions."""
    if relation is None:
        return None
    over = relation.T if plan.problem.transposed else relation
    return _blocks(plan, tile_table(over, region), product)


def table_multiply_adds(plan: Plan, relation: Relation | None) -> int | None:
    """Return the multiply-adds of tiles over rows in their own order."""
    if relation is None:
        return None
    over = relation.T if plan.problem.transposed else relation
    return _blocks(plan, over.out_in, EIGHTS)


def _blocks(plan: Plan, table: mx.array, product: tuple[int, int, int]) -> int:
    """Return the multiply-adds of blocks of rows with an edge of an offset."""
    c_x, c_y = plan.problem.channels
    blocks = mx.sum(used_by_blocks(table >= 0, product[0])).item()
    return (
        blocks * product[0] * rounded_up(c_x, product[1]) * rounded_up(c_y, product[2])
    )


def edge_multiply_adds(
    plan: Plan, relation: Relation | None, *, product: tuple[int, int, int]
) -> int | None:
    """Return the multiply-adds of a weight gradient by tiles; ``product`` as above."""
    if relation is None:
        return None
    p, depth, edges = plan.problem, product[1], relation.edges
    ends = [p.n_out * split // plan.splits for split in range(1, plan.splits + 1)]
    split = mx.searchsorted(mx.array(ends), edges[:, 1], "right").astype(mx.int32)
    counts = mx.zeros((plan.splits * p.volume,), dtype=mx.int32)
    counts = counts.at[split * p.volume + edges[:, 2]].add(1)
    padded = depth * mx.sum((counts + (depth - 1)) // depth).item()
    return padded * rounded_up(p.c_in, product[0]) * rounded_up(p.c_out, product[2])
