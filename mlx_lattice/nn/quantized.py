"""Quantised twins: packed weights, and layers that multiply integers.

``mlx.nn.quantize(model, group_size=..., bits=...)`` makes them. Parameters are named
as in ``mlx.nn.QuantizedLinear`` (weight, scales, biases, bias) and frozen; every call
reads them, and any number of channels is padded in storage.

With ``quantize_input=True`` features are int8 too, and the mode is "integer": the
parameters are then weight, scales and, for int4, multipliers; input_scale and
output_scale if they were calibrated. A layer takes int8 features of the layer before,
or rounds floats by its ``input_scale``, or each row by its greatest magnitude. With an
``output_scale`` it writes int8 for the next integer layer: the norm, residual and
activation after it are in the same launch.
"""

from __future__ import annotations

from collections.abc import Callable
from math import isfinite
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
    module_layout,
    quantize_weight,
)
from ..relation import Relation
from ..settings import boundary
from ..tensor import SparseTensor
from .layers import ModuleCache, Parameters

__all__ = [
    "FoldedNorm", "tie_scales", "unpack_int4",
]  # fmt: skip


INTEGER = "integer"
# Parameters that are scales of integers; "scales" of a layer in mode "integer" alone.
OF_FEATURES = frozenset(("input_scale", "output_scale", "output_inverse"))
SCALES = OF_FEATURES | {"scales"}
NOTHING = Epilogue()


class FoldedNorm(Module):
    """Stands where a norm was that is now in the convolution before it.

    Args:
        kind (str): The norm's class, for readers.
    """

    def __init__(self, kind: str = "BatchNorm"):
        super().__init__()
        self.kind = kind

    def _extra_repr(self) -> str:
        return f"{self.kind}, in the convolution before it"

    def __call__(self, x):
        """Return what it gets."""
        return x


def as_float32(a: mx.array) -> mx.array:
    """Return an array in float32: itself where it is, so that one stays one."""
    return a if a.dtype == mx.float32 else a.astype(mx.float32)


class KeepsScales(Parameters):
    """A module whose scales stay float32 where ``set_dtype`` casts a net to half.

    A layer's scale times its features' is often below the normal numbers of half, and
    one over a scale above them.
    """

    def __setitem__(self, name: str, value) -> None:
        """Hold an array: a scale in float32, with what a cast would round off it.

        Raises:
            ValueError: a scale of features is not (1,), or not floating.
        """
        if name in OF_FEATURES and isinstance(value, mx.array):
            check_scale(name, value)
        if name in SCALES and (name != "scales" or is_integer(self)):
            value = _in_float32(value, self.get(name))
        super().__setitem__(name, value)


def check_scale(name: str, scale: mx.array) -> None:
    """Raise unless an array is a scale of features by shape and dtype."""
    if scale.shape != (1,) or not mx.issubdtype(scale.dtype, mx.floating):
        raise ValueError(
            f"{name} must be floating, of shape (1,); got "
            f"{str(scale.dtype).rpartition('.')[2]}, {tuple(scale.shape)}"
        )


def _in_float32(new: mx.array, old: mx.array | None) -> mx.array:
    """Return a scale in float32; where it is the rounding of an old one, the old."""
    if not isinstance(new, mx.array) or new.dtype == mx.float32:
        return new
    wide = new.astype(mx.float32)
    if old is None or old.shape != new.shape:
        return wide
    return mx.where(old.astype(new.dtype) == new, old, wide)


class Taken(NamedTuple):
    """Features as an integer layer takes them.

    Attributes:
        values: (N, C) int8.
        scale: (1,) float32, or None where rows have their own.
        rows: (N,) float32 scales of the rows, or None.
        dtype: of the floats that they stand for.
    """

    values: mx.array
    scale: mx.array | None
    rows: mx.array | None
    dtype: mx.Dtype


def is_integer(layer: object) -> bool:
    """Return whether a layer multiplies integers."""
    # By its own dict: asked for what is not there, a module raises, which takes 2 us.
    return getattr(layer, "__dict__", {}).get("mode") == INTEGER


def integers_of(layer: Module, bits: int | None, group_size: int | None):
    """Return a float layer's weight in integers, by its greatest magnitudes."""
    return integer_weight(
        layer.weight,
        bits=8 if bits is None else bits,
        group_size=group_size,
        layout=module_layout(layer.weight),
    )


def taken(layer: Module, x: SparseTensor | mx.array) -> Taken:
    """Return the features of a tensor, or (N, C) ones, as a layer takes them."""
    if isinstance(x, IntegerTensor):
        return Taken(x.values, x.scale, None, x.float_dtype)
    feats = x.feats if isinstance(x, SparseTensor) else x
    scale, inverse = getattr(layer, "_known_input", (None, None))
    own = layer.get("input_scale")
    return rounded(feats, own, inverse if scale is own else None)


