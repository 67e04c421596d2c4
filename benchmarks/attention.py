"""Attention: how much is padded, and times on the CPU beside PyTorch.

    python benchmarks/attention.py padding [SCAN ...] [--scenes FILE]
    python benchmarks/attention.py times [--torch PYTHON]

Padding is that of calls of MLX's attention, pairs of queries and keys that are computed
over useful ones; the CPU's own kernel pads nothing. Sets as TRELLIS.2's: batches of
elements of many sizes, whole and in shifted windows. Patches as Point Transformer V3's,
of every level of a scan, all blocks and heads added up. One JSON line a case.
"""

from __future__ import annotations

import argparse
import json
import statistics
import subprocess
import sys
import time
from pathlib import Path

import mlx.core as mx
import numpy as np
import scenes

import mlx_lattice as ml
from mlx_lattice import devices, io
from mlx_lattice.models import ptv3
from mlx_lattice.ops import attention
from mlx_lattice.ops.attention_calls import PADDING

SIZES = (900, 1_400, 2_600, 3_100, 4_362, 6_000, 9_500, 12_000)  # rows of elements
# Patches of 1 024: rows, heads of 16 channels; and a TRELLIS.2 block's heads of 128.
SHAPES = ((10_240, 1_024, 4, 16), (10_240, 128, 4, 16), (4_362, 4_362, 12, 128))
TORCH = """
import json, sys, time, torch
n, patch, heads, dim = map(int, sys.argv[1:])
x = torch.randn(3, n // patch, heads, patch, dim)
run = lambda: torch.nn.functional.scaled_dot_product_attention(*x)
times = []
for _ in range(5):
    begin = time.perf_counter(); run(); times.append(time.perf_counter() - begin)
print(sorted(times)[1] * 1e3)
"""


def count(x: ml.SparseTensor, rule: tuple) -> tuple[int, int, int]:
    """Return calls, useful pairs, and those that are computed."""
    groups = attention._groups(x, rule, PADDING[devices.current().backend])
    return len(groups.buckets), groups.pairs, groups.padded_pairs


def row(case: str, x: ml.SparseTensor, *counts: tuple[int, int, int]) -> dict:
    """Return a line of figures."""
    calls, useful, done = (sum(column) for column in zip(*counts, strict=True))
    facts = {"case": case, "rows": len(x), "elements": x.batch_size, "calls": calls}
    return facts | {"useful_pairs": useful, "padding": round(done / useful, 4)}


def tensor(parts: list[np.ndarray]) -> ml.SparseTensor:
    """Return a batch of (n, 3) cells, from 0 on."""
    rows = [np.insert(p - p.min(axis=0), 0, b, axis=1) for b, p in enumerate(parts)]
    coords = mx.array(np.concatenate(rows).astype(np.int32))
    return ml.SparseTensor(coords, mx.ones((len(coords), 1)))


