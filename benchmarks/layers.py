"""GPU time of single layers over rows and channels, beside other libraries' figures.

    python benchmarks/layers.py SCENES.npz [--out FILE] [--beside FILE]

SCENES.npz holds int coordinates (N, 3) by name; a case takes the first rows of the
least scene that has them. A layer is the module that a net has, with MLX's layout of
its weight; relations are kept. Times are sums over the kernels of a call, read by
PyTorch's profiler: forward, and forward with both gradients. MLX runs these side by
side: ``busy_ms`` is the time in which any kernel runs; with MLX_USE_CUDA_GRAPHS=0 they
run one after another, as other libraries' do. Without an NVIDIA GPU or PyTorch they are
wall times. One JSON line a case; ``--beside`` is a file of such lines of other
libraries, each with its name under "library": peer_layers.py writes it.
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path

import mlx.core as mx
import mlx.nn
import numpy as np
from gpu_profiles import gpu_profile
from layer_cases import (
    CHANNELS,
    KINDS,
    ROWS,
    beside,
    cases,
    grouped_cases,
    key_of,
    sites,
    summary,
)
from written import write_line

import mlx_lattice as ml
from mlx_lattice import devices, nn

DTYPES = {"float16": mx.float16, "float32": mx.float32, "tf32": mx.float32}
REPEATS = 5


class Layer(mlx.nn.Module):
    """A layer, and the tensor that it is called with."""

    def __init__(self, x: ml.SparseTensor, case: dict):
        super().__init__()
        channels, self.precision = case["channels"], case["dtype"]
        kind, widths = KINDS[case["kind"]], (channels, channels)
        step = {"stride": kind.stride, "bias": False}
        if kind.stride == 1:
            groups = case.get("groups", 1)
            self.conv = nn.SubmConv3d(*widths, kind.size, groups=groups, bias=False)
        elif kind.writes_coarse:
            self.conv = nn.Conv3d(*widths, kind.size, **step)
        else:
            self.conv = nn.ConvTranspose3d(*widths, kind.size, **step)
            x = nn.Conv3d(1, 1, kind.size, stride=kind.stride)(x)
        self.conv.set_dtype(DTYPES[case["dtype"]])
        self._rows = x
        # Of a parameter, so that preparation plans the gradient of the features too.
        self.scale = mx.ones((channels,), dtype=DTYPES[case["dtype"]])

    def __call__(self, _: ml.SparseTensor) -> mx.array:
        """Return the features of a call with ones."""
        ones = mx.ones((self._rows.feats.shape[0], 1), dtype=self.scale.dtype)
        return self.of(ones * self.scale)

    def of(self, feats: mx.array) -> mx.array:
        """Return (rows written, channels) features."""
        with ml.precision("tf32" if self.precision == "tf32" else "float32"):
            return self.conv(self._rows.replace(feats=feats)).feats

    def steps(self) -> dict[str, Callable[[], object]]:
        """Return what runs the forward pass, and it with both gradients."""
        weight, dtype = self.conv.weight, self.scale.dtype
        shape = self._rows.feats.shape[0], self.scale.size
        feats = mx.random.normal(shape).astype(dtype)
        gradient = mx.random.normal(self.of(feats).shape).astype(dtype)
        mx.eval(feats, gradient, weight)

        def both(feats, weight):
            self.conv.weight = weight
            return self.of(feats)

        return {
            "forward": partial(self.of, feats),
            "training": lambda: mx.vjp(both, [feats, weight], [gradient]),
        }


def call_ms(run: Callable[[], object]) -> dict[str, float]:
    """Return "gpu_ms", "busy_ms" and "launches" of a call, or "wall_ms"."""

    def several() -> None:
        for _ in range(REPEATS):
            mx.eval(run())

    several()
    if profiled := gpu_profile(several):
        kernels, busy = profiled
        total = sum(ms for _, ms in kernels.values())
        count = sum(count for count, _ in kernels.values())
        ms = {"gpu_ms": round(total / REPEATS, 5), "busy_ms": round(busy / REPEATS, 5)}
        return ms | {"launches": round(count / REPEATS)}
    times = []
    for _ in range(REPEATS):
        begin = time.perf_counter()
        mx.eval(run())
        times.append((time.perf_counter() - begin) * 1e3)
    return {"wall_ms": round(statistics.median(times), 5)}


def measured(x: ml.SparseTensor, chosen: list[dict]) -> Iterator[dict]:
    """Yield the row of each case and pass over a scan."""
    layers = [Layer(x, case) for case in chosen]

    class Every(mlx.nn.Module):
        def __init__(self):
            super().__init__()
            self.layers = layers

        def __call__(self, x):
            return [layer(x) for layer in self.layers]

    ml.prepare(Every(), x, training=True)
    for case, layer in zip(chosen, layers, strict=True):
        for pass_, run in layer.steps().items():
            yield {**case, "pass": pass_, **call_ms(run)}
        mx.clear_cache()


def main() -> None:
    """Measure, print and write."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("scenes", nargs="?", help=".npz of (N, 3) coordinates by name")
    parser.add_argument("--rows", type=int, nargs="+", default=ROWS)
    parser.add_argument("--channels", type=int, nargs="+", default=CHANNELS)
    parser.add_argument("--kinds", nargs="+", choices=KINDS, default=list(KINDS))
    parser.add_argument(
        "--groups",
        type=int,
        nargs="+",
        help="submanifold layers with these groups and with one, in half and float32",
    )
    parser.add_argument("--out", type=Path, help="JSON lines are added to it")
    parser.add_argument("--beside", type=Path, help="other libraries' JSON lines")
    given = parser.parse_args()
    others = beside(given.beside) if given.beside else {}
    device, compared = devices.current().name, []
    for rows in given.rows:
        chosen = [
            case
            for case in cases((rows,))
            if case["channels"] in given.channels and case["kind"] in given.kinds
        ]
        if given.groups:
            chosen = grouped_cases(rows, given.channels, given.groups)
        coords = mx.array(np.insert(sites(rows, given.scenes), 0, 0, axis=1))
        x = ml.SparseTensor(coords, mx.ones((rows, 1)))
        for row in measured(x, chosen):
            row["device"] = device
            other = others.get(key_of(row))
            if other and "gpu_ms" in row:  # wall times are of something else
                row["peer_ms"], row["peer"] = other["gpu_ms"], other["library"]
                row["times_faster"] = round(other["gpu_ms"] / row["gpu_ms"], 3)
                compared.append(row)
            write_line(row, given.out)
    for pass_ in dict.fromkeys(row["pass"] for row in compared):
        print(summary(compared, pass_))


if __name__ == "__main__":
    main()
