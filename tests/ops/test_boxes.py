"""Boxes from above: areas against Shapely and by hand, suppression against its loop."""

import mlx.core as mx
import numpy as np
import pytest

from mlx_lattice import ops


def boxes(count, spread=4.0, seed=0, sizes=(0.2, 5)):
    rng = np.random.default_rng(seed)
    made = np.zeros((count, 7), np.float32)
    made[:, :2] = rng.uniform(-spread, spread, (count, 2))
    made[:, 3:6] = rng.uniform(*sizes, (count, 3))
    made[:, 6] = rng.uniform(-7, 7, count)
    return made


def exact(a, b) -> np.ndarray:
    """Rotated IoU in float64, by Shapely."""
    geometry = pytest.importorskip("shapely.geometry")

    def polygons(made):
        made = made.astype(np.float64)
        c, s = np.cos(made[:, 6]), np.sin(made[:, 6])
        unit = np.array([[-1, -1], [1, -1], [1, 1], [-1, 1]]) / 2
        x, y = np.moveaxis(unit * made[:, None, 3:5], -1, 0)
        turned = np.stack([c * x.T - s * y.T, s * x.T + c * y.T], axis=-1)
        turned = np.moveaxis(turned, 0, 1) + made[:, None, :2]
        return [geometry.Polygon(p) for p in turned]

    first, second = polygons(a), polygons(b)
    common = np.array([[p.intersection(q).area for q in second] for p in first])
    areas = [np.array([p.area for p in each]) for each in (first, second)]
    return common / np.maximum(areas[0][:, None] + areas[1] - common, 1e-8)


def pair(*rows):
    """Boxes (x, y, dx, dy, heading) with the rest of a box."""
    return np.array([(x, y, 0, dx, dy, 1, h) for x, y, dx, dy, h in rows], np.float32)


@pytest.mark.parametrize("spread", (0.5, 200))
def test_iou_of_random_boxes(spread):
    a, b = boxes(40, spread), boxes(30, spread, seed=1)
    a[:10] = b[:10]  # identical
    a[10:20, :2], a[10:20, 6] = b[10:20, :2], b[10:20, 6] + np.pi / 2
    expected = exact(a, b)
    found = np.array(ops.rotated_iou(mx.array(a), mx.array(b)))
    # Corners far from 0 are float32 already.
    assert np.abs(found - expected).max() <= 2e-6 * max(1, spread)


SPECIAL = {
    "identical": (pair((1, 2, 4, 2, 0.3)), pair((1, 2, 4, 2, 0.3)), 1),
    "a quarter": (pair((0, 0, 4, 2, 0)), pair((0, 0, 4, 2, np.pi / 2)), 1 / 3),
    "nested": (pair((0, 0, 4, 4, 0.5)), pair((0.1, 0.2, 1, 2, 1.2)), 1 / 8),
    "touching corners": (pair((0, 0, 2, 2, 0)), pair((2, 2, 2, 2, 0)), 0),
    "on a side": (pair((0, 0, 2, 2, 0)), pair((1 + 2**0.5, 0, 2, 2, np.pi / 4)), 0),
    "a line": (pair((0, 0, 2, 0, 0.2)), pair((0, 0, 2, 2, 0)), 0),
    "a point": (pair((0, 0, 0, 0, 0)), pair((0, 0, 0, 0, 1)), 0),
    "apart": (pair((0, 0, 2, 2, 0)), pair((50, 0, 2, 2, 0)), 0),
    "thin": (pair((0, 0, 10, 1e-3, 0)), pair((0, 0, 1, 1, np.pi / 4)), None),
}  # fmt: skip


@pytest.mark.parametrize("name", SPECIAL)
def test_iou_of_special_pairs(name):
    a, b, value = SPECIAL[name]
    for one, other in ((a, b), (b, a)):
        found = ops.rotated_iou(mx.array(one), mx.array(other))
        value = exact(one, other).item() if value is None else value
        assert abs(found.item() - value) <= 2e-6, name


def test_overlap_in_blocks_is_that_of_one(monkeypatch):
    a, b = mx.array(boxes(9)), mx.array(boxes(7, seed=1))
    whole = ops.rotated_overlap(a, b)
    monkeypatch.setattr("mlx_lattice.ops.boxes._PAIRS", 14)
    assert mx.array_equal(ops.rotated_overlap(a, b), whole)
    assert ops.rotated_iou(a[:0], b).shape == (0, 7)
    assert ops.rotated_iou(a, b[:0]).shape == (9, 0)


