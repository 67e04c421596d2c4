"""What the quantised twins of the convolutions and of Linear share.

``mlx.nn.quantize(model, group_size=..., bits=...)`` makes them. Parameters are named as
in ``mlx.nn.QuantizedLinear`` (weight, scales, biases, bias) and frozen; they are read
anew by every call, and any number of channels is padded in storage.
"""

from __future__ import annotations

import mlx.core as mx
from mlx.nn import Module

from ..quantized import QuantizedWeight, quantize_weight

DEFAULT_BITS, DEFAULT_GROUP_SIZE = 4, 64


def check_mode(mode: str, quantize_input: bool) -> None:
    """Raise for what ``mlx.nn.quantize`` can ask for and sparse layers do not have."""
    if mode != "affine":
        raise ValueError(
            f'sparse layers are packed in mode "affine"; got {mode!r}. Leave the layer '
            "out by class_predicate"
        )
    if quantize_input:
        raise ValueError(
            "quantize_input is for mlx.nn.Linear; layers of tensors quantize their "
            "weight alone"
        )


def pack(weight: mx.array, group_size: int | None, bits: int | None) -> QuantizedWeight:
    """Return a module's weight packed: (C_out, C_in), or (C_out, spatial..., C_in)."""
    return quantize_weight(
        weight,
        bits=DEFAULT_BITS if bits is None else bits,
        group_size=DEFAULT_GROUP_SIZE if group_size is None else group_size,
        layout="linear" if weight.ndim == 2 else "module",
    )


class Packable:
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
                128. Default: ``64``.
            bits (int, optional): 4 or 8. Default: ``4``.
            mode (str): ``"affine"``.
            quantize_input (bool): ``False``: features are not packed.

        Raises:
            ValueError: an argument is none of these.
        """
        check_mode(mode, quantize_input)
        return self.twin.from_layer(self, group_size, bits, mode)


class Packed:
    """Parameters that a twin holds, and the QuantizedWeight that they make."""

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
        check_mode(mode, False)
        twin = cls.__new__(cls)
        Module.__init__(twin)
        # Arrays are items of a module, what else it has attributes.
        held = {k: v for k, v in layer.items() if k != "weight"}
        held |= {k: v for k, v in vars(layer).items() if k != "_no_grad"}
        for name, value in held.items():
            setattr(twin, name, value)
        twin._hold(pack(layer.weight, group_size, bits))
        return twin

    def _hold(self, q: QuantizedWeight) -> None:
        self.weight, self.scales, self.biases = q.arrays
        self.bits, self.group_size, self.mode = q.bits, q.group_size, "affine"
        self.in_channels = q.in_channels
        self.freeze()

    def packed_weight(self) -> QuantizedWeight:
        """Return the parameters as they are now, checked against one another.

        Raises:
            ValueError: their shapes are not those of this layer.
        """
        return QuantizedWeight(
            self.weight,
            self.scales,
            self.biases,
            self.in_channels,
            self.bits,
            self.group_size,
            self.kernel_size,
        )

    def to_quantized(self, *args, **kwargs) -> Module:
        """Return the layer itself: it is packed already."""
        return self


class QuantizedConvolution(Packed):
    """A convolution's constructor and call, over a packed weight.

    Args:
        *args, **kwargs: Those of the float layer.
        group_size (int): Input channels that share a scale: 32, 64 or 128. Default:
            ``64``.
        bits (int): 4 or 8. Default: ``4``.
        mode (str): ``"affine"``.
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
        check_mode(mode, False)
        self._hold(pack(self.weight, group_size, bits))

    def _kernel(self) -> QuantizedWeight:
        return self.packed_weight()

    def _channels(self) -> tuple[int, int]:
        return self.in_channels * self.groups, self.weight.shape[1]

    def _extra_repr(self) -> str:
        return (
            f"{super()._extra_repr()}, group_size={self.group_size}, bits={self.bits}"
        )
