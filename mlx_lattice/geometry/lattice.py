"""Coordinate rows in MLX operations: arithmetic, 64-bit keys, unique rows, new rows.

Rows are (batch, x, y, ...); the batch column never changes. Keys compare as the rows
do: sorting and searching them gives one order of rows on every backend.

Orders of rows: Gray-code rank of occupancy masks, Morton and Hilbert curves.
"""

from __future__ import annotations

from collections.abc import Sequence
from enum import IntEnum
from math import prod
from typing import NamedTuple

import mlx.core as mx

from .. import sync
from ..checks import AXES, INT32_LIMIT, array_of, whole

# Keys stay below this, so that a sum of a key and an offset never overflows 64 bits.
KEY_LIMIT = 1 << 62

# The least and the greatest value of every column.
Bounds = tuple[tuple[int, ...], tuple[int, ...]]
Offsets = Sequence[Sequence[int]]


# Bounds of rows


def bounds_of(coords: mx.array) -> Bounds:
    """Return the least and greatest value of every column. Reads 2 (1 + D) values."""
    if coords.shape[0] == 0:
        zeros = (0,) * coords.shape[1]
        return zeros, zeros
    low, high = sync.read(coords.min(axis=0), coords.max(axis=0))
    return tuple(low), tuple(high)


def cell_count(bounds: Bounds) -> int:
    """Return the number of cells within bounds, batch index included."""
    return prod(high - low + 1 for low, high in zip(*bounds, strict=True))


def join(a: Bounds, b: Bounds) -> Bounds:
    """Return the bounds of all rows within either bounds."""
    return tuple(map(min, a[0], b[0])), tuple(map(max, a[1], b[1]))


def grow(bounds: Bounds, offsets: Offsets) -> Bounds:
    """Return the bounds of all rows moved by all offsets."""
    least = [0, *(min(axis) for axis in zip(*offsets, strict=True))]
    most = [0, *(max(axis) for axis in zip(*offsets, strict=True))]
    low = tuple(v + d for v, d in zip(bounds[0], least, strict=True))
    high = tuple(v + d for v, d in zip(bounds[1], most, strict=True))
    return low, high


def scale(bounds: Bounds, stride: Sequence[int]) -> Bounds:
    """Return the bounds of rows whose spatial columns are multiplied by a stride."""
    low, high = (
        tuple(v * f for v, f in zip(end, (1, *stride), strict=True)) for end in bounds
    )
    return low, high


def is_empty(box: Bounds) -> bool:
    """Whether no row lies in a box."""
    return any(low > high for low, high in zip(*box, strict=True))


def cut(box: Bounds, spatial_shape: Sequence[int] | None) -> Bounds:
    """Return the part of a box in the dense grid ``[0, spatial_shape)``."""
    if spatial_shape is None:
        return box
    (batch, *low), (last, *high) = box
    low = (max(v, 0) for v in low)
    high = (min(v, n - 1) for v, n in zip(high, spatial_shape, strict=True))
    return (batch, *low), (last, *high)


# Arithmetic


