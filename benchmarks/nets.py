"""Whole nets: inference and training steps, their time, launches and memory.

    python benchmarks/nets.py [--net decoder] [--rows 100000 400000] [--scenes FILE]

Two scans a batch, rows in order. Wall times are medians of whole steps, evaluated and
waited for; on a machine that others load, --cpu-time takes processor time instead.
--yardstick gives a net's useful rate over that of NumPy's float32 matmul, timed before
each step: on one thread by OPENBLAS_NUM_THREADS=1 MLX_LATTICE_THREADS=1.
Where PyTorch is installed its profiler counts the launches of an NVIDIA GPU and adds up
their times. One JSON line a step.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path

import mlx.core as mx
import mlx.nn
import mlx.optimizers
import numpy as np
import scenes
from gpu_profiles import gpu_profile
from net_kinds import NETS, result_of, rows_for
from written import write_line

import cpu
import mlx_lattice as ml
from mlx_lattice import devices

CLASSES = 7
# What docs/memory.md advises; MLX reads the variables when it first uses a GPU.
os.environ.setdefault("MLX_MAX_MB_PER_BUFFER", "10")
os.environ.setdefault("MLX_ENABLE_CACHE_THRASHING_CHECK", "0")
if devices.current().backend == devices.CPU:
    mx.set_cache_limit(2 << 30)


STEPS = (
    "anew",
    "kept",
    "kept compiled",
    "training",
    "training compiled",
    "training anew",  # each step has rows, and so relations, of its own
    "tuning",  # a training step with norms in evaluation
)

PEERS = Path(__file__).with_name("results") / "nets-peers-h200.jsonl"


def least_of_peers(net: str, rows: int, step: str) -> dict[str, float]:
    """Return the least of other libraries' figures on an H200, in half.

    ``peer_nets.py`` wrote them, for the nets and rows that there are.
    """
    lines = [json.loads(line) for line in PEERS.read_text().splitlines()]
    at = [x for x in lines if (x["net"], x["rows"], x["step"]) == (net, rows, step)]
    names = "gpu_ms", "wall_ms", "peak_gb"
    known = {name: [x[name] for x in at if name in x] for name in names}
    return {f"peer_{name}": min(found) for name, found in known.items() if found}


def batch(rows: int, file: str | None) -> np.ndarray:
    """Return (rows, 4) int32 sorted coordinates of two scans."""
    if not file:
        halves = [scenes.scan(rows // 2, seed)[:, 1:] for seed in (11, 12)]
    else:
        with np.load(file) as known:
            fitting = [known[name] for name in known if len(known[name]) >= rows]
        sites = min(fitting, key=len)[:rows].astype(np.int32)
        halves = np.array_split(sites, 2)
    parts = [np.insert(half, 0, i, axis=1) for i, half in enumerate(halves)]
    return np.concatenate(parts).astype(np.int32)


class Steps:
    """A net, a batch, and what is timed of them."""

    def __init__(
        self,
        net: str,
        coords: np.ndarray,
        dtype: mx.Dtype,
        of=ml,
        bits: int | None = None,
        activations: int | None = None,
        unpacked: bool = False,
        master_weights: bool = False,
    ):
        mx.random.seed(0)
        self.net = NETS[net]()
        self.net.set_dtype(dtype)
        coords, self.about = rows_for(net, coords)
        self.coords = mx.array(coords)
        self.feats = mx.random.normal((len(coords), 4)).astype(dtype)
        self.labels = mx.random.randint(0, CLASSES, (len(coords),))
        self.x = ml.SparseTensor(self.coords, self.feats, **self.about)
        if bits:
            given = self.net, [self.x], bits
            self.net, _ = ml.calibrate(*given, activations=activations)
        if unpacked:
            ml.nn.unpack_int4(self.net)
        more = {"master_weights": True} if master_weights else {}
        self.optimizer = of.optimizers.SGD(1e-3, momentum=0.9, **more)
        mx.eval(self.net.parameters(), self.feats, self.labels, self.coords)

    def step(self, name: str) -> Callable[[], object]:
        """Return what runs a step and returns what must be evaluated."""
        what, _, how = name.partition(" ")
        compiled = how == "compiled"
        self.net.train(what == "training")
        if "anew" in (what, how):  # a step's relations are then the only ones
            self.x = None
        elif self.x is None:
            self.x = self._tensor()
        if what == "anew":
            return self._anew
        if what == "kept":
            run = mx.compile(self._forward) if compiled else self._forward
            return lambda: run(self.feats)
        state = [self.net.state, self.optimizer.state, mx.random.state]
        self.optimizer.init(self.net.trainable_parameters())
        if how == "anew":
            return lambda: (self._train(self._loss_of, self._tensor()), state)
        step = partial(self._train, self._loss)
        if compiled:
            step = mx.compile(step, inputs=state, outputs=state)
        return lambda: (step(self.feats), state)

    def _anew(self) -> mx.array:
        return result_of(self.net(self._tensor()))

    def _tensor(self) -> ml.SparseTensor:
        return ml.SparseTensor(self.coords + 0, self.feats, **self.about)

    def _forward(self, feats: mx.array) -> mx.array:
        return result_of(self.net(self.x.replace(feats=feats)))

    def _loss(self, feats: mx.array) -> mx.array:
        return self._loss_of(self.x.replace(feats=feats))

    def _loss_of(self, x: ml.SparseTensor) -> mx.array:
        scores = result_of(self.net(x)).astype(mx.float32)
        # Of other rows than those of the scan, or no scores of classes.
        if len(scores) != len(self.labels) or scores.shape[1] < CLASSES:
            return mx.square(scores).mean()
        return mlx.nn.losses.cross_entropy(scores, self.labels).mean()

    def _train(self, loss: Callable[..., mx.array], given: object) -> mx.array:
        value, gradients = mlx.nn.value_and_grad(self.net, loss)(given)
        self.optimizer.update(self.net, gradients)
        return value


def step_ms(
    run: Callable[[], object], repeats: int, clock: Callable[[], float]
) -> tuple[float, float]:
    """Return median ms of a step, and of Python's part of it."""
    built, total = [], []
    for _ in range(repeats):
        mx.synchronize()
        begin = clock()
        result = run()
        built.append(clock() - begin)
        mx.eval(result)
        mx.synchronize()
        total.append(clock() - begin)
    return statistics.median(total) * 1e3, statistics.median(built) * 1e3


