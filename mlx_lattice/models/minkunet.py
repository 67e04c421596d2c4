"""MinkUNet: the U-net for the segmentation of voxels, in both published layouts.

Choy, Gwak and Savarese, "4D Spatio-Temporal ConvNets", 2019; channel plans as in
MinkowskiEngine's ``examples/minkunet.py``. torchsparse's net is that of SPVNAS: Tang et
al., "Searching Efficient 3D Architectures with Sparse Point-Voxel Convolution", 2020.
The two differ in the stem, in the channels, and in the names of a checkpoint, which
``io.import_checkpoint`` knows.
"""

from __future__ import annotations

from collections.abc import Sequence

from .. import nn
from ..ops.coordinates import cat
from ..prepare import prepare_scan
from ..tensor import SparseTensor
from .blocks import BasicBlock, Bottleneck, blocks, conv_norm, layer, trimmed_cells
from .pretrained import Segmentor

# Kernel sizes of the stem's convolutions, and their channels.
STEM, STEM_CHANNELS = (5,), 32

# Channels of four encoder and four decoder stages.
PLANS = {
    14: {
        "A": (32, 64, 128, 256, 128, 128, 96, 96),
        "B": (32, 64, 128, 256, 128, 128, 128, 128),
        "C": (32, 64, 128, 256, 192, 192, 128, 128),
        "D": (32, 64, 128, 256, 384, 384, 384, 384),
    },
    18: {
        "A": (32, 64, 128, 256, 128, 128, 96, 96),
        "B": (32, 64, 128, 256, 128, 128, 128, 128),
        "D": (32, 64, 128, 256, 384, 384, 384, 384),
    },
    34: {
        "A": (32, 64, 128, 256, 256, 128, 64, 64),
        "B": (32, 64, 128, 256, 256, 128, 64, 32),
        "C": (32, 64, 128, 256, 256, 128, 96, 96),
    },
}
# MinkUNet50 and 101 are published without a plan: these have those of MinkUNet34.
PLANS |= {50: PLANS[34], 101: PLANS[34]}
# SPVNAS's channels: of the stem, then of the stages.
PLANES = (32, 32, 64, 128, 256, 256, 128, 96, 96)
LAYERS = {
    14: (1, 1, 1, 1, 1, 1, 1, 1),
    18: (2, 2, 2, 2, 2, 2, 2, 2),
    34: (2, 3, 4, 6, 2, 2, 2, 2),
    50: (2, 3, 4, 6, 2, 2, 2, 2),
    101: (2, 3, 4, 23, 2, 2, 2, 2),
}


class Down(nn.Module):
    """A strided convolution that halves the lattice, then blocks."""

    def __init__(
        self,
        in_channels: int,
        channels: int,
        count: int,
        dims: int,
        block: type,
        trimmed: bool = False,
    ):
        super().__init__()
        self.trimmed = trimmed
        conv = layer("Conv", dims, in_channels, in_channels, 2, 2, bias=False)
        self.down = conv_norm(conv)
        self.blocks = blocks(in_channels, channels, count, 1, dims, block)

    def __call__(self, x: SparseTensor) -> SparseTensor:
        """Return features on the cells at stride 2."""
        rows = trimmed_cells(x) if self.trimmed else None
        return self.blocks(self.down(x) if rows is None else self.down(x, rows))


class Up(nn.Module):
    """A transposed convolution onto a skip's rows, the skip beside it, blocks."""

    def __init__(
        self,
        in_channels: int,
        skip: int,
        channels: int,
        count: int,
        dims: int,
        block: type,
    ):
        super().__init__()
        conv = layer("ConvTranspose", dims, in_channels, channels, 2, 2, bias=False)
        self.up = conv_norm(conv)
        self.blocks = blocks(channels + skip, channels, count, 1, dims, block)

    def __call__(self, x: SparseTensor, skip: SparseTensor) -> SparseTensor:
        """Return features on the rows of ``skip``."""
        return self.blocks(cat([self.up(x, skip), skip]))


