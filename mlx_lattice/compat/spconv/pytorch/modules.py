"""spconv.pytorch.modules: containers, and PyTorch's layers on sparse tensors."""

from __future__ import annotations

from collections import OrderedDict
from typing import Any

import torch
from torch import nn

from .core import SparseConvTensor, expect
from .functional import sparse_add

__all__ = [
    "AddTable",
    "AddTableMisaligned",
    "ConcatTable",
    "Identity",
    "JoinTable",
    "RemoveGrid",
    "SparseBatchNorm",
    "SparseIdentity",
    "SparseModule",
    "SparseReLU",
    "SparseSequential",
    "SparseSyncBatchNorm",
    "ToDense",
    "assign_name_for_sparse_modules",
    "is_sparse_conv",
    "is_spconv_module",
]


class SparseModule(nn.Module):
    """A module that ``SparseSequential`` calls with the sparse tensor."""

    is_convolution = False

    def __init__(self, name: str | None = None):
        super().__init__()
        self.name = name
        self._sparse_unique_name = ""


class _OnFeatures:
    """A layer of PyTorch that takes a sparse tensor too."""

    def forward(self, input):
        if isinstance(input, SparseConvTensor):
            return input.replace_feature(super().forward(input.features))
        return super().forward(input)


class SparseBatchNorm(_OnFeatures, nn.BatchNorm1d):
    """``nn.BatchNorm1d`` on features."""


class SparseSyncBatchNorm(_OnFeatures, nn.SyncBatchNorm):
    """``nn.SyncBatchNorm`` on features."""


class SparseReLU(_OnFeatures, nn.ReLU):
    """``nn.ReLU`` on features."""


class SparseIdentity(_OnFeatures, nn.Identity):
    """``nn.Identity`` on features."""


def is_spconv_module(module: object) -> bool:
    """Return whether a module takes sparse tensors."""
    return isinstance(module, SparseModule | SparseBatchNorm | SparseReLU)


def is_sparse_conv(module: object) -> bool:
    """Return whether a module is a sparse convolution."""
    return isinstance(module, SparseModule) and module.is_convolution


def assign_name_for_sparse_modules(module: nn.Module) -> None:
    """Store each sparse module's path in the module."""
    for path, each in module.named_modules():
        if isinstance(each, SparseModule):
            each._sparse_unique_name = path


class SparseSequential(SparseModule):
    """Calls modules one after another.

    Sparse modules get the sparse tensor, others its features. Features of a tensor
    without rows are left as they are.

    Args:
        *args: modules, or one OrderedDict of them.
        **kwargs: more modules, by name.
    """

    def __init__(self, *args: nn.Module | OrderedDict[str, Any], **kwargs: nn.Module):
        super().__init__()
        if len(args) == 1 and isinstance(args[0], OrderedDict):
            for name, module in args[0].items():
                self.add_module(name, module)
        else:
            for place, module in enumerate(args):
                self.add_module(str(place), module)
        for name, module in kwargs.items():
            if name in self._modules:
                raise ValueError(f"there are two modules named {name!r}")
            self.add_module(name, module)

    def __getitem__(self, index: int) -> nn.Module:
        modules = list(self._modules.values())
        if not -len(modules) <= index < len(modules):
            raise IndexError(f"index {index} is out of range")
        return modules[index]

    def __len__(self) -> int:
        return len(self._modules)

    def add(self, module: nn.Module, name: str | None = None) -> None:
        """Append a module, named by its place unless a name is given."""
        if name is None:
            name = str(len(self._modules))
            if name in self._modules:
                raise KeyError(f"there is a module named {name!r} already")
        self.add_module(name, module)

    def forward(self, input: Any) -> Any:
        """Return the result of the last module."""
        for module in self._modules.values():
            if is_spconv_module(module) or not isinstance(input, SparseConvTensor):
                input = module(input)
            elif input.indices.shape[0]:
                input = input.replace_feature(module(input.features))
        return input


class ToDense(SparseModule):
    """Returns the dense (B, C, spatial...) tensor."""

    def forward(self, x: SparseConvTensor) -> torch.Tensor:
        """Return the dense tensor."""
        return x.dense()


class RemoveGrid(SparseModule):
    """Drops the tensor's ``grid``."""

    def forward(self, x: SparseConvTensor) -> SparseConvTensor:
        """Return the tensor itself."""
        x.grid = None
        return x


class Identity(nn.Module):
    """Returns what it gets."""

    def forward(self, input: Any) -> Any:
        """Return the input."""
        return input

    def input_spatial_size(self, out_size: Any) -> Any:
        """Return the size itself."""
        return out_size


class _Table(SparseModule):
    """A module on a list of tensors."""

    def input_spatial_size(self, out_size: Any) -> Any:
        """Return the size itself."""
        return out_size

    def _expect_aligned(self, tensors: list[SparseConvTensor], channels: bool) -> None:
        first = tensors[0]
        for each in tensors:
            same = each.spatial_shape == first.spatial_shape
            same = same and each.batch_size == first.batch_size
            same = same and each.indices.shape[0] == first.indices.shape[0]
            same = same and not (
                channels and each.features.shape[1] != first.features.shape[1]
            )
            expect(
                same,
                f"{type(self).__name__} takes tensors of the same rows; use "
                "AddTableMisaligned to add tensors of different rows",
            )


class JoinTable(_Table):
    """Joins the channels of tensors of the same rows."""

    def forward(self, input: list[SparseConvTensor]) -> SparseConvTensor:
        """Return the first tensor's rows with the channels of all."""
        self._expect_aligned(input, channels=False)
        return input[0].replace_feature(torch.cat([x.features for x in input], 1))


class AddTable(_Table):
    """Adds tensors of the same rows."""

    def forward(self, input: list[SparseConvTensor]) -> SparseConvTensor:
        """Return the first tensor's rows with the sum of all features."""
        self._expect_aligned(input, channels=True)
        return input[0].replace_feature(sum(x.features for x in input))


class AddTableMisaligned(_Table):
    """Adds tensors of different rows, see ``functional.sparse_add``."""

    def forward(self, input: list[SparseConvTensor]) -> SparseConvTensor:
        """Return the sum on the rows of all."""
        return sparse_add(*input)


class ConcatTable(SparseModule):
    """Calls several modules with one input, and returns a list."""

    def forward(self, input: Any) -> list[Any]:
        """Return the result of each module."""
        return [module(input) for module in self._modules.values()]

    def add(self, module: nn.Module) -> ConcatTable:
        """Append a module; return the table."""
        self._modules[str(len(self._modules))] = module
        return self

    def input_spatial_size(self, out_size: Any) -> Any:
        """Return that of the first module."""
        return self._modules["0"].input_spatial_size(out_size)