def test_corners():
    found = ops.box_corners(mx.array(pair((1, 2, 4, 2, np.pi / 2))))
    expected = [[[2, 0], [2, 4], [0, 4], [0, 0]]]
    assert mx.allclose(found, mx.array(expected), atol=1e-6)


def test_scores_are_sorted_and_ties_keep_their_order():
    scores = np.array([0.5, -0.0, 2, 0.5, 0.0, -1, np.inf, 0.5, -3e38], np.float32)
    order = np.array(ops.sort_scores(mx.array(scores)))
    assert order.tolist() == np.argsort(-scores, kind="stable").tolist()
    rows = mx.array(np.stack([scores, scores[::-1]]))
    both = np.array(ops.sort_scores(rows))
    assert both.tolist() == np.argsort(-np.array(rows), 1, kind="stable").tolist()
    assert ops.sort_scores(mx.zeros((3, 0))).shape == (3, 0)


def greedy(iou, scores, threshold, labels=None, pre=None, post=None):
    """The loop that suppression is defined by."""
    threshold = np.broadcast_to(threshold, len(scores))
    order = np.argsort(-scores, kind="stable")[:pre]
    kept = []
    for j in order:
        near = [i for i in kept if iou[i, j] > threshold[j]]
        if labels is not None:
            near = [i for i in near if labels[i] == labels[j]]
        if not near:
            kept.append(j)
    return kept[:post]


def assert_greedy(made, scores, threshold, labels=None, **cut):
    """``nms_rotated`` keeps the boxes of the loop, which are returned."""
    iou = np.array(ops.rotated_iou(mx.array(made), mx.array(made)))
    expected = greedy(iou, scores, threshold, labels, **cut)
    group = None if labels is None else mx.array(labels)
    limit = threshold if np.isscalar(threshold) else mx.array(threshold)
    result = ops.nms_rotated(
        mx.array(made), mx.array(scores), limit, labels=group, **cut
    )
    assert result.tolist() == expected
    return expected


@pytest.mark.parametrize("threshold", (0.0, 0.1, 0.7))
@pytest.mark.parametrize("spread", (0.5, 3))
def test_suppression_is_greedy(spread, threshold):
    made, rng = boxes(90, spread), np.random.default_rng(2)
    scores = rng.integers(0, 40, 90).astype(np.float32) / 40  # ties among them
    for labels in (None, rng.integers(0, 3, 90)):
        for cut in ({}, {"post": 7}, {"pre": 30, "post": 4}):
            assert_greedy(made, scores, threshold, labels, **cut)


def test_a_chain_of_suppression_takes_as_many_rounds():
    """Each box overlaps its neighbours alone: every second one is left."""
    made = pair(*((0.6 * i, 0, 1, 1, 0) for i in range(41)))
    scores = mx.arange(41, 0, -1).astype(mx.float32)
    kept = ops.nms_rotated(mx.array(made), scores, 0.1)
    assert kept.tolist() == list(range(0, 41, 2))


def test_thresholds_of_each_box_none_and_wrong_shapes():
    made = mx.array(pair((0, 0, 2, 2, 0), (0.5, 0, 2, 2, 0), (0.5, 0.1, 2, 2, 0)))
    scores = mx.array([3.0, 2.0, 1.0])
    each = mx.array([0.9, 0.5, 0.5])
    assert ops.nms_rotated(made, scores, each).tolist() == [0]
    assert ops.nms_rotated(made, scores, 0.99).tolist() == [0, 1, 2]
    # A threshold belongs to its box, whatever the order of the scores.
    turned = scores[::-1]
    assert ops.nms_rotated(made, turned, mx.array([0.5, 0.95, 0.9])).tolist() == [2, 1]
    assert ops.nms_rotated(made, turned, mx.array([0.9, 0.5, 0.5])).tolist() == [2, 0]
    assert ops.nms_rotated(made[:0], scores[:0], 0.5).tolist() == []
    with pytest.raises(ValueError, match="one a box; got"):
        ops.nms_rotated(made, scores[:2], 0.5)
    with pytest.raises(ValueError, match="x, y, z, dx, dy, dz, heading; got"):
        ops.rotated_iou(made[:, :5], made)
