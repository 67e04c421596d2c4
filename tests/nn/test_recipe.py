"""Voxel recipes: cells, features and rows as published preparations make them."""

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


def test_height_and_ones():
    x, rows = VoxelRecipe(0.5, ("height", "ones"))(POINTS)
    expected = POINTS[:, 2:] - POINTS[:, 2].min()
    found = np.array(x.feats)[np.array(rows)]
    assert np.abs(found[:, :1] - expected).max() <= 0.5 and (found[:, 1] == 1).all()


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
        ({"features": ("colour",)}, r"must be of .*; got \('colour',\)"),
        ({"features": ()}, "must be of"),
        ({"reduce": "last"}, "reduce must be one of"),
        ({"rounding": "ceil"}, "rounding must be one of"),
        ({"colour_range": (0,)}, "must be two numbers"),
    ),
)
def test_recipes_that_are_none(wrong, said):
    with pytest.raises(ValueError, match=said):
        VoxelRecipe(**({"voxel_size": 1.0} | wrong))


@pytest.mark.parametrize(
    ("wrong", "said"),
    (
        ({"voxel_size": "1"}, "voxel_size must be a number; got '1'"),
        ({"voxel_size": True}, "voxel_size must be a number; got True"),
        ({"colour_range": ("0", "1")}, "colour_range must be a number; got '0'"),
    ),
)
def test_what_is_no_number(wrong, said):
    with pytest.raises(TypeError, match=said):
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
