"""SparseTensor: points, dense grids, arrays, arithmetic, facts that travel along."""

import operator
from fractions import Fraction

import cases
import mlx.core as mx
import numpy as np
import pytest
import reference as ref
import reference_rows as ref_rows
from conftest import bits
from conftest import drawn as tensor
from hypothesis import given
from hypothesis import strategies as st

import mlx_lattice as ml
from mlx_lattice import nn, ops

GRIDS = {1: (7,), 2: (4, 5), 3: (3, 4, 2), 4: (2, 3, 2, 2)}
reductions = pytest.mark.parametrize("reduce", ("mean", "sum", "max", "first"))


def cloud(n=200, d=3, seed=0):
    """Points on eighths, where float32 divides as float64 does; features; batch."""
    rng = np.random.default_rng([seed, n, d])
    points = rng.integers(-20, 20, (n, d)) / 8
    return points, cases.features(n, 4, seed), rng.integers(0, 3, n)


def voxels(points, feats, batch=None, **arguments) -> ml.SparseTensor:
    batch = None if batch is None else mx.array(batch.astype(np.int32))
    points, feats = mx.array(points.astype(np.float32)), mx.array(feats)
    return ml.SparseTensor.from_points(points, feats, batch=batch, **arguments)


def float64(array) -> np.ndarray:
    return np.array(array, dtype=np.float64)


# Points


@reductions
@pytest.mark.parametrize("d", (1, 2, 3, 4))
@pytest.mark.parametrize("batched", (False, True), ids=("one", "batched"))
def test_from_points(batched, d, reduce):
    """With a voxel size and an origin of each axis; "first" is the earliest point."""
    points, feats, batch = cloud(d=d)
    size, origin = np.array([0.5, 1.0, 0.25, 2.0]), np.array([-0.25, 0.0, 1.0, 0.5])
    facts = {"voxel_size": size[:d], "origin": origin[:d], "reduce": reduce}
    facts["batch"] = batch if batched else None
    x = voxels(points, feats, **facts)
    coords, expected, _, _ = ref_rows.voxelise(points, feats, **facts)
    assert ref.rows_of(x.coords) == ref.rows_of(coords)
    ref.assert_close(x.feats, expected)
    assert x.spatial_shape is None and x.batch_size == (3 if batched else 1)


@pytest.mark.parametrize("dtype", ("float16", "bfloat16"))
def test_points_are_averaged_in_float32(dtype):
    feats = mx.ones((5000, 1), dtype=getattr(mx, dtype))
    x = ml.SparseTensor.from_points(mx.zeros((5000, 2)), feats, voxel_size=1.0)
    assert x.dtype == feats.dtype and x.feats.tolist() == [[1.0]]


def test_gradients_reach_the_points_features():
    points, feats, _ = cloud(50)

    def loss(feats):
        return (voxels(points, feats, voxel_size=1.0).feats ** 2).sum()

    _, means, inverse, counts = ref_rows.voxelise(points, feats, voxel_size=1.0)
    expected = 2 * means[inverse] / counts[inverse][:, None]
    ref.assert_close(mx.grad(loss)(mx.array(feats)), expected)


# Dense grids


@pytest.mark.parametrize("d", (1, 2, 3, 4))
@pytest.mark.parametrize("dtype", cases.DTYPES)
def test_dense_round_trip(dtype, d):
    rng = np.random.default_rng(d)
    active = rng.random((3, *GRIDS[d], 1)) < 0.4
    grid = np.where(active, rng.normal(size=(3, *GRIDS[d], 2)), 0)
    grid[1] = 0
    dense = mx.array(grid.astype(np.float32)).astype(getattr(mx, dtype))
    x = ml.SparseTensor.from_dense(dense)
    active = np.argwhere((ref.to_numpy(dense) != 0).any(axis=-1))
    np.testing.assert_array_equal(np.array(x.coords), active)
    assert (x.spatial_shape, x.batch_size, x.dtype) == (GRIDS[d], 3, dense.dtype)
    assert bits(x.to_dense()) == bits(dense)


@pytest.mark.parametrize("channels", (0, 5))
def test_a_mask_keeps_cells_that_are_zero(channels):
    mask = np.random.default_rng(0).random((2, 3, 4)) < 0.5
    zeros = mx.zeros((2, 3, 4, channels))
    x = ml.SparseTensor.from_dense(zeros, mx.array(mask))
    np.testing.assert_array_equal(np.array(x.coords), np.argwhere(mask))
    assert ml.SparseTensor.from_dense(zeros).shape == (0, channels)


@pytest.mark.parametrize("keep_shape", (True, False))
def test_the_grid_bounds_the_reach_of_a_convolution(keep_shape):
    x = ml.SparseTensor.from_dense(mx.ones((1, 3, 3, 1)), keep_shape=keep_shape)
    y = ops.conv2d(x, mx.ones((1, 3, 3, 1)), padding=0, support="reach")
    assert x.spatial_shape == ((3, 3) if keep_shape else None)
    assert len(y) == (1 if keep_shape else 25)


