"""FakeQuant: training with what the integers of a layer will do to it."""

from __future__ import annotations

from collections.abc import Callable
from functools import cache

import mlx.core as mx
from mlx.nn import Module
from mlx.utils import tree_map_with_path

from ..int8 import as_int8, row_scales
from ..problem import MOST
from ..quantized import integer_groups, integer_weight, module_layout
from ..tensor import SparseTensor, features_of
from ..transformations import Function
from .calibration import keep_float, wants_packing
from .linear import has_twin, twin_holding
from .quantized import INTEGER, Packable, integers_of, pack, usable

__all__ = ["FakeQuant", "fake_quantize"]


class FakeQuant(Packable, Module):
    """Runs a convolution or ``Linear`` in float, on rounded features and weights.

    They are rounded as the integer layer will round them, so that the net gives the
    same values once it is made integer, by ``ml.calibrate`` or ``mlx.nn.quantize`` with
    ``quantize_input=True``, which keep what was trained. Gradients pass straight
    through (Jacob et al., "Quantization and Training of Neural Networks for Efficient
    Integer-Arithmetic-Only Inference", 2018); where features are clipped they are 0.
    Parameters have the names of the layer's own.

    Args:
        layer (nn.Module): The float layer.
        bits (int): Of its weight: 8 or 4. Default: ``8``.
        group_size (int, optional): Of a 4-bit weight. Default: ``64``.
        momentum (float, optional): How far a batch moves the scale of the features,
            their greatest magnitude over 127. ``None`` gives every row its own.
            Default: ``0.1``.
    """

    never_trained = ("input_scale",)  # it moves by what the layer meets alone

    def __init__(
        self,
        layer: Module,
        bits: int = 8,
        group_size: int | None = None,
        momentum: float | None = 0.1,
    ):
        super().__init__()
        group_size = integer_groups(bits, group_size)
        if not has_twin(layer) or "scales" in layer:
            raise TypeError(
                "FakeQuant takes a float convolution or Linear; got "
                f"{type(layer).__name__}"
            )
        self.bits, self.group_size, self.momentum = bits, group_size, momentum
        for name in ("weight", "bias"):
            if name in layer:
                self[name] = layer[name]
        # Its arrays are those of this module: it is no part of the tree.
        object.__setattr__(self, "_layer", layer)
        if momentum is not None:
            self.input_scale = mx.zeros((1,))

    def _extra_repr(self) -> str:
        groups = f", group_size={self.group_size}" if self.group_size else ""
        return f"{self._layer}, bits={self.bits}{groups}, momentum={self.momentum}"

    def float_layer(self) -> Module:
        """Return the layer itself, with the parameters of now."""
        for name in ("weight", "bias"):
            if name in self:
                self._layer[name] = self[name]
        return self._layer

    def __call__(self, x: SparseTensor | mx.array, *args, **kwargs):
        """Call the layer with rounded features and weight."""
        feats = self._rounded(features_of(x))
        x = x.replace(feats) if isinstance(x, SparseTensor) else feats
        layer = self.float_layer()
        layer["weight"] = rounded_weight(self["weight"], self.bits, self.group_size)
        try:
            return layer(x, *args, **kwargs)
        finally:
            self.float_layer()

    def _rounded(self, x: mx.array) -> mx.array:
        held = mx.stop_gradient(x)
        if self.momentum is None:
            rows = row_scales(held.reshape(-1, x.shape[-1]))
            return rounded(x, rows.reshape(*x.shape[:-1], 1))
        if not x.size:
            return x
        now, old = mx.abs(held).max().astype(mx.float32) / MOST, self["input_scale"]
        if self.training:
            moved = old + self.momentum * (now - old)
            self["input_scale"] = mx.where(old > 0, moved, now)
        # Before any training there is no other scale than that of the features.
        scale = self["input_scale"]
        return rounded(x, mx.where(scale > 0, scale, now))

    def _packed_as(self, group_size: int | None, bits: int | None, mode: str) -> Module:
        """Return the integer layer that this was trained for, or a packed twin.

        Raises:
            ValueError: bits or group size are not those that it was trained with.
        """
        layer = self.float_layer()
        if mode != INTEGER:
            return twin_holding(layer, pack(layer, group_size, bits))
        asked = bits or self.bits, group_size or self.group_size
        if asked != (self.bits, self.group_size):
            raise ValueError(
                f"the layer was trained for int{self.bits} weights in groups of "
                f"{self.group_size}; got bits={bits}, group_size={group_size}"
            )
        twin = twin_holding(layer, integers_of(layer, self.bits, self.group_size))
        return twin.calibrated(usable(self.get("input_scale"), str(layer)))


def fake_quantize(
    model: Module,
    bits: int = 8,
    group_size: int | None = None,
    *,
    momentum: float | None = 0.1,
    class_predicate: Callable[[str, Module], bool] | None = None,
) -> None:
    """Put ``FakeQuant`` around a model's convolutions and linear layers, in place.

    A layer that a model has twice stays one, and trains as one.

    Args:
        model: a float model.
        bits, group_size, momentum: as of ``FakeQuant``.
        class_predicate: as of ``calibrate``; by default ``keep_float()``.
    """
    predicate = keep_float() if class_predicate is None else class_predicate
    given = bits, group_size, momentum
    made: dict[int, FakeQuant] = {}

    def wrapped(path: str, module: Module) -> Module:
        able = has_twin(module) and "scales" not in module
        if not able or not wants_packing(predicate, path, module):
            return module
        if id(module) not in made:
            made[id(module)] = FakeQuant(module, *given)
        return made[id(module)]

    leaves = model.leaf_modules()
    model.update_modules(tree_map_with_path(wrapped, leaves, is_leaf=Module.is_module))


@Function
def rounded(x: mx.array, scale: mx.array) -> mx.array:
    """Return the values of features as int8 holds them, in their own dtype."""
    return (as_int8(x, scale).astype(mx.float32) * scale).astype(x.dtype)


@rounded.vjp
def _(primals, dy, _):
    x, scale = primals
    return dy * _unclipped(x, scale), mx.zeros_like(scale)


@rounded.jvp
def _(primals, tangents):
    return tangents[0] * _unclipped(*primals)


def _unclipped(x: mx.array, scale: mx.array) -> mx.array:
    return (mx.abs(x.astype(mx.float32)) <= (MOST + 0.5) * scale).astype(x.dtype)


def rounded_weight(
    weight: mx.array, bits: int = 8, group_size: int | None = None
) -> mx.array:
    """Return a weight as integers hold it, in its shape and dtype."""
    return _of_weight(bits, group_size)(weight)


@cache
def _of_weight(bits: int, group_size: int | None):
    def forward(weight):
        layout = module_layout(weight)
        w = integer_weight(weight, bits=bits, group_size=group_size, layout=layout)
        return w.dense(weight.dtype).transpose(2, 0, 1).reshape(weight.shape)

    function = Function(forward)
    function.vjp(lambda _, dy, __: dy)
    function.jvp(lambda _, tangent: tangent)
    return function
