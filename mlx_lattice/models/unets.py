"""Sparse U-nets that segment voxels: MinkUNet, SpUNet and SPVCNN.

``io.import_checkpoint`` reads their published checkpoints, by the rules at the end of
this file.

MinkUNet: Choy, Gwak and Savarese, "4D Spatio-Temporal ConvNets", 2019; channel plans as
in MinkowskiEngine's ``examples/minkunet.py``. ``MinkUNetTorchSparse`` is the net of
SPVNAS: Tang et al., "Searching Efficient 3D Architectures with Sparse Point-Voxel
Convolution", 2020. It has another stem and other channels.

SpUNet: Pointcept's U-net of spconv layers, or its encoder alone. Pointcept
contributors, "SpUNet-v1m1", 2023; the blocks are those of MinkUNet. Its parameters have
the names of Pointcept's checkpoints:

    conv_input.{0, 1}               stem
    down.<level>.{0, 1}             enc.<level>.block<i>.{conv1, bn1, conv2, bn2}
    up.<level>.{0, 1}               dec.<level>.block<i>.{..., proj.0, proj.1}
    final

Level 0 is the finest: ``up`` and ``dec`` run from their last entry to their first.

SPVCNN: ``MinkUNet`` on voxels beside an MLP on points, by Tang et al. as above.
"""

from __future__ import annotations

from collections.abc import Sequence
from fractions import Fraction
from typing import Any

import mlx.core as mx

from .. import nn, ops
from ..checks import arrays_of, positions_of, stream_of
from ..coordinate_set import CoordinateKey
from ..coordinates import CoordinateManager
from ..geometry.points import cells_of, reduce_segments, voxelize
from ..io.checkpoints import RENAMES
from ..ops.coordinates import cat
from ..ops.points import blend_at
from ..prepare import prepare_scan
from ..tensor import SparseTensor
from .blocks import (
    BasicBlock,
    Bottleneck,
    SparseBasicBlock,
    blocks,
    conv_norm,
    conv_norm_relu,
    conv_onto,
    layer,
    trimmed_cells,
)
from .pretrained import PYG_NORMS, Rules, Segmentor, pointcept
from .voxel_recipe import COARSEST, Voxels

__all__ = [
    "MinkUNet",
    "MinkUNet101",
    "MinkUNet14",
    "MinkUNet18",
    "MinkUNet34",
    "MinkUNet50",
    "MinkUNetTorchSparse",
    "SPVCNN",
    "SpUNet",
]

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
# MinkUNet50 and 101 are published without plans; they use those of MinkUNet34.
PLANS |= {50: PLANS[34], 101: PLANS[34]}
# SPVNAS's channels of the stem and of the stages.
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
        block: type[Any],
        trimmed: bool = False,
    ):
        super().__init__()
        self.trimmed = trimmed
        conv = layer("Conv", dims, in_channels, in_channels, 2, 2, bias=False)
        self.down: nn.ConvNormAct = conv_norm(conv)
        self.blocks: nn.Sequential = blocks(
            in_channels, channels, count, 1, dims, block
        )

    def __call__(self, x: SparseTensor) -> SparseTensor:
        """Return features on the cells at stride 2."""
        rows = trimmed_cells(x) if self.trimmed else None
        return self.blocks(self.down(x) if rows is None else self.down(x, rows))


class Up(nn.Module):
    """A transposed convolution onto a skip's rows, joined with the skip; blocks."""

    def __init__(
        self,
        in_channels: int,
        skip: int,
        channels: int,
        count: int,
        dims: int,
        block: type[Any],
    ):
        super().__init__()
        conv = layer("ConvTranspose", dims, in_channels, channels, 2, 2, bias=False)
        self.up: nn.ConvNormAct = conv_norm(conv)
        self.blocks: nn.Sequential = blocks(
            channels + skip, channels, count, 1, dims, block
        )

    def __call__(self, x: SparseTensor, skip: SparseTensor) -> SparseTensor:
        """Return features on the rows of ``skip``."""
        return self.blocks(cat([self.up(x, skip), skip]))