class MinkUNet(Segmentor):
    """A U-net of residual blocks over four halvings of the lattice.

    Args:
        in_channels (int): The number of input channels.
        num_classes (int): The number of output channels.
        planes (tuple): The channels of four encoder and four decoder stages.
        layers (tuple): The number of blocks of each stage.
        stem (tuple): The kernel sizes of the stem's convolutions: ``(5,)`` is
            MinkowskiEngine's, ``(3, 3)`` torchsparse's. Default: ``(5,)``.
        stem_channels (int): The output channels of the stem. Default: ``32``.
        bottleneck (bool): If ``True`` blocks are bottlenecks, whose outputs have four
            times the channels of the stage. Default: ``False``.
        trimmed (bool): If ``True`` leave out the coarse cells that torchsparse 2.1
            leaves out: those above ``(largest - 1) // 2`` of an axis, the largest
            coordinate over the batch. Default: ``False``.
        dims (int): The number of spatial axes. Default: ``3``.
    """

    def __init__(
        self,
        in_channels: int,
        num_classes: int,
        planes: Sequence[int] = PLANS[34]["C"],
        layers: Sequence[int] = LAYERS[34],
        *,
        stem: Sequence[int] = STEM,
        stem_channels: int = STEM_CHANNELS,
        bottleneck: bool = False,
        trimmed: bool = False,
        dims: int = 3,
    ):
        super().__init__()
        if len(planes) != 8 or len(layers) != 8:
            raise ValueError(
                "planes and layers have one entry for each of four encoder and four "
                f"decoder stages; got {len(planes)} and {len(layers)}"
            )
        if not isinstance(stem, Sequence) or not stem:
            raise ValueError(
                f"stem has a kernel size for each of its convolutions; got {stem!r}"
            )
        inputs = [in_channels] + [stem_channels] * (len(stem) - 1)
        convs = (
            layer("SubmConv", dims, c, stem_channels, size, bias=False)
            for c, size in zip(inputs, stem, strict=True)
        )
        self.stem = nn.Sequential(*(conv_norm(conv) for conv in convs))
        block = Bottleneck if bottleneck else BasicBlock
        widths = [stem_channels, *(block.expansion * c for c in planes)]
        self.encoder = [
            Down(widths[i], planes[i], layers[i], dims, block, trimmed)
            for i in range(4)
        ]
        self.decoder = [
            Up(widths[i], widths[7 - i], planes[i], layers[i], dims, block)
            for i in range(4, 8)
        ]
        self.head = layer("SubmConv", dims, widths[8], num_classes, 1)

    @property
    def strides(self) -> tuple[int, ...]:
        """The strides of its coordinate levels, from the finest, for ``prepare``."""
        return () if self.encoder[0].trimmed else (2,) * len(self.encoder)

    def __call__(self, x: SparseTensor) -> SparseTensor:
        """Return ``num_classes`` scores for each row of ``x``, in its order."""
        prepare_scan(self, x)
        skips = [self.stem(x)]
        for stage in self.encoder:
            skips.append(stage(skips[-1]))
        x = skips.pop()
        for stage in self.decoder:
            x = stage(x, skips.pop())
        return self.head(x)


class _Planned(MinkUNet):
    depth: int
    bottleneck = False

    def __init__(
        self, in_channels: int, num_classes: int, plan: str = "A", *, dims: int = 3
    ):
        plans = PLANS[self.depth]
        if plan not in plans:
            raise ValueError(
                f"MinkUNet{self.depth} has the plans {', '.join(plans)}; got {plan!r}"
            )
        super().__init__(
            in_channels,
            num_classes,
            plans[plan],
            LAYERS[self.depth],
            bottleneck=self.bottleneck,
            dims=dims,
        )


class MinkUNet14(_Planned):
    """``MinkUNet`` of one block a stage, with channel plan A, B, C or D."""

    depth = 14


class MinkUNet18(_Planned):
    """``MinkUNet`` of two blocks a stage, with channel plan A, B or D."""

    depth = 18


class MinkUNet34(_Planned):
    """``MinkUNet`` of two to six blocks a stage, with channel plan A, B or C."""

    depth = 34


class MinkUNet50(_Planned):
    """``MinkUNet`` of two to six bottlenecks a stage, with channel plan A, B or C."""

    depth, bottleneck = 50, True


class MinkUNet101(_Planned):
    """``MinkUNet50`` with 23 bottlenecks in the coarsest stage."""

    depth, bottleneck = 101, True


class MinkUNetTorchSparse(MinkUNet):
    """``MinkUNet`` as torchsparse's users publish it, in SPVNAS.

    A stem of two 3x3x3 convolutions and two blocks a stage; ``width`` is what its
    configurations call ``cr``.

    Args:
        in_channels (int): The number of input channels.
        num_classes (int): The number of output channels.
        width (float): A factor of all channels. Default: ``1``.
        trimmed (bool): As of ``MinkUNet``. Default: ``False``.
        dims (int): The number of spatial axes. Default: ``3``.
    """

    def __init__(
        self,
        in_channels: int,
        num_classes: int,
        width: float = 1.0,
        *,
        trimmed: bool = False,
        dims: int = 3,
    ):
        first, *planes = (int(width * c) for c in PLANES)
        super().__init__(
            in_channels,
            num_classes,
            planes,
            LAYERS[18],
            stem=(3, 3),
            stem_channels=first,
            trimmed=trimmed,
            dims=dims,
        )
