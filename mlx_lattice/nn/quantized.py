"""What the quantised twins of the convolutions and of Linear share.

``mlx.nn.quantize(model, group_size=..., bits=...)`` makes them. Parameters are named as
in ``mlx.nn.QuantizedLinear`` (weight, scales, biases, bias) and frozen; they are read
anew by every call, and any number of channels is padded in storage. With
``quantize_input=True`` features are int8 too: the parameters are then weight, scales
and, of int4, multipliers; input_scale and output_scale where they were calibrated.
"""

from __future__ import annotations

from collections.abc import Callable

import mlx.core as mx
from mlx.nn import Module

from ..integer_weight import IntegerWeight
from ..module_state import Kept
from ..ops.conv import contracted
from ..quantized import (
    DEFAULT_BITS,
    DEFAULT_GROUP_SIZE,
    QuantizedWeight,
    module_layout,
    quantize_weight,
)
from ..relation import Relation
from ..tensor import SparseTensor
from .integer import (
    INTEGER,
    KeepsScales,
    as_float32,
    convolved,
    integers_of,
    set_output_scale,
)

__all__ = ["unpack_int4"]

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
        self.bits, self.group_size, self.in_channels = (
            w.bits,
            w.group_size,
            w.in_channels,
        )
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
            known = Kept()
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

    def _kernel(self) -> Weight:
        return self.packed_weight()

    def _contracted(self, run, x: SparseTensor, w: Weight, relation: Relation, after):
        if self.mode != INTEGER:
            return super()._contracted(run, x, w, relation, after)
        y = convolved(self, x, w, relation, after)
        return y if run is contracted else iter([(0, y.feats)])  # a block of all rows

    @property
    def channels(self) -> tuple[int, int]:
        """Input and output channels."""
        return self.in_channels * self.groups, self.weight.shape[1]

    def _extra_repr(self) -> str:
        return f"{super()._extra_repr()}, {self._packing_repr()}"
