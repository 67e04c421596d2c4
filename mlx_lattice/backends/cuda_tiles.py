"""Which matrix tile a problem gets on CUDA, and how its work is cut: all by tables."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import NamedTuple, TypeVar

import mlx.core as mx

from ..devices import CUDA, Device
from ..numerics import TF32
from ..problem import WEIGHT_GRAD, Problem
from ..routes import cuda_shapes, thresholds
from . import cuda_epilogue
from .signatures import rounded_up

HOPPER = (
    *cuda_epilogue.FILES,
    "tiles.cuh",
    "hopper.cuh",
    "tile_moments.cuh",
    "wgmma.cuh",
)
MMA = (*cuda_epilogue.FILES, "tiles.cuh", "tensor_core.cuh")
MMA_STAGES = 4
POWERS = (32, 64, 128, 256)  # widths of tiles that unpack their weights
# Shared memory of a multiprocessor, and what each of its blocks takes besides.
SHARED, RESERVED = 233472, 1024
# Of summed channels: bytes of a slice, the depth of one product, and slices of a stage.
SLICE_BYTES, STAGE_SLICES = 32, 4
STAGE_BYTES = SLICE_BYTES * STAGE_SLICES
THREE = "three TF32"  # products that keep float32's accuracy
ONE = "TF32"
T = TypeVar("T")


class Tile(NamedTuple):
    """A matrix tile of a kernel.

    Attributes:
        variant: of the kernel: "mma", "hopper", "wide", "short" or "resident".
        code: the C++ type that names it.
        rows, width: of the result: output rows or input channels, and output channels.
        threads: of a block.
        per_multiprocessor: blocks that lie side by side.
        shared_bytes: dynamic shared memory of a block.
        files: sources of the tile.
        persistent: whether a block takes tile after tile.
        itself: whether it is for rows that are fed by themselves alone.
    """

    variant: str
    code: str
    rows: int
    width: int
    threads: int
    per_multiprocessor: int
    shared_bytes: int
    files: tuple[str, ...]
    persistent: bool = False
    itself: bool = False


def products(p: Problem) -> str:
    """Return how tensor cores multiply float32; "" for other dtypes."""
    if p.dtype != "float32":
        return ""
    return ONE if p.precision == TF32 else THREE


def _count(p: Problem) -> int:
    """Return the products of tensor cores that one of the features' takes."""
    return 3 if products(p) == THREE and not p.integer else 1


def mma(p: Problem, *files: str, side: int = 64, per: int = 2) -> Tile:
    """Return the square tile of mma.sync, ``per`` blocks of which lie side by side."""
    shared, code = MMA_STAGES * 2 * side * 128, f"MmaTile<{_count(p)}, {side}>"
    return Tile("mma", code, side, side, 2 * side, per, shared, (*MMA, *files))


def has_wgmma(p: Problem, device: Device) -> bool:
    """Whether Hopper's matrix product takes the features, however they run."""
    return p.dtype != "float32" and device.family in thresholds.HOPPER


def multiplies_one(p: Problem, device: Device) -> bool:
    """Whether one TF32 product of float32 goes as half does: in whole stages."""
    one = products(p) == ONE and not p.bits and device.family in thresholds.HOPPER
    return one and slices_of(whole_channels(p)[0], p.read_size) == 4


def prepares(p: Problem, device: Device) -> bool:
    """Whether float weights are prepared for Hopper's matrix product on float32.

    It takes operands that run along the summed channels alone. One TF32 product reads
    weights that do so where they stand.
    """
    if p.dtype != "float32" or p.pass_ == WEIGHT_GRAD or p.bits:
        return False
    if multiplies_one(p, device):
        elements = p.rows_written * whole_channels(p)[1]
        return not p.rows_are_summed and elements > thresholds.TURNED_ELEMENTS
    many = p.rows_written * p.channels[1] > thresholds.FLOAT_ELEMENTS
    return many and device.family in thresholds.HOPPER


def few_edges(p: Problem) -> bool:
    """Whether the relation was made with few edges a row that the pass writes."""
    rows = p.n_out if p.pass_ == WEIGHT_GRAD else p.rows_written
    few = few_offsets(p)
    least = thresholds.FEW_EDGES_OF_FEW_OFFSETS if few else thresholds.FEW_EDGES
    return p.edges is not None and p.edges < least * rows


def few_offsets(p: Problem) -> bool:
    """Whether the kernel has few offsets."""
    return p.volume <= thresholds.FEW_OFFSETS


