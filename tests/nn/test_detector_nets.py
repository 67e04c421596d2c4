"""Detectors: backbones, decoding by hand, the loss, precision, what is refused."""

from dataclasses import replace
from functools import partial

import mlx.core as mx
import mlx.nn
import numpy as np
import pytest
from detector_cases import BRANCHES, GRID, HEADS, NETS, WIDTHS, randomised, scene
from differences import assert_slope
from mlx.utils import tree_flatten
from processes import on_the_cpu_alone

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
    low = replace(GRID, point_range=(0, 0, 0, 16, 16, 3))
    two = {"nms_threshold": (0.1, 0.2), "by_class": True}
    rectified = {"rectifier": (1, 1, 1), "by_class": True}
    for kind, options, said in (
        ("VoxelNeXt", {"classes": ("car", "man")}, "each class must be of one head"),
        ("VoxelNeXt", {"decoding": rectified}, "a rectifier needs the branch"),
        ("CenterPoint", {"decoding": two}, "has 2 values, and there are 3 classes"),
        ("CenterPoint", {"branches": BRANCHES[1:]}, r"one each of center \(2\)"),
        ("CenterPoint", {"branches": (*BRANCHES, ("iou", 1, 0))}, "at least one conv"),
    ):
        with pytest.raises(ValueError, match=said):
            NETS[kind](**options)
    with pytest.raises(ValueError, match="needs 23 cells of z or more"):
        models.CenterPoint(low, HEADS)
    with pytest.raises(ValueError, match="their channels are equal"):
        models.VoxelNeXt(GRID, HEADS, (4, 4, 4, 4, 8))
    for options, said in (
        ({"nms_pre": (1, 2)}, "need by_class=True"),
        ({"limit_range": (1, 2)}, "must be 6 numbers"),
        ({"max_boxes": 0}, "must be at least 1"),
    ):
        with pytest.raises(ValueError, match=said):
            models.Decoding(**options)


def test_unetv2_without_its_encoded_tensor():
    _, _, x = scene()
    net = models.UNetV2(4, WIDTHS, return_encoded=False).eval()
    encoded, y = net(x)
    assert encoded is None and y.key == x.key and y.channels == WIDTHS[0]
    assert not any("conv_out" in n for n, _ in tree_flatten(net.parameters()))
    with pytest.raises(ValueError, match="takes a tensor of .* with a spatial_shape"):
        net(ml.SparseTensor(x.coords, x.feats))
    with pytest.raises(ValueError, match="widths are those of"):
        models.VoxelBackBone8x(4, (1, 2, 3))


def sum_over_height(levels) -> ml.SparseTensor:
    """Rows of levels at one (batch, y, x) of the first of them, added up."""
    coords = [
        x.coords[:, mx.array([0, 2, 3])] * mx.array([1, 2**i, 2**i])
        for i, x in enumerate(levels)
    ]
    return ops.unique_sum(
        mx.concatenate(coords),
        mx.concatenate([x.feats for x in levels]),
        stride=levels[0].stride[1:],
        spatial_shape=levels[0].spatial_shape[1:],
        batch_size=2,
    )


@pytest.mark.parametrize("dtype", ("float32", "float16"))
@pytest.mark.parametrize("count", (0, 1, 150))
def test_a_sum_over_height(count, dtype):
    """Of VoxelNeXt: the rows, their sums and the gradients of these."""
    _, _, x = scene(count)
    x = x.astype(getattr(mx, dtype))
    net = randomised(models.VoxelResBackBone8xVoxelNeXt(4, WIDTHS, 6)).eval()
    net.set_dtype(x.dtype)
    made = net.stages(x)
    levels = [made[f"x_conv{i}"] for i in (4, 5, 6)]
    y, expected = made["bev_sum"], sum_over_height(levels)
    assert y.coords.tolist() == expected.coords.tolist() and y.manager is x.manager
    for fact in ("stride", "spatial_shape", "batch_size", "dtype"):
        assert getattr(y, fact) == getattr(expected, fact), fact
    assert mx.allclose(y.feats, expected.feats, 1e-3, 1e-3)
    scale = mx.random.normal(y.shape).astype(y.dtype)

    def loss(of, *feats):
        given = [x.replace(f) for x, f in zip(levels, feats, strict=True)]
        return (of(given).feats * scale).sum()

    feats = [x.feats for x in levels]
    own, other = (
        mx.grad(partial(loss, of), argnums=(0, 1, 2))(*feats)
        for of in (lambda given: net._summed(*given), sum_over_height)
    )
    assert all(map(mx.array_equal, own, other))


