"""Detectors: steps of training in float64, with boxes and without."""

import re

import foreign_detectors
import mlx.core as mx
import mlx.nn
import numpy as np
import pytest
from detector_cases import BRANCHES, GRID, HEADS, NETS, randomised, scene
from differences import assert_gradients
from mlx.utils import tree_flatten
from processes import on_the_cpu_alone

from mlx_lattice import models, ops

BOXES = (
    np.array([[4.1, 5.3, 0.2, 4, 2, 1.5, 0.3, 1, -1], [13, 9, 0, 1, 1, 2, 1, 0, 1]]),
    np.array([[8.2, 2.3, 0.5, 3, 2, 1, -2, 0.2, 0.1]]),
)
LABELS = ([1, 2], [0])


def state_of(net) -> dict:
    """The net's parameters under OpenPCDet's names and in its layouts."""
    state, modules = {}, dict(net.named_modules())
    for name, array in tree_flatten(net.parameters()):
        module = modules[name.rpartition(".")[0]]
        state[re.sub(r"\.layers\b", "", name)] = foreign_layout(module, array)
    return state


def foreign_layout(module, array) -> mx.array:
    """A parameter or its gradient as OpenPCDet keeps it, contiguous."""
    if array.ndim == 4 and isinstance(module, mlx.nn.ConvTranspose2d):
        array = mx.moveaxis(array, -1, 0)
    elif array.ndim == 4 and isinstance(module, mlx.nn.Conv2d):
        array = mx.moveaxis(array, -1, 1)
    elif array.ndim > 3 and set(array.shape[1:-1]) == {1}:  # of spconv: its memory
        c_out, c_in = array.shape[0], array.shape[-1]
        array = array.reshape(c_out, c_in).T.reshape(array.shape)
    return mx.contiguous(array)


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


def some_of(grads, least) -> dict:
    """A gradient of each kind: of every part, a kernel, a bias, a norm."""
    kinds = {}
    for name in sorted(grads):
        if np.abs(grads[name]).max() > least:
            kind = re.sub(r"\d+", "#", name), grads[name].ndim
            kinds.setdefault(kind, []).append(name)
    chosen = [same[len(same) // 2] for same in kinds.values()]
    return {name: grads[name] for name in chosen}


@pytest.mark.parametrize("name", NETS)
def test_gradients_of_a_step_of_training(name):
    """Norms by their batch, the focal loss and that of boxes: float64 differences."""
    net = randomised(NETS[name]())
    exact = getattr(foreign_detectors, name)(state_of(net))
    coords, feats, x = scene(60)
    branches = ["hm", *(n for n, _, _ in BRANCHES)]

    def loss(net):
        boxes = [mx.array(b.astype(np.float32)) for b in BOXES]
        return models.detection_loss(net, net(x), boxes, list(map(mx.array, LABELS)))

    def exact_loss() -> float:
        cells, heads = exact(coords, feats, GRID.spatial_shape, len(HEADS), branches)
        return foreign_detectors.loss(cells, heads, wanted(cells))

    net.train()
    value, grads = mlx.nn.value_and_grad(net, loss)(net)
    assert abs(value.item() - exact_loss()) <= 2e-5 * abs(value.item())
    modules, found = dict(net.named_modules()), {}
    for path, grad in tree_flatten(grads):
        module = modules[path.rpartition(".")[0]]
        theirs = re.sub(r"\.layers\b", "", path)
        found[theirs] = np.array(foreign_layout(module, grad))
    # A bias before a norm by its batch has no effect.
    picked = some_of(found, 1e-4)
    assert len(picked) >= 25
    picked = dict(list(picked.items())[::2])
    assert_gradients(exact_loss, exact.p, picked, entries=1, tolerance=1e-3)


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
    """Of UNetV2, whose encoder is SECOND's: both outputs, norms by their batch."""
    coords, feats, x = scene(60)
    net = randomised(models.UNetV2(4, (4, 4, 8, 8, 5))).train()
    exact = foreign_detectors.UNetV2(state_of(net))
    made = exact(coords, feats, GRID.spatial_shape)
    rng = np.random.default_rng(5)
    weights = [rng.normal(size=y.shape) for y in made]

    def loss(net):
        encoded, y = net(x)
        pairs = zip((y, encoded), weights, strict=True)
        return sum((t.feats * mx.array(w.astype(np.float32))).sum() for t, w in pairs)

    def exact_loss() -> float:
        made = exact(coords, feats, GRID.spatial_shape)
        return sum((y * w).sum() for y, w in zip(made, weights, strict=True))

    value, grads = mlx.nn.value_and_grad(net, loss)(net)
    assert abs(value.item() - exact_loss()) <= 1e-3
    found = {
        re.sub(r"\.layers\b", "", path): np.array(grad)
        for path, grad in tree_flatten(grads)
    }
    picked = some_of(found, 1e-3)
    assert len(picked) >= 15
    assert_gradients(exact_loss, exact.p, picked, entries=1, tolerance=1e-3)


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
