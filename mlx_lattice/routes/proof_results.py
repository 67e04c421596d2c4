"""Results of the proofs of this machine's matrix kernels, kept on disk."""

from __future__ import annotations

import ctypes
import hashlib
import json
import os
import platform
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from functools import cache
from pathlib import Path

import mlx.core as mx

from .. import devices, kept_files, settings
from ..backends.gpu.kernel import SHORT, GpuKernel
from ..devices import CPU, CUDA, METAL, Device
from ..plan import IN_KERNEL, Plan
from ..problem import FORWARD

# Raise it when the proof becomes stricter: earlier results are then ignored.
VERSION = 2

VARIABLE = "MLX_LATTICE_PROOF"


@contextmanager
def proof(on: bool = True) -> Iterator[None]:
    """Have matrix kernels prove themselves inside the block, or, with False, not.

    A kernel that multiplies by matrix instructions computes one small problem before
    its first launch on this chip, build of the system, MLX and text of the kernel, and
    is compared with the floor route. One that gives another result, raises or does not
    compile is refused by ``select`` from then on, with a warning, and the next row of
    the table serves. What was found is kept in the cache folder.

    The environment variable MLX_LATTICE_PROOF=0 is ``proof(False)`` for a whole
    process: kernels run unproved, those that were refused too.
    """
    with settings.block(proved=on):
        yield


def enabled() -> bool:
    """Return whether kernels prove themselves here."""
    inside = settings.current().proved
    return kept_files.is_set(VARIABLE, default=True) if inside is None else inside


class Results:
    """The results of the kernels of one machine.

    Args:
        path: of the file that keeps them.
        where: the machine, in words.
    """

    def __init__(self, path: Path, where: str):
        self.path, self.where = path, where
        header = {"version": VERSION, "machine": where}
        self._file = kept_files.EntryFile(path, header, _is_entry)
        # By key: the kernel's name, and why it is refused or None.
        self._found = self._file.load()
        # Why kernels are refused, by digest; choices keep the object that they read.
        self.refused: dict[str, str] = {}
        self._update()

    def _update(self) -> None:
        refused = {
            key.partition(" ")[0]: why for key, (_, why) in self._found.items() if why
        }
        if self.refused != refused:
            self.refused = refused
            settings.note_change()

    def knows(self, plan: Plan, biased: bool) -> bool:
        """Return whether the kernel of a plan was tried before, with these inputs."""
        return key_of(plan, biased) in self._found

    def add(self, plan: Plan, biased: bool, why: str | None) -> None:
        """Keep why the kernel of a plan is refused; None if it is right."""
        key = key_of(plan, biased)
        self._found = {**self._found, key: [kernel_name(plan.gpu), why]}
        self._update()
        self._file.add(key, self._found[key])

    @property
    def kernels(self) -> tuple[tuple[str, str | None], ...]:
        """(name, why it is refused or None) of each, refused ones first."""
        found = ((name, why) for name, why in self._found.values())
        return tuple(sorted(found, key=lambda each: (each[1] is None, each[0])))


def _is_entry(entry: object) -> bool:
    name, why = entry
    return isinstance(name, str) and isinstance(why, str | None)


def key_of(plan: Plan, biased: bool) -> str:
    """Return the key of a plan's kernel: its text, and which inputs it is given."""
    after = plan.problem.integer or plan.problem.epilogue
    given = ("bias",) if biased and after is None else ()
    if after is not None and plan.epilogue == IN_KERNEL:
        given = after.there
    if plan.splits > 1 or plan.problem.pass_ != FORWARD:
        given = ()  # the launch that adds the splits has them
    return " ".join([plan.gpu.digest, *given])


def kernel_name(kernel: GpuKernel) -> str:
    """Return a kernel as people read it: ``tensor_ops<f16, f16, 64, True>``."""
    values = (value for _, value in kernel.template)
    said = (SHORT.get(v, v) if isinstance(v, mx.Dtype) else v for v in values)
    return f"{kernel.symbol}<{', '.join(map(str, said))}>"