def test_to_dense_places_rows():
    x = tensor("scattered")
    coords, grid = np.array(x.coords), np.array(x.to_dense())
    assert grid.shape == (1, *(coords[:, 1:].max(axis=0) + 1), 3)
    np.testing.assert_array_equal(grid[tuple(coords.T)], np.array(x.feats))
    assert (grid != 0).any(axis=-1).sum() == len(x)
    assert x.to_dense((20, 20, 20)).shape == (1, 20, 20, 20, 3)


def test_a_row_outside_the_grid_is_an_error():
    with pytest.raises(ValueError, match=r"do not fit a dense grid .* starts at 0"):
        tensor("negative").to_dense()
    sentence = r"do not fit a dense grid of shape \(2, 2, 2\)"
    with pytest.raises(ValueError, match=sentence):
        tensor("scattered").to_dense((2, 2, 2))


# Crossing boundaries


def test_arrays_cross_compile():
    x = tensor()
    coords, weight = x.coords, mx.array(cases.features(3, 5))

    @mx.compile
    def step(arrays):
        y = ml.SparseTensor.from_arrays(arrays, stride=2, batch_size=1)
        return y.replace(y.feats @ weight).arrays()

    y = ml.SparseTensor.from_arrays(step(x.arrays()), stride=2, batch_size=1)
    assert bits(y.coords) == bits(coords) and y.stride == (2, 2, 2)
    ref.assert_close(y.feats, float64(x.feats) @ np.array(weight))


@pytest.mark.parametrize("kind", (list, np.array, "int64", "int16"), ids=str)
def test_coordinates_are_taken_from_any_integers(kind):
    rows = [[0, -3, 4], [1, 2, -5]]
    named = isinstance(kind, str)
    coords = mx.array(rows, dtype=getattr(mx, kind)) if named else kind(rows)
    x = ml.SparseTensor(coords, [[1.0], [2.0]])
    assert x.coords.dtype == mx.int32 and x.coords.tolist() == rows


# Arithmetic

OPERATIONS = (operator.add, operator.sub, operator.mul, operator.truediv)


@pytest.mark.parametrize("operation", OPERATIONS, ids=lambda f: f.__name__)
@pytest.mark.parametrize("kind", ("number", "tensor", "row"))
def test_arithmetic(kind, operation):
    x = tensor()
    a = float64(x.feats)
    other, b = 2.5, 2.5
    if kind == "tensor":
        b = cases.features(len(x), 3, 9)
        other = x.replace(mx.array(b))
    elif kind == "row":
        b = np.array([1.5, -2.0, 4.0], np.float32)
        other = mx.array(b)
    y = operation(x, other)
    assert y.key == x.key and y.manager is x.manager
    ref.assert_close(y.feats, operation(a, float64(b)))
    ref.assert_close((-x).feats, -a)
    if kind == "number":
        ref.assert_close(operation(2.5, x).feats, operation(2.5, a))


@pytest.mark.parametrize("kind", ("float32", "float64", "float16", "int64"))
def test_numbers_and_arrays_of_numpy_on_the_left(kind):
    x = tensor()
    a = float64(x.feats)
    whole = np.random.default_rng(0).integers(1, 9, a.shape).astype(np.dtype(kind))
    for left in (whole, whole[0], whole[:, :1], whole[0, 0]):
        for operation in OPERATIONS:
            y = operation(left, x)
            assert type(y) is not np.ndarray and y.key == x.key
            ref.assert_close(y.feats, operation(left, a))


@given(st.integers(0, 99))
def test_tensors_of_equal_rows_are_aligned_by_value(seed):
    x = tensor()
    order = mx.array(np.random.default_rng(seed).permutation(len(x)))
    y = ml.SparseTensor(x.coords[order], x.feats[order])
    assert (x - y).feats.any().item() is False
    assert (y - x).feats.any().item() is False


def test_tensors_of_other_rows_are_not_added():
    with pytest.raises(ValueError, match="do not have the same coordinates"):
        tensor() + tensor("batches")


ROWS = mx.array([[0, 0, 0, 0], [0, 1, 2, 3], [1, 1, 2, 4]])
FEATS = mx.array(cases.features(3, 8))


@pytest.mark.parametrize("operation", OPERATIONS, ids=lambda f: f.__name__)
@pytest.mark.parametrize("pool", ("sum", "max"))
def test_values_of_batch_elements_are_not_taken_for_rows(operation, pool):
    pool = getattr(ops, f"global_{pool}_pool")
    x = ml.SparseTensor(ROWS, FEATS)  # 3 rows of 2 elements
    with pytest.raises(ValueError, match=r"values\[x\.coords\[:, 0\]\]"):
        operation(x, pool(x))


