"""sorted_implicit_gemm on CUDA: matrix tiles over mask-sorted rows, any weights."""

from __future__ import annotations

from collections.abc import Callable
from functools import lru_cache
from typing import NamedTuple

import mlx.core as mx

from ..devices import Device, current
from ..problem import INPUT_GRAD, Problem
from ..relation import Relation
from ..routes import thresholds
from .cuda_compile import TYPES
from .cuda_kernels import SHORT, is_hopper, kernel, run, whole, without_edges
from .cuda_quantized import Weights, WeightsCode, packed_weights, unpacked_weights
from .cuda_views import sorted_rows

HOPPER = ("alignment.cuh", "tiles.cuh", "hopper.cuh")
GENERAL = ("alignment.cuh", "tiles.cuh", "tensor_core.cuh")
GENERAL_SHARED = 4 * 2 * 64 * 128  # bytes of four stages of two 64 x 64 tiles
GENERAL_BLOCKS = 2  # side by side
# Shared memory of a multiprocessor, and what each of its blocks takes besides.
SHARED, RESERVED = 233472, 1024


class Plan(NamedTuple):
    """A kernel and how it is launched, for one set of shapes."""

    function: Callable[..., list[mx.array]]
    blocks: tuple[int, int]
    threads: int
    splits: int
    dtype: mx.Dtype  # of what the kernel writes


class Shape(NamedTuple):
    """The tiles of a kernel over sorted rows.

    Attributes:
        family: the kernel.
        tile: its template's first parameters; None where it has one tile.
        height, width: rows and output channels of a tile.
        runs: how the summed channels of a stage are copied.
    """

    family: str
    tile: thresholds.SortedTile | thresholds.Tile | None
    height: int
    width: int
    runs: int


def padded(array: mx.array, axis: int, multiple: int) -> mx.array:
    """Return the array with zeros up to a multiple of channels."""
    short = -array.shape[axis] % multiple
    if not short:
        return array
    widths = [(0, 0)] * array.ndim
    widths[axis] = (0, short)
    return mx.pad(array, widths)


