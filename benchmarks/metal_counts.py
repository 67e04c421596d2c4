"""What the matrix routes on Metal do: counted by runs on the host, and modelled.

A patch of each scene runs through ``metal/host`` with all checks; the tile model has to
give the very same matrix operations and feature, weight and table bytes, or the script
stops. The model then counts whole scenes and wider layers: operations over useful ones,
device bytes as the kernel asks for them and through a cache (least recently used, 8 MB,
128-byte lines, threadgroups one after another) over compulsory ones, and the time that
both need at a chip's peaks, beside what explicit GEMM would move. Nothing is timed.

    python benchmarks/metal_counts.py [--scene FOLDER] [--quick]

FOLDER may hold ``gpu_scenes.npz`` with coordinates W1 and ``cpu_scenes.py`` with
``surface_coords``; a surface is made where it does not. Results are appended to
``benchmarks/results/metal_counts.jsonl``.
"""

import argparse
import importlib.util
import json
import sys
from collections import OrderedDict
from pathlib import Path

import mlx.core as mx
import numpy as np

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
import mlx_lattice as ml  # noqa: E402
from metal import host  # noqa: E402
from mlx_lattice import devices  # noqa: E402
from mlx_lattice.backends import metal_matrix  # noqa: E402

RESULTS = Path(__file__).parent / "results" / "metal_counts.jsonl"
DEVICES = ("m1", "m2-max", "m4-max", "m5-max")
EXECUTED = (32, 64, 128, 256)
MODELLED = ((32, 32), (64, 64), (128, 128), (256, 256), (512, 512), (1024, 1024))
MODELLED += ((128, 512), (256, 1024), (512, 2048), (1024, 4096))
BLOCK, TILE, VOLUME, ITEM = 16, 64, 27, 2
CACHE, LINE = 8_000_000, 128


def surface(rows):
    """About `rows` voxels of an undulating sheet, in lexicographic order."""
    side = int(np.sqrt(rows))
    x, y = np.meshgrid(np.arange(side), np.arange(side), indexing="ij")
    wave = 2 * np.pi / side
    height = side * (0.06 * np.sin(3 * wave * x + 1) * np.cos(2 * wave * y))
    height += side * 0.03 * np.sin(5 * wave * (x + y))
    return np.stack([x, y, np.round(height)], -1).reshape(-1, 3)


def scenes(folder, rows):
    """Yield (name, coordinates) of every scene there is."""
    thin = folder / "cpu_scenes.py" if folder else None
    if thin is not None and thin.exists():
        spec = importlib.util.spec_from_file_location("cpu_scenes", thin)
        module = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(module)
        yield "thin surface", module.surface_coords(rows)[:, 1:]
    else:
        yield "thin surface", surface(rows)
    if folder and (folder / "gpu_scenes.npz").exists():
        yield "W1", np.load(folder / "gpu_scenes.npz")["W1"]


def relation(coords):
    """The submanifold 3x3x3 relation of (N, 3) coordinates."""
    coords = np.concatenate([np.zeros((len(coords), 1)), coords], axis=1)
    coords = coords[np.lexsort(coords.T[::-1])].astype(np.int32)
    manager = ml.CoordinateManager()
    key = manager.insert(mx.array(coords))
    return manager.submanifold_kernel_relation(key, kernel_size=3)


