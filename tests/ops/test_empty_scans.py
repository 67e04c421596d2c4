"""A scan without points is a batch element wherever it comes from."""

import pickle

import mlx.core as mx
import numpy as np
import pytest

import mlx_lattice as ml
from mlx_lattice import models, nn, ops
from mlx_lattice.models import detection

CHANNELS = 4
GRID = dict(voxel_size=(1, 1, 1), point_range=(0, 0, 0, 8, 8, 8))


def cloud(n: int) -> tuple[mx.array, mx.array]:
    at = np.random.default_rng(n).permutation(7**3)[:n]
    points = np.stack(np.unravel_index(at, (7, 7, 7)), axis=1) + 0.5
    feats = np.random.default_rng(n + 1).normal(size=(n, CHANNELS))
    return mx.array(points.astype(np.float32)), mx.array(feats.astype(np.float32))


def built(points, feats):
    coords = mx.floor(points).astype(mx.int32)
    coords = mx.concatenate([mx.zeros_like(coords[:, :1]), coords], axis=1)
    return ml.SparseTensor(coords, feats)


MAKERS = {
    "constructor": built,
    "pickle": lambda *given: pickle.loads(pickle.dumps(built(*given))),
    "from_points": lambda p, f: ml.SparseTensor.from_points(p, f, voxel_size=1.0),
    "with a batch column": lambda p, f: ml.SparseTensor.from_points(
        p, f, voxel_size=1.0, batch=mx.zeros(len(p), dtype=mx.int32)
    ),
    "unique_sum": lambda p, f: ops.unique_sum(built(p, f).coords, f),
    "voxel recipe": lambda p, f: models.VoxelRecipe(1.0)(p).x,
    "from zero": lambda p, f: (
        models.VoxelRecipe(
            1.0, ("height", "ones"), centred=True, from_zero=True, rounding="nearest"
        )(p).x
    ),
    "grid recipe": lambda p, f: detection.GridRecipe(**GRID, features=tuple("xyz"))(p),
    "dynamic": lambda p, f: detection.GridRecipe(
        **GRID, features=tuple("xyz"), max_points=None, max_voxels=None
    )(p),
}


@pytest.mark.parametrize("maker", MAKERS)
def test_a_scan_without_points_is_one_element(maker):
    make = MAKERS[maker]
    scans = [make(*cloud(n)) for n in (0, 5, 0, 0, 9, 0)]
    assert [len(x) for x in scans] == [0, 5, 0, 0, 9, 0]
    assert [x.batch_size for x in scans] == [1] * 6
    assert ops.global_avg_pool(scans[0]).shape == (1, scans[0].channels)
    (alone,) = ops.unbatch(scans[0])
    assert alone.batch_size == 1 and not len(alone)
    both = ops.batch(scans)
    assert both.batch_size == 6
    means = [np.array(x.feats, np.float64).mean(axis=0) if len(x) else 0 for x in scans]
    found = np.array(ops.global_avg_pool(both))
    for row, mean in zip(found, means, strict=True):
        np.testing.assert_allclose(row, mean, rtol=1e-5, atol=1e-6)
    parts = ops.unbatch(both)
    assert [len(part) for part in parts] == [len(x) for x in scans]
    for part, x in zip(parts, scans, strict=True):
        assert mx.array_equal(part.coords, x.coords)
        assert mx.array_equal(part.feats, x.feats) and part.batch_size == 1
    sequences, lengths = ops.to_sequences(both)
    assert sequences.shape[0] == 6 and np.array(lengths).tolist() == [0, 5, 0, 0, 9, 0]


STEPS = {
    "strided": nn.Conv3d(CHANNELS, CHANNELS, 2, 2),
    "submanifold": nn.SubmConv3d(CHANNELS, CHANNELS, 3),
    "generative": nn.GenerativeConvTranspose3d(CHANNELS, CHANNELS, 2, 2),
    "stride 1": nn.ConvTranspose3d(CHANNELS, CHANNELS, 3, 1),
    "up": lambda x: nn.ConvTranspose3d(CHANNELS, CHANNELS)(nn.MaxPool3d(2, 2)(x)),
    "prune": lambda x: ops.prune(x, x.feats[:, 0] > 0),
    "top_k": lambda x: ops.top_k(x, x.feats[:, 0], 2),
    "union": lambda x: ops.union(x, ops.prune(x, x.feats[:, 0] > 0)),
    "difference": lambda x: ops.difference(x, x),
    "space_to_channel": lambda x: ops.space_to_channel(x, 2),
    "channel_to_space": lambda x: ops.channel_to_space(
        x.replace(mx.concatenate([x.feats] * 2, axis=1)), 2
    ),
    "full_attention": lambda x: x.replace(
        ops.full_attention(*[x.feats.reshape(-1, 2, 2)] * 3, like=x).reshape(-1, 4)
    ),
}


@pytest.mark.parametrize("step", STEPS)
@pytest.mark.parametrize("sizes", ((0,), (0, 0), (6, 0), (0, 6, 0, 9, 0)), ids=str)
def test_steps_keep_the_elements(step, sizes):
    x = ops.batch([built(*cloud(n)) for n in sizes])
    y = STEPS[step](x)
    assert y.batch_size == len(sizes) == len(ops.unbatch(y))
    assert ops.global_max_pool(y).shape[0] == len(sizes)


def test_a_declared_size_holds():
    x = ml.SparseTensor(mx.zeros((0, 4), mx.int32), mx.zeros((0, 2)), batch_size=0)
    assert x.batch_size == 0 and ops.unbatch(x) == []


WILD = (
    [[2**31 - 1, 0, 0, 0]],
    [[0, 0, 0, 0], [2**31 - 2, 0, 0, 0]],
    [[0, 1, 2, 3], [1 << 20, 0, 0, 0]],
)
OF_ELEMENTS = {
    "batch_size": lambda x: x.batch_size,
    "instance_norm": nn.InstanceNorm(CHANNELS),
    "unbatch": ops.unbatch,
    "full_attention": STEPS["full_attention"],
    "global_sum_pool": ops.global_sum_pool,
    "to_dense": lambda x: x.to_dense(),
    "batch": lambda x: ops.batch([x, x]),
    "after a stride": lambda x: ops.global_avg_pool(nn.Conv3d(4, 4, 2, 2)(x)),
}


@pytest.mark.parametrize("operation", OF_ELEMENTS)
@pytest.mark.parametrize("rows", WILD, ids=lambda rows: str(rows[-1][0]))
def test_a_wild_batch_index_is_refused(operation, rows):
    x = ml.SparseTensor(mx.array(rows), mx.ones((len(rows), CHANNELS)))
    with pytest.raises(ValueError, match="would make [0-9,]* batch elements. Correct"):
        OF_ELEMENTS[operation](x)


def test_gaps_between_elements_are_legal():
    """As many elements as there are rows, a thousand in any case, and declared ones."""
    rows = mx.array([[1000, 0, 0, 0], [3, 0, 0, 0]])
    pooled = ops.global_sum_pool(ml.SparseTensor(rows, mx.ones((2, 1))))
    assert pooled.shape == (1001, 1) and pooled.sum().item() == 2
    n = 5000
    rows = mx.stack([mx.arange(n), mx.zeros(n, dtype=mx.int32)], axis=1)
    assert ml.SparseTensor(rows.astype(mx.int32), mx.ones((n, 1))).batch_size == n
    few = ml.SparseTensor(rows[-1:].astype(mx.int32), mx.ones((1, 1)), batch_size=n)
    assert ops.global_sum_pool(few).shape == (n, 1)
