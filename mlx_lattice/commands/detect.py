"""The command detect: find boxes in a scan, write and draw them."""

from __future__ import annotations

import csv
import json
import time
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import matplotlib
import mlx.core as mx
import numpy as np

from .. import ops
from ..cache_files import atomic_write, check_writable
from ..checks import real_axes
from ..inspect.trace import drawn
from ..io.points import PointCloud, read_points
from ..models import Detector, from_pretrained
from ..models.voxel_recipe import of_scan
from ..scene import Scene, check_scene
from . import Result, log, progress, segment

COLUMNS = ("x", "y", "z", "dx", "dy", "dz", "heading", "vx", "vy")
# Boxes that a table on the screen has at most.
SHOWN = 40


def run(
    scan: str | Path,
    model: str | Path,
    out: str | Path = "detected",
    *,
    score: float | None = None,
    centre: Sequence[float] | None = None,
    fill: bool = False,
    revision: str | None = None,
    code: str | None = None,
    columns: str = "",
    rerun: bool = False,
) -> Result:
    """Find boxes; write ``NAME.csv``, a picture and a page, return a table."""
    middle = np.array(real_axes(0.0 if centre is None else centre, 3, "centre"))
    folder, stem = Path(out), Path(scan).stem
    kinds = "csv", "json", "png", "html"
    files = segment.names_in(folder, stem, *kinds, rerun=rerun)
    check_scene(*files[3:])
    check_writable(*files, read=[scan])
    net = from_pretrained(model, revision=revision, code=code)
    if not isinstance(net, Detector):
        raise ValueError(
            f"{model} is a {type(net).__name__}, which finds no boxes: expected a "
            "detector, such as models.VoxelNeXt"
        )
    if score is not None:
        decoding = replace(net.decoding, score_threshold=score)
        object.__setattr__(net, "decoding", decoding)
    cloud = read_points(scan, columns)
    points = cloud.points
    if (cloud.origin != middle).any():
        points = (points + (cloud.origin - middle)).astype(np.float32)
    with of_scan(scan):
        x = net.recipe()(points, cloud.attributes, fill=fill)
    if not len(x):
        low, high = np.array(net.grid.point_range).reshape(2, 3)
        raise ValueError(
            f"{scan} has no points in the net's range, x, y, z from {low} to {high} "
            "around the scanner. If the scanner is not at 0, pass --centre X Y Z"
        )
    segment.say_dropped(cloud, scan)
    size = " x ".join(f"{v:g}" for v in net.grid.voxel_size)
    log.info(
        f"{Path(scan).name}: {len(points):,} points -> {len(x):,} voxels of {size}; "
        f"{type(net).__name__} from {model}"
    )
    begun = time.perf_counter()
    with progress(net):
        detected = net.detect(x)[0]
        mx.eval(detected)
    seconds = time.perf_counter() - begun
    # Boxes of all heads and classes, the best first.
    order = ops.sort_scores(detected.scores)
    boxes = np.array(detected.boxes[order])
    labels, scores = np.array(detected.labels[order]), np.array(detected.scores[order])
    rows = described(net, boxes, labels, scores, middle)
    log.info(f"{len(rows)} boxes; {seconds:.2f} s in the net, kernel maps included")
    folder.mkdir(parents=True, exist_ok=True)
    document = described_net(net, rows, str(model))
    write(net, document, files[0], files[1])
    flat = PointCloud(points, cloud.attributes)
    title, least = Path(scan).name, net.decoding.score_threshold
    note = f"{type(net).__name__} from {model}; {len(rows)} boxes with a score above "
    note += f"{least:g}"
    draw(flat, net, boxes, labels, scores, files[2], f"{title}: {note}")
    about = {"classes": net.classes, "palette": net.about.palette(len(net.classes))}
    scene = Scene(title, note).points(points, colours=segment.scan_colours(flat))
    scene.boxes(boxes, scores=scores, labels=labels, **about).save(*files[3:])
    log.info(f"wrote {', '.join(map(str, files))}")
    document = {
        "scan": str(scan),
        "points": len(points),
        "voxels": len(x),
        "seconds": round(seconds, 3),
        "files": [str(path) for path in files],
        **document,
    }
    return Result(table(net, rows), document)


def described(
    net: Detector,
    boxes: np.ndarray,
    labels: np.ndarray,
    scores: np.ndarray,
    middle: np.ndarray,
) -> list[dict[str, Any]]:
    """Return a dict for each box, in the coordinates of the file."""
    rows = []
    for box, label, score in zip(boxes.astype(float), labels, scores, strict=True):
        at = [*(box[:3] + middle), *box[3:]]
        numbers = dict(zip(COLUMNS, (round(v, 4) for v in at), strict=False))
        name = net.classes[label]
        rows.append({"class": name, "score": round(float(score), 4), **numbers})
    return rows


