#!/usr/bin/env python3
"""Inspect a scan before training on it: voxels, coverage, routes and their cost.

    examples/inspect_scan.py scan.ply --voxel-size 0.1 --device m4-max

Without a file it looks at the surface of a torus.
"""

from __future__ import annotations

import argparse

import mlx.core as mx
import numpy as np

import mlx_lattice as ml
from mlx_lattice import nn


def torus(count: int, seed: int = 0) -> np.ndarray:
    """Return (count, 3) points on a torus of radii 10 and 3."""
    rng = np.random.default_rng(seed)
    u, v = rng.uniform(0, 2 * np.pi, size=(2, count))
    ring = 10 + 3 * np.cos(v)
    points = [ring * np.cos(u), ring * np.sin(u), 3 * np.sin(v)]
    return np.stack(points, axis=1).astype(np.float32)


def net(channels: int) -> nn.Sequential:
    """Return a stem and one strided step: what most 3D nets begin with."""
    return nn.Sequential(
        nn.SubmConv3d(1, channels, 3),
        nn.ReLU(),
        nn.Conv3d(channels, 2 * channels, 2, stride=2),
        nn.ReLU(),
        nn.SubmConv3d(2 * channels, 2 * channels, 3),
    )


def main() -> None:
    """Print what there is to know, and save the trace where asked."""
    parser = argparse.ArgumentParser(description=str(__doc__).splitlines()[0])
    parser.add_argument("scan", nargs="?", help="a point-cloud file")
    parser.add_argument("--voxel-size", type=float, default=0.25)
    parser.add_argument("--points", type=int, default=20_000, help="of the torus")
    parser.add_argument("--channels", type=int, default=16)
    parser.add_argument("--device", help="explain for another chip, such as m4-max")
    parser.add_argument("--out", metavar="FILE", help="trace as .html or .json")
    given = parser.parse_args()

    if given.scan:
        from mlx_lattice.io import read_points

        points = np.asarray(read_points(given.scan).points, dtype=np.float32)
    else:
        points = torus(given.points)
    x = ml.SparseTensor.from_points(mx.array(points), voxel_size=given.voxel_size)
    print(f"{len(points):,} points -> {len(x):,} voxels of {given.voxel_size:g}\n")

    # How many neighbours a row has says how much a 3x3x3 kernel has to do.
    relation = x.manager.submanifold_kernel_relation(x.key, kernel_size=3)
    print(relation.coverage(), "\n")

    model = net(given.channels)
    print(ml.explain(x, model.layers[0], device=given.device), "\n")
    with ml.trace(model, time=True) as t:
        mx.eval(model(x).feats)
    print(t.table())
    if given.out:
        t.save(given.out)


if __name__ == "__main__":
    main()