class MinkUNet(Segmentor):
    """Score each row with a residual U-net over four halvings of the lattice.

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
            leaves out: those above ``(largest - 1) // 2`` on an axis, for the largest
            coordinate of the batch. Default: ``False``.
        dims (int): The number of spatial axes. Default: ``3``.

    Examples:
        >>> x = ml.SparseTensor.from_dense(mx.ones((1, 4, 4, 4, 8)))
        >>> net = models.MinkUNet(8, 20, planes=(8,) * 8, layers=(1,) * 8)
        >>> net(x).shape  # 20 scores for each row
        (64, 20)
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
                "planes and layers need one entry for each of four encoder and four "
                f"decoder stages; got {len(planes)} and {len(layers)}"
            )
        if not isinstance(stem, Sequence) or not stem:
            raise ValueError(
                f"stem must have a kernel size for each convolution; got {stem!r}"
            )
        inputs = [in_channels] + [stem_channels] * (len(stem) - 1)
        convs = (
            layer("SubmConv", dims, c, stem_channels, size, bias=False)
            for c, size in zip(inputs, stem, strict=True)
        )
        self.stem: nn.Sequential = nn.Sequential(*(conv_norm(conv) for conv in convs))
        block = Bottleneck if bottleneck else BasicBlock
        widths = [stem_channels, *(block.expansion * c for c in planes)]
        self.encoder: list[Down] = [
            Down(widths[i], planes[i], layers[i], dims, block, trimmed)
            for i in range(4)
        ]
        self.decoder: list[Up] = [
            Up(widths[i], widths[7 - i], planes[i], layers[i], dims, block)
            for i in range(4, 8)
        ]
        self.head: nn.Module = layer("SubmConv", dims, widths[8], num_classes, 1)

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


class _MinkUNetOfPlan(MinkUNet):
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


class MinkUNet14(_MinkUNetOfPlan):
    """Score rows with ``MinkUNet`` of one block a stage; channel plan A, B, C or D.

    Examples:
        >>> x = ml.SparseTensor.from_dense(mx.ones((1, 4, 4, 4, 8)))
        >>> models.MinkUNet14(8, 20, plan="A")(x).shape
        (64, 20)
    """

    depth = 14


class MinkUNet18(_MinkUNetOfPlan):
    """Score rows with ``MinkUNet`` of two blocks a stage; channel plan A, B or D.

    Examples:
        >>> x = ml.SparseTensor.from_dense(mx.ones((1, 4, 4, 4, 8)))
        >>> models.MinkUNet18(8, 20)(x).shape
        (64, 20)
    """

    depth = 18


class MinkUNet34(_MinkUNetOfPlan):
    """Score rows with ``MinkUNet`` of two to six blocks a stage; plan A, B or C.

    Examples:
        >>> x = ml.SparseTensor.from_dense(mx.ones((1, 4, 4, 4, 8)))
        >>> models.MinkUNet34(8, 20)(x).shape
        (64, 20)
    """

    depth = 34


class MinkUNet50(_MinkUNetOfPlan):
    """Score rows with ``MinkUNet`` of two to six bottlenecks a stage; plan A, B or C.

    Examples:
        >>> x = ml.SparseTensor.from_dense(mx.ones((1, 4, 4, 4, 8)))
        >>> models.MinkUNet50(8, 20)(x).shape
        (64, 20)
    """

    depth = 50
    bottleneck: bool = True


class MinkUNet101(_MinkUNetOfPlan):
    """Score rows with ``MinkUNet50`` with 23 bottlenecks in the coarsest stage.

    Examples:
        >>> x = ml.SparseTensor.from_dense(mx.ones((1, 4, 4, 4, 8)))
        >>> models.MinkUNet101(8, 20)(x).shape
        (64, 20)
    """

    depth = 101
    bottleneck: bool = True


class MinkUNetTorchSparse(MinkUNet):
    """Score rows with torchsparse's form of ``MinkUNet``, as in SPVNAS.

    The net has a stem of two 3x3x3 convolutions and two blocks a stage. ``width`` is
    ``cr`` in the configurations of SPVNAS.

    Args:
        in_channels (int): The number of input channels.
        num_classes (int): The number of output channels.
        width (float): A factor of all channels. Default: ``1``.
        trimmed (bool): As for ``MinkUNet``. Default: ``False``.
        dims (int): The number of spatial axes. Default: ``3``.

    Examples:
        >>> x = ml.SparseTensor.from_dense(mx.ones((1, 4, 4, 4, 8)))
        >>> models.MinkUNetTorchSparse(8, 20, width=0.5)(x).shape
        (64, 20)
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


CHANNELS = (32, 64, 128, 256, 256, 128, 96, 96)
SPUNET_LAYERS = (2, 3, 4, 6, 2, 2, 2, 2)


