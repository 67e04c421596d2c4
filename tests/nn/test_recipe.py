"""Recipes: voxels, features and rows as published preparations make them."""

import mlx.core as mx
import numpy as np
import pytest

import mlx_lattice as ml
from mlx_lattice import models
from mlx_lattice.models import About, VoxelRecipe

RNG = np.random.default_rng(5)
POINTS = RNG.uniform(-3, 4, (300, 3)).astype(np.float32)
ATTRIBUTES = {
    "colours": RNG.integers(0, 256, (300, 3)).astype(np.uint8),
    "normals": RNG.normal(size=(300, 3)).astype(np.float32),
    "intensity": RNG.uniform(size=300).astype(np.float32),
}


def unique(cells):
    """Sorted rows, the first point of each, and the row of each point."""
    rows, first, inverse = np.unique(
        cells, axis=0, return_index=True, return_inverse=True
    )
    return rows, first, inverse.reshape(-1)


def test_pointcept():
    """CenterShift, then cells from the lowest one, and the first point of each."""
    recipe = models.PUBLISHED["spunet-scannet"].voxels
    recipe = VoxelRecipe(0.7, recipe.features, centred=True, from_zero=True)
    x, rows = recipe(POINTS, ATTRIBUTES)
    low, high = POINTS.min(0), POINTS.max(0)
    shift = np.array([*((low + high) / 2)[:2], low[2]], np.float32)
    cells = np.floor((POINTS - shift) / np.float32(0.7)).astype(int)
    expected, first, inverse = unique(cells - cells.min(0))
    assert np.array_equal(np.array(x.coords)[:, 1:], expected)
    assert np.array_equal(np.array(rows), inverse)
    feats = np.concatenate(
        [ATTRIBUTES["colours"][first] / 255, ATTRIBUTES["normals"][first]], 1
    )
    assert np.allclose(np.array(x.feats), feats, atol=1e-6)
    assert recipe.channels == x.channels == 6


def test_minkowski():
    """Cells of the points as they are, and the mean of each."""
    recipe = VoxelRecipe(0.7, ("colours",), reduce="mean")
    x, rows = recipe(mx.array(POINTS), ATTRIBUTES)
    cells = np.floor(POINTS / np.float32(0.7)).astype(int)
    expected, _, inverse = unique(cells)
    assert np.array_equal(np.array(x.coords)[:, 1:], expected)
    total = np.zeros((len(expected), 3))
    np.add.at(total, inverse, ATTRIBUTES["colours"] / 255)
    mean = total / np.bincount(inverse)[:, None]
    assert np.allclose(np.array(x.feats), mean, atol=1e-5)


def test_spvnas():
    """The nearest corner, counted from the lowest; features before any of this."""
    recipe = VoxelRecipe(
        0.5, ("coordinates", "intensity"), from_zero=True, rounding="nearest"
    )
    x, rows = recipe(POINTS, ATTRIBUTES)
    cells = np.round(POINTS / np.float32(0.5)).astype(int)
    expected, first, inverse = unique(cells - cells.min(0))
    assert np.array_equal(np.array(x.coords)[:, 1:], expected)
    assert np.array_equal(np.array(rows), inverse)
    feats = np.concatenate([POINTS, ATTRIBUTES["intensity"][:, None]], 1)[first]
    assert np.allclose(np.array(x.feats), feats, atol=1e-6)


@pytest.mark.parametrize(
    ("colours", "expected"),
    (
        (np.array([[0, 51, 255]], np.uint8), (0, 0.2, 1)),
        (np.array([[0, 51, 255]], np.uint16), (0, 0.2, 1)),
        (np.array([[0, 13107, 65535]], np.uint16), (0, 0.2, 1)),
        (np.array([[0, 0.2, 1]], np.float32), (0, 0.2, 1)),
        (np.array([[0, 51, 255]], np.float64), (0, 0.2, 1)),
    ),
)
@pytest.mark.parametrize("around", (False, True))
def test_white(colours, expected, around):
    """Colours of files are bytes, 16 bits or fractions; some nets have -1 to 1."""
    wide = (-1.0, 1.0) if around else (0.0, 1.0)
    recipe = VoxelRecipe(1.0, ("colours",), colour_range=wide)
    x, _ = recipe(np.zeros((1, 3)), {"colours": colours})
    expected = np.array([expected]) * (2 if around else 1) - around
    assert np.allclose(np.array(x.feats), expected, atol=1e-6)


def test_no_points():
    recipe = models.PUBLISHED["spunet-scannet"].voxels
    x, rows = recipe(np.zeros((0, 3)), {}, fill=True)
    assert x.feats.shape == (0, 6) and rows.shape == (0,)


def test_what_the_scan_lacks():
    recipe = VoxelRecipe(0.5, ("normals", "ones"))
    with pytest.raises(
        ValueError, match=r"no normals \(intensity\): give the attribute"
    ):
        recipe(POINTS, {"intensity": ATTRIBUTES["intensity"]})
    with pytest.raises(ValueError, match=r"no normals \(no attributes\)"):
        recipe(POINTS)
    x, _ = recipe(POINTS, fill=True)
    assert (np.array(x.feats) == np.array([0, 0, 0, 1])).all()
    with pytest.raises(ValueError, match=r"normals must have shape \(300, 3\)"):
        recipe(POINTS, {"normals": ATTRIBUTES["normals"][:7]})
    turned = {**ATTRIBUTES, "normals": ATTRIBUTES["normals"].T}  # as many numbers
    with pytest.raises(ValueError, match=r"shape \(300, 3\), .*; got \(3, 300\)"):
        recipe(POINTS, turned)
    one = VoxelRecipe(0.7, ("intensity",))
    column = ATTRIBUTES["intensity"][:, None]
    assert mx.array_equal(
        one(POINTS, ATTRIBUTES)[0].feats, one(POINTS, {"intensity": column})[0].feats
    )


