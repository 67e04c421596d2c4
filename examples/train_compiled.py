#!/usr/bin/env python3
"""Train a MinkUNet on scenes that come again, by compiled steps.

    examples/train_compiled.py --scenes 4 --epochs 10

``ml.compile`` keeps a step for each scene: forward, backward and the optimizer's update
in one graph. Labels are the thirds of the scene's height. Prints the time of a step as
it is, the first time that a scene comes, and compiled, and the accuracy.
"""

from __future__ import annotations

import argparse
import statistics
import time

import mlx.core as mx
import mlx.nn
import numpy as np

import mlx_lattice as ml
from mlx_lattice import models

CLASSES = 3


def scene(seed: int, voxels: int) -> tuple[ml.SparseTensor, mx.array]:
    """Return a wavy surface with its height as the feature, and labels."""
    rng = np.random.default_rng(seed)
    side = max(2, int(np.sqrt(voxels)))
    x, y = (a.ravel() for a in np.mgrid[:side, :side])
    shift, length = rng.uniform(0, 6, 2), side / rng.uniform(4, 9)
    z = np.sin(x / length + shift[0]) + np.cos(y / length + shift[1])
    coords = np.stack([0 * x, x, y, np.rint(z * side / 8)], axis=1).astype(np.int32)
    labels = np.digitize(z, np.quantile(z, (1 / 3, 2 / 3)))
    feats = mx.array(z[:, None].astype(np.float32))
    return ml.SparseTensor(mx.array(coords), feats), mx.array(labels)


def main() -> None:
    """Train and print."""
    parser = argparse.ArgumentParser(description=str(__doc__).splitlines()[0])
    parser.add_argument("--scenes", type=int, default=4)
    parser.add_argument("--voxels", type=int, default=5_000, help="of a scene")
    parser.add_argument("--epochs", type=int, default=10)
    args = parser.parse_args()

    scenes = [scene(seed, args.voxels) for seed in range(args.scenes)]
    net = models.MinkUNet14(1, CLASSES)
    optimizer = ml.optimizers.AdamW(learning_rate=2e-3)
    mx.eval(net.parameters())

    def loss(x: ml.SparseTensor, labels: mx.array) -> tuple[mx.array, mx.array]:
        logits = net(x).feats
        hits = (logits.argmax(axis=1) == labels).mean()
        return mlx.nn.losses.cross_entropy(logits, labels, reduction="mean"), hits

    gradients = mlx.nn.value_and_grad(net, loss)
    state = [net.state, optimizer.state, mx.random.state]

    def train(x: ml.SparseTensor, labels: mx.array) -> tuple[mx.array, mx.array]:
        (value, hits), grads = gradients(x, labels)
        optimizer.update(net, grads)
        return value, hits

    # All scenes are kept: where fewer are, the oldest one is dropped as they go round.
    step = ml.compile(train, inputs=state, outputs=state, keep=args.scenes)
    times, hits = [], [0.0]
    for _ in range(args.epochs):
        hits, begin = [], time.perf_counter()
        for x, labels in scenes:
            _, right = step(x, labels)
            mx.eval(right, state)
            hits.append(right.item())
        times.append((time.perf_counter() - begin) / len(scenes))
    print(f"first epoch, as it is: {1e3 * times[0]:.1f} ms a step")
    if len(times) > 2:
        compiled = statistics.median(times[2:])
        print(f"compiled, {len(step)} scenes kept: {1e3 * compiled:.1f} ms a step")
    print(f"accuracy of the last epoch: {statistics.mean(hits):.2f}")


if __name__ == "__main__":
    main()
