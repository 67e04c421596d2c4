"""Write a copy of a scan with a label for each point."""

from __future__ import annotations

from collections.abc import Sequence
from copy import deepcopy
from pathlib import Path
from typing import Any

import numpy as np

from ..cache_files import atomic_write
from .points import LAS, Columns, las_chunks, open_las, read_columns, write_ply

# Formats that labels are written in.
WRITTEN = (*LAS, ".ply", ".npz")


def write_labelled(
    path: str | Path,
    source: str | Path,
    labels: np.ndarray,
    confidence: np.ndarray | None = None,
    *,
    classes: int | None = None,
    columns: str | Sequence[str] = (),
) -> str:
    """Write a copy of a scan with a label for each point.

    All other dimensions of the points are those of ``source``. LAS and LAZ are copied
    in pieces and keep their header, scales, coordinate system and other records.

    Labels of LAS and LAZ become the dimension ``classification`` if the point format
    has room for the classes (32 classes in formats 0 to 5, else 256), or else an extra
    dimension ``label``. A dimension ``label`` that the file already has is always set.
    In ``.ply`` and ``.npz`` files the labels are the column ``label``.

    Args:
        path: the new file: ``.las`` or ``.laz`` if ``source`` is one of these; ``.ply``
            or ``.npz`` for any format that ``read_points`` reads.
        source: the scan.
        labels: (P,) integers, one for each point of the file in its order. Points with
            -1 keep the classification of a LAS file.
        confidence: (P,) numbers for the dimension ``confidence``, or None.
        classes: the number of classes; by default the largest label plus 1.
        columns: as for ``read_points``.

    Returns:
        The names of the dimensions with the labels, such as "classification".

    Raises:
        ValueError: a format is not one of these, the number of labels is not that of
            the points, or an existing dimension is too small for the labels.
        PointFileError: ``source`` cannot be read.

    Examples:
        >>> io.write_ply("scan.ply", {name: np.arange(3.0) for name in ("x", "y", "z")})
        >>> io.write_labelled("labelled.ply", "scan.ply", np.array([0, 2, 1]))
        'label'
    """
    path, source = Path(path), Path(source)
    check_format(path, source)
    labels = np.asarray(labels)
    if labels.ndim != 1 or labels.dtype.kind not in "iu":
        raise ValueError(
            f"labels must be (P,) integers; got {labels.dtype} of shape {labels.shape}"
        )
    if confidence is not None and np.shape(confidence) != labels.shape:
        raise ValueError(
            f"confidence must have the shape of the labels, {labels.shape}; got "
            f"{np.shape(confidence)}"
        )
    classes = max(classes or 0, int(labels.max(initial=0)) + 1)
    if path.suffix.lower() in LAS:
        return _write_las(path, source, labels, confidence, classes)
    table = read_columns(source, columns)
    _check_count(len(table["x"]), len(labels), source)
    small = classes <= 256 and labels.min(initial=0) >= 0
    table["label"] = labels.astype(np.uint8 if small else np.int32)
    if confidence is not None:
        table["confidence"] = np.asarray(confidence, dtype=np.float32)
    if path.suffix.lower() == ".ply":
        write_ply(path, _ply_columns(table))
    else:
        with atomic_write(path) as draft, draft.open("wb") as stream:
            np.savez_compressed(stream, **table)
    return "label"


def check_format(path: Path, source: Path) -> None:
    """Raise a ValueError if a labelled copy cannot have the format of ``path``."""
    kind = path.suffix.lower()
    if kind not in WRITTEN:
        raise ValueError(
            f"{path.name}: labels are written to {', '.join(WRITTEN)}, not to "
            f"{kind or 'a file without a suffix'}"
        )
    if kind in LAS and source.suffix.lower() not in LAS:
        raise ValueError(
            f"{path.name}: a {kind} file needs a LAS or LAZ file as its source, and "
            f"{source.name} is neither: write .ply or .npz"
        )


