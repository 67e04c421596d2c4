"""Times of the native CPU kernels beside NumPy's matmul, measured in one process.

The yardstick is NumPy's float32 matmul of 2048 x 2048 on the same threads. It is timed
before and after every case, because shared machines drift; a case's ratio is its best
useful rate over the best of the two. Useful operations are 2 x edges x C_in x C_out.

    python benchmarks/cpu_kernels.py [--rows 50000] [--channels 32 64 128] [--quick]

On a machine that others load, wall time measures them: there, run one thread with
OPENBLAS_NUM_THREADS=1 MLX_LATTICE_THREADS=1 and --cpu-time.
"""

import argparse
import itertools
import os
import time

import mlx.core as mx
import numpy as np

from mlx_lattice import _cpu as cpu

clock = time.perf_counter
OFFSETS = list(itertools.product((-1, 0, 1), repeat=3))


def terrain(rows):
    """About `rows` voxels of an undulating sheet, sorted; 10 edges a row at 3x3x3."""
    side = int(np.sqrt(rows))
    x, y = np.meshgrid(np.arange(side), np.arange(side), indexing="ij")
    wave = 2 * np.pi / side
    height = side * (0.06 * np.sin(3 * wave * x + 1) * np.cos(2 * wave * y))
    height += side * 0.03 * np.sin(5 * wave * (x + y))
    z = np.round(height).astype(np.int64)
    coords = np.stack([np.zeros_like(x), x, y, z], -1).reshape(-1, 4)
    return coords.astype(np.int32)


class Yardstick:
    """NumPy's matmul rate in GFLOP/s."""

    def __init__(self, size=2048, rounds=3):
        self.a = np.random.default_rng(0).random((size, size), np.float32)
        self.rounds = rounds

    def __call__(self):
        """The best of a few rounds, then a pause: BLAS threads spin for a while."""
        seconds = min(best(lambda: self.a @ self.a, 1) for _ in range(self.rounds))
        time.sleep(0.15)
        return 2 * len(self.a) ** 3 / seconds / 1e9


def best(call, rounds):
    """Seconds of the fastest of some rounds."""
    times = []
    for _ in range(rounds):
        start = clock()
        call()
        times.append(clock() - start)
    return min(times)


def report(yardstick, case, call, flop, rounds):
    """Time one case between two looks at the yardstick and print its row."""
    call()
    before = yardstick()
    seconds = best(call, rounds)
    ruler = max(before, yardstick())
    rate = flop / seconds / 1e9
    print(
        f"{case:44s} {seconds * 1e3:9.2f} {rate:9.1f} {rate / ruler:7.2f}", flush=True
    )
    return seconds, ruler


