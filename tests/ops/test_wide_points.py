"""Points of float64, and of integers beyond 2^24, lose nothing on the way to cells."""

import mlx.core as mx
import numpy as np
import pytest

import mlx_lattice as ml
from mlx_lattice import models, ops
from mlx_lattice.models.detection import GridRecipe, dynamic_voxels, hard_voxels

NEAR = np.random.default_rng(0).random((500, 3)) * 2
FAR = 1e7
SIZE = (0.1,) * 3


def cells(points, **arguments) -> list:
    """The cells of points in voxels of 0.1, sorted."""
    x = ml.SparseTensor.from_points(points, voxel_size=0.1, **arguments)
    return x.coords[:, 1:].tolist()


def floors(quotients) -> list:
    return np.unique(np.floor(quotients).astype(int), axis=0).tolist()


KINDS = {
    "numpy": np.asarray,
    "list": np.ndarray.tolist,
    "mlx": lambda points: mx.array(points, dtype=mx.float64),
}


@pytest.mark.parametrize("kind", KINDS)
def test_cells_far_from_the_origin_are_told_apart(kind):
    """Also if an origin is subtracted, before anything is rounded."""
    points = KINDS[kind](NEAR + FAR)
    assert cells(points) == floors((NEAR + FAR) / 0.1)
    assert cells(points, origin=FAR) == floors((NEAR + FAR - FAR) / 0.1)


def test_float32_points_are_divided_in_float32():
    single = NEAR.astype(np.float32)
    for points in (single, mx.array(single)):
        assert cells(points) == floors(single / np.float32(0.1))


@pytest.mark.parametrize(
    ("points", "sentence"),
    (
        ([[0.0, 1.0], [np.nan, 1.0]], r"points must be finite; point 1 is \(nan, 1.0"),
        ([[1e300, 0.0]], "voxels would reach .*, beyond int32"),
        ([[3e8, 0.0]], "voxels would reach .*, beyond int32"),
    ),
)
def test_doubles_that_have_no_cell(points, sentence):
    with pytest.raises(ValueError, match=sentence):
        cells(np.array(points))


@pytest.mark.parametrize(
    ("arguments", "sentence"),
    (
        ({"voxel_size": np.inf}, "voxel_size must be finite; got inf"),
        ({"voxel_size": "0.5"}, "voxel_size must be one number or 3; got '0.5'"),
        ({"voxel_size": 1, "origin": np.nan}, "origin must be finite; got nan"),
        ({"voxel_size": 1, "origin": (0, 1)}, "origin must be one number or 3"),
    ),
)
def test_sizes_and_origins(arguments, sentence):
    with pytest.raises(ValueError, match=sentence):
        ml.SparseTensor.from_points(NEAR, **arguments)


# Recipes


@pytest.mark.parametrize("rounding", ("floor", "nearest"))
@pytest.mark.parametrize("centred", (False, True))
def test_a_recipe_of_map_coordinates(rounding, centred):
    recipe = models.VoxelRecipe(
        0.1, ("height",), centred=centred, from_zero=True, rounding=rounding
    )
    near, far = recipe(NEAR + 0.05), recipe(NEAR + 0.05 + FAR)
    # 1e7 is a whole number of voxels; centred, the box is moved back.
    assert len(near.x) == len(far.x)
    assert mx.array_equal(near.rows, far.rows)
    assert mx.allclose(near.x.feats, far.x.feats, atol=1e-5)


@pytest.mark.parametrize("most", (None, 5))
def test_a_grid_of_map_coordinates(most):
    def grid(at: float) -> mx.array:
        box = (at, at, at, at + 2, at + 2, at + 2)
        recipe = GridRecipe(SIZE, box, ("x", "y", "z"), most, most and 10**5)
        return recipe(NEAR + at).coords

    assert mx.array_equal(grid(0.0), grid(1e6))


def test_the_functions_of_grids():
    box = (FAR,) * 3 + (FAR + 2,) * 3
    count = len(floors((NEAR + FAR - FAR) / 0.1))
    assert len(hard_voxels(NEAR + FAR, SIZE, box, 5).coords) == count
    batch = mx.zeros((len(NEAR),), dtype=mx.int32)
    x = dynamic_voxels(NEAR + FAR, SIZE, box, batch)
    assert len(x) == count and x.dtype == mx.float32
    with pytest.raises(ValueError, match="max_points must be 1 or more; got -3"):
        hard_voxels(NEAR, SIZE, box, -3)


# Neighbours


def test_neighbours_of_map_coordinates():
    near = np.pad(NEAR, ((0, 0), (1, 0)))
    far = near + (0, 1e6, 1e6, 1e6)
    nearest = [ops.knn(points, 3) for points in (near, far)]
    assert mx.array_equal(nearest[0].rows, nearest[1].rows)
    assert mx.allclose(nearest[0].distances, nearest[1].distances, atol=1e-6)
    for search in (
        lambda p: ops.knn(p, 2, queries=p[:9] + (0, 0.01, 0, 0)),
        lambda p: ops.radius_neighbours(p, 0.25),
    ):
        assert mx.array_equal(search(near).rows, search(far).rows)


def test_no_points_of_float64():
    nothing = np.zeros((0, 4))
    assert ops.knn(nothing, 2, queries=np.zeros((5, 4))).rows.shape == (5, 2)
    assert len(ml.SparseTensor.from_points(nothing[:, 1:], voxel_size=1.0)) == 0


# Interpolation

EDGE = 2**24
X = ml.SparseTensor(
    mx.array([(0, EDGE, 0, 0), (0, EDGE + 1, 0, 0)]), mx.array([[10.0], [20.0]])
)


@pytest.mark.parametrize("mode", ("linear", "nearest"))
@pytest.mark.parametrize("renormalise", (False, True))
def test_integer_points_are_cells(mode, renormalise):
    options = {"mode": mode, "renormalise": renormalise}
    for at in (X.coords, np.array(X.coords), X.coords.astype(mx.int64)):
        assert ops.interpolate(X, at, **options).tolist() == [[10.0], [20.0]]
    missing = X.coords + mx.array([0, 0, 1, 0])
    assert ops.interpolate(X, missing, **options).tolist() == [[0.0], [0.0]]


def test_float64_points_between_far_cells():
    at = np.array(X.coords, np.float64)[:1] + (0, 0.25, 0, 0)
    assert ops.interpolate(X, at).tolist() == [[12.5]]
    at[0, 1] += 0.5
    assert ops.interpolate(X, at, mode="nearest").tolist() == [[20.0]]
    at[0, 1] = 1e300
    with pytest.raises(ValueError, match="points must be finite and within int32"):
        ops.interpolate(X, at)


def test_a_grid_of_far_points():
    at = X.coords[None, :, 1:]
    nearest = ops.grid_sample_3d(X, at, mode="nearest")
    assert nearest.tolist() == [[[10.0], [20.0]]]
    middles = ops.grid_sample_3d(X, np.array(at, np.float64) + 0.5)
    assert middles.tolist() == [[[10.0], [20.0]]]
    # An integer is the corner between eight cells.
    corners = ops.grid_sample_3d(X, at, renormalise=True)
    assert corners.tolist() == [[[10.0], [15.0]]]


@pytest.mark.parametrize("dtype", (np.float32, np.float64))
@pytest.mark.parametrize("mode", ("linear", "nearest"))
def test_a_batch_index_is_whole(dtype, mode):
    at = np.array([(0.5, 0, 0, 0)], dtype)
    with pytest.raises(ValueError, match="column 0 of points must be a whole number"):
        ops.interpolate(X, at, mode=mode)