def of_numpy(
    run: Callable[[], object], repeats: int, clock: Callable[[], float]
) -> dict:
    """Return a step's useful GFLOP, and their rate over that of NumPy's matmul.

    Useful are the operations of edges, and of rows in linear layers, by a trace: on the
    CPU it has both.
    """
    with ml.trace() as trace:
        mx.eval(run())
    useful, timer = sum(r.cost.useful_flops or 0 for r in trace), cpu.Clock(clock, 1)
    ratios = []
    for _ in range(repeats):
        yardstick = 1e9 * timer.yardstick()
        ratios.append(useful / timer.seconds(lambda: mx.eval(run())) / yardstick)
    gflop, ratio = useful / 1e9, statistics.median(ratios)
    return {"useful_gflop": round(gflop, 1), "of_numpy": round(ratio, 3)}


def limited(run: Callable[[], object], size: str) -> Callable[[], object]:
    """Return a step under a limit on memory, evaluated inside it."""

    def step() -> object:
        with ml.memory_limit(size):
            result = run()
            mx.eval(result)
        return result

    return step


def unlimited(
    limit: Callable[[], object],
    run: Callable[[], object],
    repeats: int,
    clock: Callable[[], float],
) -> dict:
    """Return a limited step's time over that without one, in turns, and its peak."""
    times = [
        [step_ms(each, 1, clock)[0] for each in (limit, run)] for _ in range(repeats)
    ]
    with_limit, without = (statistics.median(of) for of in zip(*times, strict=True))
    same = mx.array_equal(limit(), run())
    return {
        "unlimited_ms": round(without, 2),
        "of_unlimited": round(with_limit / without, 3),
        "unlimited_peak_gb": round(peak_gb(run), 3),
        "same_bits": same.item(),
    }


def peak_gb(run: Callable[[], object]) -> float:
    """Return the peak memory of a step, with all that is held, in GB."""
    mx.clear_cache()
    mx.reset_peak_memory()
    mx.eval(run())
    mx.synchronize()
    return mx.get_peak_memory() / 1e9


def measure(
    steps: Steps,
    name: str,
    repeats: int,
    most: int,
    cpu_time: bool = False,
    memory: str | None = None,
    yardstick: bool = False,
) -> dict:
    """Return the figures of a step; print its ``most`` longest kernels."""
    free = steps.step(name)
    run = free if memory is None else limited(free, memory)
    for _ in range(1 if cpu_time else 3):
        mx.eval(run())
    clock = time.process_time if cpu_time else time.perf_counter
    total, built = step_ms(run, repeats, clock)
    kind = "processor_ms" if cpu_time else "wall_ms"
    row = {kind: round(total, 2), "host_ms": round(built, 2)}
    row["peak_gb"] = round(peak_gb(run), 3)
    if memory:
        row |= unlimited(run, free, repeats, clock)
    if yardstick:
        row |= of_numpy(run, repeats, clock)
    if profiled := gpu_profile(run):
        kernels, busy = profiled
        row["gpu_ms"] = round(sum(ms for _, ms in kernels.values()), 3)
        row["busy_ms"] = round(busy, 3)
        row["launches"] = sum(count for count, _ in kernels.values())
        longest = sorted(kernels.items(), key=lambda item: -item[1][1])[:most]
        for kernel, (count, ms) in longest:
            print(f"  {ms:8.3f} ms {count:5g} x  {kernel[:110]}", file=sys.stderr)
    return row


