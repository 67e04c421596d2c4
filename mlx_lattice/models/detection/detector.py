"""CenterPoint and VoxelNeXt: from the points of a scan to boxes, and their loss.

Boxes are decoded as in OpenPCDet's ``centernet_utils.py`` and ``voxelnext_head.py``:
the best cells, boxes of them, suppression. The cells of a dense map and the rows of a
sparse tensor are both (N, channels) arrays.

The loss is that of Law and Deng, "CornerNet", 2018, and Zhou, Wang and Kraehenbuehl,
"Objects as Points", 2019, over the cells of the head: a focal loss of heat maps and an
L1 loss of boxes. OpenPCDet's losses of the branch "iou" are not implemented.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any, NamedTuple

import mlx.core as mx

from ... import nn, ops
from ...checks import array_of
from ...geometry.lattice import true_positions
from ...io.checkpoints import RENAMES
from ...prepare import prepare_scan
from ...tensor import SparseTensor
from ..pretrained import PYG_NORMS, Pretrained, Rules
from ..voxel_recipe import check_scores
from .backbones import (
    CHANNELS,
    RESIDUAL_WIDTHS,
    GridRecipe,
    VoxelBackBone8x,
    VoxelResBackBone8x,
    VoxelResBackBone8xVoxelNeXt,
)
from .heads import BRANCHES, BaseBEVBackbone, Branch, CenterHead, VoxelNeXtHead

__all__ = [
    "Boxes",
    "Candidates",
    "CenterPoint",
    "Decoding",
    "Detector",
    "VoxelNeXt",
    "detection_loss",
    "published_arguments",
]

PerClass = float | tuple[float, ...]


class Boxes(NamedTuple):
    """Hold the boxes of one scan, by head, the best first.

    Attributes:
        boxes: (M, 7) float32 x, y, z of the centre, dx, dy, dz, heading; with two more
            if the net predicts velocities.
        scores: (M,) float32.
        labels: (M,) int32: the index of the net's class.

    Examples:
        >>> boxes, scores = mx.zeros((2, 7)), mx.array([0.9, 0.4])
        >>> found = models.Boxes(boxes, scores, labels=mx.array([0, 1]))
        >>> found.boxes.shape, found.labels.tolist()
        ((2, 7), [0, 1])
    """

    boxes: mx.array
    scores: mx.array
    labels: mx.array


@dataclass(frozen=True)
class Decoding:
    """Settings that decide which cells of a detector become boxes.

    Attributes:
        stride: cells of the grid that a cell of the map spans.
        max_boxes: the number of best cells that are considered, for each class and then
            for each head.
        score_threshold: only boxes with a score above this are kept.
        limit_range: low x, y, z and high x, y, z of centres that are kept.
        nms_threshold: IoU from above at which the worse of two boxes is dropped, one
            value or one for each class of the net.
        nms_pre, nms_post: the largest number of boxes before and after suppression, one
            value or one for each class.
        by_class: whether boxes only suppress boxes of their own class; otherwise they
            suppress all boxes of their head. Values for each class need it.
        rectifier: for each class of the net, the share r of the predicted IoU in a
            score: ``score ** (1 - r) * iou ** r``. Needs the branch "iou".
        nms_score: only boxes with a rectified score above this are kept; None keeps
            all.

    Raises:
        ValueError: values for each class are given without ``by_class``.

    Examples:
        >>> models.Decoding(score_threshold=0.3).score_threshold
        0.3
    """

    stride: int = 8
    max_boxes: int = 500
    score_threshold: float = 0.1
    limit_range: tuple[float, ...] = (-75.2, -75.2, -2, 75.2, 75.2, 4)
    nms_threshold: PerClass = 0.7
    nms_pre: int | tuple[int, ...] = 4096
    nms_post: int | tuple[int, ...] = 500
    by_class: bool = False
    rectifier: tuple[float, ...] | None = None
    nms_score: PerClass | None = None

    def __post_init__(self) -> None:
        for name, value in asdict(self).items():
            if isinstance(value, list | tuple):
                object.__setattr__(self, name, tuple(value))
        if len(self.limit_range) != 6:
            raise ValueError(f"limit_range must be 6 numbers; got {self.limit_range}")
        if self.stride < 1 or self.max_boxes < 1:
            raise ValueError("stride and max_boxes must be at least 1")
        listed = (self.nms_threshold, self.nms_pre, self.nms_post, self.nms_score)
        if not self.by_class and any(isinstance(value, tuple) for value in listed):
            raise ValueError(
                "thresholds and sizes of each class need by_class=True; got "
                f"{self.nms_threshold}, {self.nms_pre} and {self.nms_post}"
            )

    @classmethod
    def of(cls, values: Decoding | Mapping[str, Any] | None) -> Decoding:
        """Return a Decoding of a Decoding, of its arguments, or of None."""
        if isinstance(values, cls):
            return values
        return cls(**(values or {}))

    def expect_classes(self, count: int) -> None:
        """Raise unless values of each class are as many as there are classes."""
        for name, value in asdict(self).items():
            listed = name != "limit_range" and isinstance(value, tuple)
            if listed and len(value) != count:
                raise ValueError(
                    f"{name} has {len(value)} values, and there are {count} classes"
                )


class Candidates(NamedTuple):
    """The boxes of one head in a batch element, before suppression.

    Examples:
        >>> boxes, scores, labels = mx.zeros((2, 7)), mx.ones((2,)), mx.array([0, 1])
        >>> models.Candidates(boxes, scores, labels, ious=None).boxes.shape
        (2, 7)
    """

    boxes: mx.array  # (M, 7 or 9)
    scores: mx.array  # (M,)
    labels: mx.array  # (M,) int32, of the head's classes
    ious: mx.array | None  # (M,), from 0 to 1


def candidates(
    head: Mapping[str, mx.array],
    cells: mx.array,
    decoding: Decoding,
    grid: GridRecipe,
) -> Candidates:
    """Return the boxes of an element's best cells, by score, class and cell."""
    heat = mx.sigmoid(head["hm"].astype(mx.float32)).T
    classes, count = heat.shape
    # The best cells of each class, then the best of them all.
    best = ops.sort_scores(heat)[:, : decoding.max_boxes]
    scores = mx.take_along_axis(heat, best, axis=1).flatten()
    order = ops.sort_scores(scores)[: decoding.max_boxes]
    scores, rows = scores[order], best.flatten()[order]
    labels = (order // max(1, best.shape[1])).astype(mx.int32)

    def taken(name: str) -> mx.array:
        return head[name][rows].astype(mx.float32)

    low, size = grid.point_range, grid.voxel_size
    at = cells[rows][:, ::-1].astype(mx.float32) + taken("center")
    step = mx.array([decoding.stride, decoding.stride], dtype=mx.float32)
    at = at * step * mx.array(size[:2]) + mx.array(low[:2])
    rot = taken("rot")
    parts = [at, taken("center_z"), mx.exp(taken("dim"))]
    parts.append(mx.arctan2(rot[:, 1:], rot[:, :1]))
    parts += [taken("vel")] if "vel" in head else []
    boxes = mx.concatenate(parts, axis=1)
    limit = mx.array(decoding.limit_range, dtype=mx.float32)
    inside = (boxes[:, :3] >= limit[:3]) & (boxes[:, :3] <= limit[3:])
    keep = mx.all(inside, axis=1) & (scores > decoding.score_threshold)
    keep = true_positions(keep)
    ious = None
    if "iou" in head:
        ious = mx.clip((taken("iou")[keep, 0] + 1) * 0.5, 0, 1)
    return Candidates(boxes[keep], scores[keep], labels[keep], ious)


def selected(candidate: Candidates, decoding: Decoding, classes: int) -> Boxes:
    """Return the boxes that suppression keeps; labels are of the net's classes."""
    boxes, scores, labels, ious = candidate
    if decoding.rectifier is not None:
        power = mx.array(decoding.rectifier, dtype=mx.float32)[labels]
        scores = scores ** (1 - power) * ious**power
    groups = range(classes) if decoding.by_class else (None,)
    picked = []
    for group in groups:
        mask = mx.ones(scores.shape, mx.bool_) if group is None else labels == group
        least = of_class(decoding.nms_score, group)
        mask = mask if least is None else mask & (scores > least)
        members = true_positions(mask)
        if len(members):
            best = ops.nms_rotated(
                boxes[members],
                scores[members],
                of_class(decoding.nms_threshold, group),
                pre=of_class(decoding.nms_pre, group),
                post=of_class(decoding.nms_post, group),
            )
            picked.append(members[best])
    if not picked:
        return Boxes(boxes[:0], scores[:0], labels[:0])
    rows = mx.concatenate(picked)
    return Boxes(boxes[rows], scores[rows], labels[rows])


def of_class(value: Any, group: int | None) -> Any:
    """Return the value of a class, if each class has its own."""
    return value[group] if isinstance(value, tuple) else value


def joined(parts: Sequence[tuple[Any, ...]]) -> tuple[Any, ...]:
    """Return the rows of several heads' boxes, one after another."""
    kind = type(parts[0])
    columns = zip(*parts, strict=True)
    return kind(*(None if c[0] is None else mx.concatenate(c) for c in columns))


Branches = list[dict[str, mx.array]]


class Detector(Pretrained):
    """Find boxes in a scan: the base class of detectors.

    A call returns the outputs of the heads. ``detect`` turns a tensor of voxels into
    boxes, ``detect_points`` the points of a scan.

    Attributes:
        grid: a ``GridRecipe`` that makes voxels of points.
        heads: names of the classes of each head.
        classes: names of the classes, in the order of the labels.
        decoding: a ``Decoding`` that decides which cells become boxes.

    Examples:
        >>> grid = models.GridRecipe((1, 1, 0.25), (0, 0, -3, 32, 32, 3), tuple("xyz"))
        >>> net = models.VoxelNeXt(grid, (("car",),), (4, 4, 4, 4, 4), 8).eval()
        >>> found = net.detect_points(mx.random.uniform(0, 3, (100, 3)))
        >>> found.boxes.shape[1], net.classes  # 7 numbers for each box
        (7, ('car',))
    """

    @classmethod
    def of_config(cls, config: Mapping[str, Any]) -> Detector:
        """Return the net of a configuration of OpenPCDet, with random weights.

        Args:
            config: what its YAML files say, base configurations merged: CLASS_NAMES,
                DATA_CONFIG and MODEL.

        Raises:
            ValueError: an entry is missing, or the net has parts that ours has not.
        """
        _, arguments = published_arguments(config, cls.__name__)
        return cls(**arguments)

    _command = "detect scan.ply"
    # Whether suppression by class compares boxes of all heads.
    joins_heads = False

    def _describe(self, grid, heads, classes, decoding, branches) -> None:
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
        if decoding.rectifier and "iou" not in [name for name, *_ in branches]:
            raise ValueError('a rectifier needs the branch ("iou", 1, convolutions)')
        self._arguments |= {"grid": grid, "decoding": decoding}
        facts = {"heads": heads, "classes": classes, "grid": grid, "decoding": decoding}
        for name, value in facts.items():
            object.__setattr__(self, name, value)  # no parameters

    def recipe(self) -> GridRecipe:
        """Return the recipe that makes voxels of points."""
        return self.grid

    def cells(
        self, predictions: list[dict[str, Any]]
    ) -> list[tuple[Branches, mx.array]]:
        """Return the outputs of the heads by cell, for each batch element.

        Args:
            predictions: the result of a call.

        Returns:
            (N, channels) arrays by branch, a dict for each head, and (N, 2) y and x.
        """
        raise NotImplementedError

    def decode(self, predictions: list[dict[str, Any]]) -> list[list[Candidates]]:
        """Return boxes before suppression, of each head, for each batch element.

        Raises:
            ValueError: scores are NaN.
        """
        scans = self.cells(predictions)
        check_scores(*(head["hm"] for heads, _ in scans for head in heads))
        return [
            [candidates(head, cells, self.decoding, self.grid) for head in heads]
            for heads, cells in scans
        ]

    def boxes(self, predictions: list[dict[str, Any]]) -> list[Boxes]:
        """Return the boxes of each batch element, from the result of a call."""
        places = [
            mx.array([self.classes.index(name) for name in head], dtype=mx.int32)
            for head in self.heads
        ]
        results = []
        for heads in self.decode(predictions):
            parts = [
                part._replace(labels=place[part.labels])
                for part, place in zip(heads, places, strict=True)
            ]
            if self.joins_heads and self.decoding.by_class:
                parts = [joined(parts)]
            count = len(self.classes)
            results.append(joined([selected(p, self.decoding, count) for p in parts]))
        return results

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
        """The dtype of the net's input features."""
        return self.backbone_3d.conv_input.layers[1].weight.dtype


class CenterPoint(Detector):
    """Find boxes with a sparse encoder, a dense map from above, and heads.

    Args:
        grid (GridRecipe): How voxels are made of points.
        heads (tuple): The names of the classes of each head.
        widths (tuple): Channels of the encoder, see ``VoxelResBackBone8x``.
        residual (bool): If ``False`` the encoder is SECOND's. Default: ``True``.
        layer_nums, layer_strides, num_filters, upsample_strides, num_upsample_filters,
            conv_for_no_stride: Arguments of the 2D backbone, see
            ``models.BaseBEVBackbone``.
        shared_channels (int): The channels that the heads share. Default: ``64``.
        branches (tuple): The branches of a head, see ``models.CenterHead``.
        heat_convs (int): The convolutions of a heat map. Default: ``2``.
        head_bias (bool): If ``True`` convolutions of heads have a bias before norms.
        head_eps (float): Added to the variance in norms of heads. Default: ``1e-5``.
        last_pad (int): The padding of the encoder's last convolution. Default: ``0``.
        use_bias (bool): If ``True`` the encoder's residual blocks have biases. Default:
            ``True``.
        classes (tuple, optional): The classes in the order of their labels; by default
            in the order of the heads.
        decoding (Decoding): Settings that decide which cells become boxes.

    Examples:
        >>> grid = models.GridRecipe((1, 1, 0.25), (0, 0, -3, 32, 32, 3), tuple("xyz"))
        >>> net = models.CenterPoint(grid, (("car",), ("man",)), (4, 4, 4, 4, 4)).eval()
        >>> predictions = net(grid(mx.random.uniform(0, 3, (100, 3))))
        >>> len(predictions), sorted(predictions[0])  # the branches of each head
        (2, ['center', 'center_z', 'dim', 'hm', 'rot'])
    """

    def __init__(
        self,
        grid: GridRecipe | Mapping[str, Any],
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
        decoding: Decoding | Mapping[str, Any] | None = None,
    ):
        super().__init__()
        self._describe(grid, heads, classes, decoding, branches)
        channels = self.grid.channels
        if residual:
            encoder = VoxelResBackBone8x(channels, widths, last_pad, use_bias)
        else:
            encoder = VoxelBackBone8x(channels, widths, last_pad)
        self.backbone_3d = encoder
        self.to_bev: nn.ToBEV = nn.ToBEV()
        deep = map_depth(self.grid.spatial_shape[0], last_pad)
        self.backbone_2d: BaseBEVBackbone = BaseBEVBackbone(
            encoder.out_channels * deep,
            layer_nums,
            layer_strides,
            num_filters,
            upsample_strides,
            num_upsample_filters,
            conv_for_no_stride,
        )
        self.dense_head: CenterHead = CenterHead(
            self.backbone_2d.out_channels,
            [len(head) for head in self.heads],
            shared_channels,
            branches,
            heat_convs,
            head_bias,
            head_eps,
        )

    def __call__(self, x: SparseTensor) -> Branches:
        """Return (B, y, x, channels) of each branch, for each head."""
        prepare_scan(self, x)
        return self.dense_head(self.backbone_2d(self.to_bev(self.backbone_3d(x))))

    def cells(self, predictions: Branches) -> list[tuple[Branches, mx.array]]:
        """Return the outputs of the heads by cell, for each batch element."""
        batch, high, wide, _ = predictions[0]["hm"].shape
        place = mx.arange(high * wide, dtype=mx.int32)
        at = mx.stack([place // wide, place % wide], axis=1)
        flat = [
            {name: a.reshape(batch, high * wide, -1) for name, a in head.items()}
            for head in predictions
        ]
        return [
            ([{name: a[i] for name, a in head.items()} for head in flat], at)
            for i in range(batch)
        ]


class VoxelNeXt(Detector):
    """Find boxes from sparse rows, without a dense map.

    Args:
        grid (GridRecipe): How voxels are made of points.
        heads (tuple): The names of the classes of each head.
        channels (tuple): Channels of the backbone, see
            ``VoxelResBackBone8xVoxelNeXt``.
        out_channels (int): The channels that the heads read. Default: ``128``.
        kernel_sizes (tuple): The kernel sizes of the backbone's strided convolutions.
        use_bias (bool): If ``True`` the backbone's blocks have biases. Default:
            ``True``.
        branches (tuple): The branches of a head, see ``models.VoxelNeXtHead``.
        heat_convs (int): The convolutions of a heat map. Default: ``2``.
        head_kernel (int): The kernel of the heads' convolutions. Default: ``3``.
        head_bias (bool): If ``True`` convolutions of heads have a bias before norms.
        classes (tuple, optional): The classes in the order of their labels; by default
            in the order of the heads.
        decoding (Decoding): Settings that decide which cells become boxes.

    Examples:
        >>> grid = models.GridRecipe((1, 1, 0.25), (0, 0, -3, 32, 32, 3), tuple("xyz"))
        >>> net = models.VoxelNeXt(grid, (("car",),), (4, 4, 4, 4, 4), 8).eval()
        >>> predictions = net(grid(mx.random.uniform(0, 3, (100, 3))))
        >>> sorted(predictions[0])  # the branches of the one head
        ['center', 'center_z', 'dim', 'hm', 'rot']
    """

    joins_heads = True

    def __init__(
        self,
        grid: GridRecipe | Mapping[str, Any],
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
        decoding: Decoding | Mapping[str, Any] | None = None,
    ):
        super().__init__()
        self._describe(grid, heads, classes, decoding, branches)
        self.backbone_3d: VoxelResBackBone8xVoxelNeXt = VoxelResBackBone8xVoxelNeXt(
            self.grid.channels, channels, out_channels, kernel_sizes, use_bias
        )
        self.dense_head: VoxelNeXtHead = VoxelNeXtHead(
            out_channels,
            [len(head) for head in self.heads],
            branches,
            heat_convs,
            head_kernel,
            head_bias,
        )

    def __call__(self, x: SparseTensor) -> list[dict[str, SparseTensor]]:
        """Return tensors at (batch, y, x) of each branch, for each head."""
        prepare_scan(self, x)
        return self.dense_head(self.backbone_3d(x))

    def cells(
        self, predictions: list[dict[str, SparseTensor]]
    ) -> list[tuple[Branches, mx.array]]:
        """Return the outputs of the heads by row, for each batch element."""
        x, elements = predictions[0]["hm"], []
        coords = x.coordinate_set.coords
        for element in range(x.batch_size):
            rows = true_positions(coords[:, 0] == element)
            heads = [
                {name: y.feats[rows] for name, y in head.items()}
                for head in predictions
            ]
            elements.append((heads, coords[rows][:, 1:]))
        return elements


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


# Training

# Cells of a radius, at least, and the least IoU of a box moved by it with itself.
MIN_RADIUS, MIN_OVERLAP = 2, 0.1


class Targets(NamedTuple):
    """The targets of a head in one batch element."""

    heat: mx.array  # (N, classes): 1 where a box is, less around it
    rows: mx.array  # (M,) int32: the cell of each box
    values: dict[str, mx.array]  # (M, channels) of each branch


def detection_loss(
    net: Detector,
    predictions: list[dict[str, Any]],
    boxes: Sequence[mx.array],
    labels: Sequence[mx.array],
    *,
    box_weight: float = 2.0,
) -> mx.array:
    """Return the loss of a batch: that of heat maps, and the weighted one of boxes.

    Args:
        net: the detector that made the predictions.
        predictions: the result of a call of the net.
        boxes: for each batch element (M, 7), or (M, 9) with velocities; M may be 0.
            Boxes of an element without cells do not count.
        labels: for each batch element (M,) integers: the index of the net's class.
        box_weight: the weight of the boxes' loss.

    Raises:
        ValueError: the numbers of labels and boxes differ, a label is not one of the
            net's classes, or a box is not finite or has no extent.

    Examples:
        >>> grid = models.GridRecipe((1, 1, 0.25), (0, 0, -3, 32, 32, 3), tuple("xyz"))
        >>> net = models.VoxelNeXt(grid, (("car",),), (4, 4, 4, 4, 4), 8)
        >>> x = grid(mx.random.uniform(0, 3, (100, 3)))
        >>> box = mx.array([[2.0, 2.0, 1.0, 4.0, 2.0, 1.5, 0.0]])
        >>> models.detection_loss(net, net(x), [box], [mx.array([0])]).shape
        ()
    """
    elements = net.cells(predictions)
    if not len(elements) == len(boxes) == len(labels):
        raise ValueError(
            f"boxes and labels must be of {len(elements)} batch elements; got "
            f"{len(boxes)} and {len(labels)}"
        )
    truth = [_checked(net, *pair) for pair in zip(boxes, labels, strict=True)]
    total = mx.zeros(())
    for at, head in enumerate(net.heads):
        places = [net.classes.index(name) for name in head]
        heat, apart, count = mx.zeros(()), mx.zeros(()), 0
        for (heads, cells), (box, label) in zip(elements, truth, strict=True):
            if not len(cells):
                continue
            place = [p for p, each in enumerate(label) if each in places]
            local = [places.index(label[p]) for p in place]
            box = box[mx.array(place, dtype=mx.int32)]
            outputs = heads[at]
            target = targets(net, cells, box, local, len(head), "vel" in outputs)
            heat = heat + focal_loss(outputs["hm"], target.heat)
            apart = apart + sum(
                mx.abs(outputs[name][target.rows] - value).sum()
                for name, value in target.values.items()
            )
            count += len(place)
        total = total + (heat + box_weight * apart) / max(1, count)
    return total


def _checked(
    net: Detector, boxes: mx.array, labels: mx.array
) -> tuple[mx.array, list[int]]:
    boxes, labels = array_of(boxes, "boxes"), array_of(labels, "labels")
    if boxes.ndim != 2 or boxes.shape[1] not in (7, 9):
        raise ValueError(f"boxes must be (M, 7) or (M, 9); got {tuple(boxes.shape)}")
    whole = mx.issubdtype(labels.dtype, mx.integer) or not labels.size
    if labels.shape != boxes.shape[:1] or not whole:
        raise ValueError(
            f"labels must be ({len(boxes)},) integers, one a box; got "
            f"{tuple(labels.shape)} of {labels.dtype}"
        )
    values, classes = labels.tolist(), len(net.classes)
    if other := [label for label in values if not 0 <= label < classes]:
        raise ValueError(
            f"labels count the net's {classes} classes from 0; got {other[0]}"
        )
    right = mx.isfinite(boxes).all() & (boxes[:, 3:6] > 0).all()
    if not right.item():
        raise ValueError("boxes must be finite, and their extents above 0")
    return boxes.astype(mx.float32), values  # in half a metre has few steps


def focal_loss(logits: mx.array, heat: mx.array) -> mx.array:
    """Return the float32 sum over (N, classes) of the focal loss of a heat map."""
    logits = logits.astype(mx.float32)
    chance = mx.sigmoid(logits)
    # log(chance) and log(1 - chance), which neither rounds to log(0).
    yes, no = -mx.logaddexp(-logits, 0), -mx.logaddexp(logits, 0)
    at = (1 - chance) ** 2 * yes
    off = (1 - heat) ** 4 * chance**2 * no
    return -mx.where(heat == 1, at, off).sum()


def targets(
    net: Detector,
    cells: mx.array,
    boxes: mx.array,
    labels: Sequence[int],
    classes: int,
    velocities: bool = False,
) -> Targets:
    """Return a head's targets: each box at the cell nearest to its centre."""
    heat = mx.zeros((len(cells), classes))
    step = net.decoding.stride * mx.array(net.grid.voxel_size[:2])
    rows = mx.zeros((0,), dtype=mx.int32)
    at = (boxes[:, :2] - mx.array(net.grid.point_range[:2])) / step  # x and y
    if len(labels) and len(cells):
        corner = cells[:, ::-1].astype(mx.float32)
        away = ((corner[:, None] + 0.5 - at) ** 2).sum(axis=2)
        rows = mx.argmin(away, axis=0).astype(mx.int32)
        away = ((corner[:, None] - corner[rows]) ** 2).sum(axis=2)
        sigma = (2 * radius(boxes[:, 3:5] / step) + 1) / 6
        peaks = mx.exp(-away / (2 * sigma**2))
        columns = []
        for c in range(classes):
            members = mx.array([each == c for each in labels])
            columns.append(mx.where(members, peaks, 0).max(axis=1))
        heat = mx.stack(columns, axis=1)
        at = at - corner[rows]
    values = {
        "center": at,
        "center_z": boxes[:, 2:3],
        "dim": mx.log(boxes[:, 3:6]),
        "rot": mx.concatenate([mx.cos(boxes[:, 6:7]), mx.sin(boxes[:, 6:7])], axis=1),
    }
    if velocities and boxes.shape[1] >= 9:
        values["vel"] = boxes[:, 7:9]
    return Targets(heat, rows, values)


def radius(sizes: mx.array) -> mx.array:
    """Return (M,): how far both corners of boxes may move, in whole cells."""
    half, area, least = sizes.sum(axis=1), sizes.prod(axis=1), MIN_OVERLAP

    def root(a: float, b: mx.array, c: mx.array) -> mx.array:
        return (b + mx.sqrt(b**2 - 4 * a * c)) / 2

    most = mx.minimum(
        root(1, half, area * (1 - least) / (1 + least)),
        root(4, 2 * half, (1 - least) * area),
    )
    most = mx.minimum(most, root(4 * least, -2 * least * half, (least - 1) * area))
    return mx.maximum(mx.floor(most), MIN_RADIUS)


# OpenPCDet's configurations

# Classes that are named as in OpenPCDet.
DETECTORS = ("CenterPoint", "VoxelNeXt")
ENCODERS = "VoxelBackBone8x", "VoxelResBackBone8x"
BACKBONES = (*ENCODERS, "UNetV2", "VoxelResBackBone8xVoxelNeXt")


def published_arguments(
    config: Mapping[str, Any], kind: str | None = None
) -> tuple[str, dict[str, Any]]:
    """Return our class and arguments for a configuration of OpenPCDet.

    Args:
        config: the contents of the YAML files, with base configurations merged:
            CLASS_NAMES, DATA_CONFIG and MODEL.
        kind: the class to return arguments for, a detector or a backbone; by default
            the detector of the configuration.

    Raises:
        ValueError: an entry is missing, or our class does not have a part of the net.
    """
    try:
        model, data = config["MODEL"], config["DATA_CONFIG"]
        kind = kind or model["NAME"]
        if kind not in (*DETECTORS, *BACKBONES):
            raise ValueError(
                f"the configuration is of {model['NAME']!r}; expected one of "
                f"{', '.join(DETECTORS)}, or name a backbone of it"
            )
        grid, encoder = _grid(data, model), model["BACKBONE_3D"]
        if kind in BACKBONES:
            _expect(encoder, "NAME", kind)
            return kind, {"in_channels": grid.channels, **_encoder(encoder, kind)}
        arguments = {"grid": grid, **_head(model["DENSE_HEAD"], config["CLASS_NAMES"])}
        if kind == "VoxelNeXt":
            name = "VoxelResBackBone8xVoxelNeXt"
            _expect(encoder, "NAME", name)
            arguments |= _encoder(encoder, name)
            kernel = model["DENSE_HEAD"].get("KERNEL_SIZE_HEAD", 3)
            return kind, arguments | {"head_kernel": kernel}
        return kind, arguments | _center_point(model, encoder)
    except (KeyError, TypeError, AttributeError) as error:
        raise ValueError(
            "the configuration is not one of OpenPCDet's with its base configurations "
            f"merged: {type(error).__name__} {error}"
        ) from error


def _center_point(model: Mapping, encoder: Mapping) -> dict[str, Any]:
    head, flat = model["DENSE_HEAD"], model["BACKBONE_2D"]
    _expect(head, "NAME", "CenterHead")
    _expect(flat, "NAME", "BaseBEVBackbone")
    name = encoder.get("NAME", "VoxelResBackBone8x")
    if name not in ENCODERS:
        raise ValueError(f"CenterPoint here has no backbone {name!r}")
    return _encoder(encoder, name) | {
        "residual": name == "VoxelResBackBone8x",
        "layer_nums": tuple(flat["LAYER_NUMS"]),
        "layer_strides": tuple(flat["LAYER_STRIDES"]),
        "num_filters": tuple(flat["NUM_FILTERS"]),
        "upsample_strides": tuple(flat.get("UPSAMPLE_STRIDES") or ()),
        "num_upsample_filters": tuple(flat.get("NUM_UPSAMPLE_FILTERS") or ()),
        "conv_for_no_stride": bool(flat.get("USE_CONV_FOR_NO_STRIDE", False)),
        "shared_channels": head["SHARED_CONV_CHANNEL"],
        "head_eps": head.get("BN_EPS", 1e-5),
    }


def _encoder(config: Mapping, name: str) -> dict[str, Any]:
    bias = config.get("USE_BIAS")
    if name == "VoxelResBackBone8xVoxelNeXt":
        return {
            "channels": tuple(config.get("CHANNELS", (16, 32, 64, 128, 128))),
            "out_channels": config.get("OUT_CHANNEL", 128),
            "kernel_sizes": tuple(config.get("SPCONV_KERNEL_SIZES", (3, 3, 3, 3))),
            "use_bias": True if bias is None else bool(bias),
        }
    options: dict[str, Any] = {"last_pad": config.get("last_pad", 0)}
    if name == "VoxelResBackBone8x":
        options["use_bias"] = True if bias is None else bool(bias)
    if name == "UNetV2":
        options["return_encoded"] = bool(config.get("RETURN_ENCODED_TENSOR", True))
    return options


def _grid(data: Mapping, model: Mapping) -> GridRecipe:
    features = data["POINT_FEATURE_ENCODING"]["used_feature_list"]
    name = "transform_points_to_voxels"
    steps = {step["NAME"]: step for step in data["DATA_PROCESSOR"]}
    step = steps.get(name) or steps[f"{name}_placeholder"]
    most = step.get("MAX_NUMBER_OF_VOXELS")
    most = most.get("test") if isinstance(most, Mapping) else most
    dynamic = "Dyn" in model.get("VFE", {}).get("NAME", "MeanVFE")
    return GridRecipe(
        tuple(step["VOXEL_SIZE"]),
        tuple(data["POINT_CLOUD_RANGE"]),
        tuple(features),
        None if dynamic else step.get("MAX_POINTS_PER_VOXEL"),
        None if dynamic else most,
    )


def _head(config: Mapping, class_names: list[str]) -> dict[str, Any]:
    if config.get("DOUBLE_FLIP"):
        raise ValueError("DOUBLE_FLIP, four mirrored scans for one, is not here")
    separate = config["SEPARATE_HEAD_CFG"]["HEAD_DICT"]
    heads = [
        tuple(name for name in head if name in class_names)
        for head in config["CLASS_NAMES_EACH_HEAD"]
    ]
    return {
        "heads": tuple(heads),
        "classes": tuple(class_names),
        "branches": tuple(
            (name, branch["out_channels"], branch["num_conv"])
            for name, branch in separate.items()
        ),
        "heat_convs": config["NUM_HM_CONV"],
        "head_bias": bool(config.get("USE_BIAS_BEFORE_NORM", False)),
        "decoding": _decoding(config),
    }


def _decoding(config: Mapping) -> Decoding:
    after = config["POST_PROCESSING"]
    nms = after["NMS_CONFIG"]
    kinds = ("nms_gpu", "class_specific_nms")
    if nms["NMS_TYPE"] not in kinds:
        raise ValueError(
            f"NMS_TYPE must be one of {', '.join(kinds)}; got {nms['NMS_TYPE']!r}"
        )
    rectifier = config.get("RECTIFIER") if config.get("IOU_BRANCH") else None
    if after.get("USE_IOU_TO_RECTIFY_SCORE"):
        rectifier = after["IOU_RECTIFIER"]
    by_class = bool(config.get("IOU_BRANCH")) or nms["NMS_TYPE"] == kinds[1]
    return Decoding(
        stride=config["TARGET_ASSIGNER_CONFIG"]["FEATURE_MAP_STRIDE"],
        max_boxes=after["MAX_OBJ_PER_SAMPLE"],
        score_threshold=after["SCORE_THRESH"],
        limit_range=tuple(after["POST_CENTER_LIMIT_RANGE"]),
        nms_threshold=_plain(nms["NMS_THRESH"]),
        nms_pre=_plain(nms["NMS_PRE_MAXSIZE"]),
        nms_post=_plain(nms["NMS_POST_MAXSIZE"]),
        by_class=by_class,
        rectifier=None if rectifier is None else tuple(rectifier),
        nms_score=_plain(nms.get("SCORE_THRESH")) if by_class else None,
    )


def _plain(value):
    return tuple(value) if isinstance(value, list | tuple) else value


def _expect(config: Mapping, key: str, value: str) -> None:
    if config.get(key, value) != value:
        raise ValueError(f"{key} must be {value!r} here; got {config[key]!r}")


# The names of parameters in checkpoints of OpenPCDet and of torch-pointcloud.
_VOXELNEXT = Rules(
    ((r"head\.", "dense_head.", 0), (r"backbone_3d\.", "backbone_3d.", 0)), PYG_NORMS
)
_VOXELS = Rules(((r"(?:backbone_3d\.)?(?=conv|shared_conv)", "", 0),), PYG_NORMS)


def _backbone_3d(name: str) -> str | None:
    # OpenPCDet's detectors hold the net so; what else they have is not of it.
    own, part, rest = name.rpartition("backbone_3d.")
    return None if not part or own else rest


RENAMES.update(
    {
        (Detector, "spconv"): lambda _: (_VOXELNEXT,),
        (VoxelBackBone8x, "spconv"): lambda _: (_VOXELS, _backbone_3d),
        (VoxelResBackBone8xVoxelNeXt, "spconv"): lambda _: (_VOXELS, _backbone_3d),
    }
)
