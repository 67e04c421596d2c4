"""Layers of each entry: activations, dropout and scales, on tensors or arrays."""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeVar

import mlx.core as mx
import mlx.nn
from mlx.nn import Identity, Module

from ..checks import real, whole
from ..ops import on_features
from ..ops.activation import (
    BY_TANH,
    as_its_base,
    by_rows,
    elu,
    gelu,
    gelu_approx,
    gelu_fast_approx,
    leaky_relu,
    prelu,
    relu,
    selu,
    silu,
)
from ..ops.norm import scaled
from ..tensor import SparseTensor
from .parameters import Parameters

__all__ = [
    "CELU", "DropPath", "Dropout", "ELU", "GELU", "GLU", "HardTanh", "Hardswish",
    "Identity", "LayerScale", "LeakyReLU", "LogSigmoid", "LogSoftmax", "Mish",
    "PReLU", "ReLU", "ReLU2", "ReLU6", "SELU", "SiLU", "Sigmoid", "Softmax",
    "Softplus", "Softsign", "Tanh",
]  # fmt: skip


Layer = TypeVar("Layer", bound=mlx.nn.Module)


def _of_features(layer: type[Layer], call: Callable | None = None) -> type[Layer]:
    """Return an ``mlx.nn`` layer that takes tensors, by ``call(layer, x)`` if given."""

    def of_rows(self, x):
        return on_features(by_rows(super(sparse, self).__call__), x)

    body = {"__call__": call or of_rows, "__doc__": layer.__doc__}
    sparse = type(layer.__name__, (layer,), body | {"__module__": __name__})
    return sparse


def _gelu(layer: mlx.nn.GELU, x):
    if layer._approx == "none":
        return gelu(x)
    return gelu_approx(x) if layer._approx in BY_TANH else gelu_fast_approx(x)


# Layers that kernels compute.
ELU = as_its_base(_of_features(mlx.nn.ELU, lambda it, x: elu(x, it._alpha)))
GELU = as_its_base(_of_features(mlx.nn.GELU, _gelu))
LeakyReLU = as_its_base(
    _of_features(
        mlx.nn.LeakyReLU, lambda layer, x: leaky_relu(x, layer._negative_slope)
    )
)
ReLU = as_its_base(_of_features(mlx.nn.ReLU, lambda _, x: relu(x)))
SELU = _of_features(mlx.nn.SELU, lambda _, x: selu(x))
SiLU = as_its_base(_of_features(mlx.nn.SiLU, lambda _, x: silu(x)))
CELU = _of_features(mlx.nn.CELU)
GLU = _of_features(mlx.nn.GLU)
HardTanh = _of_features(mlx.nn.HardTanh)
Hardswish = _of_features(mlx.nn.Hardswish)
LogSigmoid = _of_features(mlx.nn.LogSigmoid)
LogSoftmax = _of_features(mlx.nn.LogSoftmax)
Mish = _of_features(mlx.nn.Mish)
ReLU2 = _of_features(mlx.nn.ReLU2)
ReLU6 = _of_features(mlx.nn.ReLU6)
Sigmoid = _of_features(mlx.nn.Sigmoid)
Softmax = _of_features(mlx.nn.Softmax)
Softplus = _of_features(mlx.nn.Softplus)
Softsign = _of_features(mlx.nn.Softsign)
Tanh = _of_features(mlx.nn.Tanh)


class PReLU(Parameters, mlx.nn.PReLU):
    """``mlx.nn.PReLU`` that takes tensors too.

    Args:
        num_parameters (int): One weight for all channels, or one a channel.
            Default: ``1``.
        init (float): What they begin with. Default: ``0.25``.
    """

    def __init__(self, num_parameters: int = 1, init: float = 0.25):
        super().__init__(whole(num_parameters, "num_parameters", 1), real(init, "init"))

    def __call__(self, x):
        """Apply the activation to each row."""
        return prelu(x, self.weight)


def _probability(p: float) -> float:
    p = real(p, "p")
    if not 0 <= p < 1:
        raise ValueError(f"p must be from 0 to below 1; got {p}")
    return p


class Dropout(mlx.nn.Dropout):
    """``mlx.nn.Dropout`` that takes tensors too: zeroes entries of the features.

    Args:
        p (float): The probability to zero an entry. Default: ``0.5``.
    """

    def __init__(self, p: float = 0.5):
        super().__init__(_probability(p))

    def __call__(self, x: SparseTensor | mx.array) -> SparseTensor | mx.array:
        """Drop entries while training."""
        return on_features(super().__call__, x)


class DropPath(Module):
    """Zeroes whole rows while training, and scales the others up to the same mean.

    Stochastic depth (Huang et al., 2016) of a residual branch, each row by itself, as
    Point Transformer V3 has it.

    Args:
        p (float): The probability to zero a row. Default: ``0.5``.
    """

    def __init__(self, p: float = 0.5):
        super().__init__()
        self.p = _probability(p)

    def _extra_repr(self) -> str:
        return f"p={self.p}"

    def __call__(self, x: SparseTensor | mx.array) -> SparseTensor | mx.array:
        """Drop rows while training."""
        return on_features(self._drop, x) if self.training and self.p else x

    def _drop(self, x: mx.array) -> mx.array:
        kept = mx.random.bernoulli(1 - self.p, (x.shape[0], *[1] * (x.ndim - 1)))
        full, none = (mx.array(v, x.dtype) for v in (1 / (1 - self.p), 0))
        return x * mx.where(kept, full, none)


class LayerScale(Parameters, Module):
    """Multiplies each channel by a learnt factor (Touvron et al., 2021).

    Args:
        dims (int): The number of channels.
        init (float): What the factors begin at. Default: ``1e-5``.
    """

    def __init__(self, dims: int, init: float = 1e-5):
        super().__init__()
        self.gamma = mx.full((dims,), init)

    def __call__(
        self, x: SparseTensor | mx.array, *, residual: SparseTensor | None = None
    ) -> SparseTensor | mx.array:
        """Scale the channels of each row, and add a residual to a tensor.

        On a GPU this is one launch for a tensor.
        """
        if x.shape[-1] != self.gamma.size:
            raise ValueError(
                f"expected {self.gamma.size} channels, as many as there are factors; "
                f"got features of shape {tuple(x.shape)}"
            )
        if isinstance(x, SparseTensor):
            return scaled(x, self.gamma, residual=residual)
        return x * self.gamma.astype(x.dtype)
