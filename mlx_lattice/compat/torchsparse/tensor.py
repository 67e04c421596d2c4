"""SparseTensor and PointTensor, and the kernel maps that tensors share."""

from __future__ import annotations

from collections.abc import Sequence
from enum import Enum
from typing import Any

import numpy as np
import torch

from ...coordinate_set import CoordinateKey
from ...coordinates import CoordinateManager
from .. import bridge
from .points import IntOrSequence, expect, make_ntuple

__all__ = [
    "PointTensor", "SparseTensor", "TensorCache", "TensorCacheMode", "cat",
    "clear_global_tensor_cache", "generative_add", "get_allow_negative_coordinates",
    "get_global_tensor_cache", "get_tensor_cache_mode",
    "set_allow_negative_coordinates", "set_global_tensor_cache",
    "set_tensor_cache_mode", "sparse_collate", "sparse_collate_fn", "to_dense",
]  # fmt: skip


class KernelMaps(dict[Any, Any]):
    """Kernel maps by stride and kernel, and the rows that mlx_lattice has of them.

    Attributes:
        manager: builds relations.
    """

    def __init__(self):
        super().__init__()
        self.manager: CoordinateManager = CoordinateManager()
        self._keys: dict[tuple, tuple[torch.Tensor, CoordinateKey]] = {}

    def __reduce__(self) -> tuple[Any, ...]:
        # A copy, as the worker of a data loader sends it, builds maps of its own.
        return KernelMaps, ()

    def key_of(
        self,
        stride: tuple[int, ...],
        coords: torch.Tensor,
        cells: torch.Tensor,
        **facts: Any,
    ) -> CoordinateKey:
        """Return the key of rows at a stride, inserted unless they are known.

        Args:
            stride: the tensor stride.
            coords: the tensor's own coordinates, by which they are known.
            cells: (N, 4) int32, the batch index first, in cells of the stride.
            **facts: of ``CoordinateManager.insert``.
        """
        known, key = self._keys.get(stride, (None, None))
        if known is not coords:
            (rows,) = bridge.to_mlx(cells, copy=True)
            key = self.manager.insert(rows, **facts)
            self._keys[stride] = coords, key
        return key

    def note(
        self, stride: tuple[int, ...], coords: torch.Tensor, key: CoordinateKey
    ) -> None:
        """Note that rows at a stride are a set of the manager."""
        self._keys[stride] = coords, key


def kernel_maps(maps: dict[Any, Any]) -> KernelMaps:
    """Return kernel maps as they are; a plain dict of a user shares no rows."""
    return maps if isinstance(maps, KernelMaps) else KernelMaps()


class TensorCache:
    """What tensors that come from each other share; users add attributes.

    Attributes:
        cmaps: coordinates and spatial range by tensor stride.
        kmaps: kernel maps by tensor stride, kernel size, stride and dilation.
        hashmaps: empty.
    """

    def __init__(self):
        self.cmaps: dict[Any, Any] = {}
        self.kmaps: dict[Any, Any] = KernelMaps()
        self.hashmaps: dict[Any, Any] = {}


class TensorCacheMode(Enum):
    """Whether all tensors share one cache."""

    SEPARATE_TENSOR_CACHE = 0
    GLOBAL_TENSOR_CACHE = 1


class _Global:
    mode = TensorCacheMode.SEPARATE_TENSOR_CACHE
    cache: TensorCache | None = None
    allow_negative = False


def set_tensor_cache_mode(mode: TensorCacheMode) -> None:
    """Choose whether all new tensors share one cache."""
    expect(
        isinstance(mode, TensorCacheMode), f"expected a TensorCacheMode; got {mode!r}"
    )
    _Global.mode = mode


def get_tensor_cache_mode() -> TensorCacheMode:
    """Return the mode in use."""
    return _Global.mode


def get_global_tensor_cache() -> TensorCache | None:
    """Return the cache that all tensors share, if there is one."""
    return _Global.cache


def set_global_tensor_cache(tensor_cache: TensorCache | None) -> None:
    """Set the cache that all tensors share."""
    _Global.cache = tensor_cache


def clear_global_tensor_cache() -> None:
    """Drop the cache that all tensors share."""
    _Global.cache = None


