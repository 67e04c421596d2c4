"""The commands, a file each; and their progress bars."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import mlx.core as mx
import mlx.nn

from ..distribution import install
from ..routes import launch


def bar(total: int, name: str | None = None, unit: str = "step", **options: Any) -> Any:
    """Return a tqdm bar, redrawn often on a terminal and seldom in a log file."""
    try:
        from tqdm import tqdm
    except ImportError as error:
        raise ImportError(f"a progress bar needs tqdm; {install('demo')}") from error
    interval = 0.1 if sys.stderr.isatty() else 20
    return tqdm(total=total, desc=name, unit=unit, mininterval=interval, **options)


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
