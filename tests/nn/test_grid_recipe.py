"""Voxels of detectors: hard and dynamic ones against loops over points."""

import mlx.core as mx
import numpy as np
import pytest

import mlx_lattice as ml
from mlx_lattice import models

SIZE, RANGE = (0.5, 0.4, 1.0), (-2.0, -2.0, -1.0, 2.0, 2.0, 2.0)


def points(count=300, channels=4):
    made = np.random.default_rng(0).uniform(-2.4, 2.4, (count, channels))
    return made.astype(np.float32)


def cells(made):
    low, size = np.float32(RANGE[:3]), np.float32(SIZE)
    at = np.floor((made[:, :3] - low) / size).astype(int)
    return at, ((at >= 0) & (at < (8, 10, 3))).all(1)


@pytest.mark.parametrize("max_points", (1, 3, 50))
@pytest.mark.parametrize("max_voxels", (1, 20, None))
def test_hard_voxels(max_points, max_voxels):
    made, held = points(), {}
    at, inside = cells(made)
    for point, cell in zip(made[inside], map(tuple, at[inside]), strict=True):
        if cell not in held and max_voxels and len(held) == max_voxels:
            continue
        slots = held.setdefault(cell, [])
        if len(slots) < max_points:
            slots.append(point)
    found = models.hard_voxels(mx.array(made), SIZE, RANGE, max_points, max_voxels)
    assert found.coords.tolist() == [list(cell[::-1]) for cell in held]
    assert found.counts.tolist() == [len(slots) for slots in held.values()]
    expected = np.zeros((len(held), max_points, 4), np.float32)
    for row, slots in zip(expected, held.values(), strict=True):
        row[: len(slots)] = slots
    assert np.array_equal(np.array(found.voxels), expected)
    mean = expected.sum(1) / np.array(found.counts)[:, None]
    assert np.allclose(np.array(models.mean_vfe(found)), mean, atol=1e-6)


def test_dynamic_voxels():
    made, batch = points(), np.arange(300) % 3
    at, inside = cells(made)
    held = {}
    for i in np.flatnonzero(inside):
        held.setdefault((batch[i], *at[i]), []).append(made[i])
    x = models.dynamic_voxels(mx.array(made), SIZE, RANGE, mx.array(batch))
    keys = sorted(held)
    assert x.coords.tolist() == [[b, z, y, c] for b, c, y, z in keys]
    mean = np.stack([np.mean(held[key], axis=0) for key in keys])
    assert np.allclose(np.array(x.feats), mean, atol=1e-6)
    assert x.spatial_shape == (4, 10, 8)


@pytest.mark.parametrize("count", (0, 1))
def test_few_points(count):
    made = mx.array(points(400)[:count]) * 0
    recipe = models.GridRecipe(SIZE, RANGE, max_points=5)
    x = recipe(made[:, :3], {"intensity": made[:, 3]})
    assert x.shape == (count, 4) and x.batch_size == 1
    batch = mx.zeros((count,), mx.int32)
    assert len(models.dynamic_voxels(made, SIZE, RANGE, batch, batch_size=2)) == count


@pytest.mark.parametrize("limits", ((5, 30), (5, None), (None, 30), (None, None)))
def test_a_recipe_of_a_scan(limits):
    made = points()
    recipe = models.GridRecipe(SIZE, RANGE, max_points=limits[0], max_voxels=limits[1])
    x = recipe(made[:, :3], {"intensity": made[:, 3]})
    assert x.spatial_shape == (4, 10, 8) and x.channels == recipe.channels
    if limits == (None, None):
        batch = mx.zeros((300,), mx.int32)
        feats = models.dynamic_voxels(mx.array(made), SIZE, RANGE, batch).feats
    else:
        hard = models.hard_voxels(
            mx.array(made), SIZE, RANGE, limits[0] or 300, limits[1]
        )
        feats = models.mean_vfe(hard)
    assert mx.array_equal(x.feats, feats)


def test_what_is_refused():
    made = points()[:, :3]
    with pytest.raises(ValueError, match=r"have no intensity \(no attributes\)"):
        models.GridRecipe(SIZE, RANGE)(made)
    filled = models.GridRecipe(SIZE, RANGE)(made, fill=True)
    assert not filled.feats[:, 3].any()
    with pytest.raises(
        ValueError, match=r"must have shape \(300, 1\), one row a point"
    ):
        models.GridRecipe(SIZE, RANGE)(made, {"intensity": made})
    with pytest.raises(ValueError, match="must be positive and point_range hold"):
        models.GridRecipe(SIZE, (0, 0, 0, 0, 1, 1))
    with pytest.raises(ValueError, match="begin with x, y and z"):
        models.GridRecipe(SIZE, RANGE, ("intensity",))
    with pytest.raises(ValueError, match="must be 3 numbers"):
        models.GridRecipe((1, 1), RANGE)
    with pytest.raises(ValueError, match="max_points must be 1 or more; got 0"):
        models.GridRecipe(SIZE, RANGE, max_points=0)
    with pytest.raises(ValueError, match="voxel_size must be 3 numbers; got 1"):
        models.GridRecipe(1, RANGE)
    with pytest.raises(ValueError, match="voxel_size must be finite; got nan"):
        models.GridRecipe((1, 1, np.nan), RANGE)


@pytest.mark.parametrize("batch", ([0, 1, 2], np.zeros(40), np.zeros((40, 1), int)))
def test_a_batch_index_of_each_point(batch):
    points = np.zeros((40, 3))
    with pytest.raises(ValueError, match=r"batch must be \(40,\) integers, one a"):
        models.dynamic_voxels(points, SIZE, RANGE, batch)
    with pytest.raises(ValueError, match=r"batch must be \(40,\) integers, one a"):
        ml.SparseTensor.from_points(points, voxel_size=1.0, batch=batch)


def test_an_empty_list_is_the_batch_indices_of_no_points():
    points = np.zeros((0, 3), np.float32)
    assert len(models.dynamic_voxels(points, SIZE, RANGE, [])) == 0
    assert len(ml.SparseTensor.from_points(points, voxel_size=1.0, batch=[])) == 0
