"""The demo: train a sparse 3D net on real digits, or inspect a scan from a file."""

from __future__ import annotations

import copy
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, NamedTuple

import mlx.core as mx
import mlx.nn
import mlx.optimizers as optim
import numpy as np
import sklearn.datasets
import sklearn.model_selection
from mlx.utils import tree_flatten

from .. import nn, ops
from ..cache_files import check_writable
from ..inspect.trace import check_page, trace
from ..io.safetensors import write_safetensors
from ..nn.calibrate import calibrate
from ..optimizers import Adam
from ..tensor import SparseTensor
from . import bar, log

GROUP = 32  # input channels that share a scale, if weights have groups
# Bits of weights and of features, by name.
SCHEMES: dict[str, Any] = {
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
        self.stem: nn.Sequential = nn.Sequential(
            nn.SubmConv3d(1, 16, 3, bias=False), nn.BatchNorm(16), nn.ReLU()
        )
        self.down1: nn.Sequential = nn.Sequential(
            nn.Conv3d(16, 32, 2, stride=2, bias=False), nn.BatchNorm(32), nn.ReLU()
        )
        self.block1: nn.Sequential = nn.Sequential(
            nn.SubmConv3d(32, 32, 3, bias=False), nn.BatchNorm(32), nn.ReLU()
        )
        self.down2: nn.Sequential = nn.Sequential(
            nn.Conv3d(32, 64, 3, stride=2, bias=False), nn.BatchNorm(64), nn.ReLU()
        )
        self.head: mlx.nn.Linear = mlx.nn.Linear(64, classes)

    def __call__(self, x: SparseTensor) -> mx.array:
        """Return (batch, classes) logits."""
        x = self.down1(self.stem(x))
        x = self.down2(x + self.block1(x))
        return self.head(ops.global_max_pool(x))


def digit_voxels(image: np.ndarray) -> np.ndarray:
    """Lift an (8, 8) image to (N, 3) sorted voxels."""
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


def load_digits(seed: int = 0) -> tuple[tuple[list[Any], Any], tuple[list[Any], Any]]:
    """Return (voxels, labels) of the train and of the held-out test digits."""
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


def predict(net: mlx.nn.Module, voxels: list[Any], batch_size: int = 64) -> np.ndarray:
    """Return the class of every digit."""
    net.eval()
    classes = []
    for start in range(0, len(voxels), batch_size):
        logits = net(digit_batch(voxels[start : start + batch_size]))
        classes.append(np.array(mx.argmax(logits, axis=1)))
    return np.concatenate(classes)


def loss_of(net: mlx.nn.Module, x: SparseTensor, y: mx.array) -> mx.array:
    """Return the mean cross entropy of a batch of digits."""
    return mlx.nn.losses.cross_entropy(net(x), y, reduction="mean")


def train(
    net: mlx.nn.Module,
    voxels: list[Any],
    labels: np.ndarray,
    epochs: int,
    batch_size: int,
    seed: int,
    show: bool = True,
) -> list[float]:
    """Train with Adam on shuffled batches; return the seconds of each step."""
    steps = epochs * (len(voxels) // batch_size)
    schedule = optim.cosine_decay(3e-3, steps)
    optimizer = Adam(learning_rate=schedule)

    step = mlx.nn.value_and_grad(net, loss_of)
    rng, seconds = np.random.default_rng(seed), []
    net.train()
    with bar(steps, **{} if show else {"disable": True}) as shown:
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
                shown.set_postfix(loss=f"{loss.item():.3f}", refresh=False)
                shown.update()
    return seconds


def run(
    out: str = "demo",
    *,
    epochs: int = 12,
    batch_size: int = 64,
    seed: int = 0,
    goal: float = 0.97,
) -> float:
    """Train on the digits, print the results, write ``run.html`` and the weights."""
    folder = Path(out)
    check_writable(check_page(folder / "run.html"))
    folder.mkdir(parents=True, exist_ok=True)
    mx.random.seed(seed)
    (voxels, labels), (test, test_labels) = load_digits(seed)
    log.info(f"{len(voxels)} training digits, {len(test)} held out")
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
    log.info(f"wrote {folder / 'run.html'} and {folder / 'digits.safetensors'}")
    if accuracy < goal:
        raise RuntimeError(
            f"test accuracy {accuracy:.2%} is below the demo's goal of {goal:.0%}"
        )
    print(score_table(score_digits(net, voxels, test, test_labels)))
    return accuracy


class Score(NamedTuple):
    """Share of right results, and bytes of the parameters."""

    right: float
    bytes: int


def scores(
    net: mlx.nn.Module, batches: list[Any], right: Callable[[mlx.nn.Module], float]
) -> dict[str, Score]:
    """Return the score of a trained net in every scheme, calibrated on ``batches``."""
    table = {}
    for name, (bits, activations) in SCHEMES.items():
        twin = net
        if bits is not None:
            group = None if (bits, activations) == (8, 8) else GROUP
            twin, _ = calibrate(net, batches, bits, group, activations=activations)
        size = sum(array.nbytes for _, array in tree_flatten(twin.parameters()))
        table[name] = Score(right(twin), size)
    return table


def score_table(scores: Mapping[str, Score]) -> str:
    """Return a row for each scheme: the share of right results and the size."""
    width = max(map(len, scores))
    return "\n".join(
        f"{name:<{width}}  {score.right:>7.2%}, {score.bytes / 1000:>4,.0f} kB"
        for name, score in scores.items()
    )


def score_digits(
    net: mlx.nn.Module, voxels: list[Any], test: list[Any], labels: np.ndarray
) -> dict[str, Score]:
    """Score the net on the held-out digits; calibrated on 256 training digits."""
    some = voxels[:256]
    batches = [digit_batch(some[at : at + 64]) for at in range(0, len(some), 64)]
    return scores(net, batches, lambda net: np.mean(predict(net, test) == labels))


def fitting_voxel_size(points: np.ndarray, most: int = 7000) -> float:
    """Return a size that gives a scan at most so many voxels."""
    extent = float(np.median(np.ptp(points, axis=0)))
    size = extent / 250 if extent > 0 else 1.0
    while len(np.unique(np.floor(points / size), axis=0)) > most:
        size *= 1.2
    return float(f"{size:.2g}")
