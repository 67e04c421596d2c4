"""A training step of a net on one process, and on several with averaged gradients.

    python benchmarks/data_parallel.py [--net minkunet18] [--rows 100000]
    mlx.launch -n 2 --backend nccl benchmarks/data_parallel.py

Every process has a scan of ``--rows`` voxels, relations kept, and by default half
precision. "alone" exchanges nothing; "averaged" calls ``nn.average_gradients``,
"beside" the same with a stream of the GPU for exchanges, "mlx" MLX's own; "synced" has
``nn.SyncBatchNorm`` in place of each ``BatchNorm`` besides. Kinds of steps take turns,
step by step, so that all see the same machine. Medians of the slowest process,
evaluated and waited for. One JSON line a kind of step.
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Callable
from functools import partial
from itertools import product
from pathlib import Path

import mlx.core as mx
import mlx.nn
from gpu_profiles import gpu_kernels
from nets import NETS, Steps, batch
from written import write_line

from mlx_lattice import devices, nn

KINDS = ("alone", "averaged", "beside", "mlx", "synced")
# How a step is compiled: not, gradients and update apart, or all of it.
APART, WHOLE = 1, 2


def step_of(steps: Steps, kind: str, compiled: int, group, size: int) -> Callable:
    """Return a step of a net: gradients, their averages, the update."""
    net, optimizer = steps.net, steps.optimizer
    net.train()
    optimizer.init(net.trainable_parameters())
    ours = partial(nn.average_gradients, group=group, all_reduce_size=size)
    stream = mx.new_stream(mx.default_device()) if kind == "beside" else None
    average = {
        "alone": lambda gradients: gradients,
        "averaged": ours,
        "beside": partial(ours, communication_stream=stream),
        "mlx": partial(mlx.nn.average_gradients, group=group),
        "synced": ours,
    }[kind]

    def gradients(feats):
        return mlx.nn.value_and_grad(net, steps._loss)(feats)

    def update(gradients):
        optimizer.update(net, gradients)

    def whole(feats):
        loss, found = gradients(feats)
        update(average(found))
        return loss

    state = [net.state, optimizer.state]
    if compiled == WHOLE:
        whole = mx.compile(whole, inputs=state, outputs=state)
    elif compiled == APART:
        gradients = mx.compile(gradients, inputs=net.state, outputs=net.state)
        update = mx.compile(update, inputs=state, outputs=state)

    def step() -> list:
        return [whole(steps.feats), net.state, optimizer.state]

    return step


def one(step: Callable[[], list]) -> tuple[float, float]:
    """Return seconds of a step, and of Python's part."""
    begin = time.perf_counter()
    result = step()
    built = time.perf_counter() - begin
    mx.eval(result)
    mx.synchronize()
    return time.perf_counter() - begin, built


def of_slowest(values: list[float], group) -> list[float]:
    """Return the largest of each over all processes."""
    return mx.distributed.all_max(mx.array(values), group=group).tolist()


def on_gpu(step: Callable[[], list]) -> dict[str, float]:
    """Return what a profiler sees of a step, where there is one."""
    kernels = gpu_kernels(step)
    if not kernels:
        return {}
    nccl = [ms for name, (_, ms) in kernels.items() if "nccl" in name.lower()]
    return {
        "gpu_ms": round(sum(ms for _, ms in kernels.values()), 3),
        "launches": sum(count for count, _ in kernels.values()),
        "exchange_ms": round(sum(nccl), 3),
    }


def made_steps(given: argparse.Namespace, group) -> dict[tuple, Callable]:
    """Return steps by kind, compilation and size of buckets, after three of each."""
    coords = batch(given.rows, given.scenes)
    made: dict[tuple, Callable] = {}
    for kind, compiled in product(given.kinds, given.compiled):
        if group.size() == 1 and kind != "alone":
            continue
        sizes = given.bucket_mib if kind in ("averaged", "synced") else [16]
        for mib in sizes:
            steps = Steps(given.net, coords, getattr(mx, given.dtype))
            if kind == "synced":
                nn.convert_sync_batchnorm(steps.net, group)
            step = step_of(steps, kind, compiled, group, int(mib * 2**20))
            for _ in range(3):
                mx.eval(step())
            made[kind, compiled, mib] = step
    return made


def main() -> None:
    """Measure what was asked for."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--net", choices=NETS, default="minkunet18")
    parser.add_argument("--rows", type=int, default=100_000, help="of each process")
    parser.add_argument("--scenes", help=".npz of (N, 3) coordinates by name")
    parser.add_argument("--dtype", default="float16")
    default = [kind for kind in KINDS if kind != "beside"]
    parser.add_argument("--kinds", nargs="+", choices=KINDS, default=default)
    parser.add_argument(
        "--compiled",
        nargs="+",
        type=int,
        choices=(WHOLE, APART, 0),
        default=(WHOLE, APART, 0),
        help="2: the whole step, 1: gradients and update apart, 0: nothing",
    )
    parser.add_argument("--bucket-mib", type=float, nargs="+", default=[16])
    parser.add_argument("--repeats", type=int, default=40)
    parser.add_argument("--label", help="put into each line")
    parser.add_argument("--out", type=Path, help="JSON lines are added to it")
    given = parser.parse_args()
    group = mx.distributed.init()
    facts = {
        "net": given.net,
        "device": devices.current().name,
        "dtype": given.dtype,
        "rows": given.rows,
        "processes": group.size(),
    }
    facts |= {"label": given.label} if given.label else {}
    made = made_steps(given, group)
    seconds = {key: [] for key in made}
    for _ in range(given.repeats):
        for key, step in made.items():
            of_slowest([0.0], group)  # so that all begin at once
            seconds[key].append(one(step))
    alone: dict[int, float] = {}
    for (kind, compiled, mib), step in made.items():
        columns = zip(*seconds[kind, compiled, mib], strict=True)
        medians = map(statistics.median, columns)
        wall, host = of_slowest([1e3 * s for s in medians], group)
        alone |= {compiled: wall} if kind == "alone" else {}
        row = {**facts, "step": kind, "compiled": compiled, "bucket_mib": mib}
        row |= {"wall_ms": round(wall, 2), "python_ms": round(host, 2)}
        if compiled in alone:
            row["of_alone"] = round(alone[compiled] / wall, 3)
        row |= on_gpu(step)
        if group.rank() == 0:
            write_line(row, given.out)


if __name__ == "__main__":
    main()
