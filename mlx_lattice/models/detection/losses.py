"""What a detector is trained by: a focal loss of heat maps, an L1 loss of boxes.

Heat maps and their loss are those of Law and Deng, "CornerNet", 2018, and Zhou, Wang
and Kraehenbuehl, "Objects as Points", 2019, over the cells that the head has, dense or
sparse. OpenPCDet's losses of the branch "iou" are not here.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import mlx.core as mx

from ...arrays import array_of
from .detector import Detector

# Cells of a radius, at least, and the least IoU of a box moved by it with itself.
MIN_RADIUS, MIN_OVERLAP = 2, 0.1


class Targets(NamedTuple):
    """The targets of a head in one batch element."""

    heat: mx.array  # (N, classes): 1 where a box is, less around it
    rows: mx.array  # (M,) int32: the cell of each box
    values: dict[str, mx.array]  # (M, channels) of each branch


def detection_loss(
    net: Detector,
    predictions: list[dict],
    boxes: Sequence[mx.array],
    labels: Sequence[mx.array],
    *,
    box_weight: float = 2.0,
) -> mx.array:
    """Return the loss of a batch: heat maps, and boxes times their weight.

    Args:
        net: whose classes and grid the predictions are of.
        predictions: what a call of the net returned.
        boxes: of each batch element (M, 7), with velocities (M, 9); none is legal. In
            an element without cells no cell can say them, and they do not count.
        labels: of each batch element (M,) integers: which of the net's classes.
        box_weight: of the boxes' loss.

    Raises:
        ValueError: there are not as many labels as boxes, a label is none of the net's
            classes, or a box is not finite or has no extent.
    """
    elements = net.cells(predictions)
    if not len(elements) == len(boxes) == len(labels):
        raise ValueError(
            f"boxes and labels must be of {len(elements)} batch elements; got "
            f"{len(boxes)} and {len(labels)}"
        )
    given = [_checked(net, *pair) for pair in zip(boxes, labels, strict=True)]
    total = mx.zeros(())
    for at, head in enumerate(net.heads):
        places = [net.classes.index(name) for name in head]
        heat, apart, count = mx.zeros(()), mx.zeros(()), 0
        for (heads, cells), (own, label) in zip(elements, given, strict=True):
            if not len(cells):
                continue
            place = [p for p, each in enumerate(label) if each in places]
            local = [places.index(label[p]) for p in place]
            own = own[mx.array(place, dtype=mx.int32)]
            said = heads[at]
            wanted = targets(net, cells, own, local, len(head), "vel" in said)
            heat = heat + focal_loss(said["hm"], wanted.heat)
            apart = apart + sum(
                mx.abs(said[name][wanted.rows] - value).sum()
                for name, value in wanted.values.items()
            )
            count += len(place)
        total = total + (heat + box_weight * apart) / max(1, count)
    return total


def _checked(
    net: Detector, boxes: mx.array, labels: mx.array
) -> tuple[mx.array, list[int]]:
    """Return the boxes of an element, and their labels; raise for what are none."""
    boxes, labels = array_of(boxes, "boxes"), array_of(labels, "labels")
    if boxes.ndim != 2 or boxes.shape[1] not in (7, 9):
        raise ValueError(f"boxes must be (M, 7) or (M, 9); got {tuple(boxes.shape)}")
    whole = mx.issubdtype(labels.dtype, mx.integer) or not labels.size
    if labels.shape != boxes.shape[:1] or not whole:
        raise ValueError(
            f"labels must be ({len(boxes)},) integers, one a box; got "
            f"{tuple(labels.shape)} of {labels.dtype}"
        )
    held, classes = labels.tolist(), len(net.classes)
    if other := [label for label in held if not 0 <= label < classes]:
        raise ValueError(
            f"labels count the net's {classes} classes from 0; got {other[0]}"
        )
    right = mx.isfinite(boxes).all() & (boxes[:, 3:6] > 0).all()
    if not right.item():
        raise ValueError("boxes must be finite, and their extents above 0")
    return boxes.astype(mx.float32), held  # in half a metre has few steps


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
    """Return a head's targets: each box at the cell nearest to its centre.

    ``cells`` are (N, 2) y and x, ``boxes`` (M, 7) or (M, 9), and ``labels`` count the
    head's classes.
    """
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
            own = mx.array([each == c for each in labels])
            columns.append(mx.where(own, peaks, 0).max(axis=1))
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
