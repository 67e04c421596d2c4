"""Convolutions by the relations of mlx_lattice.

``kernel`` is (volume, in, out), and (in, out) if the volume and the stride are 1.
``bias`` is (1, out).
"""

from __future__ import annotations

import math

import torch
from torch import nn

from .. import bridge
from .MinkowskiCommon import (
    Absent,
    ConvolutionMode,
    MinkowskiModuleBase,
    StrideType,
    absent,
    expect,
)
from .MinkowskiCoordinateManager import CoordinateMapKey
from .MinkowskiKernelGenerator import KernelGenerator
from .MinkowskiTensor import SparseTensor

__all__ = [
    "MinkowskiChannelwiseConvolution", "MinkowskiConvolution",
    "MinkowskiConvolutionFunction", "MinkowskiConvolutionTranspose",
    "MinkowskiConvolutionTransposeFunction",
    "MinkowskiGenerativeConvolutionTranspose",
]  # fmt: skip


class LayerOfKernel(MinkowskiModuleBase):
    """A layer with a kernel generator, a convolution or a pooling.

    Args:
        kernel_size, stride, dilation: an int, or one for each axis.
        kernel_generator: used instead of them.
        expand_coordinates: whether the layer makes every row that it reaches.
        is_transpose: whether the layer goes to a finer stride.
        dimension: spatial axes.
    """

    def __init__(
        self,
        kernel_size: StrideType,
        stride: StrideType,
        dilation: StrideType,
        kernel_generator: KernelGenerator | None,
        expand_coordinates: bool,
        is_transpose: bool,
        dimension: int | None,
    ):
        super().__init__()
        expect(
            dimension is not None and dimension > 0,
            f"pass dimension=, the number of spatial axes; got {dimension}",
        )
        if kernel_generator is None:
            sizes = kernel_size, stride, dilation
            kernel_generator = KernelGenerator(*sizes, dimension=dimension)
            kernel_generator.expand_coordinates = expand_coordinates
        self.kernel_generator: KernelGenerator = kernel_generator
        self.dimension: int | None = dimension
        self.is_transpose = is_transpose

    def _expect_input(self, input: SparseTensor) -> None:
        expect(
            isinstance(input, SparseTensor),
            f"{type(self).__name__} takes a SparseTensor; got {type(input).__name__}",
        )
        expect(
            self.dimension == input.D,
            f"{type(self).__name__} has dimension={self.dimension}; the input has "
            f"{input.D} spatial axes",
        )

    def _out_key(self, x: SparseTensor, coordinates: object) -> CoordinateMapKey:
        """Return the key of the output's rows."""
        manager, kernel, key = x.coordinate_manager, self.kernel_generator, x._key
        if coordinates is not None and not kernel.expand_coordinates:
            pairs = list(zip(x.tensor_stride, kernel.kernel_stride, strict=True))
            stride = [a // b if self.is_transpose else a * b for a, b in pairs]
            return manager.key_at(coordinates, stride)
        if self.is_transpose:
            return manager.transposed_key(key, kernel, kernel.expand_coordinates)
        if kernel.expand_coordinates:
            return manager.expanded_key(key, kernel)
        return manager.stride(key, kernel.kernel_stride)

    def extra_repr(self) -> str:
        """Return what ``print`` shows of the layer."""
        kernel = self.kernel_generator
        return (
            f"kernel_size={kernel.kernel_size}, stride={kernel.kernel_stride}, "
            f"dilation={kernel.kernel_dilation}"
        )


class MinkowskiConvolutionBase(LayerOfKernel):
    """A convolution of any kind; nets call the classes below."""

    def __init__(
        self,
        in_channels: int,
        out_channels: int,
        kernel_size: StrideType = -1,
        stride: StrideType = 1,
        dilation: StrideType = 1,
        bias: bool = False,
        kernel_generator: KernelGenerator | None = None,
        is_transpose: bool = False,
        expand_coordinates: bool = False,
        convolution_mode: ConvolutionMode = ConvolutionMode.DEFAULT,
        dimension: int | None = -1,
        has_bias: bool | None = None,
    ):
        facts = kernel_generator, expand_coordinates, is_transpose, dimension
        super().__init__(kernel_size, stride, dilation, *facts)
        self.in_channels: int = in_channels
        self.out_channels: int = out_channels
        self.convolution_mode = convolution_mode
        kernel = self.kernel_generator
        kernel.expand_coordinates = expand_coordinates
        volume = kernel.kernel_volume
        self.use_mm: bool = volume == 1 and kernel.requires_strided_coordinates
        shape = () if self.use_mm else (volume,)
        self.kernel: torch.Tensor = nn.Parameter(
            torch.empty(*shape, in_channels, out_channels)
        )
        bias = bias if has_bias is None else has_bias
        self.bias: torch.Tensor | None = (
            nn.Parameter(torch.empty(1, out_channels)) if bias else None
        )
        self.reset_parameters(is_transpose)

    def reset_parameters(self, is_transpose: bool = False) -> None:
        """Draw the parameters uniformly."""
        channels = self.out_channels if is_transpose else self.in_channels
        bound = 1 / math.sqrt(channels * self.kernel_generator.kernel_volume)
        for parameter in self.parameters():
            nn.init.uniform_(parameter, -bound, bound)

    @bridge.not_compiled
    def forward(
        self,
        input: SparseTensor,
        coordinates: SparseTensor | CoordinateMapKey | torch.Tensor | None = None,
    ) -> SparseTensor:
        """Return the convolved tensor.

        Args:
            input: the tensor.
            coordinates: rows of the output: a tensor, a key, or (N, 1 + D) int32; by
                default those of the stride.
        """
        self._expect_input(input)
        if self.use_mm:
            features = input.F @ self.kernel
            features = features if self.bias is None else features + self.bias
            return input._like(features)
        out_key = self._out_key(input, coordinates)
        facts = self.kernel_generator, self.is_transpose
        relation = input.coordinate_manager.relation(input._key, out_key, *facts)
        bias = None if self.bias is None else self.bias.reshape(-1)
        features = bridge.convolve(input.F, self.kernel, bias, relation, layer=self)
        return input._at(features, out_key)

    def extra_repr(self) -> str:
        """Return what ``print`` shows of the layer."""
        channels = f"in={self.in_channels}, out={self.out_channels}"
        return f"{channels}, {super().extra_repr()}"


class _OntoRows(MinkowskiConvolutionBase):  # the constructor of the two below
    goes_finer = False

    def __init__(
        self,
        in_channels: int,
        out_channels: int,
        kernel_size: StrideType = -1,
        stride: StrideType = 1,
        dilation: StrideType = 1,
        bias: bool = False,
        kernel_generator: KernelGenerator | None = None,
        expand_coordinates: bool = False,
        convolution_mode: ConvolutionMode = ConvolutionMode.DEFAULT,
        dimension: int | None = None,
        has_bias: bool | None = None,
    ):
        sizes = in_channels, out_channels, kernel_size, stride, dilation, bias
        facts = (
            self.goes_finer,
            expand_coordinates,
            convolution_mode,
            dimension,
            has_bias,
        )
        super().__init__(*sizes, kernel_generator, *facts)


class MinkowskiConvolution(_OntoRows):
    """A convolution onto the rows of the stride.

    Args:
        in_channels, out_channels: channels.
        kernel_size, stride, dilation: an int, or one for each axis.
        bias: whether a bias is added.
        kernel_generator: used instead of sizes.
        expand_coordinates: whether the output has every row that an input reaches.
        convolution_mode: ignored.
        dimension: spatial axes.
        has_bias: ``bias`` in 0.4.
    """


class MinkowskiConvolutionTranspose(_OntoRows):
    """A convolution to a finer stride, onto the rows of the input there.

    Without such rows the output has every row that the kernel reaches. Arguments are
    those of ``MinkowskiConvolution``.
    """

    goes_finer = True


class MinkowskiGenerativeConvolutionTranspose(MinkowskiConvolutionBase):
    """A convolution to a finer stride, onto every row that the kernel reaches.

    Arguments are those of ``MinkowskiConvolution`` but for ``expand_coordinates``.
    """

    def __init__(
        self,
        in_channels: int,
        out_channels: int,
        kernel_size: StrideType = -1,
        stride: StrideType = 1,
        dilation: StrideType = 1,
        bias: bool = False,
        kernel_generator: KernelGenerator | None = None,
        convolution_mode: ConvolutionMode = ConvolutionMode.DEFAULT,
        dimension: int | None = None,
    ):
        sizes = in_channels, out_channels, kernel_size, stride, dilation, bias
        facts = True, True, convolution_mode, dimension
        super().__init__(*sizes, kernel_generator, *facts)


class MinkowskiChannelwiseConvolution(LayerOfKernel):
    """A convolution of each channel by itself; ``kernel`` is (volume, channels).

    Args:
        in_channels: channels.
        kernel_size, stride, dilation: an int, or one for each axis.
        bias: whether a bias is added.
        kernel_generator: used instead of sizes.
        dimension: spatial axes.
    """

    def __init__(
        self,
        in_channels: int,
        kernel_size: StrideType = -1,
        stride: StrideType = 1,
        dilation: StrideType = 1,
        bias: bool = False,
        kernel_generator: KernelGenerator | None = None,
        dimension: int = -1,
    ):
        facts = kernel_generator, False, False, dimension
        super().__init__(kernel_size, stride, dilation, *facts)
        self.in_channels = in_channels
        volume = self.kernel_generator.kernel_volume
        self.kernel: torch.Tensor = nn.Parameter(torch.empty(volume, in_channels))
        self.bias: torch.Tensor | None = (
            nn.Parameter(torch.empty(1, in_channels)) if bias else None
        )
        bound = 1 / math.sqrt(in_channels * volume)
        for parameter in self.parameters():
            nn.init.uniform_(parameter, -bound, bound)

    @bridge.not_compiled
    def forward(
        self, input: SparseTensor, coords: CoordinateMapKey | None = None
    ) -> SparseTensor:
        """Return the convolved tensor, on the rows of the stride."""
        self._expect_input(input)
        out_key, kernel = self._out_key(input, None), self.kernel_generator
        relation = input.coordinate_manager.relation(input._key, out_key, kernel)
        bias = None if self.bias is None else self.bias.reshape(-1)
        facts = {"groups": self.in_channels, "layer": self}
        weight = self.kernel[:, None]
        features = bridge.convolve(input.F, weight, bias, relation, **facts)
        return input._at(features, out_key)


_LAYERS = "call a layer, such as MinkowskiConvolution"
MinkowskiConvolutionFunction: Absent = absent("MinkowskiConvolutionFunction", _LAYERS)
MinkowskiConvolutionTransposeFunction: Absent = absent(
    "MinkowskiConvolutionTransposeFunction", _LAYERS
)
