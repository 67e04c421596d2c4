#!/usr/bin/env python3
"""Teach a small SpUNet to tell surfaces of scans apart; write a folder for segment.

    examples/train_segmenter.py scan.ply --voxel-size 0.3 --out surfaces
    mlx-lattice segment scan.ply --model surfaces

The labels are from a rule, so that any scan will do: level, upright, or the rest. The
net gets nothing but the voxels, and learns on one half of each scan, by x; the other
half is scored. Without a file it looks at a room that it makes up. ``--schemes`` prints
the share that is right in float32, with packed weights and in integers.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import NamedTuple

import mlx.core as mx
import mlx.nn
import mlx.optimizers as optim
import numpy as np
from tqdm.auto import tqdm

from mlx_lattice import SparseTensor, io, models, nn, ops
from mlx_lattice.commands.demo import fitting_voxel_size, score_table, scores

CLASSES = {"level": (140, 86, 75), "upright": (23, 160, 207), "rest": (44, 160, 44)}


class Scan(NamedTuple):
    """A scan as voxels, the label of each, and whether it is for training."""

    x: SparseTensor
    labels: np.ndarray
    taught: np.ndarray
    voxel_size: float


def room(count: int = 20_000) -> np.ndarray:
    """Return points of a made-up room with a heap of things."""
    rng, sides = np.random.default_rng(0), (8, 5, 2.6)
    points = rng.uniform((0, 0, 0), sides, (count, 3))
    for axis, side in enumerate(sides):
        chosen = np.arange(count) % 3 == axis
        points[chosen, axis] = np.where(rng.random(chosen.sum()) < 0.5, 0, side)
    heap = rng.uniform((0.5, 0.5, 0), (7.5, 2, 1), (count // 10, 3))
    return np.concatenate([points, heap]).astype(np.float32)


def surfaces(x: SparseTensor) -> np.ndarray:
    """Label each voxel by the direction of the surface around it."""
    at = x.coords[:, 1:].astype(mx.float32)
    at = at - mx.floor(at.mean(axis=0))
    pairs = [at[:, i] * at[:, j] for i in range(3) for j in range(3)]
    each = mx.concatenate([mx.ones((len(x), 1)), at, mx.stack(pairs, axis=1)], axis=1)
    # Sums over the 5x5x5 voxels around each: a depthwise kernel of ones.
    ones = mx.ones((13, 5, 5, 5, 1))
    sums = ops.subm_conv3d(x.replace(each), ones, kernel_size=5, groups=13)
    count, found = np.split(np.array(sums.feats, np.float64), [1], axis=1)
    mean, squares = found[:, :3] / count, (found[:, 3:] / count).reshape(-1, 3, 3)
    values, vectors = np.linalg.eigh(squares - mean[:, :, None] * mean[:, None])
    flat = (values[:, 0] < 0.25 * values[:, 1]) & (count[:, 0] > 6)
    steep = np.abs(vectors[:, 2, 0])  # of the direction in which it is thinnest
    return np.where(flat & (steep > 0.85), 0, np.where(flat & (steep < 0.35), 1, 2))


def recipe(voxel_size: float) -> models.VoxelRecipe:
    """Return the net's recipe: voxels alone."""
    return models.VoxelRecipe(voxel_size, ("ones",), from_zero=True)


def labelled(points: np.ndarray, voxel_size: float) -> Scan:
    """Return a scan with its labels; the half with smaller x is for training.

    Raises:
        ValueError: one of the halves has no voxel.
    """
    x, _ = recipe(voxel_size)(points)
    first = np.array(x.coords[:, 1])
    taught = first < (int(np.median(first)) if len(first) else 0)
    if not taught.any():
        raise ValueError(
            "a scan needs voxels at several x, of which one half is taught and the "
            f"other scored; this one has {len(first)} at one. Use another scan, or a "
            "smaller voxel size"
        )
    return Scan(x, surfaces(x), taught, voxel_size)


