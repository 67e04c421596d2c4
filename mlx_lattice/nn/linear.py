"""Linear layers, and the quantised twins of linear layers and convolutions.

``mlx.nn.quantize(model, group_size=..., bits=...)`` makes twins. Parameters are named
as in ``mlx.nn.QuantizedLinear`` (weight, scales, biases, bias) and frozen; every call
reads them. Any number of channels is padded in storage.

With ``quantize_input=True`` features are int8 too, and the mode is "integer". The
parameters are then weight, scales and, for int4, multipliers; calibrated layers also
have input_scale and output_scale. A layer takes the int8 features of the layer before,
or rounds float features: by its ``input_scale``, or each row by its greatest
magnitude. With an ``output_scale`` it returns int8 features for the next integer
layer; the norm, residual and activation after it are computed in the same launch.
"""

from __future__ import annotations

import operator
from collections.abc import Callable
from functools import lru_cache
from typing import Any, NamedTuple

import mlx.core as mx
import mlx.nn
from mlx.nn import Module

from .. import contraction, devices, sync
from ..channel_kernels import Observers, activated_sum, column_sums, sums_columns
from ..checks import flag, whole
from ..epilogue import Activation, Epilogue
from ..int8 import IntegerTensor, as_int8, integer_conv, inverse_of, rows_as_int8
from ..kernel_spec import KernelSpec
from ..ops import on_features
from ..ops.channels import activated
from ..problem import in_device_memory
from ..quantized import (
    DEFAULT_BITS,
    DEFAULT_GROUP_SIZE,
    IntegerWeight,
    QuantizedWeight,
    integer_weight,
    quantize_weight,
)
from ..relation import Relation
from ..routes import launch
from ..routes.needs import accelerate
from ..settings import boundary
from ..sync import is_transforming
from ..tensor import Features, SparseTensor
from ..transformations import Linear as LinearRules
from ..transformations import zeros_of
from .layers import ModuleCache, Parameters

__all__ = ["FoldedNorm", "Linear", "QuantizedLinear"]

INTEGER = "integer"
# Parameters that stay float32: scales of features, and "scales" in mode "integer".
FEATURE_SCALES = frozenset(("input_scale", "output_scale", "output_inverse"))
NOTHING = Epilogue()
Weight = QuantizedWeight | IntegerWeight


class FoldedNorm(Module):
    """Return the input, in place of a norm that calibration folded into a convolution.

    Args:
        kind (str): The class of the norm, shown in ``repr``.

    Examples:
        >>> nn.FoldedNorm("BatchNorm")
        FoldedNorm(BatchNorm, in the convolution before it)
    """

    def __init__(self, kind: str = "BatchNorm"):
        super().__init__()
        self.kind = kind

    def _extra_repr(self) -> str:
        return f"{self.kind}, in the convolution before it"

    def __call__(self, x: Features) -> Features:
        """Return the input."""
        return x


def is_integer(layer: object) -> bool:
    """Return whether a layer multiplies integers."""
    # Read from its dict: a module takes 2 us to say that it has no attribute.
    return getattr(layer, "__dict__", {}).get("mode") == INTEGER


def as_float32(a: mx.array) -> mx.array:
    """Cast to float32; no copy if it already is."""
    return a if a.dtype == mx.float32 else a.astype(mx.float32)


def _check_scale(name: str, scale: mx.array) -> None:
    if scale.shape != (1,) or not mx.issubdtype(scale.dtype, mx.floating):
        raise ValueError(
            f"{name} must be floating, of shape (1,); got "
            f"{str(scale.dtype).rpartition('.')[2]}, {tuple(scale.shape)}"
        )


def set_output_scale(layer: Module, scale: mx.array) -> None:
    """Let a layer return int8: sets (1,) float32 scales, and their inverse."""
    _check_scale("output_scale", scale)
    layer.output_scale = in_device_memory(scale)
    layer.output_inverse = in_device_memory(inverse_of(scale))
    layer.freeze(keys=["output_scale", "output_inverse"], recurse=False)


class KeepsScales(Parameters):
    """A module whose scales stay float32 when ``set_dtype`` casts a net to half.

    A layer's scale times that of its features is often too small for half precision,
    and one over a scale too large. A scale that is only cast keeps its bits.
    """

    def __setitem__(self, name: str, value: object) -> None:
        is_array = isinstance(value, mx.array)
        if name in FEATURE_SCALES and is_array:
            _check_scale(name, value)
        keeps = name in FEATURE_SCALES or (name == "scales" and is_integer(self))
        if keeps and is_array and value.dtype != mx.float32:
            old, wide = self.get(name), value.astype(mx.float32)
            if old is not None and old.shape == value.shape:
                wide = mx.where(old.astype(value.dtype) == value, old, wide)
            value = wide
        super().__setitem__(name, value)


