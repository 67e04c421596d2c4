"""backend_info(): what can run here, and what to install where it cannot."""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass

import mlx.core as mx

from .. import devices
from ..backends.availability import absence
from ..devices import CPU, CUDA, METAL, Device, metal_on_host
from ..distribution import __version__
from ..routes import measure, proof_results, selection

VARIABLES = (
    "MLX_LATTICE_ROUTE",
    "MLX_LATTICE_METAL",
    "MLX_LATTICE_TUNE",
    "MLX_LATTICE_PRECISION",
    "MLX_LATTICE_PROOF",
    "MLX_LATTICE_CACHE",
    "MLX_LATTICE_CUDA_CACHE",
    "MLX_LATTICE_THREADS",
    "MLX_LATTICE_CPU_ISA",
)


@dataclass(frozen=True)
class BackendInfo:
    """The state of the library on this machine. Prints as a list.

    Attributes:
        version: of the library.
        mlx: version of MLX.
        device: the profile in use.
        backends: for each backend, whether its kernels can run here, and a sentence.
        routes: routes that can be selected on the device, by pass.
        cache: file of measured choices.
        tuning: whether routes are chosen by measurement now.
        proving: whether matrix kernels prove themselves before their first launch.
        kernels: (name, why it is refused or None) of those that did on this machine,
            refused ones first.
        forced: routes that a block or the environment forces, by pass.
        environment: the library's variables that are set.
    """

    version: str
    mlx: str
    device: Device
    backends: Mapping[str, tuple[bool, str]]
    routes: Mapping[str, tuple[str, ...]]
    cache: str
    tuning: bool
    proving: bool
    kernels: tuple[tuple[str, str | None], ...]
    forced: Mapping[str, str]
    environment: Mapping[str, str]

    def __str__(self) -> str:
        """Return the list as a person reads it."""
        device = self.device
        rates = "estimated" if device.estimated else "measured"
        lines = [
            ("mlx_lattice", self.version),
            ("MLX", self.mlx),
            (
                "device",
                f"{device.name} ({device.backend}): {device.tflops:.3g} TFLOP/s "
                f"float32, {device.half_tflops:.3g} half, {device.bandwidth:,.0f} GB/s "
                f"({rates})",
            ),
        ]
        for name, (there, text) in self.backends.items():
            lines.append((name, ("available: " if there else "not available: ") + text))
        for pass_, names in self.routes.items():
            lines.append((pass_, ", ".join(names) or "no route can run"))
        lines.append(("cache", self.cache))
        lines.append(("tuning", "on" if self.tuning else "off"))
        lines.append(("proof", self._proof()))
        lines += [("refused", f"{name}: {why}") for name, why in self.kernels if why]
        forced = ", ".join(f"{p}={r}" for p, r in self.forced.items())
        lines.append(("forced", forced or "none"))
        variables = ", ".join(f"{k}={v}" for k, v in self.environment.items())
        lines.append(("environment", variables or "none set"))
        return "\n".join(f"{name:<12} {text}" for name, text in lines)

    __repr__ = __str__

    def _proof(self) -> str:
        refused = sum(why is not None for _, why in self.kernels)
        right = len(self.kernels) - refused
        found = f"{right} matrix kernels are right here, {refused} refused"
        if self.proving:
            return found if self.kernels else "no matrix kernel was launched here yet"
        return "off: matrix kernels run unproved" + f" ({found})" * bool(self.kernels)


def backend_info() -> BackendInfo:
    """Return MLX's version, the device, its kernels, and the settings that apply."""
    device = devices.current()
    states = {backend: _state(backend) for backend in (METAL, CUDA, CPU)}
    # Where Metal was asked for on a CPU that can't run it, every call raises.
    runs = not metal_on_host() or states[METAL][0]
    return BackendInfo(
        version=__version__,
        mlx=mx.__version__,
        device=device,
        backends={
            "portable": (True, "routes in MLX operations, on every backend"),
            **states,
        },
        routes={
            pass_: tuple(
                route.name
                for route in selection.TABLE
                if runs and pass_ in route.passes and route.code(device.backend, pass_)
            )
            for pass_ in selection.PASSES
        },
        cache=str(measure.cache_file()),
        tuning=measure.enabled(),
        proving=proof_results.enabled(),
        kernels=proof_results.current().kernels,
        forced={
            pass_: name
            for pass_ in selection.PASSES
            if (name := selection.forced_route(pass_)) is not None
        },
        environment={k: os.environ[k] for k in VARIABLES if os.environ.get(k)},
    )


def _written(backend: str) -> str:
    """Say which routes have kernels of their own on a backend."""
    own = [
        route.name
        for route in selection.TABLE
        if any(route.planner(backend, pass_) for pass_ in route.passes)
    ]
    return ", ".join(own) if own else "no kernels of its own yet; portable routes run"


def _state(backend: str) -> tuple[bool, str]:
    """Return whether a backend's kernels run here, and which, or why not."""
    if why := absence(backend):
        return False, why
    where = "on the CPU, for tests: " if backend == METAL and metal_on_host() else ""
    return True, where + _written(backend)
