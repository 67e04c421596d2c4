"""Quantised twins of the convolutions and of Linear.

``mlx.nn.quantize(model, group_size=..., bits=...)`` makes them. Parameters are named as
in ``mlx.nn.QuantizedLinear`` (weight, scales, biases, bias) and frozen; they are read
anew by every call, and any number of channels is padded in storage.
"""

from __future__ import annotations

import mlx.core as mx
import mlx.nn
from mlx.nn import Module

from .. import contraction
from ..ops import on_features
from ..quantized import QuantizedWeight, quantize_weight
from ..tensor import SparseTensor
from .convolution import Conv, ConvTranspose, GenerativeConvTranspose, SubmConv
from .linear import contracted, is_contraction

DEFAULT_BITS, DEFAULT_GROUP_SIZE = 4, 64


def twin_of(module: Module) -> type[Module]:
    """Return the quantised class of a module, by its class or the first base with one.

    Raises:
        TypeError: no class among its bases has one.
    """
    for cls in type(module).__mro__:
        twin = globals().get(f"Quantized{cls.__name__}")
        if twin is not None:
            return twin
    raise TypeError(f"{type(module).__name__} has no quantised twin")


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


class _Packed:
    """Parameters that a twin holds, and the QuantizedWeight that they make."""

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


class _QuantizedConvolution(_Packed):
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
        self._hold(_pack(self.weight, group_size, bits))

    @classmethod
    def from_conv(
        cls,
        conv: Module,
        group_size: int | None = None,
        bits: int | None = None,
        mode: str = "affine",
    ) -> Module:
        """Return the quantised twin of a float convolution.

        Raises:
            ValueError: bits, group size or mode are none that can be packed.
        """
        check_mode(mode, False)
        twin = cls.__new__(cls)
        Module.__init__(twin)
        # Geometry: MLX keeps tuples among the parameters, the rest as attributes.
        held = {k: v for k, v in conv.items() if k != "weight"}
        held |= {k: v for k, v in vars(conv).items() if k != "_no_grad"}
        for name, value in held.items():
            setattr(twin, name, value)
        twin._hold(_pack(conv.weight, group_size, bits))
        return twin

    def _kernel(self) -> QuantizedWeight:
        return self.packed_weight()

    def _channels(self) -> tuple[int, int]:
        return self.in_channels * self.groups, self.weight.shape[1]

    def _extra_repr(self) -> str:
        return (
            f"{super()._extra_repr()}, group_size={self.group_size}, bits={self.bits}"
        )


def _pack(weight: mx.array, group_size, bits) -> QuantizedWeight:
    return quantize_weight(
        weight,
        bits=DEFAULT_BITS if bits is None else bits,
        group_size=DEFAULT_GROUP_SIZE if group_size is None else group_size,
        layout="linear" if weight.ndim == 2 else "module",
    )


