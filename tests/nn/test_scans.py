"""Tiles, votes and IoU: as the whole scan, as NumPy has them, and what is refused."""

import mlx.core as mx
import numpy as np
import pytest

from mlx_lattice import models, nn
from mlx_lattice.models.scans import VIEWS, Tiles


class Pointwise(models.Segmentor):
    """Scores that a voxel's own features decide."""

    def __init__(self, channels=1, classes=3):
        super().__init__()
        self.sizes = []
        self.layer = nn.Linear(channels, classes)

    def __call__(self, x):
        return self.layer(x)

    def score_voxels(self, voxels):
        self.sizes.append(voxels.rows.size)
        return super().score_voxels(voxels)


def pointwise(*features, classes=3, size=1e-3, **recipe):
    mx.random.seed(0)
    recipe = models.VoxelRecipe(size, features, **recipe)
    net = Pointwise(recipe.channels, classes)
    net.about = models.About(recipe)
    return net.eval()


def unet(**recipe):
    """A net that reaches 16 voxels: 1 of the stem, 2 of each block and 8 below."""
    mx.random.seed(0)
    net = models.SpUNet(2, 5, 32, (32, 32), layers=(1, 1))
    net.about = models.About(models.VoxelRecipe(0.4, ("ones", "height"), **recipe))
    return net.eval()


def ground(count=20_000, side=40.0, seed=0):
    """Points on a floor, and a third above it."""
    rng = np.random.default_rng(seed)
    points = rng.uniform(0, side, (count, 3)).astype(np.float32)
    points[:, 2] = np.where(rng.random(count) < 0.3, rng.uniform(0, 3, count), 0)
    return points


@pytest.mark.parametrize("votes", (1, 5))
@pytest.mark.parametrize(
    "recipe",
    (
        {},
        {"centred": True, "from_zero": True},
        {"from_zero": True, "rounding": "nearest", "reduce": "mean"},
    ),
    ids=("absolute", "centred", "nearest"),
)
def test_tiles_have_the_labels_of_the_whole_scan(recipe, votes):
    net, points = unet(**recipe), ground() + np.float32([-7.3, 11.1, 0])
    whole = models.segment_points(net, points, votes=votes)
    assert whole.tiles == 1 and whole.classes == 5 and len(set(whole.labels)) > 2
    tiled = models.segment_points(net, points, votes=votes, tile=20, overlap=14)
    assert tiled.tiles == 25 and np.array_equal(tiled.labels, whole.labels)
    np.testing.assert_allclose(tiled.confidence, whole.confidence, atol=1e-6)
    # With little overlap a net sees less beyond a border.
    narrow = models.segment_points(net, points, votes=votes, tile=20, overlap=0.5)
    assert narrow.tiles == 9
    assert 0.8 < (narrow.labels == whole.labels).mean() < 1


def test_one_view_of_one_tile_is_the_net_itself():
    net, points = unet(centred=True), ground(5000)
    scores = net.score_points(points).astype(mx.float32)
    found = models.segment_points(net, mx.array(points))
    assert np.array_equal(found.labels, np.array(mx.argmax(scores, axis=1)))
    chances = np.array(mx.softmax(scores, axis=1)).max(axis=1)
    np.testing.assert_allclose(found.confidence, chances, atol=1e-6)


def test_votes_of_an_invariant_net_change_nothing():
    rng, net = np.random.default_rng(0), pointwise("intensity", "colours")
    points = rng.uniform(-5, 5, (2000, 3)).astype(np.float32)
    given = {
        "intensity": rng.normal(size=2000).astype(np.float32),
        "colours": rng.integers(0, 65536, (2000, 3)).astype(np.uint16),
    }
    given["colours"][:1000] //= 300  # half of the scan is darker than 256
    points[:1000, 0] -= 10
    once = models.segment_points(net, points, given)
    assert len(set(once.labels)) > 1
    for options in ({"votes": len(VIEWS)}, {"votes": 4, "tile": 4, "overlap": 1}):
        again = models.segment_points(net, points, given, **options)
        assert np.array_equal(again.labels, once.labels)
        np.testing.assert_allclose(again.confidence, once.confidence, atol=1e-6)


