#!/usr/bin/env python3
"""Train the demo's DigitNet on several processes, one share of each batch a process.

    mlx.launch -n 2 examples/train_distributed.py

Every process holds the whole net, draws the same batches from the same seed, takes its
share of each and averages its gradients with those of the others. The BatchNorms take
their statistics over all shares, so that the processes train the net that one would.
"""

from __future__ import annotations

import argparse

import mlx.core as mx
import mlx.nn
import mlx.optimizers as optim
import numpy as np
from mlx.utils import tree_map

from mlx_lattice import nn
from mlx_lattice.commands import demo


def share(indices: np.ndarray, rank: int, size: int) -> np.ndarray:
    """Return every ``size``-th sample of a batch: shares differ by one at most."""
    return indices[rank::size]


def share_batch(voxels, labels, indices, weight: float) -> tuple:
    """Return a tensor of digits, their labels and weights.

    A share without samples is one digit without voxels and of weight 0: its process
    takes part in the exchanges of every layer, and adds nothing.
    """
    if len(indices):
        x = demo.digit_batch([voxels[i] for i in indices])
        return x, mx.array(labels[indices]), mx.full((len(indices),), weight)
    nothing = np.zeros((0, 3), dtype=np.int32)
    return demo.digit_batch([nothing]), mx.array([0]), mx.zeros((1,))


def weighted_loss(net: mlx.nn.Module, x, labels: mx.array, weights: mx.array):
    """Return the weighted sum of the samples' losses."""
    return mlx.nn.losses.cross_entropy(net(x), labels, weights, reduction="sum")


def share_step(net, voxels, labels, indices, group):
    """Return the mean loss of a batch and its gradients, the same on every process.

    ``average_gradients`` divides by the processes, which is wrong for shares of unequal
    length. So each sample has the weight ``processes / samples``, and the average is
    the mean over the samples.
    """
    mine = share(indices, group.rank(), group.size())
    batch = share_batch(voxels, labels, mine, group.size() / len(indices))
    loss, grads = mlx.nn.value_and_grad(net, weighted_loss)(net, *batch)
    grads = nn.average_gradients(grads, group)
    mx.eval(grads)  # one exchange after the other
    return mx.distributed.all_sum(loss, group=group) / group.size(), grads


def first_process_state(net: mlx.nn.Module, group) -> None:
    """Give every process the parameters of the first one."""

    def from_first(value: mx.array) -> mx.array:
        own = value if group.rank() == 0 else mx.zeros_like(value)
        value = mx.distributed.all_sum(own, group=group)
        mx.eval(value)  # one exchange at a time
        return value

    if group.size() > 1:
        net.update(tree_map(from_first, net.parameters()))


def main() -> None:
    """Train, and print what happened once."""
    parser = argparse.ArgumentParser(description=str(__doc__).splitlines()[0])
    parser.add_argument("--epochs", type=int, default=12)
    parser.add_argument("--batch-size", type=int, default=64, help="of all processes")
    parser.add_argument("--digits", type=int, help="train on the first digits only")
    parser.add_argument("--learning-rate", type=float, default=3e-3)
    parser.add_argument("--seed", type=int, default=0)
    given = parser.parse_args()

    group = mx.distributed.init()
    mx.random.seed(given.seed)
    (voxels, labels), (test, test_labels) = demo.load_digits(given.seed)
    voxels, labels = voxels[: given.digits], labels[: given.digits]
    net = nn.convert_sync_batchnorm(demo.DigitNet(), group)
    first_process_state(net, group)
    optimizer = optim.Adam(learning_rate=given.learning_rate)
    rng = np.random.default_rng(given.seed)  # the same batches everywhere
    net.train()
    for epoch in range(given.epochs):
        order, losses = rng.permutation(len(voxels)), []
        for at in range(0, len(order), given.batch_size):
            indices = order[at : at + given.batch_size]
            loss, grads = share_step(net, voxels, labels, indices, group)
            optimizer.update(net, grads)
            mx.eval(net.state, optimizer.state, loss)
            losses.append(loss.item())
        if group.rank() == 0:
            print(f"epoch {epoch + 1}: loss {np.mean(losses):.4f}", flush=True)
    if group.rank() == 0:
        found = demo.predict(net, test)
        accuracy = np.mean(found == test_labels)
        print(f"{group.size()} processes, test accuracy {accuracy:.2%}", flush=True)


if __name__ == "__main__":
    main()