def multiple(dtype: mx.Dtype) -> int:
    """Return what tiles' channels are padded to a multiple of: 16 bytes."""
    return 16 // dtype.size


def whole_channels(p: Problem) -> tuple[int, int]:
    """Return the channels that the pass sums over and writes, padded."""
    each = 16 // p.read_size
    return rounded_up(p.channels[0], each), rounded_up(p.channels[1], each)


def proof_channels(p: Problem, width: int) -> tuple[int, int]:
    """Return (C_in, C_out) for the proof of a kernel with tiles of so many columns.

    A full column of tiles and another; summed channels in slices as the problem's are.
    Neither fills its last 16 bytes.
    """
    each, stage = 16 // p.read_size, STAGE_BYTES // p.read_size
    c_x = whole_channels(p)[0]
    if c_x > 2 * stage:
        c_x = 2 * stage if c_x % stage == 0 else stage + c_x % stage
    tried = c_x - 3, width + 2 * each - 3
    return tried[::-1] if p.transposed else tried


def tile_width(channels: int, widths: Iterable[int]) -> int:
    """Return the tile width that wastes the least, the wider at a tie or nearly so."""
    widths = sorted(widths)
    for width in widths:
        if channels <= min(width, 128):
            return width
    wide = [width for width in widths if width >= 96] or widths
    least = min(rounded_up(channels, width) for width in wide)
    return max(w for w in wide if rounded_up(channels, w) <= 1.1 * least)


def slices_of(c_in: int, itemsize: int = 2) -> int:
    """Return how many slices of an offset come together in a stage, 0 if that varies.

    A slice is 16 channels, or 8 of float32; a stage has four.

    c_in: padded.
    """
    size = SLICE_BYTES // itemsize
    if c_in % (STAGE_SLICES * size) == 0:
        return STAGE_SLICES
    if c_in <= size:
        return 1
    return 2 if c_in <= 2 * size or c_in % (2 * size) == 0 else 0


def list_length(volume: int) -> int:
    """Return how many offsets a kernel's list has room for; few kernels serve all K."""
    return 64 if volume <= 64 else max(512, 1 << (volume - 1).bit_length())


def tile_chooser(
    layer: Problem, device: Device, packed: bool, make: Callable[[Tile], T]
) -> Callable[[Problem], T]:
    """Return ``make(tile)`` for the problems of a layer, made once a tile.

    The tile is that over sorted rows; ``packed``: it unpacks its weights.
    """
    width, made = whole_channels(layer)[1], {}
    # Low tiles would unpack their weights more often.
    has_small = multiplies_one(layer, device) or has_wgmma(layer, device)
    has_small = has_small and not packed
    small = [_small_tiles(layer, few) if has_small else () for few in (False, True)]

    def choose(p: Problem) -> T:
        few = few_edges(p)
        low = small_tile(small[few], p.rows_written * width)
        facts = prepares(p, device), few, low
        found = made.get(facts)
        if found is None:
            found = made[facts] = make(_sorted_tile(layer, device, packed, *facts))
        return found

    return choose


def _small_tiles(layer: Problem, few: bool) -> tuple:
    """Return the tiles of outputs of few elements; ``few``: edges a row are."""
    c_x, c_y = whole_channels(layer)
    if layer.dtype == "float32":
        tiles = cuda_shapes.TF32_SMALL_TILES
        return tiles[tile_width(c_y, tiles)]
    width = tile_width(c_y, cuda_shapes.SORTED_TILES)
    stages = "sliced"
    if width >= 64 and slices_of(c_x) == 4:
        stages = "whole"
    elif c_x % 64 >= 32 and (c_x > 64 or width < 64):  # the last is half full, or more
        stages = "tail"
    facts = ", few offsets" * few_offsets(layer) + ", few edges" * few
    by_width = cuda_shapes.SMALL_TILES[stages + facts]
    tiles = by_width.get(c_y, by_width[width])
    if layer.pointwise:
        tiles = *_itself_tiles(c_x, c_y), *tiles
    return tuple(each for each in tiles if _has_room(each[1], c_x))


def _has_room(tile: cuda_shapes.Shape, c_x: int) -> bool:
    """Whether a ShortTile holds all channels of an offset in half; others need not."""
    return not isinstance(tile, cuda_shapes.ShortTile) or _stages(c_x) <= tile.stages


