"""Layers of each entry: activations, dropout and scales, on tensors or arrays."""

from __future__ import annotations

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


def _of_features(layer: type[Layer]) -> type[Layer]:
    def __call__(self, x):  # noqa: N807
        return on_features(by_rows(super(sparse, self).__call__), x)

    body = {"__call__": __call__, "__doc__": layer.__doc__, "__module__": __name__}
    sparse = type(layer.__name__, (layer,), body)
    return sparse


@as_its_base
class ELU(mlx.nn.ELU):
    """``mlx.nn.ELU`` that takes tensors too.

    Args:
        alpha (float): What negative values go to, negated. Default: ``1.0``.
    """

    def __call__(self, x):
        """Apply it to each entry."""
        return elu(x, self._alpha)


@as_its_base
class GELU(mlx.nn.GELU):
    """``mlx.nn.GELU`` that takes tensors too.

    Args:
        approx (str): ``"none"``, ``"precise"`` (or ``"tanh"``) or ``"fast"``.
            Default: ``"none"``.
    """

    def __call__(self, x):
        """Apply it to each entry."""
        if self._approx == "none":
            return gelu(x)
        if self._approx in BY_TANH:
            return gelu_approx(x)
        return on_features(by_rows(super().__call__), x)


@as_its_base
class LeakyReLU(mlx.nn.LeakyReLU):
    """``mlx.nn.LeakyReLU`` that takes tensors too.

    Args:
        negative_slope (float): What negative values are multiplied by.
            Default: ``0.01``.
    """

    def __call__(self, x):
        """Apply it to each entry."""
        return leaky_relu(x, self._negative_slope)


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


@as_its_base
class ReLU(mlx.nn.ReLU):
    """``mlx.nn.ReLU`` that takes tensors too."""

    def __call__(self, x):
        """Apply it to each entry."""
        return relu(x)


class SELU(mlx.nn.SELU):
    """``mlx.nn.SELU`` that takes tensors too."""

    def __call__(self, x):
        """Apply it to each entry."""
        return selu(x)


@as_its_base
class SiLU(mlx.nn.SiLU):
    """``mlx.nn.SiLU`` that takes tensors too."""

    def __call__(self, x):
        """Apply it to each entry."""
        return silu(x)


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
