"""The demo: train a sparse 3D net on real digits, or inspect a scan from a file."""

from __future__ import annotations

import copy
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import NamedTuple

import mlx.core as mx
import mlx.nn
import mlx.optimizers as optim
import numpy as np
import sklearn.datasets
import sklearn.model_selection
from mlx.utils import tree_flatten
from tqdm import tqdm, trange

from .. import nn, ops
from ..inspect.trace import check_page, trace
from ..io import read_points
from ..io.safetensors import write_safetensors
from ..kept_files import check_writable
from ..models import MinkUNet14, SpUNet
from ..models.pretrained import VoxelRecipe
from ..nn.calibrate import calibrate
from ..optimizers import Adam
from ..tensor import SparseTensor

GROUP = 32  # input channels that share a scale, if weights have groups
# Bits of weights and of features, by name.
SCHEMES = {
    "float32": (None, None),
    "int8 weights": (8, None),
    "int4 weights": (4, None),
    "W8A8": (8, 8),
    "W4A8": (4, 8),
}
# Percentage points of accuracy that a scheme may lose; tests check them.
MOST_LOST = {"int8 weights": 0.3, "int4 weights": 1.5, "W8A8": 0.5, "W4A8": 1.5}


class DigitNet(mlx.nn.Module):
    """Three scales of sparse convolution, a global pool and a linear head."""

    def __init__(self, classes: int = 10):
        super().__init__()
        self.stem = nn.Sequential(
            nn.SubmConv3d(1, 16, 3, bias=False), nn.BatchNorm(16), nn.ReLU()
        )
        self.down1 = nn.Sequential(
            nn.Conv3d(16, 32, 2, stride=2, bias=False), nn.BatchNorm(32), nn.ReLU()
        )
        self.block1 = nn.Sequential(
            nn.SubmConv3d(32, 32, 3, bias=False), nn.BatchNorm(32), nn.ReLU()
        )
        self.down2 = nn.Sequential(
            nn.Conv3d(32, 64, 3, stride=2, bias=False), nn.BatchNorm(64), nn.ReLU()
        )
        self.head = mlx.nn.Linear(64, classes)

    def __call__(self, x: SparseTensor) -> mx.array:
        """Return (batch, classes) logits."""
        x = self.down1(self.stem(x))
        x = self.down2(x + self.block1(x))
        return self.head(ops.global_max_pool(x))


def digit_voxels(image: np.ndarray) -> np.ndarray:
    """Lift an (8, 8) image to (N, 3) sorted voxels.

    Pixel (x, y) of intensity v becomes (x, y, 0..v); intensity 0 gives no voxel.
    """
    heights = image.astype(np.int64)
    z = np.arange(heights.max() + 1)
    filled = (heights[..., None] > 0) & (z <= heights[..., None])
    return np.argwhere(filled).astype(np.int32)


def digit_batch(voxels: list[np.ndarray]) -> SparseTensor:
    """Join digits into one tensor of ones, a batch element each."""
    index = np.repeat(np.arange(len(voxels), dtype=np.int32), [len(v) for v in voxels])
    coords = np.concatenate([index[:, None], np.concatenate(voxels)], axis=1)
    feats = mx.ones((len(coords), 1))
    return SparseTensor(mx.array(coords), feats, batch_size=len(voxels))


def load_digits(seed: int = 0):
    """Return (voxels, labels) of the train and of the held-out test digits.

    The data are the 1 797 handwritten digits that scikit-learn ships.
    """
    data = sklearn.datasets.load_digits()
    train, test, train_labels, test_labels = sklearn.model_selection.train_test_split(
        data.images,
        data.target,
        test_size=0.25,
        stratify=data.target,
        random_state=seed,
    )
    lift = [[digit_voxels(i) for i in images] for images in (train, test)]
    return (lift[0], train_labels), (lift[1], test_labels)


def predict(net: mlx.nn.Module, voxels: list, batch_size: int = 64) -> np.ndarray:
    """Return the class of every digit."""
    net.eval()
    found = []
    for start in range(0, len(voxels), batch_size):
        logits = net(digit_batch(voxels[start : start + batch_size]))
        found.append(np.array(mx.argmax(logits, axis=1)))
    return np.concatenate(found)