class QuantizedLinear(_Packed, mlx.nn.QuantizedLinear):
    """``mlx.nn.QuantizedLinear`` that takes tensors too, and any number of channels.

    Args:
        input_dims (int): The number of input channels.
        output_dims (int): The number of output channels.
        bias (bool): If ``True`` add a bias. Default: ``True``.
        group_size (int): Input channels that share a scale. Default: ``64``.
        bits (int): 4 or 8. Default: ``4``.
        mode (str): ``"affine"``.
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
        self._take(mlx.nn.Linear(input_dims, output_dims, bias), group_size, bits, mode)

    @classmethod
    def from_linear(
        cls,
        linear_layer: Module,
        group_size: int | None = None,
        bits: int | None = None,
        mode: str = "affine",
    ) -> QuantizedLinear:
        """Return the quantised twin of a ``Linear``."""
        twin = cls.__new__(cls)
        Module.__init__(twin)
        twin._take(linear_layer, group_size, bits, mode)
        return twin

    def _take(self, linear: Module, group_size, bits, mode: str) -> None:
        check_mode(mode, False)
        if "bias" in linear:
            self.bias = linear.bias
        self._hold(_pack(linear.weight, group_size, bits))

    def _hold(self, q: QuantizedWeight) -> None:
        super()._hold(q)
        # MLX's own layout of a linear weight has no axis of offsets.
        self.weight, self.scales, self.biases = (a[0] for a in q.arrays)

    def packed_weight(self) -> QuantizedWeight:
        """Return the parameters as they are now, checked against one another."""
        return QuantizedWeight(
            self.weight[None],
            self.scales[None],
            self.biases[None],
            self.in_channels,
            self.bits,
            self.group_size,
            (),
        )

    def __call__(self, x: SparseTensor | mx.array) -> SparseTensor | mx.array:
        """Apply the layer to each row.

        Raises:
            TypeError: the features' dtype is not that of the scales.
            ValueError: the features have another number of channels.
        """
        return on_features(self._rows, x)

    def _rows(self, x: mx.array) -> mx.array:
        if is_contraction(x):
            return contracted(self, x, self.packed_weight())
        y = contraction.packed_linear(x, self.packed_weight())
        return y + self.bias if "bias" in self else y

    def _extra_repr(self) -> str:
        return (
            f"input_dims={self.in_channels}, output_dims={self.weight.shape[0]}, "
            f"bias={'bias' in self}, group_size={self.group_size}, bits={self.bits}"
        )


class _QuantizedConv(_QuantizedConvolution, Conv):
    pass


class _QuantizedSubmConv(_QuantizedConvolution, SubmConv):
    pass


class _QuantizedConvTranspose(_QuantizedConvolution, ConvTranspose):
    pass


class _QuantizedGenerativeConvTranspose(_QuantizedConvolution, GenerativeConvTranspose):
    pass


class QuantizedConv1d(_QuantizedConv):
    """``Conv1d`` with a packed weight."""

    dims = 1


class QuantizedConv2d(_QuantizedConv):
    """``Conv2d`` with a packed weight."""

    dims = 2


class QuantizedConv3d(_QuantizedConv):
    """``Conv3d`` with a packed weight."""

    dims = 3


class QuantizedConv4d(_QuantizedConv):
    """``Conv4d`` with a packed weight."""

    dims = 4


class QuantizedSubmConv1d(_QuantizedSubmConv):
    """``SubmConv1d`` with a packed weight."""

    dims = 1


class QuantizedSubmConv2d(_QuantizedSubmConv):
    """``SubmConv2d`` with a packed weight."""

    dims = 2


class QuantizedSubmConv3d(_QuantizedSubmConv):
    """``SubmConv3d`` with a packed weight."""

    dims = 3


class QuantizedSubmConv4d(_QuantizedSubmConv):
    """``SubmConv4d`` with a packed weight."""

    dims = 4


class QuantizedConvTranspose1d(_QuantizedConvTranspose):
    """``ConvTranspose1d`` with a packed weight."""

    dims = 1


class QuantizedConvTranspose2d(_QuantizedConvTranspose):
    """``ConvTranspose2d`` with a packed weight."""

    dims = 2


class QuantizedConvTranspose3d(_QuantizedConvTranspose):
    """``ConvTranspose3d`` with a packed weight."""

    dims = 3


class QuantizedConvTranspose4d(_QuantizedConvTranspose):
    """``ConvTranspose4d`` with a packed weight."""

    dims = 4


class QuantizedGenerativeConvTranspose1d(_QuantizedGenerativeConvTranspose):
    """``GenerativeConvTranspose1d`` with a packed weight."""

    dims = 1


class QuantizedGenerativeConvTranspose2d(_QuantizedGenerativeConvTranspose):
    """``GenerativeConvTranspose2d`` with a packed weight."""

    dims = 2


class QuantizedGenerativeConvTranspose3d(_QuantizedGenerativeConvTranspose):
    """``GenerativeConvTranspose3d`` with a packed weight."""

    dims = 3


class QuantizedGenerativeConvTranspose4d(_QuantizedGenerativeConvTranspose):
    """``GenerativeConvTranspose4d`` with a packed weight."""

    dims = 4
