"""The cases of layers.py and peer_layers.py, and the rows of their files.

NumPy alone: the other libraries' environment has no MLX.
"""

from __future__ import annotations

import json
import statistics
from collections.abc import Iterator, Sequence
from math import prod
from pathlib import Path
from typing import NamedTuple

import numpy as np
from scenes import own_surface

ROWS = (2_000, 10_000, 40_000, 120_000, 1_000_000)
CHANNELS = (16, 32, 48, 64, 96, 128, 192, 256, 384, 512)
FLOAT_CHANNELS = (64, 128)
SCATTERED = ("W4",)  # scenes of a file that are no surfaces
FACTS = ("kind", "rows", "channels", "dtype")


class Kind(NamedTuple):
    """The geometry of a layer.

    Attributes:
        size: of its kernel, centred where it is odd.
        stride: from the rows of the scene to coarser ones.
        is_inverse: whether it goes from these back to the rows of the scene.
        edges: about how many there are for a row of the scene.
    """

    size: tuple[int, int, int]
    stride: int = 1
    is_inverse: bool = False
    edges: int = 1

    @property
    def volume(self) -> int:
        """Return the number of offsets."""
        return prod(self.size)

    @property
    def writes_coarse(self) -> bool:
        """Return whether it writes fewer rows than it reads."""
        return self.stride > 1 and not self.is_inverse


KINDS = {
    "subm": Kind((3, 3, 3), edges=16),
    "inverse": Kind((2, 2, 2), 2, True),
    "strided": Kind((2, 2, 2), 2),
    # Of Cylinder3D, of SECOND, and of a decoder onto the rows of the latter.
    "subm 3x1x3": Kind((3, 1, 3), edges=6),
    "strided 3x3x3": Kind((3, 3, 3), 2, edges=3),
    "inverse 3x3x3": Kind((3, 3, 3), 2, True, 3),
}


def cases(every_rows: tuple[int, ...] = ROWS) -> Iterator[dict]:
    """Yield kind, rows, channels and dtype of each case, by rows."""
    for rows in every_rows:
        for channels in CHANNELS:
            yield dict(kind="subm", rows=rows, channels=channels, dtype="float16")
        for dtype in ("tf32", "float32"):
            for channels in FLOAT_CHANNELS:
                yield dict(kind="subm", rows=rows, channels=channels, dtype=dtype)
        yield dict(kind="inverse", rows=rows, channels=64, dtype="float16")
        yield dict(kind="strided", rows=rows, channels=96, dtype="float16")
        for kind in ("subm 3x1x3", "strided 3x3x3", "inverse 3x3x3"):
            yield dict(kind=kind, rows=rows, channels=64, dtype="float16")


def grouped_cases(
    rows: int, widths: Sequence[int], groups: Sequence[int]
) -> list[dict]:
    """Return submanifold layers with one group, and with each that fits the width."""
    return [
        dict(kind="subm", rows=rows, channels=channels, dtype=dtype, groups=each)
        for dtype in ("float16", "float32")
        for channels in widths
        for each in (1, *groups)
        if channels % each == 0
    ]


def sites(rows: int, file: str | None) -> np.ndarray:
    """Return (rows, 3) int32 voxels of a scan: the first of the least that has them.

    Not of ``SCATTERED``, whose voxels have hardly a neighbour.
    """
    if not file:
        return own_surface(rows)[:, 1:]
    with np.load(file) as known:
        scans = [known[name] for name in known if name not in SCATTERED]
        fitting = [scan for scan in scans if len(scan) >= rows]
    if not fitting:
        raise ValueError(f"{file} has no scene of {rows} voxels: name fewer rows")
    return min(fitting, key=len)[:rows].astype(np.int32)


def key_of(row: dict) -> tuple:
    """Return what is the same in rows of one case and pass."""
    return tuple(row[k] for k in (*FACTS, "pass"))


def beside(file: Path) -> dict[tuple, dict]:
    """Return the best row of other libraries for each case and pass."""
    best: dict[tuple, dict] = {}
    for line in file.read_text().splitlines():
        row = json.loads(line)
        if "library" not in row:
            continue
        known = best.setdefault(key_of(row), row)
        if row["gpu_ms"] < known["gpu_ms"]:
            best[key_of(row)] = row
    return best


def summary(rows: list[dict], pass_: str) -> str:
    """Return how much faster than the best of the others the cases of a pass are."""
    ratios = [r["times_faster"] for r in rows if r["pass"] == pass_]
    mean, slower = statistics.geometric_mean(ratios), sum(r < 1 for r in ratios)
    return (
        f"{pass_}: {mean:.2f} times as fast (geometric mean of {len(ratios)}), least "
        f"{min(ratios):.2f}, {slower} slower"
    )