def tile_width(channels: int) -> int:
    """Return the tile width that wastes the least, the wider at a tie or nearly so."""
    for width in (32, 64, 128):
        if channels <= width:
            return width
    wide, narrow = -(-channels // 256) * 256, -(-channels // 128) * 128
    return 256 if wide <= 1.1 * narrow else 128


def is_thin(relation: Relation) -> bool:
    """Whether the relation is known to have few edges a row."""
    known = relation.known_edges
    return known is not None and known < thresholds.THIN_EDGES * relation.n_out


def sorted_implicit_gemm(x, w, relation, groups, transposed, bias=None):
    """Return y by matrix tiles over mask-sorted rows."""
    del groups  # the route takes one
    in_axis, out_axis = (2, 1) if transposed else (1, 2)
    wanted, multiple = w.shape[out_axis], 16 // x.itemsize
    w = padded(padded(w, in_axis, multiple), out_axis, multiple)
    weights = Weights((w,), _FLOAT[transposed])
    return _sorted_tiles(x, weights, relation, wanted, transposed, bias)


def quantized_sorted(x, w, relation, groups, bias=None):
    """Return y by the same tiles, packed weights unpacked into them, or once before."""
    del groups  # the route takes one
    volume, *channels = w.shape
    sizes = relation.n_out, *(whole(c, x.itemsize) for c in channels), volume
    hopper = x.dtype != mx.float32 and is_hopper()
    once = unpacks_once(*sizes, x.itemsize, is_thin(relation), hopper)
    weights = (
        Weights((unpacked_weights(w),), _FLOAT[False]) if once else packed_weights(w)
    )
    return _sorted_tiles(x, weights, relation, w.shape[2], not once, bias)


@lru_cache(maxsize=4096)
def unpacks_once(
    n_out: int,
    c_in: int,
    c_out: int,
    volume: int,
    itemsize: int,
    thin: bool,
    hopper: bool,
) -> bool:
    """Whether packed weights become floats, for one call, before the tiles read them.

    They do where ``tuning.UNPACK_ROWS`` says that it pays, and the floats take no more
    than ``tuning.UNPACK_BYTES``, or than the output does.
    """
    found = _shape(c_in, c_out, volume, thin, True, hopper)
    row = "thin" if thin and hopper else found.family
    least = thresholds.UNPACK_ROWS[row].get(found.width)
    room = max(thresholds.UNPACK_BYTES, n_out * c_out * itemsize)
    fits = volume * c_in * c_out * itemsize <= room
    return fits and least is not None and n_out >= least


_FLOAT = {
    transposed: WeightsCode(("w",), "w", f"w_shape[{axis}]")
    for transposed, axis in ((False, 2), (True, 1))
}


def _sorted_tiles(
    x, weights: Weights, relation, wanted: int, transposed: bool, bias: mx.array | None
) -> mx.array:
    """Return y of ``wanted`` channels; ``transposed`` weights are (K, C_out, C_in)."""
    n_out = relation.n_out
    if n_out == 0 or relation.n_in == 0 or x.shape[1] == 0:
        return without_edges((n_out, wanted), x.dtype, bias)
    multiple, c_out = 16 // x.itemsize, whole(wanted, x.itemsize)
    x = padded(x, 1, multiple)
    view = sorted_rows(relation)
    plan = _plan(
        x.dtype,
        (n_out, x.shape[1], c_out, relation.volume),
        is_thin(relation),
        transposed,
        view.mirrored,
        weights.code,
        bias is not None,
        x.dtype != mx.float32 and is_hopper(),
    )
    inputs = [x, *weights.arrays, view.table, view.rows, view.masks]
    shape = (n_out, c_out)
    if plan.splits > 1:
        shape = (plan.splits, *shape)
    elif bias is not None:
        inputs.append(padded(bias, 0, multiple))
    slots = [(shape, plan.dtype)]
    y = run(plan.function, inputs, plan.blocks, plan.threads, slots)[0]
    if plan.splits > 1:
        y = y.sum(axis=0).astype(x.dtype)
    y = y if c_out == wanted else y[:, :wanted]
    return y if bias is None or plan.splits == 1 else y + bias


@lru_cache(maxsize=4096)
def _plan(
    dtype: mx.Dtype,
    sizes: tuple[int, int, int, int],
    thin: bool,
    transposed: bool,
    mirrored: bool,
    weights: WeightsCode,
    bias: bool,
    hopper: bool,
) -> Plan:
    """Return the kernel for one set of shapes: (N_out, C_in, C_out, K) and the rest."""
    n_out, c_in, c_out, volume = sizes
    flag, mirror = ("true" if f else "false" for f in (transposed, mirrored))
    length = _list_length(volume)
    cores = current().cores
    found = _shape(c_in, c_out, volume, thin, bool(weights.files), hopper)
    family, tile, height, width, runs = found
    if tile is None:
        threads, per, shared = 128, GENERAL_BLOCKS, GENERAL_SHARED
        shape, files = (flag,), GENERAL
    else:
        threads, per = tile.threads, tile.per_multiprocessor
        shared = thresholds.shared_bytes(tile)
        if isinstance(tile, thresholds.SortedTile):
            shape, files = (*tile, flag, runs), (*HOPPER, "stage_sources.cuh")
        else:
            shape, files = (tile.groups, width, tile.stages, flag), HOPPER
    files = (*files, *weights.files, f"{family}.cu")
    tiles = -(-n_out // height) * -(-c_out // width)
    splits = _splits(tiles, cores * per, volume)
    out = dtype if splits == 1 else mx.float32
    bias = bias and splits == 1
    added = "bias" if bias else "nullptr"
    multiple = 16 // dtype.size
    parameters = ", ".join(map(str, shape))
    name = (family, SHORT[dtype], SHORT[out], *map(str, shape), mirror, added, length)
    function = kernel(
        "_".join(map(str, name)) + weights.name,
        files,
        ("x", *weights.names, "neighbours", "rows", "masks", *(["bias"] * bias)),
        ("y",),
        f"const int c_out = ({weights.c_out} + {multiple - 1}) / {multiple} * "
        f"{multiple};\n"
        f"lattice::{family}<{TYPES[dtype]}, {parameters}, {TYPES[out]}>(x, "
        f"{weights.value}, neighbours, rows, masks, {added}, y, rows_shape[0], "
        f"neighbours_shape[1], neighbours_shape[0], x_shape[1], c_out, {mirror});",
        threads=threads,
        blocks_per_multiprocessor=per,
        shared_bytes=shared,
        define=f"#define LATTICE_MAX_OFFSETS {length}",
    )
    # Blocks of the one stay and take tile after tile; elsewhere each has its own.
    stay = family == "sorted_implicit_gemm_hopper"
    blocks = min(tiles, max(1, cores * per // splits)) if stay else tiles
    return Plan(function, (blocks, splits), threads, splits, out)


def known_chip(device: Device) -> bool:
    """Whether a profile names a chip: what others have is seen when they run."""
    return device.family in ("a100", "h100", "h200")


def runs_of(c_in: int) -> int:
    """Return the runs of 16 channels that an offset has of a stage, 0 where they vary.

    c_in: padded.
    """
    return 4 if c_in % 64 == 0 else 1 if c_in <= 16 else 2 if c_in <= 32 else 0


def _shape(
    c_in: int, c_out: int, volume: int, thin: bool, packed: bool, hopper: bool
) -> Shape:
    """Return the kernel and its tile, for padded channels."""
    if not hopper:
        return Shape("sorted_implicit_gemm", None, 64, 64, 0)
    width = tile_width(c_out)
    runs = runs_of(c_in)
    if runs == 4 and not thin and width in thresholds.WIDE_TILES:
        tile, family = thresholds.WIDE_TILES[width], "sorted_implicit_gemm_wide"
    else:
        if packed:  # unpacking takes the registers of the widest tile
            width = min(width, 128)
        tiles_by_width = thresholds.THIN_TILES if thin else thresholds.SORTED_TILES
        tile = _fitting(tiles_by_width[width], runs, _list_length(volume))
        family = "sorted_implicit_gemm_hopper"
    return Shape(family, tile, tile.rows, tile.width, runs)


def parameters(
    route: str, p: Problem, device: Device
) -> tuple[tuple[str, object], ...]:
    """Return what the tiles of a route are launched with, as a Choice says it."""
    tiled = route in ("sorted_implicit_gemm", "quantized_sorted")
    if not tiled or not known_chip(device):
        return ()
    if 0 in (p.n_in, p.n_out, p.c_in, p.c_out):
        return ()
    backward = p.pass_ == INPUT_GRAD
    c_in, c_out = (p.c_out, p.c_in) if backward else (p.c_in, p.c_out)
    c_in, c_out = (whole(c, p.itemsize) for c in (c_in, c_out))
    rows = p.n_in if backward else p.n_out
    thin = p.edges is not None and p.edges < thresholds.THIN_EDGES * rows
    hopper = device.family != "a100" and p.dtype != "float32"
    packed = route == "quantized_sorted"
    sizes = rows, c_in, c_out, p.volume, p.itemsize
    once = packed and unpacks_once(*sizes, thin, hopper)
    found = _shape(c_in, c_out, p.volume, thin, packed and not once, hopper)
    per = GENERAL_BLOCKS if found.tile is None else found.tile.per_multiprocessor
    tiles = -(-rows // found.height) * -(-c_out // found.width)
    splits = _splits(tiles, device.cores * per, p.volume)
    said = [("kernel", found.family), ("tile", f"{found.height} x {found.width}")]
    if splits > 1:
        said.append(("split-K", splits))
    if packed:
        said.append(("weights", "unpacked once" if once else "unpacked in tiles"))
    if once:
        said.append(("scratch bytes", p.volume * c_in * c_out * p.itemsize))
    return tuple(said)


def _list_length(volume: int) -> int:
    """Return how many offsets a kernel's list has room for; few kernels serve all K."""
    return 64 if volume <= 64 else max(512, 1 << (volume - 1).bit_length())


def _fitting(
    tile: thresholds.SortedTile, runs: int, length: int
) -> thresholds.SortedTile:
    """Return the tile with as many stages as shared memory has room for."""
    per = tile.per_multiprocessor
    # The scout's indices and orders, the list of offsets, and barriers.
    ahead, offsets = (8, 1) if runs == 4 else (4, 2 if runs == 2 else 4)
    fixed = ahead * (offsets * tile.rows * 4 + 64) + 4 * length + 512
    while (
        tile.stages > 2
        and (thresholds.shared_bytes(tile) + fixed + RESERVED) * per > SHARED
    ):
        tile = tile._replace(stages=tile.stages - 1)
    return tile


def _splits(tiles: int, places: int, volume: int) -> int:
    """Return into how many shares the offsets are cut, so that few rows fill a GPU."""
    return max(1, min(places // max(1, tiles), volume, thresholds.MOST_SPLITS))
