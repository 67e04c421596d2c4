"""Peak memory of forward passes: predicted, measured, and their ratio.

    python benchmarks/peaks.py [--net minkunet14 ptv3] [--rows 20000] [--scenes FILE]

On the device that MLX uses, an NVIDIA GPU too. Passes run several times, after some
that fill MLX's cache, and the median peak is the measured one: what is held depends on
how far the host runs ahead. ``fresh`` are those that find the cache empty, beside what
is predicted then. On a GPU measured peaks lie between the least that is predicted and
the most; ``slow`` is the peak where another kernel holds most of an NVIDIA GPU's
multiprocessors, so that the host is ahead. ``pass`` compares the bytes beyond those
that are there before. The form "training" is a forward pass with gradients, in half.
The last lines have the worst and the median ratio.
"""

from __future__ import annotations

import argparse
import json
import statistics
from collections.abc import Callable
from pathlib import Path
from time import perf_counter

import mlx.core as mx
import mlx.nn
import nets
from net_kinds import result_of
from written import add_line

import mlx_lattice as ml
from mlx_lattice import devices

FORMS = ("float32", "float16", "8 bits", "4 bits", "training")
# Cycles of a GPU; multiprocessors that are left; of the others, threads and bytes.
HOLD, LEFT, THREADS, SHARED = 400_000_000, 8, 1024, 200 << 10


def passes(net: str, rows: int, form: str, scenes: str | None) -> tuple:
    """Return what a pass calls, what with, and what must be evaluated of its result."""
    dtype = getattr(mx, form) if form.startswith("float") else mx.float16
    steps = nets.Steps(net, nets.batch(rows, scenes), dtype)
    if form == "training":
        steps.net.train()
        gradients = mlx.nn.value_and_grad(steps.net, steps._loss)
        return gradients, steps.feats, lambda result: result
    if "bits" in form:
        mlx.nn.quantize(steps.net, group_size=32, bits=int(form[0]))
        mx.eval(steps.net.parameters())
    steps.net.eval()
    return steps.net, steps.x, result_of


def occupied() -> mx.array:
    """Return what keeps an NVIDIA GPU busy for a while, in a stream of its own."""
    source = "long long b = clock64(); while (clock64() - b < t[0]) {} y[0] = 1;"
    kernel = mx.fast.cuda_kernel("hold", ["t"], ["y"], source, shared_memory=SHARED)
    blocks = devices.current().cores - LEFT
    return kernel(
        inputs=[mx.array([HOLD], mx.int64)],
        grid=(blocks * THREADS, 1, 1),
        threadgroup=(THREADS, 1, 1),
        output_shapes=[(1,)],
        output_dtypes=[mx.float32],
        stream=mx.new_stream(mx.gpu),
    )[0]


def peak_of(run: Callable[[], object], slow: bool = False, fresh: bool = False) -> int:
    """Return the peak of a pass, perhaps beside another kernel, or a fresh one."""
    mx.synchronize()
    if fresh:
        mx.clear_cache()
    mx.reset_peak_memory()
    beside = [occupied()] if slow else []
    mx.async_eval(beside)
    mx.eval(run())
    peak = mx.get_peak_memory()
    mx.eval(beside)
    return peak


def compare(net: str, rows: int, form: str, scenes: str | None, repeats: int) -> dict:
    """Print a line of a pass and return its figures, in bytes."""
    call, given, arrays = passes(net, rows, form, scenes)

    def run() -> object:
        return arrays(call(given))

    begin = perf_counter()
    first = ml.predict_peak(call, given)
    seconds = perf_counter() - begin
    mx.synchronize()
    mx.eval(run())  # what a first pass keeps of weights is there, or was said
    before = mx.get_active_memory()
    fresh = statistics.median(peak_of(run, fresh=True) for _ in range(repeats))
    mx.clear_cache()
    fresh_ratio = ml.predict_peak(call, given).bytes / fresh
    for _ in range(2):
        mx.eval(run())
    shown = sorted(peak_of(run) for _ in range(repeats))
    slow = mx.cuda.is_available() and mx.default_device() == mx.gpu
    ahead = max(peak_of(run, slow=True) for _ in range(2)) if slow else None
    again = ml.predict_peak(call, given)
    usual = statistics.median(shown)
    ratio = again.bytes / usual
    part = (again.bytes - before) / (usual - before)
    print(
        f"{net:12s} {rows:>8,} {form:8s} predicted {again.bytes / 1e6:8.1f} MB "
        f"({again.least / 1e6:8.1f} to {again.most / 1e6:8.1f}) measured "
        f"{usual / 1e6:8.1f} MB ({shown[0] / 1e6:8.1f} to {shown[-1] / 1e6:8.1f}) "
        f"fresh {fresh / 1e6:8.1f} MB ratio {fresh_ratio:.3f} "
        f"{f'slow {ahead / 1e6:8.1f} MB ' if slow else ''}"
        f"ratio {ratio:.3f} pass {part:.3f} first {first.bytes / 1e6:8.1f} MB "
        f"in {seconds:.2f} s, at {again.layer}",
        flush=True,
    )
    row = {"net": net, "rows": rows, "form": form, "device": devices.current().name}
    row |= {"predicted": again.bytes, "bounds": (again.least, again.most)}
    row |= {"measured": shown, "before": before, "fresh": fresh}
    row |= {"ratio": round(ratio, 4), "fresh_ratio": round(fresh_ratio, 4)}
    return row | ({"slow": ahead} if slow else {})


def main() -> None:
    """Compare what was asked for."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--net", choices=nets.NETS, nargs="+", default=[*nets.NETS])
    parser.add_argument("--rows", type=int, nargs="+", default=[20_000, 100_000])
    parser.add_argument("--form", choices=FORMS, nargs="+", default=FORMS[:4])
    parser.add_argument("--scenes", help=".npz of (N, 3) coordinates by name")
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--out", type=Path, help="JSON lines are added to it")
    given = parser.parse_args()
    ratios: dict[str, dict[tuple, float]] = {"ratio": {}, "fresh_ratio": {}}
    for net in given.net:
        for rows in given.rows:
            for form in given.form:
                row = compare(net, rows, form, given.scenes, given.repeats)
                for name, found in ratios.items():
                    found[net, rows, form] = row[name]
                add_line(json.dumps(row), given.out)
    for name, found in ratios.items():
        worst = max(found, key=lambda key: abs(found[key] - 1))
        middle = statistics.median(found.values())
        print(
            f"{len(found)} passes, {name}: median {middle:.3f}, worst "
            f"{found[worst]:.3f} ({', '.join(map(str, worst))})"
        )


if __name__ == "__main__":
    main()