@cache
def machine_of(name: str, backend: str) -> str:
    """Return the chip, the build of its system or driver, and the version of MLX.

    The same kernel may give other results if any of them differs.
    """
    if devices.metal_on_host() or backend not in (METAL, CUDA):
        where = f"{name} on {platform.system()} {platform.machine()}"
    else:
        info = mx.device_info(devices.GPU)
        where = str(info.get("device_name", "")) or name
        if backend == CUDA:
            where += f", driver of CUDA {_driver()}"
        else:
            where += f" ({info.get('architecture', '')}), macOS build {_macos_build()}"
    return f"{where}, MLX {mx.__version__}"


def _macos_build() -> str:
    """Return the build of macOS ("25C56"): a version may have several builds."""
    try:
        library, size = ctypes.CDLL(None), ctypes.c_size_t(64)
        text = ctypes.create_string_buffer(size.value)
        failed = library.sysctlbyname(
            b"kern.osversion", text, ctypes.byref(size), None, ctypes.c_size_t(0)
        )
    except (OSError, AttributeError):
        failed = True
    # Darwin's own version changes with its kernel, not with every build.
    return platform.version() if failed else text.value.decode()


def _driver() -> str:
    """Return the version of CUDA that the driver has ("13.0")."""
    version = ctypes.c_int()
    try:
        failed = ctypes.CDLL("libcuda.so.1").cuDriverGetVersion(ctypes.byref(version))
    except (OSError, AttributeError):
        failed = True
    if failed:
        return "unknown"
    return f"{version.value // 1000}.{version.value % 1000 // 10}"


def current() -> Results:
    """Return the results on the machine that MLX runs on now."""
    return _results_on(devices.current())


def _results_on(device: Device) -> Results:
    folder = settings.current().cache, settings.environment["MLX_LATTICE_CACHE"]
    return _results(folder, device.name, device.backend)


@cache
def _results(folder: tuple, name: str, backend: str) -> Results:
    # `folder` is what `kept_files.folder` depends on; each plan asks for results.
    where = machine_of(name, backend)
    file = hashlib.sha256(where.encode()).hexdigest()[:12]
    return Results(kept_files.folder() / "proofs" / f"{file}.json", where)


def refused_on(device: Device) -> Mapping[str, str]:
    """Return why kernels are refused on a device, by digest: only here they are."""
    if device.backend == CPU or not enabled() or device != devices.current():
        return {}
    return _results_on(device).refused


def refusal(refused: Mapping[str, str], plan: Plan) -> str | None:
    """Return why the kernel of a plan is refused, or None."""
    return refused.get(plan.gpu.digest) if refused and plan.gpu else None


@contextmanager
def trying(results: Path, key: str) -> Iterator[int]:
    """Note on disk, inside the block, that this process tries a kernel.

    Yields how many processes ended while they tried it: a GPU's fault on Metal may end
    the process.
    """
    path = results.with_suffix(".trying.json")
    host, pid, ended = _tried(path).get(key, (platform.node(), None, 0))
    ended += pid is not None and host == platform.node() and not _runs(pid)
    _write(path, {**_tried(path), key: (platform.node(), os.getpid(), ended)})
    try:
        yield ended
    finally:
        _write(path, {k: v for k, v in _tried(path).items() if k != key})


def _runs(pid: int) -> bool:
    """Return whether a process of this machine runs."""
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    except OSError:
        pass  # another user's
    return True


def _tried(path: Path) -> dict[str, tuple[str, int | None, int]]:
    """Return (host, process, how many ended before) by key; none of a broken file."""
    try:
        held = json.loads(path.read_text())
        return {key: (str(h), int(pid), int(n)) for key, (h, pid, n) in held.items()}
    except (OSError, ValueError, TypeError, AttributeError):
        return {}


def _write(path: Path, tried: dict[str, tuple[str, int | None, int]]) -> None:
    """Write the file, or remove it if nothing is tried; the results' file warns."""
    with suppress(OSError):
        if tried:
            kept_files.write_whole(path, json.dumps(tried).encode())
        else:
            path.unlink(missing_ok=True)
