"""Attributes of points that a net reads: missing ones, and non-finite values."""

from __future__ import annotations

import warnings
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import mlx.core as mx

from ..arrays import array_of, single, stream_of
from ..geometry import sync
from ..geometry.unique import true_positions

FILLING = "give the attribute, or {} to read zeros"  # how to ask for them


class MissingAttribute(ValueError):
    """These points lack what a net reads.

    Args:
        name: the attribute.
        features: what the net reads.
        held: the attributes that there are.

    Attributes:
        lack: the sentence without what to do.
    """

    def __init__(self, name: str, features: Sequence[str], held: Iterable[str]):
        from ..io.errors import listed  # io imports the models

        found = listed(held, "no attributes")
        self.lack = (
            f"the net reads {', '.join(features)}, and these points have no {name} "
            f"({found})"
        )
        super().__init__(f"{self.lack}: {FILLING.format('say fill=True')}")


def finite_points(
    points: mx.array, attributes: Mapping[str, Any], names: Iterable[str]
) -> tuple[mx.array, Mapping[str, Any], mx.array | None]:
    """Leave out points with a coordinate or an attribute that is not finite in float32.

    Warns with their count. Reads from the device whether there are such points.

    Args:
        points: (P, D) float.
        attributes: name to array with P rows.
        names: the attributes that the net reads.

    Returns:
        Points, attributes, and the positions of the points that stay (None for all).
    """
    count = points.shape[0] if points.ndim == 2 else 0
    if not count:
        return points, attributes, None
    with stream_of(points):
        finite = {"coordinates": mx.isfinite(points).all(axis=1)}
    columns = {}
    for name in names:
        if attributes.get(name) is None:
            continue
        value = array_of(attributes[name], name)
        if value.size and value.size % count == 0:  # the recipe refuses other sizes
            with stream_of(value):
                columns[name] = value.reshape(count, -1)
            finite[name] = mx.isfinite(single(columns[name])).all(axis=1)
    bad = sync.read(*(mx.logical_not(mask).any() for mask in finite.values()))
    if not any(bad):
        return points, attributes, None
    kept = true_positions(mx.stack([*finite.values()]).all(axis=0))
    wrong = [name for name, is_bad in zip(finite, bad, strict=True) if is_bad]
    warnings.warn(
        f"{count - len(kept):,} of {count:,} points left out: not finite in "
        f"{' and '.join(wrong)}",
        stacklevel=3,
    )
    for name, value in columns.items():
        with stream_of(value):
            columns[name] = value[kept]
    with stream_of(points):
        return points[kept], {**attributes, **columns}, kept


def check_scores(*scores: mx.array) -> None:
    """Raise a ValueError if scores of a net are NaN. Waits for the device.

    Labels and boxes of such scores would mean nothing.
    """
    if any(sync.read(*(mx.isnan(each).any() for each in scores))):
        raise ValueError(
            "the net's scores are NaN: its weights or the features hold NaN or "
            "infinity, or half precision overflows; try net.set_dtype(mx.float32)"
        )


@contextmanager
def of_scan(scan: object, option: str = "") -> Iterator[None]:
    """Name the scan in errors of its points, as a command says them.

    Args:
        scan: its path.
        option: of the command, that fills what is missing with zeros; "" for none.
    """
    try:
        yield
    except MissingAttribute as error:
        remedy = f": {FILLING.format(f'pass {option}')}" if option else ""
        raise ValueError(f"{scan}: {error.lack}{remedy}") from None
    except ValueError as error:
        raise ValueError(f"{scan}: {error}") from None
