#!/usr/bin/env python3
"""Pack a net's weights into 8 or 4 bits, and see what that does to every layer.

examples/quantise.py --bits 4
"""

from __future__ import annotations

import argparse

import mlx.core as mx
from mlx.utils import tree_flatten

import mlx_lattice as ml
from mlx_lattice import models, nn


def size_of(model: nn.Module) -> int:
    """Return the bytes of a model's parameters."""
    return sum(
        array.nbytes for array in dict(tree_flatten(model.parameters())).values()
    )


def main() -> None:
    """Calibrate a MinkUNet14 of random weights on random clouds, and compare."""
    parser = argparse.ArgumentParser(description=str(__doc__).splitlines()[0])
    parser.add_argument("--bits", type=int, choices=(4, 8), default=8)
    parser.add_argument("--group-size", type=int, choices=(32, 64, 128), default=32)
    parser.add_argument("--points", type=int, default=2000)
    parser.add_argument("--batches", type=int, default=2)
    given = parser.parse_args()

    mx.random.seed(0)
    clouds = [
        ml.SparseTensor.from_points(mx.random.normal((given.points, 3)), voxel_size=0.1)
        for _ in range(given.batches + 1)
    ]
    net = models.MinkUNet14(1, 20).eval()
    # The last cloud is held out: calibration never sees it.
    packed, report = ml.calibrate(
        net, clouds[:-1], bits=given.bits, group_size=given.group_size
    )
    print(report)
    expected, got = net(clouds[-1]).feats, packed(clouds[-1]).feats
    error = mx.linalg.norm(got - expected) / mx.linalg.norm(expected)
    print(f"{size_of(net):,} bytes in float32, {size_of(packed):,} in int{given.bits}")
    print(f"relative error of the output on a held-out cloud: {error.item():.3%}")


if __name__ == "__main__":
    main()