def _check_count(points: int, labels: int, source: Path) -> None:
    if points != labels:
        raise ValueError(
            f"{source.name} has {points:,} points, and there are {labels:,} labels"
        )


def _ply_columns(table: Columns) -> Columns:
    """Return columns of one number a point, in types that PLY has if they fit."""
    flat: Columns = {}
    joint = {"colours": ("red", "green", "blue"), "normals": ("nx", "ny", "nz")}
    for name, column in table.items():
        parts = column.reshape(len(column), -1).T if column.ndim > 1 else column[None]
        names = [name] if column.ndim == 1 else joint.get(name, ())
        if len(names) != len(parts):
            names = [f"{name}_{i}" for i in range(len(parts))]
        for each, part in zip(names, parts, strict=True):
            flat[each] = _ply_type(part)
    return flat


def _ply_type(column: np.ndarray) -> np.ndarray:
    """Return a column in a type that PLY has; as it is if none holds its values."""
    kind, size = column.dtype.kind, column.dtype.itemsize
    if kind == "b":
        return column.astype(np.uint8)
    if kind == "f" and size == 2:
        return column.astype(np.float32)
    if kind in "iu" and size == 8:
        for narrow in (np.int32, np.uint32):
            limits = np.iinfo(narrow)
            if not len(column) or (
                column.min() >= limits.min and column.max() <= limits.max
            ):
                return column.astype(narrow)
    return column


def _write_las(path, source, labels, confidence, classes) -> str:
    """Copy a LAS file in pieces, with labels."""
    import laspy

    with open_las(source, evlrs=True) as reader:
        header = deepcopy(reader.header)
        _check_count(header.point_count, len(labels), source)
        # A cloud-optimised file's index describes an order of points in its own file.
        header.vlrs = [each for each in header.vlrs if each.user_id != "copc"]
        evlrs = [each for each in header.evlrs or () if each.user_id != "copc"]
        header.evlrs = None
        room = 32 if header.point_format.id < 6 else 256
        fields = ["classification"] if classes <= room else []
        held = set(header.point_format.extra_dimension_names)
        if not fields and "label" not in held:
            header.add_extra_dim(laspy.ExtraBytesParams("label", "int32"))
        if not fields or "label" in held:
            fields.append("label")
        if confidence is not None and "confidence" not in held:
            header.add_extra_dim(laspy.ExtraBytesParams("confidence", "float32"))
        if "label" in fields:
            _check_room(header, "label", labels, source)
        packed = path.suffix.lower() == ".laz"
        start = 0
        with (
            atomic_write(path) as draft,
            laspy.open(draft, "w", header=header, do_compress=packed) as writer,
        ):
            for chunk in las_chunks(reader, source):
                end = start + len(chunk)
                extra = {name: labels[start:end] for name in fields}
                if confidence is not None:
                    extra["confidence"] = confidence[start:end]
                writer.write_points(_record(chunk, header, extra))
                start = end
            if evlrs:
                writer.write_evlrs(type(header.vlrs)(evlrs))
    return " and ".join(fields)


def _check_room(header: Any, name: str, labels: np.ndarray, source: Path) -> None:
    """Raise a ValueError if a dimension of a LAS file cannot hold the labels."""
    field = header.point_format.dimension_by_name(name)
    low, high = labels.min(initial=0), labels.max(initial=0)
    if low < field.min or high > field.max:
        raise ValueError(
            f"{source.name} has a dimension {name} from {field.min} to {field.max}, "
            f"which cannot hold labels from {low} to {high}: rename that dimension"
        )


def _record(chunk: Any, header: Any, extra: dict[str, np.ndarray]) -> Any:
    """Return a chunk's points in the format of ``header``, with other values."""
    import laspy

    record = laspy.ScaleAwarePointRecord.zeros(len(chunk), header=header)
    for name in chunk.array.dtype.names:
        record.array[name] = chunk.array[name]
    for name, values in extra.items():
        if name == "classification":  # points without a label keep theirs
            values = np.where(values < 0, np.array(chunk[name]), values)
        record[name] = values
    return record
