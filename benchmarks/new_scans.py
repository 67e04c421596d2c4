"""Scans that a net has not seen: their rows differ a little, so no relation is there.

Without a GPU, launches of CUDA's kernels are answered: arrays are made once for a shape
and dtype, and what Python reads of a scan (its range, the rows of its levels, the edges
of its first relation) was counted on the CPU before.
"""

from __future__ import annotations

import argparse
import cProfile
import pstats
import statistics
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from functools import partial
from pathlib import Path
from unittest.mock import patch

import mlx.core as mx
import nets
import numpy as np

import mlx_lattice as ml
from mlx_lattice import devices, registry, sync
from mlx_lattice.problem import Plan
from mlx_lattice.routes import proof

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

    def relations(self) -> list[Callable[[], mx.array]]:
        """Return what prepares each scan, and does nothing else.

        They are started, and held until the next are made.
        """
        held = []

        def make(coords: mx.array, feats: mx.array) -> mx.array:
            x = ml.SparseTensor(coords + 0, feats)
            ml.prepare(self.net, x)
            held[:] = [x]
            return x.feats

        return [partial(make, *scan) for scan in self.scans]

    def calls(self) -> list[Callable[[], mx.array]]:
        """Return a call of the net for each scan; its coordinates are a new array."""

        def call(coords: mx.array, feats: mx.array) -> Callable[[], mx.array]:
            return lambda: self.net(ml.SparseTensor(coords + 0, feats)).feats

        return [call(*scan) for scan in self.scans]


class Answers:
    """What stands where MLX's CUDA kernels are."""

    def __init__(self, scans: Scans):
        # Each launch, to be done again; kept only where that is asked for: what is
        # held makes Python's collector run.
        self.launched: list[Callable] | None = None
        self._arrays: dict[tuple, mx.array] = {}
        self._known: dict[int, dict[str, mx.array]] = {}
        for coords, _ in scans.scans:
            self._known[len(coords)] = _counted(coords)

    def cuda_kernel(self, name, input_names, output_names, **_) -> Callable:
        """Return a kernel that computes nothing."""
        rows = {"hash_rows": 0, "unique_keys": 0, "relation_tiles": 3, "band_counts": 3}
        symbol = name.removeprefix("lattice_")
        at = next((i for key, i in rows.items() if symbol.startswith(key)), None)
        if "_Read" in symbol:  # whose first input is a table
            at = 0

        def call(inputs, output_shapes, output_dtypes, **_) -> list[mx.array]:
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
            return made

        def kernel(**given) -> list[mx.array]:
            if self.launched is not None:
                self.launched.append(partial(call, **given))
            return call(**given)

        return kernel

    def own(self, run: Callable, clock: Callable[[], float]) -> tuple[int, float]:
        """Return the launches of a call, and the ms of it that are their stand-ins'."""
        self.launched = []
        run()
        launches, times, self.launched = self.launched, [], None
        for _ in range(20):
            begin = clock()
            for launch in launches:
                launch()
            times.append(clock() - begin)
        return len(launches), 1e3 * statistics.median(times)

    def _zeros(self, shape, dtype) -> mx.array:
        key = tuple(shape), dtype
        array = self._arrays.get(key)
        if array is None:
            # One element in memory; whole of one axis, which is viewed as others.
            of = shape if len(shape) == 1 else ()
            array = mx.broadcast_to(mx.zeros(of, dtype=dtype), shape)
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
    return bool(proof.key_of(plan, biased))  # every kernel was proved


@contextmanager
def answered(chip: str, scans: Scans) -> Iterator[Answers]:
    """Plan and launch for a CUDA chip, without a GPU."""
    answers = Answers(scans)
    sys.path.append(str(Path(__file__).resolve().parent.parent / "tests"))
    from cuda_recorder import recording

    with (
        recording(chip),
        proof.proof(True),
        patch.object(proof.Results, "knows", _known),
        patch.object(registry, "geometry", lambda: registry.GEOMETRY["cuda"]),
        patch.object(mx.fast, "cuda_kernel", answers.cuda_kernel),
    ):
        yield answers


def report(
    scans: Scans, answers: Answers | None, clock: Callable[[], float], lines: int
) -> None:
    """Print what a call takes with scans anew, their relations, and with kept ones.

    Args:
        scans: each is called several times: nothing is kept of its sizes.
        answers: what launches, without a GPU.
        clock: in seconds.
        lines: of a profile of calls anew.
    """
    calls = scans.calls()
    x = ml.SparseTensor(*scans.scans[0])

    def kept() -> mx.array:
        return scans.net(x).feats

    for call in (*calls, kept):
        mx.eval(call())
    print("ms a call     graph    least    reads  started     done")
    kinds = {"anew": calls, "relations": scans.relations(), "kept": [kept] * len(calls)}
    for name, each in kinds.items():
        times = np.array([_timed(call, clock) for _ in range(3) for call in each])
        middle = np.median(times, axis=0)
        ms = middle[0], times[:, 0].min(), *middle[1:]
        print(f"{name:10}" + "".join(f"{value:9.2f}" for value in ms), end="")
        if answers:
            launches, own = answers.own(each[0], clock)
            print(f"   {launches} launches, {own:.2f} of it their record", end="")
        print()
    profile = cProfile.Profile()
    for call in calls:
        profile.enable()
        made = call()
        profile.disable()
        mx.eval(made)
    stats = pstats.Stats(profile)
    own = sum(v[1] for k, v in stats.stats.items() if k[0] == __file__)
    print(f"anew: {(stats.total_calls - own) / len(calls):.0f} function calls")
    if lines:
        stats.sort_stats("tottime").print_stats(lines)


def _timed(call: Callable, clock: Callable[[], float]) -> list[float]:
    """Return ms of a call, of its reads, of call and start, and until it is done.

    What Python does while a read is computed counts as the read's. Nothing is collected
    before, which would empty the host's caches: 0.4 ms of a call.
    """
    mx.synchronize()
    waited, read = [], sync.read

    def timed(*arrays: mx.array) -> list:
        begin = clock()
        values = read(*arrays)
        waited.append(clock() - begin)
        return values

    with patch.object(sync, "read", timed):
        begin = clock()
        made = call()
        called = clock() - begin
    mx.async_eval(made)
    started = clock() - begin
    mx.eval(made)
    mx.synchronize()
    ends = called, sum(waited), started, clock() - begin
    return [1e3 * seconds for seconds in ends]


def run(args: argparse.Namespace, clock: Callable[[], float]) -> None:
    """Measure as ``host_time.py`` was asked to."""
    dtype, chip = getattr(mx, args.dtype), args.cuda_on_cpu
    scans = Scans(args.new_scans, args.rows, args.scans, dtype)
    print(f"{chip or devices.current().name}: {args.new_scans}, {args.dtype}")
    with answered(chip, scans) if chip else nullcontext() as answers:
        report(scans, answers, clock, 45 if args.profile else 0)
