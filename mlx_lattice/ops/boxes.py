"""Boxes from above: their corners, rotated IoU, greedy suppression; on the device.

A box is (x, y, z, dx, dy, dz, heading, ...): its centre, its extents along its own
axes, and the angle from x towards y by which it is turned about z, as in OpenPCDet.
From above only x, y, dx, dy and the heading count.
"""

from __future__ import annotations

import mlx.core as mx

from .. import sync
from ..checks import array_of, arrays_of, real, whole
from ..geometry.lattice import true_positions

__all__ = [
    "box_corners",
    "nms_rotated",
    "rotated_iou",
    "rotated_overlap",
    "sort_scores",
]

# Pairs whose overlap is computed at once: about 100 MB of scratch.
_PAIRS = 2**18
# Rounds of suppression between two reads.
_ROUNDS = 8


def box_corners(boxes: mx.array) -> mx.array:
    """Return the (N, 4, 2) corners of boxes from above, counterclockwise.

    Args:
        boxes: (N, 7 or more) float.

    Examples:
        >>> box = mx.array([[0.0, 0.0, 0.0, 4.0, 2.0, 1.5, 0.0]])  # centre, size, angle
        >>> ops.box_corners(box)[0].tolist()
        [[-2.0, -1.0], [2.0, -1.0], [2.0, 1.0], [-2.0, 1.0]]
    """
    boxes = _checked(boxes)
    half = 0.5 * boxes[:, None, 3:5]
    local = mx.array([[-1.0, -1.0], [1.0, -1.0], [1.0, 1.0], [-1.0, 1.0]]) * half
    return _turned(local, boxes[:, 6:7]) + boxes[:, None, :2]


