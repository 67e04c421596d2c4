"""Kernel maps of spconv's layers, as relations of mlx_lattice.

Rows may repeat, as those of two mixed scans do. Then relations are built between the
different rows, and spread over the repeats: a submanifold layer sees the first of equal
rows as a neighbour and each row as its own centre; a layer that makes rows adds the
features of equal rows, and its inverse gives all of them the same value.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import mlx.core as mx
import torch

from ....coordinates import CoordinateManager
from ....relation import Relation
from ... import bridge
from .core import Lattice, Repeats, SparseConvTensor, lattice_of, repeat_of, rows_of

VANISHED = (
    "no input reaches an output row: spatial_shape={}, ksize={}, stride={}, "
    "padding={}, dilation={}. Enlarge the spatial shape or the padding"
)


def identity(rows: int) -> Relation:
    """Return the relation of a kernel of one, from each row to itself."""
    place = mx.arange(rows, dtype=mx.int32)
    coords = mx.stack([mx.zeros_like(place), place], axis=1)
    manager = CoordinateManager()
    key = manager.insert(coords, trusted=True)
    return manager.submanifold_kernel_relation(key, kernel_size=1)


def between_different_rows(
    x: SparseConvTensor, build: Callable[[Lattice], Relation]
) -> tuple[Relation, Lattice]:
    """Return a relation of the different rows of a tensor, and their lattice."""
    lattice = lattice_of(x)
    try:
        return build(lattice), lattice
    except ValueError:
        lattice = repeat_of(x, lattice)
        if lattice is None:
            raise
        return build(lattice), lattice


def submanifold_rows(
    x: SparseConvTensor, kernel_size: list[int], dilation: list[int]
) -> tuple[Relation, Lattice]:
    """Return the submanifold relation of the different rows, and their lattice."""

    def build(lattice: Lattice) -> Relation:
        return lattice.manager.submanifold_kernel_relation(
            lattice.key, kernel_size=kernel_size, dilation=dilation
        )

    return between_different_rows(x, build)


def submanifold(
    x: SparseConvTensor, kernel_size: list[int], dilation: list[int]
) -> Relation:
    """Return the relation of a submanifold layer on all rows."""
    relation, lattice = submanifold_rows(x, kernel_size, dilation)
    if lattice.repeats is None:
        return relation
    return lattice.repeats.spread(relation, _spread_submanifold)


def strided_rows(
    x: SparseConvTensor, shape: list[int], transposed: bool, kernel: tuple[Any, ...]
) -> tuple[Relation, Lattice, torch.Tensor]:
    """Return a relation of the different rows, their lattice, and the output's rows.

    Args:
        x: the input.
        shape: spatial shape of the output.
        transposed: whether the layer is a transposed convolution.
        kernel: kernel_size, stride, padding and dilation.

    Raises:
        ValueError: no input reaches an output row.
    """
    names = "kernel_size", "stride", "padding", "dilation"
    options = dict(zip(names, kernel, strict=True))

    def build(lattice: Lattice) -> Relation:
        if transposed:
            return lattice.manager.generative_relation(lattice.key, **options)
        return lattice.manager.kernel_relation(lattice.key, support="reach", **options)

    relation, lattice = between_different_rows(x, build)
    if relation.n_in and not relation.n_out:
        raise ValueError(VANISHED.format(x.spatial_shape, *kernel))
    made = Lattice(lattice.manager, relation.out_key)
    return relation, lattice, rows_of(made, shape, x.batch_size, x.indices)


def over_repeats(relation: Relation, lattice: Lattice) -> Relation:
    """Return the relation of a layer that makes rows on all rows of the input."""
    if lattice.repeats is None:
        return relation
    return lattice.repeats.spread(relation, _spread_strided)


def _spread_submanifold(relation: Relation, repeats: Repeats) -> Relation:
    first, of = repeats.first.cpu(), repeats.inverse.cpu()
    table = bridge.to_torch(relation.out_in, copy=True).long()
    table = torch.where(table < 0, table, first[table])[of]
    table[:, relation.volume // 2] = torch.arange(len(of))
    rows, offsets = (table >= 0).nonzero(as_tuple=True)
    sizes = len(of), len(of)
    return _of_edges(table[rows, offsets], rows, offsets, sizes, relation.volume)


def _spread_strided(relation: Relation, repeats: Repeats) -> Relation:
    of = repeats.inverse.cpu()
    table = bridge.to_torch(relation.in_out, copy=True).long()[of]
    rows, offsets = (table >= 0).nonzero(as_tuple=True)
    sizes = len(of), relation.n_out
    return _of_edges(rows, table[rows, offsets], offsets, sizes, relation.volume)


def _of_edges(in_rows, out_rows, offsets, sizes: tuple[int, int], volume: int):
    edges = bridge.to_mlx(in_rows.int(), out_rows.int(), offsets.int(), copy=True)
    return Relation.from_edges(*edges, *sizes, volume)
