"""Launches and bytes of a training step on Metal, counted in MLX's own graph.

    MLX_LATTICE_METAL=host python benchmarks/step_counts.py [--rows N] [--net NAME]

A net with its relations kept: one forward pass in evaluation, and one training step
(loss, gradients, and with ``--sgd`` the optimiser's update), also with the norms in
evaluation, in half precision. The graph that MLX would run is written out and its
operations counted, but for views, which launch nothing. Kernels of this library are
noted where they are called, with plans of Metal, and compute nothing; their bytes are
those of inputs and outputs, each once. MLX tells no shapes of its operations. Nothing
is timed. A ``BatchNorm`` of few rows in training is noted once more where something
follows it: its own launch is made at its call, and nobody asks for it.
"""

from __future__ import annotations

import argparse
import re
from collections import Counter
from contextlib import contextmanager
from functools import partial
from io import StringIO
from unittest.mock import patch

import mlx.core as mx
import mlx.nn
import mlx.optimizers
import numpy as np
from net_kinds import NETS, result_of, rows_for

import mlx_lattice as ml
from mlx_lattice import models

# Operations of MLX that start nothing on a GPU: the same bytes by another name.
# Contiguous copies rows that lie apart; none do here. What MLX copies for a kernel that
# reads rows that do is no operation, and not counted.
VIEWS = {
    "AsStrided", "Broadcast", "BroadcastAxes", "Contiguous", "Copy", "CustomTransforms",
    "Depends", "ExpandDims", "Flatten",
    "Reshape", "Slice", "Split", "Squeeze", "StopGradient", "Transpose", "Unflatten",
    "View",
}  # fmt: skip


class Counted:
    """What a function would launch: ours and MLX's, by name, and their bytes."""

    def __init__(self):
        self.ours, self.mlx, self.bytes = Counter(), Counter(), 0

    def note(self, outputs: list[mx.array]) -> None:
        """Count MLX's operations in the graph of some arrays."""
        written = StringIO()
        mx.export_to_dot(written, *outputs)
        graph = written.getvalue()
        names = re.findall(r'(\d+) \[label ="(\w+)', graph)
        parts = Counter(re.findall(r'^"\w+" -> (\d+)$', graph, re.M))
        for node, name in names:
            if name not in VIEWS:
                # A concatenation is a copy of each part.
                self.mlx[name] += parts[node] if name == "Concatenate" else 1

    def kernel(self, name, input_names, output_names, source, *_, **__):
        """Stand where ``mx.fast.metal_kernel`` is."""

        def call(*, inputs, output_shapes, output_dtypes, **_):
            self.ours[name.split("_lattice")[0]] += 1
            # From the host: no operation of MLX stands for them.
            made = [
                mx.array(np.zeros(shape, np.float32), dtype)
                for shape, dtype in zip(output_shapes, output_dtypes, strict=True)
            ]
            arrays = [a for a in inputs if isinstance(a, mx.array)]
            for array in [*arrays, *made]:
                self.bytes += array.nbytes
            return mx.depends(made, arrays)

        return call

    def norm(self, name: str, *given) -> mx.array:
        """Stand where a norm of ``mx.fast`` is, which off a GPU is many operations.

        On one it is a launch; back one, and a sum for each of its parameters.
        """
        x, *lines, _ = given
        lines = [a for a in lines if a is not None]
        function = mx.custom_function(lambda x, *rest: mx.depends([x], [*rest])[0])

        @function.vjp
        def vjp(primals, dy, _):
            self.mlx.update([f"{name} vjp", *("sum" for _ in lines)])
            return [mx.depends([a], [dy])[0] for a in primals]

        self.mlx[name] += 1
        return function(x, *lines)

    @property
    def launches(self) -> int:
        """Of both."""
        return sum(self.ours.values()) + sum(self.mlx.values())


@contextmanager
def counting(counted: Counted):
    """Note launches inside the block."""
    fast = "layer_norm", "rms_norm"
    norms = {name: partial(counted.norm, name) for name in fast}
    with (
        patch.object(mx.fast, "metal_kernel", counted.kernel),
        patch.multiple(mx.fast, **norms),
    ):
        yield


def scene(rows: int) -> np.ndarray:
    """Return rows of a thin, hilly surface in two scans."""
    rng = np.random.default_rng(0)
    side = int((rows / 2) ** 0.5) + 2
    x, y = (v.reshape(-1) for v in np.meshgrid(np.arange(side), np.arange(side)))
    parts = []
    for batch in (0, 1):
        phase = rng.random(2) * 6
        z = np.round(4 * np.sin(x / 9 + phase[0]) + 4 * np.cos(y / 7 + phase[1])) + 8
        part = np.stack([np.full_like(x, batch), x, y, z.astype(x.dtype)], axis=1)
        parts.append(part[: rows // 2])
    return np.concatenate(parts).astype(np.int32)


def main() -> None:
    """Count and print."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--rows", type=int, default=4000)
    kinds = "of models, or one of nets.py"
    parser.add_argument("--net", default="MinkUNet18", help=kinds)
    parser.add_argument("--sgd", action="store_true", help="count its update too")
    parser.add_argument("--mlx-optimizer", action="store_true", help="MLX's own SGD")
    parser.add_argument("--names", action="store_true", help="of what is launched")
    given = parser.parse_args()
    mx.random.seed(0)
    net = NETS[given.net]() if given.net in NETS else getattr(models, given.net)(4, 13)
    net.set_dtype(mx.float16)
    coords, about = rows_for(given.net, scene(given.rows))
    feats = mx.random.normal((len(coords), 4)).astype(mx.float16)
    x = ml.SparseTensor(mx.array(coords), feats, **about)
    labels = mx.random.randint(0, 13, (len(coords),))
    mx.eval(net.parameters(), x.feats, labels)

    def loss(net, feats):
        scores = result_of(net(x.replace(feats))).astype(mx.float32)
        if len(scores) != len(labels):  # of other rows than those of the scan
            return mx.square(scores).mean()
        return mlx.nn.losses.cross_entropy(scores, labels).mean()

    step = mlx.nn.value_and_grad(net, loss)
    of = mlx if given.mlx_optimizer else ml
    optimiser = of.optimizers.SGD(0.01, momentum=0.9)
    optimiser.init(net.trainable_parameters())

    def train(feats):
        value, gradients = step(net, feats)
        updated = gradients
        if given.sgd:
            updated = optimiser.apply_gradients(gradients, net)
        return [value, *(a for _, a in mlx.utils.tree_flatten(updated))]

    def fixed(feats):
        net.eval()
        return train(feats)

    def evaluate(feats):
        net.eval()
        return result_of(net(x.replace(feats)))

    print(f"{given.net}, {len(coords):,} rows, float16, relations kept")
    steps = {"training": train, "norms fixed": fixed, "evaluation": evaluate}
    for name, run in steps.items():
        mx.eval(run(x.feats))  # relations and plans
        counted = Counted()
        with counting(counted):
            made = run(x.feats)
        counted.note(made if isinstance(made, list) else [made])
        print(
            f"{name:11}{counted.launches:7,} launches: {sum(counted.ours.values()):,} "
            f"ours, {sum(counted.mlx.values()):,} MLX's; "
            f"ours read and write {counted.bytes / 1e6:,.1f} MB"
        )
        if given.names:
            for which in (counted.ours, counted.mlx):
                print("  ", ", ".join(f"{n} {c}" for n, c in which.most_common()))


if __name__ == "__main__":
    main()
