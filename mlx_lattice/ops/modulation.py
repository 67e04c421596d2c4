"""Shift, scale and gate of the features, with other values for each batch element.

Adaptive norms (Peebles and Xie, "Scalable Diffusion Models with Transformers", 2023)
are a norm without parameters, and then ``modulate``.
"""

from __future__ import annotations

import mlx.core as mx

from ..tensor import SparseTensor, features_of
from .global_pool import batch_rows, batch_spread

__all__ = ["gate", "modulate"]

Features = SparseTensor | mx.array


def modulate(x: Features, shift: mx.array, scale: mx.array) -> Features:
    """Return ``x * (1 + scale) + shift`` with the values of each batch element.

    Args:
        x: a tensor, or an array (B, L, C) of sequences.
        shift, scale: (B, C); of a tensor B is its batch size, or 1 for all elements.

    Returns:
        What ``x`` is, in its dtype.

    Raises:
        ValueError: shapes do not fit.
    """
    feats = features_of(x)
    scale = _for_rows(1 + scale.astype(mx.float32), x)
    y = feats * scale + _for_rows(shift, x)
    return x.replace(y) if isinstance(x, SparseTensor) else y


def gate(x: Features, by: mx.array) -> Features:
    """Return ``x * by`` with the values of each batch element.

    Arguments, result and errors are those of ``modulate``.
    """
    y = features_of(x) * _for_rows(by, x)
    return x.replace(y) if isinstance(x, SparseTensor) else y


def _for_rows(values: mx.array, x: Features) -> mx.array:
    """Return (B, C) values where they multiply x's features, in their dtype."""
    feats = features_of(x)
    sparse = isinstance(x, SparseTensor)
    batches = x.batch_size if sparse else feats.shape[0]
    one = (1, feats.shape[-1])
    if feats.ndim != (2 if sparse else 3) or tuple(values.shape) not in (
        one,
        (batches, one[1]),
    ):
        raise ValueError(
            f"each batch element has its values: expected ({batches}, {one[1]}) for "
            f"features {tuple(feats.shape)}; got {tuple(values.shape)}"
        )
    if not sparse:
        return values[:, None].astype(feats.dtype)
    if values.shape[0] == 1:
        return values.astype(feats.dtype)
    spread = batch_spread(values.astype(mx.float32), batch_rows(x))
    return spread.astype(feats.dtype)
