"""The commands, a file each; their results, errors, notes and progress bars."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, NamedTuple

import mlx.core as mx
import mlx.nn

from ..io.safetensors import FileError
from ..routes import launch

log: logging.Logger = logging.getLogger("mlx_lattice")


class Result(NamedTuple):
    """The result of a command, which goes to stdout."""

    text: str
    document: Any  # what --json prints in place of the text
    code: int = 0


class UsageError(ValueError):
    """Options that do not fit: the command ends with exit code 2."""


@contextmanager
def usage() -> Iterator[None]:
    """Raise a ValueError of the block as a UsageError, unless a file caused it."""
    try:
        yield
    except (FileError, UsageError):
        raise
    except ValueError as error:
        raise UsageError(str(error)) from error


class _NoBar:
    """Stands in for a bar if tqdm is missing."""

    def __enter__(self) -> _NoBar:
        return self

    def __exit__(self, *_) -> None:
        pass

    def __getattr__(self, name: str) -> Callable[..., None]:
        return lambda *_, **__: None


def bar(
    total: int | None, name: str | None = None, unit: str = "step", **more: Any
) -> Any:
    """Return a tqdm bar; silent without tqdm, without a terminal, and if quiet."""
    try:
        from tqdm.auto import tqdm
    except ImportError:
        return _NoBar()
    silent = None if log.isEnabledFor(logging.INFO) else True  # None: by the terminal
    more.setdefault("disable", silent)
    return tqdm(total=total, desc=name, unit=unit, **more)


@contextmanager
def progress(net: mlx.nn.Module, name: str | None = None) -> Iterator[None]:
    """Show a bar of a net's layers inside the block; each is evaluated as it comes."""
    total = sum(hasattr(m, "to_quantized") for _, m in net.named_modules())
    seen: set[int] = set()
    with bar(total, name, "layer") as shown:

        def evaluate(launched: launch.Launch) -> None:
            mx.eval(launched.result)
            # In blocks a layer is launched more than once.
            if launched.scope is None or id(launched.scope) not in seen:
                seen.add(id(launched.scope))
                shown.update()

        with launch.observe(evaluate):
            yield


@contextmanager
def stages() -> Iterator[Callable[[str, int, int], None]]:
    """Show a bar for each stage; yield the function that counts its steps."""
    shown: list[Any] = []

    def step(stage: str, done: int, steps: int) -> None:
        if not shown or done == 1:
            for last in shown:
                last.close()
            shown[:] = [bar(steps, stage)]
        shown[0].update()

    try:
        yield step
    finally:
        for last in shown:
            last.close()
