"""Trace a call: the files and functions of the package that a SubmConv3d enters.

    python benchmarks/trace_call.py [--on cpu metal cuda] [--walk] [--backward]

Each backend runs a cold call, with a new layer on a new tensor, and then the same call
again. Metal kernels run in the emulator (metal/host, needs clang). CUDA kernels are
recorded and return zeros. Neither needs a GPU. ``--walk`` prints the functions in the
order in which the call enters them, indented by depth; each function appears once.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path
from types import FrameType

import mlx.core as mx
import numpy as np

import mlx_lattice as ml
from mlx_lattice import nn

PACKAGE = Path(ml.__file__).parent
BACKENDS = "cpu", "metal", "cuda"
MOST = {"cold": (20, 100), "warm": (10, 15)}  # files and functions


class Walk:
    """Records the functions of the package that run inside the block."""

    def __init__(self):
        self.entered: dict[tuple[str, str], int] = {}  # depth by (file, function)
        self.calls = self.depth = 0

    def __call__(self, frame: FrameType, event: str, _: object) -> None:
        code = frame.f_code
        is_ours = code.co_filename.startswith(str(PACKAGE))
        if event not in ("call", "return") or not is_ours:
            return
        if event == "return":
            self.depth = max(0, self.depth - 1)
            return
        self.depth += 1
        self.calls += 1
        file = str(Path(code.co_filename).relative_to(PACKAGE))
        name = getattr(code, "co_qualname", code.co_name)  # Python 3.11 and later
        self.entered.setdefault((file, name), self.depth)

    def __enter__(self) -> Walk:
        sys.setprofile(self)
        return self

    def __exit__(self, *_: object) -> None:
        sys.setprofile(None)


def layer(args: argparse.Namespace) -> Callable[[], None]:
    """Return a call of a new layer on a new tensor; it evaluates its result."""
    rng = np.random.default_rng(0)
    sites = np.unique(rng.integers(0, 24, (args.rows, 3)), axis=0)
    coords = mx.array(np.insert(sites, 0, 0, axis=1).astype(np.int32))
    feats = mx.random.normal((len(sites), args.channels)).astype(mx.float16)
    x = ml.SparseTensor(coords, feats)
    conv = nn.SubmConv3d(args.channels, args.channels, 3)
    conv.set_dtype(mx.float16)
    mx.eval(x.coords, x.feats, conv.parameters())

    def total(parameters: dict) -> mx.array:
        conv.update(parameters)
        return conv(x).feats.astype(mx.float32).sum()

    if args.backward:
        return lambda: mx.eval(mx.value_and_grad(total)(conv.parameters()))
    return lambda: mx.eval(conv(x).feats)


def device(backend: str) -> AbstractContextManager:
    """Return a block in which the backend runs, emulated or recorded."""
    if backend == "metal":
        return ml.metal("host")
    if backend == "cpu":
        return nullcontext()
    sys.path.append(str(PACKAGE.parent / "tests"))
    from cuda_recorder import recording

    return recording()


def main() -> None:
    """Trace the calls and print what they entered."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--on", nargs="+", choices=BACKENDS, default=BACKENDS)
    parser.add_argument("--rows", type=int, default=3000)
    parser.add_argument("--channels", type=int, default=32)
    parser.add_argument("--walk", action="store_true", help="print each function")
    parser.add_argument("--backward", action="store_true", help="and the gradient")
    args = parser.parse_args()
    for backend in args.on:
        with device(backend):
            run = layer(args)
            for name, (files, functions) in MOST.items():
                with Walk() as walk:
                    run()
                count = len({file for file, _ in walk.entered})
                print(
                    f"{backend:5} {name}: {count:3} files (goal {files}), "
                    f"{len(walk.entered):4} functions (goal {functions}), "
                    f"{walk.calls:5} calls"
                )
                entered = walk.entered.items() if args.walk else ()
                for (file, function), depth in entered:
                    print(f"{'  ' * depth}{function}  {file}")


if __name__ == "__main__":
    main()