@pytest.mark.parametrize("vertical", (0, 1, 2))
def test_votes_sum_the_probabilities_of_turned_points_and_normals(vertical):
    """Against a loop of its own, which turns by angles."""
    rng, net = np.random.default_rng(1), pointwise("coordinates", "normals")
    points = rng.uniform(-2, 2, (500, 3)).astype(np.float32)
    normals = rng.normal(size=(500, 3)).astype(np.float32)
    a, b = (axis for axis in range(3) if axis != vertical)
    total = 0
    for k in range(14):
        angle, scale = k % 4 * np.pi / 2, (1, 0.95, 1.05)[k // 4 % 3]
        views = []
        for rows in (points, normals):
            turned = rows.astype(np.float64)
            x = -rows[:, a] if k >= 12 else rows[:, a]
            turned[:, a] = x * np.cos(angle) - rows[:, b] * np.sin(angle)
            turned[:, b] = x * np.sin(angle) + rows[:, b] * np.cos(angle)
            views.append(turned)
        both = np.concatenate([views[0] * scale, views[1]], axis=1)
        scores = both @ np.array(net.layer.weight).T + np.array(net.layer.bias)
        chances = np.exp(scores - scores.max(axis=1, keepdims=True))
        total = total + chances / chances.sum(axis=1, keepdims=True)
    found = models.segment_points(
        net, points, {"normals": normals}, votes=14, vertical=vertical
    )
    np.testing.assert_allclose(found.confidence, total.max(axis=1) / 14, atol=1e-5)
    assert np.array_equal(found.labels, total.argmax(axis=1))


def test_each_point_has_the_tile_whose_border_is_farthest():
    points = ground(3000, 30.0)
    tiles = Tiles(points, 12.0, 4.0, (0, 1), 0.1)
    seen = np.zeros(len(points), int)
    for part in tiles:
        rows = part.rows
        assert (np.diff(rows) > 0).all()  # in the order of the scan
        assert np.array_equal(rows[part.inner], part.core)
        seen[part.core] += 1
        low, high = points[rows, :2].min(axis=0), points[rows, :2].max(axis=0)
        assert (high - low <= 12.001).all()
        # Two metres and more of the scan around the points of its own.
        near = points[part.core, :2].min(axis=0) - 1.999
        far = points[part.core, :2].max(axis=0) + 1.999
        around = ((points[:, :2] > near) & (points[:, :2] < far)).all(axis=1)
        assert set(np.flatnonzero(around)) <= set(rows)
    assert (seen == 1).all()


def test_the_net_never_reads_more_than_a_tile():
    """Three million points on a strip; memory is that of a tile, not of the strip."""
    rng, net = np.random.default_rng(0), pointwise("ones", size=0.5)
    points = rng.uniform(0, (600, 50, 5), (3_000_000, 3)).astype(np.float32)
    mx.reset_peak_memory()
    found = models.segment_points(net, points[:300_000] / (10, 1, 1), tile=20)
    small, one = mx.get_peak_memory(), max(net.sizes)
    net.sizes.clear()
    mx.reset_peak_memory()
    found = models.segment_points(net, points, tile=20)
    # Tiles of 20 x 20 metres of 600 x 50.
    assert found.tiles == len(net.sizes) == 38 * 3
    assert max(net.sizes) < 1.1 * one < 1.1 * 50_000
    assert mx.get_peak_memory() < 1.2 * small


def test_tiles_without_points_are_skipped():
    """Two clusters, five thousand tiles apart."""
    net, points = pointwise("ones"), ground(1000, 5.0)
    points[500:, :2] += 10_000
    calls = []
    found = models.segment_points(
        net, points, tile=2, overlap=0, votes=2, progress=lambda *n: calls.append(n)
    )
    assert found.tiles == len(net.sizes) / 2 <= 2 * 4 * 4
    total = 2 * found.tiles
    assert calls == [(i, total) for i in range(total + 1)]


@pytest.mark.parametrize(
    "options, said",
    (
        ({"tile": 5, "overlap": 5}, "tile must be larger than overlap by a voxel"),
        ({"tile": 5, "overlap": 7}, "got tile 5, overlap 7"),
        ({"tile": 5, "overlap": -1}, "and overlap 0 or more"),
        ({"tile": 0}, "got tile 0, overlap 0"),
        ({"tile": float("nan")}, "tile"),
        ({"overlap": 5}, "overlap needs tile"),
        ({"votes": 0}, "votes must be 1 to 24; got 0"),
        ({"votes": 25}, "votes must be 1 to 24; got 25"),
        ({"vertical": 3}, "vertical must be 0, 1 or 2; got 3"),
        ({"points": np.zeros((0, 3))}, "points must have shape (P, 3), P from 1 on"),
        ({"points": np.zeros((4, 2))}, "got (4, 2)"),
        ({"points": np.full((4, 3), np.nan)}, "coordinates must be finite"),
        ({"attributes": {}}, "these points have no intensity"),
        ({"attributes": {"intensity": np.ones(9)}}, "intensity must have a row for"),
        ({"attributes": {"intensity": np.full(8, np.inf)}}, "intensity must be finite"),
    ),
)
def test_what_is_refused(options, said):
    given = {"points": ground(8), "attributes": {"intensity": np.ones(8)}, **options}
    with pytest.raises(ValueError) as error:
        models.segment_points(pointwise("intensity"), **given)
    assert said in str(error.value)


def test_nan_scores_and_a_net_without_a_recipe_are_refused():
    net = pointwise("ones")
    net.layer.bias = mx.full((3,), float("nan"))
    with pytest.raises(ValueError, match="scores are NaN"):
        models.segment_points(net, ground(50), tile=10)
    with pytest.raises(ValueError, match="does not say how its voxels are made"):
        models.segment_points(Pointwise(), ground(50))


# IoU
