"""Points of float64, and of integers beyond 2^24, lose nothing on the way to cells."""

import mlx.core as mx
import numpy as np
import pytest

import mlx_lattice as ml
from mlx_lattice import models, ops
from mlx_lattice.models.detection.voxels import (
    GridRecipe,
    dynamic_voxels,
    hard_voxels,
)

NEAR = np.random.default_rng(0).random((500, 3)) * 2
FAR = 1e7


def cells(points, **arguments) -> list:
    made = ml.SparseTensor.from_points(points, voxel_size=0.1, **arguments)
    return made.coords.tolist()


@pytest.mark.parametrize("kind", ("numpy", "list", "mlx"))
def test_an_origin_is_subtracted_before_anything_is_rounded(kind):
    moved, expected = NEAR + FAR, np.floor((NEAR + FAR - FAR) / 0.1).astype(int)
    given = {
        "numpy": moved,
        "list": moved.tolist(),
        "mlx": mx.array(moved, dtype=mx.float64),
    }[kind]
    unique = np.unique(expected, axis=0)
    assert [row[1:] for row in cells(given, origin=FAR)] == unique.tolist()


def test_cells_far_from_the_origin_are_told_apart():
    expected = np.unique(np.floor((NEAR + FAR) / 0.1).astype(int), axis=0)
    assert [row[1:] for row in cells(NEAR + FAR)] == expected.tolist()


def test_float32_points_are_as_they_were():
    single = NEAR.astype(np.float32)
    expected = np.unique(np.floor(single / np.float32(0.1)).astype(int), axis=0)
    for given in (single, mx.array(single)):
        assert [row[1:] for row in cells(given)] == expected.tolist()


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
        ({"voxel_size": np.nan}, "voxel_size must be finite; got nan"),
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
    made = models.VoxelRecipe(
        0.1, ("height",), centred=centred, from_zero=True, rounding=rounding
    )
    near, far = made(NEAR + 0.05), made(NEAR + 0.05 + FAR)
    # 1e7 is a whole number of voxels; centred, the box is moved back.
    assert len(near.x) == len(far.x)
    assert mx.array_equal(near.rows, far.rows)
    assert mx.allclose(near.x.feats, far.x.feats, atol=1e-5)


@pytest.mark.parametrize("most", (None, 5))
def test_a_grid_of_map_coordinates(most):
    def made(at: float) -> ml.SparseTensor:
        box = (at, at, at, at + 2, at + 2, at + 2)
        recipe = GridRecipe((0.1,) * 3, box, ("x", "y", "z"), most, most and 10**5)
        return recipe(NEAR + at)

    near, far = made(0.0), made(1e6)
    assert mx.array_equal(near.coords, far.coords)


def test_the_functions_of_grids():
    size, box = (0.1,) * 3, (FAR,) * 3 + (FAR + 2,) * 3
    count = len(np.unique(np.floor((NEAR + FAR - FAR) / 0.1), axis=0))
    assert len(hard_voxels(NEAR + FAR, size, box, 5).coords) == count
    batch = mx.zeros((len(NEAR),), dtype=mx.int32)
    made = dynamic_voxels(NEAR + FAR, size, box, batch)
    assert len(made) == count and made.dtype == mx.float32
    with pytest.raises(ValueError, match="max_points must be 1 or more; got -3"):
        hard_voxels(NEAR, size, box, -3)


# Neighbours


def rows(points: np.ndarray) -> np.ndarray:
    return np.concatenate([np.zeros((len(points), 1)), points], axis=1)


def test_neighbours_of_map_coordinates():
    near, far = rows(NEAR), rows(NEAR + 1e6)
    expected, found = ops.knn(near, 3), ops.knn(far, 3)
    assert mx.array_equal(expected.rows, found.rows)
    assert mx.allclose(expected.distances, found.distances, atol=1e-6)
    asked = ops.knn(far, 2, queries=far[:9] + (0, 0.01, 0, 0))
    again = ops.knn(near, 2, queries=near[:9] + (0, 0.01, 0, 0))
    assert mx.array_equal(asked.rows, again.rows)
    balls = [ops.radius_neighbours(p, 0.25) for p in (near, far)]
    assert mx.array_equal(balls[0].rows, balls[1].rows)


def test_no_points_of_float64():
    nothing = np.zeros((0, 4))
    assert ops.knn(nothing, 2, queries=rows(NEAR)).rows.shape == (500, 2)
    assert len(ml.SparseTensor.from_points(nothing[:, 1:], voxel_size=1.0)) == 0


# Interpolation

EDGE = 2**24


def beyond() -> ml.SparseTensor:
    coords = mx.array([(0, EDGE, 0, 0), (0, EDGE + 1, 0, 0)])
    return ml.SparseTensor(coords, mx.array([[10.0], [20.0]]))


@pytest.mark.parametrize("mode", ("linear", "nearest"))
@pytest.mark.parametrize("renormalise", (False, True))
def test_integer_points_are_cells(mode, renormalise):
    x, options = beyond(), {"mode": mode, "renormalise": renormalise}
    for at in (x.coords, np.array(x.coords), x.coords.astype(mx.int64)):
        assert ops.interpolate(x, at, **options).tolist() == [[10.0], [20.0]]
    missing = x.coords + mx.array([0, 0, 1, 0])
    assert ops.interpolate(x, missing, **options).tolist() == [[0.0], [0.0]]


def test_float64_points_between_far_cells():
    x = beyond()
    at = np.array(x.coords, np.float64)[:1] + (0, 0.25, 0, 0)
    assert ops.interpolate(x, at).tolist() == [[12.5]]
    at[0, 1] += 0.5
    assert ops.interpolate(x, at, mode="nearest").tolist() == [[20.0]]
    at[0, 1] = 1e300
    with pytest.raises(ValueError, match="points must be finite and within int32"):
        ops.interpolate(x, at)


def test_a_grid_of_far_points():
    x = beyond()
    at = x.coords[None, :, 1:]
    nearest = ops.grid_sample_3d(x, at, mode="nearest")
    assert nearest.tolist() == [[[10.0], [20.0]]]
    middles = ops.grid_sample_3d(x, np.array(at, np.float64) + 0.5)
    assert middles.tolist() == [[[10.0], [20.0]]]
    # An integer is the corner between eight cells.
    corners = ops.grid_sample_3d(x, at, renormalise=True)
    assert corners.tolist() == [[[10.0], [15.0]]]


@pytest.mark.parametrize("dtype", (np.float32, np.float64))
@pytest.mark.parametrize("mode", ("linear", "nearest"))
def test_a_batch_index_is_whole(dtype, mode):
    at = np.array([(0.5, 0, 0, 0)], dtype)
    with pytest.raises(ValueError, match="column 0 of points must be a whole number"):
        ops.interpolate(beyond(), at, mode=mode)