def get_allow_negative_coordinates() -> bool:
    """Return what was set."""
    return _Global.allow_negative


def set_allow_negative_coordinates(allow_negative_coordinates: bool) -> None:
    """Keep the choice; negative coordinates are read right whatever it is."""
    _Global.allow_negative = allow_negative_coordinates


class Sparse:
    """What the tensors of both versions share.

    Attributes:
        feats: (N, C).
        coords: (N, 4) int32.
        stride: the tensor stride.
        batch_column: column of the batch index.
    """

    batch_column = 0
    feats: torch.Tensor
    coords: torch.Tensor
    stride: tuple[int, ...]

    @property
    def F(self) -> torch.Tensor:  # noqa: N802 (torchsparse's own)
        """The features."""
        return self.feats

    @F.setter
    def F(self, feats: torch.Tensor) -> None:  # noqa: N802
        self.feats = feats

    @property
    def C(self) -> torch.Tensor:  # noqa: N802
        """The coordinates."""
        return self.coords

    @C.setter
    def C(self, coords: torch.Tensor) -> None:  # noqa: N802
        self.coords = coords

    @property
    def s(self) -> tuple[int, ...]:
        """The tensor stride."""
        return self.stride

    @s.setter
    def s(self, stride: IntOrSequence) -> None:
        self.stride = make_ntuple(stride, 3)

    @property
    def batch(self) -> torch.Tensor:
        """(N,) int64 batch indices."""
        return self.coords[:, self.batch_column].long()

    def _like(self, feats: torch.Tensor) -> Sparse:
        """Return other features on the same rows, with what this tensor shares."""
        raise NotImplementedError

    # These change the tensor, as in torchsparse

    def to(self, device: torch.device | str, non_blocking: bool = True) -> Sparse:
        """Move this tensor and return it."""
        self.feats = self.feats.to(device, non_blocking=non_blocking)
        self.coords = self.coords.to(device, non_blocking=non_blocking)
        return self

    def cpu(self) -> Sparse:
        """Move this tensor to the CPU and return it."""
        return self.to("cpu")

    def cuda(self) -> Sparse:
        """Move this tensor to CUDA and return it."""
        return self.to("cuda")

    def half(self) -> Sparse:
        """Cast the features of this tensor and return it."""
        self.feats = self.feats.half()
        return self

    def detach(self) -> Sparse:
        """Detach this tensor and return it."""
        self.feats, self.coords = self.feats.detach(), self.coords.detach()
        return self

    def __add__(self, other: Sparse) -> Sparse:
        return self._like(self.feats + other.feats)


class SparseTensor(Sparse):
    """Features on rows of coordinates, of torchsparse 2.1.

    Args:
        feats: (N, C).
        coords: (N, 4) int32: batch, x, y, z, in cells of the tensor stride: at stride 2
            they are 0, 1, 2.
        stride: the tensor stride, an int or one for each axis.
        spatial_range: batch size and extents of a dense grid.
    """

    def __init__(
        self,
        feats: torch.Tensor,
        coords: torch.Tensor,
        stride: IntOrSequence = 1,
        spatial_range: Sequence[int] | None = None,
    ):
        self.feats: torch.Tensor = feats
        self.coords: torch.Tensor = coords
        self.stride: tuple[int, ...] = make_ntuple(stride, 3)
        self.spatial_range: tuple[int, ...] | None = None
        if spatial_range is not None:
            self.spatial_range = make_ntuple(spatial_range, len(spatial_range))
        if _Global.mode is TensorCacheMode.GLOBAL_TENSOR_CACHE:
            _Global.cache = _Global.cache or TensorCache()
            self._caches = _Global.cache
        else:
            self._caches = TensorCache()

    def _like(self, feats: torch.Tensor) -> SparseTensor:
        made = SparseTensor(feats, self.coords, self.stride, self.spatial_range)
        made._caches = self._caches
        return made

    @staticmethod
    def _of(feats: torch.Tensor, coords: torch.Tensor, stride) -> SparseTensor:
        return SparseTensor(feats, coords, stride)

    def dense(self) -> torch.Tensor:
        """Return the (B, X, Y, Z, C) tensor of the spatial range."""
        expect(self.spatial_range is not None, "dense() needs spatial_range=")
        return to_dense(self.feats, self.coords, self.spatial_range)


