"""Compare gradients of a training step with differences of the loss."""

import mlx.core as mx
import mlx.nn
import numpy as np
from mlx.utils import tree_flatten, tree_map

STEP = 1e-6


def cross_entropy(scores, labels) -> float:
    """The mean over rows, in float64."""
    scores = scores - scores.max(1, keepdims=True)
    log = scores - np.log(np.exp(scores).sum(1, keepdims=True))
    return -log[np.arange(len(labels)), labels].mean()


def assert_gradients(loss, parameters, grads, entries=6, tolerance=2e-4, seed=4):
    """Compare some entries of each parameter, and the one with the largest gradient.

    Args:
        loss: returns the loss for the current parameters.
        parameters: name to float64 array; each is changed and restored.
        grads: name to gradient, in the layout of the parameter.
        entries: number of entries of each parameter.
        tolerance: relative to the largest entry of a parameter's gradient.
    """
    rng = np.random.default_rng(seed)
    for name, grad in grads.items():
        flat, grad = parameters[name].reshape(-1), np.array(grad, np.float64)
        grad = grad.reshape(-1)
        assert np.shares_memory(flat, parameters[name])
        assert flat.size == grad.size, (name, flat.size, grad.size)
        largest = np.abs(grad).max()
        assert largest > 0, name
        chosen = rng.choice(flat.size, min(entries, flat.size), replace=False)
        for at in (*chosen, int(np.abs(grad).argmax())):
            kept = flat[at]
            flat[at] = kept + STEP
            above = loss()
            flat[at] = kept - STEP
            expected = (above - loss()) / (2 * STEP)
            flat[at] = kept
            assert abs(grad[at] - expected) <= tolerance * largest, (name, at)


def assert_slope(net, loss, step=3e-4, tolerance=2e-2) -> None:
    """Compare the slope of ``loss(net)`` along one direction of all parameters."""
    start = net.trainable_parameters()
    _, grads = mlx.nn.value_and_grad(net, loss)(net)
    along = tree_map(lambda p: p * mx.random.normal(p.shape), start)
    slopes = [
        (grad * way).sum().item()
        for (_, grad), (_, way) in zip(
            tree_flatten(grads), tree_flatten(along), strict=True
        )
    ]
    assert all(np.isfinite(slopes)) and any(slopes)
    ends = []
    for far in (step, -step):
        net.update(tree_map(lambda p, way, far=far: p + far * way, start, along))
        ends.append(loss(net).item())
    net.update(start)
    expected = (ends[0] - ends[1]) / (2 * step)
    # The slopes of parameters may cancel, so their norm is the scale.
    assert abs(sum(slopes) - expected) <= tolerance * np.linalg.norm(slopes)
