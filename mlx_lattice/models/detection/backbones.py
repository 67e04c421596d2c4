"""OpenPCDet's backbones of LiDAR detectors: SECOND's, and the one of residual blocks.

Yan, Mao and Li, "SECOND: Sparsely Embedded Convolutional Detection", 2018; OpenPCDet's
``spconv_backbone.py``. Parameters are named as there:

    conv_input.{0, 1}
    conv1.0.{0, 1}, or with residual blocks conv1.{0, 1}.{conv1, bn1, conv2, bn2}
    conv2 to conv4: .0.{0, 1} the strided convolution, then two blocks
    conv_out.{0, 1}

A strided convolution makes each cell that an input reaches, within the grid that the
tensor's ``spatial_shape`` bounds. Axes are (z, y, x).
"""

from __future__ import annotations

from collections.abc import Sequence

from ... import nn, ops
from ...nn.fused import convolved
from ...prepare import prepare_scan
from ...tensor import SparseTensor, expect_tensor
from ..pretrained import Pretrained

# conv_input, conv2, conv3, conv4, conv_out
WIDTHS = (16, 32, 64, 64, 128)
RESIDUAL_WIDTHS = (16, 32, 64, 128, 128)
EPS, MOMENTUM = 1e-3, 0.01


def norm(channels: int) -> nn.BatchNorm:
    """Return the norm that follows the convolutions."""
    return nn.BatchNorm(channels, eps=EPS, momentum=MOMENTUM)


def kept(in_channels: int, out_channels: int) -> nn.Sequential:
    """Return a submanifold convolution, its norm, a ReLU."""
    conv = nn.SubmConv3d(in_channels, out_channels, 3, bias=False)
    return nn.Sequential(conv, norm(out_channels), nn.ReLU())


def strided(
    in_channels: int, out_channels: int, kernel_size=3, stride=2, padding=1
) -> nn.Sequential:
    """Return a convolution that makes what it reaches, its norm, a ReLU."""
    conv = nn.Conv3d(
        in_channels,
        out_channels,
        kernel_size,
        stride,
        padding,
        bias=False,
        support="reach",
    )
    return nn.Sequential(conv, norm(out_channels), nn.ReLU())


class SparseBasicBlock(nn.Module):
    """Two submanifold convolutions, with biases or none, beside a shortcut.

    Args:
        channels (int): The number of channels.
        bias (bool): If ``True`` the convolutions have one. Default: ``True``.
    """

    def __init__(self, channels: int, bias: bool = True):
        super().__init__()
        self.conv1 = nn.SubmConv3d(channels, channels, 3, bias=bias)
        self.bn1 = norm(channels)
        self.conv2 = nn.SubmConv3d(channels, channels, 3, bias=bias)
        self.bn2 = norm(channels)

    def __call__(self, x: SparseTensor) -> SparseTensor:
        """Return features on the rows of ``x``."""
        y = convolved(self.conv1, self.bn1, x, activation=ops.relu)
        return convolved(self.conv2, self.bn2, y, activation=ops.relu, residual=x)


def expect_grid(x: SparseTensor, name: str) -> None:
    """Raise unless a tensor says where its grid ends, which padding depends on."""
    expect_tensor(x)
    if x.dims != 3 or x.spatial_shape is None:
        raise ValueError(
            f"{name} takes a tensor of (z, y, x) with a spatial_shape, such as a "
            "GridRecipe makes; got one of "
            f"{x.dims} axes with spatial_shape {x.spatial_shape}"
        )


class VoxelBackBone8x(Pretrained):
    """SECOND's encoder: four stages, three of which stride, and one that flattens.

    Args:
        in_channels (int): The number of input channels.
        widths (tuple): Channels of the input's convolution and ``conv1``, of
            ``conv2``, ``conv3``, ``conv4``, and of ``conv_out``.
        last_pad (int): The padding of ``conv_out``, on all axes. Default: ``0``.
    """

    def __init__(
        self,
        in_channels: int,
        widths: Sequence[int] = WIDTHS,
        last_pad: int = 0,
    ):
        super().__init__()
        first, second, third, fourth, last = expect_widths(widths)
        self.out_channels = last
        self.conv_input = kept(in_channels, first)
        self.conv1 = self._stage(None, first)
        self.conv2 = self._stage(strided(first, second), second)
        self.conv3 = self._stage(strided(second, third), third)
        down = strided(third, fourth, padding=(0, 1, 1))
        self.conv4 = self._stage(down, fourth)
        self.conv_out = strided(fourth, last, (3, 1, 1), (2, 1, 1), last_pad)

    def _stage(self, down: nn.Sequential | None, channels: int) -> nn.Sequential:
        """Return a stage, whose first layer may stride."""
        if down is None:
            return nn.Sequential(kept(channels, channels))
        return nn.Sequential(down, kept(channels, channels), kept(channels, channels))

    def stages(self, x: SparseTensor) -> dict[str, SparseTensor]:
        """Return what each stage makes: ``x_conv1`` to ``x_conv4``, and ``out``."""
        expect_grid(x, type(self).__name__)
        x, made = self.conv_input(x), {}
        for i in range(1, 5):
            x = made[f"x_conv{i}"] = self[f"conv{i}"](x)
        return made | ({"out": self.conv_out(x)} if "conv_out" in self else {})

    def __call__(self, x: SparseTensor) -> SparseTensor:
        """Return the encoded tensor, at an eighth of y and x, a sixteenth of z.

        Args:
            x: at (batch, z, y, x), with a ``spatial_shape``.
        """
        prepare_scan(self, x)
        return self.stages(x)["out"]


class VoxelResBackBone8x(VoxelBackBone8x):
    """The encoder of residual blocks, which CenterPoint has.

    Args:
        in_channels (int): The number of input channels.
        widths (tuple): As of ``VoxelBackBone8x``.
        last_pad (int): As of ``VoxelBackBone8x``. Default: ``0``.
        use_bias (bool): If ``True`` the blocks' convolutions have a bias.
            Default: ``True``.
    """

    def __init__(
        self,
        in_channels: int,
        widths: Sequence[int] = RESIDUAL_WIDTHS,
        last_pad: int = 0,
        use_bias: bool = True,
    ):
        self.use_bias = use_bias
        super().__init__(in_channels, widths, last_pad)

    def _stage(self, down: nn.Sequential | None, channels: int) -> nn.Sequential:
        first = () if down is None else (down,)
        return nn.Sequential(
            *first, *(SparseBasicBlock(channels, self.use_bias) for _ in range(2))
        )


def expect_widths(widths: Sequence[int]) -> Sequence[int]:
    """Return the five widths; raise where there are others."""
    if len(widths) != 5:
        raise ValueError(
            "widths are those of conv_input, conv2, conv3, conv4 and conv_out; got "
            f"{tuple(widths)}"
        )
    return widths
