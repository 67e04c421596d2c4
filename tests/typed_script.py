"""A user's script for type checkers, which ``make types`` runs: it has no test.

Each ``assert_type`` says what pyright and mypy must find.
"""

from collections.abc import Iterator
from pathlib import Path

import mlx.core as mx
import mlx.nn
import mlx.optimizers as optim
import numpy as np
from typing_extensions import assert_type

import mlx_lattice as ml
from mlx_lattice import io, models, nn, ops


class UNet(nn.Module):
    """One level down and up again, beside a skip."""

    def __init__(self, channels: int, classes: int) -> None:
        super().__init__()
        self.stem = nn.Sequential(
            nn.SubmConv3d(channels, 16, 3), nn.BatchNorm(16), nn.ReLU(), nn.Dropout(0.1)
        )
        self.down: nn.Conv3d = nn.Conv3d(16, 32, 2, stride=2)
        self.act = nn.LeakyReLU(negative_slope=0.1)
        self.up = nn.ConvTranspose3d(32, 16)
        self.head = nn.Linear(32, classes)

    def __call__(self, x: ml.SparseTensor) -> ml.SparseTensor:
        skip = self.stem(x)
        below = self.act(self.down(skip))
        joined = ops.cat([skip, self.up(below, coordinates=skip)])
        return self.head(joined)


def batches(rng: np.random.Generator) -> Iterator[tuple[ml.SparseTensor, mx.array]]:
    """Yield voxels with their labels."""
    for _ in range(4):
        points = rng.uniform(0, 4, (1000, 3)).astype(np.float32)
        labels = (points[:, 2] > 2).astype(np.int32)
        voxels = ml.SparseTensor.from_points(points, voxel_size=0.1, labels=labels)
        assert voxels.labels is not None
        yield voxels.tensor, voxels.labels


def loss_of(net: UNet, x: ml.SparseTensor, labels: mx.array) -> mx.array:
    """Return the mean cross entropy."""
    return nn.losses.cross_entropy(net(x), labels)


def train(net: UNet) -> mx.array:
    """Train for some steps; return the last loss."""
    optimizer = optim.AdamW(learning_rate=1e-3)
    step = mlx.nn.value_and_grad(net, loss_of)
    loss = mx.array(0.0)
    for x, labels in batches(np.random.default_rng(0)):
        loss, gradients = step(net, x, labels)
        optimizer.update(net, gradients)
        mx.eval(loss, net.parameters())
    return loss


def look(net: UNet, x: ml.SparseTensor) -> None:
    """Read shapes, edges and times."""
    assert_type(x.feats, mx.array)
    assert_type(x.coords, mx.array)
    assert_type(net.stem(x), ml.SparseTensor)
    assert_type(nn.ReLU()(x), ml.SparseTensor)
    assert_type(nn.Sequential(nn.Linear(1, 4), nn.ReLU())(x.feats), mx.array)
    assert_type(ops.relu(x), ml.SparseTensor)
    assert_type(ops.softmax(x.feats, axis=-1), mx.array)
    assert_type(2 * x + x.feats, ml.SparseTensor)
    assert_type(ops.subm_conv3d(x, mx.zeros((4, 3, 3, 3, 1))), ml.SparseTensor)
    relation = x.manager.submanifold_kernel_relation(x.key, kernel_size=3)
    assert_type(relation.out_in, mx.array)
    print(ml.explain(x, net.stem.layers[0]), relation.coverage())
    with ml.trace(net, time=True) as trace:
        net(x).eval()
    trace.save("net.html")
    print(trace.table(), len(trace.records), ml.prepare(net, x).bytes)


def label(folder: Path) -> None:
    """Label a scan by a net of a folder."""
    net = models.SpUNet.from_pretrained(folder)
    assert_type(net, models.SpUNet)
    scan = io.read_points("scan.ply")
    segmented = models.segment_points(net, scan.points)
    print(segmented.labels.max(), net.about)
    assert_type(models.from_pretrained(folder, kind=models.MinkUNet), models.MinkUNet)


if __name__ == "__main__":
    trained = UNet(1, 2)
    print(train(trained))
    look(trained, ml.SparseTensor.from_dense(mx.ones((1, 8, 8, 8, 1))))
