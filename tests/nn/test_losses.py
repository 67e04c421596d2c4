"""Losses and metrics against their definitions in NumPy, in float64."""

import json

import mlx.core as mx
import mlx.nn
import numpy as np
import pytest

import mlx_lattice as ml
from mlx_lattice import nn
from mlx_lattice.nn import losses, metrics


def batch(seed, count=60, classes=5, ignore=-1):
    rng = np.random.default_rng(seed)
    scores = rng.normal(size=(count, classes)).astype(np.float32) * 3
    labels = rng.integers(0, classes - 1, count)  # the last class does not occur
    labels[rng.random(count) < 0.2] = ignore
    return scores, labels


def entropy(scores, labels, weight, ignore):
    """The weighted mean and the losses of the rows, by its definition."""
    scores = scores.astype(np.float64)
    log = scores - np.log(np.exp(scores).sum(axis=1, keepdims=True))
    known = labels != ignore
    safe = np.where(known, labels, 0)
    weights = known * weight[safe]
    each = -log[np.arange(len(labels)), safe] * weights
    return each.sum() / weights.sum(), each


@pytest.mark.parametrize("ignore", (-1, 2, 255))
def test_cross_entropy_is_that_of_its_definition(ignore):
    scores, labels = batch(0, ignore=ignore)
    weight = np.array([0.5, 1, 2, 3, 4])
    mean, each = entropy(scores, labels, weight, ignore)
    kept = {"weight": weight, "ignore_label": ignore}
    x = mx.array(scores)
    for given in (labels, labels.astype(np.int16), mx.array(labels)):
        assert losses.cross_entropy(x, given, **kept).item() == pytest.approx(mean)
    rows = losses.cross_entropy(x, labels, reduction="none", **kept)
    np.testing.assert_allclose(rows, each, atol=2e-6)
    total = losses.cross_entropy(x, labels, reduction="sum", **kept)
    assert total.item() == pytest.approx(each.sum(), rel=1e-5)
    half = losses.cross_entropy(x.astype(mx.bfloat16), labels, **kept)
    assert half.dtype == mx.float32 and half.item() == pytest.approx(mean, rel=2e-2)


def test_the_gradient_of_cross_entropy():
    scores, labels = batch(1, ignore=255)
    weight = np.linspace(0.2, 2, 5)
    chances = np.exp(scores.astype(np.float64))
    chances /= chances.sum(axis=1, keepdims=True)
    known = labels != 255
    weights = known * weight[np.where(known, labels, 0)]
    wanted = (chances - (labels[:, None] == np.arange(5))) * weights[:, None]
    grad = mx.grad(losses.cross_entropy)(
        mx.array(scores), labels, weight=weight, ignore_label=255
    )
    np.testing.assert_allclose(grad, wanted / weights.sum(), atol=1e-7)


def lovasz(scores, labels, ignore):
    """Berman et al. in float64: the Jaccard losses of the sorted errors."""
    kept = labels != ignore
    scores, labels = scores[kept].astype(np.float64), labels[kept]
    chances = np.exp(scores) / np.exp(scores).sum(axis=1, keepdims=True)
    found = []
    for c in np.unique(labels):
        truth = labels == c
        errors = np.abs(truth - chances[:, c])
        order = np.argsort(-errors)
        wrong = np.arange(1, len(order) + 1)
        jaccard = []  # 1 - IoU if the first rows in this order are wrong
        for n in wrong:
            missed, more = truth[order[:n]].sum(), (~truth[order[:n]]).sum()
            jaccard.append(1 - (truth.sum() - missed) / (truth.sum() + more))
        found.append(errors[order] @ np.diff(jaccard, prepend=0))
    return np.mean(found)


@pytest.mark.parametrize("seed", range(3))
def test_lovasz_softmax_is_that_of_its_definition(seed):
    scores, labels = batch(seed, ignore=9)
    wanted = lovasz(scores, labels, 9)
    x, y = mx.array(scores), mx.array(labels)

    def loss(x):
        return losses.lovasz_softmax(x, y, ignore_label=9)

    value, grad = mx.value_and_grad(loss)(x)
    assert value.item() == pytest.approx(wanted, rel=1e-5)
    assert not np.array(grad)[labels == 9].any()
    step, way = 1e-4, np.random.default_rng(seed).normal(size=scores.shape)
    ends = [lovasz(scores + side * step * way, labels, 9) for side in (1, -1)]
    slope = (ends[0] - ends[1]) / 2 / step
    assert (np.array(grad) * way).sum() == pytest.approx(slope, rel=1e-2)


def test_lovasz_of_one_error_is_one_minus_iou():
    scores = mx.array([[99.0, 0], [99, 0], [99, 0], [0, 99]])
    loss = losses.lovasz_softmax(scores, [0, 0, 1, 1])
    assert loss.item() == pytest.approx(1 - (2 / 3 + 1 / 2) / 2)


@pytest.mark.parametrize("loss", (losses.cross_entropy, losses.lovasz_softmax))
def test_nothing_to_learn_from_is_a_loss_of_zero(loss):
    for count in (0, 4):
        scores, labels = mx.ones((count, 3)), mx.full((count,), -1)
        value, grad = mx.value_and_grad(loss)(scores, labels)
        assert value.item() == 0 and not np.array(grad).any()


