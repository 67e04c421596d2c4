"""Base of layers with arrays; activations, dropout and scales of each entry.

Layers take tensors or arrays of features.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import TYPE_CHECKING, Any

import mlx.core as mx
import mlx.nn
from mlx.nn import Identity, Module

from ..checks import array_of, real, whole
from ..ops import channels, on_features
from ..ops.channels import (
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
from ..ops.norms import scaled
from ..tensor import Features, SparseTensor

__all__ = [
    "CELU", "DropPath", "Dropout", "ELU", "GELU", "GLU", "HardTanh", "Hardswish",
    "Identity", "LayerScale", "LeakyReLU", "LogSigmoid", "LogSoftmax", "Mish",
    "PReLU", "ReLU", "ReLU2", "ReLU6", "SELU", "SiLU", "Sigmoid", "Softmax",
    "Softplus", "Softsign", "Tanh",
]  # fmt: skip


ARRAYS = frozenset(("weight", "bias", "running_mean", "running_var"))


class ModuleCache(dict[Any, Any]):
    """What a layer derived from its arrays; copies and pickles of a layer are empty."""

    def __reduce__(self) -> tuple[Any, ...]:
        """Return an empty cache."""
        return type(self), ()


class Parameters:
    """A layer whose arrays can be set to arrays of MLX or NumPy, or to lists.

    MLX's Module would keep a value that is no array beside the parameters, and the
    layer would go on with the old array.
    """

    # Arrays that stay frozen: ``unfreeze`` of a net would train running statistics.
    never_trained: Iterable[str] = ()

    def __setattr__(self, name: str, value: object) -> None:
        if name == "_no_grad":
            value = FrozenNames(value, self.never_trained)
        elif value is not None:
            is_array = name in ARRAYS or isinstance(self.get(name), mx.array)
            value = array_of(value, name) if is_array else value
        super().__setattr__(name, value)


class FrozenNames(set[str]):
    """The names of a module's frozen arrays, some of which can never be unfrozen."""

    def __init__(self, names: Iterable[str] = (), never: Iterable[str] = ()):
        super().__init__((*names, *never))
        self.never: frozenset[str] = frozenset(never)

    def clear(self) -> None:
        """Unfreeze every array that may be trained."""
        super().clear()
        self.update(self.never)

    def difference_update(self, *names: Iterable[str]) -> None:
        """Unfreeze arrays that may be trained."""
        super().difference_update(*names)
        self.update(self.never)


if TYPE_CHECKING:

    class RowLayer(Module):
        """A layer of ``mlx.nn`` that takes tensors too."""

        def __init__(self, *args: Any, **kwargs: Any): ...
        def __call__(self, x: Features) -> Features: ...


_DOC = """{what}

    Takes a tensor or an array; arguments are those of ``mlx.nn.{name}``.

    Examples:
        >>> nn.{name}()(mx.array([[-1.0, 2.0]]))
        array([[{result}]], dtype=float32)
    """


def _on_tensors(
    layer: type, function: Callable, result: str, call: Callable | None = None
) -> type[RowLayer]:
    """Return an ``mlx.nn`` layer that takes tensors too, by ``call`` or MLX's own.

    The docstring has the first line of a function of ``ops``, and the result for -1, 2.
    """

    def of_rows(self, x):
        return on_features(by_rows(super(sparse, self).__call__), x)

    what = (function.__doc__ or "").partition("\n")[0]
    doc = _DOC.format(what=what, name=layer.__name__, result=result)
    body = {"__call__": call or of_rows, "__doc__": doc}
    sparse = type(layer.__name__, (layer,), body | {"__module__": __name__})
    return sparse


def _gelu(layer: mlx.nn.GELU, x):
    if layer._approx == "none":
        return gelu(x)
    return gelu_approx(x) if layer._approx in BY_TANH else gelu_fast_approx(x)


def _leaky_relu(layer: mlx.nn.LeakyReLU, x):
    return leaky_relu(x, layer._negative_slope)


# Activations that kernels compute.
ELU: type[RowLayer] = as_its_base(
    _on_tensors(mlx.nn.ELU, elu, "-0.632121, 2", lambda layer, x: elu(x, layer._alpha))
)
GELU: type[RowLayer] = as_its_base(
    _on_tensors(mlx.nn.GELU, gelu, "-0.158655, 1.9545", _gelu)
)
LeakyReLU: type[RowLayer] = as_its_base(
    _on_tensors(mlx.nn.LeakyReLU, leaky_relu, "-0.01, 2", _leaky_relu)
)
ReLU: type[RowLayer] = as_its_base(
    _on_tensors(mlx.nn.ReLU, relu, "0, 2", lambda _, x: relu(x))
)
SELU: type[RowLayer] = _on_tensors(
    mlx.nn.SELU, selu, "-1.11133, 2.1014", lambda _, x: selu(x)
)
SiLU: type[RowLayer] = as_its_base(
    _on_tensors(mlx.nn.SiLU, silu, "-0.268941, 1.76159", lambda _, x: silu(x))
)
# Activations that MLX computes.
CELU: type[RowLayer] = _on_tensors(mlx.nn.CELU, channels.celu, "-0.632121, 2")
GLU: type[RowLayer] = _on_tensors(mlx.nn.GLU, channels.glu, "-0.880797")
HardTanh: type[RowLayer] = _on_tensors(mlx.nn.HardTanh, channels.hard_tanh, "-1, 1")
Hardswish: type[RowLayer] = _on_tensors(
    mlx.nn.Hardswish, channels.hardswish, "-0.333333, 1.66667"
)
LogSigmoid: type[RowLayer] = _on_tensors(
    mlx.nn.LogSigmoid, channels.log_sigmoid, "-1.31326, -0.126928"
)
LogSoftmax: type[RowLayer] = _on_tensors(
    mlx.nn.LogSoftmax, channels.log_softmax, "-3.04859, -0.0485873"
)
Mish: type[RowLayer] = _on_tensors(mlx.nn.Mish, channels.mish, "-0.303401, 1.94396")
ReLU2: type[RowLayer] = _on_tensors(mlx.nn.ReLU2, channels.relu2, "0, 4")
ReLU6: type[RowLayer] = _on_tensors(mlx.nn.ReLU6, channels.relu6, "0, 2")
Sigmoid: type[RowLayer] = _on_tensors(
    mlx.nn.Sigmoid, channels.sigmoid, "0.268941, 0.880797"
)
Softmax: type[RowLayer] = _on_tensors(
    mlx.nn.Softmax, channels.softmax, "0.0474259, 0.952574"
)
Softplus: type[RowLayer] = _on_tensors(
    mlx.nn.Softplus, channels.softplus, "0.313262, 2.12693"
)
Softsign: type[RowLayer] = _on_tensors(
    mlx.nn.Softsign, channels.softsign, "-0.5, 0.666667"
)
Tanh: type[RowLayer] = _on_tensors(mlx.nn.Tanh, channels.tanh, "-0.761594, 0.964028")


