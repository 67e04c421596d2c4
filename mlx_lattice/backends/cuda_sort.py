"""The radix sort on CUDA, and what geometry's launches share."""

from __future__ import annotations

from functools import cache, lru_cache

import mlx.core as mx

from ..devices import current
from .cuda_interfaces import SCRATCH, geometry_kernel, run

THREADS = 256
BINS = 512  # of a digit, at most
HEADER = 32  # words of scratch before the histograms
SORT_THREADS = 512
SORT_TILE = 8 * SORT_THREADS  # keys of one block of the sort
MOST_KEYS = 1 << 30  # that counts beside two flags in a word can number
KEYS = {mx.uint32: "unsigned", mx.uint64: "unsigned long long"}
TYPES = {**KEYS, mx.int32: "int"}
SORT = ("rows.cuh", "radix_sort.cu")


@lru_cache(maxsize=1024)
def constant(*values: int, dtype: mx.Dtype = mx.int32) -> mx.array:
    """Return integers on the device, where a kernel reads them fast; kept."""
    array = mx.array(values, dtype=dtype) + 0
    mx.eval(array)
    return array


def cleared(words: int) -> mx.array:
    """Return words of 0; the value is read on the device."""
    return mx.full((words,), constant(0, dtype=mx.uint32))


@lru_cache(maxsize=256)
def rule_constant(offsets: tuple, stride: tuple) -> mx.array:
    """Return the offsets one after another, then the strides."""
    return constant(*(v for offset in offsets for v in offset), *stride, 0, 0)


@cache
def multiprocessors() -> int:
    """Return how many the device has."""
    return current().cores


def blocks_for(elements: int, per_multiprocessor: int = 8) -> int:
    """Return how many blocks of THREADS stride over some elements."""
    most = multiprocessors() * per_multiprocessor
    return max(1, min(most, -(-elements // THREADS)))


def digits_of(bits: int) -> tuple[int, int]:
    """Return into how many digits the radix sort cuts a key, and their bits."""
    passes = -(-bits // 9)
    return passes, -(-bits // passes)


def scratch_words(n: int, passes: int) -> int:
    """Return the words that the passes of a sort of n keys share."""
    tiles = -(-n // SORT_TILE)
    return HEADER + passes * (1 + tiles) * BINS + tiles


def sort_keys(keys, digits, scratch, passes: int, *, rows: bool, keep: bool):
    """Sort (N,) keys whose histograms stand in scratch; stable.

    Args:
        keys: uint32 or uint64.
        digits: constant (anything, bits of a digit, passes, 0).
        scratch: ``scratch_words`` words, used up by this.
        passes: digits of a key.
        rows: whether to sort their places along.
        keep: whether the sorted keys are wanted.

    Returns:
        (sorted keys, or anything where not kept; (N,) int32 places, or None)
    """
    n, numeric = keys.shape[0], KEYS[keys.dtype]
    place = keys
    for number in range(passes):
        outputs = [((n,), keys.dtype)] + ([((n,), mx.int32)] if rows else [])
        if not keep and number == passes - 1:
            outputs[0] = (1,), keys.dtype
        keys, *places = run(
            _radix_pass(numeric, rows, keep, TYPES[place.dtype]),
            [keys, place, digits, constant(number, 0, 0, 0), scratch],
            -(-n // SORT_TILE),
            SORT_THREADS,
            outputs,
        )
        place = places[0] if rows else keys
    return keys, place if rows else None


@cache
def _radix_pass(numeric: str, rows: bool, keep: bool, places: str):
    """Return the kernel; ``places`` is the type of what stands for places."""
    keys = "reinterpret_cast<KEY*>(sorted_keys)"
    return geometry_kernel(
        "radix_pass",
        SORT,
        "RadixPass",
        ("keys", "places", "digits", "which", "scratch"),
        ("sorted_keys", "sorted_rows") if rows else ("sorted_keys",),
        template=(
            ("KEY", numeric),
            ("ROWS", rows),
            ("KEEP", keep),
            ("PLACE", places),
        ),
        arguments=(
            ("keys", "reinterpret_cast<const KEY*>(keys)"),
            ("places", "reinterpret_cast<const PLACE*>(places)"),
            ("digits", ""),
            ("which", ""),
            ("scratch", SCRATCH),
            ("sorted_keys", keys if rows else f"{keys}, nullptr"),
        ),
        threads=SORT_THREADS,
        blocks_per_multiprocessor=2,
    )
