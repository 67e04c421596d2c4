"""flex_gemm.ops.spconv: convolution over a neighbour cache that the caller keeps."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from ....coordinates import CoordinateManager
from ....relation import Relation
from ... import bridge

__all__ = [
    "Algorithm",
    "SerializationMode",
    "SparseConv3dNeighborCache",
    "SubMConv3dNeighborCache",
    "set_algorithm",
    "set_hashmap_ratio",
    "sparse_conv3d",
    "sparse_submanifold_conv3d",
]


class Algorithm:
    """Algorithms of FlexGEMM; the route table of mlx_lattice chooses instead."""

    EXPLICIT_GEMM = "explicit_gemm"
    IMPLICIT_GEMM = "implicit_gemm"
    IMPLICIT_GEMM_SPLITK = "implicit_gemm_splitk"
    MASKED_IMPLICIT_GEMM = "masked_implicit_gemm"
    MASKED_IMPLICIT_GEMM_SPLITK = "masked_implicit_gemm_splitk"


class SerializationMode:
    """Orders of FlexGEMM's hash keys, which have no effect here."""

    BXYZ = 0
    Z_ORDER = 1
    HILBERT = 2


ALGORITHM = Algorithm.MASKED_IMPLICIT_GEMM_SPLITK
HASHMAP_RATIO = 2.0


def set_algorithm(algorithm: str) -> None:
    """Store the name, which has no effect."""
    global ALGORITHM
    ALGORITHM = algorithm


def set_hashmap_ratio(ratio: float) -> None:
    """Store the ratio, which has no effect."""
    global HASHMAP_RATIO
    HASHMAP_RATIO = ratio


class SubMConv3dNeighborCache:
    """The kernel map of some coordinates, for calls with the same kernel.

    Attributes:
        relation: the kernel map, of mlx_lattice.
    """

    def __init__(self, relation: Relation):
        self.relation = relation

    @property
    def neighbor_map(self) -> torch.Tensor:
        """(N, K) int32: the input row of each output row and offset, or -1."""
        return bridge.to_torch(self.relation.out_in, copy=True)

    def __getitem__(self, name: str) -> object:
        return getattr(self, name)


class SparseConv3dNeighborCache(SubMConv3dNeighborCache):
    """The kernel map of a convolution that makes rows."""


def inserted(coords: torch.Tensor, shape: Sequence[int]) -> Any:
    """Return a new manager and the key of the coordinates in it."""
    if coords.ndim != 2 or coords.shape[1] != 4 or coords.dtype != torch.int32:
        raise AssertionError(
            "coords must be (N, 4) int32; got "
            f"{tuple(coords.shape)} of {coords.dtype}. Cast them with .int()"
        )
    (rows,) = bridge.to_mlx(coords, copy=True)
    manager, (size, _, *extents) = CoordinateManager(), map(int, shape)
    return manager, manager.insert(rows, spatial_shape=extents, batch_size=size)


def _expect_fitting(
    feats: torch.Tensor, weight: torch.Tensor, rows: int, name: str = "coords"
) -> None:
    if weight.ndim != 5:
        raise AssertionError(
            f"the weight must be (C_out, kx, ky, kz, C_in); got {tuple(weight.shape)}"
        )
    if feats.shape[-1] != weight.shape[-1]:
        raise AssertionError(
            f"Input channels ({feats.shape[-1]}) should match weight channels "
            f"({weight.shape[-1]})"
        )
    if len(feats) != rows:
        raise AssertionError(
            f"features have {len(feats)} rows, and {name} {rows}; each row of features "
            "needs one of coordinates"
        )


def sparse_submanifold_conv3d(
    feats: torch.Tensor,
    coords: torch.Tensor,
    shape: torch.Size,
    weight: torch.Tensor,
    bias: torch.Tensor | None = None,
    neighbor_cache: SubMConv3dNeighborCache | None = None,
    dilation: tuple[int, int, int] = (1, 1, 1),
) -> tuple[torch.Tensor, SubMConv3dNeighborCache]:
    """Convolve on the input's rows.

    Args:
        feats: (N, C_in).
        coords: (N, 4) int32: batch index, x, y, z. Not read if there is a cache.
        shape: (B, C, X, Y, Z).
        weight: (C_out, kx, ky, kz, C_in).
        bias: (C_out,) or None.
        neighbor_cache: what an earlier call with the same coordinates, kernel size and
            dilation returned.
        dilation: of each axis.

    Returns:
        (N, C_out), and the cache.

    Raises:
        AssertionError: shapes do not fit.
        ValueError: coordinates repeat or lie outside of the shape; or the cache is of
            another kernel size.
    """
    size = tuple(weight.shape[1:4])
    if neighbor_cache is None:
        _expect_fitting(feats, weight, len(coords))
        manager, key = inserted(coords, shape)
        relation = manager.submanifold_kernel_relation(
            key, kernel_size=size, dilation=tuple(dilation)
        )
        neighbor_cache = SubMConv3dNeighborCache(relation)
    relation = neighbor_cache.relation
    _expect_fitting(feats, weight, relation.n_in, "the neighbour cache")
    if relation.volume != size[0] * size[1] * size[2]:
        raise ValueError(
            f"the neighbour cache is of {relation.volume} offsets, and the weight of "
            f"shape {tuple(weight.shape)} has others; pass neighbor_cache=None"
        )
    return bridge.convolve(feats, weight, bias, relation), neighbor_cache


def sparse_conv3d(
    feats: torch.Tensor,
    coords: torch.Tensor,
    shape: torch.Size,
    weight: torch.Tensor,
    bias: torch.Tensor | None = None,
    neighbor_cache: SparseConv3dNeighborCache | None = None,
    out_coords: torch.Tensor | None = None,
    stride: tuple[int, int, int] = (1, 1, 1),
    padding: tuple[int, int, int] = (0, 0, 0),
    dilation: tuple[int, int, int] = (1, 1, 1),
) -> tuple[torch.Tensor, torch.Tensor, SparseConv3dNeighborCache]:
    """Convolve onto every row that an input reaches, or onto ``out_coords``.

    Arguments are those of ``sparse_submanifold_conv3d``, and (M, 4) ``out_coords``.

    Returns:
        (M, C_out), the rows, and the cache.
    """
    if neighbor_cache is None:
        _expect_fitting(feats, weight, len(coords))
        manager, key = inserted(coords, shape)
        kernel = {"kernel_size": tuple(weight.shape[1:4]), "stride": tuple(stride)}
        kernel |= {"padding": tuple(padding), "dilation": tuple(dilation)}
        if out_coords is None:
            relation = manager.kernel_relation(key, support="reach", **kernel)
        else:
            (rows,) = bridge.to_mlx(out_coords.int(), copy=True)
            relation = manager.target_kernel_relation(key, rows, **kernel)
        neighbor_cache = SparseConv3dNeighborCache(relation)
    relation = neighbor_cache.relation
    _expect_fitting(feats, weight, relation.n_in, "the neighbour cache")
    if out_coords is None:
        out_coords = bridge.to_torch(relation.out_coords, coords.device, copy=True)
    return bridge.convolve(feats, weight, bias, relation), out_coords, neighbor_cache