def sets(known: dict[str, np.ndarray]) -> list[dict]:
    """Return figures of whole elements and of windows."""
    found = []
    for name, cells in known.items():
        parts = [cells[:n] for n in SIZES if n <= len(cells)]
        x = tensor(parts)
        found.append(row(f"{name}, full", x, count(x, ("full",))))
        for extent in (8, 16):
            for shift in (0, extent // 2):
                rule = "window", (extent,) * 3, (shift,) * 3
                case = f"{name}, windows of {extent} shifted by {shift}"
                found.append(row(case, x, count(x, rule)))
    return found


def levels(name: str, x: ml.SparseTensor, patch: int) -> dict:
    """Return figures of PTv3's published blocks on a scan: pairs times heads."""
    here, counts = x, []
    for level in range(len(ptv3.ENC_DEPTHS)):
        blocks = ptv3.ENC_DEPTHS[level] * ptv3.ENC_HEADS[level]
        if level < len(ptv3.DEC_DEPTHS):
            blocks += ptv3.DEC_DEPTHS[level] * ptv3.DEC_HEADS[level]
        calls, *pairs = count(here, ("filled", patch, "z", None))
        counts.append((calls, *(blocks * n for n in pairs)))
        here = tensor_of(here)
    return row(f"{name}, PTv3 in patches of {patch}", x, *counts)


def tensor_of(x: ml.SparseTensor) -> ml.SparseTensor:
    """Return the next level's cells."""
    key = x.manager.cells(x.key, (2,))[0]
    rows = len(x.manager[key])
    return ml.SparseTensor.of(x.manager, key, mx.ones((rows, 1)))


def scan(path: Path) -> list[np.ndarray]:
    """Return a scan's cells at two sizes, of about 30 and 8 thousand rows."""
    points = np.asarray(io.read_points(path).points, np.float64)
    points = points[np.isfinite(points).all(axis=1)]
    found, size = [], np.ptp(points, axis=0).max() / 64
    for wanted in (30_000, 8_000):
        low, high = size / 256, size * 16
        for _ in range(30):
            size = (low * high) ** 0.5
            cells = np.unique(np.floor(points / size).astype(np.int64), axis=0)
            low, high = (size, high) if len(cells) > wanted else (low, size)
        found.append(cells)
    return found


def padding(given: argparse.Namespace) -> None:
    """Print how much is padded."""
    known = {"surface": scenes.own_surface(max(SIZES))[:, 1:]}
    if given.scenes:
        with np.load(given.scenes) as file:
            known |= {
                name: file[name] for name in file if len(file[name]) >= max(SIZES)
            }
    lines = sets(known)
    for path in given.scans:
        parts = scan(path)
        lines += [levels(path.stem, tensor(parts), patch) for patch in (1024, 128)]
        lines += sets({path.stem: parts[0]})
    for line in lines:
        print(json.dumps(line), flush=True)
    print(json.dumps({"most": max(line["padding"] for line in lines)}))


def times(given: argparse.Namespace) -> None:
    """Print milliseconds on the CPU: the kernel's, MLX's and PyTorch's."""
    for n, patch, heads, dim in SHAPES:
        x = ml.SparseTensor(
            mx.stack([mx.arange(n) // patch, *[mx.arange(n) % patch] * 3], axis=1),
            mx.ones((n, 1)),
        )
        q, k, v = mx.random.normal((3, n, heads, dim))
        shape = n // patch, patch, heads, dim
        parts = [a.reshape(shape).transpose(0, 2, 1, 3) for a in (q, k, v)]
        runs = {
            "kernel": lambda q=q, k=k, v=v, x=x: ml.ops.full_attention(q, k, v, x),
            "mlx": lambda parts=parts, dim=dim: mx.fast.scaled_dot_product_attention(
                *parts, scale=dim**-0.5
            ),
        }
        line = {"rows": n, "patch": patch, "heads": heads, "channels": dim}
        for name, run in runs.items():
            taken = []
            for _ in range(5 if name == "kernel" else 1):
                begin = time.perf_counter()
                mx.eval(run())
                taken.append(time.perf_counter() - begin)
            line[f"{name}_ms"] = round(statistics.median(taken) * 1e3, 1)
        if given.torch:
            shape = map(str, (n, patch, heads, dim))
            done = subprocess.run(
                [given.torch, "-c", TORCH, *shape], capture_output=True, check=True
            )
            line["torch_ms"] = round(float(done.stdout), 1)
        print(json.dumps(line), flush=True)


def main() -> None:
    """Measure what was asked for."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    commands = parser.add_subparsers(required=True)
    made = commands.add_parser("padding")
    made.add_argument("scans", type=Path, nargs="*", help="scans, as io.read_points")
    made.add_argument("--scenes", help=".npz of (N, 3) coordinates by name")
    made.set_defaults(run=padding)
    made = commands.add_parser("times")
    made.add_argument("--torch", help="a Python that has PyTorch")
    made.set_defaults(run=times)
    given = parser.parse_args()
    sys.exit(given.run(given))


if __name__ == "__main__":
    main()
