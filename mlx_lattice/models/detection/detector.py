"""CenterPoint and VoxelNeXt: from the points of a scan to boxes."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import mlx.core as mx

from ... import nn
from ...geometry.unique import true_positions
from ...prepare import prepare_scan
from ...tensor import SparseTensor
from ..attributes import check_scores
from ..pretrained import Pretrained
from .backbones import RESIDUAL_WIDTHS, VoxelBackBone8x, VoxelResBackBone8x
from .boxes import Boxes, Candidates, Decoding, candidates, joined, selected
from .dense import BaseBEVBackbone
from .heads import BRANCHES, Branch, CenterHead, VoxelNeXtHead
from .published import published_arguments
from .voxelnext_backbone import CHANNELS, VoxelResBackBone8xVoxelNeXt
from .voxels import GridRecipe

Branches = list[dict[str, mx.array]]


class Detector(Pretrained):
    """A net that finds boxes in a scan.

    A call returns what its heads say. ``detect`` makes boxes of that, and
    ``detect_points`` takes the points of a scan.

    Attributes:
        grid: how voxels are made of points: a ``GridRecipe``.
        heads: names of the classes of each head.
        classes: names of the classes, in the order of the labels.
        decoding: what becomes a box: a ``Decoding``.
    """

    @classmethod
    def of_config(cls, config: Mapping[str, Any]) -> Detector:
        """Return the net, with random weights, of one of OpenPCDet's configurations.

        Args:
            config: what its YAML files say, base configurations merged: CLASS_NAMES,
                DATA_CONFIG and MODEL.

        Raises:
            ValueError: an entry is missing, or the net has parts that ours has not.
        """
        _, arguments = published_arguments(config, cls.__name__)
        return cls(**arguments)

    # Whether classes of all heads meet in suppression, where that is by class.
    joins_heads = False

    def _describe(self, grid, heads, classes, decoding) -> None:
        """Check and keep what the layers do not say."""
        grid = GridRecipe(**grid) if isinstance(grid, Mapping) else grid
        heads = tuple(tuple(map(str, head)) for head in heads)
        names = [name for head in heads for name in head]
        classes = tuple(classes or names)
        if sorted(names) != sorted(set(classes)) or not all(heads):
            raise ValueError(
                "each class must be of one head, and each head have classes; got "
                f"heads {heads} of classes {classes}"
            )
        decoding = Decoding.of(decoding)
        decoding.expect_classes(len(classes))
        for name, value in (
            ("grid", grid),
            ("heads", heads),
            ("classes", classes),
            ("decoding", decoding),
        ):
            object.__setattr__(self, name, value)  # no parameters
        self._arguments |= {"grid": grid, "decoding": decoding}

    def _check_iou(self, branches: Sequence[Branch]) -> None:
        if self.decoding.rectifier and "iou" not in [name for name, *_ in branches]:
            raise ValueError('a rectifier needs the branch ("iou", 1, convolutions)')

    def recipe(self) -> GridRecipe:
        """Return how voxels are made of points."""
        return self.grid

    def cells(self, predictions: list[dict]) -> list[tuple[Branches, mx.array]]:
        """Return of each batch element rows of heads' branches, and their cells.

        Args:
            predictions: what a call returned.

        Returns:
            (N, channels) arrays by branch, a dict a head, and (N, 2) y and x.
        """
        raise NotImplementedError

    def decode(self, predictions: list[dict]) -> list[list[Candidates]]:
        """Return boxes before suppression, of each head, for each batch element.

        Args:
            predictions: what a call returned.

        Raises:
            ValueError: scores are NaN.
        """
        scans = self.cells(predictions)
        check_scores(*(head["hm"] for heads, _ in scans for head in heads))
        return [
            [candidates(head, cells, self.decoding, self.grid) for head in heads]
            for heads, cells in scans
        ]

    def boxes(self, predictions: list[dict]) -> list[Boxes]:
        """Return the boxes of each batch element.

        Args:
            predictions: what a call returned.
        """
        places = [
            mx.array([self.classes.index(name) for name in head], dtype=mx.int32)
            for head in self.heads
        ]
        made = []
        for found in self.decode(predictions):
            parts = [
                part._replace(labels=place[part.labels])
                for part, place in zip(found, places, strict=True)
            ]
            if self.joins_heads and self.decoding.by_class:
                parts = [joined(parts)]
            count = len(self.classes)
            made.append(joined([selected(p, self.decoding, count) for p in parts]))
        return made

    def detect(self, x: SparseTensor) -> list[Boxes]:
        """Return the boxes of each batch element of a tensor of voxels."""
        return self.boxes(self(x.astype(self.dtype)))

    def detect_points(
        self,
        points: Any,
        attributes: Mapping[str, Any] | None = None,
        *,
        fill: bool = False,
    ) -> Boxes:
        """Return the boxes of one scan.

        Args:
            points, attributes, fill: as for ``GridRecipe``.
        """
        return self.detect(self.grid(points, attributes, fill=fill))[0]

    @property
    def dtype(self) -> mx.Dtype:
        """The dtype of features that the net takes: that of its first norm's scale."""
        return self.backbone_3d.conv_input.layers[1].weight.dtype