def rounded(
    x: mx.array, scale: mx.array | None, inverse: mx.array | None = None
) -> Taken:
    """Return (N, C) floats rounded by one scale, or each row by its own.

    ``inverse`` is one over the scale, where that is known.
    """
    if scale is not None:
        return Taken(as_int8(x, as_float32(scale), inverse), scale, None, x.dtype)
    values, rows = rows_as_int8(x)
    return Taken(values, None, rows, x.dtype)


def factor(layer: Module, x: Taken, scales: mx.array) -> mx.array:
    """Return what sums of these features are multiplied by.

    ``scales`` of a layer with an ``input_scale`` are for features of that scale: where
    these have the very same array, nothing is computed.
    """
    own = layer.get("input_scale")
    if x.scale is own:  # or both are None: the rows have their own
        return scales
    if own is None:
        return scales * x.scale
    if x.scale is None:
        return scales / as_float32(own)
    return scales * (x.scale / as_float32(own))


def set_output_scale(layer: Module, scale: mx.array) -> None:
    """Let a convolution write int8: (1,) float32, and one over it for kernels."""
    check_scale("output_scale", scale)
    inverse = in_device_memory(inverse_of(scale))
    layer.output_scale, layer.output_inverse = in_device_memory(scale), inverse
    layer.freeze(keys=["output_scale", "output_inverse"], recurse=False)


def usable(scale: mx.array | None, path: str) -> mx.array | None:
    """Return a scale of features; None where these were all zero, or nothing was seen.

    A scale of 0 would make zeros of whatever comes later.

    Raises:
        ValueError: the features were not finite.
    """
    value = 0.0 if scale is None else scale.item()
    if not isfinite(value):
        raise ValueError(
            f"the batches have no scale at {path}: its features or its results are not "
            "all finite; calibrate on others"
        )
    return scale if value else None


def known_output(layer: Module) -> float | None:
    """Return the scale of an int8 result as a number, if it was read before."""
    scale, value = getattr(layer, "_known_output", (None, None))
    return value if scale is layer["output_scale"] else None


def tie_scales(model: Module) -> None:
    """Make equal scales of features one array, so that none is divided by another.

    The scales are read from the device, and put into its memory.
    """
    held = [
        (module, name, module[name])
        for module in model.modules()
        for name in ("output_scale", "input_scale", "output_inverse")
        if name in module
    ]
    mx.eval([scale for _, _, scale in held])
    one: dict[float, mx.array] = {}
    inverses: dict[float, mx.array] = {}
    for module, name, scale in held:
        value = scale.item()
        if value not in one:
            one[value] = in_device_memory(mx.array([value], dtype=scale.dtype))
        module[name] = one[value]
        if name == "output_scale":
            object.__setattr__(module, "_known_output", (module[name], value))
        if name == "input_scale":
            if value not in inverses:
                inverse = inverse_of(mx.array([value], dtype=mx.float32))
                inverses[value] = in_device_memory(inverse)
            known = module[name], inverses[value]
            object.__setattr__(module, "_known_input", known)


def put(model: Module, path: str, module: Module) -> None:
    """Put a module at a path of a model."""
    *above, last = path.split(".")
    at = model
    for name in above:
        at = at[int(name)] if isinstance(at, list) else at[name]
    at[int(last) if isinstance(at, list) else last] = module


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

    ``scale`` is (C_out,) float32, of the sums; ``after`` a norm as scale and shift, a
    residual, an activation; ``inverse`` (1,) one over the scale of an int8 result.
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
    layer: Module, x: Taken, w: IntegerWeight, relation: Relation, *given
) -> mx.array:
    """Return ``contract_integers`` with a layer's scales and bias."""
    scale, bias = factor(layer, x, w.scale), layer.get("bias")
    return contract_integers(x, w, relation, scale, bias, *given)


def convolved(
    layer: Module,
    x: SparseTensor,
    w: IntegerWeight,
    relation: Relation,
    after: Epilogue | None,
) -> SparseTensor:
    """Return the tensor that an integer convolution makes of another."""
    held, inverse = taken(layer, x), layer.get("output_inverse")
    inverse = None if inverse is None else as_float32(inverse)
    y = multiplied(layer, held, w, relation, layer.groups, after or NOTHING, inverse)
    boundary(y)
    place = x.manager, relation.out_key, relation.out_coords
    return placed(layer, place, y, held.dtype)


def placed(layer: Module, place: tuple, y: mx.array, dtype: mx.Dtype) -> SparseTensor:
    """Return the result of an integer layer as a tensor, float or int8."""
    if y.dtype != mx.int8:
        return SparseTensor.trusted(*place, y)
    scale = as_float32(layer["output_scale"])
    return IntegerTensor.on(*place, y, scale, dtype, known_output(layer))


BESIDE = "scales", "biases", "multipliers"  # parameters beside a packed weight
Weight = QuantizedWeight | IntegerWeight


def check_mode(mode: str, quantize_input: bool = False) -> str:
    """Return "affine" or "integer"; raise for what sparse layers do not have."""
    if mode not in ("affine", INTEGER):
        raise ValueError(
            f'sparse layers are packed in mode "affine", or "integer" where features '
            f"are int8 too; got {mode!r}. Leave the layer out by class_predicate"
        )
    return INTEGER if quantize_input else mode


