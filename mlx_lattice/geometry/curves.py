"""Orders of rows: Gray-code rank of occupancy masks, Morton and Hilbert curves."""

from __future__ import annotations

from typing import NamedTuple

import mlx.core as mx

from ..checks import INT32_LIMIT, whole
from .lattice import Bounds, ranks, running_sums

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
    """Return the (N,) int32 order of rows by the Gray-code rank of their mask.

    Neighbours in that order differ in few bits, so a tile of them shares its offsets
    (FlexGEMM's and WarpConvNet's order). Ties keep the rows' own order.
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
    """Return (ceil(N / block), K) bool: offsets any row of a block uses."""
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


class Curve(NamedTuple):
    """A space-filling curve over cells, from one batch element to the next.

    Attributes:
        low: the least batch index, and what cells of each axis are counted from.
        bits: of an axis, 1 or more.
        of_batch: bits of a batch index, counted from the least.
        is_hilbert: whether it is Hilbert's, and not Morton's.
        is_swapped: whether its first two axes are.
    """

    low: tuple[int, ...]
    bits: int
    of_batch: int
    is_hilbert: bool
    is_swapped: bool

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
    """Return the curve of a name through rows of known bounds.

    Args:
        name: one of ``CURVES``.
        bounds: of the rows, at least one.
        bits: of an axis: cells are then the coordinates themselves. By default they
            count from the least ones, and the widest axis says how many bits.

    Raises:
        ValueError: there is no such curve; or ``bits`` are given, and too few for a
            coordinate.
    """
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
    """Return (N,) int64: each row's place on the curve of its batch element.

    Raises:
        ValueError: a place has more than 62 bits.
    """
    if curve.of_place > WORD:
        raise ValueError(
            f"a code has at most {WORD} bits; these coordinates need {curve.of_place}: "
            "ask for the order alone"
        )
    return _pack(_place(coords, curve))


def curve_order(coords: mx.array, curve: Curve) -> mx.array:
    """Return the (N,) int32 order of unique rows by batch, then along a curve.

    In MLX operations.
    """
    batch = coords[:, 0].astype(mx.int64) - curve.low[0]
    if curve.is_numbered:
        keys = batch * (1 << curve.of_place) + curve_codes(coords, curve)
    else:
        keys = ranks(batch) * coords.shape[0] + ranks(_pack(_place(coords, curve)))
    return mx.argsort(keys).astype(mx.int32)
