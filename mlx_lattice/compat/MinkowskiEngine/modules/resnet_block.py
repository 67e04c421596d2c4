"""Residual blocks: nets subclass them and set the classes of their parts."""

from __future__ import annotations

from torch import nn

from ..MinkowskiConvolution import MinkowskiConvolution
from ..MinkowskiNonlinearity import MinkowskiBatchNorm, MinkowskiReLU
from ..MinkowskiTensor import SparseTensor

__all__ = ["BasicBlock", "Bottleneck"]


class _Block(nn.Module):
    """Convolutions ``conv1``, ``conv2``, ... with norms, and a sum with the input."""

    expansion = 1

    def __init__(
        self,
        inplanes: int,
        planes: int,
        stride: int = 1,
        dilation: int = 1,
        downsample: nn.Module | None = None,
        bn_momentum: float = 0.1,
        dimension: int = -1,
    ):
        super().__init__()
        for number, sizes in enumerate(self._sizes(planes, stride, dilation), 1):
            width, kernel = sizes
            conv = MinkowskiConvolution(inplanes, width, dimension=dimension, **kernel)
            setattr(self, f"conv{number}", conv)
            norm = MinkowskiBatchNorm(width, momentum=bn_momentum)
            setattr(self, f"norm{number}", norm)
            inplanes = width
        self.relu = MinkowskiReLU(inplace=True)
        self.downsample = downsample

    def _sizes(self, planes: int, stride: int, dilation: int) -> list[tuple[int, dict]]:
        """Return the channels and the kernel of each convolution."""
        raise NotImplementedError

    def forward(self, x: SparseTensor) -> SparseTensor:
        """Return the block's result."""
        out, residual = self.norm1(self.conv1(x)), x
        for number in range(2, 2 + hasattr(self, "conv2") + hasattr(self, "conv3")):
            out = getattr(self, f"conv{number}")(self.relu(out))
            out = getattr(self, f"norm{number}")(out)
        if self.downsample is not None:
            residual = self.downsample(x)
        out += residual
        return self.relu(out)


class BasicBlock(_Block):
    """Two convolutions of size 3.

    Args:
        inplanes, planes: channels.
        stride, dilation: of the convolutions.
        downsample: makes the input fit the sum.
        bn_momentum: of the norms.
        dimension: spatial axes.
    """

    def _sizes(self, planes: int, stride: int, dilation: int) -> list[tuple[int, dict]]:
        kernel = {"kernel_size": 3, "dilation": dilation}
        return [(planes, kernel | {"stride": stride}), (planes, kernel)]


class Bottleneck(_Block):
    """A convolution of size 3 between two of size 1; arguments of ``BasicBlock``."""

    expansion = 4

    def _sizes(self, planes: int, stride: int, dilation: int) -> list[tuple[int, dict]]:
        kernel = {"kernel_size": 3, "stride": stride, "dilation": dilation}
        point = {"kernel_size": 1}
        return [(planes, point), (planes, kernel), (planes * self.expansion, point)]
