"""Operations on coordinate sets: align, join, look up, cut down, batch."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from functools import reduce, singledispatch
from itertools import accumulate, pairwise
from typing import NamedTuple, TypeVar

import mlx.core as mx

from .. import registry, sync
from ..channel_kernels import beside
from ..checks import INT32_LIMIT, array_of, real, whole
from ..coordinate_set import CoordinateSet, check_coords, expect_one_lattice, settle
from ..coordinates import CoordinateManager, Part, alone, common, part_of, united
from ..geometry.lattice import best_rows, join
from ..geometry.points import integers_of, reduce_segments
from ..int8 import IntegerTensor, cat_integers
from ..kernel_spec import IntOrTuple, per_axis
from ..reductions import inverted, move_rows
from ..tensor import (
    SparseTensor,
    VoxelizedPoints,
    align,
    expect_tensor,
    tensors_of,
)
from .pool import batch_rows

__all__ = [
    "align", "batch", "cat", "collate", "crop", "difference", "intersection", "lookup",
    "prune", "prune_by_logits", "top_k", "unbatch", "union", "unique_sum",
]  # fmt: skip


def cat(tensors: Sequence[SparseTensor]) -> SparseTensor:
    """Concatenate the channels of tensors on the rows of the first (skip connections).

    Integer tensors are joined in the greatest of their scales.

    Raises:
        ValueError: the tensors do not have the same coordinates.
        TypeError: their dtypes differ.

    Examples:
        >>> x = ml.SparseTensor.from_dense(mx.ones((1, 4, 4, 4, 8)))
        >>> y = nn.SubmConv3d(8, 16, 3)(x)
        >>> ops.cat([x, y]).shape
        (64, 24)
    """
    tensors = tensors_of(tensors, "cat")
    first = tensors[0]
    for other in tensors[1:]:
        if other.dtype != first.dtype:
            raise TypeError(f"cat needs one dtype; got {first.dtype} and {other.dtype}")
    return joined(first, [align(x, first) for x in tensors])


@singledispatch
def joined(first: SparseTensor, tensors: list[SparseTensor]) -> SparseTensor:
    """Return aligned tensors of one dtype joined, by the class of the first."""
    return first.replace(beside([x.feats for x in tensors]))


@joined.register
def _(first: IntegerTensor, tensors: list[IntegerTensor]) -> IntegerTensor:
    return cat_integers(tensors)


def union(
    x: SparseTensor,
    y: SparseTensor,
    *others: SparseTensor | Callable[[mx.array, mx.array], mx.array],
    combine: Callable[[mx.array, mx.array], mx.array] = mx.add,
) -> SparseTensor:
    """Join two or more tensors on the rows of any of them; rows are sorted.

    Args:
        x, y, others: tensors of one lattice and equal channels.
        combine: combines the (N, C) features of two tensors, from left to right. Rows
            that a tensor does not have count as zeros. It may be the last positional
            argument.

    Examples:
        >>> x = ml.SparseTensor(mx.array([[0, 0], [0, 1]]), mx.array([[1.0], [2.0]]))
        >>> y = ml.SparseTensor(mx.array([[0, 1], [0, 2]]), mx.array([[3.0], [4.0]]))
        >>> ops.union(x, y).feats[:, 0].tolist()  # cells 0, 1 and 2
        [1.0, 5.0, 4.0]
    """
    if others and not isinstance(others[-1], SparseTensor) and callable(others[-1]):
        *others, combine = others
    for other in others:
        x, y = union(x, y, combine=combine), other
    _expect_one_lattice(x, y)
    if combine is mx.add and 1 not in (x.channels, y.channels):
        _expect_one_width([x, y], "union")
    sets = x.coordinate_set, y.coordinate_set
    joint = united(x.manager, *sets, x.manager is y.manager)
    wide = [
        t.feats if move is None else move_rows(t.feats, *move)
        for t, move in zip((x, y), joint.moves, strict=True)
    ]
    key = joint.key or (x, y)[joint.which].key
    return SparseTensor.of(x.manager, key, combine(*wide))


def _expect_one_lattice(x: SparseTensor, y: SparseTensor) -> None:
    expect_tensor(x, flags=True)
    expect_tensor(y, "y", flags=True)
    expect_one_lattice(x.coordinate_set, y.coordinate_set)


def lookup(x: SparseTensor, coords: mx.array) -> mx.array:
    """Return the (Q,) int32 row of each (Q, 1 + D) coordinate in ``x``, or -1.

    Examples:
        >>> x = ml.SparseTensor(mx.array([[0, 4], [0, 6]]), mx.ones((2, 8)))
        >>> ops.lookup(x, mx.array([[0, 6], [0, 5]])).tolist()
        [1, -1]
    """
    expect_tensor(x, flags=True)
    if isinstance(coords, SparseTensor):
        raise TypeError(
            "coords must be (Q, 1 + D) integer rows; got a SparseTensor: look up its "
            "coords, which are in cells of its own lattice"
        )
    coords = check_coords(coords)
    if coords.shape[1] != x.coords.shape[1]:
        raise ValueError(
            f"coords must have shape (Q, {x.coords.shape[1]}), as the tensor's; got "
            f"{tuple(coords.shape)}"
        )
    return x.coordinate_set.index.find(coords)


def unique_sum(
    x: SparseTensor | mx.array,
    feats: mx.array | None = None,
    *,
    stride: IntOrTuple = 1,
    spatial_shape: Sequence[int] | None = None,
    batch_size: int | None = None,
) -> SparseTensor:
    """Add up the features of repeated rows, and return sorted unique rows.

    Sums are in float32, in the order of the rows, and differentiable in the features.

    Args:
        x: a tensor whose rows may repeat, or (N, 1 + D) integer coordinates.
        feats: (N, C) features of the coordinates; leave it out with a tensor.
        stride, spatial_shape, batch_size: as for ``SparseTensor``; leave them out with
            a tensor.

    Returns:
        A tensor with a new coordinate manager.

    Raises:
        ValueError: a batch index is negative or not below ``batch_size``, or a row lies
            outside ``spatial_shape``.

    Examples:
        >>> coords = mx.array([[0, 5], [0, 5], [0, 2]])
        >>> x = ops.unique_sum(coords, mx.array([[1.0], [2.0], [4.0]]))
        >>> x.coords.tolist(), x.feats[:, 0].tolist()
        ([[0, 2], [0, 5]], [4.0, 3.0])
    """
    if isinstance(x, SparseTensor):
        expect_tensor(x)
        if feats is not None:
            raise TypeError("unique_sum takes a tensor, or coords and feats; got both")
        coordinate_set = x.coordinate_set
        coords, feats = coordinate_set.coords, x.feats
        stride, spatial_shape = coordinate_set.stride, coordinate_set.spatial_shape
        batch_size = coordinate_set.declared_batch_size
    elif feats is None:
        expect_tensor(x)
    else:
        coords, feats = check_coords(array_of(x, "coords")), array_of(feats, "feats")
    unique = registry.geometry().unique_rows(coords)
    # Checks the features against the coordinates before they are added up.
    checked = SparseTensor(coords, feats).feats
    count = unique.rows.shape[0]
    summed = (
        reduce_segments(checked, unique.inverse, count, "sum") if count else checked
    )
    manager = CoordinateManager()
    unique_set = manager.inserted(
        unique.rows,
        stride,
        spatial_shape=spatial_shape,
        batch_size=batch_size,
        trusted=True,
    )
    unique_set.is_sorted = True
    if not unique_set.settled:  # a row may lie where no tensor has any
        settle([unique_set])
    return SparseTensor.of(manager, unique_set.key, summed)


def intersection(
    x: SparseTensor,
    y: SparseTensor,
    combine: Callable[[mx.array, mx.array], mx.array] = mx.multiply,
) -> SparseTensor:
    """Join two tensors on the rows that both have, in the order of ``x``.

    Examples:
        >>> x = ml.SparseTensor(mx.array([[0, 0], [0, 1]]), mx.array([[1.0], [2.0]]))
        >>> y = ml.SparseTensor(mx.array([[0, 1], [0, 2]]), mx.array([[3.0], [4.0]]))
        >>> ops.intersection(x, y).feats[:, 0].tolist()  # cell 1
        [6.0]
    """
    _expect_one_lattice(x, y)
    if combine is mx.multiply and 1 not in (x.channels, y.channels):
        _expect_one_width([x, y], "intersection")
    rows, move = common(x.manager, x.coordinate_set, y.coordinate_set)
    part = _part(x, rows)
    return part.replace(combine(part.feats, move_rows(y.feats, *move, whole=True)))


def difference(x: SparseTensor, y: SparseTensor) -> SparseTensor:
    """Return the rows of ``x`` that are not in ``y``, in their order.

    Examples:
        >>> x = ml.SparseTensor(mx.array([[0, 0], [0, 1]]), mx.array([[1.0], [2.0]]))
        >>> y = ml.SparseTensor(mx.array([[0, 1], [0, 2]]), mx.array([[3.0], [4.0]]))
        >>> ops.difference(x, y).coords.tolist()
        [[0, 0]]
    """
    _expect_one_lattice(x, y)
    return _part(x, alone(x.manager, x.coordinate_set, y.coordinate_set))


def prune(x: SparseTensor, mask: mx.array) -> SparseTensor:
    """Keep the rows where ``mask``, (N,) bool, is true, in their order.

    Examples:
        >>> x = ml.SparseTensor(mx.array([[0, 0], [0, 1], [0, 2]]), mx.ones((3, 8)))
        >>> ops.prune(x, mx.array([True, False, True])).coords.tolist()
        [[0, 0], [0, 2]]
    """
    expect_tensor(x, flags=True)
    mask = _mask_of(x, mask, "mask")
    return _part(x, part_of(x.manager, x.coordinate_set, mask))


def _mask_of(x: SparseTensor, mask: mx.array, name: str) -> mx.array:
    mask = array_of(mask, name)
    if tuple(mask.shape) != (len(x),) or mask.dtype != mx.bool_:
        raise ValueError(
            f"{name} must be ({len(x)},) bool, one value a row; got "
            f"{tuple(mask.shape)} of {mask.dtype}"
        )
    return mask


def prune_by_logits(
    x: SparseTensor,
    logits: SparseTensor | mx.array,
    threshold: float = 0.0,
    keep: SparseTensor | mx.array | None = None,
) -> SparseTensor:
    """Keep the rows whose logit is above a threshold, in their order.

    Generative nets call this after each up-sampling. No gradient reaches the logits;
    train them with a loss of their own.

    Args:
        x: input.
        logits: one number for each row: (N,), (N, 1), or a tensor of one channel on the
            same rows in any order. NaN counts as below the threshold.
        threshold: the logit above which a row is kept; 0 is a probability of one half.
        keep: more rows to keep: (N,) bool, or a tensor with rows of ``x``, such as the
            true rows while training.

    Returns:
        The remaining rows, which may be none.

    Raises:
        ValueError: shapes do not fit.

    Examples:
        >>> x = ml.SparseTensor(mx.array([[0, 0], [0, 1]]), mx.array([[1.0], [2.0]]))
        >>> ops.prune_by_logits(x, mx.array([-3.0, 0.5])).coords.tolist()
        [[0, 1]]
    """
    expect_tensor(x)
    if isinstance(logits, SparseTensor):
        logits = align(logits, x).feats
    logits = array_of(logits, "logits")
    if logits.size != len(x) or logits.ndim > 2:
        raise ValueError(
            f"logits must be ({len(x)},) or ({len(x)}, 1), one a row; got "
            f"{tuple(logits.shape)}"
        )
    least = real(threshold, "threshold")
    chosen = mx.stop_gradient(logits).reshape(len(x)) > least
    if keep is None:
        return prune(x, chosen)
    if isinstance(keep, SparseTensor):
        return prune(x, chosen | (lookup(keep, x.coordinate_set.coords) >= 0))
    return prune(x, chosen | _mask_of(x, keep, "keep"))


def crop(
    x: SparseTensor, low: int | Sequence[int], high: int | Sequence[int]
) -> SparseTensor:
    """Keep the rows with ``low <= coordinate < high`` on every spatial axis.

    Examples:
        >>> x = ml.SparseTensor.from_dense(mx.ones((1, 4, 4, 4, 8)))
        >>> ops.crop(x, low=1, high=3).shape  # 2 x 2 x 2 cells
        (8, 8)
    """
    expect_tensor(x, flags=True)
    box = [
        mx.array(per_axis(corner, x.dims, name, least=-INT32_LIMIT))
        for corner, name in ((low, "low"), (high, "high"))
    ]
    cells = x.coordinate_set.coords[:, 1:]
    return prune(x, mx.all((cells >= box[0]) & (cells < box[1]), axis=1))


def top_k(x: SparseTensor, scores: mx.array, k: int) -> SparseTensor:
    """Keep the k rows of greatest score of each batch element, in row order.

    Equal scores favour the earlier row, and NaN counts as the least score. Elements
    with fewer than k rows keep them all. The scores are not evaluated.

    Args:
        x: input.
        scores: (N,) floating.
        k: rows to keep of each batch element.

    Examples:
        >>> x = ml.SparseTensor(mx.array([[0, 0], [0, 1], [0, 2]]), mx.ones((3, 8)))
        >>> ops.top_k(x, mx.array([0.9, 0.1, 0.5]), k=2).coords.tolist()
        [[0, 0], [0, 2]]
    """
    expect_tensor(x, flags=True)
    scores, k = array_of(scores, "scores"), whole(k, "k")
    if tuple(scores.shape) != (len(x),):
        raise ValueError(
            f"scores must be ({len(x)},), one a row; got {tuple(scores.shape)}"
        )
    coordinate_set = x.coordinate_set
    if len(x) <= k:
        return x
    if not k:
        return _part(
            x, part_of(x.manager, coordinate_set, mx.zeros(len(x), dtype=mx.bool_), 0)
        )
    coordinate_set.index  # noqa: B018 (checks the batch column before it is used)
    batches, count = (coordinate_set.box[0][0], coordinate_set.box[1][0]), None
    if batches[0] == batches[1]:
        count = k
    elif coordinate_set.batch_size <= len(x):
        # Where elements begin is read once a set, and waits for no features.
        count = sum(min(size, k) for size in batch_rows(x).sizes)
        if count == len(x):
            return x
    scores = mx.stop_gradient(scores)
    mask = best_rows(scores, coordinate_set.coords, batches, k)
    return _part(x, part_of(x.manager, coordinate_set, mask, count))


def _part(x: SparseTensor, part: Part) -> SparseTensor:
    if part.move is None:
        return x
    feats = move_rows(x.feats, *part.move, whole=True)
    return SparseTensor.of(x.manager, part.key, feats)


def batch(tensors: Sequence[SparseTensor]) -> SparseTensor:
    """Join tensors as successive batch elements; rows keep their order.

    A tensor of several batch elements keeps them apart: its batch indices are shifted
    by the batch sizes of the tensors before it.

    Examples:
        >>> x = ml.SparseTensor(mx.array([[0, 0], [0, 1]]), mx.ones((2, 3)))
        >>> y = ml.SparseTensor(mx.array([[0, 7]]), mx.ones((1, 3)))
        >>> ops.batch([x, y]).coords.tolist()
        [[0, 0], [0, 1], [1, 7]]
    """
    tensors = tensors_of(tensors, "batch")
    for x in tensors:
        _expect_one_lattice(x, tensors[0])
    _expect_one_width(tensors, "batch")
    coords, boxes, start = [], [], 0
    sets = [x.coordinate_set for x in tensors]
    are_right = all(each.settled for each in sets)  # then what is joined is, too
    for x, each in zip(tensors, sets, strict=True):
        shift = mx.array([start] + [0] * x.dims, dtype=mx.int32)
        coords.append(each.coords + shift)
        if are_right and len(x):
            boxes.append(tuple((end[0] + start, *end[1:]) for end in each.box))
        start += x.batch_size
    shapes = {x.spatial_shape for x in tensors}
    manager = CoordinateManager()
    batched = manager.inserted(
        mx.concatenate(coords),
        tensors[0].stride,
        spatial_shape=shapes.pop() if len(shapes) == 1 else None,
        batch_size=start,
        trusted=are_right,
        box=reduce(join, boxes) if boxes else None,
    )
    batched.is_sorted = all(each.is_sorted for each in sets)
    feats = mx.concatenate([x.feats for x in tensors])
    return SparseTensor.of(manager, batched.key, feats)


Scan = TypeVar("Scan", SparseTensor, tuple, VoxelizedPoints)

# Integers that a scan may have beside its tensor; ``models.Voxels`` has ``rows``.
BESIDE = {"labels", "inverse", "rows", "first"}


def collate(scans: Sequence[Scan]) -> Scan:
    """Join scans into one batch, as the ``collate_fn`` of a data loader does.

    Scan i becomes batch element i (or its elements, if it has several); a scan without
    points becomes an empty element. The arrays are computed before the call returns,
    so that another thread or process can take them.

    Args:
        scans: tensors; or tuples ``(tensor, labels)`` or ``(tensor, labels,
            inverse)``; or ``VoxelizedPoints``; or ``models.Voxels``; all of one kind.
            Labels are (V,), one for each row of the tensor, and inverse is (P,), the
            row of each point.

    Returns:
        What a scan is: a tensor, or a tuple of the batched tensor, the labels one after
        another, and the row of each point in the batched tensor. ``first`` counts the
        points of all scans.

    Raises:
        TypeError: the scans are not all of one kind.
        ValueError: tensors have other strides, axes or channels, or labels do not fit
            the rows.

    Examples:
        >>> scan = ml.SparseTensor.from_points(
        ...     mx.zeros((2, 3)), voxel_size=1.0, labels=mx.array([5, 5])
        ... )
        >>> x, labels, inverse, first = ops.collate([scan, scan])
        >>> x.batch_size, labels, inverse
        (2, array([5, 5], dtype=int32), array([0, 0, 1, 1], dtype=int32))
    """
    if isinstance(scans, SparseTensor | mx.array) or not isinstance(scans, Iterable):
        raise TypeError(f"collate takes a list of scans; got {type(scans).__name__}")
    scans = list(scans)
    kinds = {
        (type(scan), len(scan) if isinstance(scan, tuple) else 0) for scan in scans
    }
    kind, length = next(iter(kinds)) if len(kinds) == 1 else (object, 0)
    if issubclass(kind, SparseTensor):
        return batch(scans).eval()
    default = VoxelizedPoints._fields if length <= 3 else ()
    names = getattr(kind, "_fields", default)[1:length]
    if not names or not set(names) <= BESIDE:
        found = " and ".join(sorted({each.__name__ for each, _ in kinds})) or "none"
        raise TypeError(
            "collate takes a list of tensors, of (tensor, labels), of (tensor, labels, "
            f"inverse) or of VoxelizedPoints, all of one kind; got {found}"
        )
    first, *parts = zip(*scans, strict=True)
    tensors = tensors_of(first, "collate")
    joined, x = [], batch(tensors)
    rows, points = [len(each) for each in tensors], []
    for name, part in zip(names, parts, strict=True):
        counts, starts = rows, [0] * len(rows)
        if name == "first":
            starts = [0, *accumulate(points)]
        elif name != "labels":
            counts = points = [len(each) for each in part]
            starts = [0, *accumulate(rows)]
        each = "point" if counts is points else "row of its tensor"
        joined.append(_joined(name, each, part, counts, starts))
    with sync.values():
        mx.eval(x.arrays(), joined)
    return kind._make((x, *joined)) if hasattr(kind, "_make") else (x, *joined)


def _joined(
    name: str, each: str, parts: Sequence, counts: Sequence[int], starts: Sequence[int]
) -> mx.array:
    """Return the integers of scans one after another, each plus its start."""
    joined = []
    for part, count, start in zip(parts, counts, starts, strict=False):
        values = integers_of(part, count, name, each)
        # An inverse of -1 is a point without a row.
        joined.append(mx.where(values < 0, values, values + start))
    return mx.concatenate(joined)


def _expect_one_width(tensors: Sequence[SparseTensor], name: str) -> None:
    widths = {x.channels: None for x in tensors}
    if len(widths) > 1:
        raise ValueError(
            f"{name} needs tensors of equal channels; got "
            f"{' and '.join(map(str, widths))}. ops.cat joins channels of equal rows"
        )


class Element(NamedTuple):
    """The rows of one batch element, from ``begin`` to ``end`` in their order."""

    coordinate_set: CoordinateSet
    manager: CoordinateManager
    begin: int
    end: int
    order: mx.array | None  # of all rows; None where they are in order

    def of(self, feats: mx.array) -> mx.array:
        """Return the features of its rows."""
        first = self.begin * feats.shape[1] * feats.itemsize
        if self.order is None and first % 16 == 0:
            return feats[self.begin : self.end]
        # MLX's matmul on CUDA refuses rows that begin anywhere.
        if self.order is None:
            at = mx.arange(self.begin, self.end, dtype=mx.int32)
        else:
            at = self.order[self.begin : self.end]
        return move_rows(feats, at, inverted(at, feats.shape[0]), whole=True)


def unbatch(x: SparseTensor) -> list[SparseTensor]:
    """Return one tensor for each batch element, empty ones included.

    The first row of each element is read once for each coordinate set, which also keeps
    the elements' sets.

    Examples:
        >>> x = ml.SparseTensor(mx.array([[0, 0], [0, 1], [1, 7]]), mx.ones((3, 8)))
        >>> [len(element) for element in ops.unbatch(x)]
        [2, 1]
    """
    rows, coordinate_set, feats = batch_rows(x), x.coordinate_set, x.feats

    def build() -> list[Element]:
        ends = pairwise(rows.starts)
        elements = [_element(coordinate_set, rows.order, a, b) for a, b in ends]
        sync.complete([each.coordinate_set.coords for each in elements])
        return elements

    return [
        SparseTensor.of(each.manager, each.coordinate_set.key, each.of(feats))
        for each in coordinate_set.view("batch elements", build)
    ]


def _element(
    whole: CoordinateSet, order: mx.array | None, begin: int, end: int
) -> Element:
    coords = whole.coords
    cells = coords[begin:end] if order is None else coords[order[begin:end]]
    rows = mx.concatenate([mx.zeros_like(cells[:, :1]), cells[:, 1:]], axis=1)
    manager = CoordinateManager()
    element_set = manager.inserted(
        rows,
        whole.stride,
        spatial_shape=whole.spatial_shape,
        batch_size=1,
        trusted=True,
        box=tuple((0, *corner[1:]) for corner in whole.box),  # right for all rows
    )
    element_set.is_sorted, element_set.is_pinned = whole.is_sorted, True
    return Element(element_set, manager, begin, end, order)