# Integer layers


class Rounded(NamedTuple):
    """Features as an integer layer takes them."""

    values: mx.array  # (N, C) int8
    scale: mx.array | None  # (1,) float32, or None if rows have their own
    rows: mx.array | None  # (N,) float32 scales of the rows, or None
    dtype: mx.Dtype  # of the float values


def rounded(
    x: mx.array, scale: mx.array | None, inverse: mx.array | None = None
) -> Rounded:
    """Return (N, C) floats rounded by one scale, or each row by its own."""
    if scale is not None:
        return Rounded(as_int8(x, as_float32(scale), inverse), scale, None, x.dtype)
    values, rows = rows_as_int8(x)
    return Rounded(values, None, rows, x.dtype)


def _rounded_for(layer: Module, x: SparseTensor | mx.array) -> Rounded:
    """Return the features of a tensor, or (N, C) features, as a layer takes them."""
    if isinstance(x, IntegerTensor):
        return Rounded(x.values, x.scale, None, x.float_dtype)
    feats = x.feats if isinstance(x, SparseTensor) else x
    scale = layer.get("input_scale")
    tied, inverse = vars(layer).get("_tied_input", (None, None))
    return rounded(feats, scale, inverse if tied is scale else None)


def contract_integers(
    x: Rounded,
    w: IntegerWeight,
    relation: Relation,
    scale: mx.array,
    bias: mx.array | None,
    groups: int = 1,
    after: Epilogue = NOTHING,
    inverse: mx.array | None = None,
) -> mx.array:
    """Return (N_out, C_out) of an integer layer, in the dtype of ``x`` or int8.

    ``scale`` (C_out,) multiplies sums; ``inverse`` is one over that of an int8 result.
    """
    shift = None if bias is None else as_float32(bias)
    if after.scale is not None:
        scale = scale * after.scale
        shift = after.shift if shift is None else shift * after.scale + after.shift
    return integer_conv(
        x.values,
        w,
        relation,
        scale=scale,
        shift=shift,
        residual=after.residual,
        residual_scale=after.residual_scale,
        activation=after.activation,
        out_inverse=inverse,
        row_scales=x.rows,
        groups=groups,
        dtype=x.dtype,
    )


def _multiplied(
    layer: Module, x: Rounded, w: IntegerWeight, relation: Relation, *options
) -> mx.array:
    """Return ``contract_integers`` with a layer's scales and bias."""
    # ``w.scale`` of a calibrated layer is for features of its ``input_scale``: those of
    # that very array need no arithmetic.
    scale, calibrated = w.scale, layer.get("input_scale")
    if x.scale is not calibrated:  # else rows may have their own: both are None
        if calibrated is None:
            scale = scale * x.scale
        elif x.scale is None:
            scale = scale / as_float32(calibrated)
        else:
            scale = scale * (x.scale / as_float32(calibrated))
    return contract_integers(x, w, relation, scale, layer.get("bias"), *options)


def convolved(
    layer: Module,
    x: SparseTensor,
    w: IntegerWeight,
    relation: Relation,
    after: Epilogue | None,
) -> SparseTensor:
    """Return the result of an integer convolution of a tensor."""
    feats, inverse = _rounded_for(layer, x), layer.get("output_inverse")
    inverse = None if inverse is None else as_float32(inverse)
    options = layer.groups, after or NOTHING, inverse
    y = _multiplied(layer, feats, w, relation, *options)
    boundary(y)
    place = x.manager, relation.out_key, relation.out_coords
    return _placed(layer, place, y, feats.dtype)


def _placed(layer: Module, place: tuple, y: mx.array, dtype: mx.Dtype) -> SparseTensor:
    """Return the result of an integer layer as a tensor, float or int8."""
    if y.dtype != mx.int8:
        return SparseTensor.trusted(*place, y)
    return IntegerTensor.on(*place, y, as_float32(layer["output_scale"]), dtype)


# Float layers and their twins


