"""A bar of a net's layers, as they are evaluated."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import contextmanager

import mlx.core as mx
import mlx.nn

from ..routes import launch


@contextmanager
def progress(net: mlx.nn.Module, name: str | None = None) -> Iterator[None]:
    """Show a bar of the layers inside the block; each is evaluated as it comes.

    Args:
        net: its layers with weights are counted.
        name: shown before the bar.
    """
    from tqdm import tqdm

    total = sum(hasattr(m, "to_quantized") for _, m in net.named_modules())
    # Redraw the bar often on a terminal, seldom in a log file.
    interval = 0.1 if sys.stderr.isatty() else 20
    with tqdm(total=total, desc=name, unit="layer", mininterval=interval) as bar:

        def evaluate(launched: launch.Launch) -> None:
            mx.eval(launched.result)
            # In blocks a layer is launched more than once.
            if launched.scope is None or id(launched.scope) not in seen:
                seen.add(id(launched.scope))
                bar.update()

        seen: set[int] = set()

        with launch.observe(evaluate):
            yield
