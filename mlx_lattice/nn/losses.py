"""Losses of class scores: cross entropy and Lovász-softmax, with ignored labels.

Both take tensors or arrays, and compute in float32. For other losses pass ``x.feats``
to the functions of ``mlx.nn.losses``.
"""

from __future__ import annotations

from contextlib import suppress
from typing import TYPE_CHECKING

import mlx.core as mx
import mlx.nn

from .. import sync
from ..checks import FLOATS, ArrayLike, array_of, dtype_text, one_of, whole
from ..tensor import SparseTensor, align, features_of

__all__ = ["cross_entropy", "lovasz_softmax"]

REDUCTIONS = ("mean", "sum", "none")


def cross_entropy(
    scores: SparseTensor | mx.array,
    labels: SparseTensor | ArrayLike,
    *,
    weight: ArrayLike | None = None,
    ignore_label: int = -1,
    reduction: str = "mean",
) -> mx.array:
    """Return the cross entropy of class scores, as PyTorch's ``F.cross_entropy`` does.

    Args:
        scores: (N, C) tensor or array, before the softmax.
        labels: (N,) integers from 0 to C - 1, or ``ignore_label``; or a tensor of one
            int32 channel on the rows of ``scores``.
        weight: (C,) weight of each class; by default 1.
        ignore_label: rows with this label have no loss and no gradient.
        reduction: "mean" divides by the sum of the rows' weights, and is 0 if all rows
            are ignored; "sum"; or "none" for (N,) values.

    Returns:
        float32, a number or (N,).

    Raises:
        TypeError: scores are not floating.
        ValueError: shapes do not fit, labels are not integers, or a label is not a
            class. Under ``mx.compile``, where labels have no values to check, such a
            label makes the loss NaN.

    Examples:
        >>> scores = mx.array([[2.0, 0.0], [0.0, 3.0], [1.0, 1.0]])
        >>> nn.losses.cross_entropy(scores, mx.array([0, 1, -1]))
        array(0.0877577, dtype=float32)
    """
    one_of(reduction, REDUCTIONS, "reduction")
    scores, labels, weights = _checked(scores, labels, ignore_label)
    if weight is not None:
        weight = array_of(weight, "weight").astype(mx.float32)
        if tuple(weight.shape) != (scores.shape[1],):
            raise ValueError(
                f"weight must be ({scores.shape[1]},), one for each class; got "
                f"{tuple(weight.shape)}"
            )
        weights = weights * weight[labels]
    if scores.size:
        losses = mlx.nn.losses.cross_entropy(scores, labels, weights)
    else:
        losses = scores.sum(axis=1)
    if reduction == "none":
        return losses
    total = losses.sum()
    if reduction == "sum":
        return total
    divisor = weights.sum()
    return total / mx.where(divisor == 0, 1, divisor)


def lovasz_softmax(
    scores: SparseTensor | mx.array,
    labels: SparseTensor | ArrayLike,
    *,
    ignore_label: int = -1,
) -> mx.array:
    """Return the Lovász-softmax loss, a surrogate of 1 - mean IoU.

    The loss is the mean over the classes that occur in ``labels``, for all rows
    together. Add it to the cross entropy. Source: Berman et al., "The Lovász-Softmax
    loss", CVPR 2018, with ``classes="present"``.

    Args:
        scores: (N, C) tensor or array, before the softmax.
        labels, ignore_label: as for ``cross_entropy``.

    Returns:
        A float32 number; 0 if all rows are ignored.

    Raises:
        TypeError, ValueError: as for ``cross_entropy``.

    Examples:
        >>> scores, labels = mx.array([[9.0, 0.0], [0.0, 9.0]]), mx.array([0, 0])
        >>> round(nn.losses.lovasz_softmax(scores, labels).item(), 3)
        0.5
    """
    scores, labels, weights = _checked(scores, labels, ignore_label)
    if not scores.size:
        return scores.sum()
    classes = mx.arange(scores.shape[1], dtype=mx.int32)[:, None]
    truth = (labels == classes) & (weights != 0)  # (C, N)
    errors = mx.abs(truth - mx.softmax(scores, axis=1).T) * weights
    # The loss of a class is the sum of its errors, each times the growth of 1 - IoU
    # if the rows are counted as wrong from the greatest error down.
    ranks = mx.where(weights == 0, 1, -mx.stop_gradient(errors))  # ignored rows last
    order = mx.argsort(ranks, axis=1)
    is_true = mx.take_along_axis(truth, order, axis=1)
    count = truth.sum(axis=1, keepdims=True)
    both = (count - mx.cumsum(is_true.astype(mx.int32), axis=1)).astype(mx.float32)
    either = count + mx.cumsum((~is_true).astype(mx.int32), axis=1)
    either = either.astype(mx.float32)
    # A row of the class takes one from ``both``; another adds one to ``either``.
    growth = mx.where(is_true, 1, both / mx.maximum(either - 1, 1)) / either
    growth = mx.put_along_axis(mx.zeros_like(errors), order, growth, axis=1)
    present = count[:, 0] > 0
    losses = mx.where(present, (errors * mx.stop_gradient(growth)).sum(axis=1), 0)
    return losses.sum() / mx.maximum(present.sum(), 1)


