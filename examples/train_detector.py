#!/usr/bin/env python3
"""Teach a small VoxelNeXt to find cars and persons; write a folder for detect.

    examples/train_detector.py scan.ply --out finder
    mlx-lattice detect finder/scene.ply --model finder

No labels are needed: made-up cars and persons are put on the ground of a real scan. A
ray of the scanner that meets one before its point ends there instead, so they stand in
the scan as the scanner would have seen them, with shadows behind. Each step has other
objects at other places, and so have the scenes that the net is scored by; the scan
around them is the same, so it says nothing about scans of other places. ``scene.ply``
is one of those that it is scored by. Without a file it looks at a street that it makes
up.
"""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import NamedTuple

import mlx.core as mx
import mlx.nn
import mlx.optimizers as optim
import numpy as np
from tqdm.auto import trange

from mlx_lattice import io, models, nn, ops

# Extents along, across and up, and colours.
CLASSES = {"car": (4.2, 1.8, 1.5), "person": (0.7, 0.7, 1.7)}
COLOURS = (31, 119, 180), (214, 39, 40)
FAR = 16  # metres from the scanner


class Scene(NamedTuple):
    """Points, and boxes of the objects among them."""

    points: np.ndarray  # (P, 3)
    boxes: np.ndarray  # (M, 7)
    labels: np.ndarray  # (M,)


def street(count=20_000) -> np.ndarray:
    """What a scanner sees of a street with walls, where no scan is given."""
    rng = np.random.default_rng(0)
    turn, down = rng.uniform(-np.pi, np.pi, count), rng.uniform(-0.35, 0.15, count)
    rays = np.stack([np.cos(turn), np.sin(turn), np.tan(down)], axis=1)
    ground = np.where(rays[:, 2] < 0, -1.7 / np.minimum(rays[:, 2], -1e-6), np.inf)
    walls = np.minimum(14 / np.abs(rays[:, 0]), 11 / np.abs(rays[:, 1]))
    return rays * np.minimum(ground, walls)[:, None]


def places(points: np.ndarray) -> np.ndarray:
    """Return (N, 3) places on the ground: level, and with points around."""
    cells = np.floor(points[:, :2] / 1.2).astype(int)
    _, group, count = np.unique(cells, axis=0, return_inverse=True, return_counts=True)
    group, made = group.reshape(-1), []
    for i in np.flatnonzero(count >= 6):
        own = points[group == i]
        if np.ptp(own[:, 2]) < 0.35:
            made.append([*own[:, :2].mean(axis=0), own[:, 2].min()])
    return np.array(made)


def placed(points, ground, rng, count) -> Scene:
    """Put objects onto places of the ground, and end rays on them."""
    made: list[list[float]] = []
    labels: list[int] = []
    for _ in range(20 * count):
        if len(made) == count:
            break
        x, y, z = ground[rng.integers(len(ground))]
        x, y = (x, y) + rng.uniform(-0.5, 0.5, 2)
        label = int(rng.random() < 0.4)
        size = np.array(list(CLASSES.values())[label]) * rng.uniform(0.85, 1.15)
        apart = [np.hypot(x - b[0], y - b[1]) for b in made]
        if 3 < np.hypot(x, y) < FAR and min(apart, default=9) > 3.5:
            # Turned by a half, or a person by a quarter, an object looks the same.
            turn = rng.uniform(-np.pi, np.pi) / (2, 4)[label]
            made.append([x, y, z + size[2] / 2, *size, turn])
            labels.append(label)
    boxes = np.array(made).reshape(-1, 7)
    reach = np.ones(len(points))
    for box, label in zip(boxes, labels, strict=True):
        for part in (box, cabin(box)) if label == 0 else (box,):
            reach = np.minimum(reach, ends(points, part, label))
    seen = points * reach[:, None]
    seen += (reach < 1)[:, None] * rng.normal(0, 0.01, seen.shape)
    # An object that hardly a ray meets is nobody's to find.
    hits = [(inside(seen, box) & (reach < 1)).sum() for box in boxes]
    keep = np.array(hits, int) >= 20
    return Scene(seen, boxes[keep], np.array(labels, int)[keep])


def cabin(box: np.ndarray) -> np.ndarray:
    """Return the upper part of a car, whose lower part leaves room for it."""
    upper = box * (1, 1, 1, 0.55, 0.9, 0.5, 1)
    upper[2] += 0.25 * box[5]
    return upper


def local(points, box) -> np.ndarray:
    """Return positions in the frame of a box."""
    c, s = np.cos(box[6]), np.sin(box[6])
    away = points - box[:3]
    x, y = c * away[:, 0] + s * away[:, 1], c * away[:, 1] - s * away[:, 0]
    return np.stack([x, y, away[:, 2]], axis=1)


