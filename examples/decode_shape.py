#!/usr/bin/env python3
"""Decode TRELLIS.2's shape latents into voxels and their dual grid, packed or not.

    examples/decode_shape.py --weights shape.safetensors --latents slat.npz --bits 8

Weights are the published safetensors, or what `mlx-lattice convert` made of them;
latents an .npz of "coords" (N, 4) int32 and "feats" (N, 32). Without files a small
decoder of random weights decodes random latents.
"""

from __future__ import annotations

import argparse
from typing import Any

import mlx.core as mx
import mlx.nn
import numpy as np
from mlx.utils import tree_flatten

import mlx_lattice as ml
from mlx_lattice import models, nn

SMALL: dict[str, Any] = {
    "model_channels": (64, 32, 16),
    "latent_channels": 8,
    "num_blocks": (2, 1, 0),
}


def load(
    path: str | None, bits: int | None, group_size: int
) -> models.SparseVAEDecoder:
    """Return the decoder in half precision, packed where the file or ``bits`` says."""
    sizes: dict[str, Any] = {} if path else SMALL
    net = models.SparseVAEDecoder(**sizes, dtype=mx.float16)
    held: Any = mx.load(path) if path else {}
    packed = {name.removesuffix(".scales") for name in held if name.endswith(".scales")}
    if packed and bits is None:
        raise SystemExit(f"{path} is packed: say how, by --bits and --group-size")

    def quantize(predicate: Any) -> None:
        packing: dict[str, Any] = {"group_size": group_size, "bits": bits}
        mlx.nn.quantize(net, **packing, class_predicate=predicate)

    if packed:
        quantize(lambda name, _: name in packed)
    if held:
        net.load_weights(list(held.items()), strict=True)
    if bits and not packed:
        kept = nn.keep_float()
        quantize(kept)
        print(kept)
    return net


def latents_of(path: str | None) -> ml.SparseTensor:
    """Return latents from a file, or random ones on a sphere."""
    if path:
        with np.load(path) as file:
            coords, feats = file["coords"], file["feats"]
        return ml.SparseTensor(
            mx.array(coords.astype(np.int32)), mx.array(feats.astype(np.float32))
        )
    points = mx.random.normal((400, 3))
    points = 6 * points / mx.linalg.norm(points, axis=1, keepdims=True)
    where = ml.SparseTensor.from_points(points, voxel_size=1.0)
    return where.replace(mx.random.normal((len(where), SMALL["latent_channels"])))


def main() -> None:
    """Load, decode, report, write."""
    parser = argparse.ArgumentParser(description=str(__doc__).splitlines()[0])
    parser.add_argument("--weights", metavar="FILE")
    parser.add_argument("--latents", metavar="FILE")
    parser.add_argument("--bits", type=int, choices=(4, 8))
    parser.add_argument("--group-size", type=int, choices=(32, 64, 128), default=64)
    parser.add_argument("--out", default="shape.npz", metavar="FILE")
    parser.add_argument("--trace", metavar="FILE", help="write what ran, as a page")
    given = parser.parse_args()
    if bool(given.weights) != bool(given.latents):
        parser.error("--weights and --latents go together")

    mx.random.seed(0)
    net = load(given.weights, given.bits, given.group_size)
    x = latents_of(given.latents)
    size = sum(array.nbytes for array in dict(tree_flatten(net.parameters())).values())
    print(f"{size / 1e6:,.1f} MB of weights")
    with ml.trace(net) as t:
        y, cells = net(x, return_subdivisions=True)
        mx.eval(y.feats)
    rows = [len(x), *(len(c) for c in cells[1:]), len(y)]
    print(" -> ".join(f"{n:,}" for n in rows), "voxels")
    print(t.table())
    if given.trace:
        t.save(given.trace)
    grid = models.dual_grid(y, net.voxel_margin)._asdict()
    np.savez(
        given.out,
        coords=np.array(y.coords),
        vertices=np.array(grid["vertices"].feats),
        intersected=np.array(grid["intersected"].feats > 0),
        split=np.array(grid["split"].feats),
    )
    print(f"wrote {given.out}")


if __name__ == "__main__":
    main()
