"""What this machine's matrix kernels proved to be: right, or refused; kept on disk."""

from __future__ import annotations

import hashlib
import json
import warnings
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import cache
from pathlib import Path

import mlx.core as mx

from .. import devices, kept_files, machine, settings
from ..backends.gpu_kernel import SHORT, GpuKernel
from ..devices import CPU, Device
from ..problem import FORWARD
from .plan import IN_KERNEL, Plan

# Raise it when the proof becomes stricter: what was proved before is proved anew.
VERSION = 1

VARIABLE = "MLX_LATTICE_PROOF"

_folder_variable = settings.reader("MLX_LATTICE_CACHE")


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
    token = settings.proved.set(on)
    try:
        yield
    finally:
        settings.proved.reset(token)


def enabled() -> bool:
    """Return whether kernels prove themselves here."""
    inside = settings.proved.get()
    return kept_files.is_set(VARIABLE, default=True) if inside is None else inside


class Refused:
    """The kernels that are refused, and why; never changed, so that choices keep it."""

    def __init__(self, reasons: Mapping[str, str]):
        self.reasons = dict(reasons)

    def __bool__(self) -> bool:
        return bool(self.reasons)

    def reason(self, kernel: GpuKernel | None) -> str | None:
        """Return why a kernel is refused, whatever its inputs; None if it is not."""
        return None if kernel is None else self.reasons.get(kernel.digest)


NONE = Refused({})


class Results:
    """What the kernels of one machine proved to be.

    Args:
        path: of the file that keeps it.
        where: the machine, in words.
    """

    def __init__(self, path: Path, where: str):
        self.path, self.where = path, where
        # Why a kernel is refused, or None, by its key; and its name.
        self._found = _read(path, where)
        self._is_written, self.refused = True, NONE
        self._update()

    def _update(self) -> None:
        reasons = {
            k.partition(" ")[0]: why for k, (_, why) in self._found.items() if why
        }
        if self.refused.reasons != reasons:  # else one object: choices are kept by it
            self.refused = Refused(reasons)
            settings.findings.note()

    def knows(self, plan: Plan, biased: bool) -> bool:
        """Whether the kernel of a plan was tried before, with these inputs."""
        return key_of(plan, biased) in self._found

    def add(self, found: Sequence[tuple[Plan, bool, str | None]]) -> None:
        """Keep what kernels are: (plan, whether biased, why it is refused) of each."""
        for plan, biased, why in found:
            self._found[key_of(plan, biased)] = named(plan.gpu), why
        self._update()
        # What other processes found meanwhile stays in the file.
        try:
            with kept_files.alone():
                entries = {**_read(self.path, self.where), **self._found}
                held = {"version": VERSION, "machine": self.where, "kernels": entries}
                kept_files.write_whole(self.path, json.dumps(held, indent=1).encode())
        except OSError as error:
            if not self._is_written:
                return  # that was said
            self._is_written = False
            warnings.warn(
                f"what kernels proved to be cannot be kept in {self.path.parent} "
                f"({error.strerror or error}): the next process proves them again. Set "
                "MLX_LATTICE_CACHE to a folder",
                RuntimeWarning,
                stacklevel=2,
            )

    @property
    def kernels(self) -> tuple[tuple[str, str | None], ...]:
        """(name, why it is refused or None) of each, refused ones first."""
        found = ((name, why) for name, why in self._found.values())
        return tuple(sorted(found, key=lambda each: (each[1] is None, each[0])))


def key_of(plan: Plan, biased: bool) -> str:
    """Return the key of a plan's kernel: its text, and which inputs it is given."""
    return plan.once(_biased_key if biased else _bare_key)


def _biased_key(plan: Plan) -> str:
    return _bare_key(plan, ["bias"])


def _bare_key(plan: Plan, bias: Sequence[str] = ()) -> str:
    after = plan.problem.integer or plan.problem.epilogue
    given = bias if after is None else ()
    if after is not None and plan.epilogue == IN_KERNEL:
        given = after.there
    if plan.splits > 1 or plan.problem.pass_ != FORWARD:
        given = ()  # what adds the splits has them
    return " ".join([plan.gpu.digest, *given])


def named(kernel: GpuKernel) -> str:
    """Return a kernel as people read it: ``tensor_ops<f16, f16, 64, True>``."""
    values = (value for _, value in kernel.template)
    said = (SHORT.get(v, v) if isinstance(v, mx.Dtype) else v for v in values)
    return f"{kernel.symbol}<{', '.join(map(str, said))}>"


def current() -> Results:
    """Return what is known of the machine that MLX runs on now."""
    return _on(devices.current())


def here(device: Device) -> Results | None:
    """Return what is known of the device that MLX runs on, if kernels are proved there.

    A pass asks once, for what it refuses and for what it has to prove.
    """
    return None if device.backend == CPU or not enabled() else _on(device)


def _on(device: Device) -> Results:
    inside, variable = kept_files.cache_block(), _folder_variable()
    return _of(inside, variable, machine.described(device.name, device.backend))


@cache
def _of(inside: Path | None, variable: str | None, where: str) -> Results:
    del inside, variable  # they decide the folder
    name = hashlib.sha256(where.encode()).hexdigest()[:12]
    return Results(kept_files.folder() / "proofs" / f"{name}.json", where)


def refused_on(device: Device) -> Refused:
    """Return what is refused on a device: nothing but on this machine's own GPU."""
    if device.backend == CPU or not enabled() or device != devices.current():
        return NONE
    return _on(device).refused


def _read(path: Path, where: str) -> dict[str, tuple[str, str | None]]:
    """Return the entries of a file; none, with a warning, if it is unusable."""
    try:
        text = path.read_text()
    except OSError:
        return {}
    try:
        held = json.loads(text)
        if (held["version"], held["machine"]) != (VERSION, where):
            return {}
        entries = {key: (name, why) for key, (name, why) in held["kernels"].items()}
        if all(isinstance(why, str | None) for _, why in entries.values()):
            return entries
        raise ValueError("a reason is neither a sentence nor null")
    except kept_files.UNUSABLE as error:
        warnings.warn(
            f"{path} cannot be read ({error}): kernels prove themselves again, and it "
            "is written anew",
            RuntimeWarning,
            stacklevel=2,
        )
        return {}
