"""Bytes of a file as an array; doubles as float32, as no GPU of MLX has them."""

from __future__ import annotations

import mlx.core as mx

_UNSIGNED = {1: "B", 2: "H", 4: "I", 8: "Q"}


def kept(dtype: mx.Dtype) -> mx.Dtype:
    """Return the dtype that elements of a file's get."""
    return mx.float32 if dtype == mx.float64 else dtype


def elements(data: bytes, dtype: mx.Dtype) -> mx.array:
    """Return little-endian elements as an array of one axis."""
    if not data:
        return mx.zeros((0,), kept(dtype))
    flat = mx.array(memoryview(data).cast(_UNSIGNED[dtype.size]))
    if dtype == mx.bool_:
        return flat != 0
    # On the CPU: no other device has float64.
    flat = mx.view(flat, dtype, stream=mx.cpu)
    return flat.astype(kept(dtype), stream=mx.cpu)
