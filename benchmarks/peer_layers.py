"""GPU time of other libraries' layers, to stand beside those of ``layers.py``.

    python benchmarks/peer_layers.py SCENES.npz --flexgemm FOLDER
        --spconv-triton FOLDER --out FILE [--seconds N] [--earlier FILE ...]

It needs torch, triton and an NVIDIA GPU, in an environment of their own, and neither
this library nor MLX. The folders are checkouts of github.com/JeffreyXiang/FlexGEMM and
github.com/L-Reichardt/spconv-triton, for whose commits 6dd94a8 and 6336169 this was
written.

Each pass is tuned alone over its library's own configurations (of FlexGEMM those for
unknown GPUs and for the H100, times its split-K), by CUDA events. The best is compared
with float32 products; its time is the profiler's sum over kernels. Maps, and what a
library keeps of them, are made before. Processes compile ahead, in the order in which
configurations are timed. Cases come by importance until the time is up, and the same
command goes on from there. One JSON line a case and pass, for ``layers.py --beside``.

``--list`` prints the cases. ``TRITON_INTERPRET=1 ... --check`` runs small cases of both
libraries on the CPU and compares them with float32 products.
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import os
import time
from collections.abc import Callable, Iterator, Sequence
from itertools import product
from pathlib import Path

import numpy as np
import torch
from layer_cases import CHANNELS, FACTS, KINDS, cases, sites
from peer_kernels import PASSES, FlexGEMM, SpconvTriton
from peer_maps import TORCH, Arrays, Map, Table, make_map
from triton.backends.compiler import GPUTarget
from triton.runtime import driver
from written import add_line

LIBRARIES = {"FlexGEMM": FlexGEMM, "spconv-triton": SpconvTriton}
ROWS = (40_000, 120_000, 10_000, 2_000, 1_000_000)  # by importance
TOLERANCE = 4e-3  # of a result's norm, in half and in TF32
Case = tuple[str, dict]  # a library's name and a case


def ordered(rows: Sequence[int], channels: Sequence[int]) -> list[Case]:
    """Return the cases, the important first: these libraries multiply in TF32."""
    every = [
        case
        for case in cases(tuple(rows))
        if case["dtype"] in TORCH and case["channels"] in channels
    ]
    every.sort(key=lambda case: case["dtype"] != "float16")
    return [(name, case) for name in LIBRARIES for case in every]


def known(files: list[Path]) -> set[tuple]:
    """Return the cases that files of an earlier run have."""
    lines = [x for file in files if file.exists() for x in file.read_text().split("\n")]
    rows = [json.loads(line) for line in lines if line]
    done = [row for row in rows if row.get("pass") == "training" and "library" in row]
    return {(row["library"], *(row[fact] for fact in FACTS)) for row in done}


class NoDriver:
    """What Triton asks of a driver to compile for a GPU and not to launch."""

    def __init__(self, capability: int):
        self.get_current_target = lambda: GPUTarget("cuda", capability, 32)
        self.get_current_device = lambda: 0
        self.get_current_stream = lambda device: 0
        self.get_active_torch_device = lambda: torch.device("cpu")


class Compiler:
    """A process's kernels, and arrays that stand in for those on the GPU."""

    here: Compiler

    def __init__(self, folders: dict[str, Path], capability: int, processors: int):
        torch.set_num_threads(1)
        driver.set_active(NoDriver(capability))
        # One library asks its arrays where they are.
        torch.Tensor.is_cuda = property(lambda self: True)
        self.libraries = loaded(folders, processors)
        self.arrays: dict[tuple, Arrays] = {}

    @classmethod
    def start(cls, *given: object) -> None:
        """Make the one of this process."""
        cls.here = cls(*given)

    def compile(self, name: str, case: dict, pass_: str, candidate: tuple) -> None:
        """Put a kernel into Triton's cache."""
        key, kind = tuple(case[fact] for fact in FACTS), KINDS[case["kind"]]
        if key not in self.arrays:
            few, more = (
                Table(torch.zeros((n, kind.volume), dtype=torch.int32))
                for n in (64, 128)
            )
            of = (few, more) if kind.writes_coarse else (more, few)
            self.arrays[key] = Arrays(Map(*of if kind.stride > 1 else (few, few)), case)
        library = self.libraries[name]
        if isinstance(library, SpconvTriton):
            library.assume_pairs(kind.edges * case["rows"])
        library.call(pass_, self.arrays[key], *candidate, warm=True)()


def compiled(job: tuple) -> str | None:
    """Compile in a worker; return an error's text."""
    try:
        Compiler.here.compile(*job)
    except Exception as error:  # the GPU has too little memory for it, say
        return f"{type(error).__name__}: {error}"[:200]


