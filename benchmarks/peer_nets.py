"""MinkUNets of PyTorch, of other libraries' layers.

    python benchmarks/peer_nets.py COORDS.npy... [--depth 34] [--net spconv gather]
    python benchmarks/peer_nets.py COORDS.npy... --net spconv-triton
        --spconv-triton FOLDER --dtype float16 --depth 34 --out FILE

The first on the CPU: spconv's layers, and gather, matmul and scatter. The second on an
NVIDIA GPU: those of github.com/L-Reichardt/spconv-triton, for whose commit 6336169 this
was written, with its kernels tuned for this net. Each needs torch and the library in an
environment of their own, and neither this library nor MLX. Their times stand beside
those of ``nets.py --net minkunet18 --dtype float32`` on the coordinates that ``nets.py
--save-coordinates`` wrote: the same net, a forward pass with pairs of rows searched
anew or kept, and a training step of SGD with momentum. One JSON line a step.

Where others load the machine, processor time of one thread, of both programs:

    OMP_NUM_THREADS=1 python benchmarks/peer_nets.py COORDS.npy --cpu-time
    MLX_LATTICE_THREADS=1 python benchmarks/nets.py --net minkunet18 --cpu-time ...
"""

from __future__ import annotations

import argparse
import os
import statistics
import time
from collections.abc import Callable
from itertools import product
from pathlib import Path

import numpy as np
import torch
from peer_unet import (
    CLASSES,
    PLANES,
    ConvNeXt,
    GatherLayers,
    MinkUNet,
    SpconvLayers,
)
from torch import nn
from written import write_line

TRITON = "spconv-triton"
STEPS = "anew", "kept", "training", "training anew"


def library_of(name: str, folder: Path | None) -> object:
    """Return the module whose layers have spconv's interface."""
    if name == TRITON:
        from peer_tuning import spconv_triton

        return spconv_triton(folder)
    import spconv.pytorch

    return spconv.pytorch


class Steps:
    """A net of a library's layers, a batch, and what is timed of them."""

    def __init__(
        self,
        name: str,
        folder: Path | None,
        coords: np.ndarray,
        depth: int,
        dtype: str,
        device: str,
    ):
        torch.manual_seed(0)
        self.layers: GatherLayers | SpconvLayers
        if name == "gather":
            self.layers = GatherLayers(coords)
        else:
            self.layers = SpconvLayers(coords, library_of(name, folder), device)
        as_net = {"device": device, "dtype": getattr(torch, dtype)}
        of_depth = MinkUNet(self.layers, depth) if depth else ConvNeXt(self.layers)
        self.net = of_depth.to(**as_net)
        self.feats = torch.randn(len(coords), 4).to(**as_net)
        self.labels = torch.randint(0, CLASSES, (len(coords),), device=device)
        self.optimizer = torch.optim.SGD(self.net.parameters(), 1e-3, momentum=0.9)

    def step(self, name: str) -> Callable[[], object]:
        """Return what runs a step."""
        self.net.train(name.startswith("training"))
        return getattr(self, name.replace(" ", "_"))

    def scores(self) -> torch.Tensor:
        """Return (N, 20) float32 scores."""
        return self.net(self.layers.tensor(self.feats)).float()

    @torch.no_grad()
    def kept(self) -> None:
        """Run forward over pairs that were searched before."""
        self.scores()

    @torch.no_grad()
    def anew(self) -> None:
        """Run forward over pairs that are searched for it."""
        self.layers.pairs.clear()
        self.scores()

    def training(self) -> None:
        """Train a step over pairs that were searched before."""
        self.optimizer.zero_grad()
        nn.functional.cross_entropy(self.scores(), self.labels).backward()
        self.optimizer.step()

    def training_anew(self) -> None:
        """Train a step over pairs that are searched for it."""
        self.layers.pairs.clear()
        self.training()


def tuned(*given: object) -> None:
    """Run each kernel of a net once."""
    steps = Steps(*given)
    for name in ("anew", "training"):
        steps.step(name)()


