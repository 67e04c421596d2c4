"""From a head's branches to boxes: the best cells, boxes of them, suppression.

As OpenPCDet's ``centernet_utils.py`` and ``voxelnext_head.py`` do it. All cells of an
element are given as rows, whether they are those of a dense map or of a sparse tensor.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import NamedTuple

import mlx.core as mx

from ... import ops
from ...geometry.lattice import true_positions
from .voxels import GridRecipe

PerClass = float | tuple[float, ...]


class Boxes(NamedTuple):
    """Boxes of one scan: head after head, the best first.

    Attributes:
        boxes: (M, 7) float32 x, y, z of the centre, dx, dy, dz, heading; with two more
            where the net knows velocities.
        scores: (M,) float32.
        labels: (M,) int32: which of the net's classes, from 0.
    """

    boxes: mx.array
    scores: mx.array
    labels: mx.array


@dataclass(frozen=True)
class Decoding:
    """Settings that decide which cells become boxes.

    Attributes:
        stride: cells of the grid that a cell of the map spans.
        max_boxes: cells of each class, and then of each head, that are looked at.
        score_threshold: least score, which is not enough.
        limit_range: low x, y, z and high x, y, z of centres that are kept.
        nms_threshold: IoU from above beyond which the worse box is dropped, one for
            all, or one a class of the net.
        nms_pre, nms_post: boxes before and after suppression, likewise.
        by_class: whether boxes of different classes leave each other alone; else
            those of one head do not. Thresholds of each class need it.
        rectifier: of each class of the net, how much of a score the predicted IoU is:
            ``score ** (1 - r) * iou ** r``. Needs the branch "iou".
        nms_score: least score after that, which is not enough; None for any.

    Raises:
        ValueError: values of each class are given without ``by_class``.
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

    def __post_init__(self):
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
    def of(cls, given: Decoding | Mapping | None) -> Decoding:
        """Return a Decoding of a Decoding, of its arguments, or of None."""
        if isinstance(given, cls):
            return given
        return cls(**(given or {}))

    def expect_classes(self, count: int) -> None:
        """Raise unless values of each class are as many as there are classes."""
        for name, value in asdict(self).items():
            listed = name != "limit_range" and isinstance(value, tuple)
            if listed and len(value) != count:
                raise ValueError(
                    f"{name} has {len(value)} values, and there are {count} classes"
                )


class Candidates(NamedTuple):
    """The boxes of a head in one batch element, before suppression."""

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
    """Return the boxes of an element's best cells, by score, class and cell.

    ``head`` has (N, channels) of each branch, with "hm" before the sigmoid; ``cells``
    are (N, 2) y and x.
    """
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


def selected(found: Candidates, decoding: Decoding, classes: int) -> Boxes:
    """Return the boxes that suppression keeps; labels are of the net's classes."""
    boxes, scores, labels, ious = found
    if decoding.rectifier is not None:
        power = mx.array(decoding.rectifier, dtype=mx.float32)[labels]
        scores = scores ** (1 - power) * ious**power
    groups = range(classes) if decoding.by_class else (None,)
    kept = []
    for group in groups:
        mask = mx.ones(scores.shape, mx.bool_) if group is None else labels == group
        least = of_class(decoding.nms_score, group)
        mask = mask if least is None else mask & (scores > least)
        own = true_positions(mask)
        if len(own):
            best = ops.nms_rotated(
                boxes[own],
                scores[own],
                of_class(decoding.nms_threshold, group),
                pre=of_class(decoding.nms_pre, group),
                post=of_class(decoding.nms_post, group),
            )
            kept.append(own[best])
    if not kept:
        return Boxes(boxes[:0], scores[:0], labels[:0])
    rows = mx.concatenate(kept)
    return Boxes(boxes[rows], scores[rows], labels[rows])


def of_class(value, group: int | None):
    """Return the value of a class, where each has its own."""
    return value[group] if isinstance(value, tuple) else value


def joined(parts: Sequence[tuple]) -> tuple:
    """Return the rows of several heads' boxes, one after another."""
    kind = type(parts[0])
    columns = zip(*parts, strict=True)
    return kind(*(None if c[0] is None else mx.concatenate(c) for c in columns))
