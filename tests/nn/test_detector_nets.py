"""Detectors: decoding by hand, the same bits, half precision, what is refused."""

from dataclasses import replace

import mlx.core as mx
import numpy as np
import pytest
from detector_cases import BRANCHES, GRID, HEADS, NETS, randomised, scene

import mlx_lattice as ml
from mlx_lattice import models, ops


def decoded_by_hand(heat, cells, rows, decoding):
    """The best cells of each class, then of them all, with a loop."""
    best = []
    for c in range(heat.shape[1]):
        order = np.argsort(-heat[:, c], kind="stable")[: decoding.max_boxes]
        best += [(heat[i, c], c, i) for i in order]
    best.sort(key=lambda b: -b[0])
    kept = []
    for score, c, i in best[: decoding.max_boxes]:
        r = {name: a[i] for name, a in rows.items()}
        x = (cells[i, 1] + r["center"][0]) * decoding.stride * 0.5
        y = (cells[i, 0] + r["center"][1]) * decoding.stride * 0.5
        turn = np.arctan2(r["rot"][1], r["rot"][0])
        box = [x, y, r["center_z"][0], *np.exp(r["dim"]), turn, *r["vel"]]
        low, high = np.array(decoding.limit_range).reshape(2, 3)
        inside = (box[:3] >= low).all() and (box[:3] <= high).all()
        if score > decoding.score_threshold and inside:
            kept.append((score, c, box, r.get("iou")))
    return kept


PER_CLASS = {
    "by_class": True,
    "nms_threshold": (0.1, 0.3, 0.2),
    "nms_pre": (9, 20, 30),
    "nms_post": (5, 6, 4),
}
DECODINGS = {
    "heads": {"nms_threshold": 0.2, "nms_pre": 12, "nms_post": 6},
    "classes": PER_CLASS,
    "iou": PER_CLASS | {"rectifier": (0.7, 0.5, 0.6)},
    "scores": PER_CLASS | {"rectifier": (0.7, 0.5, 0.6), "nms_score": 0.2},
    "iou of heads": {"rectifier": (0.7, 0.5, 0.6), "nms_threshold": 0.2},
}


@pytest.mark.parametrize("how", DECODINGS)
@pytest.mark.parametrize("name", NETS)
def test_boxes_by_hand(name, how):
    """From random branches, classes not in the order of the heads."""
    limit = (1, 1, -1.5, 15, 11, 1.5)
    common = {"max_boxes": 25, "score_threshold": 0.3, "limit_range": limit}
    decoding = models.Decoding(**common, **DECODINGS[how])
    branches = (*BRANCHES, ("iou", 1, 1))
    classes = ("van", "man", "car")
    more = {"decoding": decoding, "classes": classes, "branches": branches}
    net = NETS[name](**more).eval()
    assert (net.decoding, net.classes) == (decoding, classes)
    rng, predictions = np.random.default_rng(0), []
    cells = np.stack(np.meshgrid(range(6), range(8), indexing="ij"), -1).reshape(-1, 2)
    for head in HEADS:
        made = {n: rng.normal(size=(2, 48, c)) for n, c, _ in branches}
        made["dim"] *= 0.5
        made["iou"] = np.clip(made["iou"], -1.2, 1.2)
        made["hm"] = rng.normal(size=(2, 48, len(head)))
        predictions.append({n: a.astype(np.float32) for n, a in made.items()})
    if name == "CenterPoint":
        given = [
            {n: mx.array(a.reshape(2, 6, 8, -1)) for n, a in head.items()}
            for head in predictions
        ]
    else:
        rows = np.concatenate(
            [np.insert(cells, 0, b, axis=1) for b in range(2)]
        ).astype(np.int32)
        x = ml.SparseTensor(mx.array(rows), mx.zeros((96, 1)))
        given = [
            {n: x.replace(mx.array(a.reshape(96, -1))) for n, a in head.items()}
            for head in predictions
        ]
    count = 0
    for element, found in enumerate(net.boxes(given)):
        groups = []
        for head, made in zip(HEADS, predictions, strict=True):
            own = {n: a[element].astype(np.float64) for n, a in made.items()}
            heat = 1 / (1 + np.exp(-own.pop("hm")))
            kept = decoded_by_hand(heat, cells, own, decoding)
            groups.append([(s, classes.index(head[c]), b, i) for s, c, b, i in kept])
        if name == "VoxelNeXt" and decoding.by_class:
            groups = [[box for group in groups for box in group]]
        expected = []
        for group in groups:
            if decoding.rectifier:
                powers = [decoding.rectifier[c] for _, c, _, _ in group]
                iou = [np.clip((i[0] + 1) / 2, 0, 1) for _, _, _, i in group]
                group = [
                    (s ** (1 - r) * u**r, c, b, i)
                    for (s, c, b, i), r, u in zip(group, powers, iou, strict=True)
                ]
            for c in range(3) if decoding.by_class else (None,):
                own = [g for g in group if c in (None, g[1])]
                if decoding.nms_score is not None:
                    own = [g for g in own if g[0] > decoding.nms_score]
                expected += suppressed(own, decoding, c)
        assert found.labels.tolist() == [c for _, c, _, _ in expected]
        boxes = np.array([b for _, _, b, _ in expected])
        assert np.allclose(np.array(found.boxes), boxes, atol=1e-5)
        assert np.allclose(np.array(found.scores), [s for s, *_ in expected], atol=1e-6)
        count += len(expected)
    assert count > 8