def first_use(net: str, rows: int) -> float:
    """Return seconds of the first forward in a fresh process, imports left out."""
    code = (
        "import time, nets, mlx.core as mx\n"
        f"steps = nets.Steps({net!r}, nets.batch({rows}, None), mx.float16)\n"
        "begin = time.perf_counter()\n"
        "mx.eval(steps.step('anew')())\n"
        "print(time.perf_counter() - begin)\n"
    )
    command = [sys.executable, "-c", code]
    folder = Path(__file__).parent
    done = subprocess.run(command, cwd=folder, check=True, capture_output=True)
    return float(done.stdout)


def main() -> None:
    """Measure what was asked for."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--net", choices=NETS, nargs="+", default=["minkunet34"])
    parser.add_argument("--rows", type=int, nargs="+", default=[100_000])
    parser.add_argument("--scenes", help=".npz of (N, 3) coordinates by name")
    parser.add_argument("--dtype", default="float16")
    parser.add_argument("--steps", nargs="+", choices=STEPS, default=STEPS)
    parser.add_argument(
        "--bits", type=int, choices=(4, 8), help="of weights, calibrated on the batch"
    )
    parser.add_argument("--activations", type=int, choices=(8,), help="of features")
    parser.add_argument(
        "--unpacked", action="store_true", help="int4 weights are held as int8"
    )
    parser.add_argument("--repeats", type=int, default=10)
    parser.add_argument(
        "--mlx-optimizer",
        action="store_true",
        help="train by mlx.optimizers, whose step is several launches a parameter",
    )
    parser.add_argument(
        "--master-weights", action="store_true", help="float32 copies of half weights"
    )
    parser.add_argument(
        "--cpu-time",
        action="store_true",
        help="processor time of all threads, where others load the machine",
    )
    parser.add_argument(
        "--yardstick",
        action="store_true",
        help="useful rate over NumPy's matmul, of steps anew and kept on the CPU",
    )
    parser.add_argument(
        "--memory", help="a limit, such as 4GB, beside none; not for training"
    )
    parser.add_argument("--kernels", type=int, default=0, help="print the longest")
    parser.add_argument("--first-use", action="store_true")
    parser.add_argument("--save-coordinates", type=Path, help=".npy for peer_nets.py")
    parser.add_argument("--out", type=Path, help="JSON lines are added to it")
    given = parser.parse_args()
    if given.activations and not given.bits:
        parser.error("--activations 8 needs --bits, those of the weights")
    trains = "training", "tuning"
    if given.bits and any(name.startswith(trains) for name in given.steps):
        parser.error("packed weights do not train: name other --steps")
    if given.master_weights and given.mlx_optimizer:
        parser.error("MLX's optimizer keeps no --master-weights")
    if given.save_coordinates:
        np.save(given.save_coordinates, batch(given.rows[0], given.scenes))

    def keep(row: dict) -> None:
        write_line(row, given.out)

    for net in given.net:
        facts = {"net": net, "device": devices.current().name, "dtype": given.dtype}
        optimizer = {"optimizer": "mlx"} if given.mlx_optimizer else {}
        if given.first_use:
            seconds = [round(first_use(net, 20_000), 2) for _ in range(2)]
            keep({**facts, "step": "first forward", "seconds": seconds})
        for rows in given.rows:
            dtype, of = getattr(mx, given.dtype), mlx if given.mlx_optimizer else ml
            how = given.bits, given.activations, given.unpacked, given.master_weights
            steps = Steps(net, batch(rows, given.scenes), dtype, of, *how)
            for name in given.steps:
                row = {**facts, "rows": rows, "step": name}
                row |= optimizer if name.startswith(trains) else {}
                row |= {"limit": given.memory} if given.memory else {}
                names = "bits", "activations", "unpacked", "master_weights"
                held = {name: getattr(given, name) for name in names}
                row |= {name: value for name, value in held.items() if value}
                row |= measure(
                    steps,
                    name,
                    given.repeats,
                    given.kernels,
                    given.cpu_time,
                    given.memory,
                    given.yardstick and name in ("anew", "kept"),
                )
                if (facts["device"], given.dtype) == ("h200", "float16"):
                    row |= least_of_peers(net, rows, name)
                keep(row)
            del steps  # before the next net's memory is looked at


if __name__ == "__main__":
    main()