def pack(
    layer: Module, group_size: int | None, bits: int | None, mode: str = "affine"
) -> Weight:
    """Return a layer's weight packed: (C_out, C_in), or (C_out, spatial..., C_in)."""
    if mode == INTEGER:
        return integers_of(layer, bits, group_size)
    return quantize_weight(
        layer.weight,
        bits=DEFAULT_BITS if bits is None else bits,
        group_size=DEFAULT_GROUP_SIZE if group_size is None else group_size,
        layout=module_layout(layer.weight),
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
        """Return the layer with a packed weight, as ``mlx.nn.quantize`` asks for.

        Args:
            group_size (int, optional): Input channels that share a scale: 32, 64 or
                128. Default: ``64``; of int8 weights for int8 features there are none.
            bits (int, optional): 4 or 8. Default: ``4``, or ``8`` for int8 features.
            mode (str): ``"affine"``, or ``"integer"`` for int8 features.
            quantize_input (bool): If ``True`` the mode is ``"integer"``: features are
                rounded to int8, each row by its greatest magnitude; ``ml.calibrate``
                chooses one scale instead, which is faster.

        Raises:
            ValueError: an argument is none of these.
        """
        return self._packed_as(group_size, bits, check_mode(mode, quantize_input))

    def _packed_as(self, group_size: int | None, bits: int | None, mode: str) -> Module:
        return self.twin.from_layer(self, group_size, bits, mode)


class Packed(KeepsScales):
    """Parameters that a twin holds, and the weight that they make.

    Attributes:
        bits, group_size: of the weight.
        mode: "affine", or "integer" where features are int8 too.
        in_channels: C_in / groups.
        rounding_error: of an integer layer, the norm of what rounding did to its output
            over that of the output, when it was calibrated; None if nobody knows.
    """

    rounding_error: float | None = None

    @classmethod
    def stands_for(cls, layer: Module) -> bool:
        """Whether a layer's call is the twin's, and no other that a subclass has."""
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
            ValueError: bits, group size or mode are none that can be packed.
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
        # Arrays are items of a module, what else it has attributes.
        held = {k: v for k, v in layer.items() if k != "weight"}
        held |= {k: v for k, v in vars(layer).items() if k != "_no_grad"}
        for name, value in held.items():
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

        The scale of a calibrated integer weight has that of the features in it.

        Raises:
            ValueError: their shapes are not those of this layer.
        """
        if self.mode == INTEGER:
            return self._packed(self.kernel_size, lambda a: a)
        # The weight is of these very arrays: what changes them in place changes it.
        words, scales, biases = self["weight"], self["scales"], self["biases"]
        known = getattr(self, "_weights", None)
        if known is None:
            known = ModuleCache()
            object.__setattr__(self, "_weights", known)  # not a parameter
        made = known.get("last")
        if made is None or not (
            made.weight is words and made.scales is scales and made.biases is biases
        ):
            made = known["last"] = self._packed(self.kernel_size, lambda a: a)
        return made

    def _packed(
        self, kernel: tuple[int, ...], stored: Callable[[mx.array], mx.array]
    ) -> Weight:
        """Return the weight of parameters, each as ``stored`` has it."""
        facts = self.in_channels, self.bits, self.group_size, kernel
        if self.mode == INTEGER:
            multipliers = stored(self["multipliers"]) if self.bits == 4 else None
            scale = as_float32(self["scales"])
            return IntegerWeight(stored(self["weight"]), multipliers, scale, *facts)
        arrays = (self["weight"], self["scales"], self["biases"])
        return QuantizedWeight(*map(stored, arrays), *facts)

    def calibrated(
        self,
        input_scale: mx.array | None = None,
        output_scale: mx.array | None = None,
        rounding_error: float | None = None,
    ) -> Module:
        """Give an integer layer its scales, each (1,) float32, and return it.

        Args:
            input_scale: of features; ``scales`` have it in them. Without it every row
                of float features has its own.
            output_scale: of an int8 result; without it the result is float.
            rounding_error: as of the attributes.
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


def unpack_int4(model: Module) -> tuple[str, ...]:
    """Hold the int4 weights of integer layers as int8, in place: the same results.

    Where features are int8, GPUs multiply int8 weights: int4 ones are unpacked at every
    call, in a launch more. Unpacked once, they take twice the memory, and the time of
    int8 ones. A file that is written afterwards has int8 weights.

    Args:
        model: a net of ``ml.calibrate``, or a part of one.

    Returns:
        Paths of the layers that had int4 weights.
    """
    found = []
    for path, module in model.named_modules():
        if getattr(module, "mode", None) == INTEGER and module.bits == 4:
            module._hold(module.packed_weight().unpacked())
            found.append(path)
    mx.eval(model.parameters())
    return tuple(sorted(found))


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
