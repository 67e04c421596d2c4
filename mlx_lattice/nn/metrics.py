"""Scores of class labels: confusion matrix, intersection over union, accuracy."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import mlx.core as mx

from .. import sync
from ..checks import ArrayLike, array_of, dtype_text, whole
from ..tensor import SparseTensor
from .losses import expect_classes, labels_of

__all__ = ["ConfusionMatrix"]


class ConfusionMatrix:
    """Count rows by true and predicted class, for IoU and accuracy.

    ``print`` shows a table with a line for each class, and the means.

    Args:
        classes: the names of the C classes, or their number.
        ignore_label: rows with this label are not counted.

    Attributes:
        counts: (C, C + 1) int64, a row for each true class and a column for each
            predicted one. The last column counts rows without a predicted class.
        names: the names of the classes.

    Raises:
        TypeError: ``classes`` are neither names nor an int.

    Examples:
        >>> score = nn.metrics.ConfusionMatrix(("floor", "wall"))
        >>> score.update(mx.array([0, 1, 1]), mx.array([0, 0, 1]))
        >>> score.iou.tolist(), score.mean_iou
        ([0.5, 0.5], 0.5)
        >>> print(score)
          class    IoU accuracy       points
          floor  50.0%    50.0%            2
          wall   50.0%   100.0%            1
          mean   50.0%    75.0%            3
        overall accuracy 66.7%
    """

    def __init__(self, classes: int | Sequence[str], *, ignore_label: int = -1):
        if isinstance(classes, str) or not isinstance(classes, Sequence):
            count = whole(classes, "classes", 1, "the names of the classes, or an int")
            classes = [f"class {i}" for i in range(count)]
        self.names: tuple[str, ...] = tuple(map(str, classes))
        self.ignore_label: int = whole(ignore_label, "ignore_label", -(2**31))
        self.reset()

    def reset(self) -> None:
        """Set all counts to 0."""
        classes = len(self.names)
        self.counts: mx.array = mx.zeros((classes, classes + 1), dtype=mx.int64)

    def update(
        self, predicted: SparseTensor | ArrayLike, labels: SparseTensor | ArrayLike
    ) -> None:
        """Count the rows of a batch. Waits for the device.

        Args:
            predicted: (N, C) scores, a tensor or an array, whose greatest counts; or
                (N,) integers, the predicted classes. A negative one is no class.
            labels: (N,) integers, the true classes; or a tensor of one int32 channel.

        Raises:
            ValueError: shapes do not fit, or a label is neither a class nor
                ``ignore_label``.
        """
        classes = len(self.names)
        values = predicted.feats if isinstance(predicted, SparseTensor) else predicted
        values = array_of(values, "predicted")
        is_whole = mx.issubdtype(values.dtype, mx.integer)
        if values.ndim == 2 and values.shape[1] == classes and not is_whole:
            values = mx.argmax(values, axis=1) if values.size else values[:, 0]
        elif values.ndim != 1 or (values.size and not is_whole):
            raise ValueError(
                f"predicted must be (N, {classes}) floating scores or (N,) integers; "
                f"got {tuple(values.shape)} of {dtype_text(values)}"
            )
        labels = labels_of(labels, predicted, len(values))
        if not labels.size:
            return
        expect_classes(labels, classes, self.ignore_label)
        values = values.astype(mx.int64)
        if (highest := sync.read(values.max())[0]) >= classes:
            raise ValueError(
                f"predicted has class {highest}; the classes are 0 to {classes - 1}"
            )
        wide, n = classes + 1, classes * (classes + 1)
        at = labels * wide + mx.where(values < 0, classes, values)
        at = mx.where(labels == self.ignore_label, n, at).astype(mx.int32)
        counts = mx.zeros((n + 1,), dtype=mx.int32).at[at].add(1)[:n]
        self.counts = self.counts + counts.reshape(classes, wide).astype(mx.int64)
        mx.eval(self.counts)

    @property
    def iou(self) -> mx.array:
        """(C,) rows with a class in truth and prediction over those in either.

        NaN for a class that is in neither.
        """
        return mx.array(self._iou())

    @property
    def accuracy(self) -> mx.array:
        """(C,) share of a class's rows that were predicted so; NaN without rows."""
        return mx.array(self._accuracy())

    @property
    def mean_iou(self) -> float:
        """The mean IoU of the classes in the truth or the prediction."""
        return _mean(self._iou())

    @property
    def mean_accuracy(self) -> float:
        """The mean accuracy of the classes in the truth."""
        return _mean(self._accuracy())

    @property
    def overall_accuracy(self) -> float:
        """The share of all rows with the right class."""
        rows = self.counts.tolist()
        right = sum(row[i] for i, row in enumerate(rows))
        return _share(right, sum(map(sum, rows)))

    def _iou(self) -> list[float]:
        rows = self.counts.tolist()
        columns = list(zip(*rows, strict=True))
        return [
            _share(row[i], sum(row) + sum(columns[i]) - row[i])
            for i, row in enumerate(rows)
        ]

    def _accuracy(self) -> list[float]:
        return [_share(row[i], sum(row)) for i, row in enumerate(self.counts.tolist())]

    def to_dict(self) -> dict[str, Any]:
        """Return the numbers for JSON; None stands for NaN."""
        counts = self.counts.tolist()
        rows = zip(self.names, self._iou(), self._accuracy(), counts, strict=True)
        return {
            "classes": [
                {"name": n, "iou": _plain(i), "accuracy": _plain(a), "points": sum(p)}
                for n, i, a, p in rows
            ],
            "mean_iou": _plain(self.mean_iou),
            "mean_accuracy": _plain(self.mean_accuracy),
            "overall_accuracy": _plain(self.overall_accuracy),
            "points": sum(map(sum, counts)),
            "confusion": counts,
        }

    def __repr__(self) -> str:
        """Return a table with a line for each class, and the means."""
        width = max(map(len, (*self.names, "class")))
        lines = [f"  {'class':<{width}} {'IoU':>6} {'accuracy':>8} {'points':>12}"]
        counts = [sum(row) for row in self.counts.tolist()]
        for row in zip(self.names, self._iou(), self._accuracy(), counts, strict=True):
            lines.append(_line(width, *row))
        means = self.mean_iou, self.mean_accuracy
        lines.append(_line(width, "mean", *means, sum(counts)))
        lines.append(f"overall accuracy {_percent(self.overall_accuracy)}")
        return "\n".join(lines)


def _share(part: int, whole: int) -> float:
    return part / whole if whole else math.nan


def _mean(values: list[float]) -> float:
    known = [value for value in values if not math.isnan(value)]
    return sum(known) / len(known) if known else math.nan


def _plain(value: float) -> float | None:
    return None if math.isnan(value) else value


def _percent(value: float) -> str:
    return "-" if math.isnan(value) else f"{value:.1%}"


def _line(width: int, name: str, iou: float, accuracy: float, points: int) -> str:
    return f"  {name:<{width}} {_percent(iou):>6} {_percent(accuracy):>8} {points:>12,}"
