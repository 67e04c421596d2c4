"""A submanifold convolution as MLX ports write it, beside ``ops.subm_conv3d``.

MLX has no sparse convolution, so each port writes a 3x3x3 one itself: find the
neighbours of every voxel, then gather, multiply and add. The three usual ways to add
and the two usual ways to find are written here in MLX and NumPy, checked against
``ops.subm_conv3d``, and timed on the same rows, in processor time of one thread. NumPy
runs the gather loop too, since MLX multiplies slowly on Linux's CPUs.

    export OMP_NUM_THREADS=1 OPENBLAS_NUM_THREADS=1 MLX_LATTICE_THREADS=1
    python benchmarks/mlx_port.py --out benchmarks/results/mlx_port.jsonl

``docs/mlx_port.md`` has the figures.
"""

import argparse
import itertools
import os
import time
from collections.abc import Callable
from pathlib import Path

import mlx.core as mx
import numpy as np
import scenes
from written import write_line

import mlx_lattice as ml
from mlx_lattice import ops

OFFSETS = list(itertools.product((-1, 0, 1), repeat=3))
CASES = ((2_000, 256), (15_000, 128), (60_000, 64), (100_000, 32))

# Neighbour tables: (N, 27) rows, N where a neighbour is missing.


def by_dictionary(coords: np.ndarray) -> np.ndarray:
    """Look each neighbour up in a dictionary, in Python."""
    places = [tuple(row) for row in coords.tolist()]
    row_of = {place: row for row, place in enumerate(places)}
    found = [
        [row_of.get((b, x + i, y + j, z + k), len(places)) for i, j, k in OFFSETS]
        for b, x, y, z in places
    ]
    return np.array(found, np.int32)


def by_search(coords: np.ndarray) -> np.ndarray:
    """Search each neighbour among the sorted cells, in NumPy."""
    size = coords.max(axis=0).astype(np.int64) + 3
    units = np.array([size[1] * size[2] * size[3], size[2] * size[3], size[3], 1])
    cells = (coords + (0, 1, 1, 1)) @ units
    order = np.argsort(cells)
    ranked = cells[order]
    wanted = cells[:, None] + np.array(OFFSETS) @ units[1:]
    at = np.minimum(np.searchsorted(ranked, wanted), len(cells) - 1)
    return np.where(ranked[at] == wanted, order[at], len(cells)).astype(np.int32)


# Ways to add: each takes (N, C_in) features, the map, and (27, C_in, C_out) weights.


def with_zero_row(feats: mx.array) -> mx.array:
    return mx.concatenate([feats, mx.zeros_like(feats[:1])])


class GatherLoop:
    """For each offset: gather all rows, zeros for missing ones, multiply, add."""

    def __init__(self, found: np.ndarray):
        self.columns = [mx.array(column) for column in found.T]

    def __call__(self, feats: mx.array, weight: mx.array) -> mx.array:
        padded, y = with_zero_row(feats), mx.zeros((len(feats), weight.shape[-1]))
        for k, column in enumerate(self.columns):
            y = y + padded[column] @ weight[k]
        return y


class ScatterLoop:
    """For each offset: gather the rows that have a neighbour, multiply, scatter."""

    def __init__(self, found: np.ndarray):
        self.edges = []
        for column in found.T:
            (out,) = np.nonzero(column < len(found))
            self.edges.append((mx.array(out), mx.array(column[out])))

    def __call__(self, feats: mx.array, weight: mx.array) -> mx.array:
        y = mx.zeros((len(feats), weight.shape[-1]))
        for k, (out, row) in enumerate(self.edges):
            y = y.at[out].add(feats[row] @ weight[k])
        return y


class AllAtOnce:
    """Gather the rows of all offsets into one array, multiply, sum over offsets."""

    def __init__(self, found: np.ndarray):
        self.found = mx.array(found.T)

    def __call__(self, feats: mx.array, weight: mx.array) -> mx.array:
        return (with_zero_row(feats)[self.found] @ weight).sum(axis=0)