@pytest.mark.parametrize("operation", OPERATIONS, ids=lambda f: f.__name__)
def test_values_that_can_only_belong_to_rows_are_taken(operation):
    ordered = ml.SparseTensor(ROWS[1:], FEATS[1:])  # a row for each element, in order
    single = ml.SparseTensor(ROWS[:2], FEATS[:2])  # one element
    whole = ml.SparseTensor(ROWS, FEATS)
    for x, values in (
        (ordered, ops.global_sum_pool(ordered)),
        (single, ops.global_sum_pool(single)),
        (whole, FEATS + 9),
        (whole, ops.global_sum_pool(whole)[ROWS[:, 0]]),
    ):
        expected = operation(float64(x.feats), float64(values))
        np.testing.assert_allclose(np.array(operation(x, values).feats), expected, 1e-5)


# Assignments


def test_features_can_be_assigned():
    x = tensor()
    before, y = x.feats, x.replace(x.feats)
    y.feats = np.ones((len(x), 2), np.float16)
    assert y.shape == (len(x), 2) and y.dtype == mx.float16 and y.channels == 2
    assert x.feats is before and y.feats.sum().item() == 2 * len(x)
    y.feats *= 3
    assert (y + y).feats[0].tolist() == [6, 6]
    y.name = "mine"
    assert y.name == "mine"


@pytest.mark.parametrize(
    ("feats", "error", "sentence"),
    (
        (mx.ones((3, 3)), ValueError, r"N = \d+, the rows of coords; got \(3, 3\)"),
        (mx.ones((40,)), ValueError, r"got \(40,\)"),
        (None, TypeError, "feats must be an array .*; got NoneType"),
        ("tensor", TypeError, "feats must be an array .* got a tensor.*ops.align"),
        ("int", TypeError, "float32, float16 or bfloat16, or int32 for .*; got int16"),
    ),
    ids=("rows", "vector", "none", "tensor", "int"),
)
def test_other_features_are_not_assigned(feats, error, sentence):
    x = tensor()
    known = {"tensor": x.replace(x.feats), "int": mx.ones((len(x), 1), dtype=mx.int16)}
    feats = known[feats] if isinstance(feats, str) else feats
    before = x.feats
    with pytest.raises(error, match=sentence):
        x.feats = feats
    with pytest.raises(error, match=sentence):
        x.replace(feats)
    assert x.feats is before


@pytest.mark.parametrize("name", ("coords", "key", "manager"))
def test_the_rows_of_a_tensor_cannot_be_assigned(name):
    x = tensor()
    sentence = f"{name} of a tensor cannot be set, .* SparseTensor\\(coords, feats\\)"
    for each in (x, ml.IntegerTensor.rounded(x, 0.1)):
        with pytest.raises(AttributeError, match=sentence):
            setattr(each, name, getattr(each, name))


# Facts that travel along


def test_spatial_shape_travels():
    coords = cases.in_grid((9, 8, 7), 60)
    x = ml.SparseTensor(
        mx.array(coords), mx.ones((len(coords), 2)), spatial_shape=(9, 8, 7)
    )
    w3, w2 = mx.ones((2, 3, 3, 3, 2)), mx.ones((2, 2, 2, 2, 2))
    down = ops.conv3d(x, w2, kernel_size=2, stride=2)
    assert ops.subm_conv3d(x, w3).spatial_shape == (9, 8, 7)
    assert down.spatial_shape == (5, 4, 4)
    reach = ops.conv3d(x, w3, stride=2, padding=1, support="reach")
    assert reach.spatial_shape == ref.conv_shape((9, 8, 7), 3, 2, 1, 1) == (5, 4, 4)
    assert ops.conv_transpose3d(down, w2).spatial_shape == (9, 8, 7)
    assert ops.generative_conv_transpose3d(down, w2).spatial_shape == (10, 8, 8)
    assert x.replace(x.feats).spatial_shape == x.astype(mx.float16).spatial_shape
    assert reach.to_dense().shape == (2, 5, 4, 4, 2)


def test_a_declared_batch_size_travels_with_its_empty_elements():
    x = tensor("scattered", batch_size=4, spatial_shape=(9, 9, 9))
    y = ops.conv3d(x, mx.ones((2, 2, 2, 2, 3)), kernel_size=2, stride=2)
    assert x.batch_size == y.batch_size == 4
    up = ops.generative_conv_transpose3d(y, mx.ones((3, 2, 2, 2, 2)))
    assert up.batch_size == 4 and up.to_dense().shape[0] == 4
    assert tensor("batches").batch_size == 5


@pytest.mark.parametrize(
    ("stride", "expected", "text"),
    (
        (Fraction(1, 2), (Fraction(1, 2),) * 3, "1/2"),
        (mx.array(2), (2, 2, 2), "2"),
        (np.array([2, 1, 1]), (2, 1, 1), "2x1x1"),
        ([2, np.int32(1), Fraction(1, 2)], (2, 1, Fraction(1, 2)), "2x1x1/2"),
    ),
    ids=str,
)
def test_strides_are_ints_and_fractions(stride, expected, text):
    x = tensor(stride=stride)
    assert x.stride == expected and {type(s) for s in x.stride} <= {int, Fraction}
    assert repr(x).endswith(f" at stride {text})")
    assert f"stride {text} " in str(ml.prepare(nn.SubmConv3d(3, 3, 3), x))
