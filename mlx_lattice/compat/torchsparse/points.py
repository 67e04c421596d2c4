"""Points and voxels: hashes, queries, means, trilinear weights; of both versions.

Corners of a query, and offsets of a kernel with an even volume, are counted with the
last axis fastest. Other kernels are counted with the first axis fastest.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import product
from math import prod
from typing import Any

import mlx.core as mx
import numpy as np
import torch

from ...reductions import weighted
from .. import bridge

__all__ = [
    "calc_ti_weights", "get_kernel_offsets", "make_divisible", "make_ntuple",
    "make_tensor", "sparse_quantize", "spcount", "spdevoxelize", "sphash",
    "sphashquery", "spvoxelize",
]  # fmt: skip

IntOrSequence = int | Sequence[int] | torch.Tensor


def expect(is_so: bool, message: str) -> None:
    """Raise an AssertionError, as torchsparse does."""
    if not is_so:
        raise AssertionError(message)


# Arguments


def make_ntuple(x: IntOrSequence, ndim: int) -> tuple[int, ...]:
    """Return one int for each axis."""
    if isinstance(x, torch.Tensor):
        x = x.reshape(-1).tolist()
    values = (x,) * ndim if isinstance(x, int | np.integer) else tuple(x)
    expect(len(values) == ndim, f"expected {ndim} values, one an axis; got {values}")
    return tuple(int(each) for each in values)


def make_tensor(
    x: Sequence[int], dtype: torch.dtype, device: torch.device | str
) -> torch.Tensor:
    """Return values as a tensor."""
    return torch.tensor(x, dtype=dtype, device=device)


def make_divisible(x: int, divisor: int) -> int:
    """Return the least multiple of a divisor that is not below a number."""
    return -(-x // divisor) * divisor


def kernel_positions(size: Sequence[int]) -> list[tuple[int, ...]]:
    """Return places in a kernel, from 0 on each axis, in the order of weights."""
    if prod(size) % 2 == 0:
        return list(product(*map(range, size)))
    return [each[::-1] for each in product(*map(range, reversed(size)))]


def get_kernel_offsets(
    size: IntOrSequence,
    stride: IntOrSequence = 1,
    dilation: IntOrSequence = 1,
    device: torch.device | str = "cpu",
) -> torch.Tensor:
    """Return (K, 3) int32: the offsets of a kernel, in the order of weights.

    An axis of size 3 has -1, 0, 1, and one of size 2 has 0, 1, times stride and
    dilation.
    """
    size = make_ntuple(size, 3)
    steps = zip(make_ntuple(stride, 3), make_ntuple(dilation, 3), strict=True)
    scale = torch.tensor([a * b for a, b in steps], dtype=torch.int32)
    first = torch.tensor([(n - 1) // 2 for n in size], dtype=torch.int32)
    places = torch.tensor(kernel_positions(size), dtype=torch.int32)
    return ((places - first) * scale).to(device)


# Hashes and queries


def sphash(coords: torch.Tensor, offsets: torch.Tensor | None = None) -> torch.Tensor:
    """Return (N,) int64 hashes of rows, or (K, N) of rows moved by offsets.

    Args:
        coords: (N, 4) int32.
        offsets: (K, 3) int32, added to the first three columns.
    """
    expect(
        coords.dtype == torch.int32 and coords.ndim == 2 and coords.shape[1] == 4,
        f"coords must be (N, 4) int32; got {tuple(coords.shape)} of {coords.dtype}",
    )
    rows = coords.long()
    if offsets is not None:
        expect(
            offsets.dtype == torch.int32 and tuple(offsets.shape[1:]) == (3,),
            f"offsets must be (K, 3) int32; got {tuple(offsets.shape)} of "
            f"{offsets.dtype}",
        )
        moves = torch.nn.functional.pad(offsets.long().to(rows.device), (0, 1))
        rows = rows + moves[:, None]
    # FNV-1a over 32-bit words, cut to 60 bits; products wrap around.
    code = torch.full(rows.shape[:-1], -3750763034362895579, device=rows.device)
    for column in (rows & 0xFFFFFFFF).unbind(-1):
        code = (code ^ column) * 1099511628211
    return ((code >> 60) & 0xF) ^ (code & 0xFFFFFFFFFFFFFFF)


def sphashquery(queries: torch.Tensor, references: torch.Tensor) -> torch.Tensor:
    """Return int64 places of queries among references, -1 for those that are missing.

    Args:
        queries: int64 of any shape, which the result has too.
        references: (M,) int64.
    """
    known, order = torch.sort(references.reshape(-1), stable=True)
    if not len(known):
        return torch.full_like(queries, -1)
    places = torch.searchsorted(known, queries.contiguous()).clamp(max=len(known) - 1)
    return torch.where(known[places] == queries, order[places], -1)


def row_places(queries: torch.Tensor, references: torch.Tensor) -> torch.Tensor:
    """Return int64 places of rows among others, -1 for those that are missing.

    Args:
        queries: (..., D) integers.
        references: (M, D) integers.
    """
    if not len(references):
        return queries.new_full(queries.shape[:-1], -1, dtype=torch.int64)
    low, high = references.long().amin(0), references.long().amax(0)
    inside = ((queries >= low) & (queries <= high)).all(-1)
    codes = [torch.zeros((), dtype=torch.int64, device=low.device)] * 2
    extents = (high - low + 1).tolist()
    for axis, extent in enumerate(extents):
        columns = queries[..., axis], references[..., axis]
        codes = [
            code * extent + (column.long() - low[axis])
            for code, column in zip(codes, columns, strict=True)
        ]
    if prod(extents) >= 2**63:
        raise ValueError(f"coordinates span {extents}, more cells than int64 counts")
    return torch.where(inside, sphashquery(*codes), -1)


def spcount(coords: torch.Tensor, num: int) -> torch.Tensor:
    """Return (num,) int32: how often each place comes; negative ones do not count."""
    places = coords[coords >= 0].long()
    return torch.bincount(places, minlength=int(num))[: int(num)].int()


# Features


def spvoxelize(
    feats: torch.Tensor, coords: torch.Tensor, counts: torch.Tensor
) -> torch.Tensor:
    """Return (M, C) means of the points of each voxel.

    Args:
        feats: (N, C).
        coords: (N,) the voxel of each point.
        counts: (M,) the points of each voxel; 0 gives a row of 0.
    """
    places = coords.long()
    total = feats.new_zeros((len(counts), feats.shape[1]))
    total = total.index_add(0, places.clamp(min=0), feats * (places >= 0)[:, None])
    return total / counts.clamp(min=1)[:, None].to(total.dtype)


def spdevoxelize(
    feats: torch.Tensor, coords: torch.Tensor, weights: torch.Tensor
) -> torch.Tensor:
    """Return (N, C) sums of voxels, weighted.

    Args:
        feats: (M, C).
        coords: (N, K) voxels of each point, or -1.
        weights: (N, K), which get no gradient.
    """
    table, shares = coords.int(), weights.detach().float()

    def function(x: mx.array, w: mx.array, places: mx.array) -> mx.array:
        return weighted(x, w, places)

    return bridge.call(function, feats, shares, table)


def calc_ti_weights(
    coords: torch.Tensor, idx_query: torch.Tensor, scale: float = 1
) -> torch.Tensor:
    """Return (N, 8) trilinear weights of the corners around points.

    Args:
        coords: (N, 3 or more): x, y, z first.
        idx_query: (N, 8) voxels at the corners, or -1: those have no weight, and the
            others are divided by their sum.
        scale: size of a voxel.
    """
    with torch.no_grad():
        high = coords[:, :3] / scale
        high = high - torch.floor(high)
        sides = torch.stack((1 - high, high), dim=2)  # (N, 3, 2)
        corners = torch.tensor(list(product((0, 1), repeat=3)), device=coords.device)
        weights = sides[:, 0, corners[:, 0]]
        for axis in (1, 2):
            weights = weights * sides[:, axis, corners[:, axis]]
        weights = weights.masked_fill(idx_query == -1, 0)
        return weights / (weights.sum(1, keepdim=True) + 1e-8)


# Voxels


def quantized(coords: np.ndarray, voxel_size: float | Sequence[float]) -> np.ndarray:
    """Return int32 coordinates divided by a size and floored."""
    if isinstance(voxel_size, float | int):
        voxel_size = (voxel_size,) * 3
    expect(
        isinstance(voxel_size, tuple) and len(voxel_size) == 3,
        f"voxel_size must be a number or a tuple of 3; got {voxel_size!r}",
    )
    return np.floor(coords / np.array(voxel_size)).astype(np.int32)


def chosen(voxels: np.ndarray, shown: np.ndarray, *asked: bool) -> Any:
    """Return the distinct rows, sorted, with indices and inverse if they are asked."""
    _, index, inverse = np.unique(
        voxels, axis=0, return_index=True, return_inverse=True
    )
    maps = index, inverse.reshape(-1)
    made = [shown[index], *(m for m, wanted in zip(maps, asked, strict=True) if wanted)]
    return made[0] if len(made) == 1 else made


def sparse_quantize(
    coords: np.ndarray,
    voxel_size: float | tuple[float, ...] = 1,
    *,
    return_index: bool = False,
    return_inverse: bool = False,
) -> Any:
    """Return the distinct voxels of points, sorted.

    Args:
        coords: (N, 3) of NumPy.
        voxel_size: a number, or a tuple of 3.
        return_index: whether the first point of each voxel is returned.
        return_inverse: whether the voxel of each point is returned.

    Returns:
        (U, 3) int32, then (U,) and (N,) int64 if they are asked for, in a list.
    """
    voxels = quantized(coords, voxel_size)
    return chosen(voxels, voxels, return_index, return_inverse)
