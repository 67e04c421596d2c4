"""Training on scans of ever new sizes keeps no Python objects of the scans before."""

import gc
from collections import Counter
from itertools import pairwise

import mlx.core as mx
import mlx.nn
import mlx.optimizers
import numpy as np

import mlx_lattice as ml
from mlx_lattice import nn


def scan(rows: int) -> ml.SparseTensor:
    rng = np.random.default_rng(rows)
    cells = np.unique(rng.integers(0, 12, (4 * rows, 3)), axis=0)
    coords = np.pad(rng.permutation(cells)[:rows], ((0, 0), (1, 0))).astype(np.int32)
    feats = rng.normal(size=(len(coords), 8)).astype(np.float32)
    return ml.SparseTensor(mx.array(coords), mx.array(feats))


def test_objects_do_not_grow_with_new_numbers_of_rows():
    net = nn.Sequential(
        nn.SubmConv3d(8, 16, 3), nn.BatchNorm(16), nn.ReLU(), nn.Conv3d(16, 16, 2, 2),
        nn.LayerNorm(16), nn.GELU(), nn.Linear(16, 8), nn.GlobalAvgPool(),
    )  # fmt: skip
    optimizer = mlx.optimizers.SGD(0.01)
    step = mlx.nn.value_and_grad(net, lambda net, x: mx.square(net(x)).mean())

    def objects(first: int, last: int) -> Counter:
        for rows in range(first, last):
            loss, gradients = step(net, scan(rows))
            optimizer.update(net, gradients)
            mx.eval(loss, net.state, optimizer.state)
        gc.collect()
        return Counter(type(each).__name__ for each in gc.get_objects())

    counts = [objects(first, first + 100) for first in (150, 250, 350)]
    # Python caches, once, which classes are instances of abstract ones: the least of
    # both differences has none of it, and a leak grows in both.
    grown = min((last - first for first, last in pairwise(counts)), key=Counter.total)
    assert grown.total() < 100, grown.most_common(9)
