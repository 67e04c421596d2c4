"""``mlx-lattice doctor``: its progress, its files, and the time it may not exceed."""

from __future__ import annotations

import os
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from ...atomic_write import atomic_write
from ...output_places import check_writable
from . import report_page
from .examine import Examination, Watch
from .report import Report

# Seconds beyond those allowed after which a kernel that hangs is given up.
GRACE = 0.2
SAVE_SECONDS = 1.0
HUNG = 3  # exit code


def run(
    folder: Path,
    *,
    quick: bool = False,
    seconds: float | None = None,
    keep: bool = False,
    experiments: bool = False,
) -> int:
    """Run the doctor, print its tables and write its files.

    ``doctor.json`` is written while it runs, so that it names what crashed.

    Args:
        folder: of ``doctor.json`` and ``doctor.html``.
        quick: the short form.
        seconds: that it may take, by default 300, or 30.
        keep: whether times are kept as this machine's tuning.
        experiments: whether the experiments run, in place of the layers.

    Returns:
        0, or 1 where something is wrong.

    Raises:
        OSError: the files cannot be written.
    """
    path = folder / "doctor.json"
    check_writable(path, folder / "doctor.html")
    folder.mkdir(parents=True, exist_ok=True)
    with progress() as watch:
        examination = Examination(quick, seconds)
        examination.watch = _saving(watch, examination, path)
        with given_up(examination, path):
            report = examination.experiment() if experiments else examination()
    report.save(path)
    print(report)
    print(f"\nwritten: {path}{_page(report, folder / 'doctor.html')}")
    if keep:
        count = examination.keep()
        print(f"kept as this machine's tuning: {count} problems (used by ml.tune())")
    return 1 if report.wrong else 0


def _page(report: Report, path: Path) -> str:
    try:
        page = report_page.page(report.as_dict())
    except ImportError as error:
        return f" (no page: {error})"
    with atomic_write(path) as draft:
        draft.write_text(page, encoding="utf-8")
    return f", {path}"


def _saving(watch: Watch, examination: Examination, path: Path) -> Watch:
    """Return a watch that also writes the report, at most once a second."""
    last = -SAVE_SECONDS

    def told(part: str, done: int, total: int, name: str) -> None:
        nonlocal last
        watch(part, done, total, name)
        if time.perf_counter() - last > SAVE_SECONDS:
            examination.report.save(path)
            last = time.perf_counter()

    return told


@contextmanager
def given_up(
    examination: Examination, path: Path, leave=os._exit, grace: float = GRACE
) -> Iterator[None]:
    """End the process where what runs in the block takes far too long.

    A kernel that hangs cannot be stopped; the report says which one it was.

    Args:
        examination: whose seconds count.
        path: of the report.
        leave: ends the process, with an exit code.
        grace: share of the seconds that are granted beyond them.
    """

    def stop() -> None:
        report = examination.report
        report.save(path)
        print(
            f"mlx-lattice doctor: given up after {grace:.0%} more than "
            f"{examination.seconds:.0f} s in {report.unfinished}; {path} has what was "
            "found until then",
            file=sys.stderr,
            flush=True,
        )
        leave(HUNG)

    timer = threading.Timer(examination.seconds * (1 + grace), stop)
    timer.daemon = True
    timer.start()
    try:
        yield
    finally:
        timer.cancel()


@contextmanager
def progress() -> Iterator[Watch]:
    """Yield what shows progress on a terminal: a bar by rich, or a line a part."""
    try:
        from rich.console import Console
        from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn
    except ImportError:
        yield _lines()
        return
    console = Console(stderr=True)
    if not console.is_terminal:
        yield _lines()
        return
    columns = (
        TextColumn("{task.fields[part]:<20}"),
        BarColumn(bar_width=28),
        TimeElapsedColumn(),
        TextColumn("{task.fields[name]}", markup=False),
    )
    with Progress(*columns, console=console, transient=True) as bar:
        task = bar.add_task("", total=1, part="", name="")

        def told(part: str, done: int, total: int, name: str) -> None:
            bar.update(task, completed=done, total=total, part=part, name=name)

        yield told


def _lines() -> Watch:
    seen: set[str] = set()

    def told(part: str, done: int, total: int, name: str) -> None:
        if part not in seen:
            seen.add(part)
            print(f"{part}: {total}", file=sys.stderr, flush=True)

    return told
