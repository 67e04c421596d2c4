"""The dtypes of features and float weights, and their names."""

from __future__ import annotations

import mlx.core as mx

DTYPES = {
    "float32": mx.float32,
    "float16": mx.float16,
    "bfloat16": mx.bfloat16,
}

FLOATS = tuple(DTYPES.values())

_NAMES = {dtype: name for name, dtype in DTYPES.items()}


def dtype_name(dtype: mx.Dtype | str) -> str:
    """Return "float32", "float16" or "bfloat16", or raise for any other dtype."""
    name = _NAMES.get(dtype) or str(dtype).rpartition(".")[2]
    if name not in DTYPES:
        raise TypeError(
            f"features and weights must be float32, float16 or bfloat16; got {name}"
        )
    return name