def median_ms(
    run: Callable[[], object], repeats: int, clock: Callable[[], float], wait: Callable
) -> float:
    """Return the median time of a call after some that are not counted."""
    times = []
    for _ in range(repeats + 1):
        wait()
        begin = clock()
        run()
        wait()
        times.append(clock() - begin)
    return statistics.median(times[1:]) * 1e3


def on_gpu(run: Callable[[], object], calls: int = 5) -> dict:
    """Return the GPU's ms and launches of a call, and the peak that PyTorch holds."""
    from torch import profiler

    torch.cuda.empty_cache()
    torch.cuda.reset_peak_memory_stats()
    run()
    torch.cuda.synchronize()
    peak = torch.cuda.max_memory_allocated()
    with profiler.profile(activities=[profiler.ProfilerActivity.CUDA]) as seen:
        for _ in range(calls):
            run()
            torch.cuda.synchronize()
    events = [e for e in seen.events() if str(e.device_type).endswith("CUDA")]
    total = sum(event.device_time for event in events) / 1e3
    return {
        "gpu_ms": round(total / calls, 3),
        "launches": round(len(events) / calls),
        "peak_gb": round(peak / 1e9, 3),
    }


def measured(run: Callable[[], object], given: argparse.Namespace, device: str) -> dict:
    """Return the figures of a step."""
    clock = time.process_time if given.cpu_time else time.perf_counter
    unit = "processor_ms" if given.cpu_time else "wall_ms"
    if device == "cpu":
        return {unit: round(median_ms(run, given.repeats, clock, lambda: None), 2)}
    for _ in range(2):
        run()
    wall = round(median_ms(run, given.repeats, clock, torch.cuda.synchronize), 2)
    facts = {"dtype": given.dtype, "device": torch.cuda.get_device_name()}
    return {unit: wall, **facts, **on_gpu(run)}


def main() -> None:
    """Measure what was asked for."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument(
        "coordinates", type=Path, nargs="+", help="(N, 4) int32 .npy, batch first"
    )
    nets = "spconv", "gather", TRITON
    parser.add_argument("--net", choices=nets, nargs="+", default=nets[:2])
    parser.add_argument(f"--{TRITON}", type=Path, help="a checkout")
    depths = {"choices": (*PLANES, 0), "help": "of MinkUNets; 0 is nets.py's convnext"}
    parser.add_argument("--depth", type=int, nargs="+", default=[18], **depths)
    parser.add_argument("--steps", nargs="+", choices=STEPS, default=STEPS[1:3])
    parser.add_argument("--dtype", default="float32")
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--cpu-time", action="store_true", help="not wall time")
    parser.add_argument("--out", type=Path, help="JSON lines are added to it")
    parser.add_argument(
        "--workers", type=int, default=max(1, (os.cpu_count() or 2) - 1)
    )
    given = parser.parse_args()
    folder = given.spconv_triton
    if TRITON in given.net and (folder is None or not torch.cuda.is_available()):
        parser.error(f"{TRITON} needs a checkout, --{TRITON} FOLDER, and a GPU")
    if 0 in given.depth and "gather" in given.net:
        parser.error("the ConvNeXt is of spconv's layers: name another --net")
    for depth, name in product(given.depth, given.net):
        device = "cuda" if name == TRITON else "cpu"
        for at, file in enumerate(given.coordinates):
            coords = np.load(file)
            coords = coords[np.lexsort(coords.T[::-1])]
            facts = name, folder, coords, depth, given.dtype, device
            if device == "cuda" and not at:  # tuned for all numbers of rows
                from peer_tuning import compile_ahead

                compile_ahead(tuned, facts, given.workers)
                tuned(*facts)
            net = f"minkunet{depth}" if depth else "convnext"
            about = {"net": net, "library": name, "rows": len(coords)}
            steps = Steps(*facts)
            for step in given.steps:
                found = measured(steps.step(step), given, device)
                write_line({**about, "step": step, **found}, given.out)


if __name__ == "__main__":
    main()
