"""Submanifold 3x3x3 convolution on an NVIDIA GPU, beside rooflines and peers.

    python benchmarks/gpu.py SCENES.npz [--out benchmarks/results/gpu-h200.jsonl]

SCENES.npz holds int coordinates (N, 3) by name. One JSON line per case. Times of passes
are those of a call in a chain of dependent calls, in which launches overlap the GPU's
work; relations are built from new coordinates, until their arrays are evaluated.
"""

from __future__ import annotations

import argparse
import math
import statistics
import time
from collections.abc import Iterator
from pathlib import Path

import mlx.core as mx
import numpy as np
from packed_layers import chained, integer_rows, packed_rows, plan_of
from written import write_line

import mlx_lattice as ml
from mlx_lattice import devices, sync
from mlx_lattice.problem import FORWARD, INPUT_GRAD, WEIGHT_GRAD

CHANNELS = (32, 64, 128, 256)
DENSE_GOAL = 0.65  # of the dense half rate, at 256 channels
FEW_EDGES = 4  # a row, below which tiles share little

# The best of FlexGEMM, spconv 2.3.8, spconv-triton 1.0 and WarpConvNet 1.8.2, each
# tuned, on an H200 in half: ms by scene and channels.
PEERS = {
    "forward": {
        "W1": (0.037, 0.075, 0.191, 0.633),
        "W2": (0.170, 0.330, 0.892, 3.077),
        "W3": (0.339, 0.638, 1.746, 6.10),
        "W4": (0.034, 0.042, 0.093, 0.220),
    },
    "training": {
        "W1": (0.137, 0.244, 0.561, 2.04),
        "W2": (0.579, 1.035, 2.603, 9.41),
        "W3": (1.173, 2.138, 5.126, 18.84),
        "W4": (0.108, 0.160, 0.320, 0.728),
    },
}
PEER_RELATION = {  # ms, cold, map only: for inference, for training
    "W1": (0.12, 0.17),
    "W2": (0.28, 0.38),
    "W3": (0.49, 0.63),
    "W4": (0.17, 0.25),
}
PEER_MEMORY = {"W3": (233, 336)}  # MiB at C = 64: forward, forward + backward


def ceilings() -> tuple[float, float]:
    """Measured half matmul FLOP/s and copy bytes/s."""
    a = mx.random.normal((8192, 8192)).astype(mx.float16)
    b = (mx.random.normal((8192, 8192)) / 90).astype(mx.float16)
    ms = chained(lambda x: (x @ b, []), a)
    c = mx.random.normal((1 << 28,))
    copy = chained(lambda x: (x + 1, []), c)
    return 2 * 8192**3 / ms * 1e3, 2 * c.nbytes / copy * 1e3


def relation_of(coords: mx.array) -> ml.Relation:
    """The submanifold relation of new coordinates."""
    manager = ml.CoordinateManager()
    return manager.submanifold_kernel_relation(manager.insert(coords))


def relation_times(rows: np.ndarray, repeats: int = 20) -> tuple[float, ...]:
    """Median ms of first builds: of the table, of inference's views, of training's.

    Each starts from new coordinates on the device, with a new manager, and ends when
    ``mx.eval`` has waited for the views: the hash, the check of the rows, which reads
    from the device, the table; for inference the tiles of the sorted rows too; for
    training also the edges by offset (the transposed table of a symmetric kernel is the
    table). GPU kernels are compiled before.
    """
    plan = plan_of(FORWARD, relation_of(mx.array(rows)), 64, mx.float16)

    def table(relation):
        mx.eval(relation.out_in)

    def inference(relation):
        mx.eval(*plan.read(relation))

    def training(relation):
        # Listing the edges also writes where those of each offset start.
        mx.eval(relation.edges, *plan.read(relation))

    def builds(views) -> float:
        # Made on the device beforehand, they leave the CPU's caches as they are.
        coords = [mx.array(rows) + 0 for _ in range(repeats + 3)]
        mx.eval(coords)
        times = []
        for each in coords:
            mx.synchronize()
            begin = time.perf_counter()
            relation = relation_of(each)
            views(relation)
            times.append((time.perf_counter() - begin) * 1e3)
            del relation
        return statistics.median(times[3:])

    return tuple(builds(views) for views in (table, inference, training))


def evaluation_ms(repeats: int = 30) -> float:
    """Median ms in which MLX evaluates three trivial kernels and reads a number.

    A relation's table and tiles take as many kernels; the rest of their time is work.
    """
    times = []
    for value in range(repeats):
        x = mx.full((2,), value)
        mx.eval(x)
        mx.synchronize()
        begin = time.perf_counter()
        sync.read(-(mx.abs(x) + 1))
        times.append((time.perf_counter() - begin) * 1e3)
    return statistics.median(times)


