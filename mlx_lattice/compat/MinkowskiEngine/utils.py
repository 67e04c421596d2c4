"""Coordinates to voxels, batches of samples, and initial weights."""

from __future__ import annotations

import logging
import math
from collections.abc import Sequence
from typing import Any

import numpy as np
import torch

from .MinkowskiCommon import Absent, StrideType, absent, expect, unique_rows

__all__ = [
    "SparseCollation",
    "batch_sparse_collate",
    "batched_coordinates",
    "fnv_hash_vec",
    "kaiming_normal_",
    "ravel_hash_vec",
    "sparse_collate",
    "sparse_quantize",
    "summary",
    "unique_coordinate_map",
]

Array = np.ndarray | torch.Tensor


def _tensor(array: object) -> object:
    """Return an array of NumPy as a tensor; others as they are."""
    return torch.from_numpy(array) if isinstance(array, np.ndarray) else array


def _expect_array(array: object, name: str) -> None:
    expect(
        isinstance(array, np.ndarray | torch.Tensor),
        f"{name} must be an array of NumPy or a tensor; got {type(array).__name__}",
    )


# Voxels


def unique_coordinate_map(
    coordinates: torch.Tensor, tensor_stride: StrideType = 1
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the first of equal rows, in their order, and the inverse; both int64."""
    return unique_rows(coordinates)


def _voxels(coordinates: Array, size: object) -> Array:
    """Return int32 coordinates divided by a size and floored."""
    dims = coordinates.shape[1]
    if size is not None and np.ndim(size):
        expect(
            len(size) == dims,
            f"quantization_size must have {dims} values, one a column; got {len(size)}",
        )
        size = [float(each) for each in size]
        is_array = isinstance(coordinates, np.ndarray)
        size = np.array(size) if is_array else coordinates.new_tensor(size)
    elif size is not None and not isinstance(size, int | float | np.number):
        raise ValueError(
            f"quantization_size must be a number, or one a column; got {size!r}"
        )
    if size is not None:
        coordinates = coordinates / size
    if isinstance(coordinates, np.ndarray):
        return np.floor(coordinates).astype(np.int32)
    return torch.floor(coordinates).int()


def _voxel_labels(labels: torch.Tensor, first, inverse, ignored: int) -> torch.Tensor:
    """Return the label of each voxel, or ``ignored`` where its points differ."""
    made = labels[first].clone()
    made[inverse[labels != labels[first][inverse]]] = ignored
    return made


def sparse_quantize(
    coordinates: Array,
    features: Array | None = None,
    labels: Array | None = None,
    ignore_label: int = -100,
    return_index: bool = False,
    return_inverse: bool = False,
    return_maps_only: bool = False,
    quantization_size: float | Sequence[float] | None = None,
    device: str | torch.device = "cpu",
) -> Any:
    """Return the first point of each voxel, in the order that points come.

    Args:
        coordinates: (N, D).
        features: (N, C).
        labels: (N,) integers.
        ignore_label: label of a voxel whose points have different labels.
        return_index: whether the points' indices are returned.
        return_inverse: whether the voxel of each point is returned; needs
            ``return_index``.
        return_maps_only: return indices alone, and the inverse if it is asked for.
        quantization_size: size of a voxel, a number or one a column.
        device: of the result without labels.

    Returns:
        Coordinates (U, D) int32, then features, labels, indices and the inverse, each
        if it is given or asked for; a single result is not in a tuple. With labels
        arrays of NumPy stay such; without, coordinates and indices are tensors.

    Raises:
        AssertionError: shapes do not fit.
    """
    _expect_array(coordinates, "coordinates")
    expect(
        coordinates.ndim == 2,
        f"coordinates must be (N, D); got {tuple(coordinates.shape)}",
    )
    expect(return_index or not return_inverse, "return_inverse needs return_index=True")
    for name, given in (("features", features), ("labels", labels)):
        expect(
            given is None or len(given) == len(coordinates),
            f"{name} must have a row for each of the coordinates",
        )
    voxels = _voxels(coordinates, quantization_size)
    rows = _tensor(voxels)
    if labels is None:
        rows = rows.to(device)
    first, inverse = unique_rows(rows)
    if return_maps_only and labels is None:
        return (first, inverse) if return_inverse else first
    maps, voxels = (first, inverse), rows
    if labels is not None and isinstance(coordinates, np.ndarray):
        maps, voxels = tuple(each.numpy() for each in maps), rows.numpy()
    chosen = maps[0]
    made = [voxels[chosen]]
    if features is not None:
        made.append(_picked(features, chosen))
    if labels is not None:
        found = _voxel_labels(torch.as_tensor(labels), first, inverse, ignore_label)
        made.append(found.numpy() if isinstance(labels, np.ndarray) else found)
    made += [maps[0]] if return_index else []
    made += [maps[1]] if return_inverse else []
    return made[0] if len(made) == 1 else tuple(made)


def _picked(array: Array, rows: Array) -> Array:
    if isinstance(array, torch.Tensor):
        return array[torch.as_tensor(rows).to(array.device)]
    return array[rows.cpu().numpy() if isinstance(rows, torch.Tensor) else rows]


def fnv_hash_vec(arr: np.ndarray) -> np.ndarray:
    """Return (N,) uint64: an FNV hash of each row of integers."""
    columns = arr.astype(np.uint64, copy=True)
    made = np.full(len(arr), 14695981039346656037, dtype=np.uint64)
    for column in columns.T:
        made = (made * np.uint64(1099511628211)) ^ column
    return made


def ravel_hash_vec(arr: np.ndarray) -> np.ndarray:
    """Return (N,) uint64: the place of each row in the box of all rows."""
    rows = (arr - arr.min(0)).astype(np.uint64)
    made = np.zeros(len(rows), dtype=np.uint64)
    for column, extent in zip(rows.T, rows.max(0) + np.uint64(1), strict=True):
        made = made * extent + column
    return made


# Batches


def batched_coordinates(
    coords: Sequence[Array],
    dtype: torch.dtype = torch.int32,
    device: torch.device | str | None = None,
) -> torch.Tensor:
    """Return (N, 1 + D) coordinates of samples, the sample's number first.

    Args:
        coords: (N_i, D) coordinates of each sample; floored for int32.
        dtype: int32 or float32.
        device: of the result, by default the CPU.
    """
    expect(
        isinstance(coords, Sequence),
        f"coords must be a sequence of arrays; got {type(coords).__name__}",
    )
    expect(
        dtype in (torch.int32, torch.float32),
        f"dtype must be torch.int32 or torch.float32; got {dtype}",
    )
    columns = {tuple(each.shape[1:]) for each in coords}
    expect(
        len(columns) == 1 and len(next(iter(columns))) == 1,
        f"coords must be (N_i, D) with one D; got columns {sorted(columns)}",
    )
    made = []
    for number, rows in enumerate(coords):
        rows = torch.as_tensor(rows)
        if dtype == torch.int32 and rows.is_floating_point():
            rows = torch.floor(rows)
        rows = rows.to(device=device or "cpu", dtype=dtype)
        made.append(torch.nn.functional.pad(rows, (1, 0), value=number))
    return torch.cat(made)


def sparse_collate(
    coords: Sequence[Array],
    feats: Sequence[Array],
    labels: Sequence[Any] | None = None,
    dtype: torch.dtype = torch.int32,
    device: torch.device | str | None = None,
) -> tuple[Any, ...]:
    """Return coordinates of a batch, its features, and its labels if they are given.

    Args:
        coords: (N_i, D) coordinates of each sample.
        feats: (N_i, C) features of each sample.
        labels: labels of each sample; arrays and tensors are joined, other labels are
            returned as a list.
        dtype: of the coordinates, int32 or float32.
        device: of the coordinates, by default that of the first.
    """
    for name, arrays in (("coords", coords), ("feats", feats)):
        expect(
            isinstance(arrays, Sequence),
            f"{name} must be a sequence of arrays; got {type(arrays).__name__}",
        )
    counts = sum(map(len, coords)), sum(map(len, feats))
    expect(
        counts[0] == counts[1],
        f"coords and feats must have the same number of rows; got {counts[0]} and "
        f"{counts[1]}",
    )
    if device is None and isinstance(coords[0], torch.Tensor):
        device = coords[0].device
    made = (
        batched_coordinates(coords, dtype, device),
        torch.cat([_tensor(each) for each in feats]),
    )
    if labels is None:
        return made
    labels = [_tensor(each) for each in labels]
    if isinstance(labels[0], torch.Tensor):
        labels = torch.cat(labels)
    return *made, labels


def batch_sparse_collate(
    data: Sequence[tuple[Any, ...]],
    dtype: torch.dtype = torch.int32,
    device: torch.device | str | None = None,
) -> tuple[Any, ...]:
    """Return a batch of (coordinates, features, labels) samples."""
    columns = [list(each) for each in zip(*data, strict=True)]
    return sparse_collate(*columns, dtype=dtype, device=device)


class SparseCollation:
    """Makes batches of (coordinates, features, labels) samples, for a data loader.

    Args:
        limit_numpoints: samples beyond this many points are left out; -1 for all.
        dtype: of the coordinates.
        device: of the coordinates.
    """

    def __init__(
        self,
        limit_numpoints: int = -1,
        dtype: torch.dtype = torch.int32,
        device: torch.device | str | None = None,
    ):
        self.limit_numpoints: int = limit_numpoints
        self.dtype: Any = dtype
        self.device: Any = device

    def __call__(self, list_data: Sequence[tuple[Any, ...]]) -> tuple[Any, ...]:
        """Return the batch."""
        kept, points = [], 0
        for sample in list_data:
            points += len(sample[0])
            if 0 < self.limit_numpoints < points:
                logging.warning(
                    "a batch of %d samples was cut to %d: the limit is %d points",
                    *(len(list_data), len(kept), self.limit_numpoints),
                )
                break
            kept.append(sample)
        return batch_sparse_collate(kept, self.dtype, self.device)


# Weights


def kaiming_normal_(
    tensor: torch.Tensor,
    a: float = 0,
    mode: str = "fan_in",
    nonlinearity: str = "leaky_relu",
) -> torch.Tensor:
    """Draw a kernel from a normal distribution, as He and others do.

    The fan in of a (volume, in, out) kernel is volume times in. An (in, out) kernel is
    taken for a linear layer's weight: its fan in is out.
    """
    if tensor.ndim < 2:
        raise ValueError(f"a kernel has 2 or 3 axes; got {tuple(tensor.shape)}")
    if mode.lower() not in ("fan_in", "fan_out"):
        raise ValueError(f"mode must be fan_in or fan_out; got {mode!r}")
    fans = (tensor.shape[1], tensor.shape[0])
    if tensor.ndim > 2:
        fans = tensor.shape[0] * tensor.shape[1], tensor.shape[0] * tensor.shape[2]
    fan = fans[mode.lower() == "fan_out"]
    gain = torch.nn.init.calculate_gain(nonlinearity, a)
    with torch.no_grad():
        return tensor.normal_(0, gain / math.sqrt(fan))


summary: Absent = absent(
    "utils.summary", "print the net, or call mlx_lattice.trace(net)"
)
