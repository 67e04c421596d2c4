"""A training step of a net on one process, and on several with averaged gradients.

    python benchmarks/data_parallel.py [--net minkunet18] [--rows 100000]
    mlx.launch -n 2 --backend nccl benchmarks/data_parallel.py

Every process has a scan of ``--rows`` voxels, relations kept, and by default half
precision. "alone" exchanges nothing; "averaged" calls ``nn.average_gradients``, "mlx"
MLX's own; "synced" has ``nn.SyncBatchNorm`` in place of each ``BatchNorm`` besides.
Gradients and the optimizer's update are compiled apart, or not at all. Medians of whole
steps of the slowest process, evaluated and waited for. One JSON line a kind of step.
"""

from __future__ import annotations

import argparse
import json
import statistics
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path

import mlx.core as mx
import mlx.nn
from nets import NETS, Steps, batch, gpu_kernels

from mlx_lattice import devices, nn

KINDS = ("alone", "averaged", "mlx", "synced")


def step_of(steps: Steps, kind: str, compiled: bool, group, size: int) -> Callable:
    """Return a step of a net: gradients, their averages, the update."""
    net, optimizer = steps.net, steps.optimizer
    net.train()
    optimizer.init(net.trainable_parameters())
    averages = {
        "alone": lambda gradients: gradients,
        "mlx": partial(mlx.nn.average_gradients, group=group),
    }
    average = averages.get(
        kind, partial(nn.average_gradients, group=group, all_reduce_size=size)
    )

    def gradients(feats):
        return mlx.nn.value_and_grad(net, steps._loss)(feats)

    def update(gradients):
        optimizer.update(net, gradients)

    if compiled:
        state = [net.state, optimizer.state]
        gradients = mx.compile(gradients, inputs=net.state, outputs=net.state)
        update = mx.compile(update, inputs=state, outputs=state)

    def step() -> list:
        loss, found = gradients(steps.feats)
        update(average(found))
        return [loss, net.state, optimizer.state]

    return step


def waited(step: Callable[[], list], group, repeats: int) -> tuple[float, float]:
    """Return median ms of a step, and of Python's part, of the slowest process."""
    total, built = [], []
    for _ in range(repeats):
        begin = time.perf_counter()
        result = step()
        built.append(time.perf_counter() - begin)
        mx.eval(result)
        mx.synchronize()
        total.append(time.perf_counter() - begin)
    mine = mx.array([statistics.median(total), statistics.median(built)]) * 1e3
    return tuple(mx.distributed.all_max(mine, group=group).tolist())


def main() -> None:
    """Measure what was asked for."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--net", choices=NETS, default="minkunet18")
    parser.add_argument("--rows", type=int, default=100_000, help="of each process")
    parser.add_argument("--scenes", help=".npz of (N, 3) coordinates by name")
    parser.add_argument("--dtype", default="float16")
    parser.add_argument("--kinds", nargs="+", choices=KINDS, default=KINDS)
    parser.add_argument("--compiled", nargs="+", type=int, default=(1, 0))
    parser.add_argument("--bucket-mib", type=float, nargs="+", default=[16])
    parser.add_argument("--repeats", type=int, default=20)
    parser.add_argument("--rounds", type=int, default=2, help="of all kinds in turn")
    parser.add_argument("--out", type=Path, help="JSON lines are added to it")
    given = parser.parse_args()
    group = mx.distributed.init()
    coords = batch(given.rows, given.scenes)
    facts = {
        "net": given.net,
        "device": devices.current().name,
        "dtype": given.dtype,
        "rows": given.rows,
        "processes": group.size(),
    }
    made: dict[tuple, Callable] = {}
    for kind in given.kinds:
        if group.size() == 1 and kind != "alone":
            continue
        for compiled in given.compiled:
            sizes = given.bucket_mib if kind in ("averaged", "synced") else [None]
            for mib in sizes:
                steps = Steps(given.net, coords, getattr(mx, given.dtype))
                if kind == "synced":
                    nn.convert_sync_batchnorm(steps.net, group)
                size = int((mib or 0) * 2**20)
                step = step_of(steps, kind, bool(compiled), group, size)
                for _ in range(3):
                    mx.eval(step())
                made[kind, compiled, mib] = step
    for _ in range(given.rounds):
        for (kind, compiled, mib), step in made.items():
            wall, host = waited(step, group, given.repeats)
            row = {**facts, "step": kind, "compiled": bool(compiled)}
            row |= {} if mib is None else {"bucket_mib": mib}
            row |= {"wall_ms": round(wall, 2), "host_ms": round(host, 2)}
            if kernels := gpu_kernels(step):
                row["gpu_ms"] = round(sum(ms for _, ms in kernels.values()), 3)
                row["launches"] = sum(count for count, _ in kernels.values())
                nccl = [ms for name, (_, ms) in kernels.items() if "nccl" in name]
                row["exchange_ms"] = round(sum(nccl), 3)
            if group.rank() == 0:
                line = json.dumps(row)
                print(line, flush=True)
                if given.out:
                    with given.out.open("a") as out:
                        out.write(line + "\n")


if __name__ == "__main__":
    main()
