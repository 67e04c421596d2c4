"""Sequential, for layers of tensors and layers of mlx.nn alike."""

from __future__ import annotations

from collections.abc import Callable

import mlx.core as mx
import mlx.nn

from ..ops import on_features
from ..tensor import SparseTensor

__all__ = ["Sequential"]


class Sequential(mlx.nn.Sequential):
    """Calls its layers in order.

    Layers and functions of MLX itself are applied to a tensor's features; all others
    get the tensor. After a global pooling they all get its array.

    Args:
        modules (tuple of Callables): The modules to call in order.
    """

    def __call__(self, x: SparseTensor | mx.array) -> SparseTensor | mx.array:
        """Call the layers in order."""
        return _call_all(self.layers, x)


def _call_all(layers: list[Callable], x: SparseTensor | mx.array):
    for layer in layers:
        if isinstance(layer, mlx.nn.Sequential):
            x = _call_all(layer.layers, x)
        elif _is_of_mlx(layer):
            x = on_features(layer, x)
        else:
            x = layer(x)
    return x


def _is_of_mlx(layer: Callable) -> bool:
    # Of an instance this is its class's module, so subclasses elsewhere are not MLX's.
    return str(getattr(layer, "__module__", "")).startswith("mlx.")
