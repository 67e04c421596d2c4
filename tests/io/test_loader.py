"""Loader: the order, what threads compute, ends and errors."""

import threading

import mlx.core as mx
import numpy as np
import pytest

import mlx_lattice as ml
from mlx_lattice import io

needs_threads = pytest.mark.skipif(
    mx.cuda.is_available(), reason="MLX aborts if several threads use an NVIDIA GPU"
)
THREADS = (
    0,
    pytest.param(1, marks=needs_threads),
    pytest.param(3, marks=needs_threads),
)


class Scans:
    """Ten scans of i + 1 voxels; notes which are read."""

    def __init__(self):
        self.read = []

    def __len__(self):
        return 10

    def __getitem__(self, i):
        self.read.append(i)
        points = np.arange(3.0 * (i + 1)).reshape(-1, 3)
        return ml.SparseTensor.from_points(
            points, points * 2, voxel_size=1.0, labels=[i] * len(points)
        )


def labels(loader):
    return [batch.labels.tolist() for batch in loader]


@pytest.mark.parametrize("threads", THREADS)
def test_batches_come_in_order(threads):
    loader = io.Loader(Scans(), 4, threads=threads)
    found = labels(loader)
    assert len(found) == len(loader) == 3
    assert sum(found, []) == [i for i in range(10) for _ in range(i + 1)]
    x = next(iter(loader)).tensor * 2  # the arrays are of this thread's reach
    assert x.feats.sum().item() == 4 * sum(sum(range(3 * n)) for n in range(1, 5))
    assert len(labels(io.Loader(Scans(), 4, drop_last=True, threads=threads))) == 2


@pytest.mark.parametrize("threads", THREADS)
def test_the_seed_and_the_epoch_fix_the_order(threads):
    first = io.Loader(Scans(), 3, shuffle=True, seed=1, threads=threads)
    again = io.Loader(Scans(), 3, shuffle=True, seed=1, threads=0)
    epochs = [labels(first), labels(first)]
    assert epochs == [labels(again), labels(again)] and epochs[0] != epochs[1]
    resumed = io.Loader(Scans(), 3, shuffle=True, seed=1, threads=threads)
    resumed.epoch = 1
    assert labels(resumed) == epochs[1] and resumed.epoch == 2
    assert labels(io.Loader(Scans(), 3, shuffle=True, seed=2)) != epochs[0]


@needs_threads
def test_a_loop_that_ends_early_ends_the_threads():
    scans = Scans()
    batches = iter(io.Loader(scans, threads=2))
    next(batches)
    batches.close()
    assert len(scans.read) < 10
    assert not [t for t in threading.enumerate() if "mlx_lattice" in t.name]


@needs_threads
def test_errors_reach_the_loop():
    lazy = [ml.SparseTensor(mx.zeros((1, 4), mx.int32), mx.ones((1, 2)) * 2)]
    with pytest.raises(RuntimeError, match="another thread made these arrays"):
        list(io.Loader(lazy))
    with pytest.raises(TypeError, match="all of one kind; got int"):
        list(io.Loader([1, 2]))
    parts = io.Loader([1, 2], 2, collate_fn=lambda n: {"sum": [mx.array(n).sum()]})
    assert next(iter(parts))["sum"][0].item() == 3


@pytest.mark.parametrize(
    ("arguments", "sentence"),
    (
        ({"dataset": iter([])}, "dataset must have __len__ .*; got list_iterator"),
        ({"batch_size": 0}, "batch_size must be 1 or more; got 0"),
        ({"threads": -1}, "threads must be 0 or more"),
    ),
)
def test_what_a_loader_does_not_take(arguments, sentence):
    with pytest.raises((TypeError, ValueError), match=sentence):
        io.Loader(**{"dataset": [], **arguments})
    assert labels(io.Loader([])) == []
