"""Detectors: the loss and its gradients, with boxes and without."""

import mlx.core as mx
import mlx.nn
import numpy as np
import pytest
from detector_cases import HEADS, NETS, randomised, scene
from differences import assert_slope
from mlx.utils import tree_flatten
from processes import on_the_cpu_alone

from mlx_lattice import models, ops

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


@pytest.mark.parametrize("trains", (False, True))
@pytest.mark.parametrize("dtype", ("float16", "bfloat16"))
def test_gradients_in_half_are_off_by_rounding_alone(dtype, trains):
    """As those of a float32 net are whose weights are off by as much.

    Rounding moves statistics of few rows, and the signs that ReLU looks at: a net that
    trains is off by 7%, and one in evaluation by 0.1%, in either way.
    """
    mx.random.seed(2)
    net, (_, _, x) = randomised(NETS["VoxelNeXt"]()).train(trains), scene(1500)
    boxes, labels = [mx.array(b) for b in BOXES], [mx.array(each) for each in LABELS]
    kind = getattr(mx, dtype)
    start = [
        (n, a.astype(kind).astype(mx.float32))
        for n, a in tree_flatten(net.parameters())
    ]

    def gradients(dtype, noise=0.0):
        moved = [(n, a * (1 + noise * mx.random.normal(a.shape))) for n, a in start]
        net.load_weights(moved)
        net.set_dtype(dtype)

        def loss(net):
            given = x.astype(kind).astype(dtype)
            made = models.detection_loss(net, net(given), boxes, labels)
            assert made.dtype == mx.float32
            return made

        value, found = mlx.nn.value_and_grad(net, loss)(net)
        return value.item(), [
            a.astype(mx.float32) for n, a in tree_flatten(found) if "weight" in n
        ]

    def apart(found):
        pairs = zip(right, found, strict=True)
        sizes = [
            [mx.linalg.norm(c.flatten()).item() for c in (a - b, a)] for a, b in pairs
        ]
        return float(np.median([off / whole for off, whole in sizes if whole]))

    value, right = gradients(mx.float32)
    unit = {"float16": 2.0**-12, "bfloat16": 2.0**-9}[dtype]
    moved = [gradients(mx.float32, unit) for _ in range(4)]
    most = max(apart(found) for _, found in moved)
    half, found = gradients(kind)
    assert apart(found) < (1.5 if trains else 1.2) * most
    spread = max(abs(each - value) for each, _ in moved)
    assert abs(half - value) < 2 * spread + 2e-5 * value


@pytest.mark.parametrize("name", NETS)
def test_the_loss_takes_boxes_of_half_as_float32(name):
    net, (_, _, x) = randomised(NETS[name]()).eval(), scene()
    made, labels = net(x), [mx.array(each) for each in LABELS]
    for dtype in (mx.float16, mx.bfloat16):
        boxes = [mx.array(b).astype(dtype) for b in BOXES]
        half, whole = (
            models.detection_loss(net, made, given, labels).item()
            for given in (boxes, [b.astype(mx.float32) for b in boxes])
        )
        assert half == whole


def test_gradients_of_a_decoder():
    net, (_, _, x) = randomised(models.UNetV2(4, (4, 4, 8, 8, 5))).eval(), scene(60)
    assert_slope(net, lambda net: sum(y.feats.square().sum() for y in net(x)))


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
