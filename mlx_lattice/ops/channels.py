"""Sparse pixel shuffle: fine cells become channels of their coarse cell, and back.

Nothing is added or multiplied: both directions are one gather, and each is the other's
transpose, so derivatives of every order are again one of them.
"""

from __future__ import annotations

from math import prod
from typing import NamedTuple

import mlx.core as mx

from ..arrays import array_of
from ..backends import registry
from ..coordinate_set import CoordinateKey, CoordinateSet, OfPairs, finer
from ..geometry import lattice, sync
from ..geometry.keys import INT32_LIMIT
from ..geometry.unique import true_positions
from ..kernel_spec import IntOrTuple, per_axis
from ..reductions import inverted, move_rows
from ..tensor import SparseTensor, expect_tensor
from .relations import target_key

__all__ = ["channel_to_space", "space_to_channel"]

ORDERS = ("last", "first")


class Slots(NamedTuple):
    """Which fine row belongs into which slot of the coarse rows.

    Slot ``coarse row * K + offset`` holds at most one fine row.
    """

    slot: mx.array  # (N_fine,) the slot of each fine row, or -1; int32 if that holds
    row: mx.array  # (N_coarse * K,) int32: the fine row of each slot, or -1
    whole: bool  # whether every fine row is known to have a slot


_slots = OfPairs()  # of the coarse and the fine set, by factor and order


def space_to_channel(
    x: SparseTensor, factor: IntOrTuple = 2, *, order: str = "last"
) -> SparseTensor:
    """Gather the rows of each coarse cell into the channels of one row.

    The sparse form of PyTorch's ``pixel_unshuffle``; TRELLIS.2's Spatial2Channel.

    Args:
        x: (N, C) features in 1 to 4 spatial axes.
        factor: fine cells in a coarse one, int or one per axis; K is their product.
        order: which axis of a fine cell's offset counts fastest: "last", as in kernels
            and dense arrays, or "first", as in TRELLIS.2.

    Returns:
        (M, K * C) features in the same dtype on the sorted unique cells
        ``floor(row / factor)``: channel ``k * C + c`` is channel c of the fine cell at
        offset k, or 0 where that is not active. Coordinates and key are those of a
        convolution with that stride.

    Raises:
        ValueError: ``factor`` or ``order`` is not possible.
    """
    factor = _check(x, factor, order)
    relation = x.manager.kernel_relation(
        x.key, kernel_size=factor, stride=factor, padding=0
    )
    fine, coarse = relation.keys
    slots = _slots_of(x, coarse, fine, factor, order, whole=True)
    feats = move_rows(x.feats, slots.row, slots.slot)
    width = prod(factor) * x.channels
    held = x.manager[coarse]
    return SparseTensor.of(x.manager, coarse, feats.reshape(len(held), width))


