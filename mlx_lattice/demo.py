"""The demo: train a sparse 3D net on real digits, or inspect a scan from a file."""

from __future__ import annotations

import copy
import sys
import time
from collections.abc import Sequence
from pathlib import Path

import matplotlib
import mlx.core as mx
import mlx.nn
import mlx.optimizers as optim
import numpy as np
from mlx.utils import tree_flatten

from . import demo_surfaces, nn, ops
from .atomic_write import atomic_write
from .demo_accuracy import Score, scores, table
from .inspect.trace import trace
from .io.safetensors import write_safetensors
from .optimizers import Adam
from .output_places import check_writable
from .tensor import SparseTensor


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
    """Lift an (8, 8) image to voxels: pixel (x, y) of intensity v becomes (x, y, 0..v).

    A pixel of intensity 0 gives no voxel.

    Returns:
        (N, 3) int32, sorted lexicographically.
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


def nudge(rng: np.random.Generator) -> np.ndarray:
    """Return a random shift of up to one pixel: the lattice has no border to cut it."""
    return np.array([*rng.integers(-1, 2, size=2), 0], dtype=np.int32)


def load_digits(seed: int = 0):
    """Return (voxels, labels) of the train and of the held-out test digits.

    The data are the 1 797 handwritten digits that scikit-learn ships.
    """
    from sklearn.datasets import load_digits as load
    from sklearn.model_selection import train_test_split

    data = load()
    train, test, train_labels, test_labels = train_test_split(
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


def train(net, voxels, labels, epochs: int, batch_size: int, seed: int, show=True):
    """Train with Adam on shuffled batches; return (losses, seconds of each step)."""
    from tqdm import tqdm

    steps = epochs * (len(voxels) // batch_size)
    schedule = optim.cosine_decay(3e-3, steps)
    optimizer = Adam(learning_rate=schedule)

    def loss_of(net, x, y):
        return mlx.nn.losses.cross_entropy(net(x), y, reduction="mean")

    step = mlx.nn.value_and_grad(net, loss_of)
    rng, losses, seconds = np.random.default_rng(seed), [], []
    net.train()
    # Redraw the bar often on a terminal, seldom in a log file.
    interval = 0.2 if sys.stderr.isatty() else 20
    with tqdm(total=steps, unit="step", mininterval=interval, disable=not show) as bar:
        for _ in range(epochs):
            order = rng.permutation(len(voxels))
            for at in range(0, len(order) - batch_size + 1, batch_size):
                begin = time.perf_counter()
                chosen = order[at : at + batch_size]
                x = digit_batch([voxels[i] + nudge(rng) for i in chosen])
                loss, grads = step(net, x, mx.array(labels[chosen]))
                optimizer.update(net, grads)
                mx.eval(net.state, optimizer.state, loss)
                losses.append(loss.item())
                seconds.append(time.perf_counter() - begin)
                bar.set_postfix(loss=f"{np.mean(losses[-20:]):.3f}", refresh=False)
                bar.update()
    return losses, seconds


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
    """Train on the digits, print what happened, write pictures and ``run.html``.

    Last comes a table of this net, and of one that tells surfaces of scans apart: what
    they score in float, with packed weights, and in integers.

    Returns:
        the accuracy on the held-out digits.

    Raises:
        ValueError: a scan cannot be read, or is too small, which is found out first.
        RuntimeError: the accuracy is below ``goal``.
    """
    folder = Path(out)
    check_writable(folder / "run.html")
    taught = read_scans(scans)
    folder.mkdir(parents=True, exist_ok=True)
    mx.random.seed(seed)
    (voxels, labels), (test, test_labels) = load_digits(seed)
    rows = sum(map(len, voxels)) / len(voxels)
    print(
        f"{len(voxels)} training digits, {len(test)} held out, {rows:.0f} voxels each"
    )
    net = DigitNet()
    losses, seconds = train(net, voxels, labels, epochs, batch_size, seed)
    found = predict(net, test)
    accuracy = float(np.mean(found == test_labels))
    print(f"test accuracy  {accuracy:.2%} ({np.sum(found != test_labels)} wrong)")
    median = np.median(seconds) * 1e3
    print(
        f"time per step  {median:.0f} ms (median of {len(seconds)} steps of "
        f"{batch_size} digits)"
    )

    traced = copy.deepcopy(net).train()  # whose statistics move
    with trace(traced, time=True) as t:
        x, y = digit_batch(voxels[:batch_size]), mx.array(labels[:batch_size])
        loss = mlx.nn.value_and_grad(
            traced, lambda net: mlx.nn.losses.cross_entropy(net(x), y, reduction="mean")
        )
        mx.eval(loss(traced))
    print(t.table())
    t.save(folder / "run.html")
    weights = dict(tree_flatten(net.parameters()))
    write_safetensors(folder / "digits.safetensors", weights)
    draw_losses(losses, folder / "loss.png")
    draw_digits(test, test_labels, found, folder / "digits.png")
    names = ", ".join(sorted(p.name for p in folder.iterdir()))
    print(f"wrote {folder}/: {names}")
    if accuracy < goal:
        raise RuntimeError(
            f"test accuracy {accuracy:.2%} is below the demo's goal of {goal:.0%}"
        )
    digits = score_digits(net, voxels, test, test_labels)
    surfaces = score_surfaces(taught, surface_steps)
    print(table({"digits": digits, "surfaces of scans": surfaces}))
    return accuracy


def score_digits(
    net: mlx.nn.Module, voxels: list, test: list, labels: np.ndarray
) -> dict[str, Score]:
    """Score the net on the held-out digits; calibrated on 256 training digits."""
    calibration = voxels[:256]
    starts = range(0, len(calibration), 64)
    batches = [digit_batch(calibration[at : at + 64]) for at in starts]
    return scores(net, batches, lambda net: np.mean(predict(net, test) == labels))


def read_scans(files: Sequence[str | Path]) -> list[demo_surfaces.Scan]:
    """Return scans with their surfaces; of no files a room that is made up.

    Args:
        files: what ``io.read_points`` reads.
    """
    from .io import read_points

    clouds = [(Path(file).name, read_points(file).points) for file in files]
    scans = []
    for name, points in clouds or [("a room", demo_surfaces.room())]:
        points = np.asarray(points, dtype=np.float32)
        size = demo_surfaces.voxel_size(points)
        scans.append(demo_surfaces.labelled(points, size))
        print(f"{name}: {len(scans[-1].x):,} voxels of {size:g}, one half taught")
    return scans


def score_surfaces(scans: Sequence[demo_surfaces.Scan], steps: int) -> dict[str, Score]:
    """Teach a SpUNet surfaces on one half of scans; score it on the other."""
    from tqdm import trange

    net = demo_surfaces.untaught()
    with trange(steps, unit="step", mininterval=20) as bar:
        demo_surfaces.teach(net, scans, steps, lambda loss: bar.update())
    batches = [scan.x for scan in scans]
    return scores(net, batches, lambda net: demo_surfaces.right(net, scans))


def draw_losses(losses: list[float], path: Path) -> None:
    """Draw the loss of every step and its running mean."""
    matplotlib.use("Agg")
    from matplotlib import pyplot

    figure, axes = pyplot.subplots(figsize=(6, 3.5), layout="constrained")
    width = min(10, len(losses))
    smooth = np.convolve(losses, np.ones(width) / width, mode="valid")
    axes.plot(losses, color="0.8", linewidth=1, label="step")
    axes.plot(np.arange(width - 1, len(losses)), smooth, label=f"mean of {width}")
    axes.set(xlabel="step", ylabel="cross entropy", yscale="log")
    axes.legend(frameon=False)
    with atomic_write(path) as draft:
        figure.savefig(draft, dpi=120)
    pyplot.close(figure)


def draw_digits(voxels, labels, found, path: Path, count: int = 8) -> None:
    """Draw digits as voxels: first some that were predicted wrongly, then others."""
    matplotlib.use("Agg")
    from matplotlib import pyplot

    wrong, right = (np.flatnonzero((found == labels) == good) for good in (False, True))
    wrong = wrong[: count // 2]
    order = np.concatenate([wrong, right[: count - len(wrong)]])
    figure = pyplot.figure(figsize=(12, 6.5), layout="constrained")
    for place, digit in enumerate(order):
        axes = figure.add_subplot(2, -(-count // 2), place + 1, projection="3d")
        filled = np.zeros((8, 8, 17), dtype=bool)
        x, y, z = voxels[digit].T
        # x is the row of the image, downwards; y its column, to the right.
        filled[y, 7 - x, z] = True
        shade = np.broadcast_to(np.linspace(0.15, 0.9, 17), filled.shape)
        right = found[digit] == labels[digit]
        axes.voxels(filled, facecolors=pyplot.cm.viridis(shade))
        axes.set_title(
            f"predicted {found[digit]}" + ("" if right else f", is {labels[digit]}"),
            color="black" if right else "crimson",
        )
        axes.set_box_aspect((8, 8, 6))
        axes.view_init(elev=72, azim=-90)
        axes.set_axis_off()
    with atomic_write(path) as draft:
        figure.savefig(draft, dpi=100)
    pyplot.close(figure)


def run_points(
    path: str,
    out: str = "demo",
    *,
    voxel_size: float | None = None,
    classes: int = 20,
) -> None:
    """Voxelise a scan, run MinkUNet14 on it and write the trace to ``run.html``.

    The weights are random: the point is the routes, their cost and the coverage of
    the scan, not the labels.

    Args:
        path: what ``io.read_points`` reads.
        out: folder to write to.
        voxel_size: edge of a voxel in the file's unit; by default a 256th of the
            median extent.
        classes: output channels of the net.
    """
    from .io import read_points
    from .models import MinkUNet14

    folder = Path(out)
    check_writable(folder / "run.html")
    cloud = read_points(path)
    points = np.asarray(cloud.points, dtype=np.float32)
    if len(points) == 0:
        raise ValueError(f"{path} holds no points")
    low, high = points.min(axis=0), points.max(axis=0)
    if voxel_size is None:
        extent = float(np.median(high - low))
        voxel_size = float(f"{extent / 256 if extent > 0 else 1.0:.2g}")
    heights = (points[:, 2:] - low[2]) / max(float(high[2] - low[2]), 1e-9)
    feats = np.concatenate([np.ones_like(heights), heights], axis=1)
    x = SparseTensor.from_points(
        mx.array(points), mx.array(feats), voxel_size=voxel_size
    )
    print(f"{len(points):,} points -> {len(x):,} voxels of {voxel_size:g}")
    relation = x.manager.submanifold_kernel_relation(x.key, kernel_size=3)
    print(f"3x3x3 neighbourhoods: {relation.coverage()}")
    net = MinkUNet14(2, classes)
    net.eval()
    begin = time.perf_counter()
    mx.eval(net(x).feats)
    first = time.perf_counter() - begin
    with trace(net, time=True) as t:
        y = net(x)
        mx.eval(y.feats)
    begin = time.perf_counter()
    mx.eval(net(x).feats)
    again = time.perf_counter() - begin
    print(t.table())
    print(
        f"MinkUNet14: {first:.2f} s with its relations to build, {again:.2f} s after; "
        f"{y}"
    )
    folder.mkdir(parents=True, exist_ok=True)
    t.save(folder / "run.html")
    print(f"wrote {folder / 'run.html'}")
