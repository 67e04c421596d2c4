"""Orders of rows along space-filling curves on CUDA: a kernel of keys, and a sort."""

from __future__ import annotations

from functools import cache, lru_cache, partial

import mlx.core as mx

from ..geometry import curves
from ..geometry.curves import Curve
from .cuda_interfaces import SCRATCH, geometry_kernel
from .cuda_sort import SORT, THREADS, sorted_places, sorts


def curve_order(coords: mx.array, curve: Curve) -> mx.array:
    """Return the (N,) int32 order of rows by batch, then along a curve."""
    n, columns = coords.shape
    if not curve.is_numbered or not sorts(n):
        return curves.curve_order(coords, curve)
    make_keys = partial(_curve_keys, columns, curve.is_hilbert, curve.is_swapped)
    inputs = coords, _frame((*curve.low, curve.bits))
    return sorted_places(make_keys, inputs, n, curve.of_key, keep=False)[1]


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