def check_mode(mode: str, quantize_input: bool = False) -> str:
    """Return "affine" or "integer"; raise for modes that sparse layers do not have."""
    if mode not in ("affine", INTEGER):
        raise ValueError(
            f'sparse layers are packed in mode "affine", or "integer" with int8 '
            f"features; got {mode!r}. Leave the layer out by class_predicate"
        )
    return INTEGER if quantize_input else mode


def pack(
    layer: Module, group_size: int | None, bits: int | None, mode: str = "affine"
) -> Weight:
    """Return a layer's weight packed: (C_out, C_in), or (C_out, spatial..., C_in)."""
    if mode == INTEGER:
        bits = 8 if bits is None else bits
        options = {"bits": bits, "group_size": group_size, "layout": "module"}
        return integer_weight(layer.weight, **options)
    return quantize_weight(
        layer.weight,
        bits=DEFAULT_BITS if bits is None else bits,
        group_size=DEFAULT_GROUP_SIZE if group_size is None else group_size,
        layout="module",
    )


class Packable(KeepsScales):
    """A layer that has a quantised twin, as ``mlx.nn.quantize`` finds it."""

    twin: type[Packed]  # what the layer becomes

    def to_quantized(
        self,
        group_size: int | None = None,
        bits: int | None = None,
        mode: str = "affine",
        quantize_input: bool = False,
    ) -> Module:
        """Return the layer with a packed weight; ``mlx.nn.quantize`` calls it.

        Args:
            group_size (int, optional): Input channels that share a scale: 32, 64 or
                128. Default: ``64``; int8 weights for int8 features have no groups.
            bits (int, optional): 4 or 8. Default: ``4``, or ``8`` for int8 features.
            mode (str): ``"affine"``, or ``"integer"`` for int8 features.
            quantize_input (bool): If ``True`` the mode is ``"integer"``: features are
                rounded to int8, each row by its greatest magnitude. ``ml.calibrate``
                chooses one scale for all rows, which is faster.
        """
        mode = check_mode(mode, quantize_input)
        return self.twin.from_layer(self, group_size, bits, mode)


class Packed(KeepsScales):
    """The parameters of a twin, and their packed weight."""

    biases: mx.array

    # Norm of the error that rounding adds to an integer layer's output over the norm of
    # the output, as calibration measured it.
    rounding_error: float | None = None

    @classmethod
    def stands_for(cls, layer: Module) -> bool:
        """Whether a layer's call is the twin's; a subclass may have another."""
        return type(layer).__call__ is cls.__call__

    @classmethod
    def from_layer(
        cls,
        layer: Module,
        group_size: int | None = None,
        bits: int | None = None,
        mode: str = "affine",
    ) -> Module:
        """Return the quantised twin of a float layer."""
        return cls.holding(layer, pack(layer, group_size, bits, check_mode(mode)))

    @classmethod
    def holding(cls, layer: Module, w: Weight) -> Module:
        """Return the quantised twin of a float layer with a weight that is packed."""
        if not cls.stands_for(layer):
            raise TypeError(
                f"{type(layer).__name__} has a __call__ of its own, which "
                f"{cls.__name__} does not have; leave it out by class_predicate, or "
                "give it a to_quantized"
            )
        twin = cls.__new__(cls)
        Module.__init__(twin)
        # A module's arrays are its items, everything else is in its __dict__.
        facts = {k: v for k, v in layer.items() if k != "weight"}
        facts |= {k: v for k, v in vars(layer).items() if k != "_no_grad"}
        for name, value in facts.items():
            setattr(twin, name, value)
        twin._hold(w)
        return twin

    def _hold(self, w: Weight) -> None:
        self.bits: int = w.bits
        self.group_size: int | None = w.group_size
        self.in_channels: int = w.in_channels
        if isinstance(w, IntegerWeight):
            self.mode: str = INTEGER
            self.weight: mx.array = w.values
            self.scales: mx.array = w.scale
            self.pop("multipliers", None)
            if w.multipliers is not None:
                self.multipliers: mx.array = w.multipliers
        else:
            self.mode = "affine"
            self.weight, self.scales, self.biases = w.arrays
        self.freeze()

    def packed_weight(self) -> Weight:
        """Return the parameters as they are now, checked against one another.

        The scale of a calibrated integer weight includes that of the features.
        """
        return self._packed(self.kernel_size)

    def _packed(
        self,
        kernel: tuple[int, ...],
        stored: Callable[[mx.array], mx.array] | None = None,
    ) -> Weight:
        kind, names = QuantizedWeight, ("weight", "scales", "biases")
        if self.mode == INTEGER:
            kind, names = IntegerWeight, ("weight", "multipliers", "scales")
        parameters = arrays = [dict.get(self, name) for name in names]
        # Checking takes longer than a launch: the same arrays are checked once. The
        # weight has these very arrays, so it is right when they change in place.
        cache = self.__dict__.get("_checked")
        is_checked = cache and not any(
            map(operator.is_not, parameters, cache["arrays"])
        )
        if is_checked and stored is None:
            return cache["weight"]
        if stored is not None:
            arrays = [a if a is None or a.ndim == 1 else stored(a) for a in parameters]
        if is_checked:
            return cache["weight"].packing.weight(arrays)
        facts = self.in_channels, self.bits, self.group_size, kernel
        weight = kind(*arrays, *facts)
        self.__dict__["_checked"] = ModuleCache(arrays=parameters, weight=weight)
        return weight

    def calibrated(
        self,
        input_scale: mx.array | None = None,
        output_scale: mx.array | None = None,
        rounding_error: float | None = None,
    ) -> Module:
        """Set the scales of an integer layer, each (1,) float32, and return it.

        ``scales`` is multiplied by ``input_scale``, that of the features; without it
        every row of float features has its own. ``output_scale`` is the scale of an
        int8 result; without it the result is float.
        """
        if self.mode != INTEGER:
            raise ValueError('scales of features are for layers in mode "integer"')
        if input_scale is not None:
            scale = input_scale
            if "input_scale" in self:
                scale = scale / self.input_scale
            self.input_scale: mx.array = input_scale
            self.scales = self.scales * scale
        if output_scale is not None:
            set_output_scale(self, output_scale)
        self.rounding_error = rounding_error
        self.freeze()
        return self

    def to_quantized(self, *args: Any, **kwargs: Any) -> Module:
        """Return the layer itself: it is packed already."""
        return self

    def _packing_repr(self) -> str:
        text = f"group_size={self.group_size}, bits={self.bits}"
        if self.mode != INTEGER:
            return text
        scales = "calibrated" if "input_scale" in self else "by row"
        result = ", to int8" if "output_scale" in self else ""
        return f"{text}, int8 features {scales}{result}"


