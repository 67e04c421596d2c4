"""How integer layers run: features rounded, contracted exactly, and what follows.

A twin in mode "integer" holds an ``IntegerWeight``. Features are int8 already, from the
layer before; or floats, rounded by the layer's ``input_scale``, or by the greatest
magnitude of each row where it has none. With an ``output_scale`` it writes int8 for the
next integer layer: the norm, residual and activation after it are in the same launch.
"""

from __future__ import annotations

from typing import NamedTuple

import mlx.core as mx
from mlx.nn import Module

from ..epilogue import Epilogue
from ..integer_contraction import integer_conv
from ..integer_tensor import IntegerTensor, as_int8, row_scales
from ..integer_weight import IntegerWeight, integer_weight
from ..memory.stages import boundary
from ..relation import Relation
from ..tensor import SparseTensor

__all__ = ["FoldedNorm"]

INTEGER = "integer"
ONE = "input_scale", "output_scale"  # (1,) float32, where a layer has them
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
    return getattr(layer, "mode", None) == INTEGER


def integers_of(layer: Module, bits: int | None, group_size: int | None):
    """Return a float layer's weight in integers, by its greatest magnitudes."""
    return integer_weight(
        layer.weight,
        bits=8 if bits is None else bits,
        group_size=group_size,
        layout="linear" if layer.weight.ndim == 2 else "module",
    )


def taken(layer: Module, x: SparseTensor | mx.array) -> Taken:
    """Return the features of a tensor, or (N, C) ones, as a layer takes them."""
    if isinstance(x, IntegerTensor):
        return Taken(x.values, x.scale, None, x.float_dtype)
    feats = x.feats if isinstance(x, SparseTensor) else x
    return rounded(feats, layer.get("input_scale"))


def rounded(x: mx.array, scale: mx.array | None) -> Taken:
    """Return (N, C) floats rounded by one scale, or each row by its own."""
    if scale is not None:
        scale = as_float32(scale)
        return Taken(as_int8(x, scale), scale, None, x.dtype)
    rows = row_scales(x)
    return Taken(as_int8(x, rows[:, None]), None, rows, x.dtype)


def put(model: Module, path: str, module: Module) -> None:
    """Put a module at a path of a model."""
    *above, last = path.split(".")
    at = model
    for name in above:
        at = at[int(name)] if isinstance(at, list) else at[name]
    at[int(last) if isinstance(at, list) else last] = module


def contracted(
    layer: Module,
    x: Taken,
    w: IntegerWeight,
    relation: Relation,
    groups: int = 1,
    after: Epilogue = NOTHING,
    out_scale: mx.array | None = None,
) -> mx.array:
    """Return (N_out, C_out) of a layer, in the dtype of ``x`` or int8.

    Args:
        layer: has the bias.
        x: features.
        w: its weight.
        relation: the edges.
        groups: channel groups.
        after: a norm as scale and shift, a residual, an activation.
        out_scale: (1,) float32 of an int8 result, or None.
    """
    scale = w.scale if x.scale is None else w.scale * x.scale
    shift = layer.get("bias")
    shift = None if shift is None else as_float32(shift)
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
        out_inverse=None if out_scale is None else 1 / as_float32(out_scale),
        row_scales=x.rows,
        groups=groups,
        dtype=x.dtype,
    )


def convolved(
    layer: Module,
    x: SparseTensor,
    w: IntegerWeight,
    relation: Relation,
    after: Epilogue | None,
) -> SparseTensor:
    """Return the tensor that an integer convolution makes of another."""
    held, out_scale = taken(layer, x), layer.get("output_scale")
    given = layer.groups, after or NOTHING, out_scale
    y = contracted(layer, held, w, relation, *given)
    boundary(y)
    place = x.manager, relation.keys[1], relation.out_coords
    if out_scale is None:
        return SparseTensor.trusted(*place, y)
    return IntegerTensor.on(*place, y, as_float32(out_scale), held.dtype)