class CenterPoint(Detector):
    """CenterPoint over voxels: a sparse encoder, a dense map from above, heads.

    Args:
        grid (GridRecipe): How voxels are made of points.
        heads (tuple): The names of the classes of each head.
        widths (tuple): Channels of the encoder, see ``VoxelResBackBone8x``.
        residual (bool): If ``False`` the encoder is SECOND's. Default: ``True``.
        layer_nums, layer_strides, num_filters, upsample_strides, num_upsample_filters,
            conv_for_no_stride: Of the 2D backbone, see ``models.BaseBEVBackbone``.
        shared_channels (int): The channels that the heads share. Default: ``64``.
        branches (tuple): The branches of a head, see ``models.CenterHead``.
        heat_convs (int): The convolutions of a heat map. Default: ``2``.
        head_bias (bool): If ``True`` convolutions of heads have a bias before norms.
            Default: ``True``.
        head_eps (float): Added to the variance in norms of heads. Default: ``1e-5``.
        last_pad (int): Of the encoder. Default: ``0``.
        use_bias (bool): Of the encoder's residual blocks. Default: ``True``.
        classes (tuple, optional): The classes in the order of their labels; by default
            as the heads have them.
        decoding (Decoding): What becomes a box.
    """

    def __init__(
        self,
        grid: GridRecipe | Mapping,
        heads: Sequence[Sequence[str]],
        widths: Sequence[int] = RESIDUAL_WIDTHS,
        *,
        residual: bool = True,
        layer_nums: Sequence[int] = (5, 5),
        layer_strides: Sequence[int] = (1, 2),
        num_filters: Sequence[int] = (128, 256),
        upsample_strides: Sequence[float] = (1, 2),
        num_upsample_filters: Sequence[int] = (256, 256),
        conv_for_no_stride: bool = False,
        shared_channels: int = 64,
        branches: Sequence[Branch] = BRANCHES,
        heat_convs: int = 2,
        head_bias: bool = True,
        head_eps: float = 1e-5,
        last_pad: int = 0,
        use_bias: bool = True,
        classes: Sequence[str] = (),
        decoding: Decoding | Mapping | None = None,
    ):
        super().__init__()
        self._describe(grid, heads, classes, decoding)
        self._check_iou(branches)
        channels = self.grid.channels
        if residual:
            encoder = VoxelResBackBone8x(channels, widths, last_pad, use_bias)
        else:
            encoder = VoxelBackBone8x(channels, widths, last_pad)
        self.backbone_3d = encoder
        self.to_bev = nn.ToBEV()
        deep = map_depth(self.grid.spatial_shape[0], last_pad)
        self.backbone_2d = BaseBEVBackbone(
            encoder.out_channels * deep,
            layer_nums,
            layer_strides,
            num_filters,
            upsample_strides,
            num_upsample_filters,
            conv_for_no_stride,
        )
        self.dense_head = CenterHead(
            self.backbone_2d.out_channels,
            [len(head) for head in self.heads],
            shared_channels,
            branches,
            heat_convs,
            head_bias,
            head_eps,
        )

    def __call__(self, x: SparseTensor) -> Branches:
        """Return (B, y, x, channels) of each branch, for each head.

        Args:
            x: voxels at (batch, z, y, x), with the grid's ``spatial_shape``.
        """
        prepare_scan(self, x)
        return self.dense_head(self.backbone_2d(self.to_bev(self.backbone_3d(x))))

    def cells(self, predictions: Branches) -> list[tuple[Branches, mx.array]]:
        """Return of each batch element rows of heads' branches, and their cells."""
        batch, high, wide, _ = predictions[0]["hm"].shape
        flat = mx.arange(high * wide, dtype=mx.int32)
        at = mx.stack([flat // wide, flat % wide], axis=1)
        return [
            (
                [
                    {name: a[i].reshape(high * wide, -1) for name, a in head.items()}
                    for head in predictions
                ],
                at,
            )
            for i in range(batch)
        ]


class VoxelNeXt(Detector):
    """VoxelNeXt: boxes from sparse rows, without a dense map.

    Args:
        grid (GridRecipe): How voxels are made of points.
        heads (tuple): The names of the classes of each head.
        channels (tuple): Channels of the backbone, see
            ``VoxelResBackBone8xVoxelNeXt``.
        out_channels (int): The channels that the heads read. Default: ``128``.
        kernel_sizes (tuple): Of the backbone's strided convolutions.
        use_bias (bool): Of the backbone's blocks. Default: ``True``.
        branches (tuple): The branches of a head, see ``models.VoxelNeXtHead``.
        heat_convs (int): The convolutions of a heat map. Default: ``2``.
        head_kernel (int): The kernel of the heads' convolutions. Default: ``3``.
        head_bias (bool): If ``True`` convolutions of heads have a bias before norms.
            Default: ``True``.
        classes (tuple, optional): The classes in the order of their labels; by default
            as the heads have them.
        decoding (Decoding): What becomes a box.
    """

    joins_heads = True

    def __init__(
        self,
        grid: GridRecipe | Mapping,
        heads: Sequence[Sequence[str]],
        channels: Sequence[int] = CHANNELS,
        out_channels: int = 128,
        *,
        kernel_sizes: Sequence[int] = (3, 3, 3, 3),
        use_bias: bool = True,
        branches: Sequence[Branch] = BRANCHES,
        heat_convs: int = 2,
        head_kernel: int = 3,
        head_bias: bool = True,
        classes: Sequence[str] = (),
        decoding: Decoding | Mapping | None = None,
    ):
        super().__init__()
        self._describe(grid, heads, classes, decoding)
        self._check_iou(branches)
        self.backbone_3d = VoxelResBackBone8xVoxelNeXt(
            self.grid.channels, channels, out_channels, kernel_sizes, use_bias
        )
        self.dense_head = VoxelNeXtHead(
            out_channels,
            [len(head) for head in self.heads],
            branches,
            heat_convs,
            head_kernel,
            head_bias,
        )

    def __call__(self, x: SparseTensor) -> list[dict[str, SparseTensor]]:
        """Return tensors at (batch, y, x) of each branch, for each head.

        Args:
            x: voxels at (batch, z, y, x), with the grid's ``spatial_shape``.
        """
        prepare_scan(self, x)
        return self.dense_head(self.backbone_3d(x))

    def cells(
        self, predictions: list[dict[str, SparseTensor]]
    ) -> list[tuple[Branches, mx.array]]:
        """Return of each batch element rows of heads' branches, and their cells."""
        x, made = predictions[0]["hm"], []
        coords = x.coordinate_set.coords
        for element in range(x.batch_size):
            own = true_positions(coords[:, 0] == element)
            heads = [
                {name: y.feats[own] for name, y in head.items()} for head in predictions
            ]
            made.append((heads, coords[own][:, 1:]))
        return made


def map_depth(cells: int, last_pad: int = 0) -> int:
    """Return how many cells of height the encoders leave of so many."""
    for padding in (1, 1, 0):
        cells = (cells + 2 * padding - 3) // 2 + 1
    deep = (cells + 2 * last_pad - 3) // 2 + 1
    if deep < 1:
        raise ValueError(
            "the grid is too low for the encoder, which strides four times over "
            "height: it needs 23 cells of z or more"
        )
    return deep
