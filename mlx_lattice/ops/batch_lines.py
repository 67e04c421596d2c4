"""Lines of values: one that all rows share, or one for each batch element."""

from __future__ import annotations

from collections.abc import Callable

import mlx.core as mx

from ..tensor import SparseTensor, features_of


def check_values(x: SparseTensor | mx.array, *values: mx.array) -> None:
    """Raise unless each batch element of ``x`` has its values, or all share them."""
    sparse = isinstance(x, SparseTensor)
    batches = x.batch_size if sparse else features_of(x).shape[0]
    channels = x.shape[-1]  # of a tensor without reading its features
    for given in values:
        fits = tuple(given.shape) in ((1, channels), (batches, channels))
        if len(x.shape) != (2 if sparse else 3) or not fits:
            raise ValueError(
                f"each batch element has its values: expected ({batches}, {channels}) "
                f"for features {tuple(x.shape)}; got {tuple(given.shape)}"
            )


def apart(
    weight: mx.array | None, bias: mx.array | None, size: Callable[[], int]
) -> list[mx.array | None]:
    """Return lines for all rows, (C,), or both of them for each batch element.

    ``size``: returns the number of elements, which may have to be read.
    """
    lines = [
        a.reshape(-1) if a is not None and a.size == a.shape[-1] else a
        for a in (weight, bias)
    ]
    if all(a is None or a.ndim == 1 for a in lines):
        return lines
    shape = size(), lines[0 if lines[1] is None else 1].shape[-1]
    return [a if a is None else mx.broadcast_to(a, shape) for a in lines]
