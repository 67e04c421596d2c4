"""Voxels of a bounded grid, and the 3D backbones of detectors, as in OpenPCDet.

Voxels are those of its ``transform_points_to_voxels`` with its MeanVFE, and of its
DynamicMeanVFE; cells are counted from the corner of the range. Lattices have its axes,
(batch, z, y, x), since its weights do. Backbones are SECOND's, residual blocks,
Part-A2's and VoxelNeXt's.

Yan, Mao and Li, "SECOND: Sparsely Embedded Convolutional Detection", 2018; Shi et al.,
"From Points to Parts", 2019; Chen et al., "VoxelNeXt: Fully Sparse VoxelNet for 3D
Object Detection and Tracking", 2023. Parameters are named as in OpenPCDet's
``spconv_backbone.py``, ``spconv_unet.py`` and ``spconv_backbone_voxelnext.py``:

    conv_input.{0, 1}
    conv1.0.{0, 1}, or with residual blocks conv1.{0, 1}.{conv1, bn1, conv2, bn2}
    conv2 to conv4: .0.{0, 1} the strided convolution, then two blocks
    conv_out.{0, 1}
    conv_up_t<i>, conv_up_m<i>, inv_conv<i> (at level 1 conv5)     of UNetV2

A strided convolution makes each cell that an input reaches, within the grid that the
tensor's ``spatial_shape`` bounds.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import mlx.core as mx

from ... import nn, ops, registry, sync
from ...checks import positions_of, real, single, single_or_double, stream_of, whole
from ...coordinate_set import CoordinateKey, CoordinateSet, OfPairs
from ...coordinates import CoordinateManager
from ...geometry.lattice import Rule, true_positions, unique_rows
from ...geometry.points import integers_of, reduce_segments
from ...kernel_spec import IntOrTuple
from ...ops.channels import by_halves
from ...prepare import prepare_scan
from ...reductions import sum_over
from ...tensor import SparseTensor, expect_tensor
from ..blocks import SparseBasicBlock, conv_norm_relu, conv_onto
from ..pretrained import Pretrained
from ..voxel_recipe import attribute, finite_points

__all__ = [
    "GridRecipe",
    "HardVoxels",
    "UNetV2",
    "VoxelBackBone8x",
    "VoxelResBackBone8x",
    "VoxelResBackBone8xVoxelNeXt",
    "dynamic_voxels",
    "hard_voxels",
    "mean_vfe",
]


class HardVoxels(NamedTuple):
    """Points grouped by voxel, in the form of OpenPCDet's voxel generator.

    Examples:
        >>> points = mx.array([[0.1, 0.1, 0.1], [0.2, 0.1, 0.1], [1.5, 0.1, 0.1]])
        >>> hard = models.hard_voxels(points, (1, 1, 1), (0, 0, 0, 2, 2, 2), 5)
        >>> hard.voxels.shape, hard.coords.tolist(), hard.counts.tolist()
        ((2, 5, 3), [[0, 0, 0], [0, 0, 1]], [2, 1])
    """

    voxels: mx.array  # (M, max_points, C): points of a voxel in order, then zeros
    coords: mx.array  # (M, 3) int32 (z, y, x), in the order of their first points
    counts: mx.array  # (M,) int32: points of each voxel


@dataclass(frozen=True)
class GridRecipe:
    """Make a detector's input from the points of a scan, as for its training.

    Attributes:
        voxel_size: extents of a voxel in x, y, z.
        point_range: low x, y, z and high x, y, z; points outside are dropped.
        features: the channels: "x", "y", "z", then "ones" or names of attributes of
            points, such as "intensity", "elongation" or "timestamp".
        max_points: the number of first points of a voxel that count; None for all.
        max_voxels: the number of voxels that are made, in the order of their first
            points; None for all.

    Raises:
        ValueError: sizes are not positive, or the range is empty.

    Examples:
        >>> grid = models.GridRecipe((1, 1, 0.25), (0, 0, -3, 32, 32, 3), tuple("xyz"))
        >>> x = grid(mx.array([[1.0, 1.0, 0.0], [1.1, 1.1, 0.1], [1.0, 1.0, 9.0]]))
        >>> x.shape, x.spatial_shape  # the last point lies outside the range
        ((1, 3), (25, 32, 32))
    """

    voxel_size: tuple[float, float, float]
    point_range: tuple[float, float, float, float, float, float]
    features: tuple[str, ...] = ("x", "y", "z", "intensity")
    max_points: int | None = 5
    max_voxels: int | None = 150_000

    def __post_init__(self) -> None:
        for name, count in (("voxel_size", 3), ("point_range", 6)):
            value = getattr(self, name)
            if not isinstance(value, Iterable) or len(value := tuple(value)) != count:
                raise ValueError(f"{name} must be {count} numbers; got {value}")
            value = tuple(real(v, name) for v in value)
            object.__setattr__(self, name, value)
        object.__setattr__(self, "features", tuple(self.features))
        if min(self.voxel_size) <= 0 or min(self.grid_size) <= 0:
            raise ValueError(
                "voxel_size must be positive and point_range hold a voxel; got "
                f"{self.voxel_size} and {self.point_range}"
            )
        if self.features[:3] != ("x", "y", "z"):
            raise ValueError(
                f"features must begin with x, y and z; got {', '.join(self.features)}"
            )
        for name in ("max_points", "max_voxels"):
            if (value := getattr(self, name)) is not None:
                object.__setattr__(self, name, whole(value, name, 1))

    @property
    def channels(self) -> int:
        """Channels of the features."""
        return len(self.features)

    @property
    def grid_size(self) -> tuple[int, int, int]:
        """Cells along x, y and z."""
        low, high = self.point_range[:3], self.point_range[3:]
        return tuple(
            round((b - a) / s)
            for a, b, s in zip(low, high, self.voxel_size, strict=True)
        )

    @property
    def spatial_shape(self) -> tuple[int, int, int]:
        """Extents of the lattice: (z + 1, y, x) cells, as in OpenPCDet."""
        x, y, z = self.grid_size
        return z + 1, y, x

    def __call__(
        self,
        points: Any,
        attributes: Mapping[str, Any] | None = None,
        *,
        fill: bool = False,
    ) -> SparseTensor:
        """Voxelise a scan; a voxel's features are the mean of its points that count.

        Args:
            points: (P, 3) float, an array of MLX or NumPy.
            attributes: name to values, as of ``io.PointCloud``. Points with values that
                are not finite are left out, with a warning.
            fill: whether to read zeros for a missing attribute.

        Returns:
            A tensor at (batch 0, z, y, x), with a ``spatial_shape``.

        Raises:
            ValueError: an attribute is missing or of another shape.
        """
        points = single_or_double(positions_of(points, "points"))
        names = self.features[3:]
        points, attributes, _ = finite_points(points, attributes or {}, names)
        if points.ndim != 2 or points.shape[1] != 3:
            raise ValueError(
                f"points must have shape (P, 3); got {tuple(points.shape)}"
            )
        count = len(points)
        columns = [
            mx.ones((count, 1))
            if name == "ones"
            else attribute(name, self.features, attributes, count, 1, fill)
            for name in names
        ]
        with stream_of(points):
            points = mx.concatenate([points, *columns], axis=1)
        if self.max_points is None and self.max_voxels is None:
            batch = mx.zeros((len(points),), dtype=mx.int32)
            return dynamic_voxels(points, self.voxel_size, self.point_range, batch)
        hard = hard_voxels(
            points,
            self.voxel_size,
            self.point_range,
            self.max_points or max(1, len(points)),
            self.max_voxels,
        )
        coords = mx.concatenate([mx.zeros_like(hard.coords[:, :1]), hard.coords], 1)
        return _tensor(coords, mean_vfe(hard), self.spatial_shape, 1)


def hard_voxels(
    points: mx.array,
    voxel_size: Sequence[float],
    point_range: Sequence[float],
    max_points: int,
    max_voxels: int | None = None,
) -> HardVoxels:
    """Group points by voxel, in their order, as spconv's ``Point2VoxelCPU3d`` does.

    Voxels are numbered in the order of their first points. Voxels beyond
    ``max_voxels``, and points of a voxel beyond ``max_points``, are left out.

    Args:
        points: (P, C) float32: x, y, z and other channels; cells of float64 are exact.
        voxel_size, point_range: as for ``GridRecipe``.
        max_points: the largest number of points of a voxel.
        max_voxels: the largest number of voxels; by default all.

    Raises:
        ValueError: a shape does not fit, or a number is below 1.

    Examples:
        >>> points = mx.array([[0.1, 0.1, 0.1], [0.2, 0.1, 0.1], [1.5, 0.1, 0.1]])
        >>> hard = models.hard_voxels(points, (1, 1, 1), (0, 0, 0, 2, 2, 2), 5)
        >>> hard.counts.tolist()  # the points of each voxel
        [2, 1]
    """
    max_points = whole(max_points, "max_points", 1)
    if max_voxels is not None:
        max_voxels = whole(max_voxels, "max_voxels", 1)
    points, cells, inside = _cells(points, voxel_size, point_range)
    inside_rows = true_positions(inside)
    points, cells = points[inside_rows], cells[inside_rows]
    count, channels = points.shape
    if not count:
        empty = mx.zeros((0, 3), dtype=mx.int32)
        slots = mx.zeros((0, max_points, channels))
        return HardVoxels(slots, empty, mx.zeros((0,), dtype=mx.int32))
    place = mx.arange(count, dtype=mx.int32)
    unique = unique_rows(mx.concatenate([mx.zeros_like(cells[:, :1]), cells], axis=1))
    voxels = len(unique.rows)
    first = mx.full((voxels,), count, dtype=mx.int32)
    first = first.at[unique.inverse].minimum(place)
    # Voxels in the order of their first points, which are all different.
    order = mx.argsort(first)[:max_voxels]
    number = mx.full((voxels,), len(order), dtype=mx.int32)
    number[order] = mx.arange(len(order), dtype=mx.int32)
    numbers = number[unique.inverse]
    # Points by voxel and then by place; the slot is how far the voxel's first one is.
    keys = mx.sort(numbers.astype(mx.int64) * count + place.astype(mx.int64))
    by, at = (keys // count).astype(mx.int32), keys % count
    starts = mx.searchsorted(by, mx.arange(len(order) + 1, dtype=mx.int32))
    starts = starts.astype(mx.int32)
    slot = place - starts[by]
    fits = (by < len(order)) & (slot < max_points)
    # Points without a slot go to an additional one, behind the last.
    last = len(order) * max_points
    target = mx.where(fits, by * max_points + slot, last)
    slots = mx.zeros((last + 1, channels), dtype=points.dtype)
    slots[target] = mx.where(fits[:, None], points[at], 0)
    return HardVoxels(
        slots[:last].reshape(len(order), max_points, channels),
        unique.rows[order][:, 1:],
        mx.minimum(starts[1:] - starts[:-1], max_points),
    )


def mean_vfe(hard: HardVoxels) -> mx.array:
    """Return the (M, C) mean of each voxel's points, as OpenPCDet's MeanVFE does.

    Examples:
        >>> points = mx.array([[0.0, 0.5, 0.5], [0.5, 0.5, 0.5]])
        >>> hard = models.hard_voxels(points, (1, 1, 1), (0, 0, 0, 2, 2, 2), 5)
        >>> models.mean_vfe(hard).tolist()
        [[0.25, 0.5, 0.5]]
    """
    return hard.voxels.sum(axis=1) / mx.maximum(hard.counts, 1)[:, None]


def dynamic_voxels(
    points: mx.array,
    voxel_size: Sequence[float],
    point_range: Sequence[float],
    batch: mx.array,
    *,
    batch_size: int | None = None,
) -> SparseTensor:
    """Return the mean of all points of each voxel, as OpenPCDet's DynamicMeanVFE does.

    Args:
        points: (P, C) float32: x, y, z and other channels; cells of float64 are exact.
        voxel_size, point_range: as for ``GridRecipe``.
        batch: (P,) integer batch index of each point.
        batch_size: as for ``SparseTensor``.

    Returns:
        A tensor at (batch, z, y, x), with rows sorted by (batch, x, y, z) as in
            OpenPCDet.

    Raises:
        ValueError: a shape does not fit, or the batch indices are not integers.

    Examples:
        >>> points = mx.array([[0.0, 0.5, 0.5], [0.5, 0.5, 0.5]])
        >>> batch = mx.zeros((2,), dtype=mx.int32)
        >>> x = models.dynamic_voxels(points, (1, 1, 1), (0, 0, 0, 2, 2, 2), batch)
        >>> x.feats.tolist()
        [[0.25, 0.5, 0.5]]
    """
    points, cells, inside = _cells(points, voxel_size, point_range)
    batch = integers_of(batch, len(inside), "batch")
    inside_rows = true_positions(inside)
    points, batch = points[inside_rows], batch[inside_rows]
    rows = mx.concatenate([batch[:, None], cells[inside_rows][:, ::-1]], axis=1)
    unique = unique_rows(rows)
    feats = points
    if len(rows):
        feats = reduce_segments(points, unique.inverse, len(unique.rows), "mean")
    coords = unique.rows[:, mx.array([0, 3, 2, 1])]
    x, y, z = GridRecipe(voxel_size, point_range).grid_size
    return _tensor(coords, feats, (z + 1, y, x), batch_size)


def _tensor(coords, feats, shape, batch_size) -> SparseTensor:
    manager = CoordinateManager()
    key = manager.insert(coords, spatial_shape=shape, batch_size=batch_size)
    return SparseTensor.of(manager, key, feats)


def _cells(points, voxel_size, point_range) -> tuple[mx.array, mx.array, mx.array]:
    """Return float32 points, (P, 3) int32 cells (z, y, x), and whether in the range."""
    recipe = GridRecipe(voxel_size, point_range)
    points = positions_of(points, "points")
    if points.ndim != 2 or points.shape[1] < 3:
        raise ValueError(
            f"points must have shape (P, 3 or more); got {tuple(points.shape)}"
        )
    wide = single_or_double(points)
    with stream_of(wide):
        low, size, high = (
            mx.array(v, dtype=wide.dtype)
            for v in (recipe.point_range[:3], recipe.voxel_size, recipe.grid_size)
        )
        at = mx.floor((wide[:, :3] - low) / size)
        inside = mx.all((at >= 0) & (at < high), axis=1)  # False for NaN
        cells = mx.where(inside[:, None], at, 0).astype(mx.int32)
    points = single(points) if points.dtype == mx.float64 else points
    return points, cells[:, ::-1], inside


# conv_input, conv2, conv3, conv4, conv_out
WIDTHS = (16, 32, 64, 64, 128)
RESIDUAL_WIDTHS = (16, 32, 64, 128, 128)
CHANNELS = (16, 32, 64, 128, 128)  # of VoxelNeXt: conv1 to conv4, then conv5 and conv6


def subm(in_channels: int, out_channels: int) -> nn.Sequential:
    """Return a submanifold convolution, its norm, a ReLU."""
    return conv_norm_relu(nn.SubmConv3d(in_channels, out_channels, 3, bias=False))


def strided(
    in_channels: int,
    out_channels: int,
    kernel_size: IntOrTuple = 3,
    stride: IntOrTuple = 2,
    padding: IntOrTuple = 1,
) -> nn.Sequential:
    """Return a strided convolution, its norm, a ReLU."""
    sizes = in_channels, out_channels, kernel_size, stride, padding
    return conv_norm_relu(nn.Conv3d(*sizes, bias=False, support="reach"))


def expect_grid(x: SparseTensor, name: str) -> None:
    """Raise unless a tensor has a ``spatial_shape``, on which padding depends."""
    expect_tensor(x)
    if x.dims != 3 or x.spatial_shape is None:
        raise ValueError(
            f"{name} takes a tensor of (z, y, x) with a spatial_shape, such as a "
            "GridRecipe makes; got one of "
            f"{x.dims} axes with spatial_shape {x.spatial_shape}"
        )


class VoxelBackBone8x(Pretrained):
    """Encode a grid with SECOND's four stages, three of which stride, then flatten it.

    Args:
        in_channels (int): The number of input channels.
        widths (tuple): The channels of the first two convolutions, of ``conv2``,
            ``conv3``, ``conv4``, and of ``conv_out``.
        last_pad (int): The padding of ``conv_out``, on all axes. Default: ``0``.

    Examples:
        >>> x = ml.SparseTensor.from_dense(mx.ones((1, 41, 8, 8, 4)))  # z, y, x
        >>> y = models.VoxelBackBone8x(4, (4, 4, 8, 8, 16))(x)
        >>> y.channels, y.spatial_shape
        (16, (2, 1, 1))
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
        self.conv_input: nn.Sequential = subm(in_channels, first)
        self.conv1: nn.Sequential = self._stage(None, first)
        self.conv2: nn.Sequential = self._stage(strided(first, second), second)
        self.conv3: nn.Sequential = self._stage(strided(second, third), third)
        down = strided(third, fourth, padding=(0, 1, 1))
        self.conv4: nn.Sequential = self._stage(down, fourth)
        self.conv_out: nn.Sequential = strided(
            fourth, last, (3, 1, 1), (2, 1, 1), last_pad
        )

    def _stage(self, down: nn.Sequential | None, channels: int) -> nn.Sequential:
        if down is None:
            return nn.Sequential(subm(channels, channels))
        return nn.Sequential(down, subm(channels, channels), subm(channels, channels))

    def stages(self, x: SparseTensor) -> dict[str, SparseTensor]:
        """Return the outputs of the stages: ``x_conv1`` to ``x_conv4``, and ``out``."""
        expect_grid(x, type(self).__name__)
        x, outputs = self.conv_input(x), {}
        for i in range(1, 5):
            x = outputs[f"x_conv{i}"] = self[f"conv{i}"](x)
        return outputs | ({"out": self.conv_out(x)} if "conv_out" in self else {})

    def __call__(self, x: SparseTensor) -> SparseTensor:
        """Return the encoded tensor, at an eighth of y and x, a sixteenth of z."""
        prepare_scan(self, x)
        return self.stages(x)["out"]