@pytest.mark.parametrize(
    ("wrong", "said"),
    (
        ({"voxel_size": 0}, "voxel_size must be positive; got 0"),
        ({"voxel_size": np.inf}, "voxel_size must be finite; got inf"),
        ({"features": ("colour",)}, r"must be names of .*; got \('colour',\)"),
        ({"features": ()}, "must be names of"),
        ({"reduce": "last"}, "reduce must be one of"),
        ({"rounding": "ceil"}, "rounding must be one of"),
        ({"colour_range": (0,)}, "must be two numbers"),
        ({"voxel_size": "1"}, "voxel_size must be a number; got '1'"),
        ({"colour_range": ("0", "1")}, "colour_range must be a number; got '0'"),
    ),
)
def test_recipes_that_are_none(wrong, said):
    with pytest.raises((TypeError, ValueError), match=said):
        VoxelRecipe(**({"voxel_size": 1.0} | wrong))


@pytest.mark.parametrize("size", (np.float32(0.5), mx.array(0.5), 0.5))
def test_every_voxel_size_is_a_number_of_any_library(size):
    assert type(VoxelRecipe(size).voxel_size) is float
    grid = models.GridRecipe((size,) * 3, (0, 0, 0, 1, 1, 1))
    assert type(grid.voxel_size[0]) is float
    points = np.array([[0.6, 0.0, 0.0]])
    for given in (size, (size,) * 3):
        x = ml.SparseTensor.from_points(points, voxel_size=given)
        assert x.coords.tolist() == [[0, 1, 0, 0]]


@pytest.mark.parametrize(
    "name, middle, half",
    (
        ("spunet-scannet", 127.5, 127.5),  # Pointcept's NormalizeColor until 1.5.2
        ("ptv3-scannet", 127.5, 127.5),
        ("minkunet-scannet", 127.5, 255),  # MinkowskiEngine's examples/indoor.py
    ),
)
def test_colours_as_published_weights_were_trained_on(name, middle, half):
    x, rows = models.PUBLISHED[name].voxels(POINTS, ATTRIBUTES)
    assert len(x) == len(POINTS)  # one point a voxel
    expected = (ATTRIBUTES["colours"].astype(np.float64) - middle) / half
    assert np.allclose(np.array(x.feats[rows])[:, :3], expected, atol=1e-6)


@pytest.mark.parametrize("name", models.PUBLISHED)
def test_published_descriptions(name):
    about = models.PUBLISHED[name]
    assert len(set(about.classes)) == len(about.classes) == len(about.colours)
    assert About.of(about.config()) == about
    assert about.palette(3) == about.colours[:3] and about.label(99) == "class 99"


def test_classes_without_colours_have_distinct_ones():
    assert len(set(About().palette(40))) == 40
    with pytest.raises(ValueError, match="a colour for each of the 2 classes; got 1"):
        About(classes=("a", "b"), colours=((0, 0, 0),))
    for colour in ((0, 0), (0, 0, 256), (0, 0, 0.5)):
        with pytest.raises(ValueError, match="three integers from 0 to 255"):
            About(classes=("a",), colours=(colour,))


# Voxels of detectors, against loops over points


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


def test_grids_that_are_refused():
    made = points()[:, :3]
    with pytest.raises(ValueError, match=r"have no intensity \(no attributes\)"):
        models.GridRecipe(SIZE, RANGE)(made)
    filled = models.GridRecipe(SIZE, RANGE)(made, fill=True)
    assert not filled.feats[:, 3].any()
    with pytest.raises(
        ValueError, match=r"must have shape \(300, 1\), one row a point"
    ):
        models.GridRecipe(SIZE, RANGE)(made, {"intensity": made})
    for given, said in (
        ((SIZE, (0, 0, 0, 0, 1, 1)), "must be positive and point_range hold"),
        ((SIZE, RANGE, ("intensity",)), "begin with x, y and z"),
        ((SIZE, RANGE, ("x", "y", "z"), 0), "max_points must be 1 or more; got 0"),
        ((1, RANGE), "voxel_size must be 3 numbers; got 1"),
        (((1, 1, np.nan), RANGE), "voxel_size must be finite; got nan"),
    ):
        with pytest.raises(ValueError, match=said):
            models.GridRecipe(*given)


@pytest.mark.parametrize("batch", ([0, 1, 2], np.zeros(40), np.zeros((40, 1), int)))
def test_a_batch_index_of_each_point(batch):
    points = np.zeros((40, 3))
    with pytest.raises(
        ValueError, match=r"batch must be \(40,\) integers, one for each"
    ):
        models.dynamic_voxels(points, SIZE, RANGE, batch)
    with pytest.raises(
        ValueError, match=r"batch must be \(40,\) integers, one for each"
    ):
        ml.SparseTensor.from_points(points, voxel_size=1.0, batch=batch)
