"""The product of features and a packed linear weight, and its derivatives."""

from __future__ import annotations

from functools import lru_cache
from typing import NamedTuple

import mlx.core as mx
import mlx.nn
from mlx.nn import Module

from .. import backends, contraction, devices, sync
from ..backends import mlx as mlx_backend
from ..channel_kernels import Observers, activated_sum, column_sums, sums_columns
from ..checks import dtype_name, flag, whole
from ..contraction import same_dtype
from ..devices import CPU, Device
from ..epilogue import Activation, Epilogue
from ..kernel_spec import KernelSpec
from ..ops import on_features
from ..ops.channels import activated
from ..problem import Plan, Problem
from ..quantized import QuantizedWeight
from ..relation import Relation
from ..routes import launch
from ..routes.needs import accelerate
from ..routes.table import named
from ..settings import boundary
from ..sync import is_transforming
from ..tensor import SparseTensor
from ..transformations import Linear, constant, zeros_of
from ..transformations import Linear as LinearRules
from .quantized import (
    BESIDE,
    NOTHING,
    Packable,
    Packed,
    Taken,
    Weight,
    as_float32,
    check_mode,
    is_integer,
    multiplied,
    pack,
    placed,
    taken,
)

__all__ = [
    "Linear", "QuantizedLinear",
]  # fmt: skip


def packed_linear(x: mx.array, w: QuantizedWeight) -> mx.array:
    """Return ``x @ W[0]`` for (..., C_in) features and a packed linear weight.

    Raises:
        TypeError: dtypes differ or are not floating.
        ValueError: the channels are not those of the weight.
    """
    dtype_name(x.dtype)
    if x.ndim < 1 or x.shape[-1] != w.in_channels:
        raise ValueError(
            f"features of shape {tuple(x.shape)} do not fit a packed weight of "
            f"{w.in_channels} input channels"
        )
    same_dtype(x, w, "the weight")
    y = _packed_linear(x.reshape(-1, w.in_channels), w, False)
    return y.reshape(*x.shape[:-1], w.shape[2])


class _PackedLinear(Linear):
    """``x @ W[0]`` of (x, words, scales, biases), or ``x @ W[0].T``."""

    def __init__(self, w: QuantizedWeight, transposed: bool):
        self.w, self.transposed = w, transposed

    def forward(self, x, *packed) -> mx.array:
        w = self.w.packing.weight(packed)
        if self.transposed or not x.shape[0]:
            return mlx_backend.packed_matmul(x, w, transpose=not self.transposed)
        # Without a relation there is one route.
        problem = Problem.forward(
            kernel_size=1,
            c_in=w.shape[1],
            c_out=w.shape[2],
            n_in=x.shape[0],
            dtype=dtype_name(x.dtype),
            bits=w.bits,
            group_size=w.group_size,
        )
        return _linear(problem, devices.current(), backends.missing(CPU))(None, x, w)

    def linear(self, x, *packed) -> mx.array:
        return _packed_linear(x, self.w.packing.weight(packed), self.transposed)

    def vjp(self, primals, dy, _):
        packed = primals[1:]
        dx = _packed_linear(dy, self.w.packing.weight(packed), not self.transposed)
        return dx, *[mx.zeros_like(a) for a in packed]


def _packed_linear(x, w: QuantizedWeight, transposed: bool) -> mx.array:
    return _PackedLinear(w, transposed)(x, *constant(*w.arrays))


@lru_cache(maxsize=64)
def _linear(problem: Problem, device: Device, absent: str | None) -> Plan:
    del absent  # part of the cache's key: the plan depends on it
    return named("quantized_pointwise").plan(problem, device)


@lru_cache(maxsize=8)  # levels of a net
def each_row(n: int) -> Relation:
    """Return the relation in which n rows feed themselves; it keeps their plans."""
    spec = KernelSpec.of(1, kernel_size=1)
    table = sync.complete(mx.arange(n, dtype=mx.int32)[:, None])
    return Relation("submanifold", 1, n, n, lambda *_: table, spec=spec, mirrored=True)


def is_contraction(x: mx.array) -> bool:
    """Return whether a linear layer of these rows is a contraction here.

    It is on CPUs where MLX has a reference BLAS alone; elsewhere MLX's matmul serves.
    """
    return x.ndim > 0 and devices.current().backend == devices.CPU and not accelerate()


def contracted(
    layer: Module, x: mx.array, epilogue: Epilogue | None = None
) -> mx.array:
    """Return a linear layer of rows, and an epilogue, as a contraction."""
    weight = _weight(layer)
    if not isinstance(weight, QuantizedWeight):
        weight = weight.T[None]
    rows = x.reshape(-1, x.shape[-1])
    relation, bias = each_row(len(rows)), layer.get("bias")
    with launch.scope(layer):
        y = contraction.conv(rows, weight, relation, bias=bias, epilogue=epilogue)
    return y.reshape(*x.shape[:-1], y.shape[1])


def takes_more(layer: Module, x: mx.array) -> bool:
    """Whether what follows a linear layer of rows may be computed with it.

    It is by contractions, packed or not: in their launch. Elsewhere MLX multiplies, and
    one more launch has all that follows. On CUDA that takes less time than tiles that
    compute both: 0.65 against 0.89 ms for 544 000 rows of half, 128 to 512 channels and
    SiLU, on an H200.
    """
    if type(layer) not in OWN or is_integer(layer):
        return False
    packed = isinstance(layer, Packed)
    weight = layer.scales if packed else layer.weight
    channels = layer.in_channels if packed else weight.shape[1]
    kinds = {weight.dtype, x.dtype, layer.get("bias", weight).dtype}
    return x.ndim == 2 and len(x) > 0 and x.shape[1] == channels and len(kinds) == 1