class QuantizedConvolution(Packed):
    """A convolution's constructor and call, over a packed weight."""

    def __init__(
        self,
        *args: Any,
        group_size: int | None = None,
        bits: int | None = None,
        mode: str = "affine",
        **kwargs: Any,
    ):
        super().__init__(*args, **kwargs)
        self._hold(pack(self, group_size, bits, check_mode(mode)))

    @property
    def channels(self) -> tuple[int, int]:
        """Input and output channels."""
        return self.in_channels * self.groups, self.weight.shape[1]

    def _extra_repr(self) -> str:
        return f"{super()._extra_repr()}, {self._packing_repr()}"


# Linear layers


@lru_cache(maxsize=8)  # levels of a net
def each_row(n: int) -> Relation:
    """Return the relation in which n rows feed themselves; it keeps their plans."""
    spec = KernelSpec.of(1, kernel_size=1)
    table = sync.complete(mx.arange(n, dtype=mx.int32)[:, None])
    return Relation("submanifold", 1, n, n, lambda *_: table, spec=spec, mirrored=True)


def is_contraction(x: mx.array) -> bool:
    """Return whether a float linear layer of these rows is a contraction here.

    It is on CPUs where MLX has a reference BLAS alone; elsewhere MLX's matmul serves.
    """
    return x.ndim > 0 and devices.current().backend == devices.CPU and not accelerate()


def contracted(
    layer: Module, x: mx.array, epilogue: Epilogue | None = None
) -> mx.array:
    """Return a linear layer of rows, and an epilogue, as a contraction."""
    return _contracted(layer, x, layer.get("bias"), epilogue)


def _contracted(
    layer: Module, x: mx.array, bias: mx.array | None, after: Epilogue | None
) -> mx.array:
    is_packed = isinstance(layer, Packed)
    weight = layer.packed_weight() if is_packed else layer.weight.T[None]
    rows = x.reshape(-1, x.shape[-1])
    with launch.scope(layer):
        relation = each_row(len(rows))
        y = contraction.conv(rows, weight, relation, bias=bias, epilogue=after)
    return y.reshape(*x.shape[:-1], y.shape[1])