def channel_to_space(
    x: SparseTensor,
    factor: IntOrTuple = 2,
    *,
    subdivision: mx.array | None = None,
    coordinates: SparseTensor | CoordinateKey | mx.array | None = None,
    order: str = "last",
) -> SparseTensor:
    """Move the channels of each row to its fine cells.

    The sparse form of PyTorch's ``pixel_shuffle``; TRELLIS.2's Channel2Spatial. Given
    the rows that ``space_to_channel`` came from, it is its inverse.

    Args:
        x: (N, K * C) features in 1 to 4 spatial axes.
        factor: fine cells in a coarse one, int or one per axis; K is their product.
        subdivision: (N, K) bool: the fine cells that each row becomes. Reads their
            number.
        coordinates: the fine rows, as a tensor, a key or (M, 1 + D) int32 rows; they
            keep their order. Without it and ``subdivision`` every row becomes K.
        order: as for ``space_to_channel``.

    Returns:
        (M, C) features in the same dtype; rows that the library makes are sorted and
        unique. A row of ``coordinates`` whose coarse cell is not active is 0.

    Raises:
        ValueError: K does not divide the channels, shapes do not fit, both sets are
            given, or a row would lie beyond int32.
    """
    volume = prod(_check(x, factor, order))
    if x.channels % volume:
        raise ValueError(
            f"channel_to_space needs a multiple of {volume} channels for factor "
            f"{factor}; got {x.channels}"
        )
    fine, slots = fine_slots(
        x, factor, subdivision=subdivision, coordinates=coordinates, order=order
    )
    parts = x.feats.reshape(len(x) * volume, x.channels // volume)
    feats = move_rows(parts, slots.slot, slots.row, slots.whole)
    return SparseTensor.of(x.manager, fine, feats)


def fine_slots(
    x: SparseTensor,
    factor: IntOrTuple = 2,
    *,
    subdivision: mx.array | None = None,
    coordinates: SparseTensor | CoordinateKey | mx.array | None = None,
    order: str = "last",
) -> tuple[CoordinateKey, Slots]:
    """Return the fine rows of ``channel_to_space``, and the slots of both sets.

    Arguments are as there; the features of ``x`` are not read.
    """
    factor = _check(x, factor, order)
    if subdivision is not None and coordinates is not None:
        raise ValueError("pass subdivision or coordinates, not both")
    if subdivision is not None:
        fine, slots = _subdivide(x, subdivision, factor, order)
    elif coordinates is not None:
        fine = _fine_key(x, coordinates, factor)
        slots = _slots_of(x, x.key, fine, factor, order)
    else:
        relation = x.manager.generative_relation(
            x.key, kernel_size=factor, stride=factor, padding=0
        )
        fine = relation.out_key
        slots = _slots_of(x, x.key, fine, factor, order, whole=True)
    return fine, slots


def forget_slots(coarse: CoordinateSet) -> None:
    """Drop what is kept of a coarse set's slots; it is found again when asked for."""
    _slots.forget(coarse)


def _check(x: SparseTensor, factor: IntOrTuple, order: str) -> tuple[int, ...]:
    expect_tensor(x, flags=True)
    if order not in ORDERS:
        raise ValueError(f"order must be one of {ORDERS}; got {order!r}")
    return per_axis(factor, x.dims, "factor")


def _steps(factor: tuple[int, ...], order: str) -> list[int]:
    """Return how far one step along each axis moves the offset's number."""
    if order == "first":
        return [prod(factor[:axis]) for axis in range(len(factor))]
    return [prod(factor[axis + 1 :]) for axis in range(len(factor))]


def _slots_of(
    x: SparseTensor,
    coarse: CoordinateKey,
    fine: CoordinateKey,
    factor: tuple[int, ...],
    order: str,
    whole: bool = False,
) -> Slots:
    """Return the slots of a fine in a coarse set; computed once for each pair."""
    above, below = x.manager[coarse], x.manager[fine]
    known, made = _slots.of(above, below), (factor, order)
    if made not in known:
        below.index  # noqa: B018 (two equal rows would want one slot)
        cells = lattice.cells(below.coords, factor)
        inside = below.coords[:, 1:] - cells[:, 1:] * mx.array(factor)
        offset = (inside * mx.array(_steps(factor, order))).sum(axis=1)
        place = above.index.find(cells).astype(mx.int64)
        slot = mx.where(place >= 0, place * prod(factor) + offset, -1)
        known[made] = _invert(slot, len(above) * prod(factor), whole)
    return known[made]


def _invert(slot: mx.array, count: int, whole: bool) -> Slots:
    row = inverted(slot, count)
    slot = slot if count > INT32_LIMIT else slot.astype(mx.int32)
    return sync.complete(Slots(slot, row, whole))


def _subdivide(
    x: SparseTensor, subdivision: mx.array, factor: tuple[int, ...], order: str
) -> tuple[CoordinateKey, Slots]:
    """Return a new set of the chosen fine cells, and their slots."""
    source, volume = x.coordinate_set, prod(factor)
    subdivision = array_of(subdivision, "subdivision")
    if tuple(subdivision.shape) != (len(x), volume) or subdivision.dtype != mx.bool_:
        raise ValueError(
            f"subdivision must be ({len(x)}, {volume}) bool, one value for each fine "
            f"cell of a row; got {tuple(subdivision.shape)} of {subdivision.dtype}"
        )
    source.index  # noqa: B018 (equal rows would make equal cells)
    # Where the mask depends on what is differentiated, it still is a choice.
    at = true_positions(mx.stop_gradient(subdivision).flatten())
    offset, steps = at % volume, _steps(factor, order)
    digits = [offset // s % f for s, f in zip(steps, factor, strict=True)]
    digits = mx.stack([mx.zeros_like(offset), *digits], axis=1)
    rows = lattice.scaled(source.coords, factor)[at // volume] + digits
    unique = registry.geometry().unique_rows(lattice.as_int32(rows, "channel_to_space"))
    shape = source.spatial_shape
    if shape is not None:
        shape = tuple(n * f for n, f in zip(shape, factor, strict=True))
    fine = x.manager.inserted(
        unique.rows,
        finer(x.stride, factor),
        spatial_shape=shape,
        batch_size=x.batch_size,
        trusted=True,
    )
    # Cells of distinct rows are distinct: the inverse is a permutation.
    slot = at[mx.argsort(unique.inverse)]
    slots = _invert(slot, len(x) * volume, whole=True)
    _slots.of(source, fine)[factor, order] = slots
    return fine.key, slots


def _fine_key(x: SparseTensor, coordinates, factor: tuple[int, ...]) -> CoordinateKey:
    key = target_key(x, coordinates, factor, is_finer=True)
    columns = x.manager[key].coords.shape[1]
    if columns != 1 + x.dims:
        raise ValueError(
            f"coordinates have {columns - 1} spatial axes, the tensor {x.dims}; both "
            "must have the same number"
        )
    return key
