"""The relation that a convolution or pooling of a tensor runs over."""

from __future__ import annotations

import mlx.core as mx

from ..checks import array_of
from ..coordinate_set import CoordinateKey, coarser, finer, stride_text
from ..kernel_spec import per_axis
from ..relation import Relation
from ..tensor import SparseTensor

Coordinates = SparseTensor | CoordinateKey | mx.array | None


def known_key(x: SparseTensor, coordinates: Coordinates) -> CoordinateKey | None:
    """Return the key that a tensor or a key has here; None for bare rows."""
    if isinstance(coordinates, SparseTensor):
        if coordinates.manager is x.manager:
            return coordinates.key
        held = coordinates.coordinate_set
        facts = held.stride, held.spatial_shape, held.batch_size
        return x.manager.inserted(held.shown, *facts, rows=held.coords).key
    if isinstance(coordinates, CoordinateKey):
        return x.manager.key_of(coordinates)
    return None


def forward(
    x: SparseTensor, coordinates: Coordinates, support: str, **kernel
) -> Relation:
    """Return the forward relation, or the one onto the rows of ``coordinates``."""
    if coordinates is None:
        return x.manager.kernel_relation(x.key, support=support, **kernel)
    target = target_key(x, coordinates, kernel["stride"], is_finer=False)
    return x.manager.target_kernel_relation(x.key, target, **kernel)


def submanifold(x: SparseTensor, _: None, **kernel) -> Relation:
    """Return the relation of the rows to themselves."""
    return x.manager.submanifold_kernel_relation(x.key, **kernel)


def transposed(
    x: SparseTensor, coordinates: Coordinates, generative: bool = False, **kernel
) -> Relation:
    """Return the transposed relation onto ``coordinates``.

    By default onto the finer set, or onto all that it reaches if ``generative``.
    """
    if generative and coordinates is None:
        return x.manager.generative_relation(x.key, **kernel)
    target = target_key(x, coordinates, kernel["stride"], is_finer=True)
    return x.manager.transposed_kernel_relation(x.key, target, **kernel)


def finer_key(
    x: SparseTensor, coordinates: Coordinates, scale: tuple[int, ...]
) -> CoordinateKey:
    """Return the key of ``coordinates``, by default of what ``x`` was made of."""
    key = target_key(x, coordinates, scale, is_finer=True)
    return x.manager.finer(x.key, scale) if key is None else key


def target_key(
    x: SparseTensor, coordinates: Coordinates, stride, is_finer: bool
) -> CoordinateKey | None:
    """Return the target's key, giving bare rows the stride that the step implies.

    Raises:
        ValueError: rows of the tensor's own manager have another stride: they count
            other cells. Those of another manager count from another first lattice.
    """
    if coordinates is None:
        return None
    steps = per_axis(stride, x.dims, "stride")
    target = finer(x.stride, steps) if is_finer else coarser(x.stride, steps)
    key = known_key(x, coordinates)
    if key is not None:
        is_own = getattr(coordinates, "manager", x.manager) is x.manager
        counts = is_own and len(key.stride) == x.dims and len(x.manager[key])
        if counts and key.stride != target:
            raise ValueError(
                f"rows of stride {stride_text(target)} are computed of {x.key!r}; got "
                f"coordinates of stride {stride_text(key.stride)}, which count other "
                "cells: give those of that stride, or bare rows"
            )
        return key
    coordinates = array_of(coordinates, "coordinates")
    if coordinates.ndim != 2 or coordinates.shape[1] != 1 + x.dims:
        raise ValueError(
            f"coordinates must have shape (M, {1 + x.dims}), a batch index and "
            f"{x.dims} spatial ones a row; got {tuple(coordinates.shape)}"
        )
    return x.manager.inserted(coordinates, target, batch_size=x.batch_size).key