def turned(x: SparseTensor) -> list[SparseTensor]:
    """Return the scan turned by quarters about z, and mirrored: the same rows."""
    batch, a, b, z = mx.split(x.coords, 4, axis=1)
    sides = [
        (s * p, t * q) for p, q in ((a, b), (b, a)) for s in (1, -1) for t in (1, -1)
    ]
    return [
        SparseTensor(mx.concatenate([batch, p, q, z], axis=1), x.feats)
        for p, q in sides
    ]


def untaught() -> models.SpUNet:
    """Return the net: two levels of one block each."""
    return models.SpUNet(1, len(CLASSES), 32, (32, 64, 64, 32), layers=(1, 1, 1, 1))


def teach(
    net: mlx.nn.Module,
    scans: Sequence[Scan],
    steps: int,
    tell: Callable[[float], None] = lambda loss: None,
) -> None:
    """Train a net, on one turned scan in each step; rare classes count more.

    ``tell`` is called with the loss of each step.
    """
    shown = []
    for scan in scans:
        counts = np.bincount(scan.labels[scan.taught], minlength=len(CLASSES))
        rare = mx.array((counts.sum() / np.maximum(counts, 1)) ** 0.5)
        y = mx.array(np.where(scan.taught, scan.labels, -1))
        shown.append((turned(scan.x), y, rare))

    def loss(net, x, y, rare):
        return nn.losses.cross_entropy(net(x), y, weight=rare)

    step, optimizer = mlx.nn.value_and_grad(net, loss), optim.Adam(3e-3)
    net.train()
    for i in range(steps):
        sides, y, rare = shown[i % len(shown)]
        x = sides[i // len(shown) % len(sides)]
        value, grads = step(net, x, y, rare)
        optimizer.update(net, grads)
        mx.eval(net.state, optimizer.state)
        tell(value.item())
    net.eval()


def right(net: mlx.nn.Module, scans: Sequence[Scan]) -> float:
    """Return the share of right voxels in the halves that were not trained on."""
    net.eval()
    score = nn.metrics.ConfusionMatrix(tuple(CLASSES))
    for x, labels, taught, _ in scans:
        score.update(net(x), np.where(taught, -1, labels))
    return score.overall_accuracy


def read_scans(files: Sequence[Path], voxel_size: float | None) -> list[Scan]:
    """Return the scans of files with their surfaces; without files, a made-up room."""
    clouds = [(file.name, io.read_points(file).points) for file in files]
    scans = []
    for name, points in clouds or [("a room", room())]:
        points = np.asarray(points, dtype=np.float32)
        size = voxel_size or fitting_voxel_size(points)
        scans.append(labelled(points, size))
        print(f"{name}: {len(scans[-1].x):,} voxels of {size:g}, one half taught")
    return scans


def main() -> None:
    parser = argparse.ArgumentParser(description=str(__doc__).splitlines()[0])
    parser.add_argument("points", nargs="*", type=Path, help="point-cloud files")
    parser.add_argument("--voxel-size", type=float, help="by default by the scan")
    parser.add_argument("--steps", type=int, default=80)
    parser.add_argument("--bits", type=int, choices=(4, 8), help="pack the weights")
    parser.add_argument("--schemes", action="store_true", help="score each scheme")
    parser.add_argument("--out", type=Path, default="surfaces")
    options = parser.parse_args()
    scans = read_scans(options.points, options.voxel_size)
    mx.random.seed(0)
    net = untaught()
    with tqdm(total=options.steps, unit="step", mininterval=1) as bar:

        def tell(loss: float) -> None:
            bar.set_postfix(loss=f"{loss:.3f}", refresh=False)
            bar.update()

        teach(net, scans, options.steps, tell)
    print(f"{right(net, scans):.1%} right in the half that was not taught")
    if options.schemes:
        batches = [scan.x for scan in scans]
        print(score_table(scores(net, batches, lambda net: right(net, scans))))
    if options.bits:
        mlx.nn.quantize(net, 32, options.bits, class_predicate=nn.keep_float())
    colours = tuple(CLASSES.values())
    voxels = recipe(scans[0].voxel_size)
    net.about = models.About(voxels, tuple(CLASSES), colours, "examples", "MIT")
    net.save_pretrained(options.out)
    print(f"wrote {options.out}/: mlx-lattice segment SCAN --model {options.out}")


if __name__ == "__main__":
    main()
