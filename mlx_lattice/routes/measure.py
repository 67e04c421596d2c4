"""Measured choices: routes are timed and checked once for each key, kept on disk."""

from __future__ import annotations

import math
import time
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path

import mlx.core as mx

from .. import kept_files, settings
from ..devices import Device
from ..problem import INPUT_GRAD, Problem
from ..settings import FLOAT32
from .choice import Route, Times

# Raise it when a key or a compiled kernel changes: older files are then ignored.
VERSION = 1
FLOOR = "gather_gemm_scatter"


@contextmanager
def tune(on: bool = True) -> Iterator[None]:
    """Choose routes by measurement inside the block, instead of by the table.

    The first time that a (device, pass, dtype, kernel volume, channels, log2 rows)
    key comes up, every route that can run it is timed on random features over the
    call's own relation, and checked against the floor route: one that does not agree
    cannot win. Results are kept in the cache folder. The environment variable
    MLX_LATTICE_TUNE=1 does the same for a whole process.

    Args:
        on: False disables measurement inside the block, whatever the environment.
    """
    with settings.block(tuned=on):
        yield


def enabled() -> bool:
    """Return whether a block or the environment asks for measured choices."""
    inside = settings.current().tuned
    if inside is not None:
        return inside
    return kept_files.is_set("MLX_LATTICE_TUNE")


def cache_file() -> Path:
    """Return the file that measured choices are kept in."""
    return kept_files.folder() / "routes.json"


def key(problem: Problem, device: Device) -> str:
    """Return the key of a measurement; similar problems share it."""
    p = problem
    rows = p.n_in if p.pass_ == INPUT_GRAD else p.n_out
    weight = f"int{p.bits}/{p.group_size}" if p.bits else "dense"
    if p.integer:
        weight += f" int8 by rows{p.integer.row_scales:d} to8{p.integer.writes_int8:d}"
    dtype = p.dtype if p.precision == FLOAT32 else f"{p.dtype}/{p.precision}"
    return (
        f"{device.name}/{device.cores} {p.pass_} {dtype} {weight} K{p.volume} "
        f"{p.c_in}->{p.c_out} groups{p.groups} rows2^{max(1, rows).bit_length() - 1}"
    )


def measured(problem: Problem, device: Device) -> Times:
    """Return the times of a problem's candidates; empty where none are known."""
    return _ranked(_file().load().get(key(problem, device), {}))


def record(
    problem: Problem,
    device: Device,
    routes: tuple[Route, ...],
    run: Callable[..., mx.array],
    inputs: tuple[mx.array, ...],
) -> bool:
    """Time a problem's routes of unknown times; return whether any was timed."""
    if len(routes) < 2 or not problem.n_in or not problem.n_out:
        return False
    name = key(problem, device)
    known = {*_file().load().get(name, {}), *_failed.get((cache_file(), name), ())}
    if known.issuperset(route.name for route in routes):
        return False
    trial = tuple(_random_like(a, seed) for seed, a in enumerate(inputs))
    plans = {route.name: route.plan(problem, device) for route in routes}
    reference = run(plans[FLOOR], *trial)
    times = {}
    for route, plan in plans.items():
        try:
            one = partial(run, plan, *trial)
            times[route] = _time(route, one, reference, plan.tolerance)
        except Exception as error:
            # For want of memory, perhaps: another process tries it again.
            _failed.setdefault((cache_file(), name), set()).add(route)
            warnings.warn(f"route {route} failed while tuned: {error}", stacklevel=2)
    _store(name, times)
    return True


def _store(name: str, times: dict[str, float | None]) -> None:
    settings.note_change()
    _file().add(name, times)


def relative_error(y: mx.array, reference: mx.array) -> tuple[float, int]:
    """Return the error relative to the reference's norm, and the worst row."""
    a, b = y.astype(mx.float32), reference.astype(mx.float32)
    same = (a == b) | ~(mx.isfinite(a) | mx.isfinite(b))
    a, b = mx.where(same, 0, a - b), mx.where(mx.isfinite(b), b, 0)
    if a.size == 0:
        return 0.0, 0
    rows = mx.square(a).reshape(a.shape[0], -1).sum(axis=1)
    # A row with NaN is the worst one.
    worst = mx.argmax(mx.where(mx.isnan(rows), math.inf, rows)).item()
    error, norm = mx.sqrt(rows.sum()).item(), mx.linalg.norm(b.flatten()).item()
    return (error / norm if norm else error), worst


def _random_like(a: mx.array, seed: int) -> mx.array:
    random = mx.random.key(seed)
    if mx.issubdtype(a.dtype, mx.floating):
        return mx.random.normal(a.shape, key=random).astype(a.dtype)
    most = 1 << (8 * a.dtype.size - 1)
    return mx.random.randint(0, most - 1, a.shape, dtype=a.dtype, key=random)


def _time(
    name: str, run: Callable, reference: mx.array, tolerance: float
) -> float | None:
    """Return a route's milliseconds; None where its result is wrong."""
    y = run()
    mx.eval(y)
    error, _ = relative_error(y, reference)
    if not error <= tolerance:
        warnings.warn(
            f"route {name} is off the floor route by {error:.1e} and cannot be chosen "
            "by tuning; please report it",
            stacklevel=2,
        )
        return None
    best, start = math.inf, time.perf_counter()
    for _ in range(10):
        before = time.perf_counter()
        mx.eval(run())
        after = time.perf_counter()
        best = min(best, after - before)
        if after - start > 0.1:
            break
    return round(1e3 * best, 6)


def _ranked(times: dict[str, float | None]) -> Times:
    return tuple(sorted(times.items(), key=lambda t: (t[1] is None, t[1] or 0.0, t[0])))


def _is_entry(entry: object) -> bool:
    return isinstance(entry, dict) and all(
        ms is None or (type(ms) in (int, float) and 0 <= ms < math.inf)
        for ms in entry.values()
    )


def _file() -> kept_files.EntryFile:
    header = {"version": VERSION, "mlx": mx.__version__}
    return kept_files.EntryFile(cache_file(), header, _is_entry)


# Routes that raised in this process, by the file and the key of the problem.
_failed: dict[tuple[Path, str], set[str]] = {}
