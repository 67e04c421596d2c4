"""Quantised twins: layers with packed weights, and layers that multiply integers.

``mlx.nn.quantize(model, group_size=..., bits=...)`` makes them. Parameters are named
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
from typing import NamedTuple

import mlx.core as mx
from mlx.nn import Module

from ..epilogue import Epilogue
from ..int8 import IntegerTensor, as_int8, integer_conv, inverse_of, rows_as_int8
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
from ..settings import boundary
from ..tensor import SparseTensor
from .layers import ModuleCache, Parameters

__all__ = ["FoldedNorm"]

INTEGER = "integer"
# Parameters that stay float32: scales of features, and "scales" in mode "integer".
FEATURE_SCALES = frozenset(("input_scale", "output_scale", "output_inverse"))
BESIDE = "scales", "biases", "multipliers"  # parameters beside a packed weight
NOTHING = Epilogue()
Weight = QuantizedWeight | IntegerWeight


class FoldedNorm(Module):
    """Stands where a norm was that calibration folded into the convolution before it.

    Args:
        kind (str): The norm's class, for readers.
    """

    def __init__(self, kind: str = "BatchNorm"):
        super().__init__()
        self.kind = kind

    def _extra_repr(self) -> str:
        return f"{self.kind}, in the convolution before it"

    def __call__(self, x):
        """Return the input."""
        return x


def is_integer(layer: object) -> bool:
    """Return whether a layer multiplies integers."""
    # Read from its dict: a module takes 2 us to say that it has no attribute.
    return getattr(layer, "__dict__", {}).get("mode") == INTEGER


def as_float32(a: mx.array) -> mx.array:
    """Cast to float32; no copy if it already is."""
    return a if a.dtype == mx.float32 else a.astype(mx.float32)


def check_scale(name: str, scale: mx.array) -> None:
    """Raise unless an array has the shape and dtype of a scale of features."""
    if scale.shape != (1,) or not mx.issubdtype(scale.dtype, mx.floating):
        raise ValueError(
            f"{name} must be floating, of shape (1,); got "
            f"{str(scale.dtype).rpartition('.')[2]}, {tuple(scale.shape)}"
        )


def set_output_scale(layer: Module, scale: mx.array) -> None:
    """Let a layer return int8: sets (1,) float32 scales, and their inverse."""
    check_scale("output_scale", scale)
    layer.output_scale = in_device_memory(scale)
    layer.output_inverse = in_device_memory(inverse_of(scale))
    layer.freeze(keys=["output_scale", "output_inverse"], recurse=False)


class KeepsScales(Parameters):
    """A module whose scales stay float32 when ``set_dtype`` casts a net to half.

    A layer's scale times that of its features is often too small for half precision,
    and one over a scale too large.
    """

    def __setitem__(self, name: str, value) -> None:
        """Set an array; a scale that is only cast keeps the bits that it had.

        Raises:
            ValueError: a scale of features is not (1,), or not floating.
        """
        is_array = isinstance(value, mx.array)
        if name in FEATURE_SCALES and is_array:
            check_scale(name, value)
        keeps = name in FEATURE_SCALES or (name == "scales" and is_integer(self))
        if keeps and is_array and value.dtype != mx.float32:
            old, wide = self.get(name), value.astype(mx.float32)
            if old is not None and old.shape == value.shape:
                wide = mx.where(old.astype(value.dtype) == value, old, wide)
            value = wide
        super().__setitem__(name, value)


# Integer layers


class Taken(NamedTuple):
    """Features as an integer layer takes them."""

    values: mx.array  # (N, C) int8
    scale: mx.array | None  # (1,) float32, or None if rows have their own
    rows: mx.array | None  # (N,) float32 scales of the rows, or None
    dtype: mx.Dtype  # of the float values


def taken(layer: Module, x: SparseTensor | mx.array) -> Taken:
    """Return the features of a tensor, or (N, C) features, as a layer takes them."""
    if isinstance(x, IntegerTensor):
        return Taken(x.values, x.scale, None, x.float_dtype)
    feats = x.feats if isinstance(x, SparseTensor) else x
    scale = layer.get("input_scale")
    tied, inverse = vars(layer).get("_tied_input", (None, None))
    return rounded(feats, scale, inverse if tied is scale else None)


def rounded(
    x: mx.array, scale: mx.array | None, inverse: mx.array | None = None
) -> Taken:
    """Return (N, C) floats rounded by one scale, or each row by its own."""
    if scale is not None:
        return Taken(as_int8(x, as_float32(scale), inverse), scale, None, x.dtype)
    values, rows = rows_as_int8(x)
    return Taken(values, None, rows, x.dtype)


def contract_integers(
    x: Taken,
    w: IntegerWeight,
    relation: Relation,
    scale: mx.array,
    bias: mx.array | None,
    groups: int = 1,
    after: Epilogue = NOTHING,
    inverse: mx.array | None = None,
) -> mx.array:
    """Return (N_out, C_out) of an integer layer, in the dtype of ``x`` or int8.

    ``scale`` is (C_out,) float32, by which the sums are multiplied; ``inverse`` (1,),
    one over the scale of an int8 result.
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