def relation_floors(rows: int, edges: int, bandwidth: float) -> list[float]:
    """Ms in which the compulsory bytes of each of ``relation_times`` are copied.

    Rows in, the table out; the table in and the tiles out; the table in and edges out.
    """
    table = 4 * 27 * rows
    moved = 16 * rows + table
    tiled = moved + 2 * table + 4 * rows
    return [v / bandwidth * 1e3 for v in (moved, tiled, tiled + table + 12 * edges)]


def peak_mib(run) -> float:
    """Peak memory of a call above what was held before, MiB."""
    mx.clear_cache()
    mx.reset_peak_memory()
    held = mx.get_active_memory()
    mx.eval(run())
    mx.synchronize()
    return (mx.get_peak_memory() - held) / 2**20


def layer_us(calls: int = 100) -> list[dict]:
    """Microseconds of Python's time and in total of a layer over few rows.

    A chain of submanifold layers of 64 channels in half: Python builds its graph, then
    MLX evaluates it. Launches are most of the time.
    """
    sites = np.argwhere(np.ones((10, 10, 10))).astype(np.int32)
    coords = np.concatenate([np.zeros((len(sites), 1), np.int32), sites], axis=1)
    start = mx.random.normal((len(coords), 64)).astype(mx.float16)
    at = ml.SparseTensor(mx.array(coords), start)
    layer = ml.nn.SubmConv3d(64, 64, 3)
    layer.set_dtype(mx.float16)

    def forward(feats):
        x = at.replace(feats=feats)
        for _ in range(calls):
            x = layer(x)
        return x.feats

    def loss(feats, weight):
        layer.weight = weight
        return forward(feats).astype(mx.float32).sum()

    gradient = mx.value_and_grad(loss, argnums=(0, 1))
    weight = layer.weight
    rows = []
    for what, step, arguments in (
        ("forward", forward, (start,)),
        ("training", gradient, (start, weight)),
    ):
        for compiled in (False, True):
            run = mx.compile(step) if compiled else step
            mx.eval(run(*arguments))
            built, total = [], []
            for _ in range(9):
                mx.synchronize()
                begin = time.perf_counter()
                result = run(*arguments)
                built.append(time.perf_counter() - begin)
                mx.eval(result)
                mx.synchronize()
                total.append(time.perf_counter() - begin)
            layer.weight = weight
            rows.append(
                {
                    "case": "launch",
                    "pass": what,
                    "compiled": compiled,
                    "host_us": round(statistics.median(built) / calls * 1e6, 1),
                    "total_us": round(statistics.median(total) / calls * 1e6, 1),
                }
            )
    return rows


def case(name, relation, channels, rates, dtype=mx.float16) -> list[dict]:
    """Forward and forward + backward of one scene and width."""
    flops, bandwidth = rates
    n, edges = relation.n_out, relation.n_edges
    x = mx.random.normal((n, channels)).astype(dtype)
    w = mx.random.normal((27, channels, channels)) / math.sqrt(17 * channels)
    w = w.astype(dtype)
    mx.eval(x, w)
    conv, input_grad, weight_grad = (
        plan_of(pass_, relation, channels, dtype)
        for pass_ in (FORWARD, INPUT_GRAD, WEIGHT_GRAD)
    )

    def forward(x):
        return conv(relation, x, w), []

    def training(x):
        y = conv(relation, x, w)
        dx = input_grad(relation.T, y, w)
        return dx, [weight_grad(relation, x, y)]

    work = 2 * edges * channels**2
    moved = 2 * x.nbytes + w.nbytes + 4 * edges
    times = work / flops * 1e3, moved / bandwidth * 1e3
    facts = {
        "scene": name,
        "rows": n,
        "edges": edges,
        "channels": channels,
        "dtype": str(dtype).rsplit(".", 1)[-1],
    }
    rows = []
    plans = {"forward": str(conv)}
    plans["training"] = f"{conv}; {input_grad}; {weight_grad}"
    for what, step, passes in (("forward", forward, 1), ("training", training, 3)):
        ms = chained(step, x)
        floor = passes * max(times)
        row = {
            "case": what,
            **facts,
            "plan": plans[what],
            "ms": round(ms, 4),
            "useful_tflops": round(passes * work / ms / 1e9, 1),
            "share_of_dense": round(passes * times[0] / ms, 3),
            "floor_ms": round(floor, 4),
            "bound": "operations" if times[0] > times[1] else "bytes",
            "share_of_floor": round(floor / ms, 3),
            "peak_mib": round(peak_mib(lambda step=step: step(x)), 1),
        }
        if dtype == mx.float16 and name in PEERS[what]:
            row["peer_ms"] = PEERS[what][name][CHANNELS.index(channels)]
            row["times_faster"] = round(row["peer_ms"] / ms, 2)
            if channels == 64 and name in PEER_MEMORY:
                row["peer_mib"] = PEER_MEMORY[name][what == "training"]
        rows.append(row)
    if dtype == mx.float16:
        rows += packed_rows(facts, relation, x, w, rows[0]["ms"], rates)
        rows += integer_rows(facts, relation, w, rows[0]["ms"], rates)
    return rows


