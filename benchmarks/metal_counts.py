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
        """Bytes that miss the cache, for features and weights together."""
        wide = VOLUME * c_in * c_out * ITEM > metal_matrix.CACHED_WEIGHTS
        passes = -(-c_out // 64) if wide else 1
        slab, wide_row = c_in * (c_out // passes) * ITEM, c_in * ITEM
        cache, held, missed = OrderedDict(), 0, 0

        def touch(key, size):
            nonlocal held, missed
            if key in cache:
                cache.move_to_end(key)
                return
            missed += size
            if size > CACHE:
                return
            cache[key] = size
            held += size
            while held > CACHE:
                held -= cache.popitem(last=False)[1]

        for t, used in enumerate(self.tiles):
            tile = self.table[t * TILE : (t + 1) * TILE]
            # What streams through takes room too: the table's lines and the output's.
            touch(("table", t), tile.size * 4)
            for k in np.flatnonzero(used).tolist():
                touch(("w", k), slab)
                column = tile[:, k]
                for row in column[column >= 0].tolist():
                    if wide_row >= LINE:
                        touch(row, wide_row)
                    else:
                        touch(row * wide_row // LINE, LINE)
            touch(("y", t), len(tile) * (c_out // passes) * ITEM)
        # The last three are of a whole pass already: the output is written once.
        return missed * passes

    def bytes(self, c_in, c_out):
        """(compulsory, through the cache, explicit GEMM's) bytes of a forward pass."""
        n, item = self.n, ITEM
        weights = VOLUME * c_in * c_out * item
        compulsory = n * (c_in + c_out) * item + weights + self.table.size * 4
        explicit = compulsory + 2 * self.edges * (c_in + c_out) * item
        # The place of each row and the masks come on top.
        moved = self.from_memory(c_in, c_out) + 4 * n + 4 * len(self.blocks)
        return compulsory, moved, explicit


def execute(relation, tiles, channels):
    """Run a forward pass on the host, and hold the model against its counts."""
    x = mx.ones((relation.n_in, channels), dtype=mx.float16)
    w = mx.ones((VOLUME, channels, channels), dtype=mx.float16)
    conv = metal_matrix.CONV["sorted_implicit_gemm"]
    filling, metal_matrix.FILLING = metal_matrix.FILLING, 1
    _, report = host.run(conv, x, w, relation, 1, False)
    metal_matrix.FILLING = filling
    report.raise_faults()
    launch = next(r for r in report.launches if "sorted_implicit" in r.kernel).counts
    model = tiles.counts(channels, channels)
    counted = {"matrix_flop": launch.matrix_flop}
    counted |= {b: launch.buffers[b].read_bytes for b in ("x", "w", "table")}
    if counted != model:
        raise SystemExit(f"the model gives {model}, the kernel did {counted}")
    moved = launch.device_read_bytes + launch.device_written_bytes
    return {"device_bytes": moved, "threadgroup_memory": launch.threadgroup_memory}


def model(tiles, c_in, c_out):
    """Count a forward pass over a whole scene."""
    useful = 2 * tiles.edges * c_in * c_out
    compulsory, moved, explicit = tiles.bytes(c_in, c_out)
    done = tiles.counts(c_in, c_out)["matrix_flop"]
    held = int(tiles.tiles.sum()) * TILE * 2 * c_in * c_out
    asked = sum(tiles.counts(c_in, c_out)[b] for b in ("x", "w", "table"))
    row = {
        "rows": tiles.n,
        "edges": tiles.edges,
        "done_over_useful": done / useful,
        "held_over_useful": held / useful,
        "compulsory_bytes": compulsory,
        "asked_over_compulsory": (asked + tiles.n * c_out * ITEM) / compulsory,
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


def show(name, c_in, c_out, row):
    """Print one line of the table."""
    times = "  ".join(
        f"{row[d]['ms']:8.2f} ({row[d]['roofline_ms']:.2f})" for d in DEVICES
    )
    print(
        f"{name:13} {c_in:5} {c_out:5}  {row['done_over_useful']:5.2f} "
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
        "submanifold 3x3x3, float16, forward, sorted_implicit_gemm\n"
        "ops: done, and held by tiles of 64, over useful; bytes over compulsory: asked "
        "for, through 8 MB, explicit GEMM\n"
        "ms: at peak rates, roofline in brackets: " + ", ".join(DEVICES)
    )
    with RESULTS.open("a") as results:

        def record(**row):
            results.write(json.dumps(row) + "\n")

        for name, coords in scenes(args.scene, args.rows):
            patch = relation(coords[: args.patch])
            tiles = Tiles(patch)
            for channels in EXECUTED[: 2 if args.quick else None]:
                counted = execute(patch, tiles, channels)
                record(scene=name, executed=True, channels=channels, **counted)
                print(
                    f"{name:13} {channels:5} executed on {tiles.n} rows: as modelled, "
                    f"{counted['threadgroup_memory']} bytes of threadgroup memory",
                    flush=True,
                )
            whole = Tiles(relation(coords))
            for c_in, c_out in MODELLED[: 2 if args.quick else None]:
                row = model(whole, c_in, c_out)
                show(name, c_in, c_out, row)
                record(scene=name, executed=False, c_in=c_in, c_out=c_out, **row)


if __name__ == "__main__":
    main()