def test_rows_of_a_sum_over_height_are_those_of_their_scan():
    """Two scans of as many rows, one after the other, and both anew."""
    _, _, x = scene(20)
    net = randomised(models.VoxelResBackBone8xVoxelNeXt(4, WIDTHS, 6)).eval()
    far = mx.array([0, *(n - 1 for n in x.spatial_shape)])
    facts = {"spatial_shape": x.spatial_shape, "batch_size": x.batch_size}
    scans = [x, ml.SparseTensor(mx.abs(far - x.coords), x.feats, **facts)]
    outputs = [net(each) for each in scans]
    for each, y in zip(scans, outputs, strict=True):
        for again in (each, ml.SparseTensor(each.coords + 0, x.feats, **facts)):
            z = net(again)
            assert mx.array_equal(z.coords, y.coords)
            assert mx.array_equal(z.feats, y.feats)


def test_maps_of_other_strides():
    """Blocks alone, a map that is strided, and one more enlargement at the end."""
    x = mx.random.normal((2, 8, 12, 3))
    alone = models.BaseBEVBackbone(3, (0,), (1,), (5,), (), ())
    assert alone(x).shape == (2, 8, 12, 5)
    net = models.BaseBEVBackbone(
        3, (1, 0), (1, 2), (4, 5), (0.5, 1, 2), (6, 7), conv_for_no_stride=True
    )
    assert net(x).shape == (2, 8, 12, 13) == (*x.shape[:3], net.out_channels)
    trained = net.train()(x)
    assert trained.shape == (2, 8, 12, 13)
    with pytest.raises(ValueError, match="one entry a block"):
        models.BaseBEVBackbone(3, (1,), (1, 2), (4, 5))
    with pytest.raises(ValueError, match="extents that its strides divide"):
        net(x[:, :7])
    with pytest.raises(ValueError, match="are of 1 blocks"):
        models.BaseBEVBackbone(3, (1,), (1,), (4,), (1, 2), (4, 4))


BOXES = (
    np.array([[4.1, 5.3, 0.2, 4, 2, 1.5, 0.3, 1, -1], [13, 9, 0, 1, 1, 2, 1, 0, 1]]),
    np.array([[8.2, 2.3, 0.5, 3, 2, 1, -2, 0.2, 0.1]]),
)
LABELS = ([1, 2], [0])