def contractions(rows, channels, dtypes, rounds):
    """Forward, both gradients, a matmul and packed weights over one terrain."""
    coords = mx.array(terrain(rows))
    n = coords.shape[0]
    table = cpu.neighbour_table(coords, coords, OFFSETS, (1, 1, 1))
    back = cpu.transpose_table(table, n)
    edges, counts = cpu.edges(table)
    n_edges = edges.shape[0]
    print(f"\n{n} rows, {n_edges} edges ({n_edges / n:.1f} a row)")
    print(f"{'case':44s} {'ms':>9s} {'GFLOP/s':>9s} {'ratio':>7s}")
    yardstick = Yardstick()
    for dtype, c in itertools.product(dtypes, channels):
        x = mx.random.normal((n, c)).astype(dtype)
        dy = mx.random.normal((n, c)).astype(dtype)
        w = (mx.random.normal((27, c, c)) / c).astype(dtype)
        one = w[13]
        mx.eval(x, dy, w, one, back)
        label = f"{str(dtype).removeprefix('mlx.core.')} {c} -> {c}"
        flop = 2 * n_edges * c * c

        def conv(x=x, w=w):
            mx.eval(cpu.conv(x, w, table))

        def conv_edges(x=x, w=w):
            mx.eval(cpu.conv_edges(x, w, edges, n))

        def input_grad(dy=dy, w=w):
            mx.eval(cpu.conv(dy, w, back, transpose_weight=True))

        def weight_grad(x=x, dy=dy):
            mx.eval(cpu.weight_grad_edges(x, dy, edges, 27))

        def training(all_three=(conv, input_grad, weight_grad)):
            for step in all_three:
                step()

        def pointwise(x=x, one=one):
            mx.eval(cpu.matmul(x, one))

        report(yardstick, f"forward, table     {label}", conv, flop, rounds)
        report(yardstick, f"forward, edges     {label}", conv_edges, flop, rounds)
        report(yardstick, f"weight gradient    {label}", weight_grad, flop, rounds)
        report(yardstick, f"forward + backward {label}", training, 3 * flop, rounds)
        report(
            yardstick, f"matmul             {label}", pointwise, 2 * n * c * c, rounds
        )
        for bits in (8, 4) if c % 32 == 0 else ():
            packed = mx.quantize(w.transpose(0, 2, 1), 32, bits)
            mx.eval(packed)

            def quantized(x=x, packed=packed, bits=bits):
                y = cpu.conv_quantized(x, *packed, table, bits=bits, group_size=32)
                mx.eval(y)

            report(
                yardstick, f"forward, int{bits}      {label}", quantized, flop, rounds
            )


def geometry(rows, rounds):
    """Coordinate sets and tables: milliseconds and nanoseconds a row."""
    coords = mx.array(terrain(rows))
    n = coords.shape[0]
    table = cpu.neighbour_table(coords, coords, OFFSETS, (1, 1, 1))
    mx.eval(table)
    down = list(itertools.product((0, 1), repeat=3))
    cases = {
        "neighbour table K=27": lambda: cpu.neighbour_table(
            coords, coords, OFFSETS, (1, 1, 1)
        ),
        "transposed table": lambda: cpu.transpose_table(table, n),
        "mask order": lambda: cpu.mask_sort(table),
        "edges": lambda: cpu.edges(table),
        "sorted unique": lambda: cpu.sort_unique(coords),
        "cells of stride 2": lambda: cpu.cells(coords, (2, 2, 2)),
        "reach of 3x3x3, stride 2": lambda: cpu.reach(coords, OFFSETS, (2, 2, 2)),
        "expand by 2x2x2, stride 2": lambda: cpu.expand(coords, down, (2, 2, 2)),
        "first duplicate": lambda: cpu.first_duplicate(coords),
    }
    print(f"\n{n} rows\n{'case':44s} {'ms':>9s} {'ns a row':>9s}")
    for case, call in cases.items():
        seconds = best(lambda call=call: mx.eval(call()), rounds)
        print(f"{case:44s} {seconds * 1e3:9.2f} {seconds / n * 1e9:9.1f}", flush=True)


def main():
    """Print the tables."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rows", type=int, default=50_000)
    parser.add_argument("--geometry-rows", type=int, default=1_000_000)
    parser.add_argument("--channels", type=int, nargs="+", default=[16, 32, 64, 128])
    parser.add_argument("--rounds", type=int, default=15)
    parser.add_argument(
        "--quick", action="store_true", help="float32 alone, few rounds"
    )
    parser.add_argument("--cpu-time", action="store_true", help="not wall time")
    arguments = parser.parse_args()
    if arguments.cpu_time:
        global clock
        clock = time.process_time
    mx.set_default_device(mx.cpu)
    threads = os.environ.get("OPENBLAS_NUM_THREADS", "default")
    print(f"{cpu.isa()}, {cpu.num_threads()} threads (NumPy: {threads})")
    dtypes = [mx.float32] if arguments.quick else [mx.float32, mx.float16, mx.bfloat16]
    rounds = 5 if arguments.quick else arguments.rounds
    contractions(arguments.rows, arguments.channels, dtypes, rounds)
    geometry(arguments.geometry_rows, rounds)


if __name__ == "__main__":
    main()
