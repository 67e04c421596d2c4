"""Layers that act on each row: Linear and its twin, Dropout, DropPath, LayerScale."""

from __future__ import annotations

from functools import lru_cache

import mlx.core as mx
import mlx.nn
from mlx.nn import Identity, Module

from .. import contraction, devices
from ..channel_kernels import column_sums, sums_columns
from ..epilogue import Epilogue
from ..geometry.sync import is_transforming
from ..kernel_spec import KernelSpec
from ..memory.stages import boundary
from ..ops import on_features
from ..relation import Relation
from ..routes import launch
from ..routes.needs import accelerate
from ..tensor import SparseTensor
from ..transformations import Function
from ..transformations import Linear as LinearRules
from .integer import (
    NOTHING,
    Taken,
    as_float32,
    is_integer,
    multiplied,
    placed,
    taken,
)
from .quantized import BESIDE, Packable, Packed, Weight, check_mode, pack

__all__ = [
    "DropPath", "Dropout", "Identity", "LayerScale", "Linear", "QuantizedLinear",
]  # fmt: skip


@lru_cache(maxsize=64)
def each_row(n: int) -> Relation:
    """Return the relation in which n rows feed themselves; it keeps their plans."""
    spec = KernelSpec.of(1, kernel_size=1)
    table = mx.arange(n, dtype=mx.int32)[:, None]
    return Relation("submanifold", 1, n, n, lambda *_: table, spec=spec, mirrored=True)


def is_contraction(x: mx.array) -> bool:
    """Return whether a linear layer of these rows is a contraction here.

    It is on CPUs where MLX has a reference BLAS alone; elsewhere MLX's matmul serves.
    """
    return x.ndim > 0 and devices.current().backend == devices.CPU and not accelerate()


def contracted(
    layer: Module, x: mx.array, weight, epilogue: Epilogue | None = None
) -> mx.array:
    """Return ``x @ weight[0]``, the layer's bias and what follows, seen by traces."""
    rows = x.reshape(-1, x.shape[-1])
    with launch.scope(layer):
        y = contraction.conv(
            rows,
            weight,
            each_row(len(rows)),
            bias=layer.bias if "bias" in layer else None,
            epilogue=epilogue,
        )
    return y.reshape(*x.shape[:-1], y.shape[1])


def finishes(layer: Module, x: mx.array) -> bool:
    """Whether a linear layer of (N, C) rows computes an epilogue in its launch.

    On the CPU it does, packed or not. On CUDA MLX's matmul and a pass over its result
    take less time than tiles that compute both: 0.65 against 0.89 ms for 544 000 rows
    of half, 128 to 512 channels and SiLU, on an H200.
    """
    if not is_contraction(x) or x.ndim != 2 or not x.shape[0] or is_integer(layer):
        return False
    if type(layer) not in (Linear, QuantizedLinear):
        return False
    own = layer.scales if isinstance(layer, Packed) else layer.weight
    return x.dtype == own.dtype


def finished(layer: Module, x: mx.array, epilogue: Epilogue) -> mx.array:
    """Return what a linear layer that ``finishes`` makes of (N, C) rows."""
    packed = isinstance(layer, Packed)
    weight = layer.packed_weight() if packed else layer.weight.T[None]
    return contracted(layer, x, weight, epilogue)


class QuantizedLinear(Packed, mlx.nn.QuantizedLinear):
    """``mlx.nn.QuantizedLinear`` that takes tensors too, and any number of channels.

    Args:
        input_dims (int): The number of input channels.
        output_dims (int): The number of output channels.
        bias (bool): If ``True`` add a bias. Default: ``True``.
        group_size (int): Input channels that share a scale. Default: ``64``.
        bits (int): 4 or 8. Default: ``4``.
        mode (str): ``"affine"``, or ``"integer"`` for int8 features.
    """

    def __init__(
        self,
        input_dims: int,
        output_dims: int,
        bias: bool = True,
        group_size: int | None = None,
        bits: int | None = None,
        mode: str = "affine",
    ):
        Module.__init__(self)
        linear = mlx.nn.Linear(input_dims, output_dims, bias)
        if bias:
            self.bias = linear.bias
        self._hold(pack(linear, group_size, bits, check_mode(mode)))

    @classmethod
    def from_linear(
        cls,
        linear_layer: Module,
        group_size: int | None = None,
        bits: int | None = None,
        mode: str = "affine",
    ) -> QuantizedLinear:
        """Return the quantised twin of a ``Linear``: MLX's name of ``from_layer``."""
        return cls.from_layer(linear_layer, group_size, bits, mode)

    def _hold(self, w: Weight) -> None:
        super()._hold(w)
        # MLX's own layout of a linear weight has no axis of offsets.
        for name in ("weight", *(n for n in BESIDE if n in self)):
            if self[name].ndim == 3:
                self[name] = self[name][0]

    def packed_weight(self) -> Weight:
        """Return the parameters as they are now, checked against one another."""
        return self._packed((), lambda a: a[None])

    def __call__(
        self, x: SparseTensor | mx.array, *, epilogue: Epilogue | None = None
    ) -> SparseTensor | mx.array:
        """Apply the layer to each row.

        With an ``epilogue``, which integer layers take beside a tensor, the result is
        int8 where the layer has an ``output_scale``.

        Raises:
            TypeError: the features' dtype is not that of the scales.
            ValueError: the features have another number of channels.
        """
        if not isinstance(x, SparseTensor) or not is_integer(self):
            return on_features(self._rows, x)
        held, inverse = taken(self, x), None
        if epilogue is not None and "output_inverse" in self:
            inverse = as_float32(self["output_inverse"])
        y = self._integers(held, epilogue or NOTHING, inverse)
        if x.manager is not None:  # rows alone may be those of a block of a stage
            boundary(y)
        return placed(self, (x.manager, x.key, x.coords), y, held.dtype)

    def _rows(self, x: mx.array) -> mx.array:
        if is_integer(self):
            y = self._integers(taken(self, x.reshape(-1, x.shape[-1])))
            return y.reshape(*x.shape[:-1], y.shape[1])
        if is_contraction(x):
            return contracted(self, x, self.packed_weight())
        y = contraction.packed_linear(x, self.packed_weight())
        return y + self.bias if "bias" in self else y

    def _integers(self, x: Taken, *after) -> mx.array:
        relation = each_row(len(x.values))
        with launch.scope(self):
            return multiplied(self, x, self.packed_weight(), relation, 1, *after)

    def _extra_repr(self) -> str:
        return (
            f"input_dims={self.in_channels}, output_dims={self.weight.shape[0]}, "
            f"bias={'bias' in self}, {self._packing_repr()}"
        )


