"""spconv.pytorch.core: the sparse tensor, and what a layer stores under its key."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from math import prod
from typing import Any, NamedTuple

import numpy as np
import torch

from ....coordinate_set import CoordinateKey
from ....coordinates import CoordinateManager
from ....relation import Relation
from ... import bridge
from ..core import ConvAlgo

__all__ = ["IndiceData", "ImplicitGemmIndiceData", "SparseConvTensor", "expand_nd"]


# Rows that mlx_lattice knows


class Repeats:
    """Which rows of a tensor are equal.

    Attributes:
        first: (U,) the first row of each different one.
        inverse: (N,) the different row of each row.
    """

    def __init__(self, first: torch.Tensor, inverse: torch.Tensor):
        self.first: torch.Tensor = first
        self.inverse: torch.Tensor = inverse
        self._spread: dict[int, tuple[Relation, Relation]] = {}

    def spread(self, relation: Relation, build: Callable[..., Any]) -> Relation:
        """Return the relation of all rows that ``build`` makes, built once."""
        if id(relation) not in self._spread:
            self._spread[id(relation)] = relation, build(relation, self)
        return self._spread[id(relation)][1]


class Lattice(NamedTuple):
    """Coordinates of a tensor in this library.

    Attributes:
        manager: builds relations between its sets, each once.
        key: of the rows in the manager; of the different ones if some repeat.
        repeats: which rows repeat, or None.
    """

    manager: CoordinateManager
    key: CoordinateKey
    repeats: Repeats | None = None


# By spatial shape and batch size the lattices of a tensor of indices.
_lattices = bridge.ByTensor[dict[tuple, Lattice]](lambda _: {})


def lattice_of(x: SparseConvTensor) -> Lattice:
    """Return the lattice of a tensor's rows; tensors of the same rows share it.

    Building a relation raises a ValueError if rows repeat, see ``repeat_of``, or lie
    outside of the spatial shape or the batch.
    """
    facts, lattices = (tuple(x.spatial_shape), int(x.batch_size)), _lattices[x.indices]
    if facts not in lattices:
        lattices[facts] = _inserted(x.indices, facts)
    return lattices[facts]


def _inserted(
    indices: torch.Tensor, facts: tuple, repeats: Repeats | None = None
) -> Lattice:
    (coords,) = bridge.to_mlx(indices.int(), copy=True)
    manager, (shape, size) = CoordinateManager(), facts
    key = manager.insert(coords, spatial_shape=shape, batch_size=size)
    return Lattice(manager, key, repeats)


def repeat_of(x: SparseConvTensor, lattice: Lattice) -> Lattice | None:
    """Return the lattice of a tensor's different rows; None if no rows repeat.

    Args:
        x: the tensor.
        lattice: its lattice, of which a relation could not be built.
    """
    if lattice.manager[lattice.key].repeat is None:
        return None
    indices, facts = x.indices, (tuple(x.spatial_shape), int(x.batch_size))
    _, inverse = torch.unique(indices, dim=0, return_inverse=True)
    place = torch.arange(len(indices), device=indices.device)
    first = torch.full_like(place[: int(inverse.max()) + 1], len(indices))
    first = first.scatter_reduce(0, inverse, place, "amin")
    made = _inserted(indices[first], facts, Repeats(first, inverse))
    _lattices[indices][facts] = made
    return made


def rows_of(
    lattice: Lattice, shape: Sequence[int], batch_size: int, like: torch.Tensor
) -> torch.Tensor:
    """Return the indices of rows that the library made, on the device of others."""
    with torch.inference_mode(False):
        coords = lattice.manager[lattice.key].coords
        indices = bridge.to_torch(coords, like.device, copy=True)
    _lattices[indices][tuple(shape), int(batch_size)] = lattice
    return indices


# spconv's classes


class IndiceData:
    """What a layer with an ``indice_key`` stores: its rows and its relation.

    Attributes:
        out_indices, indices: rows of the output and of the input.
        relation: the kernel map, of mlx_lattice, from input to output.
        spatial_shape, out_spatial_shape: of input and output.
        is_subm: whether the layer is submanifold.
        algo: the layer's, which has no effect.
        ksize, stride, dilation, padding: the layer's.
        voxel_num: None.
    """

    voxel_num = None

    def __init__(
        self,
        out_indices: torch.Tensor,
        indices: torch.Tensor,
        relation: Relation,
        spatial_shape: list[int],
        out_spatial_shape: list[int],
        is_subm: bool,
        algo: ConvAlgo | None,
        ksize: list[int],
        stride: list[int],
        dilation: list[int],
        padding: list[int],
    ):
        self.out_indices: torch.Tensor = out_indices
        self.indices: torch.Tensor = indices
        self.relation: Relation = relation
        self.spatial_shape: list[int] = spatial_shape
        self.out_spatial_shape: list[int] = out_spatial_shape
        self.is_subm: bool = is_subm
        self.algo: ConvAlgo | None = algo
        self.ksize: list[int] = ksize
        self.stride: list[int] = stride
        self.dilation: list[int] = dilation
        self.padding: list[int] = padding

    @property
    def indice_pairs(self) -> torch.Tensor:
        """(2, K, N_in) int32: input and output rows by offset, -1 behind them."""
        relation = self.relation
        edges = bridge.to_torch(relation.edges).long()
        counts = self.indice_pair_num.long()
        starts = torch.cumsum(counts, 0) - counts
        place = torch.arange(len(edges)) - starts[edges[:, 2]]
        width = max(relation.n_in, relation.n_out)
        pairs = torch.full((2, relation.volume, width), -1, dtype=torch.int32)
        pairs[:, edges[:, 2], place] = edges[:, :2].T.int()
        return pairs.to(self.indices.device)

    @property
    def indice_pair_num(self) -> torch.Tensor:
        """(K,) int32: pairs of each offset."""
        return torch.tensor(self.relation.edge_counts, dtype=torch.int32)


ImplicitGemmIndiceData = IndiceData


def scatter_nd(
    indices: torch.Tensor, updates: torch.Tensor, shape: Sequence[int]
) -> torch.Tensor:
    """Return zeros with rows of updates at places; of repeated places one row stays."""
    result = updates.new_zeros(list(shape))
    result[tuple(indices.long().unbind(-1))] = updates
    return result


class SparseConvTensor:
    """Features on rows of coordinates.

    Args:
        features: (N, C).
        indices: (N, 1 + D) int32: batch index, then coordinates, each below its extent
            of ``spatial_shape``. Rows must not repeat.
        spatial_shape: D extents of the dense grid.
        batch_size: number of batch elements.
        grid, voxel_num: kept, without an effect.
        indice_dict: relations by ``indice_key``.
        benchmark, permanent_thrust_allocator, enable_timer, force_algo: ignored.
    """

    thrust_allocator: None
    int8_scale: None

    def __init__(
        self,
        features: torch.Tensor,
        indices: torch.Tensor,
        spatial_shape: Sequence[int] | np.ndarray,
        batch_size: int,
        grid: torch.Tensor | None = None,
        voxel_num: torch.Tensor | None = None,
        indice_dict: dict[str, Any] | None = None,
        benchmark: bool = False,
        permanent_thrust_allocator: bool = False,
        enable_timer: bool = False,
        force_algo: ConvAlgo | None = None,
    ):
        expect(features.ndim == 2, f"features must be (N, C); got {features.shape}")
        expect(indices.ndim == 2, f"indices must be (N, 1 + D); got {indices.shape}")
        dims = indices.shape[1] - 1
        expect(
            len(spatial_shape) == dims,
            f"spatial_shape must have {dims} extents, one for each column of indices "
            f"after the first; got {len(spatial_shape)}",
        )
        expect(
            indices.dtype == torch.int32,
            f"indices must be int32; got {indices.dtype}. Cast them with .int()",
        )
        expect(batch_size > 0, f"batch_size must be positive; got {batch_size}")
        self._features = features
        self.indices = indices
        self.spatial_shape: list[int] = [int(extent) for extent in spatial_shape]
        self.batch_size = batch_size
        self.indice_dict: dict[str, Any] = {} if indice_dict is None else indice_dict
        self.grid: torch.Tensor = torch.Tensor() if grid is None else grid
        self.voxel_num = voxel_num
        self.benchmark: bool = benchmark
        self.benchmark_record: dict[Any, Any] = {}
        self.thrust_allocator = self._timer = self.int8_scale = None
        self.force_algo = force_algo

    def __repr__(self) -> str:
        return f"{type(self).__name__}[shape={self._features.shape}]"

    @property
    def features(self) -> torch.Tensor:
        """(N, C); put others on the rows with ``replace_feature``."""
        return self._features

    @features.setter
    def features(self, value: torch.Tensor) -> None:
        raise ValueError(
            "features cannot be assigned; use x = x.replace_feature(features) instead"
        )

    def _with(self, features: torch.Tensor) -> SparseConvTensor:
        """Return a tensor with all attributes of this one but its features."""
        made = type(self).__new__(type(self))
        made.__dict__.update(self.__dict__)
        made._features = features
        return made

    def replace_feature(self, feature: torch.Tensor) -> SparseConvTensor:
        """Return other features on the same rows, with the same ``indice_dict``."""
        return self._with(feature)

    def shadow_copy(self) -> SparseConvTensor:
        """Return a tensor with the same attributes."""
        return self._with(self._features)

    def select_by_index(self, valid_indices: torch.Tensor) -> SparseConvTensor:
        """Return some of the rows, by indices or a mask; stored relations are left."""
        made = self._with(self._features[valid_indices])
        made.indices, made.indice_dict = self.indices[valid_indices], {}
        return made

    def minus(self) -> SparseConvTensor:
        """Return the tensor with its features negated."""
        return self.replace_feature(-self.features)

    @classmethod
    def from_dense(cls, x: torch.Tensor) -> SparseConvTensor:
        """Return the cells of a (B, spatial..., C) tensor that are not all zero."""
        indices = (x.detach() != 0).any(dim=-1).nonzero().int()
        features = x[tuple(indices.long().unbind(1))]
        return cls(features, indices, x.shape[1:-1], x.shape[0])

    @property
    def is_quantized(self) -> bool:
        """Whether features are of PyTorch's qint8, which is not computed with."""
        return self.features.dtype == torch.qint8

    @property
    def spatial_size(self) -> int:
        """Cells of the dense grid."""
        return prod(self.spatial_shape)

    @property
    def sparity(self) -> float:
        """Share of the dense grid's cells that are active."""
        return self.indices.shape[0] / self.spatial_size / self.batch_size

    def find_indice_pair(self, key: str | None) -> IndiceData | None:
        """Return what a layer stored under a key, or None."""
        return None if key is None else self.indice_dict.get(key)

    def dense(self, channels_first: bool = True) -> torch.Tensor:
        """Return the contiguous (B, C, spatial...) tensor, or one with C last.

        Rows that repeat are not added: one of them stays.
        """
        shape = self.batch_size, *self.spatial_shape, self.features.shape[1]
        result = scatter_nd(self.indices.to(self.features.device), self.features, shape)
        return result.movedim(-1, 1).contiguous() if channels_first else result

    def __add__(self, other: SparseConvTensor | torch.Tensor) -> SparseConvTensor:
        expect(
            isinstance(other, SparseConvTensor | torch.Tensor),
            f"a tensor can be added to a sparse one; got {type(other).__name__}",
        )
        values = getattr(other, "features", other)
        return self.replace_feature(self.features + values)

    __radd__ = __iadd__ = __add__


def expect(is_so: bool, message: str) -> None:
    """Raise an AssertionError, as spconv does."""
    if not is_so:
        raise AssertionError(message)


def expand_nd(ndim: int, value: int | Sequence[int] | np.ndarray) -> list[int]:
    """Return one int for each axis."""
    values = [value] * ndim if isinstance(value, int) else list(value)
    expect(len(values) == ndim, f"expected {ndim} values, one an axis; got {value}")
    return [int(each) for each in values]
