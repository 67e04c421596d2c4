"""Host time of a layer: what Python and MLX take to build its graph, and to start it.

    python benchmarks/host_time.py [--profile] [--cuda-on-cpu h200]
    python benchmarks/host_time.py --new-scans minkunet34 [--cuda-on-cpu h200]

A chain of submanifold convolutions, uncompiled, relations kept: a forward pass, and
``nn.value_and_grad`` of it. Median microseconds a layer of the call (``graph``), and of
the call and ``mx.async_eval`` (``started``); the wait for the device is off the clock.
With ``--cuda-on-cpu`` the tests' recorder stands where MLX's CUDA kernels are: plans
are that device's, launches are recorded and return zeros, so that Python's part is seen
without a GPU; the recorder's own time is printed, to be taken off.

With ``--new-scans`` a whole net is called with scans that come anew, relations and all,
and with one whose relations are kept, and the relations are made alone: milliseconds of
the call, of its reads from the device, of call and start, and until it is done; and
Python's function calls.
"""

from __future__ import annotations

import argparse
import cProfile
import pstats
import statistics
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from pathlib import Path

import mlx.core as mx
import mlx.nn
import new_scans
import numpy as np

import mlx_lattice as ml
from mlx_lattice import devices, nn

GOAL = {"forward": 20, "with backward": 60}  # microseconds a layer


def passes(layers: int, rows: int, channels: int, dtype: mx.Dtype, **options) -> dict:
    """Return a forward pass of a chain of layers, and the pass with its gradients."""
    rng = np.random.default_rng(0)
    side = round((2 * rows) ** 0.5)  # a plane, half full
    sites = np.unique(rng.integers(0, side, (rows, 2)), axis=0)
    coords = np.zeros((len(sites), 4), np.int32)
    coords[:, 1:3] = sites
    feats = mx.random.normal((len(coords), channels)).astype(dtype)
    x = ml.SparseTensor(mx.array(coords), feats)
    convs = [nn.SubmConv3d(channels, channels, 3, **options) for _ in range(layers)]
    net = nn.Sequential(*convs)
    net.set_dtype(dtype)
    mx.eval(net.parameters(), x.feats)
    step = mlx.nn.value_and_grad(net, lambda net, x: net(x).feats.sum())
    return {"forward": lambda: net(x).feats, "with backward": lambda: step(net, x)}


def median_us(run: Callable, start: bool, seconds: float, clock: Callable) -> float:
    """Median microseconds of a call; ``start`` counts ``mx.async_eval`` too."""
    times, end = [], time.perf_counter() + seconds
    while time.perf_counter() < end or len(times) < 5:
        begin = clock()
        made = run()
        if start:
            mx.async_eval(made)
        times.append(clock() - begin)
        mx.eval(made)
        mx.synchronize()
    return 1e6 * statistics.median(times)


@contextmanager
def recorder(chip: str) -> Iterator[list]:
    """Plan for a CUDA chip and record its launches, without a GPU."""
    sys.path.append(str(Path(__file__).resolve().parent.parent / "tests"))
    from cuda_recorder import recording

    with recording(chip) as launches:
        yield launches


def recorded(run: Callable, launches: list) -> tuple[int, float]:
    """Return the launches of a call, and the microseconds that recording them takes."""
    launches.clear()
    run()
    kernel = mx.fast.cuda_kernel("a", "abcdef", "y", "", "")
    arrays, one = [mx.zeros((1,))] * 6, (1, 1, 1)
    count, begin = len(launches), time.thread_time()
    for _ in range(1000):
        kernel(arrays, [(8, 8)], [mx.float16], one, one)
    return count, 1e3 * count * (time.thread_time() - begin)


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--layers", type=int, default=32)
    parser.add_argument("--rows", type=int, default=60_000)
    parser.add_argument("--channels", type=int, default=64)
    parser.add_argument("--dtype", default="float16")
    parser.add_argument("--bias", action="store_true")
    parser.add_argument("--seconds", type=float, default=2, help="of each figure")
    parser.add_argument("--profile", action="store_true", help="by function, too")
    parser.add_argument("--cuda-on-cpu", metavar="CHIP", help="h200, h100 or a100")
    parser.add_argument(
        "--thread-time", action="store_true", help="for machines that others load"
    )
    parser.add_argument("--new-scans", metavar="NET", choices=new_scans.NETS)
    parser.add_argument("--scans", type=int, default=12, help="that are timed")
    args = parser.parse_args()
    clock = time.thread_time if args.thread_time else time.perf_counter
    if args.new_scans:
        new_scans.run(args, clock)
        return
    where = recorder(args.cuda_on_cpu) if args.cuda_on_cpu else nullcontext()
    with where as launches:
        dtype = getattr(mx, args.dtype)
        runs = passes(args.layers, args.rows, args.channels, dtype, bias=args.bias)
        name = args.cuda_on_cpu or devices.current().name
        print(
            f"{name}: {args.layers} layers {args.channels} -> {args.channels}, "
            f"{args.dtype}, us a layer"
        )
        print(f"{'':14}{'graph':>8}{'started':>9}{'goal':>6}")
        for key, run in runs.items():
            mx.eval(run(), run())
            each = [
                median_us(run, s, args.seconds, clock) / args.layers for s in (0, 1)
            ]
            print(f"{key:14}{each[0]:8.1f}{each[1]:9.1f}{GOAL[key]:6}", end="")
            if launches is not None:
                count, us = (n / args.layers for n in recorded(run, launches))
                print(f"   {count:.1f} launches, {us:.1f} of it their record", end="")
            print()
        for key, run in runs.items() if args.profile else ():
            profile = cProfile.Profile()
            for _ in range(20):
                profile.enable()
                made = run()
                profile.disable()
                mx.eval(made)
            print(f"\n{key}: {20 * args.layers} layers")
            pstats.Stats(profile).sort_stats("tottime").print_stats(30)


if __name__ == "__main__":
    main()