def has_twin(layer: Module) -> bool:
    """Whether ``twin_holding`` has a twin of a layer."""
    return isinstance(layer, mlx.nn.Linear) or hasattr(layer, "twin")


def twin_holding(layer: Module, w: Weight) -> Module:
    """Return the twin of a convolution or of any ``mlx.nn.Linear`` with a weight."""
    return getattr(layer, "twin", QuantizedLinear).holding(layer, w)


class Linear(Packable, mlx.nn.Linear):
    """``mlx.nn.Linear`` that takes tensors too.

    On CPUs where MLX has a reference BLAS alone it is a contraction of one offset,
    with a route and a line in traces; elsewhere it is MLX's own matmul.

    Args:
        input_dims (int): The number of input channels.
        output_dims (int): The number of output channels.
        bias (bool): If ``True`` add a learnable bias. Default: ``True``.
    """

    twin = QuantizedLinear

    def __call__(self, x: SparseTensor | mx.array) -> SparseTensor | mx.array:
        """Apply the layer to each row.

        Raises:
            TypeError: a tensor's dtype is not the weight's.
        """
        if isinstance(x, SparseTensor) and x.dtype != self.weight.dtype:
            raise TypeError(
                f"features are {x.dtype}, the weight is {self.weight.dtype}; cast one "
                "with .astype or set_dtype"
            )
        return on_features(self._apply, x)

    def _apply(self, x: mx.array) -> mx.array:
        if x.size == 0 and x.shape[-1:] == self.weight.shape[1:]:
            # MLX's CUDA matmul can't start for no rows.
            return mx.zeros((*x.shape[:-1], self.weight.shape[0]), dtype=x.dtype)
        if x.dtype == self.weight.dtype and is_contraction(x):
            return contracted(self, x, self.weight.T[None])
        if is_transforming() and "bias" in self and sums_columns(x):
            rows = Function(_affine, rules=_Affine(2, len(x)))
            return rows(x, self.weight, self.bias)
        return super().__call__(x)


def _affine(x: mx.array, w: mx.array, b: mx.array) -> mx.array:
    return mx.addmm(b, x, w.T)


class _Affine(LinearRules):
    """MLX's rules of a linear layer, but that the bias's gradient is by a kernel."""

    __slots__ = ()

    def linear(self, x: mx.array, w: mx.array) -> mx.array:
        """Return the layer without its bias."""
        return x @ w.T

    def vjp(self, primals, dy, _):
        """Return the derivatives by rows, weight and bias."""
        x, w, b = primals
        return dy @ w, dy.T @ x, column_sums(dy, b)


class Dropout(mlx.nn.Dropout):
    """``mlx.nn.Dropout`` that takes tensors too: zeroes entries of the features.

    Args:
        p (float): The probability to zero an entry. Default: ``0.5``.
    """

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
        if not 0 <= p < 1:
            raise ValueError(f"p must be from 0 to below 1; got {p}")
        self.p = p

    def _extra_repr(self) -> str:
        return f"p={self.p}"

    def __call__(self, x: SparseTensor | mx.array) -> SparseTensor | mx.array:
        """Drop rows while training."""
        return on_features(self._drop, x) if self.training and self.p else x

    def _drop(self, x: mx.array) -> mx.array:
        kept = mx.random.bernoulli(1 - self.p, (x.shape[0], *[1] * (x.ndim - 1)))
        full, none = (mx.array(v, x.dtype) for v in (1 / (1 - self.p), 0))
        return x * mx.where(kept, full, none)


class LayerScale(Module):
    """Multiplies each channel by a learnt factor (Touvron et al., 2021).

    Args:
        dims (int): The number of channels.
        init (float): What the factors begin at. Default: ``1e-5``.
    """

    def __init__(self, dims: int, init: float = 1e-5):
        super().__init__()
        self.gamma = mx.full((dims,), init)

    def __call__(self, x: SparseTensor | mx.array) -> SparseTensor | mx.array:
        """Scale the channels of each row."""
        return on_features(lambda feats: feats * self.gamma.astype(feats.dtype), x)
