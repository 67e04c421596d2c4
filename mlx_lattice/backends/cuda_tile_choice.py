"""Which matrix tile a problem over sorted rows gets on CUDA: all by tables."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import TypeVar

from ..devices import Device
from ..problem import Problem
from ..routes import cuda_shapes, cuda_small_tiles, cuda_tile_kinds, thresholds
from .cuda_operands import (
    ONE,
    STAGE_SLICES,
    has_wgmma,
    multiplies_one,
    prepares,
    products,
    slices_of,
    unpacked_bytes,
    whole_channels,
)
from .cuda_tiles import (
    Tile,
    few_edges,
    few_offsets,
    mma,
    persistent,
    wide,
)
from .signatures import rounded_up

POWERS = (32, 64, 128, 256)  # widths of tiles that unpack their weights
T = TypeVar("T")


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
        tiles = cuda_small_tiles.TF32_SMALL_TILES
        return tiles[tile_width(c_y, tiles)]
    facts = ", few offsets" * few_offsets(layer) + ", few edges" * few
    by_width = cuda_small_tiles.SMALL_TILES[_filling(c_x, c_y) + facts]
    tiles = by_width.get(c_y, by_width[_width_in(by_width, c_y)])
    if layer.pointwise:
        by_width = cuda_small_tiles.ITSELF_TILES
        tiles = *by_width.get(c_y, by_width[_width_in(by_width, c_y)]), *tiles
    return tiles


def _filling(c_x: int, c_y: int) -> str:
    """Return how summed channels fill stages, as SMALL_TILES says it."""
    if c_x < 64:
        return "half" if c_x >= 32 else "sliced"
    # Narrow outputs of many whole stages have the tiles of deep sums.
    if slices_of(c_x) == STAGE_SLICES and (c_x == 64 or c_y > 64):
        return "whole"
    return "tail" if c_x < 128 else "deep"


def _is_wide(c_x: int, c_y: int) -> bool:
    """Whether WideTile is for many rows of many edges: PersistentTile fills stages."""
    if c_x < 64:
        return c_x >= 32 and (c_y > 128 or (c_y > 96 and slices_of(c_x) == 0))
    return c_y > 64


def _width_in(by_width: dict[int, object], channels: int) -> int:
    """Return the width of the tiles that a table has for so many channels."""
    return tile_width(channels, [w for w in by_width if w in cuda_shapes.WIDTHS])


def _sorted_tile(
    layer: Problem,
    device: Device,
    packed: bool,
    prepared: bool,
    few: bool,
    tile: cuda_tile_kinds.Shape | None,
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
    tiles = cuda_shapes.WIDE_TILES
    if tile is None and packed and not few:  # in whole stages
        tile = tiles.get(width) if slices_of(c_x) == STAGE_SLICES else None
    elif tile is None and not few and _is_wide(c_x, c_y):
        tile = tiles[tile_width(c_y, tiles)]
    if isinstance(tile, cuda_tile_kinds.Tile):
        return wide(layer, tile, itself=layer.pointwise and not packed)
    if packed:  # unpacking takes the registers of the widest tile
        width = min(width, 128)
    # Of few offsets the rows of a tile share one, however few edges they have.
    low = few and not few_offsets(layer)
    by_width = cuda_shapes.FEW_EDGES_TILES if low else cuda_shapes.SORTED_TILES
    return persistent(layer, tile or by_width[width])


def _by_edges(layer: Problem, tables: dict, few: bool) -> tuple:
    """Return the tile of many rows from tables of ``many`` edges a row and ``few``."""
    tiles = tables["few" if few else "many"]
    return tiles[tile_width(whole_channels(layer)[1], tiles)]


def small_tile(
    tiles: tuple[tuple[int, cuda_tile_kinds.Shape], ...], elements: int
) -> cuda_tile_kinds.Shape | None:
    """Return the tile of an output of few elements, or None."""
    for most, tile in tiles:
        if elements <= most:
            return tile
    return None


def tile_width(channels: int, widths: Iterable[int]) -> int:
    """Return the tile width that wastes the least, the wider at a tie or nearly so."""
    widths = sorted(widths)
    for width in widths:
        if channels <= min(width, 128):
            return width
    wide = [width for width in widths if width >= 96] or widths
    least = min(rounded_up(channels, width) for width in wide)
    return max(w for w in wide if rounded_up(channels, w) <= 1.1 * least)


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
