"""The blocks of the reference nets."""

from __future__ import annotations

from .. import nn, ops
from ..nn.fused import convolved
from ..tensor import SparseTensor


def layer(name: str, dims: int, *args, **kwargs) -> nn.Module:
    """Return a module by its family's name and spatial axes: ``Conv``, 3."""
    if dims not in (1, 2, 3, 4):
        raise ValueError(f"dims must be 1, 2, 3 or 4; got {dims!r}")
    return getattr(nn, f"{name}{dims}d")(*args, **kwargs)


class ConvNorm(nn.Module):
    """A convolution without bias, BatchNorm, ReLU.

    Args:
        conv (nn.Module): The convolution.
        activate (bool): If ``False`` leave the ReLU out. Default: ``True``.
    """

    def __init__(self, conv: nn.Module, activate: bool = True):
        super().__init__()
        self.conv = conv
        self.norm = nn.BatchNorm(conv.weight.shape[0])
        self.activate = activate

    def __call__(self, x: SparseTensor, *coordinates) -> SparseTensor:
        """Return features on the convolution's rows."""
        after = ops.relu if self.activate else None
        return convolved(self.conv, self.norm, x, *coordinates, activation=after)

    def beside(self, x: SparseTensor, shortcut: SparseTensor) -> SparseTensor:
        """Return ``relu(norm(conv(x)) + shortcut)``."""
        after = {"activation": ops.relu, "residual": shortcut}
        return convolved(self.conv, self.norm, x, **after)


class BasicBlock(nn.Module):
    """Two 3x3x3 convolutions beside a shortcut.

    A strided block's shortcut has a kernel of its stride, so that no input is lost,
    and computes the rows of the main branch.

    Args:
        in_channels (int): The number of input channels.
        out_channels (int): The number of output channels.
        stride (int): The stride of the first convolution. Default: ``1``.
        dims (int): The number of spatial axes. Default: ``3``.
    """

    def __init__(
        self, in_channels: int, out_channels: int, stride: int = 1, dims: int = 3
    ):
        super().__init__()
        if stride == 1:
            first = layer("SubmConv", dims, in_channels, out_channels, 3, bias=False)
        else:
            first = layer(
                "Conv", dims, in_channels, out_channels, 3, stride, bias=False
            )
        self.conv1 = ConvNorm(first)
        second = layer("SubmConv", dims, out_channels, out_channels, 3, bias=False)
        self.conv2 = ConvNorm(second, activate=False)
        if stride != 1 or in_channels != out_channels:
            shortcut = layer(
                "Conv", dims, in_channels, out_channels, stride, stride, bias=False
            )
            self.shortcut = ConvNorm(shortcut, activate=False)

    def __call__(self, x: SparseTensor) -> SparseTensor:
        """Return features on the rows of ``x``, or of its cells at the stride."""
        y = self.conv1(x)
        if "shortcut" in self:
            x = self.shortcut(x) if y.key == x.key else self.shortcut(x, y)
        if type(self.conv2) is ConvNorm and not self.conv2.activate:
            return self.conv2.beside(y, x)
        return ops.relu(self.conv2(y) + x)


def blocks(in_channels: int, out_channels: int, count: int, stride: int, dims: int):
    """Return ``count`` basic blocks, the first of which strides."""
    first = BasicBlock(in_channels, out_channels, stride, dims)
    rest = [BasicBlock(out_channels, out_channels, 1, dims) for _ in range(count - 1)]
    return nn.Sequential(first, *rest)