class SpUNetStage(nn.Module):
    """Blocks in order, named ``block0``, ``block1`` and so on; ``count`` may be 0."""

    def __init__(self, in_channels: int, out_channels: int, count: int, dims: int = 3):
        super().__init__()
        self.count = count
        for i in range(count):
            inputs = in_channels if i == 0 else out_channels
            self[f"block{i}"] = SparseBasicBlock(inputs, out_channels, dims=dims)

    def __call__(self, x: SparseTensor) -> SparseTensor:
        """Return features on the rows of ``x``."""
        for i in range(self.count):
            x = self[f"block{i}"](x)
        return x


class SpUNet(Segmentor):
    """Score each row with a U-net of basic blocks, or encode each batch element.

    Its batch norms have momentum 0.01, as Pointcept's: scores in evaluation mode are of
    use only after some hundred training steps.

    Args:
        in_channels (int): The number of input channels.
        num_classes (int): The number of output channels; with 0 the net returns the
            features of the last stage.
        base_channels (int): The output channels of the stem. Default: ``32``.
        channels (tuple): The channels of each encoder stage, from the finest, then of
            each decoder stage, from the coarsest.
        layers (tuple): The number of blocks of each stage, in the same order; an
            encoder stage may have 0.
        enc_mode (bool): If ``True`` there is no decoder, and a call returns the mean
            of each batch element. Default: ``False``.
        dims (int): The number of spatial axes. Default: ``3``.

    Examples:
        >>> x = ml.SparseTensor.from_dense(mx.ones((1, 4, 4, 4, 8)))
        >>> net = models.SpUNet(8, 20, 16, (16, 32, 32, 16), layers=(1, 1, 1, 1))
        >>> net(x).shape
        (64, 20)
    """

    def __init__(
        self,
        in_channels: int,
        num_classes: int,
        base_channels: int = 32,
        channels: Sequence[int] = CHANNELS,
        layers: Sequence[int] = SPUNET_LAYERS,
        enc_mode: bool = False,
        *,
        dims: int = 3,
    ):
        super().__init__()
        if len(channels) != len(layers) or len(channels) % 2 or not channels:
            raise ValueError(
                "channels and layers must have an entry for each encoder and decoder "
                f"stage, as many of both; got {len(channels)} and {len(layers)}"
            )
        if not (enc_mode or all(layers[len(layers) // 2 :])):
            raise ValueError(
                "a decoder stage needs one block or more to take in the skip's "
                f"channels; got layers = {tuple(layers)}"
            )
        self.enc_mode = enc_mode
        stem = layer("SubmConv", dims, in_channels, base_channels, 5, bias=False)
        self.conv_input: nn.Sequential = conv_norm_relu(stem)
        levels = len(channels) // 2
        widths = [base_channels, *channels[:levels]]  # of the encoder, by level
        self.down: list[Any] = []
        self.enc: list[Any] = []
        for i in range(levels):
            fine, coarse = widths[i], widths[i + 1]
            down = layer("Conv", dims, fine, coarse, 2, 2, bias=False)
            self.down.append(conv_norm_relu(down))
            self.enc.append(SpUNetStage(coarse, coarse, layers[i], dims))
        last = widths[-1]
        if not enc_mode:
            self.up: list[Any] = []
            self.dec: list[Any] = []
            # Channels at each level of the decoder, from the finest.
            deeper = [*channels[: levels - 1 : -1], last]
            for i in range(levels):
                low, out = deeper[i + 1], deeper[i]
                up = layer("ConvTranspose", dims, low, out, 2, 2, bias=False)
                self.up.append(conv_norm_relu(up))
                count = layers[-1 - i]
                self.dec.append(SpUNetStage(out + widths[i], out, count, dims))
            last = channels[-1]
        if num_classes:
            self.final: nn.Module = layer("SubmConv", dims, last, num_classes, 1)

    @property
    def strides(self) -> tuple[int, ...]:
        """The strides of its coordinate levels, from the finest, for ``prepare``."""
        return (2,) * len(self.down)

    def __call__(self, x: SparseTensor) -> Any:  # an array with enc_mode
        """Return scores.

        Returns:
            a tensor on the rows of ``x``, in their order; with ``enc_mode`` an array
            (batch_size, num_classes): for each batch element the mean over its rows
            at the coarsest level.
        """
        prepare_scan(self, x)
        x, skips = self.conv_input(x), []
        for down, stage in zip(self.down, self.enc, strict=True):
            skips.append(x)
            x = stage(down(x))
        if not self.enc_mode:
            for up, stage in zip(self.up[::-1], self.dec[::-1], strict=True):
                skip = skips.pop()
                x = stage(ops.cat([conv_onto(up, x, skip), skip]))
        x = self.final(x) if "final" in self else x
        return ops.global_avg_pool(x) if self.enc_mode else x

    def score_voxels(self, voxels: Voxels) -> mx.array:
        """Return (N, num_classes) scores of the rows of ``voxels.x``.

        Raises:
            ValueError: the net has ``enc_mode`` and scores no rows.
        """
        if self.enc_mode:
            raise ValueError("with enc_mode, SpUNet scores whole scans, not points")
        return super().score_voxels(voxels)


FAR = 1 << 20  # cells: beyond this float32 has few bits within a cell


def _in_near_cells(points: mx.array, size: float) -> mx.array:
    """Return float64 points as float32 cells, counted from the lowest coarse cell."""
    with stream_of(points):
        at = points / mx.array(size, dtype=mx.float64)
        if at.size:
            low = mx.floor(at.min(axis=0) / COARSEST) * COARSEST
            at = at - mx.where(mx.isfinite(low), low, 0)
        return at.astype(mx.float32)


class _Points:
    """Points (P, 3) float32 in cells of the finest lattice, and (P,) int32 batches."""

    def __init__(
        self,
        points: mx.array,
        batch: mx.array,
        trimmed: bool,
        rows: dict[CoordinateKey, mx.array],
    ):
        self.points, self.batch, self.trimmed = points, batch, trimmed
        self.rows, self.cells, self.blends = rows, {}, {}

    def cells_on(self, x: SparseTensor) -> mx.array:
        if x.key not in self.cells:
            self.cells[x.key] = cells_of(self.points, self.batch, size=x.stride)
        return self.cells[x.key]

    def from_voxels(self, x: SparseTensor) -> mx.array:
        if x.key not in self.blends:
            blend = blend_at(x, self.points, self.cells_on(x), x.stride)
            self.blends[x.key] = blend
        return self.blends[x.key](x.feats)

    def to_voxels(self, x: SparseTensor, feats: mx.array) -> SparseTensor:
        if x.key not in self.rows:
            self.rows[x.key] = ops.lookup(x, self.cells_on(x))
        rows, count = self.rows[x.key], len(x)
        if not self.trimmed:
            return x.replace(reduce_segments(feats, rows, count, "mean"))
        # Points of trimmed cells go to an extra row, which is dropped.
        rows = mx.where(rows < 0, count, rows)
        return x.replace(reduce_segments(feats, rows, count + 1, "mean")[:count])


class SPVCNN(MinkUNet):
    """Score points with a voxel U-net of four halvings and a point branch.

    Args:
        in_channels (int): The number of features of a point.
        num_classes (int): The number of output channels.
        voxel_size (float): The edge of a voxel, in the unit of the points.
        width (float): A factor of all channels. Default: ``1``.
        planes (tuple): The channels of the stem, four encoder and four decoder
            stages.
        dropout (float): The probability to zero a voxel's feature before two of the
            decoder's stages, while training. Default: ``0.3``.
        trimmed (bool): As for ``MinkUNet``. Default: ``False``.

    Examples:
        >>> net = models.SPVCNN(1, 20, voxel_size=0.5, width=0.25).eval()
        >>> points = mx.random.uniform(shape=(50, 3))
        >>> net(points, mx.ones((50, 1)), mx.zeros((50,), dtype=mx.int32)).shape
        (50, 20)
    """

    def __init__(
        self,
        in_channels: int,
        num_classes: int,
        voxel_size: float = 0.05,
        width: float = 1.0,
        *,
        planes: Sequence[int] = PLANES,
        dropout: float = 0.3,
        trimmed: bool = False,
    ):
        if len(planes) != 9:
            raise ValueError(
                "planes has one entry for the stem, four encoder and four decoder "
                f"stages; got {len(planes)}"
            )
        cs = [int(width * c) for c in planes]
        super().__init__(
            in_channels,
            num_classes,
            cs[1:],
            LAYERS[18],
            stem=(3, 3),
            stem_channels=cs[0],
            trimmed=trimmed,
        )
        self.voxel_size: float = voxel_size
        self.trimmed: bool = trimmed
        self.head: nn.Linear = nn.Linear(cs[8], num_classes)
        self.point_transforms: list[nn.Sequential] = [
            nn.Sequential(nn.Linear(cs[a], cs[b]), nn.BatchNorm(cs[b]), nn.ReLU())
            for a, b in ((0, 4), (4, 6), (6, 8))
        ]
        self.dropout: nn.Dropout = nn.Dropout(dropout)

    def __call__(
        self,
        points: mx.array,
        feats: mx.array,
        batch: mx.array | None = None,
    ) -> mx.array:
        """Return the (P, num_classes) scores of points, in their order.

        Args:
            points: (P, 3) float positions; none at all is legal.
            feats: (P, in_channels) in the dtype of the weights.
            batch: (P,) integer batch index of each point; by default all 0.
        """
        points, size = positions_of(points, "points"), self.voxel_size
        feats, batch = arrays_of(feats=feats, batch=batch)
        if points.dtype == mx.float64:
            points, size = _in_near_cells(points, size), 1.0
        coords, means, rows = voxelize(points, feats, size, batch)
        manager = CoordinateManager()
        key = manager.insert(coords, trusted=True)
        n = points.shape[0]
        batch = mx.zeros((n,), dtype=mx.int32) if batch is None else batch
        at = points.astype(mx.float32) / size
        batch = mx.contiguous(batch.astype(mx.int32))  # it may be a column
        x = SparseTensor.of(manager, key, means)
        z = _Points(at, batch, self.trimmed, {key: rows})
        prepare_scan(self, x, z, call=self._scores)
        return self._scores(x, z)

    def _scores(self, x: SparseTensor, z: _Points) -> mx.array:
        """Return the scores of points from the mean features of their voxels."""
        first, second, third = self.point_transforms
        up1, up2, up3, up4 = self.decoder
        x0 = self.stem(x)
        z0 = z.from_voxels(x0)
        skips = [z.to_voxels(x0, z0)]
        for stage in self.encoder:
            skips.append(stage(skips[-1]))
        _, x1, x2, x3, x4 = skips
        z1 = z.from_voxels(x4) + first(z0)
        y = self.dropout(z.to_voxels(x4, z1))
        y = up2(up1(y, x3), x2)
        z2 = z.from_voxels(y) + second(z1)
        y = self.dropout(z.to_voxels(y, z2))
        y = up4(up3(y, x1), x0)
        return self.head(z.from_voxels(y) + third(z2))

    def score_voxels(self, voxels: Voxels) -> mx.array:
        """Return (N, num_classes) scores of the rows of ``voxels.x``.

        The net's points are the recipe's cells, as in SPVNAS, which calls their size
        ``pres`` and the net's ``voxel_size`` ``vres``. Without a recipe the cells have
        the size ``voxel_size``.
        """
        x, recipe = voxels.x, self.about.voxels
        size = recipe.voxel_size if recipe else self.voxel_size
        cells = x.coordinate_set
        coords, (low, high) = cells.coords, cells.bounds
        if len(x) and max(*map(abs, low[1:]), *map(abs, high[1:])) > FAR:
            # Move by whole cells of the coarsest lattice.
            ratio = Fraction(size / self.voxel_size).limit_denominator(FAR)
            step = COARSEST * ratio.denominator
            coords = coords - mx.array([0, *(v // step * step for v in low[1:])])
        points = coords[:, 1:].astype(mx.float32) * size
        return self(points, x.feats.astype(self.dtype), coords[:, 0])


# The names of published checkpoints

# MinkowskiEngine's examples/minkunet.py.
MINKOWSKI = Rules(
    (
        (r"conv0p1s1\.", "stem.0.conv.", 0),
        (r"bn0\.", "stem.0.norm.", 0),
        (r"conv([1-4])p\d+s2\.", "encoder.{}.down.conv.", 1),
        (r"bn([1-4])\.", "encoder.{}.down.norm.", 1),
        (r"block([1-4])\.", "encoder.{}.blocks.", 1),
        (r"convtr([4-7])p\d+s2\.", "decoder.{}.up.conv.", 4),
        (r"bntr([4-7])\.", "decoder.{}.up.norm.", 4),
        (r"block([5-8])\.", "decoder.{}.blocks.", 5),
        (r"final\.", "head.", 0),
    ),
    (
        (r"\bconv([123])\.", r"conv\1.conv."),
        (r"\bnorm([123])\.", r"conv\1.norm."),
        (r"\bdownsample\.0\.", "shortcut.conv."),
        (r"\bdownsample\.1\.", "shortcut.norm."),
    ),
)
# SPVNAS's core/models/semantic_kitti/minkunet.py, whose point branch is never called,
# and torchsparse's own backbones/unet.py, the same net without a head.
TORCHSPARSE = Rules(
    (
        (r"stem\.0\.", "stem.0.conv.", 0),
        (r"stem\.1\.", "stem.0.norm.", 0),
        (r"stem\.3\.", "stem.1.conv.", 0),
        (r"stem\.4\.", "stem.1.norm.", 0),
        (r"stage([1-4])\.0\.net\.0\.", "encoder.{}.down.conv.", 1),
        (r"stage([1-4])\.0\.net\.1\.", "encoder.{}.down.norm.", 1),
        (r"stage([1-4])\.1\.", "encoder.{}.blocks.0.", 1),
        (r"stage([1-4])\.2\.", "encoder.{}.blocks.1.", 1),
        (r"up([1-4])\.0\.net\.0\.", "decoder.{}.up.conv.", 1),
        (r"up([1-4])\.0\.net\.1\.", "decoder.{}.up.norm.", 1),
        (r"up([1-4])\.1\.", "decoder.{}.blocks.", 1),
        (r"encoders\.([0-3])\.0\.0\.", "encoder.{}.down.conv.", 0),
        (r"encoders\.([0-3])\.0\.1\.", "encoder.{}.down.norm.", 0),
        (r"encoders\.([0-3])\.1\.", "encoder.{}.blocks.0.", 0),
        (r"encoders\.([0-3])\.2\.", "encoder.{}.blocks.1.", 0),
        (r"decoders\.([0-3])\.upsample\.0\.", "decoder.{}.up.conv.", 0),
        (r"decoders\.([0-3])\.upsample\.1\.", "decoder.{}.up.norm.", 0),
        (r"decoders\.([0-3])\.fuse\.", "decoder.{}.blocks.", 0),
        (r"classifier\.0\.", "head.", 0),
        (r"point_transforms\.", None, 0),
    ),
    (
        (r"\b(?:net|main)\.0\.", "conv1.conv."),
        (r"\b(?:net|main)\.1\.", "conv1.norm."),
        (r"\b(?:net|main)\.3\.", "conv2.conv."),
        (r"\b(?:net|main)\.4\.", "conv2.norm."),
        (r"\b(?:downsample|shortcut)\.0\.", "shortcut.conv."),
        (r"\b(?:downsample|shortcut)\.1\.", "shortcut.norm."),
    ),
)

_SPUNET = Rules(((r"head\.", "final.", 0), (r"(?:en|de)coder\.", "", 0)), PYG_NORMS)
_SPVCNN = Rules(
    (
        (r"encoder\.block3\.fusion\.lin\.", "point_transforms.0.0.", 0),
        (r"encoder\.block3\.fusion\.norm\.", "point_transforms.0.1.", 0),
        (r"decoder\.block1\.fusion\.lin\.", "point_transforms.1.0.", 0),
        (r"decoder\.block1\.fusion\.norm\.", "point_transforms.1.1.", 0),
        (r"decoder\.block3\.fusion\.lin\.", "point_transforms.2.0.", 0),
        (r"decoder\.block3\.fusion\.norm\.", "point_transforms.2.1.", 0),
        (r"stem\.", "stem.", 0),
        (r"encoder\.block([0-3])\.downsample\.", "encoder.{}.down.", 0),
        (r"encoder\.block([0-3])\.blocks\.", "encoder.{}.blocks.", 0),
        (r"decoder\.block([0-3])\.upsample\.conv\.", "decoder.{}.up.", 0),
        (r"decoder\.block([0-3])\.upsample\.residual\.", "decoder.{}.blocks.0.", 0),
        (r"decoder\.block([0-3])\.blocks\.0\.", "decoder.{}.blocks.1.", 0),
    ),
    (
        (r"\bmodule\.", ""),
        (r"\bconv([12])\.", r"conv\1.conv."),
        (r"\bnorm([12])\.", r"conv\1.norm."),
        (r"\b(conv|norm)_skip\.", r"shortcut.\1."),
    ),
)


RENAMES.update(
    {
        (MinkUNet, "minkowski"): lambda _: (MINKOWSKI,),
        (MinkUNet, "torchsparse"): lambda _: (TORCHSPARSE,),
        (SPVCNN, "torchsparse"): lambda _: (_SPVCNN,),
        (SpUNet, "spconv"): lambda _: (pointcept, _SPUNET),
    }
)