class VoxelResBackBone8x(VoxelBackBone8x):
    """Encode a grid with CenterPoint's four stages of residual blocks.

    Args:
        in_channels (int): The number of input channels.
        widths (tuple): As for ``VoxelBackBone8x``.
        last_pad (int): As for ``VoxelBackBone8x``. Default: ``0``.
        use_bias (bool): If ``True`` the blocks' convolutions have a bias.

    Examples:
        >>> x = ml.SparseTensor.from_dense(mx.ones((1, 41, 8, 8, 4)))  # z, y, x
        >>> y = models.VoxelResBackBone8x(4, (4, 4, 8, 8, 16))(x)
        >>> y.channels, y.spatial_shape
        (16, (2, 1, 1))
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
        return nn.Sequential(*first, *_residual(channels, self.use_bias))


def _residual(channels: int, bias: bool) -> list[SparseBasicBlock]:
    return [SparseBasicBlock(channels, channels, bias) for _ in range(2)]


def expect_widths(widths: Sequence[int]) -> Sequence[int]:
    """Return the five widths; raise if there are more or fewer."""
    if len(widths) != 5:
        raise ValueError(
            "widths are those of conv_input, conv2, conv3, conv4 and conv_out; got "
            f"{tuple(widths)}"
        )
    return widths


class UNetV2(VoxelBackBone8x):
    """Encode a grid with SECOND's encoder and decode it back to the rows of the input.

    Args:
        in_channels (int): The number of input channels.
        widths (tuple): As for ``VoxelBackBone8x``; the decoder has the same widths.
        last_pad (int): As for ``VoxelBackBone8x``. Default: ``0``.
        return_encoded (bool): If ``False`` the net has no ``conv_out`` and returns None
            for the encoded tensor. Default: ``True``.

    Examples:
        >>> x = ml.SparseTensor.from_dense(mx.ones((1, 41, 8, 8, 4)))  # z, y, x
        >>> encoded, y = models.UNetV2(4, (4, 4, 8, 8, 16))(x)
        >>> encoded.spatial_shape, len(y) == len(x)
        ((2, 1, 1), True)
    """

    def __init__(
        self,
        in_channels: int,
        widths: Sequence[int] = WIDTHS,
        last_pad: int = 0,
        return_encoded: bool = True,
    ):
        super().__init__(in_channels, widths, last_pad)
        if not return_encoded:
            del self.conv_out
        channels = list(widths[:4])
        for level in (4, 3, 2, 1):
            c = channels[level - 1]
            below = channels[level - 2] if level > 1 else c
            self[f"conv_up_t{level}"] = SparseBasicBlock(c, c)
            self[f"conv_up_m{level}"] = subm(2 * c, c)
            if level > 1:
                padding = (0, 1, 1) if level == 4 else 1
                conv = nn.ConvTranspose3d(c, below, 3, 2, padding, bias=False)
                self[f"inv_conv{level}"] = conv_norm_relu(conv)
        self.conv5: nn.Sequential = nn.Sequential(subm(channels[0], channels[0]))

    def stages(self, x: SparseTensor) -> dict[str, SparseTensor]:
        """Return the outputs of the encoder's stages, and ``up4`` to ``up1``."""
        outputs = super().stages(x)
        y = outputs["x_conv4"]
        for level in (4, 3, 2, 1):
            y = outputs[f"up{level}"] = self._up(level, y, outputs)
        return outputs

    def _up(self, level: int, bottom: SparseTensor, outputs: dict) -> SparseTensor:
        """Return the features of the next finer level, or at level 1 of the rows."""
        across = self[f"conv_up_t{level}"](outputs[f"x_conv{level}"])
        both = ops.cat([bottom, across])
        y = self[f"conv_up_m{level}"](both)
        # Neighbouring channels are added up in pairs, one for each channel of y.
        pairs = both.feats.reshape(len(both), y.channels, 2)
        y = y.replace(y.feats + by_halves(pairs))
        if level == 1:
            return self.conv5(y)
        return conv_onto(self[f"inv_conv{level}"], y, outputs[f"x_conv{level - 1}"])

    def __call__(self, x: SparseTensor) -> tuple[SparseTensor | None, SparseTensor]:
        """Return the encoded tensor, or None, and features on the rows of ``x``."""
        prepare_scan(self, x)
        outputs = self.stages(x)
        return outputs.get("out"), outputs["up1"]