@pytest.mark.parametrize("loss", (losses.cross_entropy, losses.lovasz_softmax))
def test_losses_take_tensors(loss):
    scores, labels = batch(3, 30)
    coords = np.concatenate([np.zeros((30, 1)), np.arange(30)[:, None]], 1).astype("i4")
    x = ml.SparseTensor(coords, scores)
    turned = ml.SparseTensor(coords[::-1], labels[::-1, None].astype("i4"))
    wanted = loss(mx.array(scores), labels).item()
    assert loss(x, labels).item() == wanted == loss(x, turned).item()
    with pytest.raises(AttributeError, match="Pass x.feats to losses"):
        mlx.nn.losses.cross_entropy(x, mx.array(labels))
    with pytest.raises(AttributeError, match="mlx.nn.losses.mse_loss"):
        nn.losses.mse_loss  # noqa: B018


@pytest.mark.parametrize("loss", (losses.cross_entropy, losses.lovasz_softmax))
def test_labels_that_are_no_classes(loss):
    x = mx.ones((3, 2))
    for labels, sentence in (
        ([0, 1, 255], "from 0 to 1, or ignore_label -1; got 255.*ignore_label=255"),
        ([0, -5, 1], "got -5"),
        (np.uint8([255, 0, 1]), "got 255"),
        ([0.0, 1, 1], r"must be \(3,\) integers, one for each row.*float32"),
        ([[0], [1], [1]], r"got \(3, 1\)"),
        ([0, 1], r"got \(2,\) of int32. SparseTensor.from_points\(points, labels="),
    ):
        with pytest.raises(ValueError, match=sentence):
            loss(x, labels)
    traced = mx.vmap(loss)(x[None], mx.array([[0, 1, 255]]))
    assert mx.isnan(traced).item()
    with pytest.raises(TypeError, match=r"scores must be \(N, C\).*got \(3,\)"):
        loss(mx.ones((3,)), [0, 1, 1])


def test_weights_that_do_not_fit():
    with pytest.raises(ValueError, match=r"weight must be \(2,\), one for each class"):
        losses.cross_entropy(mx.ones((3, 2)), [0, 1, 1], weight=[1.0])
    with pytest.raises(ValueError, match="reduction must be one of"):
        losses.cross_entropy(mx.ones((3, 2)), [0, 1, 1], reduction="avg")


@pytest.mark.parametrize("seed", range(3))
def test_the_metrics_are_those_of_their_definition(seed):
    rng = np.random.default_rng(seed)
    truth, found = rng.integers(0, 5, (2, 400))
    truth[truth == 3] = 2  # a class that is predicted alone
    truth[truth == 4], found[found == 4] = -1, 0  # a class that is nowhere
    score = metrics.ConfusionMatrix(list("abcde"))
    score.update(found[:150].astype(np.int8), truth[:150])
    score.update(mx.array(np.eye(5, dtype=np.float32)[found[150:]]), truth[150:])
    kept = truth >= 0
    truth, found = truth[kept], found[kept]
    counts = np.array(
        [[((truth == a) & (found == b)).sum() for b in range(5)] for a in range(5)]
    )
    assert np.array_equal(np.array(score.counts)[:, :5], counts)
    either = counts.sum(axis=0) + counts.sum(axis=1) - np.diag(counts)
    with np.errstate(invalid="ignore"):
        iou, recall = np.diag(counts) / [either, counts.sum(axis=1)]
    np.testing.assert_allclose(score.iou, iou, rtol=1e-6)
    np.testing.assert_allclose(score.accuracy, recall, rtol=1e-6)
    assert score.mean_iou == pytest.approx(np.nanmean(iou))
    assert score.overall_accuracy == pytest.approx((truth == found).mean())
    assert score.mean_accuracy == pytest.approx(np.nanmean(recall))
    read = json.loads(json.dumps(score.to_dict()))
    nothing = {"name": "e", "iou": None, "accuracy": None, "points": 0}
    assert read["classes"][4] == nothing and read["points"] == len(truth)
    lines = str(score).splitlines()
    assert len(lines) == 8 and lines[5].split() == ["e", "-", "-", "0"]
    assert f"{score.mean_iou:.1%}" in lines[6]
    assert f"{score.overall_accuracy:.1%}" in lines[7]


def test_a_missing_prediction_is_wrong_and_no_rows_are_nan():
    score = metrics.ConfusionMatrix(2)
    assert np.isnan(score.mean_iou) and score.names == ("class 0", "class 1")
    score.update(mx.array([-1, 0]), mx.array([0, 0]))
    score.update(mx.zeros((0, 2)), mx.zeros((0,), mx.int32))
    assert score.counts.tolist() == [[1, 0, 1], [0, 0, 0]]
    assert score.overall_accuracy == 0.5
    score.reset()
    assert not score.counts.sum().item()


def test_what_the_metrics_do_not_take():
    score = metrics.ConfusionMatrix(3)
    for found, truth, sentence in (
        ([0, 1], [0, 3], "labels must be classes from 0 to 2.*got 3"),
        ([0, 3], [0, 1], "predicted has class 3; the classes are 0 to 2"),
        ([0, 1], [0], r"labels must be \(2,\) integers"),
        ([0.0, 1.0], [0, 1], r"predicted must be \(N, 3\) floating .*\(2,\) of float"),
        (mx.ones((2, 4)), [0, 1], r"got \(2, 4\)"),
        ([0, 1], mx.ones((2, 3)), r"got \(2, 3\) of float32"),
    ):
        with pytest.raises(ValueError, match=sentence):
            score.update(found, truth)
    with pytest.raises(TypeError, match="classes must be the names of the classes"):
        metrics.ConfusionMatrix("floor")