class PReLU(Parameters, mlx.nn.PReLU):
    """Apply PReLU: ``max(0, x) + weight * min(0, x)``, for tensors too.

    Args:
        num_parameters (int): 1 for one weight for all channels, or the number of
            channels. Default: ``1``.
        init (float): The initial value of the weights. Default: ``0.25``.

    Examples:
        >>> nn.PReLU(init=0.5)(mx.array([[-2.0, 3.0]]))
        array([[-1, 3]], dtype=float32)
    """

    def __init__(self, num_parameters: int = 1, init: float = 0.25):
        super().__init__(whole(num_parameters, "num_parameters", 1), real(init, "init"))

    def __call__(self, x: Features) -> Features:
        """Apply the activation to each row."""
        return prelu(x, self.weight)


def _probability(p: float) -> float:
    p = real(p, "p")
    if not 0 <= p < 1:
        raise ValueError(f"p must be from 0 to below 1; got {p}")
    return p


class Dropout(mlx.nn.Dropout):
    """Zero entries of the features while training: ``mlx.nn.Dropout`` for tensors too.

    Args:
        p (float): The probability to zero an entry. Default: ``0.5``.

    Examples:
        >>> x = ml.SparseTensor.from_dense(mx.ones((1, 4, 4, 4, 8)))
        >>> layer = nn.Dropout(0.5)
        >>> layer(x).shape
        (64, 8)
        >>> mx.array_equal(layer.eval()(x).feats, x.feats).item()  # off in evaluation
        True
    """

    def __init__(self, p: float = 0.5):
        super().__init__(_probability(p))

    def __call__(self, x: Features) -> Features:
        """Drop entries while training."""
        return on_features(super().__call__, x)


class DropPath(Module):
    """Zero whole rows while training, and scale the others to keep the mean.

    Stochastic depth (Huang et al., 2016) of a residual branch, for each row separately,
    as in Point Transformer V3.

    Args:
        p (float): The probability to zero a row. Default: ``0.5``.

    Examples:
        >>> x = ml.SparseTensor.from_dense(mx.ones((1, 4, 4, 4, 8)))
        >>> mx.random.seed(0)
        >>> y = nn.DropPath(0.5)(x)
        >>> sorted(set(y.feats[:, 0].tolist()))
        [0.0, 2.0]
    """

    def __init__(self, p: float = 0.5):
        super().__init__()
        self.p: float = _probability(p)

    def _extra_repr(self) -> str:
        return f"p={self.p}"

    def __call__(self, x: Features) -> Features:
        """Drop rows while training."""
        return on_features(self._drop, x) if self.training and self.p else x

    def _drop(self, x: mx.array) -> mx.array:
        stays = mx.random.bernoulli(1 - self.p, (x.shape[0], *[1] * (x.ndim - 1)))
        full, none = (mx.array(v, x.dtype) for v in (1 / (1 - self.p), 0))
        return x * mx.where(stays, full, none)


class LayerScale(Parameters, Module):
    """Multiply each channel by a learnt factor (Touvron et al., 2021).

    Args:
        dims (int): The number of channels.
        init (float): The initial value of the factors. Default: ``1e-5``.

    Examples:
        >>> nn.LayerScale(2, init=0.5)(mx.array([[2.0, 4.0]]))
        array([[1, 2]], dtype=float32)
    """

    def __init__(self, dims: int, init: float = 1e-5):
        super().__init__()
        self.gamma: mx.array = mx.full((dims,), init)

    def __call__(
        self, x: Features, *, residual: SparseTensor | None = None
    ) -> Features:
        """Scale the channels of each row, and add a residual to a tensor."""
        if x.shape[-1] != self.gamma.size:
            raise ValueError(
                f"expected {self.gamma.size} channels, as many as there are factors; "
                f"got features of shape {tuple(x.shape)}"
            )
        if isinstance(x, SparseTensor):
            return scaled(x, self.gamma, residual=residual)
        return x * self.gamma.astype(x.dtype)
