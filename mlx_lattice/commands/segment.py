"""The command segment: colour a scan's points by class, and draw them."""

from __future__ import annotations

import time
import warnings
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import matplotlib  # here, so that a missing package is found before the net runs
import mlx.core as mx
import numpy as np

from ..cache_files import atomic_write, check_writable
from ..checks import LatticeWarning
from ..io.labelled import check_format, write_labelled
from ..io.points import READERS, PointCloud, read_points, write_ply
from ..models import Segmentor, from_pretrained
from ..models.scans import Segmented, segment_points
from ..models.voxel_recipe import of_scan, white_of
from ..scene import AXES, Scene, check_scene
from . import Result, UsageError, bar, log, progress, usage


def run(
    scan: str | Path,
    model: str | Path,
    out: str | Path = "segmented",
    *,
    tile: float | None = None,
    overlap: float | None = None,
    votes: int = 1,
    fill: bool = False,
    revision: str | None = None,
    code: str | None = None,
    columns: str = "",
    up: str = "z",
    rerun: bool = False,
) -> Result:
    """Segment a scan; write ``NAME.ply``, ``.png`` and ``.html``, return a table.

    If ``out`` has the suffix of a format of points, write a copy of the scan with
    labels instead.
    """
    check_tiles(tile, overlap)
    out, stem = Path(out), Path(scan).stem
    alone = out.suffix.lower() in READERS and not out.is_dir()
    files = (out,) if alone else names_in(out, stem, "ply", "png", "html", rerun=rerun)
    if alone:
        with usage():
            check_format(out, Path(scan))
    else:
        check_scene(*files[2:])
    check_writable(*files, read=[scan])
    net = segmentor(model, revision, code)
    cloud = read_scan(net, scan, columns, all_attributes=not alone)
    say_dropped(cloud, scan)
    begun = time.perf_counter()
    found = label_scan(
        net, cloud, scan, tile=tile, overlap=overlap, votes=votes, fill=fill, up=up
    )
    seconds = time.perf_counter() - begun
    labels, count = found.labels, found.classes
    size = net.recipe().voxel_size
    document = {
        "scan": str(scan),
        "model": str(model),
        "net": type(net).__name__,
        "points": len(labels),
        "points_left_out": cloud.dropped,
        "voxels": found.voxels,
        "voxel_size": size,
        "seconds": round(seconds, 3),
        "classes": shares(net, labels, count),
        "files": [str(path) for path in files],
    }
    log.info(
        f"{Path(scan).name}: {len(labels):,} points -> {found.voxels:,} voxels "
        f"of {size:g}; {type(net).__name__} from {model}"
    )
    if tile is not None or votes > 1:
        views = f"{votes} view{'s' * (votes > 1)} of each"
        log.info(f"{found.tiles:,} tile{'s' * (found.tiles > 1)}, {views}")
    warn_of_few(cloud.points, found.voxels, size)
    warn_of_one_class(net, labels, count)
    log.info(f"{seconds:.2f} s in the net, kernel maps included")
    files[0].parent.mkdir(parents=True, exist_ok=True)
    if alone:
        labels, confidence = whole(cloud, labels, -1), whole(cloud, found.confidence, 0)
        names = write_labelled(
            out, scan, labels, confidence, classes=count, columns=columns
        )
        log.info(f"wrote {out}, with the classes as {names}")
    else:
        palette = np.array(net.about.palette(count), dtype=np.uint8)
        write(cloud, labels, found.confidence, palette, files[0])
        title, source = Path(scan).name, f"{type(net).__name__} from {model}"
        draw(cloud, labels, palette, net, files[1], up, f"{title}: {source}")
        note = f"{source}; {len(labels):,} points, {found.voxels:,} voxels of {size:g}"
        Scene(title, note, up=up).points(
            cloud.points,
            labels=labels,
            colours=scan_colours(cloud),
            classes=[net.about.label(i) for i in range(count)],
            palette=palette.tolist(),
        ).save(*files[2:])
        log.info(f"wrote {', '.join(map(str, files))}")
    return Result(table(document["classes"]), document)


def names_in(folder: Path, stem: str, *kinds: str, rerun: bool) -> tuple[Path, ...]:
    """Return the paths of files of one name in a folder, with a recording or not."""
    return tuple(folder / f"{stem}.{kind}" for kind in (*kinds, *["rrd"] * rerun))


def check_tiles(tile: float | None, overlap: float | None) -> None:
    """Raise a UsageError unless neighbouring tiles can share such a strip."""
    if overlap is not None and tile is None:
        raise UsageError("--overlap needs --tile, the edge of a tile")
    if tile is not None and (overlap or 0) >= tile:
        raise UsageError(
            "--tile must be larger than 0 and than --overlap; got "
            f"{tile:g} and {overlap or 0:g}"
        )


