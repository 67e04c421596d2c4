"""MinkowskiEngine's enumerations, arguments, and what its files share."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from enum import Enum
from typing import NoReturn

import numpy as np
import torch
from torch import nn

__all__ = [
    "BroadcastMode", "ConvolutionMode", "CoordinateMapType",
    "GPUMemoryAllocatorType", "MinkowskiAlgorithm", "MinkowskiModuleBase",
    "MinkowskiNetwork", "PoolingMode", "RegionType", "SparseTensorOperationMode",
    "SparseTensorQuantizationMode", "convert_to_int_list", "convert_to_int_tensor",
]  # fmt: skip

StrideType = int | Sequence[int] | np.ndarray | torch.Tensor


class RegionType(Enum):
    """Shape of a kernel; HYPERCUBE, HYPERCROSS and HYBRID are names of 0.4."""

    HYPER_CUBE = 0
    HYPER_CROSS = 1
    CUSTOM = 2
    HYBRID = 3
    HYPERCUBE = 0
    HYPERCROSS = 1


class SparseTensorQuantizationMode(Enum):
    """What becomes of rows with equal coordinates."""

    RANDOM_SUBSAMPLE = 0
    UNWEIGHTED_AVERAGE = 1
    UNWEIGHTED_SUM = 2
    NO_QUANTIZATION = 3
    MAX_POOL = 4
    SPLAT_LINEAR_INTERPOLATION = 5


class SparseTensorOperationMode(Enum):
    """Whether tensors share one global manager of coordinates."""

    SEPARATE_COORDINATE_MANAGER = 0
    SHARE_COORDINATE_MANAGER = 1


class PoolingMode(Enum):
    """What pooling computes; ways to compute it have no effect."""

    LOCAL_SUM_POOLING = 0
    LOCAL_AVG_POOLING = 1
    LOCAL_MAX_POOLING = 2
    GLOBAL_SUM_POOLING_DEFAULT = 3
    GLOBAL_AVG_POOLING_DEFAULT = 4
    GLOBAL_MAX_POOLING_DEFAULT = 5
    GLOBAL_SUM_POOLING_KERNEL = 6
    GLOBAL_AVG_POOLING_KERNEL = 7
    GLOBAL_MAX_POOLING_KERNEL = 8
    GLOBAL_SUM_POOLING_PYTORCH_INDEX = 9
    GLOBAL_AVG_POOLING_PYTORCH_INDEX = 10
    GLOBAL_MAX_POOLING_PYTORCH_INDEX = 11

    @property
    def reduction(self) -> str:
        """What is computed: "sum", "avg" or "max"."""
        return self.name.split("_")[1].lower()


class BroadcastMode(Enum):
    """What broadcasting does with the row of a batch element."""

    ELEMENTWISE_ADDITON = 0
    ELEMENTWISE_MULTIPLICATION = 1


class MinkowskiAlgorithm(Enum):
    """Without an effect."""

    DEFAULT = 0
    MEMORY_EFFICIENT = 1
    SPEED_OPTIMIZED = 2


class ConvolutionMode(Enum):
    """Without an effect."""

    DEFAULT = 0
    DIRECT_GEMM = 1
    COPY_GEMM = 2


class CoordinateMapType(Enum):
    """Without an effect."""

    CPU = 0
    CUDA = 1


class GPUMemoryAllocatorType(Enum):
    """Without an effect."""

    PYTORCH = 0
    CUDA = 1


def expect(is_so: bool, message: str) -> None:
    """Raise an AssertionError, as MinkowskiEngine does."""
    if not is_so:
        raise AssertionError(message)


Absent = Callable[..., NoReturn]


def absent(name: str, instead: str) -> Absent:
    """Return a function that raises, for a name that is not provided."""

    def function(*_: object, **__: object):
        raise NotImplementedError(f"MinkowskiEngine.{name} is not provided; {instead}")

    function.__name__ = name.rpartition(".")[2]
    function.__doc__ = f"Raise NotImplementedError: {instead}."
    return function


def convert_to_int_list(arg: StrideType, dimension: int) -> list[int]:
    """Return one int for each axis."""
    if isinstance(arg, Sequence | np.ndarray | torch.Tensor) and np.ndim(arg):
        values = [int(each) for each in arg]
        expect(
            len(values) == dimension,
            f"expected {dimension} values, one an axis; got {values}",
        )
        return values
    return [int(arg)] * dimension


def convert_to_int_tensor(arg: StrideType, dimension: int) -> torch.Tensor:
    """Return one int for each axis, as an int32 tensor."""
    return torch.tensor(convert_to_int_list(arg, dimension), dtype=torch.int32)


def unique_rows(rows: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the first of equal rows, in the order that they come, and an inverse.

    Args:
        rows: (N, D) integers.

    Returns:
        (U,) int64: indices into ``rows``; (N,) int64: indices into the first result.
    """
    count = len(rows)
    place = torch.arange(count, device=rows.device)
    if not count:
        return place, place
    rows = rows.long()
    low, high = rows.amin(0), rows.amax(0)
    extents = (high - low + 1).tolist()
    if np.prod(np.array(extents, dtype=object)) < 2**63:
        codes = rows[:, 0] - low[0]
        for axis in range(1, rows.shape[1]):
            codes = codes * extents[axis] + (rows[:, axis] - low[axis])
    else:
        codes = torch.unique(rows, dim=0, return_inverse=True)[1]
    codes, order = torch.sort(codes, stable=True)
    starts = torch.ones_like(codes, dtype=torch.bool)
    starts[1:] = codes[1:] != codes[:-1]
    if starts.all():
        return place, place
    first = order[starts]
    inverse = torch.empty_like(order)
    inverse[order] = torch.cumsum(starts, 0) - 1
    order = torch.argsort(first)
    return first[order], torch.argsort(order)[inverse]


class MinkowskiModuleBase(nn.Module):
    """Base of layers."""


class MinkowskiNetwork(nn.Module):
    """Base of nets.

    Args:
        D: spatial axes.
    """

    def __init__(self, D: int):
        super().__init__()
        self.D = D
