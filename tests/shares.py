"""What several processes compute of their shares of rows: run by mlx.launch.

    mlx.launch -n 2 tests/shares.py FOLDER

Each process leaves FOLDER/<rank>.safetensors. The tests compute the same with all rows
in one process and ``nn.BatchNorm``.
"""

import os
import sys
from pathlib import Path

os.environ.setdefault("MLX_ENABLE_TF32", "0")
sys.path[:0] = [str(Path(__file__).parents[1])]

import mlx.core as mx
import mlx.nn
import mlx.optimizers
import numpy as np
from mlx.utils import tree_flatten, tree_map

import mlx_lattice as ml
from mlx_lattice import nn
from mlx_lattice.models.blocks import blocks, conv_norm

CHANNELS = 5
# Rows of the first process and of the second.
SHARES = ((6, 6), (7, 2), (1, 1), (4, 0), (0, 3), (0, 0))


def rows_of(counts: tuple[int, int]) -> tuple[mx.array, mx.array, mx.array]:
    """Features far from zero, weights of the outputs, and of the gradients."""
    rng = np.random.default_rng(sum(counts))
    x, seen, turned = rng.normal(size=(3, sum(counts), CHANNELS)).astype(np.float32)
    return mx.array(x + 10), mx.array(seen), mx.array(turned)


def norm_results(norm, x, seen, turned) -> dict[str, mx.array]:
    """Outputs, first and second gradients, running statistics after two steps."""

    def loss(x, weight, bias):
        norm.weight, norm.bias = weight, bias
        return (seen * mx.square(norm(x))).sum()

    def turned_gradient(x, weight, bias):
        return (turned * mx.grad(loss)(x, weight, bias)).sum()

    given = x, norm.weight, norm.bias
    first = mx.grad(loss, argnums=(0, 1, 2))(*given)
    second = mx.grad(turned_gradient, argnums=(0, 1))(*given)
    norm.weight, norm.bias = given[1:]
    kept = norm.running_mean, norm.running_var
    return {
        "y": norm(x),
        "dx": first[0],
        "ddx": second[0],
        "sum of dw": first[1],
        "sum of db": first[2],
        "sum of ddw": second[1],
        "mean": kept[0],
        "var": kept[1],
    }


def sync_norm(group) -> nn.SyncBatchNorm:
    norm = nn.SyncBatchNorm(CHANNELS, group=group)
    norm.weight, norm.bias = scale_and_shift()
    return norm


def scale_and_shift() -> tuple[mx.array, mx.array]:
    return mx.arange(1.0, 1 + CHANNELS), mx.arange(0.0, CHANNELS)


def branch_results(x, longer: int, norms) -> dict[str, mx.array]:
    """Two branches beside each other, one of them of many operations."""

    def loss(x):
        branches = [x, 2 + mx.sin(x)]
        for _ in range(40):
            branches[longer] = branches[longer] + 0.0
        y = [norm(b) for norm, b in zip(norms, branches, strict=True)]
        for _ in range(40):
            y[1 - longer] = y[1 - longer] + 0.0
        return (mx.square(y[0]) * y[1]).sum()

    return {"dx": mx.grad(loss)(x)}


def scans(batch: range) -> ml.SparseTensor:
    """A tensor of scans; of one without rows where there are none."""
    coords, feats = [np.zeros((0, 4))], [np.zeros((0, 2))]
    for scan in batch:
        rng = np.random.default_rng(scan)
        sites = np.unique(rng.integers(0, 7, (40, 3)), axis=0)
        coords.append(np.insert(sites, 0, scan - batch.start, axis=1))
        feats.append(rng.normal(size=(len(sites), 2)))
    coords = mx.array(np.concatenate(coords).astype(np.int32))
    feats = mx.array(np.concatenate(feats).astype(np.float32))
    return ml.SparseTensor(coords, feats, batch_size=max(1, len(batch)))


def small_net() -> nn.Module:
    """Strides, a norm in a shortcut, and behind all norms what has no way of its own
    for no rows; every process draws the same parameters.
    """
    mx.random.seed(3)
    return nn.Sequential(
        conv_norm(nn.SubmConv3d(2, 8, 3, bias=False)),
        blocks(8, 12, 2, 2, 3),
        nn.Linear(12, 12),
        nn.Tanh(),
        nn.SparseAttention(12, 2),
        nn.SubmConv3d(12, 3, 1),
    )


def net_results(net, batch: range, group, compiled: bool = False):
    """Parameters and running statistics after two steps of SGD, and the loss."""
    x = scans(batch)
    rows = mx.distributed.all_sum(mx.array(x.feats.shape[0]), group=group)
    rows = rows.item()  # now, or it might come between the net's exchanges
    optimizer = mlx.optimizers.SGD(0.1, momentum=0.9)

    def summed_loss(feats):
        return mx.square(net(x.replace(feats=feats)).feats - 1).sum()

    def step(feats):
        loss, grads = mlx.nn.value_and_grad(net, summed_loss)(feats)
        grads = tree_map(lambda g: g * (group.size() / rows), grads)
        optimizer.update(net, nn.average_gradients(grads, group, 4096))
        return loss

    if compiled:
        optimizer.init(net.trainable_parameters())
        state = [net.state, optimizer.state]
        step = mx.compile(step, inputs=state, outputs=state)
    for _ in range(2):
        loss = step(x.feats)
        mx.eval(net.state, optimizer.state)
    loss = mx.distributed.all_sum(loss, group=group) / rows
    return dict(tree_flatten(net.parameters())) | {"loss": loss}


# Scans of the first process and of the second.
NETS = {
    "even": (range(0, 2), range(2, 4)),
    "uneven": (range(0, 1), range(1, 4)),
    "compiled": (range(0, 3), range(3, 4)),
    "none": (range(0, 4), range(0, 0)),
}

# What gradients are averaged of: the first process's, times rank + 1 elsewhere.
GRADIENTS = {
    "a": [mx.arange(7.0), {"half": mx.arange(6.0).reshape(2, 3).astype(mx.float16)}],
    "b": mx.array(3.0),
    "none": mx.zeros((0, 4)),
    "c": (mx.full((9,), 3e4, dtype=mx.float16), mx.ones((2, 1, 2)) * 0.5),
}
SIZES = (0, 16, 40, 1 << 20)


def main(folder: Path) -> None:
    group = mx.distributed.init()
    rank, found = group.rank(), {}
    for counts in SHARES:
        begin = sum(counts[:rank])
        mine = [a[begin : begin + counts[rank]] for a in rows_of(counts)]
        results = norm_results(sync_norm(group), *mine)
        for name, value in results.items():
            if name.startswith("sum"):
                value = mx.distributed.all_sum(value, group=group)
            found[f"norm {counts} {name}"] = value
            mx.eval(value)
    x = rows_of((6, 6))[0][6 * rank : 6 * rank + 6]
    norms = sync_norm(group), sync_norm(group)
    found |= {f"branches {k}": v for k, v in branch_results(x, rank, norms).items()}
    for name, batches in NETS.items():
        net = nn.convert_sync_batchnorm(small_net(), group)
        results = net_results(net, batches[rank], group, name == "compiled")
        found |= {f"net {name} {k}": v for k, v in results.items()}
    for size in SIZES:
        scaled = tree_map(lambda g: g * (rank + 1), GRADIENTS)
        averages = nn.average_gradients(scaled, group, size)
        flat = tree_flatten(averages)
        found |= {f"averages {size} {k}": v for k, v in flat if v.size}
    mx.save_safetensors(str(folder / f"{rank}.safetensors"), found)


if __name__ == "__main__":
    main(Path(sys.argv[1]))
