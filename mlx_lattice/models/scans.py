"""Segmentation of scans of any size.

``segment_points`` runs a net on one tile of a scan after another, and on several views
of each tile.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import mlx.core as mx

try:
    import numpy as np
except ImportError as error:
    raise ImportError("segment_points needs NumPy: pip install numpy") from error

from ..checks import real
from .pretrained import Segmentor
from .voxel_recipe import ATTRIBUTES, check_scores, white_of

__all__ = ["Segmented", "segment_points"]


class Segmented(NamedTuple):
    """Hold the class of each point, in the order of the points.

    Examples:
        >>> net = models.SpUNet(1, 2, 8, (8, 8), layers=(1, 1)).eval()
        >>> net.about = models.About(models.VoxelRecipe(0.1), ("floor", "wall"))
        >>> found = models.segment_points(net, mx.random.uniform(shape=(50, 3)))
        >>> found.labels.shape, found.confidence.shape, found.classes
        ((50,), (50,), 2)
    """

    labels: np.ndarray  # (P,) int32
    confidence: np.ndarray  # (P,) float32, the mean probability of the label
    classes: int  # number of the net's classes
    voxels: int  # that the net read in all tiles, in one view
    tiles: int  # number of tiles with points


def segment_points(
    net: Segmentor,
    points: Any,
    attributes: Mapping[str, Any] | None = None,
    *,
    tile: float | None = None,
    overlap: float | None = None,
    votes: int = 1,
    fill: bool = False,
    vertical: int = 2,
    progress: Callable[[int, int], None] | None = None,
) -> Segmented:
    """Return the class of each point of a scan of any size.

    With ``tile`` the net runs on one square of the ground plan after another, and the
    memory is that of the points and the largest tile. Neighbouring tiles share a strip
    of width ``overlap``. A point in the strip gets its label from the tile whose border
    is farther away.

    Tiles have the voxels of the whole scan. Labels are those of the whole scan if half
    of ``overlap`` is at least the radius of the receptive field, and if no feature
    depends on the extent of the scan. Heights and centred coordinates do: they count
    from the tile.

    With ``votes`` the net runs on several views of the points, and the label is the
    class with the largest sum of probabilities. The views are the four quarter turns
    around the vertical axis, the same at the scales 0.95 and 1.05, then the mirror
    images of all these. Twelve votes are the distinct views of Pointcept's tester for
    ScanNet.

    Args:
        net: a ``Segmentor`` in evaluation mode, with a recipe in ``about``.
        points: (P, 3) float array of NumPy or MLX, all finite.
        attributes: arrays by name, as for ``VoxelRecipe``; normals turn with a view.
        tile: edge of a tile, overlap included, in the unit of the points; by default
            the whole scan is one tile.
        overlap: width of the strip that neighbouring tiles share; by default a fifth of
            ``tile``.
        votes: number of views, 1 to 24.
        fill: whether a missing attribute is replaced by zeros.
        vertical: the axis of ``points`` that points up: 0, 1 or 2.
        progress: called with the number of finished runs of the net and the number of
            all runs, before the first run and after each.

    Raises:
        TypeError: ``net`` is not a ``Segmentor``.
        ValueError: there are no points, a value is not finite, ``tile`` is not larger
            than ``overlap``, scores are NaN, or as for ``VoxelRecipe``.

    Examples:
        >>> net = models.SpUNet(1, 2, 8, (8, 8), layers=(1, 1)).eval()
        >>> net.about = models.About(models.VoxelRecipe(0.1), ("floor", "wall"))
        >>> points = mx.random.uniform(shape=(50, 3))
        >>> found = models.segment_points(net, points, tile=0.6, votes=4)
        >>> found.labels.shape, found.tiles
        ((50,), 4)
    """
    if not isinstance(net, Segmentor):
        raise TypeError(
            f"net must be a models.Segmentor; got {type(net).__name__}. Subclass "
            "models.Segmentor in place of nn.Module, and set the net's about"
        )
    recipe = net.recipe()
    points, values = _arrays(points, attributes or {}, recipe.features)
    if vertical not in (0, 1, 2):
        raise ValueError(f"vertical must be 0, 1 or 2; got {vertical}")
    if not isinstance(votes, int) or not 1 <= votes <= len(VIEWS):
        raise ValueError(f"votes must be 1 to {len(VIEWS)}; got {votes}")
    ground = [axis for axis in range(3) if axis != vertical]
    tiles = Tiles(points, tile, overlap, ground, recipe.voxel_size)
    views = [(view.matrix(ground), np.float32(view.scale)) for view in VIEWS[:votes]]
    box = np.stack([points.min(axis=0), points.max(axis=0)])
    white = _white(values.get("colours"))
    labels = np.empty(len(points), np.int32)
    confidence = np.empty(len(points), np.float32)
    classes = voxel_count = runs = 0
    for part in tiles:
        places = points[part.rows]
        own = {name: value[part.rows] for name, value in values.items()}
        if "colours" in own:  # a dark tile does not show which value is white
            own["colours"] = own["colours"].astype(np.float32) / white
        total: mx.array | None = None
        for matrix, scale in views:
            turned = dict(own)
            if "normals" in own:
                turned["normals"] = own["normals"] @ matrix
            corners = np.sort(box @ matrix * scale, axis=0)
            voxels = recipe(places @ matrix * scale, turned, fill=fill, box=corners)
            if progress is not None and not runs:
                progress(0, len(tiles) * votes)
            scores = net.score_voxels(voxels).astype(mx.float32)
            chances = mx.softmax(scores, axis=1)
            rows: Any = mx.array(np.array(voxels.rows)[part.inner])
            if votes > 1:
                each = chances[rows]
                chances = total = each if total is None else total + each
                scores, rows = total, slice(None)
            mx.eval(chances)
            runs += 1
            if progress is not None:
                progress(runs, len(tiles) * votes)
        best = mx.max(chances, axis=1)[rows] / votes
        check_scores(best)
        labels[part.core] = np.array(mx.argmax(scores, axis=1)[rows])
        confidence[part.core] = np.array(best)
        classes, voxel_count = scores.shape[1], voxel_count + len(voxels.x)
        del voxels, scores, chances, total, best
        mx.clear_cache()
    return Segmented(labels, confidence, classes, voxel_count, len(tiles))


def _arrays(points, attributes, features) -> tuple[np.ndarray, dict[str, np.ndarray]]:
    """Return points and the attributes that the net reads in NumPy, all finite."""
    points = np.asarray(points)
    if points.dtype not in (np.float32, np.float64):
        points = points.astype(np.float32)
    if points.ndim != 2 or points.shape[1] != 3 or not len(points):
        raise ValueError(
            f"points must have shape (P, 3), P from 1 on; got {points.shape}"
        )
    names = [name for name in features if name in ATTRIBUTES]
    values = {
        name: np.asarray(attributes[name])
        for name in names
        if attributes.get(name) is not None
    }
    for name, value in {"coordinates": points, **values}.items():
        if len(value) != len(points):
            raise ValueError(
                f"{name} must have a row for each of the {len(points):,} points; got "
                f"shape {value.shape}"
            )
        # Sums are not finite if a value is not; they need no array of their own.
        if value.dtype.kind == "f" and not np.isfinite(value.sum(dtype=np.float64)):
            raise ValueError(
                f"{name} must be finite, since each point gets a label: leave the "
                "other points out, as io.read_points does"
            )
    return points, values


def _white(colours: np.ndarray | None) -> np.float32:
    """Return the value of white in a scan's colours."""
    if colours is None:
        return np.float32(1)
    return np.float32(white_of(mx.array(colours.max().reshape(1))))


