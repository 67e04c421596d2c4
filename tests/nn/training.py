"""What a net must do when it is trained: lower its loss, and move every parameter."""

import mlx.core as mx
import mlx.nn
import mlx.optimizers
from mlx.utils import tree_flatten


def lowers_the_loss(net, objective, *data, rate=1e-2, steps=8):
    """Adam brings ``objective(net, *data)`` below 0.7 of what it was."""
    step, optimizer = mlx.nn.value_and_grad(net, objective), mlx.optimizers.Adam(rate)
    losses = []
    for _ in range(steps):
        value, grads = step(net, *data)
        optimizer.update(net, grads)
        mx.eval(net.parameters(), optimizer.state)
        losses.append(value.item())
    assert losses[-1] < 0.7 * losses[0]


def every_parameter_gets_a_gradient(net, objective, *data):
    """Every trainable parameter has a gradient, finite and not zero."""
    grads = dict(tree_flatten(mlx.nn.value_and_grad(net, objective)(net, *data)[1]))
    assert grads.keys() == dict(tree_flatten(net.trainable_parameters())).keys()
    for path, grad in grads.items():
        assert mx.isfinite(grad).all().item(), path
        assert mx.abs(grad).max().item() > 0, path
