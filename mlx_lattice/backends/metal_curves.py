"""Orders of rows along space-filling curves on Metal: a kernel of keys, MLX's sort."""

from __future__ import annotations

from functools import cache

import mlx.core as mx

from ..devices import METAL
from ..geometry import curves
from ..geometry.curves import WORD, Curve
from .gpu_kernel import GpuKernel, Interface
from .metal_unique import by_places

_KEYS = Interface("CurveKeys", ("coords", "frame"), ("keys",), (("first", "0"),))


def curve_order(coords: mx.array, curve: Curve) -> mx.array:
    """Return the (N,) int32 order of rows by batch, then along a curve."""
    if not curve.is_numbered:
        return curves.curve_order(coords, curve)
    n, width = coords.shape
    row_bits = n.bit_length()
    if curve.of_key + row_bits > WORD:
        row_bits = 0
    frame = mx.array([*curve.low, curve.bits, row_bits], dtype=mx.int32)
    kernel = _curve_keys(width, curve.is_hilbert, curve.is_swapped)
    keys = by_places(kernel, [coords, frame], mx.int64)
    if row_bits == 0:
        return mx.argsort(keys).astype(mx.int32)
    return (mx.sort(keys) & ((1 << row_bits) - 1)).astype(mx.int32)


@cache
def _curve_keys(width: int, is_hilbert: bool, is_swapped: bool) -> GpuKernel:
    return GpuKernel(
        METAL,
        "curve_keys",
        ("curve_keys",),
        _KEYS,
        (("WIDTH", width), ("HILBERT", is_hilbert), ("SWAPPED", is_swapped)),
        place="thread_position_in_grid.x",
    )