def segmentor(
    model: str | Path, revision: str | None = None, code: str | None = None
) -> Segmentor:
    """Return the net of a folder; raise a ValueError if it does not score points."""
    net = from_pretrained(model, revision=revision, code=code)
    if not isinstance(net, Segmentor):
        raise ValueError(
            f"{model} is a {type(net).__name__}, which does not score points. A net of "
            "your own must subclass models.Segmentor"
        )
    return net


def read_scan(
    net: Segmentor,
    scan: str | Path,
    columns: str,
    *others: str,
    all_attributes: bool = False,
) -> PointCloud:
    """Return a scan with the attributes that the net reads, and others."""
    names = None if all_attributes else {*net.recipe().features, *others}
    cloud = read_points(scan, columns, attributes=names)
    log.debug(f"{scan}: attributes {', '.join(cloud.attributes) or 'none'}")
    if not len(cloud):
        left = f": all {cloud.dropped:,} have values that are not finite"
        raise ValueError(f"{scan} holds no points{left if cloud.dropped else ''}")
    return cloud


def label_scan(
    net: Segmentor, cloud: PointCloud, scan: str | Path, *, up: str, **options: Any
) -> Segmented:
    """Run ``segment_points`` with a bar: of the layers, or of the runs of the net."""
    with of_scan(scan), ExitStack() as stack:
        shown: list[Any] = []

        def count(done: int, runs: int) -> None:
            if runs == 1 and not done:
                stack.enter_context(progress(net))
            elif not done:
                shown.append(stack.enter_context(bar(runs, Path(scan).name, "tile")))
            elif shown:
                shown[0].update()

        return segment_points(
            net,
            cloud.points,
            cloud.attributes,
            vertical="xyz".index(up[-1]),
            progress=count,
            **options,
        )


def whole(cloud: PointCloud, values: np.ndarray, other: float) -> np.ndarray:
    """Return values for all points of a file, ``other`` for those left out."""
    if cloud.rows is None:
        return values
    placed = np.full(len(cloud) + cloud.dropped, other, values.dtype)
    placed[cloud.rows] = values
    return placed


def say_dropped(cloud: PointCloud, scan: str | Path) -> None:
    """Log how many points of a file were left out, if any were."""
    if cloud.dropped:
        log.info(
            f"{Path(scan).name}: {cloud.dropped:,} points left out: a coordinate or an "
            "attribute is not finite"
        )


def warn_of_few(points: np.ndarray, voxels: int, size: float) -> None:
    """Warn if the points fall into few voxels, as in a wrong unit."""
    if voxels >= 10 and (voxels >= 1000 or len(points) < 20 * voxels):
        return
    sides = " x ".join(f"{side:.3g}" for side in np.ptp(points, axis=0))
    warnings.warn(
        f"{len(points):,} points fall into {voxels:,} voxel{'s' * (voxels != 1)}. The "
        f"scan measures {sides}, a voxel {size:g}. Scale the coordinates if their unit "
        "is not that of the net's training data (mostly metres); otherwise the net's "
        "voxels are too large for this scan",
        LatticeWarning,
        stacklevel=2,
    )


def warn_of_one_class(net: Segmentor, labels: np.ndarray, count: int) -> None:
    """Warn if nearly all points get one class."""
    counts = np.bincount(labels, minlength=count)
    if count > 1 and len(labels) > 1 and counts.max() > 0.999 * len(labels):
        warnings.warn(
            f"nearly all points get the class {net.about.label(int(counts.argmax()))}. "
            "Check that the scan's unit, upward axis and colours are those of the "
            "net's training data",
            LatticeWarning,
            stacklevel=2,
        )


def shares(net: Segmentor, labels: np.ndarray, count: int) -> list[dict[str, Any]]:
    """Return the points of each class that was found, the largest first."""
    counts = np.bincount(labels, minlength=count)
    return [
        {
            "name": net.about.label(int(i)),
            "label": int(i),
            "points": int(counts[i]),
            "share": round(counts[i] / len(labels), 6),
        }
        for i in np.argsort(-counts, kind="stable")
        if counts[i]
    ]


def table(classes: list[dict[str, Any]]) -> str:
    """Return a line for each class of ``shares``."""
    width = max(len(each["name"]) for each in classes)
    return "\n".join(
        f"  {c['name']:<{width}} {c['points']:>10,} points {c['share']:>6.1%}"
        for c in classes
    )


def write(
    cloud: PointCloud,
    labels: np.ndarray,
    confidence: np.ndarray,
    palette: np.ndarray,
    path: Path,
) -> None:
    """Write points in the file's coordinates with the colour of their class."""
    points = cloud.points
    if cloud.origin.any():
        points = points.astype(np.float64) + cloud.origin
    columns = dict(zip("xyz", points.T, strict=True))
    names = ("red", "green", "blue")
    columns |= dict(zip(names, palette[labels].T, strict=True))
    columns["label"] = labels.astype(np.uint8 if len(palette) <= 256 else np.int32)
    columns["confidence"] = confidence.astype(np.float32)
    write_ply(path, columns)


