"""The command evaluate: intersection over union and accuracy of each class."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import mlx.core as mx
import numpy as np

from ..io.points import NAMES, PointCloud, read_points
from ..io.safetensors import listed
from ..models.pretrained import Segmentor
from ..nn.metrics import ConfusionMatrix
from . import Result, UsageError, segment

# Attributes that may hold the class of each point; the first one found is used.
LABELS = ("label", "labels")


def run(
    scans: Sequence[str | Path],
    model: str | Path | None = None,
    predicted: Sequence[str | Path] = (),
    *,
    labels: str = "",
    ignore: Sequence[int] = (),
    revision: str | None = None,
    code: str | None = None,
    columns: str = "",
    **options: Any,
) -> Result:
    """Compare the labels of scans with a net's labels, or with those of files.

    ``options`` are ``up`` and those of ``segment_points``.
    """
    segment.check_tiles(options["tile"], options["overlap"])
    if (model is None) == (not predicted):
        raise UsageError(
            "pass either --model, a net to evaluate, or --predicted, labelled files"
        )
    if predicted and len(predicted) != len(scans):
        raise UsageError(
            f"--predicted must name a file for each scan; got {len(predicted)} for "
            f"{len(scans)} scans"
        )
    net = None if model is None else segment.segmentor(model, revision, code)
    matrices = []
    for i, scan in enumerate(scans):
        if net is None:
            cloud = read_points(scan, columns, attributes={*LABELS, labels})
        else:
            cloud = segment.read_scan(net, scan, columns, *LABELS, labels)
        segment.say_dropped(cloud, scan)
        truth = labels_of(cloud, scan, labels)
        truth[np.isin(truth, ignore) | (truth < 0)] = -1
        if net is None:
            found = _predicted(predicted[i], scan, len(cloud))
            classes = 1 + max(truth.max(initial=0), found.max(initial=0))
        else:
            _check_classes(truth, len(net.about.classes), scan)
            result = segment.label_scan(net, cloud, scan, **options)
            found, classes = result.labels, result.classes
            _check_classes(truth, classes, scan)
        matrix = ConfusionMatrix(classes)
        matrix.update(found, truth)
        matrices.append(matrix)
    evaluation = _sum(matrices, net)
    return Result(str(evaluation), evaluation.to_dict())


def labels_of(cloud: PointCloud, path: str | Path, name: str = "") -> np.ndarray:
    """Return the (N,) int64 labels of a cloud's points.

    Args:
        cloud, path: of ``read_points``, and the file, for the errors.
        name: the dimension with the labels in the file, if it has another name than
            those that ``read_points`` knows.

    Raises:
        ValueError: the cloud has no labels, or they are not integers.
    """
    held = cloud.attributes
    names = (name, NAMES.get(name.lower(), name)) if name else LABELS
    found = next((each for each in names if each in held), None)
    if found is None:
        raise ValueError(
            f"{path} has no {f'dimension {name}' if name else 'labels'} beside "
            f"{listed(held, 'its coordinates')}: expected an integer for each point, "
            "its class. Name the dimension with --labels"
        )
    values = held[found]
    whole = values.astype(np.int64)
    if values.ndim != 1 or not np.array_equal(whole, values):
        raise ValueError(
            f"{path}: {name or found} must be an integer for each point; got "
            f"{values.dtype} of shape {values.shape}"
        )
    return whole


def _predicted(path: str | Path, scan: str | Path, count: int) -> np.ndarray:
    """Return the labels of a file with as many points as a scan has."""
    cloud = read_points(path, attributes=LABELS)
    if len(cloud) != count:
        raise ValueError(
            f"{scan} has {count:,} points and {path} {len(cloud):,}: they must be the "
            "same points in the same order"
        )
    return labels_of(cloud, path)


def _check_classes(truth: np.ndarray, classes: int, scan: str | Path) -> None:
    """Raise a ValueError if a label is not one of a net's classes; 0 is unknown."""
    if classes and truth.max(initial=0) >= classes:
        raise ValueError(
            f"{scan} has label {truth.max()}, and the net has the classes 0 to "
            f"{classes - 1}: pass --ignore {truth.max()} to leave such points out"
        )


def _sum(matrices: list[ConfusionMatrix], net: Segmentor | None) -> ConfusionMatrix:
    """Return the counts of all scans together."""
    classes = max(len(matrix.names) for matrix in matrices)
    label = "class {}".format if net is None else net.about.label
    total = ConfusionMatrix([label(i) for i in range(classes)])
    for matrix in matrices:
        more = classes - len(matrix.names)
        known = mx.pad(matrix.counts[:, :-1], ((0, more), (0, more)))
        unknown = mx.pad(matrix.counts[:, -1:], ((0, more), (0, 0)))
        total.counts = total.counts + mx.concatenate([known, unknown], axis=1)
    counts = np.array(total.counts)
    occur = np.flatnonzero(counts.sum(axis=1) + counts[:, :-1].sum(axis=0))
    if net is None and len(occur):  # leave out classes without points
        total = ConfusionMatrix([label(i) for i in occur])
        total.counts = mx.array(counts[occur][:, [*occur, classes]])
    return total
