"""Scans that a net has not seen: their rows differ a little, so no relation is there.

Without a GPU, launches of CUDA's kernels are answered: arrays are made once for a shape
and dtype, and what Python reads of a scan (its range, the rows of its levels, the edges
of its first relation) was counted on the CPU before.
"""

from __future__ import annotations

import argparse
import cProfile
import gc
import pstats
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from pathlib import Path
from unittest.mock import patch

import mlx.core as mx
import nets
import numpy as np

import mlx_lattice as ml
from mlx_lattice import devices
from mlx_lattice.backends import registry
from mlx_lattice.geometry import sync
from mlx_lattice.routes import proof_results
from mlx_lattice.routes.plan import Plan

NETS = "minkunet14", "minkunet18", "minkunet34"
LEVELS, STEM = 4, 5  # halvings of a MinkUNet, and the size of its first kernel


class Scans:
    """A net in evaluation, and scans for it.

    Args:
        net: one of ``nets.NETS``.
        rows: about how many rows a scan has.
        count: how many scans there are; each has up to 3% of the rows less.
        dtype: of features and net.
        file: of scenes, or None for a surface.
    """

    def __init__(self, net: str, rows: int, count: int, dtype: mx.Dtype, file=None):
        mx.random.seed(0)
        rng = np.random.default_rng(0)
        whole = nets.batch(rows, file)
        self.net = nets.NETS[net]()
        self.net.set_dtype(dtype)
        self.net.eval()
        self.scans = []
        for _ in range(count):
            kept = whole[rng.random(len(whole)) > 0.03 * rng.random()]
            feats = mx.random.normal((len(kept), 4)).astype(dtype)
            self.scans.append((mx.array(kept), feats))
        mx.eval(self.net.parameters(), self.scans)

    def calls(self) -> list[Callable[[], mx.array]]:
        """Return a call of the net for each scan; its coordinates are a new array."""

        def call(coords: mx.array, feats: mx.array) -> Callable[[], mx.array]:
            return lambda: self.net(ml.SparseTensor(coords + 0, feats)).feats

        return [call(*scan) for scan in self.scans]


class Answers:
    """What stands where MLX's CUDA kernels are, and its own time."""

    def __init__(self, scans: Scans, clock: Callable[[], float]):
        self.launches, self.seconds, self.clock = 0, 0.0, clock
        self._arrays: dict[tuple, mx.array] = {}
        self._known: dict[int, dict[str, mx.array]] = {}
        for coords, _ in scans.scans:
            self._known[len(coords)] = _counted(coords)

    def cuda_kernel(self, name, input_names, output_names, **_) -> Callable:
        """Return a kernel that computes nothing."""
        rows = {"hash_rows": 0, "unique_keys": 0, "relation_tiles": 3, "band_counts": 3}
        symbol = name.removeprefix("lattice_")
        at = next((i for key, i in rows.items() if symbol.startswith(key)), None)

        def call(inputs, output_shapes, output_dtypes, **_) -> list[mx.array]:
            begin = self.clock()
            self.launches += 1
            known = {}
            if at is not None:
                count = len(inputs[at])
                if symbol.startswith("unique_keys"):
                    count //= LEVELS
                known = self._known.get(count, {})
            made = []
            for key, shape, dtype in zip(
                output_names, output_shapes, output_dtypes, strict=True
            ):
                array = known.get(key)
                made.append(self._zeros(shape, dtype) if array is None else array)
            self.seconds += self.clock() - begin
            return made

        return call

    def _zeros(self, shape, dtype) -> mx.array:
        key = tuple(shape), dtype
        array = self._arrays.get(key)
        if array is None:
            # One element in memory, whatever the shape.
            array = mx.broadcast_to(mx.zeros((), dtype=dtype), shape)
            mx.eval(array)
            self._arrays[key] = array
        return array


def _counted(coords: mx.array) -> dict[str, mx.array]:
    """Return what kernels would write that Python reads, by the names of outputs."""
    manager = ml.CoordinateManager()
    key = manager.insert(coords)
    edges = manager.submanifold_kernel_relation(key, kernel_size=STEM).n_edges
    sizes = [len(manager[level]) for level in manager.cells(key, (2,) * LEVELS)]
    known = {"repeat": mx.array([-1, 0]), "edges": mx.array([edges], dtype=mx.int64)}
    columns = np.array(coords).T
    known |= {
        f"range{c}": mx.array([int(v.min()), int(v.max())])
        for c, v in enumerate(columns)
    }
    for level, end in enumerate(np.cumsum(sizes)):
        known[f"found{level}"] = mx.array([int(end)], dtype=mx.int64)
    mx.eval(known)
    return known


