"""Arrays of NumPy and lists work as arrays of MLX do; other values are refused."""

import mlx.core as mx
import numpy as np
import pytest

import mlx_lattice as ml
from mlx_lattice import models, ops

CELLS = [(0, i, j, k) for i in range(4) for j in range(4) for k in range(2)]
COORDS, N = mx.array(CELLS), len(CELLS)
rng = np.random.default_rng(0)


def draw(*shape) -> mx.array:
    return mx.array(rng.standard_normal(shape, dtype=np.float32))


X = ml.SparseTensor(COORDS, draw(N, 8))
COARSE, RELATION = ops.max_pool3d(X), X.manager.submanifold_kernel_relation(X.key)
POINTS = COORDS + mx.array([0, 0.25, 0.25, 0.25])
Q, KEYS = draw(N, 2, 12), draw(1, 5, 2, 12)
W, W2, BIAS, LINE = draw(4, 3, 3, 3, 8), draw(4, 2, 2, 2, 8), draw(4), draw(8)
BOXES, SCORES = mx.abs(draw(5, 7)), draw(5)
CASES = {
    "devoxelize": (lambda a: ops.devoxelize(X, a), mx.arange(3)),
    "interpolate": (lambda a: ops.interpolate(X, a), POINTS),
    "prune": (lambda a: ops.prune(X, a), LINE[mx.arange(N) % 8] > 0),
    "top_k": (lambda a: ops.top_k(X, a, 3), X.feats[:, 0]),
    "lookup": (lambda a: ops.lookup(X, a), COORDS),
    "unique_sum": (lambda a: ops.unique_sum(COORDS, a), X.feats),
    "conv": (lambda a: ops.conv3d(X, a), W),
    "conv rows": (lambda a: ops.conv3d(X, W, coordinates=a), COORDS),
    "sparse_conv": (lambda a: ops.sparse_conv(a, W, RELATION), X.feats),
    "sparse_conv weight": (lambda a: ops.sparse_conv(X.feats, a, RELATION), W),
    "sparse_pool": (lambda a: ops.sparse_pool(a, RELATION), X.feats),
    "batch_norm": (lambda a: ops.batch_norm(X, a, LINE * LINE), LINE),
    "group_norm": (lambda a: ops.group_norm(X, 2, a, a), LINE),
    "modulate": (lambda a: ops.modulate(X, a, a), LINE[None]),
    "full_attention": (lambda a: ops.full_attention(a, a, Q, X), Q),
    "cross_attention": (lambda a: ops.cross_attention(Q, a, a, X), KEYS),
    "lengths": (
        lambda a: ops.cross_attention(Q, KEYS, KEYS, X, lengths=a),
        mx.array([3]),
    ),
    "rotary": (lambda a: ops.rotary(a, X), Q),
    "positions": (lambda a: ops.rotary(Q, X, positions=a), POINTS[:, 1:]),
    "knn": (lambda a: ops.knn(a, 2).rows, COORDS),
    "box_corners": (ops.box_corners, BOXES),
    "nms": (lambda a: ops.nms_rotated(BOXES, a, 0.5), SCORES),
    "grid_sample": (lambda a: ops.grid_sample_3d(X, a), POINTS[None, :, 1:]),
    "keep": (
        lambda a: ops.prune_by_logits(X, X.feats[:, 0], keep=a),
        X.feats[:, 1] > 0,
    ),
    "subdivision": (
        lambda a: ops.channel_to_space(X, 2, subdivision=a),
        X.feats > 0,
    ),
    "fine rows": (
        lambda a: ops.channel_to_space(X, 2, coordinates=a),
        COORDS * mx.array([1, 2, 2, 2]),
    ),
    "upsample": (lambda a: ops.upsample_nearest3d(COARSE, 2, a), COORDS),
    "prelu": (lambda a: ops.prelu(X, a), LINE),
    "coords": (lambda a: ml.SparseTensor(a, X.feats), COORDS),
    "feats": (lambda a: ml.SparseTensor(COORDS, a), X.feats),
    "dense": (ml.SparseTensor.from_dense, draw(1, 2, 3, 4, 5)),
    "points": (
        lambda a: ml.SparseTensor.from_points(a, X.feats, voxel_size=2.0),
        POINTS[:, 1:],
    ),
}


def value(result) -> np.ndarray:
    return np.array(result.feats if isinstance(result, ml.SparseTensor) else result)


def as_numpy(array, order="="):
    """An array of NumPy in an order of bytes; integers have 64 bits."""
    array = np.array(array)
    wide = np.int64 if array.dtype == np.int32 else array.dtype
    return array.astype(np.dtype(wide).newbyteorder(order))


KINDS = {
    "numpy": as_numpy,
    "list": lambda array: array.tolist(),
    # Its strides are negative, as those of a mirrored scan.
    "flipped": lambda array: np.flip(np.flip(np.array(array)).copy()),
    "other byte order": lambda array: as_numpy(array, "S"),
}


@pytest.mark.parametrize("name", CASES)
def test_other_arrays_give_the_same(name):
    call, array = CASES[name]
    expected = value(call(array))
    for kind, convert in KINDS.items():
        result = value(call(convert(array)))
        assert np.allclose(result, expected, atol=1e-5), kind


@pytest.mark.parametrize("kind", sorted(KINDS.keys() - {"list"}))
def test_arithmetic(kind):
    array = KINDS[kind](X.feats)
    for result, exact in (
        (X + array, X.feats + X.feats),
        (array * X, X.feats * X.feats),
        (array / X, mx.ones_like(X.feats)),
    ):
        assert mx.allclose(result.feats, exact, atol=1e-5).item()


@pytest.mark.parametrize("name", CASES)
def test_other_values_are_refused(name):
    for other in ("rows", object(), np.array(["a"])):
        with pytest.raises(TypeError, match=r"must be .*; got "):
            CASES[name][0](other)


def test_a_tensor_is_no_array_of_rows():
    with pytest.raises(TypeError, match="got a SparseTensor: look up its coords"):
        ops.lookup(X, X)


@pytest.mark.parametrize("index", (2**31, 2**32, -(2**32)))
def test_batch_indices_beyond_int32(index):
    """As int32 they were 0, or another element."""
    points, batch = np.zeros((2, 3), np.float32), np.array([0, index])
    grid = (1.0, 1.0, 1.0), (-1.0, -1.0, -1.0, 1.0, 1.0, 1.0)
    for call in (
        lambda: ml.SparseTensor.from_points(points, voxel_size=1.0, batch=batch),
        lambda: models.dynamic_voxels(points, *grid, batch),
        lambda: models.SPVCNN(1, 2, 1.0, planes=(4,) * 9)(
            points, X.feats[:2, :1], batch
        ),
    ):
        with pytest.raises(ValueError, match="batch must fit int32; got"):
            call()


@pytest.mark.parametrize("dtype", (np.int64, np.uint32, np.uint8))
def test_rows_that_are_looked_up_are_integers_of_any_width(dtype):
    rows = np.array(COORDS)[::-1].astype(dtype)
    assert ops.lookup(X, rows).tolist() == list(range(N))[::-1]
    assert ops.lookup(X, mx.array(rows)).tolist() == list(range(N))[::-1]


def test_rows_beyond_int32_are_not_looked_up():
    with pytest.raises(ValueError, match="beyond int32"):
        ops.lookup(X, np.array([[0, 1 << 32, 0, 0]]))
    with pytest.raises(ValueError, match="coords must be int32; got .*float32"):
        ops.lookup(X, POINTS)
