"""Orders of rows: Gray-code rank of occupancy masks, Morton and Hilbert curves."""

from __future__ import annotations

import mlx.core as mx

from .keys import Bounds, bounds_of, ranks
from .scans import running_sums

# Bits that one int64 sort key holds.
WORD = 62


def fold(words: list[mx.array]) -> mx.array:
    """Return an order-keeping key of several leading-first int64 words below 2^62."""
    key = words[0]
    for word in words[1:]:
        n = max(1, word.size)
        # Ranks are below n, so two of them fit in one key.
        key = ranks(key) * n + ranks(word)
    return key


def _pack(bits: mx.array) -> mx.array:
    """Return one key for each row of (N, B) bits, the first bit leading."""
    words = []
    for start in range(0, bits.shape[1], WORD):
        chunk = bits[:, start : start + WORD].astype(mx.int64)
        powers = [1 << (chunk.shape[1] - 1 - b) for b in range(chunk.shape[1])]
        words.append((chunk * mx.array(powers, dtype=mx.int64)).sum(axis=1))
    return fold(words)


def gray_order(occupied: mx.array) -> mx.array:
    """Return the (N,) int32 order of rows by the Gray-code rank of their mask.

    Neighbours in that order differ in few bits, so a tile of them shares its offsets
    (FlexGEMM's and WarpConvNet's order). Ties keep the rows' own order.

    Args:
        occupied: (N, K) bool, K at least 1: which offsets a row uses.
    """
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
    """Return (ceil(N / block), K) bool: offsets any row of a block uses.

    Args:
        occupied: (N, K) bool: which offsets a row uses.
        block: rows of a block.
    """
    n, volume = occupied.shape
    padded = mx.pad(occupied, [(0, -n % block), (0, 0)])
    return padded.reshape(-(-n // block), block, volume).any(axis=1)


def mask_words(occupied: mx.array, block: int) -> mx.array:
    """Return (ceil(N / block), ceil(K / 32)) uint32: offsets any row of a block uses.

    Bit b of word w stands for offset 32 w + b.
    """
    n, volume = occupied.shape
    words = -(-volume // 32)
    if n == 0:
        return mx.zeros((0, words), dtype=mx.uint32)
    used = mx.pad(used_by_blocks(occupied, block), [(0, 0), (0, words * 32 - volume)])
    used = used.reshape(-1, words, 32)
    powers = mx.array([1 << b for b in range(32)], dtype=mx.uint32)
    return (used.astype(mx.uint32) * powers).sum(axis=2)


def curve_cells(
    coords: mx.array, bounds: Bounds | None = None, bits: int | None = None
) -> tuple[mx.array, int]:
    """Return (N, D) int64 cells of a curve, 0 or more, and the bits of an axis.

    Args:
        coords: (N, 1 + D) int32, N at least 1.
        bounds: their bounds; read where they are not given.
        bits: of an axis: cells are then the coordinates themselves. By default they
            count from the least ones, and the widest axis says how many bits.

    Raises:
        ValueError: ``bits`` are given, and too few for a coordinate.
    """
    low, high = bounds or bounds_of(coords)
    cells = coords[:, 1:].astype(mx.int64)
    if bits is None:
        extent = max(h - w for w, h in zip(low[1:], high[1:], strict=True))
        least = mx.array(low[1:], dtype=mx.int64)
        return cells - least, max(1, extent.bit_length())
    if not isinstance(bits, int) or bits < 0:
        raise ValueError(f"bits must be an int of 0 or more; got {bits!r}")
    if min(low[1:]) < 0 or max(high[1:]) >> bits:
        raise ValueError(
            f"with bits={bits} a curve needs coordinates from 0 to {(1 << bits) - 1}; "
            f"got {min(low[1:])} to {max(high[1:])}: move them, or leave bits out"
        )
    return cells, max(1, bits)


def _interleave(cells: mx.array, bits: int) -> mx.array:
    """Return (N, bits * D) bits, highest first, the first axis leading."""
    shifts = mx.arange(bits - 1, -1, -1, dtype=mx.int64)
    columns = (cells[:, None, :] >> shifts[:, None]) & 1
    return columns.reshape(cells.shape[0], -1)


def _hilbert(cells: mx.array, bits: int) -> mx.array:
    """Return the (N, bits * D) bits of Skilling's transform."""
    axes = [cells[:, a] for a in range(cells.shape[1])]
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
    transposed = mx.stack([axis ^ flip for axis in axes], axis=1)
    return _interleave(transposed, bits)


# The bits of a place on each curve; "-trans" swaps the first two axes.
_PLACES = {"hilbert": _hilbert, "morton": _interleave, "z": _interleave}
CURVES = (*_PLACES, *(f"{name}-trans" for name in _PLACES))


def check_curve(name: str, dims: int) -> None:
    """Raise a ValueError unless there is such a curve in so many axes."""
    if name not in CURVES:
        raise ValueError(f"order must be one of {CURVES}; got {name!r}")
    if name.endswith("-trans") and dims < 2:
        raise ValueError(f"{name!r} swaps two axes; the rows have {dims}")


def _place(
    coords: mx.array, name: str, bounds: Bounds | None, bits: int | None
) -> mx.array:
    """Return (N, bits * D) the bits of each row's place on its batch's curve."""
    cells, bits = curve_cells(coords, bounds, bits)
    if name.endswith("-trans"):
        cells = cells[:, mx.array([1, 0, *range(2, cells.shape[1])])]
    return _PLACES[name.removesuffix("-trans")](cells, bits)


def curve_codes(
    coords: mx.array, name: str, bounds: Bounds | None = None, bits: int | None = None
) -> mx.array:
    """Return (N,) int64: each row's place on the curve of its batch element.

    Raises:
        ValueError: there is no such curve, or a place has more than 62 bits.
    """
    check_curve(name, coords.shape[1] - 1)
    if coords.shape[0] == 0:
        return mx.zeros((0,), dtype=mx.int64)
    place = _place(coords, name, bounds, bits)
    if place.shape[1] > WORD:
        raise ValueError(
            f"a code has at most {WORD} bits; these coordinates need {place.shape[1]}: "
            "ask for the order alone"
        )
    return _pack(place)


def curve_order(
    coords: mx.array, name: str, bounds: Bounds | None = None, bits: int | None = None
) -> mx.array:
    """Return the (N,) int32 order of rows by batch, then along a curve.

    Args:
        coords: (N, 1 + D) int32; any range, negative values included.
        name: one of ``CURVES``.
        bounds, bits: as for ``curve_cells``.

    Raises:
        ValueError: there is no such curve, or as for ``curve_cells``.
    """
    check_curve(name, coords.shape[1] - 1)
    if coords.shape[0] == 0:
        return mx.zeros((0,), dtype=mx.int32)
    key = ranks(_pack(_place(coords, name, bounds, bits)))
    batch = ranks(coords[:, 0].astype(mx.int64))
    return mx.argsort(batch * coords.shape[0] + key).astype(mx.int32)


def morton_order(coords: mx.array, bounds: Bounds | None = None) -> mx.array:
    """Return the (N,) int32 order of rows along the Z-order curve of each batch."""
    return curve_order(coords, "morton", bounds)


def hilbert_order(coords: mx.array, bounds: Bounds | None = None) -> mx.array:
    """Return the (N,) int32 order of rows along the Hilbert curve of each batch.

    Skilling's transform ("Programming the Hilbert curve", 2004), in D dimensions.
    """
    return curve_order(coords, "hilbert", bounds)
