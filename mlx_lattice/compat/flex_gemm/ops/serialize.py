"""flex_gemm.ops.serialize: codes along curves, which are not provided."""

from __future__ import annotations

from typing import NoReturn


def encode_seq(*_: object, **__: object) -> NoReturn:
    """Raise NotImplementedError."""
    raise NotImplementedError(
        "flex_gemm.ops.serialize.encode_seq is not provided; use "
        "mlx_lattice.ops.curve_code"
    )


def decode_seq(*_: object, **__: object) -> NoReturn:
    """Raise NotImplementedError."""
    raise NotImplementedError(
        "flex_gemm.ops.serialize.decode_seq is not provided; keep the coordinates "
        "beside their codes"
    )
