#!/usr/bin/env python3
"""Teach a small SpUNet to tell surfaces of a scan apart; write a folder for segment.

    examples/train_segmenter.py scan.ply --voxel-size 0.3 --out surfaces
    mlx-lattice segment scan.ply --model surfaces

The labels are from a rule, so that any scan will do: level, upright, or the rest. The
net gets nothing but the voxels, and learns on one half of the scan, by x; the other
half is scored. Without a file it looks at a room that it makes up.
"""

from __future__ import annotations

import argparse
from pathlib import Path

import mlx.core as mx
import mlx.nn
import numpy as np
from tqdm import trange

import mlx_lattice as ml
from mlx_lattice import io, models, nn, ops

CLASSES = {"level": (140, 86, 75), "upright": (23, 160, 207), "rest": (44, 160, 44)}


def room(count=20_000):
    """Points of a room with a heap of things, where no scan is given."""
    rng, sides = np.random.default_rng(0), (8, 5, 2.6)
    points = rng.uniform((0, 0, 0), sides, (count, 3))
    for axis, side in enumerate(sides):
        chosen = np.arange(count) % 3 == axis
        points[chosen, axis] = np.where(rng.random(chosen.sum()) < 0.5, 0, side)
    heap = rng.uniform((0.5, 0.5, 0), (7.5, 2, 1), (count // 10, 3))
    return np.concatenate([points, heap]).astype(np.float32)


def surfaces(x: ml.SparseTensor) -> np.ndarray:
    """Label each voxel by the direction of the surface around it."""
    at = x.coords[:, 1:].astype(mx.float32)
    at = at - mx.floor(at.mean(axis=0))
    pairs = [at[:, i] * at[:, j] for i in range(3) for j in range(3)]
    each = mx.concatenate([mx.ones((len(x), 1)), at, mx.stack(pairs, axis=1)], axis=1)
    # Sums over the 5x5x5 voxels around each: a depthwise kernel of ones.
    ones = mx.ones((13, 5, 5, 5, 1))
    sums = ops.subm_conv3d(x.replace(each), ones, kernel_size=5, groups=13)
    count, sums = np.split(np.array(sums.feats, np.float64), [1], axis=1)
    mean, squares = sums[:, :3] / count, (sums[:, 3:] / count).reshape(-1, 3, 3)
    values, vectors = np.linalg.eigh(squares - mean[:, :, None] * mean[:, None])
    flat = (values[:, 0] < 0.25 * values[:, 1]) & (count[:, 0] > 6)
    steep = np.abs(vectors[:, 2, 0])  # of the direction in which it is thinnest
    return np.where(flat & (steep > 0.85), 0, np.where(flat & (steep < 0.35), 1, 2))


def turned(x: ml.SparseTensor) -> list[ml.SparseTensor]:
    """Return the scan turned by quarters about z, and mirrored: the same rows."""
    batch, a, b, z = mx.split(x.coords, 4, axis=1)
    sides = [
        (s * p, t * q) for p, q in ((a, b), (b, a)) for s in (1, -1) for t in (1, -1)
    ]
    return [
        ml.SparseTensor(mx.concatenate([batch, p, q, z], axis=1), x.feats)
        for p, q in sides
    ]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("points", nargs="?", help="a point-cloud file")
    parser.add_argument("--voxel-size", type=float, default=0.1)
    parser.add_argument("--steps", type=int, default=80)
    parser.add_argument("--bits", type=int, choices=(4, 8), help="pack the weights")
    parser.add_argument("--out", type=Path, default="surfaces")
    given = parser.parse_args()
    points = io.read_points(given.points).points if given.points else room()
    recipe = models.VoxelRecipe(given.voxel_size, ("ones",), from_zero=True)
    x, _ = recipe(points)
    labels = surfaces(x)
    middle = int(np.median(np.array(x.coords[:, 1])))
    taught = np.array(x.coords[:, 1]) < middle

    mx.random.seed(0)
    net = models.SpUNet(1, len(CLASSES), 32, (32, 64, 64, 32), layers=(1, 1, 1, 1))
    counts = np.bincount(labels[taught], minlength=len(CLASSES))
    rare = mx.array((counts.sum() / np.maximum(counts, 1)) ** 0.5)
    y = mx.array(labels)
    weights = mx.array(taught) * rare[y]

    def loss(net, x):
        each = mlx.nn.losses.cross_entropy(net(x).feats, y, reduction="none")
        return (each * weights).sum() / weights.sum()

    step, optimizer = mlx.nn.value_and_grad(net, loss), ml.optimizers.Adam(3e-3)
    net.train()
    scans = turned(x)
    for i in (bar := trange(given.steps, unit="step", mininterval=1)):
        value, grads = step(net, scans[i % len(scans)])
        optimizer.update(net, grads)
        mx.eval(net.parameters(), optimizer.state)
        bar.set_postfix(loss=f"{value.item():.3f}", refresh=False)
    net.eval()
    found = np.array(mx.argmax(net(x).feats, axis=1))
    right = (found == labels)[~taught].mean()
    print(f"{len(x):,} voxels; {right:.1%} right in the half that was not taught")
    if given.bits:
        mlx.nn.quantize(net, 32, given.bits, class_predicate=nn.keep_float())
    colours = tuple(CLASSES.values())
    net.about = models.About(recipe, tuple(CLASSES), colours, "examples", "MIT")
    net.save_pretrained(given.out)
    print(f"wrote {given.out}/: mlx-lattice segment SCAN --model {given.out}")


if __name__ == "__main__":
    main()