def followed(
    layer: Module, x: mx.array, residual: mx.array | None, act: Activation
) -> mx.array:
    """Return ``act(layer(x) + residual)`` of rows that a layer ``takes_more`` of."""
    if is_contraction(x):
        after = Epilogue(residual=residual, activation=act.called)
        return contracted(layer, x, after)
    weight, bias = _weight(layer), layer.get("bias")
    if isinstance(weight, QuantizedWeight):
        y = packed_linear(x, weight)
    else:
        y, bias = _product(x, weight, bias), None
    added = [each for each in (bias, residual) if each is not None]
    if len(added) + act.changes > 1:
        return activated_sum(y, act, bias, residual)
    for each in added:
        y = y + each
    return activated(y, act) if act.changes else y


def _weight(layer: Module) -> mx.array | QuantizedWeight:
    return layer.packed_weight() if isinstance(layer, Packed) else layer.weight


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
    def stands_for(cls, layer: Module) -> bool:
        """Whether a layer's call is ``Linear``'s, ours or MLX's."""
        return type(layer).__call__ in (Linear.__call__, mlx.nn.Linear.__call__)

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
        if not isinstance(x, SparseTensor):
            return self._rows(x)
        if not is_integer(self):
            return on_features(self._rows, x)
        held, inverse = taken(self, x), None
        if epilogue is not None and "output_inverse" in self:
            inverse = as_float32(self["output_inverse"])
        y = self._integers(held, epilogue or NOTHING, inverse)
        if x.manager is not None:  # rows alone may be those of a block of a stage
            boundary(y)
        return placed(self, (x.manager, x.key, x.coords), y, held.dtype)

    def _rows(self, x: mx.array) -> mx.array:
        _expect_channels(x, self.in_channels)
        if is_integer(self):
            y = self._integers(taken(self, x.reshape(-1, x.shape[-1])))
            return y.reshape(*x.shape[:-1], y.shape[1])
        if is_contraction(x):
            return contracted(self, x)
        y = packed_linear(x, self.packed_weight())
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
    twin = _twin(layer)
    return twin is not None and twin.stands_for(layer)


def why_no_twin(layer: Module) -> str | None:
    """Return why the ``to_quantized`` of a layer would be another layer's, or None."""
    own = getattr(type(layer), "to_quantized", None)
    inherits = own in (Packable.to_quantized, mlx.nn.Linear.to_quantized)
    if not inherits or _twin(layer) is None or has_twin(layer):
        return None
    return f"{type(layer).__name__} has a __call__ of its own"


def twin_holding(layer: Module, w: Weight) -> Module:
    """Return the twin of a convolution or of any ``mlx.nn.Linear`` with a weight."""
    return _twin(layer).holding(layer, w)


def _twin(layer: Module) -> type[Packed] | None:
    of_rows = QuantizedLinear if isinstance(layer, mlx.nn.Linear) else None
    return getattr(layer, "twin", of_rows)


class LinearCall(NamedTuple):
    """One call of a ``Linear``.

    Attributes:
        layer: the layer.
        rows: (N, C_in) features.
        result: what the layer returns for them.
    """

    layer: Linear
    rows: mx.array
    result: mx.array


linear_calls: Observers[LinearCall] = Observers("linear calls")


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

    def __init__(self, input_dims: int, output_dims: int, bias: bool = True):
        dims = whole(input_dims, "input_dims", 1), whole(output_dims, "output_dims", 1)
        super().__init__(*dims, flag(bias, "bias"))

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
        if not linear_calls.now():
            return on_features(self._apply, x)
        with launch.scope(self):
            return on_features(self._observed, x)

    def _observed(self, x: mx.array) -> mx.array:
        y = self._apply(x)
        if not launch.is_planning():
            linear_calls.tell(LinearCall(self, x.reshape(-1, x.shape[-1]), y))
        return y

    def _apply(self, x: mx.array) -> mx.array:
        _expect_channels(x, self.weight.shape[1])
        if x.size == 0:
            # MLX's CUDA matmul can't start for no rows.
            return zeros_of([x], (*x.shape[:-1], self.weight.shape[0]), x.dtype)
        if x.dtype == self.weight.dtype and is_contraction(x):
            return contracted(self, x)
        return _product(x, self.weight, self.get("bias"))


def observable(layer: Module) -> Module:
    """Return a linear layer of MLX as a ``Linear`` of the same arrays; others as is."""
    if not isinstance(layer, mlx.nn.Linear) or isinstance(layer, Linear):
        return layer
    copy = Linear.__new__(Linear)
    copy.__dict__.update(vars(layer))
    dict.update(copy, layer)
    return copy


def _expect_channels(x: mx.array, channels: int) -> None:
    if x.shape[-1:] != (channels,):
        raise ValueError(
            f"the layer has in_channels = {channels}; got features of shape "
            f"{tuple(x.shape)}"
        )


def _product(x: mx.array, w: mx.array, b: mx.array | None) -> mx.array:
    if b is None:
        return x @ w.T
    if is_transforming() and sums_columns(x):
        return _Affine()(x, w, b)
    return mx.addmm(b, x, w.T)


# Layers that what follows may be computed with: a subclass may mean something else.
OWN = Linear, QuantizedLinear


class _Affine(LinearRules):
    """MLX's rules of a linear layer, but that the bias's gradient is by a kernel."""

    operands = 2

    def forward(self, x: mx.array, w: mx.array, b: mx.array) -> mx.array:
        return mx.addmm(b, x, w.T)

    def linear(self, x: mx.array, w: mx.array) -> mx.array:
        return x @ w.T

    def vjp(self, primals, dy, _):
        x, w, b = primals
        return dy @ w, dy.T @ x, column_sums(dy, b)