# The picture


def upright(points: np.ndarray, up: str) -> np.ndarray:
    """Return (P, 3) points turned so that z is upwards."""
    return np.stack([points[:, axis] * sign for axis, sign in AXES[up]], axis=1)


def draw(
    cloud: PointCloud,
    labels: np.ndarray,
    palette: np.ndarray,
    net: Segmentor,
    path: Path,
    up: str = "z",
    title: str = "",
) -> None:
    """Draw the scan as it is beside the scan by class, with a title and a legend."""
    matplotlib.use("Agg")
    from matplotlib import pyplot

    flat, order = seen_from(upright(cloud.points, up))
    low, high = np.percentile(flat, (0.5, 99.5), axis=0)  # far points are left out
    margin = (high - low) / 10  # which keeps the corners of a square
    low = np.maximum(low - margin, flat.min(axis=0))
    high = np.minimum(high + margin, flat.max(axis=0))
    wide = high[0] - low[0] > 1.6 * (high[1] - low[1])
    shape = (2, 1) if wide else (1, 2)
    figure, panels = pyplot.subplots(*shape, figsize=(11, 9 if wide else 5.5))
    figure.set_layout_engine("constrained")
    pictures = (("the scan", scan_colours(cloud)), ("by class", palette[labels] / 255))
    for axes, (caption, colours) in zip(np.ravel(panels), pictures, strict=True):
        scatter(axes, flat[order], colours[order], low, high)
        axes.set_title(caption)
        axes.set_axis_off()
    counts = np.bincount(labels, minlength=len(palette))
    largest = [i for i in np.argsort(-counts, kind="stable") if counts[i]][:12]
    entries = [
        (palette[i] / 255, f"{net.about.label(i)} {share(counts[i], len(labels))}")
        for i in largest
    ]
    save_figure(figure, path, "o", entries, title)


def save_figure(
    figure: Any, path: Path, marker: str, entries: list[tuple[Any, ...]], title: str
) -> None:
    """Write a figure with a title and a legend of (colour, text), and close it."""
    from matplotlib import pyplot

    figure.suptitle(title, parse_math=False)

    style = {"marker": marker, "linestyle": ""}
    marks = [pyplot.Line2D([], [], color=c, label=text, **style) for c, text in entries]
    if marks:
        figure.legend(handles=marks, loc="outside lower center", ncols=6, frameon=False)
    with atomic_write(path) as draft:
        figure.savefig(draft, dpi=110)
    pyplot.close(figure)


def share(part: int, whole: int) -> str:
    """Return a part in whole per cent; "<1%" instead of "0%"."""
    return f"{part / whole:.0%}" if 200 * part >= whole else "<1%"


def seen_from(
    points: np.ndarray, azimuth: float = -60.0, elevation: float = 40.0
) -> tuple[np.ndarray, np.ndarray]:
    """Return (P, 2) positions in a parallel view, and an order from back to front."""
    a, e = np.radians((azimuth, elevation))
    right = np.array([-np.sin(a), np.cos(a), 0])
    to_eye = np.array([np.cos(e) * np.cos(a), np.cos(e) * np.sin(a), np.sin(e)])
    up = np.cross(to_eye, right)
    centred = points.astype(np.float64) - points.mean(axis=0)
    return centred @ np.stack([right, up], axis=1), np.argsort(centred @ to_eye)


def scatter(
    axes: Any, flat: np.ndarray, colours: Any, low: np.ndarray, high: np.ndarray
) -> None:
    """Draw points as squares that cover about half of a picture; later ones on top."""
    inside = ((flat >= low) & (flat <= high)).all(axis=1)
    size = np.clip(6e4 / max(1, inside.sum()), 1, 16)
    style = {"s": size, "marker": "s", "linewidths": 0}
    axes.scatter(*flat[inside].T, c=colours[inside], **style)
    axes.set(xlim=(low[0], high[0]), ylim=(low[1], high[1]), aspect="equal")


def scan_colours(cloud: PointCloud) -> np.ndarray:
    """Return (P, 3) from 0 to 1: the scan's colours, intensity or height."""
    from matplotlib import colormaps

    colours = cloud.attributes.get("colours")
    if colours is not None:
        return np.clip(colours / white_of(mx.array(colours)), 0, 1)
    value = cloud.attributes.get("intensity", cloud.points[:, 2])
    low, high = np.percentile(value, (5, 95))
    scaled = np.clip((value - low) / max(high - low, 1e-9), 0, 1)
    # Up to where the map is dark enough for a white page.
    return colormaps["viridis"](0.9 * scaled)[:, :3]
