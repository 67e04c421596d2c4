"""Where the suites run: every backend that this machine has, with its own checks.

A suite hands a place a call; the place returns what came of it, by variant. The results
of one variant must have the same bits: they are of several thread counts on the CPU, of
several orders of threads on Metal's emulator, of two calls elsewhere.
"""

import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from unittest.mock import patch

import mlx.core as mx
from conftest import bits
from metal_checks import arrays_of, checked

import mlx_lattice as ml
from metal import host
from mlx_lattice import backends, devices, settings
from mlx_lattice.backends.metal import tiles as metal_thresholds

Results = dict[str, list]
FLOATS = (mx.float32, mx.float16, mx.bfloat16)


def evaluated(call: Callable):
    """What a call returns, computed."""
    values = call()
    mx.eval(arrays_of(values))
    return values


@contextmanager
def planning_for(device: devices.Device) -> Iterator[None]:
    """A block in which the library plans for a device, and runs no plan of another."""
    with patch.object(devices, "current", lambda: device):
        settings.note_change()
        try:
            yield
        finally:
            settings.note_change()


class Place:
    """The device that MLX runs on, by a backend's own kernels.

    Attributes:
        name: of the backend, as test ids have it.
        chips: stand-ins for the device that is planned for: "" as it is, "whole" never
            cuts sums into splits, "split" cuts even short ones; or a profile.
    """

    name: str
    chips: tuple[str, ...] = ("",)

    @contextmanager
    def inside(self, chip: str = "") -> Iterator[None]:
        """A block in which the library runs here."""
        yield

    def runs(self, route, pass_: str) -> bool:
        """Whether a row's pass is worth a test here, of what the table allows."""
        return True

    def run(self, call: Callable, steady: bool = True, chip: str = "") -> Results:
        """Return the results of a call by variant.

        Args:
            call: returns arrays.
            steady: whether the bits may not depend on the order of threads.
            chip: one of ``chips``.
        """
        with self.inside(chip):
            return {"": [evaluated(call) for _ in range(1 + steady)]}


class Cuda(Place):
    name = "cuda"
    # Few rows are split for many processors, not for one; what older GPUs run.
    chips = ("", "whole", "a100")

    @contextmanager
    def inside(self, chip=""):
        device = devices.current()
        if chip == "whole":
            device = replace(device, name=f"{device.name}-1", cores=1)
        elif chip:
            device = devices.PROFILES[chip]
        with planning_for(device):
            yield


class MlxOperations(Place):
    """Compiled kernels are left out."""

    name = "mlx"

    @contextmanager
    def inside(self, chip=""):
        with backends.portable_only():
            yield


class Cpu(Place):
    """The extension, by every instruction set that this processor has."""

    name = "cpu"
    threads = (1, 3)

    @contextmanager
    def inside(self, chip=""):
        before, isa = mx.default_device(), devices.extension.isa()
        mx.set_default_device(mx.cpu)
        try:
            yield
        finally:
            mx.set_default_device(before)
            devices.extension.set_isa(isa)
            devices.extension.set_num_threads(0)

    @property
    def isas(self) -> list[str]:
        import native  # the extension may be absent

        return native.runnable()

    def run(self, call, steady=True, chip=""):
        results: Results = {}
        with self.inside():
            for isa in self.isas:
                devices.extension.set_isa(isa)
                for threads in self.threads:
                    devices.extension.set_num_threads(threads)
                    results.setdefault(isa, []).append(evaluated(call))
        return results


def leave_the_host() -> None:
    """Give MLX its own metal_kernel back, which other tests look at."""
    if os.environ.get("MLX_LATTICE_METAL") != "host":
        host.uninstall()
        devices.install_host.cache_clear()


class MetalHost(Place):
    """Metal's kernels on the CPU with every check, as a chip that has all there is.

    Those that begin with "older" have no neural accelerators.
    """

    name = "metal"
    chips = ("", "whole", "split")
    # Threadgroups that fill a chip, and edges that are worth a partial sum.
    filling, split_edges = {"whole": 1, "split": 24}, {"whole": 1 << 20, "split": 2}
    # Simdgroups of TensorOps that fill a core: "whole" has the highest, "split" lowest.
    tensor_filling = {"whole": 0, "split": 12}
    # Threadgroups of a weight gradient that fill a core.
    grad_filling = {"whole": 0, "split": 3}

    @contextmanager
    def inside(self, chip=""):
        accelerated, chip = "older" not in chip, chip.removeprefix("older ")
        device = replace(devices._METAL_HOST, neural_accelerators=accelerated)
        if chip:
            device = replace(device, name=f"metal-host-{chip}", family=chip)
        with (
            patch.dict(metal_thresholds.GRAD_FILLING, self.grad_filling),
            patch.dict(metal_thresholds.FILLING, self.filling),
            patch.dict(metal_thresholds.TENSOR_FILLING, self.tensor_filling),
            # Whatever partial sums take.
            patch.dict(metal_thresholds.PARTIAL_ITEM, {"split": 0}),
            patch.dict(metal_thresholds.SPLIT_WAIT, {"split": 0.0}),
            patch.dict(metal_thresholds.SPLIT_EDGES, self.split_edges),
            planning_for(device),
            ml.metal("host"),
        ):
            devices.install_host()  # not first in a recording, which would undo it
            try:
                yield
            finally:
                leave_the_host()

    def runs(self, route, pass_):
        # MLX operations would be those of MLX's CPU backend.
        return route.code(devices.METAL, pass_) == "Metal"

    def run(self, call, steady=True, chip=""):
        results = []

        def keep():
            results.append(call())
            return results[-1]

        with self.inside(chip):
            orders = ("random", "reverse")[: 1 + steady]
            checked(keep, orders=orders, deterministic=False)
        return {"": results}


class MetalDevice(Place):
    name = "metal"


def _here() -> tuple[Place, ...]:
    places: list[Place] = [MlxOperations()]
    on_host = devices.metal_on_host()
    if mx.cuda.is_available():
        return *places, Cuda()
    if devices.extension is not None and not on_host:
        places.append(Cpu())
    if mx.metal.is_available() and not on_host:
        places.append(MetalDevice())
    elif host.missing() is None:
        places.append(MetalHost())
    return tuple(places)


HERE = _here()


def agreed(place: Place, function: Callable, *arguments, steady: bool = True):
    """Return what a call gives in a place: the same in every variant, but rounded."""
    found = place.run(lambda: function(*arguments), steady)
    first = arrays_of(next(iter(found.values()))[0])
    for results in found.values():
        head, *others = (arrays_of(result) for result in results)
        for other in others:
            assert list(map(bits, other)) == list(map(bits, head))
        for got, wanted in zip(head, first, strict=True):
            assert got.dtype == wanted.dtype
            if got.dtype in FLOATS:
                assert mx.allclose(got, wanted, 1e-2, 1e-2, equal_nan=True).item()
            else:
                assert mx.array_equal(got, wanted).item()
    return next(iter(found.values()))[0]