def to_dense(
    feats: torch.Tensor, coords: torch.Tensor, spatial_range: Sequence[int]
) -> torch.Tensor:
    """Return zeros of a spatial range with features at their rows, channels last."""
    made = feats.new_zeros((*spatial_range, feats.shape[1]))
    return made.index_put(tuple(coords.long().unbind(1)), feats)


class PointTensor:
    """Features of points, with what was found for them.

    Args:
        feats: (N, C).
        coords: (N, 4) float.
        idx_query, weights: dicts by tensor stride.
    """

    def __init__(
        self,
        feats: torch.Tensor,
        coords: torch.Tensor,
        idx_query: dict[Any, Any] | None = None,
        weights: dict[Any, Any] | None = None,
    ):
        self.F, self.C = feats, coords
        self.idx_query: dict[Any, Any] = {} if idx_query is None else idx_query
        self.weights: dict[Any, Any] = {} if weights is None else weights
        self.additional_features: dict[str, Any] = {"idx_query": {}, "counts": {}}

    def to(self, device: torch.device | str, non_blocking: bool = True) -> PointTensor:
        """Move this tensor and return it."""
        self.F = self.F.to(device, non_blocking=non_blocking)
        self.C = self.C.to(device, non_blocking=non_blocking)
        return self

    def cuda(self) -> PointTensor:
        """Move this tensor to CUDA and return it."""
        return self.to("cuda")

    def detach(self) -> PointTensor:
        """Detach this tensor and return it."""
        self.F, self.C = self.F.detach(), self.C.detach()
        return self

    def __add__(self, other: PointTensor) -> PointTensor:
        made = PointTensor(self.F + other.F, self.C, self.idx_query, self.weights)
        made.additional_features = self.additional_features
        return made


def cat(inputs: Sequence[Sparse]) -> Sparse:
    """Join the channels of tensors, on the rows of the first; rows are not compared."""
    made = inputs[0]._like(torch.cat([each.feats for each in inputs], dim=1))
    if isinstance(made, SparseTensor):
        made.spatial_range = None  # as in torchsparse
    return made


def generative_add(a: SparseTensor, b: SparseTensor) -> SparseTensor:
    """Add tensors on the rows that either has, sorted."""
    more, less = (a, b) if len(a.feats) >= len(b.feats) else (b, a)
    coords = torch.cat([more.coords, less.coords])
    coords, place = torch.unique(coords, dim=0, return_inverse=True)
    feats = torch.cat([more.feats, less.feats])
    sums = feats.new_zeros((len(coords), feats.shape[1])).index_add(0, place, feats)
    made = SparseTensor(sums, coords, more.stride, more.spatial_range)
    made._caches = more._caches
    return made


# Batches


def sparse_collate(inputs: Sequence[Sparse]) -> Sparse:
    """Return a batch of tensors whose coordinates have no batch index."""
    first, coords, feats = inputs[0], [], []
    for number, x in enumerate(inputs):
        rows, values = torch.as_tensor(x.coords), torch.as_tensor(x.feats)
        expect(
            x.stride == first.stride,
            f"tensors of a batch must have one stride; got {first.stride} and "
            f"{x.stride}",
        )
        batch = torch.full((len(rows), 1), number, dtype=torch.int32)
        columns = batch.to(rows.device), rows
        columns = columns if first.batch_column == 0 else columns[::-1]
        coords.append(torch.cat(columns, dim=1))
        feats.append(values)
    return first._of(torch.cat(feats), torch.cat(coords), first.stride)


def sparse_collate_fn(inputs: Sequence[object]) -> object:
    """Return a batch of dicts: arrays stacked, sparse tensors joined, others listed."""
    if not isinstance(inputs[0], dict):
        return inputs
    made = {}
    for name, value in inputs[0].items():
        values = [each[name] for each in inputs]
        if isinstance(value, dict):
            made[name] = sparse_collate_fn(values)
        elif isinstance(value, np.ndarray | torch.Tensor):
            made[name] = torch.stack([torch.as_tensor(each) for each in values])
        elif isinstance(value, Sparse):
            made[name] = sparse_collate(values)
        else:
            made[name] = values
    return made