def _itself_tiles(c_x: int, c_y: int) -> tuple:
    """Return the tiles of rows in half that feed themselves, as ``small_tile`` has."""
    width = tile_width(c_y, cuda_shapes.SORTED_TILES)
    by_width = cuda_shapes.ITSELF_TILES
    tiles = by_width.get(c_y, by_width[width])
    stages, most = _stages(c_x), cuda_shapes.ANY
    last: tuple = ()
    if c_x >= cuda_shapes.DEEP_SUM:
        most = cuda_shapes.DEEP_ELEMENTS
        if width == 256:
            last = ((cuda_shapes.ANY, cuda_shapes.WIDE_TILES[256]),)
    by_width = cuda_shapes.RESIDENT_TILES
    for tile in by_width.get(c_y, by_width.get(width, ())):
        # What an epilogue or statistics keep of a channel, and barriers.
        each = cuda_shapes.resident_bytes(tile, stages) + 12 * tile.width + 512
        if (each + RESERVED) * tile.per_multiprocessor <= SHARED:
            return *tiles, (most, tile), *last
    return *tiles, *last


def _sorted_tile(
    layer: Problem,
    device: Device,
    packed: bool,
    prepared: bool,
    few: bool,
    tile: cuda_shapes.Shape | None,
) -> Tile:
    """Return the tile over sorted rows of a layer: ``tile`` where rows are few."""
    one = multiplies_one(layer, device)
    if one and (prepared or layer.rows_are_summed):
        return wide(layer, tile or _by_edges(layer, cuda_shapes.TF32_WHOLE_TILES, few))
    if prepared:
        single = products(layer) == ONE
        tiles = cuda_shapes.TF32_TILES if single else cuda_shapes.FLOAT_TILES
        return persistent(layer, _by_edges(layer, tiles, few))
    if not has_wgmma(layer, device):
        return mma(layer, "sorted_implicit_gemm_mma.cuh")
    c_x, c_y = whole_channels(layer)
    width = tile_width(c_y, POWERS if packed else cuda_shapes.SORTED_TILES)
    if tile is None and slices_of(c_x) == 4 and not few:
        tile = cuda_shapes.WIDE_TILES.get(width)
    if isinstance(tile, cuda_shapes.ResidentTile):
        return resident(layer, tile)
    itself = layer.pointwise and not packed
    if isinstance(tile, cuda_shapes.ShortTile):
        return short(layer, tile, itself)
    if isinstance(tile, cuda_shapes.Tile):
        return wide(layer, tile, itself)
    if packed:  # unpacking takes the registers of the widest tile
        width = min(width, 128)
    # Of few offsets the rows of a tile share one, however few edges they have.
    low = few and not few_offsets(layer)
    by_width = cuda_shapes.FEW_EDGES_TILES if low else cuda_shapes.SORTED_TILES
    return persistent(layer, tile or by_width[width])


def wide(p: Problem, tile: cuda_shapes.Tile, itself: bool = False) -> Tile:
    """Return WideTile in a shape, for the problem's channels and offsets.

    itself: whether it is to read no table, since rows feed themselves alone.
    """
    early = thresholds.FEW_OFFSETS if few_offsets(p) and not itself else 0
    shape = tile.consumers, tile.width, tile.stages, _has_tail(p), early
    if itself:
        shape = *shape, "true"
    return _of_offsets("wide", tile, shape, cuda_shapes.shared_bytes(tile), itself)


def short(p: Problem, tile: cuda_shapes.ShortTile, itself: bool = False) -> Tile:
    """Return ShortTile in a shape, for the problem's channels; ``itself`` as above."""
    held = 0 if itself else thresholds.FEW_OFFSETS
    shape = *tile, _has_tail(p), held
    return _of_offsets("short", tile, shape, cuda_shapes.shared_bytes(tile), itself)


def resident(p: Problem, tile: cuda_shapes.ResidentTile) -> Tile:
    """Return ResidentTile in a shape, for the problem's channels."""
    stages = _stages(whole_channels(p)[0], p.read_size)
    shape = *tile, stages, _has_tail(p)
    shared = cuda_shapes.resident_bytes(tile, stages)
    return _of_offsets("resident", tile, shape, shared, True, persistent=True)


def _of_offsets(
    variant: str,
    tile: cuda_shapes.Shape,
    shape: tuple,
    shared_bytes: int,
    itself: bool,
    persistent: bool = False,
) -> Tile:
    """Return a tile each of whose stages is of one offset.

    shape: the parameters of its template; the others are the Tile's.
    """
    return Tile(
        variant,
        f"{variant.capitalize()}Tile<{', '.join(map(str, shape))}>",
        tile.rows,
        tile.width,
        tile.threads,
        tile.per_multiprocessor,
        shared_bytes,
        (*HOPPER, "weight_stages.cuh", f"sorted_implicit_gemm_{variant}.cuh"),
        persistent,
        itself,
    )


