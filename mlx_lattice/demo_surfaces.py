"""A small net that tells surfaces of a scan apart, for the demo and an example.

The labels are from a rule, so any scan will do: level, upright, or the rest. The net
gets the voxels alone. It is trained on one half of the scan, by x, and scored on the
other half.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import NamedTuple

import mlx.core as mx
import mlx.nn
import mlx.optimizers as optim
import numpy as np

from . import ops
from .models import SpUNet
from .models.recipe import VoxelRecipe
from .tensor import SparseTensor

CLASSES = {"level": (140, 86, 75), "upright": (23, 160, 207), "rest": (44, 160, 44)}


class Scan(NamedTuple):
    """A scan as voxels, the label of each, and whether it is for training."""

    x: SparseTensor
    labels: np.ndarray
    taught: np.ndarray


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
    count, sums = np.split(np.array(sums.feats, np.float64), [1], axis=1)
    mean, squares = sums[:, :3] / count, (sums[:, 3:] / count).reshape(-1, 3, 3)
    values, vectors = np.linalg.eigh(squares - mean[:, :, None] * mean[:, None])
    flat = (values[:, 0] < 0.25 * values[:, 1]) & (count[:, 0] > 6)
    steep = np.abs(vectors[:, 2, 0])  # of the direction in which it is thinnest
    return np.where(flat & (steep > 0.85), 0, np.where(flat & (steep < 0.35), 1, 2))


def recipe(voxel_size: float) -> VoxelRecipe:
    """Return the net's recipe: voxels alone."""
    return VoxelRecipe(voxel_size, ("ones",), from_zero=True)


def voxel_size(points: np.ndarray, most: int = 7000) -> float:
    """Return a size that gives a scan at most so many voxels."""
    extent = float(np.median(np.ptp(points, axis=0)))
    size = extent / 250 if extent > 0 else 1.0
    while len(np.unique(np.floor(points / size), axis=0)) > most:
        size *= 1.2
    return float(f"{size:.2g}")


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
    return Scan(x, surfaces(x), taught)


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


def untaught() -> SpUNet:
    """Return the net: two levels of one block each."""
    return SpUNet(1, len(CLASSES), 32, (32, 64, 64, 32), layers=(1, 1, 1, 1))


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
        y = mx.array(scan.labels)
        shown.append((turned(scan.x), y, mx.array(scan.taught) * rare[y]))

    def loss(net, x, y, weights):
        each = mlx.nn.losses.cross_entropy(net(x).feats, y, reduction="none")
        return (each * weights).sum() / weights.sum()

    step, optimizer = mlx.nn.value_and_grad(net, loss), optim.Adam(3e-3)
    net.train()
    for i in range(steps):
        sides, y, weights = shown[i % len(shown)]
        x = sides[i // len(shown) % len(sides)]
        value, grads = step(net, x, y, weights)
        optimizer.update(net, grads)
        mx.eval(net.state, optimizer.state)
        tell(value.item())
    net.eval()


def right(net: mlx.nn.Module, scans: Sequence[Scan]) -> float:
    """Return the share of right voxels in the halves that were not trained on."""
    net.eval()
    good = [
        np.array(mx.argmax(net(x).feats, axis=1))[~taught] == labels[~taught]
        for x, labels, taught in scans
    ]
    return float(np.concatenate(good).mean())
