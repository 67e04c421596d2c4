"""The names of spconv 1.x at the top of the package: nets that ``import spconv``.

They differ from spconv 2 in three ways. Weights are (k..., in, out), features can be
assigned, and layers share one dictionary of relations: a submanifold layer takes the
relation of its key, whatever its own kernel.
"""

from __future__ import annotations

import math

import torch
from torch import nn

from ....relation import Relation
from . import conv, pool
from .core import SparseConvTensor as _SparseConvTensor

__all__ = ["SparseConvTensor", "SparseConvolution"]


class SparseConvTensor(_SparseConvTensor):
    """Features on rows of coordinates; features can be assigned."""

    @property
    def features(self) -> torch.Tensor:
        """(N, C)."""
        return self._features

    @features.setter
    def features(self, value: torch.Tensor) -> None:
        self._features = value


class SparseConvolution(conv.SparseConvolution):
    """A sparse convolution with a weight of spconv 1.x."""

    shares_keys = True

    def __init__(self, *args: object, use_hash: bool = False, **options: object):
        super().__init__(*args, **options)

    def _weight_shape(self) -> list[int]:
        return [*self.kernel_size, self.in_channels, self.out_channels]

    def _contraction_weight(self, relation: Relation) -> torch.Tensor:
        # A key's offsets are multiplied with as many slices of the weight, the first,
        # also when the layer's kernel is larger: Cylinder3D was trained so.
        weight = self.weight.reshape(-1, self.in_channels, self.out_channels)
        return weight[: relation.volume]

    def _load_weight_different_layout(self, *_: object) -> None:
        """Take weights as they are."""

    def reset_parameters(self) -> None:
        """Draw the parameters as spconv 1.x does."""
        nn.init.kaiming_uniform_(self.weight, a=math.sqrt(5))
        if self.bias is not None:
            fan = self.in_channels * math.prod(self.kernel_size)
            nn.init.uniform_(self.bias, -1 / math.sqrt(fan), 1 / math.sqrt(fan))


_BASES = {name: (kind, SparseConvolution) for name, kind in conv.KINDS.items()}
_NUMBERED = conv.numbered(__name__, _BASES)
globals().update(_NUMBERED)
__all__ += _NUMBERED
SparseMaxPool2d, SparseMaxPool3d = pool.SparseMaxPool2d, pool.SparseMaxPool3d