class Cache:
    """Least recently used objects of some bytes each, and the bytes that missed."""

    def __init__(self):
        self.held, self.missed, self.sizes = 0, 0, OrderedDict()

    def touch(self, key, size):
        """Use an object."""
        if key in self.sizes:
            self.sizes.move_to_end(key)
            return
        self.missed += size
        if size > CACHE:
            return
        self.sizes[key] = size
        self.held += size
        while self.held > CACHE:
            self.held -= self.sizes.popitem(last=False)[1]

    def row(self, array, row, size):
        """Use a row of an array, by whole lines."""
        if size >= LINE:
            self.touch((array, row), size)
        else:
            self.touch((array, row * size // LINE), LINE)


class Edges:
    """The kernel-major edges of a relation, and what a weight gradient does."""

    def __init__(self, relation):
        self.n, self.n_in = relation.n_out, relation.n_in
        self.edges = np.array(relation.edges)
        self.starts = np.searchsorted(self.edges[:, 2], np.arange(VOLUME + 1))

    def parts(self, c_in, c_out):
        """How many parts each offset's edges are cut into."""
        tiles = -(-c_in // 64) * -(-c_out // 64)
        features = (self.n_in * c_in + self.n * c_out) * ITEM
        shape = VOLUME, c_in, c_out
        return metal_matrix.grad_parts(len(self.edges), features, shape, tiles)

    def cut(self, parts):
        """Yield the edges of each unit, offsets the faster."""
        for p in range(parts):
            for start, stop in zip(self.starts, self.starts[1:], strict=False):
                count = int(stop - start)
                first, last = count * p // parts, count * (p + 1) // parts
                yield self.edges[start + first : start + last]

    def counts(self, c_in, c_out):
        """What a weight gradient executes."""
        parts = self.parts(c_in, c_out)
        eights = sum(-(-len(unit) // 8) for unit in self.cut(parts))
        return {
            "matrix_flop": eights * -(-c_in // 8) * -(-c_out // 8) * 1024,
            "x": len(self.edges) * c_in * ITEM * -(-c_out // 64),
            "dy": len(self.edges) * c_out * ITEM * -(-c_in // 64),
        }

    def bytes(self, c_in, c_out):
        """(compulsory, through the cache, explicit GEMM's) bytes."""
        parts = self.parts(c_in, c_out)
        cache = Cache()
        for number, unit in enumerate(self.cut(parts)):
            for i, o in unit[:, :2].tolist():
                cache.row("x", i, c_in * ITEM)
                cache.row("dy", o, c_out * ITEM)
            cache.touch(("edges", number), unit.nbytes)
        written = VOLUME * c_in * c_out * ITEM
        listed = self.edges.nbytes
        compulsory = self.n_in * c_in * ITEM + self.n * c_out * ITEM + written + listed
        partials = 2 * parts * VOLUME * c_in * c_out * 4 if parts > 1 else 0
        explicit = compulsory + 2 * len(self.edges) * (c_in + c_out) * ITEM
        return compulsory, cache.missed + partials + written, explicit


class Tiles:
    """The sorted table of a relation, and what a launch over it does."""

    def __init__(self, relation):
        with host.recording(checked=False):
            view = metal_matrix.tiles(relation)
            mx.eval(view.table, view.rows)
        self.table = np.array(view.table)
        self.rows = np.array(view.rows)
        self.n, self.used = len(self.table), self.table >= 0
        self.edges = int(self.used.sum())
        self.blocks, self.tiles = self._any(BLOCK), self._any(TILE)

    def _any(self, size):
        padded = np.pad(self.used, ((0, -self.n % size), (0, 0)))
        return padded.reshape(-1, size, VOLUME).any(axis=1)

    def counts(self, c_in, c_out):
        """What a forward launch executes, by the tile model."""
        across = -(-c_out // (64 if c_out > 32 else 32))
        multiplies = int(self.blocks.sum()) * 2 * -(-c_in // 8) * -(-c_out // 8)
        # The lanes of a block's existing rows each read an entry of its used offsets.
        rows = np.minimum(BLOCK, self.n - BLOCK * np.arange(len(self.blocks)))
        entries = int((self.blocks * rows[:, None]).sum()) * 2
        return {
            "matrix_flop": multiplies * 1024,
            "x": self.edges * c_in * ITEM * across,
            "w": int(self.tiles.sum()) * c_in * c_out * ITEM,
            "table": entries * 4 * across,
        }

    def from_memory(self, c_in, c_out):
        """Bytes that miss the cache in a forward pass."""
        wide = VOLUME * c_in * c_out * ITEM > metal_matrix.CACHED_WEIGHTS
        passes = -(-c_out // 64) if wide else 1
        slab, wide_row = c_in * (c_out // passes) * ITEM, c_in * ITEM
        cache = Cache()
        touch = cache.touch
        for t, used in enumerate(self.tiles):
            tile = self.table[t * TILE : (t + 1) * TILE]
            # What streams through takes room too: the table's lines and the output's.
            touch(("table", t), tile.size * 4)
            for k in np.flatnonzero(used).tolist():
                touch(("w", k), slab)
                column = tile[:, k]
                for row in column[column >= 0].tolist():
                    cache.row("x", row, wide_row)
            touch(("y", t), len(tile) * (c_out // passes) * ITEM)
        return cache.missed * passes

    def bytes(self, c_in, c_out):
        """(compulsory, through the cache, explicit GEMM's) bytes of a forward pass."""
        n, item = self.n, ITEM
        weights = VOLUME * c_in * c_out * item
        compulsory = n * (c_in + c_out) * item + weights + self.table.size * 4
        explicit = compulsory + 2 * self.edges * (c_in + c_out) * item
        # The place of each row and the masks come on top.
        moved = self.from_memory(c_in, c_out) + 4 * n + 4 * len(self.blocks)
        return compulsory, moved, explicit


def execute(relation, tiles, edges, channels):
    """Run two passes on the host, and hold the models against their counts."""
    x = mx.ones((relation.n_in, channels), dtype=mx.float16)
    w = mx.ones((VOLUME, channels, channels), dtype=mx.float16)
    conv = metal_matrix.CONV["sorted_implicit_gemm"]
    filling, metal_matrix.FILLING = metal_matrix.FILLING, 1
    _, report = host.run(conv, x, w, relation, 1, False)
    metal_matrix.FILLING = filling
    forward = agree(report, "sorted_implicit", tiles.counts(channels, channels))
    grad = metal_matrix.WEIGHT_GRAD["grouped_gemm"]
    _, report = host.run(grad, x, x, relation, 1)
    backward = agree(report, "grouped", edges.counts(channels, channels))
    return {"forward": forward, "weight_grad": backward}


def agree(report, kernel, model):
    """Stop unless a launch did what the model says; return what it moved and held."""
    report.raise_faults()
    launch = next(r for r in report.launches if kernel in r.kernel).counts
    counted = {"matrix_flop": launch.matrix_flop}
    counted |= {b: launch.buffers[b].read_bytes for b in model if b != "matrix_flop"}
    if counted != model:
        raise SystemExit(f"the model gives {model}, the kernel did {counted}")
    moved = launch.device_read_bytes + launch.device_written_bytes
    return {"device_bytes": moved, "threadgroup_memory": launch.threadgroup_memory}


def model(problem, edges, held, c_in, c_out):
    """Count a pass over a whole scene.

    Args:
        problem: Tiles or Edges.
        edges: how many there are.
        held: places of edges that threadgroups hold while some of them multiply.
        c_in, c_out: channels.
    """
    useful = 2 * edges * c_in * c_out
    compulsory, moved, explicit = problem.bytes(c_in, c_out)
    counts = problem.counts(c_in, c_out)
    done = counts.pop("matrix_flop")
    held = max(done, 2 * held * c_in * c_out)
    row = {
        "rows": problem.n,
        "edges": edges,
        "done_over_useful": done / useful,
        "held_over_useful": held / useful,
        "compulsory_bytes": compulsory,
        "asked_over_compulsory": sum(counts.values()) / compulsory,
        "cached_over_compulsory": moved / compulsory,
        "explicit_over_compulsory": explicit / compulsory,
    }
    for name in DEVICES:
        device = devices.profile(name)
        # Simdgroup matrices run at the SIMD rate; neural accelerators are tensor_ops'.
        rate, bandwidth = device.tflops * 1e9, device.bandwidth * 1e6
        row[name] = {
            "ms": max(done / rate, moved / bandwidth),
            "idle_ms": max(held / rate, moved / bandwidth),
            "roofline_ms": max(useful / rate, compulsory / bandwidth),
            "explicit_ms": max(useful / rate, explicit / bandwidth),
        }
        if device.neural_accelerators:
            fast = device.half_tflops * 1e9
            row[name]["tensor_ops_ms"] = max(done / fast, moved / bandwidth)
    return row


def show(name, pass_, c_in, c_out, row):
    """Print one line of the table."""
    times = "  ".join(
        f"{row[d]['ms']:8.2f} ({row[d]['roofline_ms']:.2f})" for d in DEVICES
    )
    print(
        f"{name:12} {pass_:11} {c_in:4} {c_out:4}  {row['done_over_useful']:5.2f} "
        f"{row['held_over_useful']:5.2f}  {row['asked_over_compulsory']:6.1f} "
        f"{row['cached_over_compulsory']:6.2f} {row['explicit_over_compulsory']:6.2f}  "
        f"{times}",
        flush=True,
    )


def main():
    """Count every problem of every scene."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--scene", type=Path, help="folder of the scenes")
    parser.add_argument("--rows", type=int, default=100_000)
    parser.add_argument("--patch", type=int, default=1500, help="rows that are run")
    parser.add_argument("--quick", action="store_true", help="up to 64 channels")
    args = parser.parse_args()
    if reason := host.missing():
        raise SystemExit(reason)
    RESULTS.parent.mkdir(exist_ok=True)
    print(
        "submanifold 3x3x3, float16, sorted_implicit_gemm and grouped_gemm\n"
        "ops: done, and held by tiles of 64, over useful; bytes over compulsory: asked "
        "for, through 8 MB, explicit GEMM\n"
        "ms: at peak rates, roofline in brackets: " + ", ".join(DEVICES)
    )
    with RESULTS.open("a") as results:

        def record(**row):
            results.write(json.dumps(row) + "\n")

        for name, coords in scenes(args.scene, args.rows):
            patch = relation(coords[: args.patch])
            tiles, edges = Tiles(patch), Edges(patch)
            for channels in EXECUTED[: 2 if args.quick else None]:
                counted = execute(patch, tiles, edges, channels)
                record(scene=name, executed=True, channels=channels, **counted)
                print(
                    f"{name:12} {channels:5} executed on {tiles.n} rows: as modelled; "
                    "bytes of threadgroup memory: "
                    + ", ".join(
                        f"{p} {c['threadgroup_memory']}" for p, c in counted.items()
                    ),
                    flush=True,
                )
            whole = relation(coords)
            tiles, edges = Tiles(whole), Edges(whole)
            held = int(tiles.tiles.sum()) * TILE
            problems = {"forward": (tiles, held), "weight_grad": (edges, 0)}
            for pass_, (problem, places) in problems.items():
                for c_in, c_out in MODELLED[: 2 if args.quick else None]:
                    row = model(problem, tiles.edges, places, c_in, c_out)
                    show(name, pass_, c_in, c_out, row)
                    facts = {"scene": name, "pass": pass_, "executed": False}
                    record(**facts, c_in=c_in, c_out=c_out, **row)


if __name__ == "__main__":
    main()
