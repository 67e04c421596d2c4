"""The doctor's run: what it does, in which order, in how many seconds."""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial

import mlx.core as mx

from ... import devices
from ...backends import first_use
from ...devices import METAL, Device
from . import features, layers, machine, proofs, rates
from .clock import Budget
from .experiments import EXPERIMENTS, experiments
from .lab import Lab
from .proofs import Point
from .report import Report
from .timings import Built, Kept, KeptTiles, Row, Timer, built

SECONDS, QUICK_SECONDS = 300.0, 30.0
# Share of the whole that each part may take; what it leaves goes to those after it.
SHARES = {"rates": 0.06, "proofs": 0.32, "features": 0.1, "relations": 0.1}
LAST = 0.04  # for the tables and the page
BUILD_SECONDS, QUICK_BUILD_SECONDS = 1.0, 0.25

# Told what runs: (part, done, of how many, its name).
Watch = Callable[[str, int, int, str], None]


def _nobody(part: str, done: int, total: int, name: str) -> None:
    """Watch nothing."""


@dataclass
class Examination:
    """A run of the doctor.

    Attributes:
        quick: the short form: what matters most, the chosen routes alone.
        seconds: that it may take.
        watch: is told what runs.
        device: the profile that MLX runs on.
    """

    quick: bool = False
    seconds: float | None = None
    watch: Watch = _nobody
    device: Device | None = None

    def __post_init__(self):
        # Results are compared in float32: MLX's own matmuls must not round to TF32.
        os.environ["MLX_ENABLE_TF32"] = "0"
        self.device = self.device or on_here()
        if self.seconds is None:
            self.seconds = QUICK_SECONDS if self.quick else SECONDS
        self.budget = Budget(self.seconds * (1 - LAST))
        self._begun = time.perf_counter()
        facts = machine.facts(self.device)
        self.report = Report(facts, self.device, self.quick, self.seconds)
        self.kept: list[Kept | KeptTiles] = []
        self._points: list[Point] = []

    def __call__(self) -> Report:
        """Run every part; what does not fit into the seconds is left out."""
        if first_use.compiles():
            first_use.rehearse_geometry(3)  # in threads, while other things are done
        self._rates()
        self._proofs()
        self._features()
        self._layers()
        layers.forget()
        self._rest()
        return self.end()

    def experiment(self) -> Report:
        """Run the experiments in place of the proofs and layers."""
        self._rates()
        lab = Lab(self.device, self.report.machine["on_host"], self.budget)

        def told(at: int, title: str) -> None:
            self._tell("experiments", at, len(EXPERIMENTS), title)

        for found in experiments(lab, told):
            self.report.experiments.append(found)
        self.kept = lab.kept
        layers.forget()
        return self.end()

    def end(self) -> Report:
        """Return the report as finished."""
        self.report.unfinished = None
        self.report.machine["busy"] = self.report.machine["busy"] or machine.busy()
        self.report.seconds = time.perf_counter() - self._begun
        return self.report

    def _part(self, name: str) -> Budget:
        return self.budget.part(self.seconds * SHARES[name])

    def _tell(self, part: str, done: int, total: int, name: str) -> None:
        self.report.unfinished = f"{part}: {name}"
        self.report.seconds = time.perf_counter() - self._begun
        self.watch(part, done, total, name)

    def _rates(self) -> None:
        self._tell("rates", 0, 1, "matmuls and copies by MLX")
        self.report.rates = rates.rates(self.device, self._part("rates"))

    def _proofs(self) -> None:
        found = proofs.points(self.device)
        self._points, self.report.proofs = found, [None] * len(found)
        self._prove(range(len(found)), self._part("proofs"))

    def _prove(self, places: Sequence[int], budget: Budget) -> None:
        """Prove the kernels at some places of the list."""

        def named() -> Iterator[tuple[Point, Callable[[], None]]]:
            for at in places:
                point = self._points[at]
                p = point.problem
                name = f"{point.route} {p.pass_}, {p.dtype}, {p.c_in} to {p.c_out}"
                yield point, partial(self._tell, "proofs", at, len(self._points), name)

        for at, proof in zip(
            places, proofs.proofs(self.device, named(), budget), strict=True
        ):
            self.report.proofs[at] = proof

    def _rest(self) -> None:
        """Prove what was left out, in the time that the layers left."""
        missing = [at for at, proof in enumerate(self.report.proofs) if proof is None]
        self._prove(missing, self.budget)

    def _features(self) -> None:
        budget = self._part("features")
        for at, proof in enumerate(features.proofs(budget)):
            self.report.features.append(proof)
            name = proof.kernel if proof else "no time"
            self._tell("relations and norms", at, len(features.CHECKS), name)

    def _layers(self) -> None:
        found = layers.chosen(self.quick, self.report.machine["on_host"])
        memory = self.report.machine["memory_gb"]
        memory = memory and memory * 2**30
        timer = Timer(self.device, memory, self.quick)
        self._relations(found[1])
        self._tell("layers", 0, len(found[0]), "kernels")
        # The others are compiled as they come.
        timer.prepare([la for la in found[0] if la.quick], self.budget)
        for at, layer in enumerate(found[0]):
            self._tell("layers", at, len(found[0]), str(layer))
            for row in timer.time(layer, self.budget):
                kind = self.report.layers if isinstance(row, Row) else None
                (self.report.skipped if kind is None else kind).append(row)
            mx.clear_cache()
        self.kept = timer.kept

    def _relations(self, found: Sequence[layers.Build]) -> None:
        budget = self._part("relations")
        seconds = QUICK_BUILD_SECONDS if self.quick else BUILD_SECONDS
        for at, build in enumerate(found):
            self._tell("relations", at, len(found), str(build))
            row = built(build, budget, seconds)
            if isinstance(row, Built):
                self.report.relations.append(row)
            else:
                self.report.skipped.append(row)

    def keep(self) -> int:
        """Keep what was timed as this machine's tuning; return how many problems.

        Raises:
            ValueError: the times are those of metal/host, which mean nothing, or of a
                busy machine.
        """
        if self.report.machine["on_host"]:
            raise ValueError("times of metal/host mean nothing; they are not kept")
        if busy := self.report.machine["busy"]:
            raise ValueError(f"times of a busy machine are not kept: {busy}")
        for found in self.kept:
            found.keep(self.device)
        return len({found.problem for found in self.kept})


def on_here() -> Device:
    """Return the profile that MLX runs on; on metal/host with neural accelerators."""
    device = devices.current()
    if device.backend == METAL and devices.metal_on_host():
        return replace(device, neural_accelerators=True)
    return device
