"""Places of rows along space-filling curves."""

from __future__ import annotations

import mlx.core as mx

from ..backends import registry
from ..geometry import curves
from ..tensor import SparseTensor, expect_tensor

__all__ = ["curve_code", "curve_order"]


def curve_order(
    x: SparseTensor, order: str = "hilbert", *, bits: int | None = None
) -> mx.array:
    """Return the (N,) int32 rows by batch element, then along a curve.

    Args:
        x: the tensor whose rows are ordered; its features do not matter.
        order: "hilbert" (Skilling, "Programming the Hilbert curve", 2004), "morton"
            or "z", which are one, the first axis leading; with "-trans" behind it the
            first two axes are swapped, as in Point Transformer V3.
        bits: of an axis. Cells are then the coordinates themselves, which must lie
            from 0 to ``2 ** bits - 1``; a Hilbert curve of other bits turns otherwise.
            By default cells count from the least coordinates, with as many bits as
            the widest axis needs.

    Raises:
        ValueError: there is no such curve, or a coordinate does not fit the bits.
    """
    curve = _curve(x, order, bits)
    if len(x) == 0:
        return mx.zeros((0,), dtype=mx.int32)
    return registry.geometry().curve_order(x.coordinate_set.coords, curve)


def curve_code(
    x: SparseTensor, order: str = "hilbert", *, bits: int | None = None
) -> mx.array:
    """Return the (N,) int64 place of each row on the curve of its batch element.

    Arguments and errors are those of ``curve_order``; the batch is not in the code.

    Raises:
        ValueError: as there, or a code has more than 62 bits.
    """
    curve = _curve(x, order, bits)
    if len(x) == 0:
        return mx.zeros((0,), dtype=mx.int64)
    return curves.curve_codes(x.coordinate_set.coords, curve)


def _curve(x: SparseTensor, order: str, bits: int | None) -> curves.Curve:
    expect_tensor(x)
    return curves.curve_of(order, x.coordinate_set.bounds, bits)