# Views, and tiles


class View(NamedTuple):
    """A turn by quarters around the vertical axis, a mirror image, and a scale."""

    turns: int
    mirrored: bool
    scale: float

    def matrix(self, ground: Sequence[int]) -> np.ndarray:
        """Return the (3, 3) float32 matrix for rows of points, without the scale."""
        matrix, (a, b) = np.eye(3, dtype=np.float32), ground
        cos, sin = ((1, 0), (0, 1), (-1, 0), (0, -1))[self.turns]
        sign = -1 if self.mirrored else 1
        matrix[a, a], matrix[a, b] = sign * cos, sign * sin
        matrix[b, a], matrix[b, b] = -sin, cos
        return matrix


VIEWS = [
    View(turns, mirrored, scale)
    for mirrored in (False, True)
    for scale in (1.0, 0.95, 1.05)
    for turns in range(4)
]


class Part(NamedTuple):
    """The points of a tile: indices, or slices if it is the whole scan."""

    rows: Any  # in the scan: the points that the net reads
    inner: Any  # in rows: the points that get their label from this tile
    core: Any  # in the scan: the same points


class Tiles:
    """The squares of the ground plan that have points, and the points of each.

    Holds an index of 8 bytes for each point.
    """

    tile: float
    overlap: float
    step: float

    def __init__(
        self,
        points: np.ndarray,
        tile: float | None,
        overlap: float | None,
        ground: Sequence[int],
        voxel_size: float,
    ):
        self.points: np.ndarray = points
        self.ground: Sequence[int] = ground
        self.slices: dict[int, slice] | None = None  # of order, by tile
        if tile is None:
            if overlap is not None:
                raise ValueError("overlap needs tile, the edge of a tile")
            return
        self.tile = tile = real(tile, "tile")
        self.overlap = overlap = real(
            tile / 5 if overlap is None else overlap, "overlap"
        )
        self.step = step = tile - overlap
        if overlap < 0 or step < voxel_size:
            raise ValueError(
                f"tile must be larger than overlap by a voxel of {voxel_size:g} or "
                f"more, and overlap 0 or more; got tile {tile:g}, overlap {overlap:g}"
            )
        flat = [points[:, axis] for axis in ground]
        self.low: list[float] = [float(column.min()) for column in flat]
        spans = [
            float(column.max()) - low
            for column, low in zip(flat, self.low, strict=True)
        ]
        count = [max(1, int(np.ceil((span - overlap) / step))) for span in spans]
        self.columns: int = count[1]
        key = np.zeros(len(points), np.int32 if count[0] * count[1] < 2**31 else int)
        for column, low, n in zip(flat, self.low, count, strict=True):
            at = np.floor((column - (low + overlap / 2)) / step)
            key *= n
            key += np.clip(at, 0, n - 1).astype(key.dtype)
        self.order: np.ndarray = np.argsort(key, kind="stable")
        keys, counts = np.unique(key, return_counts=True)
        ends = np.cumsum(counts)
        self.slices = {
            int(k): slice(int(end - n), int(end))
            for k, end, n in zip(keys, ends, counts, strict=True)
        }

    def __len__(self) -> int:
        return 1 if self.slices is None else len(self.slices)

    def __iter__(self) -> Iterator[Part]:
        if self.slices is None:
            yield Part(slice(None), slice(None), slice(None))
            return
        rings = int(np.ceil(self.overlap / 2 / self.step))
        near = range(-rings, rings + 1)
        for key, piece in self.slices.items():
            own, at = self.order[piece], divmod(key, self.columns)
            parts = [own]
            for i in near:
                for j in near:
                    row, column = at[0] + i, at[1] + j
                    if (i or j) and 0 <= column < self.columns:
                        piece = self.slices.get(row * self.columns + column, slice(0))
                        parts.append(self._inside(self.order[piece], at))
            rows = np.sort(np.concatenate(parts))  # in the scan's order
            yield Part(rows, np.searchsorted(rows, own), own)

    def _inside(self, rows: np.ndarray, at: tuple[int, int]) -> np.ndarray:
        """Return the rows whose points lie in the square of a tile."""
        inside = np.ones(len(rows), bool)
        for axis, low, n in zip(self.ground, self.low, at, strict=True):
            start = low + n * self.step
            column = self.points[rows, axis]
            inside &= (column >= start) & (column <= start + self.tile)
        return rows[inside]
