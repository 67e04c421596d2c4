"""Times of Hopper's matrix tiles, each forced in turn, beside the one that is chosen.

    MLX_USE_CUDA_GRAPHS=0 python benchmarks/tiles.py SCENES.npz --channels 160 160
    --tiles WideTile:3,128,160,4,1 WideTile:2,128,160,5,1

The tables of ``backends/cuda/tiles.py`` are chosen by such times:
benchmarks/results/gpu-surfaces.jsonl, gpu-itself.jsonl of 1x1 kernels, and
gpu-widths.jsonl of int8 features, TF32 and weight gradients. A tile has the name and
the fields of its kind in ``backends/cuda/tiles.py``. One
JSON line a count of rows and pass; times are sums over the kernels of a call, read by
PyTorch's profiler.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from functools import partial
from pathlib import Path
from unittest.mock import patch

import mlx.core as mx
import numpy as np
from gpu_profiles import gpu_kernels
from layer_cases import sites
from scenes import scattered
from written import write_line

import mlx_lattice as ml
from mlx_lattice import devices, routes
from mlx_lattice.backends.cuda import tiles as cuda_tiles
from mlx_lattice.backends.cuda import weight_grad as cuda_weight_grad
from mlx_lattice.problem import (
    FORWARD,
    INPUT_GRAD,
    MLX_LAYOUT,
    PASSES,
    WEIGHT_GRAD,
    IntegerFacts,
)
from mlx_lattice.settings import TF32

KINDS = {
    "WideTile": (cuda_tiles.WideTile, cuda_tiles.wide),
    "PersistentTile": (cuda_tiles.PersistentTile, cuda_tiles.persistent),
    "EdgeTile": (cuda_tiles.WideTile, None),  # of weight gradients
}
LAYERS = ("submanifold", "scattered", "pointwise", "strided", "inverse")
AFTER = IntegerFacts(("scale", "shift", "out_inverse"), "relu")


def relation_of(layer: str, rows: int, scenes: str) -> ml.Relation:
    """The relation of a layer over a scan, with its edges counted, as training does."""
    coords = sites(rows, scenes)
    if layer == "scattered":  # hardly an edge but to itself
        coords = scattered(rows)[:, 1:]
    coords = mx.array(np.insert(coords, 0, 0, axis=1))
    x = ml.SparseTensor(coords, mx.ones((rows, 1)))
    if layer in ("strided", "inverse"):
        step = {"kernel_size": 2, "stride": 2, "dilation": 1}
        manager = x.manager
        relation = manager.kernel_relation(x.key, support="cell", **step)
        if layer == "inverse":
            coarse = manager.cells(x.key, [(2, 2, 2)])[0]
            relation = manager.transposed_kernel_relation(coarse, x.key, **step)
    else:
        size = 1 if layer == "pointwise" else 3
        relation = x.manager.submanifold_kernel_relation(x.key, kernel_size=size)
    relation.n_edges  # noqa: B018 (plans ask for it)
    return relation


@contextmanager
def forced(name: str | None) -> Iterator[None]:
    """Plan every layer with a tile of a name, in the block; None: with its own."""
    for module in [m for n, m in sys.modules.items() if n.startswith("mlx_lattice")]:
        for value in vars(module).values():
            if hasattr(value, "cache_clear") and not isinstance(value, type):
                value.cache_clear()
    with ExitStack() as patched:
        for target, attribute, value in _patches(name) if name else ():
            patched.enter_context(patch.object(target, attribute, value))
        yield


def _patches(name: str) -> Iterator[tuple[object, str, object]]:
    kind, _, fields = name.partition(":")
    shape, make = KINDS[kind][0](*map(int, fields.split(","))), KINDS[kind][1]
    if make is None:
        yield cuda_weight_grad, "GRAD_TILES", {shape.width: shape}
        yield cuda_weight_grad, "FEW_EDGES_GRAD_TILES", {}
        yield cuda_weight_grad, "tile_width", lambda *_: shape.width
        yield cuda_weight_grad, "writes_whole", lambda *_: False
        return

    def sorted_tile(layer: ml.Problem, *_: object) -> cuda_tiles.Tile:
        return make(layer, shape, *[layer.pointwise] * (kind == "WideTile"))

    yield cuda_tiles, "sorted_tile", sorted_tile
    yield cuda_tiles, "small_shape", lambda *_: None
    for name in ("WIDE_TILES", "INT8_TILES", "INT8_FEW_EDGES_TILES"):
        yield cuda_tiles, name, {shape.width: shape}


def call_of(
    relation: ml.Relation, pass_: str, sides: tuple[int, int], dtype: str
) -> Callable[[], mx.array]:
    """What computes a pass of a layer by the plan that it gets here."""
    kind = mx.float32 if dtype == TF32 else mx.float16
    facts = {"precision": TF32} if dtype == TF32 else {}
    (c_in, c_out), volume = sides, relation.volume
    given = mx.random.normal((relation.n_in, c_in)).astype(kind)
    cotangent = mx.random.normal((relation.n_out, c_out)).astype(kind)
    w = (0.05 * mx.random.normal((c_out, volume, c_in))).astype(kind)
    if dtype == "int8":
        x = mx.random.randint(-127, 128, given.shape).astype(mx.int8)
        packed = ml.integer_weight(w.transpose(1, 2, 0).astype(mx.float32), bits=8)
        facts = {"bits": 8, "group_size": packed.group_size, "integer": AFTER}
        added = mx.full((c_out,), 1e-3), mx.ones((c_out,)), mx.ones((1,))
        arguments = relation, x, packed, *added
    else:
        facts["layout"] = MLX_LAYOUT
        arguments = {
            FORWARD: (relation, given, w, None),
            INPUT_GRAD: (relation.T, cotangent, w),
            WEIGHT_GRAD: (relation, given, cotangent),
        }[pass_]
    problem = ml.Problem.of(pass_, relation, c_in, c_out, kind, **facts)
    plan = routes.select(problem, device=devices.current()).plan
    mx.eval(given, cotangent, w)
    return partial(plan, *arguments)


def main() -> None:
    """Measure, and print or write."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("scenes", nargs="?", help=".npz of (N, 3) coordinates by name")
    parser.add_argument("--layer", choices=LAYERS, default=LAYERS[0])
    parser.add_argument("--channels", type=int, nargs=2, default=(160, 160))
    parser.add_argument("--rows", type=int, nargs="+", default=(10_000, 120_000))
    parser.add_argument("--dtype", choices=("float16", "int8", TF32), default="float16")
    parser.add_argument("--passes", nargs="+", choices=PASSES, default=(FORWARD,))
    parser.add_argument("--tiles", nargs="+", default=(), metavar="KIND:FIELDS")
    parser.add_argument("--out", type=Path, help="JSON lines are added to it")
    given = parser.parse_args()
    for rows in given.rows:
        relation = relation_of(given.layer, rows, given.scenes)
        for pass_ in given.passes:
            us = {}
            for name in (None, *given.tiles):
                with forced(name):
                    call = call_of(relation, pass_, tuple(given.channels), given.dtype)
                    mx.eval(call())
                    kernels = gpu_kernels(call)
                if kernels is None:
                    parser.error("times are read on an NVIDIA GPU, with PyTorch there")
                us[name or "chosen"] = round(
                    1e3 * sum(ms for _, ms in kernels.values()), 2
                )
            facts = {"n_in": relation.n_in, "n_out": relation.n_out}
            facts |= {"edges": relation.n_edges, "channels": list(given.channels)}
            row = {"layer": given.layer, "pass": pass_, **facts, "dtype": given.dtype}
            write_line({**row, "us": us}, given.out)


if __name__ == "__main__":
    main()