def multiplied(
    layer: Module, x: Taken, w: IntegerWeight, relation: Relation, *options
) -> mx.array:
    """Return ``contract_integers`` with a layer's scales and bias.

    ``w.scale`` of a calibrated layer is for features of its ``input_scale``. Features
    of that very array need no arithmetic.
    """
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
    feats, inverse = taken(layer, x), layer.get("output_inverse")
    inverse = None if inverse is None else as_float32(inverse)
    after = after or NOTHING
    y = multiplied(layer, feats, w, relation, layer.groups, after, inverse)
    boundary(y)
    place = x.manager, relation.out_key, relation.out_coords
    return placed(layer, place, y, feats.dtype)


def placed(layer: Module, place: tuple, y: mx.array, dtype: mx.Dtype) -> SparseTensor:
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

        Raises:
            ValueError: the weight cannot be packed with these arguments.
        """
        mode = check_mode(mode, quantize_input)
        return self.twin.from_layer(self, group_size, bits, mode)


class Packed(KeepsScales):
    """The parameters of a twin, and their packed weight.

    Attributes:
        bits, group_size: packing of the weight.
        mode: "affine", or "integer" if features are int8 too.
        in_channels: C_in / groups.
        rounding_error: norm of the error that rounding adds to an integer layer's
            output over the norm of the output, as calibration measured it; or None.
    """

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
        """Return the quantised twin of a float layer.

        Raises:
            ValueError: the weight cannot be packed with these arguments.
        """
        return cls.holding(layer, pack(layer, group_size, bits, check_mode(mode)))

    @classmethod
    def holding(cls, layer: Module, w: Weight) -> Module:
        """Return the quantised twin of a float layer with a weight that is packed.

        Raises:
            TypeError: the layer is of a subclass with a call of its own.
        """
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
        self.bits, self.group_size = w.bits, w.group_size
        self.in_channels = w.in_channels
        if isinstance(w, IntegerWeight):
            self.mode, self.weight, self.scales = INTEGER, w.values, w.scale
            self.pop("multipliers", None)
            if w.multipliers is not None:
                self.multipliers = w.multipliers
        else:
            self.mode = "affine"
            self.weight, self.scales, self.biases = w.arrays
        self.freeze()

    def packed_weight(self) -> Weight:
        """Return the parameters as they are now, checked against one another.

        The scale of a calibrated integer weight includes that of the features.

        Raises:
            ValueError: their shapes are not those of this layer.
        """
        return self._packed(self.kernel_size)

    def _packed(
        self,
        kernel: tuple[int, ...],
        stored: Callable[[mx.array], mx.array] | None = None,
    ) -> Weight:
        """Return the weight of parameters, each as ``stored`` returns it."""
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

        Args:
            input_scale: scale of features; ``scales`` is multiplied by it. Without it
                every row of float features has its own.
            output_scale: scale of an int8 result; without it the result is float.
            rounding_error: see the attributes.
        """
        if self.mode != INTEGER:
            raise ValueError('scales of features are for layers in mode "integer"')
        if input_scale is not None:
            scale = input_scale
            if "input_scale" in self:
                scale = scale / self.input_scale
            self.input_scale, self.scales = input_scale, self.scales * scale
        if output_scale is not None:
            set_output_scale(self, output_scale)
        self.rounding_error = rounding_error
        self.freeze()
        return self

    def to_quantized(self, *args, **kwargs) -> Module:
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
    """A convolution's constructor and call, over a packed weight.

    Args:
        *args, **kwargs: Those of the float layer.
        group_size (int): Input channels that share a scale: 32, 64 or 128. Default:
            ``64``.
        bits (int): 4 or 8. Default: ``4``.
        mode (str): ``"affine"``, or ``"integer"`` for int8 features.
    """

    def __init__(
        self,
        *args,
        group_size: int | None = None,
        bits: int | None = None,
        mode: str = "affine",
        **kwargs,
    ):
        super().__init__(*args, **kwargs)
        self._hold(pack(self, group_size, bits, check_mode(mode)))

    @property
    def channels(self) -> tuple[int, int]:
        """Input and output channels."""
        return self.in_channels * self.groups, self.weight.shape[1]

    def _extra_repr(self) -> str:
        return f"{super()._extra_repr()}, {self._packing_repr()}"
