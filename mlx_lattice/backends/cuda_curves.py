"""Orders of rows along space-filling curves on CUDA: a kernel of keys, and a sort."""

from __future__ import annotations

from functools import cache, lru_cache

import mlx.core as mx

from ..geometry import curves
from ..geometry.curves import Curve
from .cuda_interfaces import SCRATCH, geometry_kernel, run
from .cuda_sort import (
    KEYS,
    MOST_KEYS,
    SORT,
    THREADS,
    blocks_for,
    cleared,
    constant,
    digits_of,
    scratch_words,
    sort_keys,
)


def curve_order(coords: mx.array, curve: Curve) -> mx.array:
    """Return the (N,) int32 order of rows by batch, then along a curve."""
    n, columns = coords.shape
    if not curve.is_numbered or n > MOST_KEYS:
        return curves.curve_order(coords, curve)
    passes, each = digits_of(curve.of_key)
    dtype = mx.uint32 if curve.of_key <= 32 else mx.uint64
    digits, scratch = constant(0, each, passes, 0), cleared(scratch_words(n, passes))
    frame = _frame((*curve.low, curve.bits))
    (keys,) = run(
        _curve_keys(columns, curve.is_hilbert, curve.is_swapped, KEYS[dtype]),
        [coords, frame, digits, scratch],
        blocks_for(n),
        THREADS,
        [((n,), dtype)],
    )
    return sort_keys(keys, digits, scratch, rows=True, keep=False)[1]


@lru_cache(maxsize=256)
def _frame(values: tuple[int, ...]) -> mx.array:
    """Return what cells are counted from; one array, whose first read is slow."""
    return mx.array(values, dtype=mx.int32)


@cache
def _curve_keys(columns: int, is_hilbert: bool, is_swapped: bool, numeric: str):
    return geometry_kernel(
        "curve_keys",
        (*SORT, "curve_keys.cu"),
        "CurveKeys",
        ("coords", "frame", "digits", "scratch"),
        ("keys",),
        template=(
            ("COLUMNS", columns),
            ("HILBERT", is_hilbert),
            ("SWAPPED", is_swapped),
            ("KEY", numeric),
        ),
        arguments=(
            ("digits", ""),
            ("scratch", SCRATCH),
            ("keys", "reinterpret_cast<KEY*>(keys)"),
        ),
        threads=THREADS,
    )
