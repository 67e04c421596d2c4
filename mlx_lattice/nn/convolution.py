"""Convolution modules and their quantised twins, in the manner of mlx.nn."""

from __future__ import annotations

from collections.abc import Iterator

import mlx.core as mx

from ..epilogue import Epilogue
from ..kernel_spec import IntOrTuple, check_support
from ..ops import relations
from ..ops.conv import contracted_blocks
from ..ops.relations import Coordinates
from ..tensor import SparseTensor
from .convolution_layer import Convolution
from .offsets import Offsets, kernel_spec
from .quantized import QuantizedConvolution

__all__ = [
    "Conv1d", "Conv2d", "Conv3d", "Conv4d", "ConvTranspose1d", "ConvTranspose2d",
    "ConvTranspose3d", "ConvTranspose4d", "GenerativeConvTranspose1d",
    "GenerativeConvTranspose2d", "GenerativeConvTranspose3d",
    "GenerativeConvTranspose4d", "QuantizedConv1d", "QuantizedConv2d",
    "QuantizedConv3d", "QuantizedConv4d", "QuantizedConvTranspose1d",
    "QuantizedConvTranspose2d", "QuantizedConvTranspose3d", "QuantizedConvTranspose4d",
    "QuantizedGenerativeConvTranspose1d", "QuantizedGenerativeConvTranspose2d",
    "QuantizedGenerativeConvTranspose3d", "QuantizedGenerativeConvTranspose4d",
    "QuantizedSubmConv1d", "QuantizedSubmConv2d", "QuantizedSubmConv3d",
    "QuantizedSubmConv4d", "SubmConv1d", "SubmConv2d", "SubmConv3d", "SubmConv4d",
]  # fmt: skip


class Conv(Convolution):
    """Applies a sparse convolution: ``y[o] = sum of x[o * stride + offset_k] @ W[k]``.

    Output rows are the sorted unique cells ``floor(in / stride)``, or the input's own
    rows where the stride is 1 and the kernel centred.

    Args:
        in_channels (int): The number of input channels.
        out_channels (int): The number of output channels.
        kernel_size (int or tuple): The size of the kernel, one per axis; left out
            where ``offsets`` are given.
        stride (int or tuple): The step between output cells. Default: ``1``.
        padding (int or tuple, optional): The dense rule of PyTorch; by default the
            kernel is centred.
        dilation (int or tuple): The spacing of the kernel. Default: ``1``.
        groups (int): The number of channel groups. Default: ``1``.
        bias (bool): If ``True`` add a learnable bias. Default: ``True``.
        support (str): ``"cell"``, or ``"reach"`` for every row that an input reaches,
            as in dense convolution. Default: ``"cell"``.
        offsets (tuple, optional): K offsets in place of a box, such as
            ``nn.hyper_cross(3)``; the weight is (C_out, K, 1, 1, C_in / groups) then.
    """

    def __init__(
        self,
        in_channels: int,
        out_channels: int,
        kernel_size: IntOrTuple | None = None,
        stride: IntOrTuple = 1,
        padding: IntOrTuple | None = None,
        dilation: IntOrTuple = 1,
        groups: int = 1,
        bias: bool = True,
        *,
        support: str = "cell",
        offsets: Offsets = None,
    ):
        spec = kernel_spec(self.dims, kernel_size, stride, padding, dilation, offsets)
        super().__init__(in_channels, out_channels, spec, groups, bias)
        self.support = check_support(support)

    def _extra_repr(self) -> str:
        return f"{super()._extra_repr()}, support={self.support}"

    def __call__(
        self,
        x: SparseTensor,
        coordinates: Coordinates = None,
        *,
        epilogue: Epilogue | None = None,
    ) -> SparseTensor:
        """Convolve; with ``coordinates`` on exactly those rows, in their order."""
        return self._run(
            relations.forward,
            x,
            epilogue,
            coordinates,
            self.support,
            stride=self.stride,
            padding=self.padding,
        )


class SubmConv(Convolution):
    """Applies a submanifold convolution: the output has the input's own rows.

    Args:
        in_channels (int): The number of input channels.
        out_channels (int): The number of output channels.
        kernel_size (int or tuple): The size of the kernel, one per axis; left out
            where ``offsets`` are given.
        dilation (int or tuple): The spacing of the kernel. Default: ``1``.
        groups (int): The number of channel groups. Default: ``1``.
        bias (bool): If ``True`` add a learnable bias. Default: ``True``.
        offsets (tuple, optional): As of ``Conv3d``.
    """

    def __init__(
        self,
        in_channels: int,
        out_channels: int,
        kernel_size: IntOrTuple | None = None,
        dilation: IntOrTuple = 1,
        groups: int = 1,
        bias: bool = True,
        *,
        offsets: Offsets = None,
    ):
        spec = kernel_spec(self.dims, kernel_size, 1, None, dilation, offsets)
        super().__init__(in_channels, out_channels, spec, groups, bias)

    def __call__(
        self, x: SparseTensor, *, epilogue: Epilogue | None = None
    ) -> SparseTensor:
        """Convolve on the rows of ``x``, which keep their order and key."""
        return self._run(relations.submanifold, x, epilogue)

    def blocks(self, x: SparseTensor) -> Iterator[tuple[int, mx.array]]:
        """Yield (first row, features) of blocks of rows under ``ml.memory_limit``.

        Without a limit, and where rows are few, there is one block of all rows.
        """
        return self._run(relations.submanifold, x, None, run=contracted_blocks)