def _checked(
    scores: SparseTensor | mx.array, labels: SparseTensor | ArrayLike, ignore_label: int
) -> tuple[mx.array, mx.array, mx.array]:
    """Return float32 scores, labels that are all classes, and the weight of each row.

    The weight is 0 for an ignored row, NaN for a label that is not a class, else 1.
    """
    values = features_of(scores)
    if values.ndim != 2 or values.dtype not in FLOATS:
        raise TypeError(
            "scores must be (N, C) in float32, float16 or bfloat16, one for each "
            f"class; got {tuple(values.shape)} of {dtype_text(values)}"
        )
    count, classes = values.shape
    labels = labels_of(labels, scores, count)
    is_ignored = labels == whole(ignore_label, "ignore_label", -(2**31))
    is_class = (labels >= 0) & (labels < classes)
    with suppress(sync.TracedError):
        expect_classes(labels, classes, ignore_label)
    weights = mx.where(is_ignored, 0.0, mx.where(is_class, 1.0, mx.nan))
    labels = mx.where(is_class, labels, 0).astype(mx.int32)
    return values.astype(mx.float32), labels, weights


def labels_of(
    labels: SparseTensor | ArrayLike, scores: SparseTensor | mx.array, count: int
) -> mx.array:
    """Return (N,) int64 labels in the order of the rows of ``scores``."""
    if isinstance(labels, SparseTensor):
        if isinstance(scores, SparseTensor):
            labels = align(labels, scores)
        labels = labels.feats[:, 0] if labels.channels == 1 else labels.feats
    labels = array_of(labels, "labels")
    whole_numbers = mx.issubdtype(labels.dtype, mx.integer) or not labels.size
    if tuple(labels.shape) != (count,) or not whole_numbers:
        raise ValueError(
            f"labels must be ({count},) integers, one for each row of the scores; got "
            f"{tuple(labels.shape)} of {dtype_text(labels)}. "
            "SparseTensor.from_points(points, labels=...) makes labels of voxels from "
            "labels of points"
        )
    return labels.astype(mx.int64)


def expect_classes(labels: mx.array, classes: int, ignore_label: int) -> None:
    """Raise a ValueError unless each label is a class or ignored. Reads the labels."""
    if not labels.size:
        return
    known = mx.where(labels == ignore_label, 0, labels)
    low, high = sync.read(known.min(), known.max())
    if low < 0 or high >= classes:
        bad = low if low < 0 else high
        raise ValueError(
            f"labels must be classes from 0 to {classes - 1}, or ignore_label "
            f"{ignore_label}; got {bad}. If {bad} marks points without a class, pass "
            f"ignore_label={bad}"
        )


if not TYPE_CHECKING:  # type checkers find mistyped names

    def __getattr__(name: str) -> None:
        text = f"module {__name__!r} has no attribute {name!r}"
        if hasattr(mlx.nn.losses, name):
            text += f"; MLX has it: mlx.nn.losses.{name}(x.feats, ...)"
        raise AttributeError(text)
