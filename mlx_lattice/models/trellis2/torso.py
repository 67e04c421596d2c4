"""What TRELLIS.2's nets share: a torso in half precision, layers that start at zero.

A net's first and last layers are float32, and so are norms and factors wherever they
stand; the layers between are in the dtype that the net was made with.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator

import mlx.core as mx
import mlx.nn
from mlx.utils import tree_flatten

from ... import nn


def zero(module: nn.Module) -> nn.Module:
    """Set every parameter to zero: a residual branch then starts as the identity."""
    zeros = {name: mx.zeros_like(value) for name, value in module.parameters().items()}
    return module.update(zeros)


def cast_layers(blocks: Iterable, dtype: mx.Dtype) -> None:
    """Cast convolutions and linear layers of (nested lists of) blocks, but no norms."""
    for layer in _layers(blocks):
        layer.set_dtype(dtype)


def torso_dtype(blocks: Iterable, default: mx.Dtype) -> mx.Dtype:
    """Return the dtype of the features that blocks' layers take; of none, another."""
    return next(map(dtype_of, _layers(blocks)), default)


def dtype_of(layer: nn.Module) -> mx.Dtype:
    """Return the dtype of the features that a layer's weight takes, packed or not."""
    return layer.get("scales", layer.weight).dtype


def _layers(blocks: Iterable) -> Iterator[nn.Module]:
    for _, block in tree_flatten(list(blocks), is_leaf=_is_module):
        for module in block.modules():
            if "weight" in module and not isinstance(module, mlx.nn.LayerNorm):
                yield module


def _is_module(value: object) -> bool:
    return isinstance(value, nn.Module)