class _Flat(NamedTuple):
    """Cells of the finest of some levels, over (y, x), that have rows above them."""

    key: CoordinateKey  # of the cells, in the levels' manager
    # (M, heights) int32: the row at each height of each level, counted over all, or -1.
    rows: mx.array
    cell: mx.array  # (N, 1) int32: the cell of each row


_known = OfPairs()  # of the finest and the coarsest level, by all of them


def _flat(levels: Sequence[SparseTensor]) -> _Flat:
    """Return the cells of levels, each twice as wide as the one before; made once."""
    manager, sets = levels[0].manager, [x.coordinate_set for x in levels]
    known, name = _known.of(sets[0], sets[-1]), tuple(x.key.serial for x in levels)
    if name not in known:
        flat = _flattened(manager, sets)
        sync.complete((manager[flat.key].coords, flat))
        known[name] = flat
    return known[name]


def _flattened(manager: CoordinateManager, sets: Sequence[CoordinateSet]) -> _Flat:
    """Make the cells of levels; reads their number."""
    finest, columns = sets[0], mx.array([0, 2, 3])
    coords, place, heights, high = [], [], 0, (0, 0)
    for i, each in enumerate(sets):
        height, *extents = each.spatial_shape
        coords.append(each.coords[:, columns] << mx.array([0, i, i]))
        place.append(each.coords[:, 1] + heights)
        heights += height
        high = [max(h, (n - 1) << i) for h, n in zip(high, extents, strict=True)]
    coords, shape = mx.concatenate(coords), finest.spatial_shape[1:]
    box = (0, 0, 0), (finest.batch_size - 1, *high)
    cells = registry.geometry().rule_rows(Rule.CELL, coords, [(0, 0)], (1, 1), box)
    # Those of even kernels may lie beyond the grid: then they are read and checked.
    is_inside = all(h < n for h, n in zip(high, shape, strict=True))
    inserted = manager.inserted(
        cells,
        finest.stride[1:],
        spatial_shape=shape,
        batch_size=finest.batch_size,
        trusted=True,
        box=box if is_inside else None,
    )
    cell = inserted.index.find(coords, box)
    rows = mx.full((len(cells), heights), -1, dtype=mx.int32)
    if len(coords):
        rows[cell, mx.concatenate(place)] = mx.arange(len(coords), dtype=mx.int32)
    return _Flat(inserted.key, rows, cell[:, None])