def short_of(row: dict) -> list[str]:
    """Say which goals a row misses."""
    short = []
    if row.get("times_faster", 1) < 1:
        short.append("slower than the best peer")
    if row.get("peak_mib", 0) > row.get("peer_mib", math.inf):
        short.append("more memory than the best peer")
    half = row.get("dtype") == "float16" and row.get("channels") == 256
    if half and row.get("share_of_dense", 1) < DENSE_GOAL:
        per_row = row["edges"] / row["rows"]
        reason = (
            f"below {DENSE_GOAL:.0%} of the dense rate: {per_row:.1f} edges a row let "
            "tiles share little: their bytes take as long as their products, and they "
            "multiply a fifth more than is useful"
            if per_row < FEW_EDGES
            else f"below {DENSE_GOAL:.0%} of the dense rate: bound by the L2 cache"
        )
        short.append(reason)
    if row["case"] == "relation":
        # Of training, the peer's map serves both passes; so does the table.
        ours = row["table_ms"], row["inference_ms"], row["training_ms"]
        peer = row["peer_ms"]
        if ours[0] > peer[0] or ours[1] > peer[0] or ours[2] > peer[1]:
            short.append(
                f"{ours[1] / peer[0]:.1f} times the best peer's for inference, "
                f"{ours[2] / peer[1]:.1f} for training; MLX evaluates three trivial "
                f"kernels and reads a number in {row['mlx_ms']} ms"
            )
    return short


def results(scenes, names) -> Iterator[dict]:
    """Measure, and yield one row per case."""
    rates = ceilings()
    yield {
        "case": "ceilings",
        "device": devices.current().name,
        "half_tflops": round(rates[0] / 1e12, 1),
        "copy_tb_s": round(rates[1] / 1e12, 3),
        "mlx": mx.__version__,
    }
    yield from layer_us()
    for name in names:
        sites = scenes[name].astype(np.int32)
        coords = np.concatenate([np.zeros((len(sites), 1), np.int32), sites], axis=1)
        times = relation_times(coords)
        relation = relation_of(mx.array(coords) + 0)
        floors = relation_floors(len(coords), relation.n_edges, rates[1])
        row = {"case": "relation", "scene": name}
        for i, what in enumerate(("table", "inference", "training")):
            row[f"{what}_ms"] = round(times[i], 3)
            row[f"{what}_floor_ms"] = round(floors[i], 4)
        row["mlx_ms"] = round(evaluation_ms(), 3)
        if name in PEER_RELATION:
            row["peer_ms"] = PEER_RELATION[name]
        yield row
        for dtype in (mx.float16, mx.bfloat16, mx.float32):
            for channels in CHANNELS if dtype == mx.float16 else (64,):
                yield from case(name, relation, channels, rates, dtype)


def summary(rows: list[dict]) -> Iterator[dict]:
    """Yield how much faster than the best peer each pass is, over all cases."""
    for what in PEERS:
        own = [r["times_faster"] for r in rows if r["case"] == what and "peer_ms" in r]
        if own:
            mean = round(statistics.geometric_mean(own), 2)
            yield {"case": "summary", "pass": what, "mean": mean, "least": min(own)}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("scenes")
    parser.add_argument("--out", type=Path)
    parser.add_argument("--only", nargs="*", default=["W1", "W2", "W3", "W4"])
    options = parser.parse_args()
    rows = []
    if options.out:
        options.out.parent.mkdir(parents=True, exist_ok=True)
        options.out.write_text("")

    def keep(row: dict) -> None:
        if short := short_of(row):
            row["short"] = "; ".join(short)
        rows.append(row)
        write_line(row, options.out)

    for row in results(np.load(options.scenes), options.only):
        keep(row)
    for row in list(summary(rows)):
        keep(row)


if __name__ == "__main__":
    main()