def floor_divide(a: mx.array, by: int) -> mx.array:
    """Return ``floor(a / by)`` for integers, whichever way the backend truncates."""
    if by == 1:
        return a
    # 64 bits, since the multiple below -2^31 may not be an int32.
    wide = a.astype(mx.int64)
    remainder = ((wide % by) + by) % by
    return ((wide - remainder) // by).astype(a.dtype)


def shifted(rows: mx.array, offset: Sequence[int]) -> mx.array:
    """Return int64 rows moved by a spatial offset."""
    return rows.astype(mx.int64) + mx.array([0, *offset], dtype=mx.int64)


def scaled(rows: mx.array, stride: Sequence[int]) -> mx.array:
    """Return int64 rows with each spatial column multiplied by its stride."""
    return rows.astype(mx.int64) * mx.array([1, *stride], dtype=mx.int64)


def cells(rows: mx.array, stride: Sequence[int]) -> mx.array:
    """Return rows with each spatial column floor-divided by its stride."""
    if set(stride) == {1}:
        return rows
    columns = [rows[:, 0]]
    columns += [floor_divide(rows[:, 1 + a], s) for a, s in enumerate(stride)]
    return mx.stack(columns, axis=1)


def negated(offsets: Offsets) -> tuple[tuple[int, ...], ...]:
    """Return every offset with its sign changed."""
    return tuple(tuple(-v for v in offset) for offset in offsets)


def as_int32(rows: mx.array, what: str) -> mx.array:
    """Return int64 rows as int32. Reads their bounds."""
    _expect_int32(bounds_of(rows), what)
    return rows.astype(mx.int32)


def _expect_int32(bounds: Bounds, what: str) -> None:
    low, high = min(bounds[0]), max(bounds[1])
    if low < -INT32_LIMIT or high >= INT32_LIMIT:
        raise ValueError(
            f"{what} would reach coordinates {low} to {high}, beyond int32; move the "
            "input nearer to the origin or use a smaller stride"
        )


# Keys


def column_weights(bounds: Bounds) -> list[int]:
    """Return the weight of each column in a packed key, the last column's being 1."""
    weights = [1]
    for low, high in zip(bounds[0][:0:-1], bounds[1][:0:-1], strict=True):
        weights.insert(0, weights[0] * (high - low + 1))
    return weights


def packed_keys(coords: mx.array, low: Sequence[int], weights: list[int]) -> mx.array:
    """Return (N,) int64: the weighted sum of the columns, counted from ``low``."""
    keys = mx.zeros((coords.shape[0],), dtype=mx.int64)
    for axis, weight in enumerate(weights):
        keys = keys + (coords[:, axis].astype(mx.int64) - low[axis]) * weight
    return keys


def device_keys(coords: mx.array) -> mx.array:
    """Return keys by the rows' bounds on the device; they wrap at 2^63 cells."""
    rows = coords.astype(mx.int64)
    low = rows.min(axis=0)
    extents = rows.max(axis=0) - low + 1
    after = mx.concatenate([extents[1:], mx.ones((1,), dtype=mx.int64)])
    return ((rows - low) * mx.cumprod(after, reverse=True)).sum(axis=1)


def row_keys(coords: mx.array, bounds: Bounds) -> mx.array:
    """Return (N,) int64 keys that compare as the rows do."""
    if cell_count(bounds) < KEY_LIMIT:
        return packed_keys(coords, bounds[0], column_weights(bounds))
    # Leading columns are replaced by their ranks, so that no range is refused.
    keys, count = mx.zeros((coords.shape[0],), dtype=mx.int64), 1
    for axis, (low, high) in enumerate(zip(*bounds, strict=True)):
        column, extent = coords[:, axis].astype(mx.int64) - low, high - low + 1
        if count * extent >= KEY_LIMIT:
            keys, count = ranks(keys), coords.shape[0]
        if count * extent >= KEY_LIMIT:  # rows times a huge stride
            column, extent = ranks(column), coords.shape[0]
        keys = keys * extent + column
        count *= extent
    return keys


def ranks(keys: mx.array) -> mx.array:
    """Return (N,) int64 numbers below N that compare as the keys do."""
    return mx.searchsorted(mx.sort(keys), keys).astype(mx.int64)


# Rows that a mask keeps


def running_sums(values: mx.array, axis: int = 0) -> mx.array:
    """Return the sums of integers up to and with each of an axis, in their dtype."""
    # MLX's GPU kernels take the stride of an axis of one element for its columns:
    # of a row out of a matrix they read and write past the end.
    return values if values.shape[axis] == 1 else mx.cumsum(values, axis=axis)


class SelectedRows(NamedTuple):
    """Rows that a mask selects, in their order."""

    rows: mx.array  # (M,) int32: the selected rows
    places: mx.array  # (N,) int32: the place of each row among them, or -1
    coords: mx.array  # (M, 1 + D) int32


class MaskedRows:
    """The selection of rows by a mask, launched before its size is read."""

    def __init__(self, mask: mx.array, coords: mx.array):
        self._mask, self._coords = mask, coords
        self._ends = running_sums(mask.astype(mx.int32))
        # A sum, since MLX on CUDA reads a slice by moving the whole array to the CPU.
        self.count: mx.array = self._ends[-1:] + 0

    def rows(self, count: int) -> SelectedRows:
        """Return the rows, from the value of ``count``."""
        rows = _positions(self._mask, self._ends, count)
        places = mx.where(self._mask, self._ends - 1, -1)
        return SelectedRows(rows, places, self._coords[rows])


def _positions(mask: mx.array, ends: mx.array, count: int) -> mx.array:
    """Return the (count,) positions where a flat mask is true."""
    # MLX's GPU backends cannot scatter 64-bit integers.
    kind = mx.int32 if mask.size <= INT32_LIMIT else mx.int64
    positions = mx.zeros((count + 1,), dtype=kind)
    # False entries all write into an extra last slot.
    slots = mx.where(mask, ends - 1, count)
    positions[slots] = mx.arange(mask.size, dtype=kind)
    return positions[:count]


def true_positions(mask: mx.array, count: int | None = None) -> mx.array:
    """Return the positions where a flat mask is true. Reads ``count`` if it is None."""
    kind = mx.int32 if mask.size <= INT32_LIMIT else mx.int64
    if mask.size == 0:
        return mx.zeros((0,), dtype=kind)
    # A mask may come from features; positions have no derivative.
    mask = mx.stop_gradient(mask)
    ends = running_sums(mask.astype(kind))
    if count is None:
        # A sum, since MLX on CUDA reads a slice by moving the whole array to the CPU.
        count = sync.read(ends[-1] + 0)[0]
    return _positions(mask, ends, count)


# Unique rows, and the best ones


class UniqueRows(NamedTuple):
    """Sorted unique rows and how the given rows map onto them."""

    rows: mx.array  # (M, 1 + D) int32, sorted lexicographically
    inverse: mx.array  # (N,) int32: the place of each given row among them


def first_of_equals(sorted_keys: mx.array) -> mx.array:
    """Return (N,) bool: whether a key is the first of those that equal it."""
    first = mx.ones((min(1, sorted_keys.size),), dtype=mx.bool_)
    return mx.concatenate([first, sorted_keys[1:] != sorted_keys[:-1]])


def unique_rows(
    coords: mx.array, box: Bounds | None = None, count: int | None = None
) -> UniqueRows:
    """Return the sorted unique rows of (N, 1 + D) int32; see ``Geometry``."""
    n = coords.shape[0]
    if n == 0:
        return UniqueRows(coords, mx.zeros((0,), dtype=mx.int32))
    keys = row_keys(coords, box or bounds_of(coords))
    order = mx.argsort(keys)
    first = first_of_equals(keys[order])
    starts = true_positions(first, count)
    inverse = mx.zeros((n,), dtype=mx.int32)
    inverse[order] = running_sums(first.astype(mx.int32)) - 1
    return UniqueRows(coords[order[starts]], inverse)


def best_rows(
    scores: mx.array, coords: mx.array, batches: tuple[int, int], k: int
) -> mx.array:
    """Return (N,) bool: which rows are among the k of greatest score of an element.

    Earlier rows win ties; NaN is the least. ``batches`` bounds the batch indices.
    """
    n, bits = len(coords), 32  # of a key that a row's number has, and a score
    low, rows = (1 << bits) - 1, mx.arange(n, dtype=mx.int64)
    keys = _falling(scores).astype(mx.int64) << bits | rows
    ordered = mx.sort(keys)
    if batches[0] == batches[1]:
        return keys <= ordered[k - 1]
    # Once more by elements, which with the scores' bits would be too many.
    order = ordered & low
    keys = mx.sort(coords[:, 0][order].astype(mx.int64) << bits | rows)
    element, order = keys >> bits, order[keys & low]
    kept = mx.zeros((n,), dtype=mx.int32)
    # Of an element's rows each but the first k has another of it k places before.
    first = mx.ones((k,), dtype=mx.bool_)
    is_best = mx.concatenate([first, element[k:] != element[:-k]])
    kept[order] = is_best.astype(mx.int32)
    return kept > 0


def _falling(scores: mx.array) -> mx.array:
    """Return (N,) int32 that are less of a greater score; a NaN has the greatest."""
    negative = 0 - scores.astype(mx.float32)  # of both zeros 0
    bits = negative.view(mx.int32)
    ordered = bits ^ (bits >> 31 & INT32_LIMIT - 1)
    return mx.where(mx.isnan(negative), INT32_LIMIT - 1, ordered)


# Dense grids


def active_cells(
    array: mx.array, mask: mx.array | None = None
) -> tuple[mx.array, mx.array, tuple[int, ...]]:
    """Find the active cells of a dense (B, spatial..., C) array."""
    array = array_of(array, "array")
    if array.ndim - 2 not in AXES:
        raise ValueError(
            "a dense array must have shape (B, spatial..., C) with 1 to 4 spatial "
            f"axes; got {tuple(array.shape)}"
        )
    grid = tuple(array.shape[:-1])
    if mask is None:
        mask = mx.any(array != 0, axis=-1)
    mask = array_of(mask, "mask")
    if tuple(mask.shape) != grid or mask.dtype != mx.bool_:
        raise ValueError(
            f"mask must have shape {grid}, bool; got {tuple(mask.shape)} of "
            f"{mask.dtype}"
        )
    at = true_positions(mask.flatten())
    columns, rest = [], at
    for extent in reversed(grid):
        columns.insert(0, (rest % max(1, extent)).astype(mx.int32))
        rest = rest // max(1, extent)
    feats = array.reshape(prod(grid), array.shape[-1])[at]  # of no channels too
    return mx.stack(columns, axis=1), feats, grid


def places_in(grid: tuple[int, ...], coords: mx.array, bounds: Bounds) -> mx.array:
    """Return (N,) int64: the place of each row among the cells of a grid, in order."""
    (_, *low), (_, *high) = bounds
    shape = grid[1:]
    if min(low) < 0 or any(h >= n for h, n in zip(high, shape, strict=True)):
        raise ValueError(
            f"coordinates {tuple(low)} to {tuple(high)} do not fit a dense grid of "
            f"shape {shape} that starts at 0; move them or pass spatial_shape="
        )
    flat = mx.zeros((len(coords),), dtype=mx.int64)
    for axis, extent in enumerate(grid):
        flat = flat * extent + coords[:, axis].astype(mx.int64)
    return flat


# Rules by which rows make others, and the boxes of these


class Rule(IntEnum):
    """How a row makes others; kernels know the names and the numbers.

    ITSELF   in
    CELL     floor(in / stride)
    REACH    every out with some in = out * stride + offset_k
    EXPAND   every in * stride + offset_k
    """

    ITSELF = 0
    CELL = 1
    REACH = 2
    EXPAND = 3


def box_of(
    rule: Rule, bounds: Bounds, offsets: Offsets, stride: Sequence[int]
) -> Bounds:
    """Return bounds of the rows that a rule makes of rows within ``bounds``."""
    low, high = [bounds[0][0]], [bounds[1][0]]
    for axis, step in enumerate(stride):
        least, most = bounds[0][1 + axis], bounds[1][1 + axis]
        reach = [offset[axis] for offset in offsets] or [0]
        if rule == Rule.EXPAND:
            least, most = least * step + min(reach), most * step + max(reach)
        elif rule != Rule.ITSELF:
            least, most = (least - max(reach)) // step, (most - min(reach)) // step
        low.append(least)
        high.append(most)
    return tuple(low), tuple(high)


def int32_box(
    rule: Rule, bounds: Bounds, offsets: Offsets, stride: Sequence[int]
) -> Bounds:
    """Return bounds of the rows that a rule makes; raise if they exceed int32."""
    box = box_of(rule, bounds, offsets, stride)
    kind = "generative convolution" if rule == Rule.EXPAND else "convolution"
    _expect_int32(box, f"the {kind}")
    return box


def _candidates(
    coords: mx.array, rule: Rule, offsets: Offsets, stride: Sequence[int]
) -> tuple[mx.array, mx.array | None]:
    """Return (M, 1 + D) int64 rows with repeats, and which count (all: None)."""
    if rule == Rule.ITSELF:
        return coords.astype(mx.int64), None
    if rule == Rule.CELL:
        return cells(coords.astype(mx.int64), stride), None
    if rule == Rule.EXPAND:
        base = scaled(coords, stride)
        return mx.concatenate([shifted(base, v) for v in offsets]), None
    rows = mx.concatenate([shifted(coords, v) for v in negated(offsets)])
    steps = mx.array([1, *stride], dtype=mx.int64)
    return cells(rows, stride), mx.all(rows % steps == 0, axis=1)


def rule_rows(
    rule: Rule,
    coords: mx.array,
    offsets: Offsets,
    stride: Sequence[int],
    box: Bounds,
    count: int | None = None,
) -> mx.array:
    """Return the rows that a rule derives, sorted, unique and within a box."""
    if coords.shape[0] == 0 or not offsets or is_empty(box):
        return mx.zeros((0, coords.shape[1]), dtype=mx.int32)
    rows, counts = _candidates(coords, rule, offsets, stride)
    low, high = (mx.array(list(v), dtype=mx.int64) for v in box)
    inside = mx.all((rows >= low) & (rows <= high), axis=1)
    inside = inside if counts is None else inside & counts
    beyond = cell_count(box)
    if beyond >= KEY_LIMIT:
        return unique_rows(rows[true_positions(inside)].astype(mx.int32)).rows
    weights = column_weights(box)
    keys = ((rows - low) * mx.array(weights, dtype=mx.int64)).sum(axis=1)
    keys = mx.sort(mx.where(inside, keys, beyond))
    keys = keys[true_positions(first_of_equals(keys) & (keys < beyond), count)]
    columns = [
        keys // weight % (last - first + 1)
        for weight, first, last in zip(weights, *box, strict=True)
    ]
    return (mx.stack(columns, axis=1) + low).astype(mx.int32)


# Bits that one int64 sort key holds.
WORD = 62
MOST_BITS = f"an int from 0 to {WORD}"  # of an axis
CELL = 32  # bits of an axis, in kernels of keys


def _pack(bits: mx.array) -> mx.array:
    """Return one key for each row of (N, B) bits, the first bit leading."""
    words = []
    for start in range(0, bits.shape[1], WORD):
        chunk = bits[:, start : start + WORD].astype(mx.int64)
        powers = [1 << (chunk.shape[1] - 1 - b) for b in range(chunk.shape[1])]
        words.append((chunk * mx.array(powers, dtype=mx.int64)).sum(axis=1))
    key = words[0]
    for word in words[1:]:
        # Ranks are below n, so two of them fit in one key.
        key = ranks(key) * max(1, word.size) + ranks(word)
    return key


def gray_order(occupied: mx.array) -> mx.array:
    """Return the (N,) int32 order of rows by the Gray-code rank of their mask."""
    n = occupied.shape[0]
    if n == 0:
        return mx.zeros((0,), dtype=mx.int32)
    # The rank of a Gray code is its prefix parity, read from the highest offset down.
    parity = running_sums(occupied[:, ::-1].astype(mx.int32), axis=1) % 2
    return stable_order(_pack(parity))


def by_region(order: mx.array, region: int | None) -> mx.array:
    """Return an (N,) int32 order within each region of so many rows in succession."""
    n = order.size
    if region is None or n <= region:
        return order
    keys = (order // region).astype(mx.int64) * n + mx.arange(n, dtype=mx.int64)
    return order[mx.argsort(keys)]


def stable_order(keys: mx.array) -> mx.array:
    """Return the (N,) int32 order of int64 keys; equal keys keep theirs."""
    n = keys.size
    places = mx.arange(n, dtype=mx.int64)
    return mx.argsort(ranks(keys) * n + places).astype(mx.int32)


def used_by_blocks(occupied: mx.array, block: int) -> mx.array:
    """Return (ceil(N / block), K) bool: offsets any row of a block uses."""
    n, volume = occupied.shape
    padded = mx.pad(occupied, [(0, -n % block), (0, 0)])
    return padded.reshape(-(-n // block), block, volume).any(axis=1)


def mask_words(occupied: mx.array, block: int) -> mx.array:
    """Return (ceil(N / block), ceil(K / 32)) uint32: the offsets that a block uses."""
    n, volume = occupied.shape
    words = -(-volume // 32)
    if n == 0:
        return mx.zeros((0, words), dtype=mx.uint32)
    used = mx.pad(used_by_blocks(occupied, block), [(0, 0), (0, words * 32 - volume)])
    used = used.reshape(-1, words, 32)
    powers = mx.array([1 << b for b in range(32)], dtype=mx.uint32)
    return (used.astype(mx.uint32) * powers).sum(axis=2)


class Curve(NamedTuple):
    """A space-filling curve over cells, from one batch element to the next."""

    low: tuple[int, ...]  # the batch index and the cell that are counted from
    bits: int  # of an axis
    of_batch: int  # bits of a batch index
    is_hilbert: bool  # or Morton's
    is_swapped: bool  # the first two axes are

    @property
    def of_place(self) -> int:
        """Bits of a place on the curve of a batch element."""
        return self.bits * (len(self.low) - 1)

    @property
    def of_key(self) -> int:
        """Bits of a key that holds batch index and place."""
        return self.of_batch + self.of_place

    @property
    def is_numbered(self) -> bool:
        """Whether 62 bits hold a key, and 32 a cell, as kernels take them."""
        return self.of_key <= WORD and self.bits <= CELL


CURVES = tuple(
    f"{n}{swap}" for swap in ("", "-trans") for n in ("hilbert", "morton", "z")
)


def check_curve(name: str, dims: int) -> None:
    """Raise a ValueError unless there is such a curve in so many axes."""
    if name not in CURVES:
        raise ValueError(f"order must be one of {CURVES}; got {name!r}")
    if name.endswith("-trans") and dims < 2:
        raise ValueError(f"{name!r} swaps two axes; the rows have {dims}")


def curve_of(name: str, bounds: Bounds, bits: int | None = None) -> Curve:
    """Return the curve of a name through rows of known bounds."""
    low, high = bounds
    check_curve(name, len(low) - 1)
    if bits is None:
        extent = max(h - w for w, h in zip(low[1:], high[1:], strict=True))
        bits = extent.bit_length()
    elif not 0 <= (bits := whole(bits, "bits", -INT32_LIMIT, MOST_BITS)) <= WORD:
        raise ValueError(f"bits must be {MOST_BITS}; got {bits}")
    elif min(low[1:]) < 0 or max(high[1:]) >> bits:
        raise ValueError(
            f"with bits={bits} a curve needs coordinates from 0 to {(1 << bits) - 1}; "
            f"got {min(low[1:])} to {max(high[1:])}: move them, or leave bits out"
        )
    else:
        low = (low[0], *(0 for _ in low[1:]))
    of_batch = (high[0] - low[0]).bit_length()
    is_hilbert, is_swapped = name.startswith("hilbert"), name.endswith("-trans")
    return Curve(tuple(low), max(1, bits), of_batch, is_hilbert, is_swapped)


def _interleave(axes: list[mx.array], bits: int) -> mx.array:
    """Return (N, bits * D) bits, highest first, the first axis leading."""
    shifts = mx.arange(bits - 1, -1, -1, dtype=mx.int64)
    columns = (mx.stack(axes, axis=1)[:, None, :] >> shifts[:, None]) & 1
    return columns.reshape(axes[0].size, -1)


def _transposed(axes: list[mx.array], bits: int) -> list[mx.array]:
    """Return Skilling's transform of cells: "Programming the Hilbert curve", 2004."""
    axes = list(axes)
    for bit in range(bits - 1, 0, -1):
        low = (1 << bit) - 1
        for a in range(len(axes)):
            set_ = (axes[a] >> bit) & 1
            swap = mx.where(set_ == 1, 0, (axes[0] ^ axes[a]) & low)
            axes[0] = mx.where(set_ == 1, axes[0] ^ low, axes[0] ^ swap)
            if a:
                axes[a] = axes[a] ^ swap
    for a in range(1, len(axes)):
        axes[a] = axes[a] ^ axes[a - 1]
    flip = mx.zeros_like(axes[0])
    for bit in range(bits - 1, 0, -1):
        flip = mx.where((axes[-1] >> bit) & 1 == 1, flip ^ ((1 << bit) - 1), flip)
    return [axis ^ flip for axis in axes]


def _place(coords: mx.array, curve: Curve) -> mx.array:
    """Return (N, bits * D) the bits of each row's place on its batch's curve."""
    cells = coords[:, 1:].astype(mx.int64) - mx.array(curve.low[1:], dtype=mx.int64)
    axes = [cells[:, a] for a in range(cells.shape[1])]
    if curve.is_swapped:
        axes[:2] = axes[1::-1]
    if curve.is_hilbert:
        axes = _transposed(axes, curve.bits)
    return _interleave(axes, curve.bits)


def curve_codes(coords: mx.array, curve: Curve) -> mx.array:
    """Return (N,) int64: each row's place on the curve of its batch element."""
    if curve.of_place > WORD:
        raise ValueError(
            f"a code has at most {WORD} bits; these coordinates need {curve.of_place}: "
            "ask for the order alone"
        )
    return _pack(_place(coords, curve))


def curve_order(coords: mx.array, curve: Curve) -> mx.array:
    """Return the (N,) int32 order of unique rows by batch, then along a curve."""
    batch = coords[:, 0].astype(mx.int64) - curve.low[0]
    if curve.is_numbered:
        keys = batch * (1 << curve.of_place) + curve_codes(coords, curve)
    else:
        keys = ranks(batch) * coords.shape[0] + ranks(_pack(_place(coords, curve)))
    return mx.argsort(keys).astype(mx.int32)
