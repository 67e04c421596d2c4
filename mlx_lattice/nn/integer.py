"""How integer layers run: features rounded, contracted exactly, and what follows.

A twin in mode "integer" holds an ``IntegerWeight``. Features are int8 already, from the
layer before; or floats, rounded by the layer's ``input_scale``, or by the greatest
magnitude of each row where it has none. With an ``output_scale`` it writes int8 for the
next integer layer: the norm, residual and activation after it are in the same launch.
"""

from __future__ import annotations

from math import isfinite
from typing import NamedTuple

import mlx.core as mx
from mlx.nn import Module

from ..epilogue import Epilogue
from ..integer_contraction import integer_conv
from ..integer_facts import in_device_memory
from ..integer_tensor import IntegerTensor, as_int8, inverse_of, rows_as_int8
from ..integer_weight import IntegerWeight, integer_weight
from ..quantized import module_layout
from ..relation import Relation
from ..settings import boundary
from ..tensor import SparseTensor
from .parameters import Parameters

__all__ = ["FoldedNorm", "tie_scales"]

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


def contracted(
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

    Args:
        x: features.
        w: its weight.
        relation: the edges.
        scale: (C_out,) float32, of the sums.
        bias: (C_out,), or None.
        groups: channel groups.
        after: a norm as scale and shift, a residual, an activation.
        inverse: (1,) float32, one over the scale of an int8 result, or None.
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
    """Return ``contracted`` with a layer's scales and bias; then what that takes."""
    scale, bias = factor(layer, x, w.scale), layer.get("bias")
    return contracted(x, w, relation, scale, bias, *given)


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