def rotated_overlap(a: mx.array, b: mx.array) -> mx.array:
    """Return the (N, M) areas shared by pairs of boxes from above, in float32.

    Each box of ``a`` is moved into the frame of a box of ``b``, whose sides are then
    ``|x| <= dx / 2`` and ``|y| <= dy / 2``. The area is the integral over x of the
    clipped heights of the upper edges minus that of the lower edges. Its four terms are
    continuous, so coinciding edges and boxes without area are not special cases.

    Args:
        a: (N, 7 or more) float; extents are 0 or more.
        b: (M, 7 or more) float.

    Examples:
        >>> box = mx.array([[0.0, 0.0, 0.0, 4.0, 2.0, 1.5, 0.0]])
        >>> ops.rotated_overlap(box, box + mx.array([2.0, 0, 0, 0, 0, 0, 0])).item()
        4.0
    """
    a, b = _checked(a), _checked(b)
    if not (len(a) and len(b)):
        return mx.zeros((len(a), len(b)))
    at_once = max(1, _PAIRS // len(b))
    parts = [_overlap(a[i : i + at_once], b) for i in range(0, len(a), at_once)]
    return mx.concatenate(parts)


def rotated_iou(a: mx.array, b: mx.array) -> mx.array:
    """Return the (N, M) intersection over union of boxes from above, in float32.

    If both boxes have no area it is 0.

    Args:
        a: (N, 7 or more) float; extents are 0 or more.
        b: (M, 7 or more) float.

    Examples:
        >>> box = mx.array([[0.0, 0.0, 0.0, 4.0, 2.0, 1.5, 0.0]])
        >>> iou = ops.rotated_iou(box, box + mx.array([2.0, 0, 0, 0, 0, 0, 0]))
        >>> round(iou.item(), 3)
        0.333
    """
    common = rotated_overlap(a, b)
    areas = [mx.abs(x[:, 3] * x[:, 4]) for x in (_checked(a), _checked(b))]
    return common / mx.maximum(areas[0][:, None] + areas[1] - common, 1e-8)


def sort_scores(scores: mx.array) -> mx.array:
    """Return int64 indices of the last axis from the greatest score to the least.

    Equal scores keep their order on every backend. NaN counts as the least score.

    Args:
        scores: (..., N) float.

    Examples:
        >>> ops.sort_scores(mx.array([0.5, 0.9, 0.7])).tolist()
        [1, 2, 0]
    """
    scores = array_of(scores, "scores")
    if not scores.size:
        return mx.zeros(scores.shape, dtype=mx.int64)
    values = mx.stop_gradient(scores).astype(mx.float32) + 0.0
    bits = mx.view(mx.where(mx.isnan(values), -mx.inf, values), mx.int32)
    # The bits of floats order as they do where the sign is clear, backwards else.
    rank = mx.where(bits < 0, bits ^ 0x7FFFFFFF, bits).astype(mx.int64)
    count = scores.shape[-1]
    keys = (0x7FFFFFFF - rank) * count + mx.arange(count, dtype=mx.int64)
    return mx.sort(keys, axis=-1) % count


def nms_rotated(
    boxes: mx.array,
    scores: mx.array,
    threshold: float | mx.array,
    *,
    labels: mx.array | None = None,
    pre: int | None = None,
    post: int | None = None,
) -> mx.array:
    """Return the indices of the boxes that greedy suppression keeps, best first.

    A box is dropped if a better box that is kept has a rotated IoU above the threshold
    with it. Equal scores favour the earlier box. All pairs are compared at once. Rounds
    over all boxes then drop what a kept box suppresses until nothing changes.

    Args:
        boxes: (N, 7 or more) float.
        scores: (N,) float; a NaN is the least.
        threshold: IoU from above; one value for all boxes, or (N,) with the value of
            the worse box of a pair.
        labels: (N,) integers: boxes only suppress boxes of the same label.
        pre: the number of best boxes that are compared; by default all.
        post: the largest number of boxes that are kept; by default all.

    Returns:
        (M,) int64.

    Examples:
        >>> box = mx.array([[0.0, 0.0, 0.0, 4.0, 2.0, 1.5, 0.0]])
        >>> boxes = mx.concatenate([box, box, box + 9.0])
        >>> ops.nms_rotated(boxes, mx.array([0.5, 0.9, 0.7]), 0.5).tolist()
        [1, 2]
    """
    boxes, scores = _checked(boxes), array_of(scores, "scores")
    if tuple(scores.shape) != (len(boxes),):
        raise ValueError(
            f"scores must be ({len(boxes)},), one a box; got {tuple(scores.shape)}"
        )
    (labels,) = arrays_of(labels=labels)
    if labels is not None and tuple(labels.shape) != (len(boxes),):
        raise ValueError(
            f"labels must be ({len(boxes)},), one a box; got {tuple(labels.shape)}"
        )
    pre = None if pre is None else whole(pre, "pre")
    post = None if post is None else whole(post, "post")
    limit = _limit(threshold, len(boxes))
    order = sort_scores(scores)[:pre]
    n = len(order)
    if n == 0:
        return order
    boxes = boxes[order]
    limit = limit[order] if isinstance(limit, mx.array) else limit
    # Row i suppresses column j: a worse box, so above the diagonal.
    place = mx.arange(n)
    over = (rotated_iou(boxes, boxes) > limit) & (place[:, None] < place)
    if labels is not None:
        sorted_labels = labels[order]
        over = over & (sorted_labels[:, None] == sorted_labels)
    keep = mx.ones((n,), dtype=mx.bool_)
    for _ in range(0, n, _ROUNDS):
        for _ in range(_ROUNDS):
            last, keep = keep, ~mx.any(over & keep[:, None], axis=0)
        if sync.read(mx.all(last == keep).astype(mx.int32))[0]:
            break
    return order[true_positions(keep)[:post]]


def _limit(threshold: float | mx.array, count: int) -> float | mx.array:
    if isinstance(threshold, int | float) or not getattr(threshold, "ndim", 1):
        return real(threshold, "threshold")
    threshold = array_of(threshold, "threshold")
    if tuple(threshold.shape) != (count,):
        raise ValueError(
            f"threshold must be a number, or ({count},), one a box; got "
            f"{tuple(threshold.shape)}"
        )
    return threshold


def _checked(boxes: mx.array) -> mx.array:
    boxes = array_of(boxes, "boxes")
    if boxes.ndim != 2 or boxes.shape[1] < 7:
        raise ValueError(
            "boxes must have shape (N, 7 or more): x, y, z, dx, dy, dz, heading; got "
            f"{tuple(boxes.shape)}"
        )
    return boxes.astype(mx.float32)


def _turned(points: mx.array, angle: mx.array) -> mx.array:
    """Turn (..., 2) points by angles, from x towards y."""
    c, s = mx.cos(angle), mx.sin(angle)
    x, y = points[..., 0], points[..., 1]
    return mx.stack([c * x - s * y, s * x + c * y], axis=-1)


def _overlap(a: mx.array, b: mx.array) -> mx.array:
    """Return the (N, M) common areas of boxes that fit into memory together."""
    apart = a[:, None, :2] - b[None, :, :2]
    middle = _turned(apart, -b[None, :, 6])
    angle = a[:, None, 6] - b[None, :, 6]
    half = 0.5 * a[:, None, 3:5]
    corners = []
    for sx, sy in ((-1, -1), (1, -1), (1, 1), (-1, 1)):
        local = half * mx.array([sx, sy], dtype=mx.float32)
        corners.append(_turned(local, angle) + middle)
    # (4, N, M): an edge goes from its corner to the next, counterclockwise.
    x0 = mx.stack([c[..., 0] for c in corners])
    y0 = mx.stack([c[..., 1] for c in corners])
    x1 = mx.concatenate([x0[1:], x0[:1]])
    y1 = mx.concatenate([y0[1:], y0[:1]])
    wide, high = 0.5 * mx.abs(b[:, 3]), 0.5 * mx.abs(b[:, 4])
    u0, u1 = mx.clip(x0, -wide, wide), mx.clip(x1, -wide, wide)
    step = mx.where(x1 == x0, 1.0, x1 - x0)
    v0 = y0 + (y1 - y0) * mx.clip((u0 - x0) / step, 0, 1)
    v1 = y0 + (y1 - y0) * mx.clip((u1 - x0) / step, 0, 1)
    # The mean of a line from v0 to v1 that is clipped to [-high, high].
    low, top = mx.minimum(v0, v1), mx.maximum(v0, v1)
    rise = mx.maximum(top - low, 1e-30)
    below = mx.clip((-high - low) / rise, 0, 1)
    above = mx.clip((top - high) / rise, 0, 1)
    between = 0.5 * (mx.clip(low, -high, high) + mx.clip(top, -high, high))
    mean = high * (above - below) + (1 - above - below) * between
    return mx.maximum(((u0 - u1) * mean).sum(axis=0), 0)