def loaded(folders: dict[str, Path], processors: int) -> dict:
    """Return the libraries' kernels."""
    return {
        name: LIBRARIES[name](folder, processors) for name, folder in folders.items()
    }


def wrong(pass_: str, a: Arrays, got: torch.Tensor) -> float:
    """Return the relative error of some rows or matrices beside float32 products."""
    wide, got = torch.float32, got.to(torch.float32)
    if pass_ == "weight_grad":
        read, written, starts = a.map.table.pairs
        volume, errors = a.w.shape[1], []
        for offset in {0, volume // 2}:
            of = slice(int(starts[offset]), int(starts[offset + 1]))
            want = a.dy[written[of].long()].to(wide).T @ a.x[read[of].long()].to(wide)
            errors.append((got[:, offset] - want).norm() / want.norm().clamp(min=1e-9))
        return float(torch.stack(errors).max())  # NaN, where there is one
    back = pass_ == "input_grad"
    rows = (a.map.back if back else a.map.table).rows
    some = torch.arange(0, len(rows), max(1, len(rows) // 500), device=rows.device)
    feats, want = (a.dy if back else a.x).to(wide), 0
    for offset, read in enumerate(rows[some].long().T):
        x = torch.where(read[:, None] >= 0, feats[read.clamp(min=0)], 0)
        mirror = back and a.map.is_mirror
        w = a.w[:, rows.shape[1] - 1 - offset if mirror else offset].to(wide)
        want = want + x @ (w if back else w.T)
    return float((got[some] - want).norm() / want.norm())


def event_ms(call: Callable, calls: int) -> float:
    """Return ms of a call behind a kernel that sleeps: launches do not count."""
    call()
    begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    torch.cuda._sleep(1_500_000)
    begin.record()
    for _ in range(calls):
        call()
    end.record()
    end.synchronize()
    return begin.elapsed_time(end) / calls


def kernel_ms(call: Callable, calls: int) -> float:
    """Return the sum of a call's kernels."""
    from torch import profiler

    torch.cuda.synchronize()
    with profiler.profile(activities=[profiler.ProfilerActivity.CUDA]) as seen:
        for _ in range(calls):
            call()
        torch.cuda.synchronize()
    events = [e for e in seen.events() if str(e.device_type).endswith("CUDA")]
    return sum(event.device_time for event in events) / 1e3 / calls


class Run:
    """Cases, timed against a deadline while processes compile."""

    def __init__(self, scenes: str | None, libraries: dict, end: float):
        self.scenes, self.libraries, self.end = scenes, libraries, end
        self.maps: dict[tuple, Map] = {}
        self.errors: dict[str, int] = {}

    def left(self) -> float:
        """Return the seconds that are left, or raise TimeoutError."""
        if (seconds := self.end - time.monotonic()) < 0:
            raise TimeoutError
        return seconds

    def map_of(self, case: dict) -> Map:
        """Return a case's map; those of one number of rows are kept."""
        key = case["kind"], case["rows"]
        if key not in self.maps:
            self.maps = {k: v for k, v in self.maps.items() if k[1] == key[1]}
            coords = sites(case["rows"], self.scenes)
            self.maps[key] = make_map(coords, KINDS[case["kind"]], "cuda")
        return self.maps[key]

    def best(self, library, pass_: str, a: Arrays, every: list, errors) -> dict | None:
        """Return a pass's time by the best of its candidates, if that is right."""
        timed, calls = [], 2 if len(a.x) > 500_000 else 4
        for split, config in every:
            error = errors.next(self.left())
            if error is None:
                try:
                    call = library.call(pass_, a, split, config)
                    timed.append(
                        (event_ms(call, calls), len(timed), split, config, call)
                    )
                except Exception as failed:  # too much shared memory, say
                    error = f"{type(failed).__name__}: {failed}"[:200]
            if error:
                self.errors[error] = self.errors.get(error, 0) + 1
        if not timed:
            return None
        *_, split, config, call = min(timed)
        if not (error := wrong(pass_, a, call())) < TOLERANCE:
            print(f"wrong by {error:.1e}: {pass_} by {config}", flush=True)
            return None
        facts = {"split": split, "config": str(config), "error": round(error, 6)}
        return {"ms": kernel_ms(call, calls), **facts, "of": len(timed)}

    def rows(self, todo: list[Case], jobs: dict, errors) -> Iterator[dict]:
        """Yield the forward and the training row of each case."""
        for name, case in todo:
            arrays, passes = Arrays(self.map_of(case), case), {}
            for pass_ in PASSES:
                of = jobs[(name, *case.values(), pass_)]
                passes[pass_] = self.best(
                    self.libraries[name], pass_, arrays, of, errors
                )
            if None in passes.values():
                print("no figure:", name, *case.values(), flush=True)
                continue
            ms = {pass_: round(found["ms"], 5) for pass_, found in passes.items()}
            row = {"library": name, **case}
            yield {**row, "pass": "forward", "gpu_ms": ms["forward"]}
            row |= {"pass": "training", "gpu_ms": round(sum(ms.values()), 5)}
            yield {**row, "passes": ms, "tuned": passes}


def check(libraries: dict) -> None:
    """Compare small cases of every library with float32 products."""
    coords = np.unique(np.random.default_rng(0).integers(0, 9, (150, 3)), axis=0)
    for kind, facts in KINDS.items():
        of = make_map(coords, facts, "cpu")
        for dtype in TORCH:
            # So many rows are split by 1 and 2 alone.
            case = dict(kind=kind, rows=150_000, channels=32, dtype=dtype)
            a = Arrays(of, case)
            for (name, library), pass_ in product(libraries.items(), PASSES):
                every = list(library.candidates(pass_, case))
                small = [c for c in every if max(c[1].kwargs.values()) <= 64]
                for split, config in small[0], small[-1]:
                    error = wrong(pass_, a, library.call(pass_, a, split, config)())
                    print(kind, dtype, name, pass_, f"split {split}: {error:.1e}")
                    assert error < TOLERANCE, config


def main() -> None:
    """List, check, or time what was asked for."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("scenes", nargs="?", help=".npz of (N, 3) coordinates by name")
    for name in LIBRARIES:
        parser.add_argument(f"--{name.lower()}", type=Path, help="a checkout")
    parser.add_argument("--out", type=Path, help="JSON lines are added to it")
    parser.add_argument("--rows", type=int, nargs="+", default=ROWS)
    parser.add_argument("--channels", type=int, nargs="+", default=CHANNELS)
    parser.add_argument("--seconds", type=float, default=240)
    parser.add_argument("--earlier", type=Path, nargs="*", default=[])
    parser.add_argument(
        "--workers", type=int, default=max(1, (os.cpu_count() or 2) - 1)
    )
    parser.add_argument("--list", action="store_true", help="print the cases")
    parser.add_argument("--check", action="store_true", help="on the CPU, interpreted")
    given = parser.parse_args()
    begin = time.monotonic()
    named = {name: name.lower().replace("-", "_") for name in LIBRARIES}
    folders = {n: getattr(given, a) for n, a in named.items() if getattr(given, a)}
    done = known([*given.earlier, *([given.out] if given.out else [])])
    every = ordered(given.rows, given.channels)
    todo = [c for c in every if (c[0], *c[1].values()) not in done]
    if given.list:
        for name, case in todo:
            print(name, *case.values())
        return
    if not folders:
        parser.error("name a checkout: --flexgemm FOLDER or --spconv-triton FOLDER")
    todo = [(name, case) for name, case in todo if name in folders]
    if given.check:
        torch.Tensor.is_cuda = property(lambda self: True)
        check(loaded(folders, 132))
        return
    if not (given.out and torch.cuda.is_available()):
        parser.error("timing needs an NVIDIA GPU and --out FILE")
    measure(given, folders, todo, begin + given.seconds)


def measure(given, folders: dict, todo: list[Case], end: float) -> None:
    """Time cases until the end and write them."""
    facts = torch.cuda.get_device_properties("cuda")
    processors, device = facts.multi_processor_count, facts.name
    libraries = loaded(folders, processors)
    jobs = {
        (name, *case.values(), pass_): list(libraries[name].candidates(pass_, case))
        for name, case in todo
        for pass_ in PASSES
    }
    every = [
        (name, case, pass_, candidate)
        for name, case in todo
        for pass_ in PASSES
        for candidate in jobs[(name, *case.values(), pass_)]
    ]
    print(f"{len(todo)} cases, {len(every)} candidates", flush=True)
    run, count = Run(given.scenes, libraries, end), 0
    start = (folders, 10 * facts.major + facts.minor, processors)
    context = multiprocessing.get_context("spawn")
    with context.Pool(given.workers, Compiler.start, start) as pool:
        errors = pool.imap(compiled, every)
        try:
            for row in run.rows(todo, jobs, errors):
                count += 1
                add_line(json.dumps({**row, "device": device}), given.out)
                print(*list(row.values())[:7], flush=True)
        except (TimeoutError, multiprocessing.TimeoutError):
            print("the time is up: the same command goes on from here")
    print(f"{count // 2} of {len(todo)} cases")
    for error, times in run.errors.items():
        print(f"  {times} x {error}")


if __name__ == "__main__":
    main()