class ConvTranspose(Convolution):
    """Applies a transposed convolution: ``out = in * stride + offset_k``.

    Output rows are the coordinates given to the call, or the finer set that an
    earlier strided convolution consumed. With stride 1 they are the input's own.

    Args:
        in_channels (int): The number of input channels.
        out_channels (int): The number of output channels.
        kernel_size (int or tuple): The size of the kernel. Default: ``2``.
        stride (int or tuple): The step of the input's cells. Default: ``2``.
        padding (int or tuple, optional): The dense rule of PyTorch; by default the
            kernel is centred.
        dilation (int or tuple): The spacing of the kernel. Default: ``1``.
        groups (int): The number of channel groups. Default: ``1``.
        bias (bool): If ``True`` add a learnable bias. Default: ``True``.
    """

    generative = False

    def __init__(
        self,
        in_channels: int,
        out_channels: int,
        kernel_size: IntOrTuple = 2,
        stride: IntOrTuple = 2,
        padding: IntOrTuple | None = None,
        dilation: IntOrTuple = 1,
        groups: int = 1,
        bias: bool = True,
    ):
        spec = kernel_spec(self.dims, kernel_size, stride, padding, dilation)
        super().__init__(in_channels, out_channels, spec, groups, bias)

    def __call__(
        self,
        x: SparseTensor,
        coordinates: Coordinates = None,
        *,
        epilogue: Epilogue | None = None,
    ) -> SparseTensor:
        """Convolve; with ``coordinates`` on exactly those rows, in their order."""
        return self._run(
            relations.transposed,
            x,
            epilogue,
            coordinates,
            self.generative,
            stride=self.stride,
            padding=self.padding,
        )


class GenerativeConvTranspose(ConvTranspose):
    """Applies a transposed convolution that makes its own rows: all that it reaches.

    Rows are sorted and unique, also where kernels overlap. Arguments are those of the
    transposed convolution.
    """

    generative = True


class QuantizedConv(QuantizedConvolution, Conv):
    """``Conv`` with a packed weight, from ``to_quantized``."""


class QuantizedSubmConv(QuantizedConvolution, SubmConv):
    """``SubmConv`` with a packed weight, from ``to_quantized``."""


class QuantizedConvTranspose(QuantizedConvolution, ConvTranspose):
    """``ConvTranspose`` with a packed weight, from ``to_quantized``."""


class QuantizedGenerativeConvTranspose(QuantizedConvolution, GenerativeConvTranspose):
    """``GenerativeConvTranspose`` with a packed weight, from ``to_quantized``."""


# fmt: off
class QuantizedConv1d(QuantizedConv, dims=1): ...
class QuantizedConv2d(QuantizedConv, dims=2): ...
class QuantizedConv3d(QuantizedConv, dims=3): ...
class QuantizedConv4d(QuantizedConv, dims=4): ...

class QuantizedSubmConv1d(QuantizedSubmConv, dims=1): ...
class QuantizedSubmConv2d(QuantizedSubmConv, dims=2): ...
class QuantizedSubmConv3d(QuantizedSubmConv, dims=3): ...
class QuantizedSubmConv4d(QuantizedSubmConv, dims=4): ...

class QuantizedConvTranspose1d(QuantizedConvTranspose, dims=1): ...
class QuantizedConvTranspose2d(QuantizedConvTranspose, dims=2): ...
class QuantizedConvTranspose3d(QuantizedConvTranspose, dims=3): ...
class QuantizedConvTranspose4d(QuantizedConvTranspose, dims=4): ...

class QuantizedGenerativeConvTranspose1d(QuantizedGenerativeConvTranspose, dims=1): ...
class QuantizedGenerativeConvTranspose2d(QuantizedGenerativeConvTranspose, dims=2): ...
class QuantizedGenerativeConvTranspose3d(QuantizedGenerativeConvTranspose, dims=3): ...
class QuantizedGenerativeConvTranspose4d(QuantizedGenerativeConvTranspose, dims=4): ...

class Conv1d(Conv, dims=1, twin=QuantizedConv1d): ...
class Conv2d(Conv, dims=2, twin=QuantizedConv2d): ...
class Conv3d(Conv, dims=3, twin=QuantizedConv3d): ...
class Conv4d(Conv, dims=4, twin=QuantizedConv4d): ...

class SubmConv1d(SubmConv, dims=1, twin=QuantizedSubmConv1d): ...
class SubmConv2d(SubmConv, dims=2, twin=QuantizedSubmConv2d): ...
class SubmConv3d(SubmConv, dims=3, twin=QuantizedSubmConv3d): ...
class SubmConv4d(SubmConv, dims=4, twin=QuantizedSubmConv4d): ...

class ConvTranspose1d(ConvTranspose, dims=1, twin=QuantizedConvTranspose1d): ...
class ConvTranspose2d(ConvTranspose, dims=2, twin=QuantizedConvTranspose2d): ...
class ConvTranspose3d(ConvTranspose, dims=3, twin=QuantizedConvTranspose3d): ...
class ConvTranspose4d(ConvTranspose, dims=4, twin=QuantizedConvTranspose4d): ...

class GenerativeConvTranspose1d(
    GenerativeConvTranspose, dims=1, twin=QuantizedGenerativeConvTranspose1d
): ...
class GenerativeConvTranspose2d(
    GenerativeConvTranspose, dims=2, twin=QuantizedGenerativeConvTranspose2d
): ...
class GenerativeConvTranspose3d(
    GenerativeConvTranspose, dims=3, twin=QuantizedGenerativeConvTranspose3d
): ...
class GenerativeConvTranspose4d(
    GenerativeConvTranspose, dims=4, twin=QuantizedGenerativeConvTranspose4d
): ...
# fmt: on