def loss_of(net: mlx.nn.Module, x: SparseTensor, y: mx.array) -> mx.array:
    """Return the mean cross entropy of a batch of digits."""
    return mlx.nn.losses.cross_entropy(net(x), y, reduction="mean")


def train(net, voxels, labels, epochs: int, batch_size: int, seed: int, show=True):
    """Train with Adam on shuffled batches; return the seconds of each step."""
    steps = epochs * (len(voxels) // batch_size)
    schedule = optim.cosine_decay(3e-3, steps)
    optimizer = Adam(learning_rate=schedule)

    step = mlx.nn.value_and_grad(net, loss_of)
    rng, seconds = np.random.default_rng(seed), []
    net.train()
    # Redraw the bar often on a terminal, seldom in a log file.
    interval = 0.2 if sys.stderr.isatty() else 20
    with tqdm(total=steps, unit="step", mininterval=interval, disable=not show) as bar:
        for _ in range(epochs):
            order = rng.permutation(len(voxels))
            for at in range(0, len(order) - batch_size + 1, batch_size):
                begin = time.perf_counter()
                chosen = order[at : at + batch_size]
                # Shifted by up to one pixel: the lattice has no border to cut digits.
                shifts = np.zeros((batch_size, 3), dtype=np.int32)
                shifts[:, :2] = rng.integers(-1, 2, (batch_size, 2))
                pairs = zip(chosen, shifts, strict=True)
                x = digit_batch([voxels[i] + shift for i, shift in pairs])
                loss, grads = step(net, x, mx.array(labels[chosen]))
                optimizer.update(net, grads)
                mx.eval(net.state, optimizer.state, loss)
                seconds.append(time.perf_counter() - begin)
                bar.set_postfix(loss=f"{loss.item():.3f}", refresh=False)
                bar.update()
    return seconds


def run(
    out: str = "demo",
    *,
    epochs: int = 12,
    batch_size: int = 64,
    seed: int = 0,
    goal: float = 0.97,
    scans: Sequence[str | Path] = (),
    surface_steps: int = 90,
) -> float:
    """Train on the digits, print what happened, write ``run.html`` and the weights.

    A table follows of this net, and of one that tells surfaces of scans apart: the
    accuracy in float32, with packed weights, and in integers. Return the accuracy on
    the held-out digits, or raise a RuntimeError if it is below ``goal``.
    """
    folder = Path(out)
    check_writable(check_page(folder / "run.html"))
    taught = read_scans(scans)
    folder.mkdir(parents=True, exist_ok=True)
    mx.random.seed(seed)
    (voxels, labels), (test, test_labels) = load_digits(seed)
    print(f"{len(voxels)} training digits, {len(test)} held out")
    net = DigitNet()
    seconds = train(net, voxels, labels, epochs, batch_size, seed)
    accuracy = float(np.mean(predict(net, test) == test_labels))
    print(f"test accuracy  {accuracy:.2%}")
    print(f"time per step  {np.median(seconds) * 1e3:.0f} ms of {batch_size} digits")

    traced = copy.deepcopy(net).train()  # its statistics change
    with trace(traced, time=True) as t:
        x, y = digit_batch(voxels[:batch_size]), mx.array(labels[:batch_size])
        mx.eval(mlx.nn.value_and_grad(traced, loss_of)(traced, x, y))
    print(t.table())
    t.save(folder / "run.html")
    weights = dict(tree_flatten(net.parameters()))
    write_safetensors(folder / "digits.safetensors", weights)
    print(f"wrote {folder / 'run.html'} and {folder / 'digits.safetensors'}")
    if accuracy < goal:
        raise RuntimeError(
            f"test accuracy {accuracy:.2%} is below the demo's goal of {goal:.0%}"
        )
    digits = score_digits(net, voxels, test, test_labels)
    surfaces = score_surfaces(taught, surface_steps)
    print(score_table({"digits": digits, "surfaces of scans": surfaces}))
    return accuracy


class Score(NamedTuple):
    """Share of right results, and bytes of the parameters."""

    right: float
    bytes: int


def scores(
    net: mlx.nn.Module, batches: list, right: Callable[[mlx.nn.Module], float]
) -> dict[str, Score]:
    """Return the score of a trained net in every scheme, calibrated on ``batches``.

    ``right(net)`` is the share of right results.
    """
    found = {}
    for name, (bits, activations) in SCHEMES.items():
        made = net
        if bits is not None:
            size = None if (bits, activations) == (8, 8) else GROUP
            made, _ = calibrate(net, batches, bits, size, activations=activations)
        size = sum(array.nbytes for _, array in tree_flatten(made.parameters()))
        found[name] = Score(right(made), size)
    return found


def score_table(tasks: Mapping[str, Mapping[str, Score]]) -> str:
    """Return a row for each scheme: the share that is right and the size, by task."""
    width = max(map(len, SCHEMES))
    lines = [" " * width + "".join(f"{task:>24}" for task in tasks)]
    for name in SCHEMES:
        cells = (
            f"{found[name].right:>14.2%}, {found[name].bytes / 1000:>4,.0f} kB"
            for found in tasks.values()
        )
        lines.append(f"{name:<{width}}{''.join(cells)}")
    return "\n".join(lines)


def score_digits(
    net: mlx.nn.Module, voxels: list, test: list, labels: np.ndarray
) -> dict[str, Score]:
    """Score the net on the held-out digits; calibrated on 256 training digits."""
    some = voxels[:256]
    batches = [digit_batch(some[at : at + 64]) for at in range(0, len(some), 64)]
    return scores(net, batches, lambda net: np.mean(predict(net, test) == labels))


def read_scans(files: Sequence[str | Path]) -> list[Scan]:
    """Return the scans of files with their surfaces; without files, a made-up room."""
    clouds = [(Path(file).name, read_points(file).points) for file in files]
    scans = []
    for name, points in clouds or [("a room", room())]:
        points = np.asarray(points, dtype=np.float32)
        size = fitting_voxel_size(points)
        scans.append(labelled(points, size))
        print(f"{name}: {len(scans[-1].x):,} voxels of {size:g}, one half taught")
    return scans


def score_surfaces(scans: Sequence[Scan], steps: int) -> dict[str, Score]:
    """Teach a SpUNet surfaces on one half of scans; score it on the other."""
    net = untaught()
    with trange(steps, unit="step", mininterval=20) as bar:
        teach(net, scans, steps, lambda loss: bar.update())
    batches = [scan.x for scan in scans]
    return scores(net, batches, lambda net: right(net, scans))


def run_points(
    path: str,
    out: str = "demo",
    *,
    voxel_size: float | None = None,
    classes: int = 20,
) -> None:
    """Voxelise a scan, run MinkUNet14 on it and write the trace to ``run.html``.

    The weights are random: the trace shows the routes, their cost and the coverage of
    the scan. By default voxels have a size that gives at most 100 000 of them.
    """
    folder = Path(out)
    check_writable(check_page(folder / "run.html"))
    cloud = read_points(path)
    points = np.asarray(cloud.points, dtype=np.float32)
    if len(points) == 0:
        raise ValueError(f"{path} holds no points")
    if voxel_size is None:
        voxel_size = fitting_voxel_size(points, 100_000)
    height = np.ptp(points[:, 2:], axis=0)
    heights = (points[:, 2:] - points[:, 2:].min(axis=0)) / np.maximum(height, 1e-9)
    feats = np.concatenate([np.ones_like(heights), heights], axis=1)
    x = SparseTensor.from_points(
        mx.array(points), mx.array(feats), voxel_size=voxel_size
    )
    print(f"{len(points):,} points -> {len(x):,} voxels of {voxel_size:g}")
    relation = x.manager.submanifold_kernel_relation(x.key, kernel_size=3)
    print(f"3x3x3 neighbourhoods: {relation.coverage()}")
    net = MinkUNet14(2, classes)
    net.eval()
    seconds = []
    for _ in range(2):
        begin = time.perf_counter()
        mx.eval(net(x).feats)
        seconds.append(time.perf_counter() - begin)
    with trace(net, time=True) as t:
        mx.eval(net(x).feats)
    print(t.table())
    print(
        f"MinkUNet14: {seconds[0]:.2f} s with its relations to build, "
        f"{seconds[1]:.2f} s after"
    )
    folder.mkdir(parents=True, exist_ok=True)
    t.save(folder / "run.html")
    print(f"wrote {folder / 'run.html'}")


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


def fitting_voxel_size(points: np.ndarray, most: int = 7000) -> float:
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