class VoxelResBackBone8xVoxelNeXt(Pretrained):
    """Encode a grid at 1/32 with residual stages, and add up its heights.

    Args:
        in_channels (int): The number of input channels.
        channels (tuple): Channels of ``conv1`` to ``conv4``, and of ``conv5`` and
            ``conv6``, which must be those of ``conv4``.
        out_channels (int): The number of output channels. Default: ``128``.
        kernel_sizes (tuple): The kernel sizes of the strided convolutions of ``conv2``,
            ``conv3``, ``conv4``, and of ``conv5`` and ``conv6``.
        use_bias (bool): If ``True`` the blocks' convolutions have a bias.

    Examples:
        >>> x = ml.SparseTensor.from_dense(mx.ones((1, 41, 8, 8, 4)))  # z, y, x
        >>> y = models.VoxelResBackBone8xVoxelNeXt(4, (4, 4, 8, 8, 8), 16)(x)
        >>> y.channels, y.dims  # rows from above
        (16, 2)
    """

    def __init__(
        self,
        in_channels: int,
        channels: Sequence[int] = CHANNELS,
        out_channels: int = 128,
        kernel_sizes: Sequence[int] = (3, 3, 3, 3),
        use_bias: bool = True,
    ):
        super().__init__()
        if len(kernel_sizes) != 4 or expect_widths(channels)[3] != channels[4]:
            raise ValueError(
                "there are kernel_sizes of 4 levels, and rows of conv4, conv5 and "
                "conv6 are added up, so their channels are equal; got kernel_sizes "
                f"{tuple(kernel_sizes)}, channels {tuple(channels)}"
            )
        self.out_channels = out_channels
        self.conv_input: nn.Sequential = subm(in_channels, channels[0])
        wide = [channels[0], *channels, channels[4]]  # of conv_input, conv1 to conv6
        sizes = [*kernel_sizes, kernel_sizes[3]]
        for i in range(1, 7):
            blocks = _residual(wide[i], use_bias)
            if i > 1:
                size = sizes[i - 2]
                down = strided(wide[i - 1], wide[i], size, padding=size // 2)
                blocks.insert(0, down)
            self[f"conv{i}"] = nn.Sequential(*blocks)
        conv = nn.Conv2d(
            channels[3], out_channels, 3, padding=1, bias=False, support="reach"
        )
        self.conv_out: nn.Sequential = conv_norm_relu(conv)
        self.shared_conv: nn.Sequential = nn.Sequential(
            nn.SubmConv2d(out_channels, out_channels, 3),
            nn.BatchNorm(out_channels),
            nn.ReLU(),
        )

    def stages(self, x: SparseTensor) -> dict[str, SparseTensor]:
        """Return the outputs of the stages.

        ``x_conv1`` to ``x_conv6``, then over (y, x) ``bev_sum``, ``conv_out`` and
        ``out``.
        """
        expect_grid(x, type(self).__name__)
        x, outputs = self.conv_input(x), {}
        for i in range(1, 7):
            x = outputs[f"x_conv{i}"] = self[f"conv{i}"](x)
        outputs["bev_sum"] = self._summed(*(outputs[f"x_conv{i}"] for i in (4, 5, 6)))
        outputs["conv_out"] = self.conv_out(outputs["bev_sum"])
        return outputs | {"out": self.shared_conv(outputs["conv_out"])}

    def _summed(self, *levels: SparseTensor) -> SparseTensor:
        """Return the sum of rows of one (batch, y, x), in cells of the finest."""
        flat = _flat(levels)
        feats = mx.concatenate([x.feats for x in levels])
        feats = sum_over(feats, flat.rows, lambda: flat.cell)
        return SparseTensor.of(levels[0].manager, flat.key, feats)

    def __call__(self, x: SparseTensor) -> SparseTensor:
        """Return rows at (batch, y, x), at an eighth of the grid."""
        prepare_scan(self, x)
        return self.stages(x)["out"]