def _stages(c_x: int, itemsize: int = 2) -> int:
    """Return the stages of an offset of so many summed channels."""
    return -(-c_x * itemsize // STAGE_BYTES)


def _has_tail(p: Problem) -> str:
    """Return "true" where an offset's last stage is filled up, for a template."""
    return str(whole_channels(p)[0] * p.read_size % STAGE_BYTES != 0).lower()


def _by_edges(layer: Problem, tables: dict, few: bool) -> tuple:
    """Return the tile of many rows from tables of ``many`` edges a row and ``few``."""
    tiles = tables["few" if few else "many"]
    return tiles[tile_width(whole_channels(layer)[1], tiles)]


def persistent(p: Problem, tile: cuda_shapes.SortedTile) -> Tile:
    """Return PersistentTile in the shape that fits the problem."""
    slices, weights = slices_of(whole_channels(p)[0], p.read_size), weight_parts(p)
    kept = 8 if p.epilogue or p.integer else 4 if p.moments else 0
    tile = _fitting(tile, slices, list_length(p.volume), weights, kept * tile.width)
    code = ", ".join(map(str, (*tile, slices, _count(p))))
    return Tile(
        "hopper",
        f"PersistentTile<{code}>",
        tile.rows,
        tile.width,
        tile.threads,
        tile.per_multiprocessor,
        cuda_shapes.shared_bytes(tile, weights),
        (
            *HOPPER,
            "hopper_tf32.cuh",
            "stage_sources.cuh",
            "sorted_implicit_gemm_hopper.cuh",
        ),
        persistent=True,
    )


def small_tile(
    tiles: tuple[tuple[int, cuda_shapes.Shape], ...], elements: int
) -> cuda_shapes.Shape | None:
    """Return the tile of an output of few elements, or None."""
    for most, tile in tiles:
        if elements <= most:
            return tile
    return None


def _fitting(
    tile: cuda_shapes.SortedTile, slices: int, length: int, weights: int, kept: int
) -> cuda_shapes.SortedTile:
    """Return the tile with as many stages as shared memory has room for.

    Args:
        tile: with most stages.
        slices: of an offset in a stage.
        length: of the list of offsets.
        weights: parts of a weight in a stage.
        kept: bytes of what an epilogue, or statistics, keep of the tile's channels.
    """
    per = tile.per_multiprocessor
    # What is prefetched, the list of offsets, and barriers.
    ahead, offsets = (8, 1) if slices == 4 else (4, 2 if slices == 2 else 4)
    fixed = ahead * (offsets * tile.rows * 4 + 64) + 4 * length + 512 + kept
    while (
        tile.stages > 2
        and (cuda_shapes.shared_bytes(tile, weights) + fixed + RESERVED) * per > SHARED
    ):
        tile = tile._replace(stages=tile.stages - 1)
    return tile


def unpacks_once(p: Problem, device: Device, tile: Tile) -> bool:
    """Whether packed weights become floats, for one call, before the tiles read them.

    Else ``tile`` unpacks them. They do where ``thresholds.UNPACK_ROWS`` says that it
    pays, and the floats take no more than ``thresholds.UNPACK_BYTES``, or than the
    output does.
    """
    few = few_edges(p) and has_wgmma(p, device)
    least = thresholds.UNPACK_ROWS["few edges" if few else tile.variant].get(tile.width)
    room = max(thresholds.UNPACK_BYTES, p.n_out * whole_channels(p)[1] * p.itemsize)
    return unpacked_bytes(p) <= room and least is not None and p.n_out >= least


def unpacked_bytes(p: Problem) -> int:
    """Return what unpacked weights take."""
    c_x, c_y = whole_channels(p)
    return p.volume * c_x * c_y * p.itemsize


def weight_parts(p: Problem) -> int:
    """Return the parts in which tiles read a prepared weight: high, or high and low."""
    return 2 if _count(p) == 3 else 1


def sums_moments(p: Problem, tile: Tile, is_split: bool) -> bool:
    """Whether what writes the rows, tiles or what adds their splits, sums statistics.

    Where it is asked to, and rows are so many that a norm reads them twice.
    """
    if not p.sums_moments:
        return False
    is_whole = whole_channels(p)[1] == p.channels[1]
    few = thresholds.is_one_launch(p.rows_written, p.itemsize, CUDA)
    return is_whole and not few and (is_split or tile.variant != "mma")


def prepared_bytes(p: Problem) -> int:
    """Return what prepared weights take."""
    return weight_parts(p) * unpacked_bytes(p)
