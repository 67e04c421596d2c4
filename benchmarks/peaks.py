"""Peak memory of forward passes: predicted, measured, and their ratio.

    python benchmarks/peaks.py [--net minkunet14 ptv3] [--rows 20000] [--scenes FILE]

Each pass runs several times, and the largest peak is the measured one: what is held
depends on how far the host runs ahead. ``pass`` compares the bytes beyond those that
are there before the pass. The last line has the worst and the median ratio.
"""

from __future__ import annotations

import argparse
import statistics
from time import perf_counter

import mlx.core as mx
import mlx.nn
import nets

import mlx_lattice as ml

FORMS = ("float32", "float16", "8 bits", "4 bits")
REPEATS = 4


def passes(net: str, rows: int, form: str, scenes: str | None):
    """Return a net in a form, and a tensor that it takes."""
    dtype = getattr(mx, form) if form.startswith("float") else mx.float16
    steps = nets.Steps(net, nets.batch(rows, scenes), dtype)
    if "bits" in form:
        mlx.nn.quantize(steps.net, group_size=32, bits=int(form[0]))
        mx.eval(steps.net.parameters())
    steps.net.eval()
    return steps.net, steps.x


def measured(net, x: ml.SparseTensor) -> int:
    """Return the largest peak of some passes."""
    peaks = []
    for _ in range(REPEATS):
        mx.synchronize()
        mx.clear_cache()
        mx.reset_peak_memory()
        mx.eval(net(x).feats)
        peaks.append(mx.get_peak_memory())
    return max(peaks)


def compare(net: str, rows: int, form: str, scenes: str | None) -> float:
    """Print a line of a pass and return predicted / measured."""
    module, x = passes(net, rows, form, scenes)
    begin = perf_counter()
    peak = ml.predict_peak(module, x)
    seconds = perf_counter() - begin
    mx.synchronize()
    mx.eval(module(x).feats)  # what a first pass keeps of weights is there, or was said
    before = mx.get_active_memory()
    shown = measured(module, x)
    again = ml.predict_peak(module, x)
    ratio, part = again.bytes / shown, (again.bytes - before) / (shown - before)
    print(
        f"{net:12s} {rows:>8,} {form:8s} predicted {again.bytes / 1e6:8.1f} MB "
        f"(least {again.least / 1e6:8.1f}) measured {shown / 1e6:8.1f} MB "
        f"ratio {ratio:.3f} pass {part:.3f} first {peak.bytes / 1e6:8.1f} MB "
        f"in {seconds:.2f} s, at {again.layer}",
        flush=True,
    )
    return ratio


def main() -> None:
    """Compare what was asked for."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--net", choices=nets.NETS, nargs="+", default=[*nets.NETS])
    parser.add_argument("--rows", type=int, nargs="+", default=[20_000, 100_000])
    parser.add_argument("--form", choices=FORMS, nargs="+", default=FORMS)
    parser.add_argument("--scenes", help=".npz of (N, 3) coordinates by name")
    given = parser.parse_args()
    ratios = {}
    for net in given.net:
        for rows in given.rows:
            for form in given.form:
                ratios[net, rows, form] = compare(net, rows, form, given.scenes)
    worst = max(ratios, key=lambda key: abs(ratios[key] - 1))
    print(
        f"{len(ratios)} passes: median ratio {statistics.median(ratios.values()):.3f}, "
        f"worst {ratios[worst]:.3f} ({', '.join(map(str, worst))})"
    )


if __name__ == "__main__":
    main()
