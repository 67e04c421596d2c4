#!/usr/bin/env python3
"""Teach a small SpUNet to tell surfaces of a scan apart; write a folder for segment.

    examples/train_segmenter.py scan.ply --voxel-size 0.3 --out surfaces
    mlx-lattice segment scan.ply --model surfaces

The labels are from a rule, so that any scan will do: level, upright, or the rest. The
net gets nothing but the voxels, and learns on one half of the scan, by x; the other
half is scored. Without a file it looks at a room that it makes up.
"""

from __future__ import annotations

import argparse
from pathlib import Path

import mlx.core as mx
import mlx.nn
from tqdm import tqdm

from mlx_lattice import io, models, nn
from mlx_lattice.commands.demo import (
    CLASSES,
    labelled,
    recipe,
    right,
    room,
    teach,
    untaught,
)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("points", nargs="?", help="a point-cloud file")
    parser.add_argument("--voxel-size", type=float, default=0.1)
    parser.add_argument("--steps", type=int, default=80)
    parser.add_argument("--bits", type=int, choices=(4, 8), help="pack the weights")
    parser.add_argument("--out", type=Path, default="surfaces")
    given = parser.parse_args()
    points = io.read_points(given.points).points if given.points else room()
    scan = labelled(points, given.voxel_size)
    mx.random.seed(0)
    net = untaught()
    with tqdm(total=given.steps, unit="step", mininterval=1) as bar:

        def tell(loss: float) -> None:
            bar.set_postfix(loss=f"{loss:.3f}", refresh=False)
            bar.update()

        teach(net, [scan], given.steps, tell)
    share = right(net, [scan])
    print(f"{len(scan.x):,} voxels; {share:.1%} right in the half that was not taught")
    if given.bits:
        mlx.nn.quantize(net, 32, given.bits, class_predicate=nn.keep_float())
    colours = tuple(CLASSES.values())
    net.about = models.About(
        recipe(given.voxel_size), tuple(CLASSES), colours, "examples", "MIT"
    )
    net.save_pretrained(given.out)
    print(f"wrote {given.out}/: mlx-lattice segment SCAN --model {given.out}")


if __name__ == "__main__":
    main()