def _known(results: object, plan: Plan, biased: bool) -> bool:
    return bool(proof_results.key_of(plan, biased))  # every kernel was proved


@contextmanager
def answered(chip: str, scans: Scans, clock: Callable[[], float]) -> Iterator[Answers]:
    """Plan and launch for a CUDA chip, without a GPU."""
    answers = Answers(scans, clock)
    sys.path.append(str(Path(__file__).resolve().parent.parent / "tests"))
    from cuda_recorder import recording

    with (
        recording(chip),
        proof_results.proof(True),
        patch.object(proof_results.Results, "knows", _known),
        patch.object(registry, "geometry", lambda: registry.GEOMETRY["cuda"]),
        patch.object(mx.fast, "cuda_kernel", answers.cuda_kernel),
    ):
        yield answers


def report(
    scans: Scans, answers: Answers | None, clock: Callable, profiled: int, lines: int
) -> None:
    """Print what a call takes, of scans that are new and of one that came before.

    Args:
        scans: the first two are to warm up; the last ``profiled`` are for the profile.
        answers: what launches, without a GPU.
        clock: in seconds.
        profiled: how many calls are profiled for their number of function calls.
        lines: of the profile.
    """
    *calls, again = scans.calls()[: len(scans.scans) - profiled]
    for call in (again, calls.pop()):
        mx.eval(call())
    coords, feats = scans.scans[0]
    x = ml.SparseTensor(coords, feats)
    mx.eval(scans.net(x).feats)

    def kept() -> mx.array:
        return scans.net(x).feats

    rows = {"new": calls, "again": [again] * len(calls), "kept": [kept] * len(calls)}
    print(
        f"{'ms a call':10}{'graph':>8}{'least':>8}{'reads':>8}{'started':>9}{'done':>8}"
    )
    for name, each in rows.items():
        times = np.array([_timed(call, answers, clock) for call in each])
        middle, least = np.median(times, axis=0), times.min(axis=0)
        ms = middle[0], least[0], *middle[1:]
        print(f"{name:10}{ms[0]:8.2f}{ms[1]:8.2f}{ms[2]:8.2f}{ms[3]:9.2f}{ms[4]:8.2f}")
    if answers:
        for name, call in (("anew", again), ("kept", kept)):
            answers.launches = 0
            call()
            print(f"{name}: {answers.launches} launches")
    profile = cProfile.Profile()
    for call in scans.calls()[-profiled:]:
        profile.enable()
        made = call()
        profile.disable()
        mx.eval(made)
    stats = pstats.Stats(profile)
    own = sum(v[1] for k, v in stats.stats.items() if k[0] == __file__)
    print(f"new: {(stats.total_calls - own) / profiled:.0f} function calls")
    if lines:
        stats.sort_stats("tottime").print_stats(lines)


def _timed(call: Callable, answers: Answers | None, clock: Callable) -> list[float]:
    """Return ms of a call, of its reads, of call and start, and until it is done."""
    mx.synchronize()
    gc.collect()
    waited, before = [0.0], answers.seconds if answers else 0.0
    read = sync.read

    def timed(*arrays: mx.array) -> list:
        begin = clock()
        values = read(*arrays)
        waited[0] += clock() - begin
        return values

    with patch.object(sync, "read", timed):
        begin = clock()
        made = call()
        called = clock() - begin
    mx.async_eval(made)
    started = clock() - begin
    mx.eval(made)
    mx.synchronize()
    own = answers.seconds - before if answers else 0.0
    ends = called - own, waited[0], started - own, clock() - begin - own
    return [1e3 * seconds for seconds in ends]


def run(args: argparse.Namespace, clock: Callable[[], float]) -> None:
    """Measure as ``host_time.py`` was asked to."""
    dtype, chip, profiled = getattr(mx, args.dtype), args.cuda_on_cpu, 4
    scans = Scans(args.new_scans, args.rows, 2 + args.scans + profiled, dtype)
    print(
        f"{chip or devices.current().name}: {args.new_scans}, {args.dtype}, new scans"
    )
    with answered(chip, scans, clock) if chip else nullcontext() as answers:
        report(scans, answers, clock, profiled, 45 if args.profile else 0)