class NumPyLoop:
    """The gather loop, in NumPy."""

    def __init__(self, found: np.ndarray):
        self.columns = np.ascontiguousarray(found.T)

    def __call__(self, feats: mx.array, weight: mx.array) -> mx.array:
        padded, weight = np.array(with_zero_row(feats)), np.array(weight)
        y = np.zeros((len(feats), weight.shape[-1]), np.float32)
        for k, column in enumerate(self.columns):
            y += padded[column] @ weight[k]
        return mx.array(y)


FINDERS = {"dictionary": by_dictionary, "binary search": by_search}
ADDERS = {
    "gather loop": GatherLoop,
    "scatter loop": ScatterLoop,
    "at once": AllAtOnce,
    "gather loop, NumPy": NumPyLoop,
}


def timed(call: Callable[[], object], repeats: int) -> tuple[float, float]:
    """Return the median milliseconds of processor time, and the peak in megabytes."""
    mx.reset_peak_memory()
    before, times = mx.get_active_memory(), []
    for _ in range(repeats):
        start = time.process_time()
        call()
        times.append(time.process_time() - start)
    return 1e3 * float(np.median(times)), (mx.get_peak_memory() - before) / 2**20


def measure(rows: int, channels: int, repeats: int, out: Path | None) -> None:
    """Time every way at one size; raise if one computes something else."""
    rng = np.random.default_rng(0)
    coords = scenes.surface(rows)
    feats = mx.array(rng.standard_normal((rows, channels)), mx.float32)
    size = channels, 3, 3, 3, channels
    weight = mx.array(rng.standard_normal(size) / channels, mx.float32)
    flat = mx.contiguous(weight.reshape(channels, 27, channels).transpose(1, 2, 0))
    x = ml.SparseTensor(mx.array(coords), feats)
    expected = ops.subm_conv3d(x, weight).feats
    mx.eval(flat, expected)
    edges = x.manager.submanifold_kernel_relation(x.key).n_edges
    facts = {"rows": rows, "channels": channels, "edges": edges}
    facts["threads"] = int(os.environ.get("MLX_LATTICE_THREADS", 0))

    def line(what: str, way: str, call: Callable[[], object], times: int) -> None:
        ms, mb = timed(call, times)
        row = {**facts, "what": what, "way": way, "processor_ms": round(ms, 2)}
        write_line(row | ({"peak_mb": round(mb, 1)} if what == "conv" else {}), out)

    def our_map() -> None:
        fresh = ml.SparseTensor(mx.array(coords), feats)
        relation = fresh.manager.submanifold_kernel_relation(fresh.key)
        mx.eval(relation.out_in)

    line("map", "mlx_lattice", our_map, 3 * repeats)
    for name, find in FINDERS.items():
        line("map", name, lambda find=find: find(coords), repeats)
    found = by_search(coords)
    assert np.array_equal(found[:500], by_dictionary(coords)[:500])
    line(
        "conv",
        "mlx_lattice",
        lambda: mx.eval(ops.subm_conv3d(x, weight).feats),
        repeats,
    )
    for name, kind in ADDERS.items():
        add = kind(found)
        y = add(feats, flat)
        error = mx.linalg.norm(y - expected) / mx.linalg.norm(expected)
        assert error.item() < 1e-5, f"{name} is not the convolution"
        line("conv", name, lambda add=add: mx.eval(add(feats, flat)), repeats)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rows", type=int, help="voxels; by default several cases")
    parser.add_argument("--channels", type=int, default=128, help="in and out")
    parser.add_argument("--repeats", type=int, default=3, help="timed calls of each")
    parser.add_argument("--out", type=Path, help="JSON lines are added to it")
    options = parser.parse_args()
    given = ((options.rows, options.channels),) if options.rows else CASES
    mx.set_default_device(mx.cpu)
    for rows, channels in given:
        measure(rows, channels, options.repeats, options.out)