def suppressed(group, decoding, c):
    """The greedy loop over one group."""

    def own(value):
        return value[c] if isinstance(value, tuple) else value

    group = sorted(group, key=lambda g: -g[0])[: own(decoding.nms_pre)]
    if not group:
        return []
    boxes = mx.array(np.array([b for _, _, b, _ in group], np.float32))
    iou, kept = np.array(ops.rotated_iou(boxes, boxes)), []
    for j in range(len(group)):
        if not (iou[kept, j] > own(decoding.nms_threshold)).any():
            kept.append(j)
    return [group[j] for j in kept[: own(decoding.nms_post)]]


@pytest.mark.parametrize("name", NETS)
def test_the_same_bits_twice(name):
    net = randomised(NETS[name]()).eval()
    points = np.random.default_rng(1).uniform((0, 0, -3), (16, 16, 3), (900, 3))
    one, two = (net.detect_points(points, fill=True) for _ in range(2))
    assert len(one.scores) > 0
    for a, b in zip(one, two, strict=True):
        assert mx.array_equal(a, b)


@pytest.mark.parametrize(
    ("name", "dtype"), (("CenterPoint", "float16"), ("VoxelNeXt", "bfloat16"))
)
def test_in_half(name, dtype):
    net = randomised(NETS[name]()).eval()
    _, _, x = scene(60)
    whole = net(x)
    net.set_dtype(getattr(mx, dtype))
    assert net.dtype == getattr(mx, dtype)
    half = net(x.astype(net.dtype))
    for a, b in zip(whole, half, strict=True):
        for branch in a:
            p, q = (getattr(h[branch], "feats", h[branch]) for h in (a, b))
            assert q.dtype == net.dtype
            apart = mx.linalg.norm((p - q.astype(mx.float32)).flatten())
            assert apart <= 0.05 * mx.linalg.norm(p.flatten()), branch
    assert net.detect(x)[0].boxes.dtype == mx.float32


def test_what_is_refused():
    with pytest.raises(ValueError, match="each class must be of one head"):
        NETS["VoxelNeXt"](classes=("car", "man"))
    with pytest.raises(ValueError, match="a rectifier needs the branch"):
        NETS["VoxelNeXt"](decoding={"rectifier": (1, 1, 1), "by_class": True})
    with pytest.raises(ValueError, match="has 2 values, and there are 3 classes"):
        NETS["CenterPoint"](decoding={"nms_threshold": (0.1, 0.2), "by_class": True})
    with pytest.raises(ValueError, match="need by_class=True"):
        models.Decoding(nms_pre=(1, 2))
    with pytest.raises(ValueError, match="must be 6 numbers"):
        models.Decoding(limit_range=(1, 2))
    with pytest.raises(ValueError, match="must be at least 1"):
        models.Decoding(max_boxes=0)
    with pytest.raises(ValueError, match=r"one each of center \(2\)"):
        NETS["CenterPoint"](branches=BRANCHES[1:])
    with pytest.raises(ValueError, match="at least one convolution"):
        NETS["CenterPoint"](branches=(*BRANCHES, ("iou", 1, 0)))
    low = replace(GRID, point_range=(0, 0, 0, 16, 16, 3))
    with pytest.raises(ValueError, match="needs 23 cells of z or more"):
        models.CenterPoint(low, HEADS)
    with pytest.raises(ValueError, match="their channels are equal"):
        models.VoxelNeXt(GRID, HEADS, (4, 4, 4, 4, 8))