def wanted(cells) -> list:
    """What each head is to say, from the boxes, by hand."""
    made, step = ([], []), 8 * 0.5
    for batch, (boxes, labels) in enumerate(zip(BOXES, LABELS, strict=True)):
        for box, label in zip(boxes, labels, strict=True):
            own = cells[cells[:, 0] == batch]
            at = box[:2] / step
            nearest = ((own[:, :0:-1] + 0.5 - at) ** 2).sum(1).argmin()
            y, x = own[nearest, 1:]
            values = {
                "center": at - (x, y),
                "center_z": box[2:3],
                "dim": np.log(box[3:6]),
                "rot": np.array([np.cos(box[6]), np.sin(box[6])]),
                "vel": box[7:9],
            }
            # Boxes this small move by the least radius, 2 cells.
            made[label // 2].append((batch, y, x, label % 2, 5 / 6, values))
    return list(made)


def exact_loss(cells, heads, weight=2.0) -> float:
    """Focal loss of heat maps and L1 of boxes, for cells (N, 3) of batch, y and x."""
    total = 0.0
    for head, boxes in zip(heads, wanted(cells), strict=True):
        heat, apart = np.zeros(head["hm"].shape), 0.0
        for batch, y, x, label, sigma, values in boxes:
            away = (cells[:, 1] - y) ** 2 + (cells[:, 2] - x) ** 2
            peak = np.exp(-away / (2 * sigma**2)) * (cells[:, 0] == batch)
            heat[:, label] = np.maximum(heat[:, label], peak)
            row = np.flatnonzero((cells == (batch, y, x)).all(1)).item()
            apart += sum(np.abs(head[n][row] - v).sum() for n, v in values.items())
        chance = 1 / (1 + np.exp(-head["hm"]))
        at = (1 - chance) ** 2 * np.log(chance)
        off = (1 - heat) ** 4 * chance**2 * np.log(1 - chance)
        focal = -np.where(heat == 1, at, off).sum()
        total += (focal + weight * apart) / max(1, len(boxes))
    return total


@pytest.mark.parametrize("name", NETS)
def test_the_loss_and_its_gradients(name):
    """The focal loss and that of boxes in float64, over the net's own outputs."""
    net, (_, _, x) = randomised(NETS[name]()).eval(), scene(60)
    boxes = [mx.array(b.astype(np.float32)) for b in BOXES]
    labels = [mx.array(each) for each in LABELS]

    def loss(net):
        return models.detection_loss(net, net(x), boxes, labels)

    elements = net.cells(net(x))
    cells = [
        np.insert(np.array(at), 0, batch, axis=1)
        for batch, (_, at) in enumerate(elements)
    ]
    heads = [
        {
            branch: np.concatenate(
                [np.array(made[i][branch], np.float64) for made, _ in elements]
            )
            for branch in elements[0][0][i]
        }
        for i in range(len(HEADS))
    ]
    value = loss(net).item()
    assert value == pytest.approx(exact_loss(np.concatenate(cells), heads), rel=2e-5)
    assert_slope(net, loss)


@on_the_cpu_alone
def test_no_boxes_no_rows_and_wrong_batches():
    net = NETS["VoxelNeXt"]()
    _, _, x = scene()
    none = [mx.zeros((0, 9))] * 2, [mx.zeros((0,), mx.int32)] * 2
    assert models.detection_loss(net, net(x), *none).item() > 0
    with pytest.raises(ValueError, match="must be of 2 batch elements; got 1"):
        models.detection_loss(net, net(x), none[0][:1], none[1])
    box = mx.array([[1.0, 2.0, 0.0, 4.0, 2.0, 1.5, 0.3]])
    count = len(net.classes)
    for said, boxes, labels in (
        (rf"{count} classes from 0; got {count}", box, [count]),  # counted from 1
        (r"labels must be \(1,\) integers, one a box; got \(2,\)", box, [0, 1]),
        (r"labels must be \(1,\) integers", box, [0.5]),
        (r"boxes must be \(M, 7\) or \(M, 9\); got \(1, 4\)", box[:, :4], [0]),
        ("boxes must be finite, and their extents above 0", box * 0, [0]),
        ("boxes must be finite, and their extents above 0", box * np.nan, [0]),
    ):
        given = [boxes, none[0][1]], [mx.array(labels), none[1][1]]
        with pytest.raises(ValueError, match=said):
            models.detection_loss(net, net(x), *given)
    for name in NETS:
        net = NETS[name]().eval()
        found = net.detect_points(np.zeros((0, 3), np.float32), fill=True)
        assert [len(a) for a in found] == [0, 0, 0] or name == "CenterPoint"
        assert found.boxes.shape[1] == 9


@pytest.mark.parametrize("dtype", ("float16", "bfloat16"))
def test_the_loss_in_half(dtype):
    """It is float32, near that of float32, and has gradients that are finite."""
    net, (_, _, x) = randomised(NETS["VoxelNeXt"]()).eval(), scene(300)
    boxes, labels = [mx.array(b) for b in BOXES], [mx.array(each) for each in LABELS]

    def loss(net, kind):
        given = [b.astype(kind) for b in boxes]
        return models.detection_loss(net, net(x.astype(kind)), given, labels)

    wanted, kind = loss(net, mx.float32), getattr(mx, dtype)
    net.set_dtype(kind)
    value, grads = mlx.nn.value_and_grad(net, lambda net: loss(net, kind))(net)
    assert value.dtype == mx.float32
    assert abs(value - wanted) < 0.05 * wanted
    assert all(mx.isfinite(grad).all() for _, grad in tree_flatten(grads))


def test_boxes_of_an_element_without_cells_do_not_count():
    net = NETS["VoxelNeXt"]().eval()
    _, _, x = scene()
    whole = ops.unbatch(x)[0]
    pair = ops.batch([whole, ops.crop(whole, 0, 0)])
    boxes, labels = mx.array(BOXES[0].astype(np.float32)), mx.array(LABELS[0])
    assert pair.batch_size == 2 and len(boxes) > 1
    alone = models.detection_loss(net, net(whole), [boxes], [labels])
    both = models.detection_loss(net, net(pair), [boxes] * 2, [labels] * 2)
    assert mx.allclose(both, alone, rtol=1e-5)
