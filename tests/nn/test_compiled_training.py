"""ml.compile and mx.compile of steps of training: the same weights and statistics."""

import mlx.core as mx
import mlx.nn
import mlx.optimizers as optim
import numpy as np
import pytest
from compiled_cases import TOLERANCE, small_net, tensor
from mlx.utils import tree_flatten

import mlx_lattice as ml
from mlx_lattice import models


def assert_same_state(a, b):
    flat = [dict(tree_flatten(net.parameters())) for net in (a, b)]
    assert flat[0].keys() == flat[1].keys()
    for name, array in flat[0].items():
        np.testing.assert_allclose(array, flat[1][name], **TOLERANCE, err_msg=name)


@pytest.mark.parametrize("training", (False, True))
def test_a_net_gives_the_same_and_keeps_its_statistics(training):
    net, same = small_net(), small_net()
    net.train(training), same.train(training)
    fast, scenes = ml.compile(net), [tensor(0), tensor(1)]
    for step in range(4):
        for x in scenes:
            x = x.replace(x.feats + step)
            y, expected = fast(x), same(x)
            assert y.key == expected.key and y.manager is x.manager
            np.testing.assert_allclose(y.feats, expected.feats, **TOLERANCE)
        assert_same_state(net, same)
    assert len(fast) == 2


def training_step(net, optimizer):
    def loss(x, labels):
        logits = net(x).feats
        return mlx.nn.losses.cross_entropy(logits, labels, reduction="mean")

    gradients = mlx.nn.value_and_grad(net, loss)

    def step(x, labels, *, scale=1.0):
        value, grads = gradients(x, labels)
        optimizer.update(net, grads)
        return {"loss": value * scale, "rows": len(x)}

    return step


@pytest.mark.parametrize("make", (optim.SGD, optim.AdamW))
def test_a_training_step_is_the_uncompiled_one(make):
    scenes = [tensor(seed, 150 + 10 * seed) for seed in range(3)]
    labels = [mx.arange(len(x)) % 3 for x in scenes]
    results = []
    for compiled in (False, True):
        net = small_net()
        options = {"momentum": 0.9} if make is optim.SGD else {}
        optimizer = make(learning_rate=1e-2, **options)
        step = training_step(net, optimizer)
        state = [net.state, optimizer.state, mx.random.state]
        if compiled:
            step = ml.compile(step, inputs=state, outputs=state)
        made = []
        for _ in range(4):
            for x, y in zip(scenes, labels, strict=True):
                out = step(x, y, scale=2.0)
                mx.eval(state)
                assert out["rows"] == len(x)
                made.append(out["loss"].item())
        results.append((net, made))
    np.testing.assert_allclose(results[1][1], results[0][1], rtol=1e-4)
    assert_same_state(results[0][0], results[1][0])
    assert made[0] > made[-1]
    assert len(step) == 3


@pytest.mark.parametrize("make", (optim.SGD, optim.AdamW))
def test_mx_compile_of_a_training_step_for_fixed_coordinates(make):
    x, results = tensor(), []
    labels = mx.arange(len(x)) % 3
    for compiled in (False, True):
        net = small_net()
        optimizer = make(learning_rate=1e-2)
        step = training_step(net, optimizer)
        state = [net.state, optimizer.state, mx.random.state]

        def run(feats, step=step):
            return step(x.replace(feats), labels)["loss"]

        if compiled:
            run = mx.compile(run, inputs=state, outputs=state)
        made = []
        for _ in range(5):
            made.append(run(x.feats))
            mx.eval(made, state)
        results.append((net, [value.item() for value in made]))
    np.testing.assert_allclose(results[1][1], results[0][1], rtol=1e-4)
    assert_same_state(results[0][0], results[1][0])
    assert made[0].item() > made[-1].item()


@pytest.mark.native
def test_a_minkunet_trains_alike():
    """Strided levels, skips, fused norms, and the preparation of its first call."""
    x, results = tensor(n=120), []
    labels = mx.arange(len(x)) % 3
    for compiled in (False, True):
        mx.random.seed(3)
        net = models.MinkUNet14(4, 3)
        optimizer = optim.AdamW(learning_rate=1e-3)
        step = training_step(net, optimizer)
        if compiled:
            state = [net.state, optimizer.state]
            step = ml.compile(step, inputs=state, outputs=state)
        for _ in range(3):
            made = step(x, labels)
            mx.eval(made["loss"], net.state, optimizer.state)
        results.append((net, made["loss"].item()))
    np.testing.assert_allclose(results[1][1], results[0][1], rtol=1e-3)
    for net, _ in results:
        net.eval()
    a, b = (net(x).feats for net, _ in results)
    np.testing.assert_allclose(a, b, rtol=1e-2, atol=1e-2)