def takes_more(layer: Module, x: mx.array) -> bool:
    """Whether what follows a linear layer of rows may be computed with it."""
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
    bias = layer.get("bias")
    if isinstance(layer, Packed):
        y = _contracted(layer, x, None, None)
    else:
        y, bias = _product(x, layer.weight, bias), None
    added = [each for each in (bias, residual) if each is not None]
    if len(added) + act.changes > 1:
        return activated_sum(y, act, bias, residual)
    for each in added:
        y = y + each
    return activated(y, act) if act.changes else y


class QuantizedLinear(Packed, mlx.nn.QuantizedLinear):
    """Apply a linear layer with a packed weight to each row, of any number of channels.

    Arguments are those of ``Linear``; ``group_size``, ``bits`` and ``mode`` are those
    of ``QuantizedConv``.

    Examples:
        >>> layer = nn.QuantizedLinear(64, 16, bits=4)
        >>> layer(mx.ones((5, 64))).shape
        (5, 16)
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
            self.bias: mx.array = linear.bias
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
        """Return ``from_layer``, as MLX names it."""
        return cls.from_layer(linear_layer, group_size, bits, mode)

    def _hold(self, w: Weight) -> None:
        super()._hold(w)
        # MLX's own layout of a linear weight has no axis of offsets.
        for name in ("weight", "scales", "biases", "multipliers"):
            if name in self and self[name].ndim == 3:
                self[name] = self[name][0]

    def packed_weight(self) -> Weight:
        """Return the parameters as they are now, checked against one another."""
        return self._packed((), lambda a: a[None])

    def __call__(self, x: Features, *, epilogue: Epilogue | None = None) -> Features:
        """Apply the layer to each row.

        With an ``epilogue``, which integer layers take beside a tensor, the result is
        int8 if the layer has an ``output_scale``.
        """
        if not isinstance(x, SparseTensor):
            return self._rows(x)
        if not is_integer(self):
            return on_features(self._rows, x)
        feats, inverse = _rounded_for(self, x), None
        if epilogue is not None and "output_inverse" in self:
            inverse = as_float32(self["output_inverse"])
        y = self._integers(feats, epilogue or NOTHING, inverse)
        if x.manager is not None:  # rows alone may be those of a block of a stage
            boundary(y)
        return _placed(self, (x.manager, x.key, x.coords), y, feats.dtype)

    def _rows(self, x: mx.array) -> mx.array:
        _expect_channels(x, self.in_channels)
        if is_integer(self):
            y = self._integers(_rounded_for(self, x.reshape(-1, x.shape[-1])))
            return y.reshape(*x.shape[:-1], y.shape[1])
        return contracted(self, x)

    def _integers(self, x: Rounded, *after) -> mx.array:
        relation = each_row(len(x.values))
        with launch.scope(self):
            return _multiplied(self, x, self.packed_weight(), relation, 1, *after)

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
    """One call of a ``Linear``."""

    layer: Linear
    rows: mx.array  # (N, C_in)
    result: mx.array


linear_calls: Observers[LinearCall] = Observers("linear calls")


class Linear(Packable, mlx.nn.Linear):
    """Apply a linear layer to each row: ``mlx.nn.Linear`` that takes tensors too.

    On CPUs where MLX only has a reference BLAS, the layer is a contraction with one
    offset, with a route and a line in traces. Elsewhere it is MLX's matmul. With a
    packed weight it is a contraction on every device.

    Args:
        input_dims (int): The number of input channels.
        output_dims (int): The number of output channels.
        bias (bool): If ``True`` add a learnable bias. Default: ``True``.

    Examples:
        >>> x = ml.SparseTensor.from_dense(mx.ones((1, 4, 4, 4, 8)))
        >>> nn.Linear(8, 3)(x).shape, nn.Linear(8, 3)(x.feats).shape
        ((64, 3), (64, 3))
    """

    twin: type[Packed] = QuantizedLinear

    def __init__(self, input_dims: int, output_dims: int, bias: bool = True):
        dims = whole(input_dims, "input_dims", 1), whole(output_dims, "output_dims", 1)
        super().__init__(*dims, flag(bias, "bias"))

    def __call__(self, x: Features) -> Features:
        """Apply the layer to each row."""
        if isinstance(x, SparseTensor) and x.dtype != self.weight.dtype:
            raise TypeError(
                f"features are {x.dtype}, the weight is {self.weight.dtype}; cast one "
                "with .astype or set_dtype"
            )
        if not linear_calls:
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