def table(net: Detector, rows: list[dict[str, Any]]) -> str:
    """Return a line for each box, the best first, as many as fit a screen."""
    if not rows:
        threshold = net.decoding.score_threshold
        return f"  no box has a score above {threshold:g}; --score sets another"
    names = list(rows[0])
    columns = [(name, "left" if name == "class" else "right") for name in names]
    cells = [
        [v if isinstance(v, str) else f"{v:.2f}" for v in row.values()]
        for row in rows[:SHOWN]
    ]
    more = f"\n  ... and {len(rows) - SHOWN} more in the files"
    return drawn(columns, cells) + (more if len(rows) > SHOWN else "")


def described_net(
    net: Detector, rows: list[dict[str, Any]], model: str
) -> dict[str, Any]:
    """Return boxes with the net's settings."""
    return {
        "model": model,
        "classes": list(net.classes),
        "voxel_size": list(net.grid.voxel_size),
        "score_threshold": net.decoding.score_threshold,
        "boxes": rows,
    }


def write(net: Detector, document: dict[str, Any], table: Path, whole: Path) -> None:
    """Write boxes as CSV, and as JSON with the net's settings."""
    width = 9 if any(n == "vel" for n in net.dense_head.heads_list[0]) else 7
    with (
        atomic_write(table) as draft,
        draft.open("w", newline="", encoding="utf-8") as file,
    ):
        writer = csv.DictWriter(file, ("class", "score", *COLUMNS[:width]))
        writer.writeheader()
        writer.writerows(document["boxes"])
    text = json.dumps(document, indent=1, ensure_ascii=False)
    with atomic_write(whole) as draft:
        draft.write_text(text + "\n", encoding="utf-8")


# The picture


def draw(
    cloud: PointCloud,
    net: Detector,
    boxes: np.ndarray,
    labels: np.ndarray,
    scores: np.ndarray,
    path: Path,
    title: str,
) -> None:
    """Draw the scan from above and the boxes with their scores; title and legend."""
    matplotlib.use("Agg")
    from matplotlib import pyplot

    low, high = shown(cloud.points, boxes, net.grid.point_range)
    span = high - low
    wide = 11 * min(1.0, span[0] / span[1])
    figure, axes = pyplot.subplots(
        figsize=(max(5.0, wide), 0.8 + wide * span[1] / span[0])
    )
    figure.set_layout_engine("constrained")
    order = np.argsort(cloud.points[:, 2], kind="stable")
    grey = 0.35 + 0.5 * (
        1 - segment.scan_colours(cloud)[order].mean(axis=1, keepdims=True)
    )
    grey = np.repeat(grey, 3, axis=1)
    segment.scatter(axes, cloud.points[order, :2], grey, low, high)
    palette = np.array(net.about.palette(len(net.classes))) / 255
    corners = np.array(ops.box_corners(mx.array(boxes))) if len(boxes) else []
    for box, corner, label, score in zip(boxes, corners, labels, scores, strict=True):
        colour = palette[label]
        axes.fill(*corner.T, facecolor=(*colour, 0.25), edgecolor=colour, linewidth=1.6)
        ahead = corner[1:3].mean(axis=0)  # the middle of the front
        axes.plot(*np.stack([box[:2], ahead]).T, color=colour, linewidth=1.6)
        axes.annotate(
            f"{score:.2f}",
            corner[corner[:, 1].argmax()],
            xytext=(2, 2),
            textcoords="offset points",
            color=colour,
            fontsize=8,
            annotation_clip=True,
        )
    axes.set(xlabel="x", ylabel="y")
    entries = [
        (palette[i], f"{name} {(labels == i).sum()}")
        for i, name in enumerate(net.classes)
    ]
    segment.save_figure(figure, path, "s", entries, title)


def shown(
    points: np.ndarray, boxes: np.ndarray, point_range: Sequence[float]
) -> tuple[np.ndarray, np.ndarray]:
    """Return the corners of a picture: the points and boxes within the net's range."""
    low, high = np.array(point_range)[[0, 1]], np.array(point_range)[[3, 4]]
    flat = points[:, :2]
    flat = flat[((flat >= low) & (flat <= high)).all(axis=1)]
    if len(flat):
        ends = np.percentile(flat, (0.2, 99.8), axis=0)
        if len(boxes):
            reach = np.hypot(boxes[:, 3], boxes[:, 4])[:, None] / 2 + 1
            ends[0] = np.minimum(ends[0], (boxes[:, :2] - reach).min(axis=0))
            ends[1] = np.maximum(ends[1], (boxes[:, :2] + reach).max(axis=0))
        low, high = np.maximum(low, ends[0]), np.minimum(high, ends[1])
    return low, np.maximum(high, low + 1)