def ends(points, box, label) -> np.ndarray:
    """Return how far each ray from 0 goes, of its length, before it meets a box."""
    half = box[3:6] / 2
    low, high = -half.copy(), half
    if label == 0 and box[5] > 1:  # the lower part of a car
        high = half * (1, 1, 0.1)
    start, end = local(np.zeros((1, 3)), box), local(points, box)
    step = np.where(np.abs(end - start) < 1e-9, 1e-9, end - start)
    a, b = (low - start) / step, (high - start) / step
    enter, leave = np.minimum(a, b).max(axis=1), np.maximum(a, b).min(axis=1)
    return np.where((enter < leave) & (enter > 0) & (enter < 1), enter, 1.0)


def inside(points, box) -> np.ndarray:
    """Return which points are in a box, or within 5 cm of it."""
    return (np.abs(local(points, box)) <= box[3:6] / 2 + 0.05).all(axis=1)


def batch(net, scenes: list[Scene]):
    """Return voxels of scenes, their boxes and labels."""
    tensors = [net.grid(scene.points) for scene in scenes]
    boxes = [mx.array(scene.boxes.astype(np.float32)) for scene in scenes]
    return ops.batch(tensors), boxes, [mx.array(scene.labels) for scene in scenes]


def scored(net, scenes: list[Scene]) -> tuple[int, int, int]:
    """Return how many objects there are, are found, and are found where none is."""
    there = right = wrong = 0
    for scene in scenes:
        found = net.detect_points(scene.points)
        at, labels = np.array(found.boxes)[:, :2], np.array(found.labels)
        left = list(range(len(at)))
        for box, label in zip(scene.boxes, scene.labels, strict=True):
            near = [
                i
                for i in left
                if labels[i] == label and np.hypot(*(at[i] - box[:2])) < 1
            ]
            right += bool(near)
            left = [i for i in left if i not in near[:1]]
        there, wrong = there + len(scene.boxes), wrong + len(left)
    return there, right, wrong


def main() -> None:
    parser = argparse.ArgumentParser(description=str(__doc__).splitlines()[0])
    parser.add_argument("points", nargs="?", help="a scan with the scanner at 0")
    parser.add_argument("--steps", type=int, default=650)
    parser.add_argument("--voxel-size", type=float, default=0.2)
    parser.add_argument("--bits", type=int, choices=(4, 8), help="pack the weights")
    parser.add_argument("--out", type=Path, default="finder")
    given = parser.parse_args()
    points = io.read_points(given.points).points if given.points else street()
    points = points.astype(np.float64)

    size = given.voxel_size
    grid = models.GridRecipe(
        (size, size, 0.25), (-FAR, -FAR, -4, FAR, FAR, 4), ("x", "y", "z", "ones")
    )
    decoding = models.Decoding(
        score_threshold=0.3,
        limit_range=grid.point_range,
        nms_threshold=0.1,
        max_boxes=100,
    )
    mx.random.seed(0)
    heads = (("car",), ("person",))
    net = models.VoxelNeXt(grid, heads, (16, 16, 32, 32, 32), 32, decoding=decoding)
    ground = places(points)

    def loss(net, x, boxes, labels):
        return models.detection_loss(net, net(x), boxes, labels, box_weight=0.5)

    step = mlx.nn.value_and_grad(net, loss)
    rate = optim.cosine_decay(2e-3, given.steps, 1e-4)
    optimizer, rng = optim.AdamW(rate, weight_decay=1e-2), np.random.default_rng(0)
    net.train()
    for _ in (bar := trange(given.steps, unit="step", mininterval=1)):
        value, grads = step(net, *batch(net, [placed(points, ground, rng, 10)]))
        grads, _ = optim.clip_grad_norm(grads, 35)
        optimizer.update(net, grads)
        mx.eval(net.parameters(), optimizer.state)
        bar.set_postfix(loss=f"{value.item():.3f}")
    net.eval()
    rng = np.random.default_rng(1)
    scenes = [placed(points, ground, rng, 10) for _ in range(max(1, given.steps // 50))]
    there, right, wrong = scored(net, scenes)
    print(f"of {there} objects at other places {right} are found, and {wrong} wrongly")
    if given.bits:
        mlx.nn.quantize(net, 32, given.bits, class_predicate=nn.keep_float())
    net.about = models.About(None, tuple(CLASSES), COLOURS, "examples", "MIT")
    net.save_pretrained(given.out)
    columns = zip("xyz", scenes[0].points.T.astype(np.float32), strict=True)
    io.write_ply(given.out / "scene.ply", dict(columns))
    scene = given.out / "scene.ply"
    print(f"wrote {given.out}/: mlx-lattice detect {scene} --model {given.out}")


if __name__ == "__main__":
    main()
