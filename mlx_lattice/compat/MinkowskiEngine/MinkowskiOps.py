"""Operations on features: linear layers, joining tensors, dense tensors."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import nn

from .MinkowskiCommon import MinkowskiModuleBase, expect
from .MinkowskiCoordinateManager import DIFFERENT_MANAGERS
from .MinkowskiTensor import SparseTensor, Tensor, TensorField

__all__ = [
    "MinkowskiLinear", "MinkowskiStackCat", "MinkowskiStackMean",
    "MinkowskiStackSum", "MinkowskiStackVar", "MinkowskiToDenseTensor",
    "MinkowskiToFeature", "MinkowskiToSparseTensor", "cat", "dense_coordinates",
    "mean", "to_sparse", "to_sparse_all", "var",
]  # fmt: skip


class MinkowskiLinear(MinkowskiModuleBase):
    """A linear layer on the features, in ``linear``.

    Args:
        in_features, out_features: channels.
        bias: whether a bias is added.
    """

    def __init__(self, in_features: int, out_features: int, bias: bool = True):
        super().__init__()
        self.linear: nn.Module = nn.Linear(in_features, out_features, bias=bias)

    def forward(self, input: Tensor) -> Tensor:
        """Return other features on the same rows."""
        return input._like(self.linear(input.F))


class MinkowskiToFeature(MinkowskiModuleBase):
    """Returns the features of a tensor."""

    def forward(self, x: Tensor) -> torch.Tensor:
        """Return (N, C)."""
        return x.F


def _joined(tensors: Sequence, function: Callable) -> Tensor:
    if len(tensors) == 1:
        tensors = tensors[0]
    expect(
        isinstance(tensors, Sequence) and len(tensors) > 1,
        "expected at least two tensors, or one list of them",
    )
    first = tensors[0]
    if not isinstance(first, SparseTensor | TensorField):
        raise ValueError(
            f"expected SparseTensors or TensorFields; got {type(first).__name__}"
        )
    for each in tensors[1:]:
        expect(
            isinstance(each, type(first)),
            f"expected tensors of one class; got {type(first).__name__} and "
            f"{type(each).__name__}",
        )
        expect(first.coordinate_manager is each.coordinate_manager, DIFFERENT_MANAGERS)
        expect(
            first.coordinate_key == each.coordinate_key,
            f"tensors must have the same coordinate_map_key; got "
            f"{first.coordinate_key} and {each.coordinate_key}. Use + or "
            "MinkowskiUnion for tensors of different rows",
        )
    return first._like(function([each.F for each in tensors]))


def _mean(features: list[torch.Tensor]) -> torch.Tensor:
    return sum(features) / len(features)


def _var(features: list[torch.Tensor]) -> torch.Tensor:
    mean = _mean(features)
    return sum((each - mean) ** 2 for each in features) / len(features)


def cat(*sparse_tensors: Tensor | Sequence[Tensor]) -> Tensor:
    """Join the channels of two or more tensors with one key; takes a list too."""
    return _joined(sparse_tensors, lambda each: torch.cat(each, dim=-1))


def _sum(*sparse_tensors: Tensor | Sequence[Tensor]) -> Tensor:
    """Return the sum of two or more tensors with one key."""
    return _joined(sparse_tensors, sum)


def mean(*sparse_tensors: Tensor | Sequence[Tensor]) -> Tensor:
    """Return the mean of two or more tensors with one key."""
    return _joined(sparse_tensors, _mean)


def var(*sparse_tensors: Tensor | Sequence[Tensor]) -> Tensor:
    """Return the variance over two or more tensors with one key."""
    return _joined(sparse_tensors, _var)


class _Stack(nn.Sequential):
    function: Callable

    def forward(self, x: Tensor) -> Tensor:
        """Return the results of all modules, joined."""
        return type(self).function([module(x) for module in self])


class MinkowskiStackCat(_Stack):
    """Gives a tensor to all modules and joins the channels of their results."""

    function = cat


class MinkowskiStackSum(_Stack):
    """Gives a tensor to all modules and adds their results."""

    function = _sum


class MinkowskiStackMean(_Stack):
    """Gives a tensor to all modules and takes the mean of their results."""

    function = mean


class MinkowskiStackVar(_Stack):
    """Gives a tensor to all modules and takes the variance of their results."""

    function = var


# Dense tensors


def dense_coordinates(shape: Sequence[int]) -> torch.Tensor:
    """Return (N, 1 + D) int32: all cells of a (B, C, spatial...) shape."""
    axes = [torch.arange(n, dtype=torch.int32) for n in (shape[0], *shape[2:])]
    grid = torch.meshgrid(*axes, indexing="ij")
    return torch.stack([each.reshape(-1) for each in grid], dim=1)


def to_sparse_all(
    dense_tensor: torch.Tensor, coordinates: torch.Tensor | None = None
) -> SparseTensor:
    """Return all cells of a (B, C, spatial...) tensor.

    Args:
        dense_tensor: the tensor.
        coordinates: ``dense_coordinates(dense_tensor.shape)``, if it is known.
    """
    expect(dense_tensor.ndim > 2, "a dense tensor must be (B, C, spatial...)")
    if coordinates is None:
        coordinates = dense_coordinates(dense_tensor.shape)
    features = dense_tensor.movedim(1, -1).reshape(-1, dense_tensor.shape[1])
    return SparseTensor(features, coordinates, device=dense_tensor.device)


def to_sparse(
    x: torch.Tensor,
    format: str | None = None,
    coordinates: torch.Tensor | None = None,
    device: torch.device | str | None = None,
) -> SparseTensor:
    """Return the cells of a dense tensor that are not all zero.

    Args:
        x: the tensor.
        format: its axes, as "BXXXC"; by default "BCX...".
        coordinates: ignored.
        device: of the result, by default that of ``x``.
    """
    format = format or "BC" + "X" * (x.ndim - 2)
    is_right = len(format) == x.ndim > 2 and format[0] == "B"
    is_right = is_right and format.count("C") == format.count("B") == 1
    expect(
        is_right,
        f"format must name {x.ndim} axes, B first and one C, as BCXXX; got {format}",
    )
    x = x.movedim(format.index("C"), -1)
    coordinates = (x.detach() != 0).any(dim=-1).nonzero()
    features = x[tuple(coordinates.unbind(1))]
    return SparseTensor(features, coordinates.int(), device=device or x.device)


class MinkowskiToSparseTensor(MinkowskiModuleBase):
    """Makes a sparse tensor of a field, or of a dense (B, C, spatial...) tensor.

    Args:
        remove_zeros: whether cells that are all zero are left out.
        coordinates: cells to take instead, as ``dense_coordinates`` returns them.
    """

    def __init__(
        self, remove_zeros: bool = True, coordinates: torch.Tensor | None = None
    ):
        super().__init__()
        self.remove_zeros: bool = remove_zeros
        self.coordinates: torch.Tensor | None = coordinates

    def forward(self, input: TensorField | torch.Tensor) -> SparseTensor:
        """Return the sparse tensor."""
        if isinstance(input, TensorField):
            return input.sparse()
        if not isinstance(input, torch.Tensor):
            raise ValueError(
                f"expected a TensorField or a tensor; got {type(input).__name__}"
            )
        if self.remove_zeros and self.coordinates is None:
            return to_sparse(input)
        return to_sparse_all(input, self.coordinates)


class MinkowskiToDenseTensor(MinkowskiModuleBase):
    """Makes a dense (B, C, spatial...) tensor.

    Args:
        shape: of the result.
    """

    def __init__(self, shape: torch.Size | None = None):
        super().__init__()
        self.shape = shape

    def forward(self, input: SparseTensor) -> torch.Tensor:
        """Return the dense tensor."""
        return input.dense(shape=self.shape)[0]
