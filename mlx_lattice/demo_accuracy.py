"""What the demo's nets score in float, with packed weights and in integers."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import NamedTuple

import mlx.core as mx
import mlx.nn
from mlx.utils import tree_flatten

from .nn.calibrate import calibrate

GROUP = 32  # input channels that share a scale, where weights have groups
# Bits of weights and of features, by name.
SCHEMES = {
    "float32": (None, None),
    "int8 weights": (8, None),
    "int4 weights": (4, None),
    "W8A8": (8, 8),
    "W4A8": (4, 8),
}
# Points below float that a scheme may lose; tests hold them.
MOST_LOST = {"int8 weights": 0.3, "int4 weights": 1.5, "W8A8": 0.5, "W4A8": 1.5}


class Score(NamedTuple):
    """Share of what is right, and bytes of the parameters."""

    right: float
    bytes: int


def scores(
    net: mlx.nn.Module, batches: list, right: Callable[[mlx.nn.Module], float]
) -> dict[str, Score]:
    """Score a trained net in every scheme.

    Args:
        net: in float.
        batches: what it is calibrated on.
        right: returns the share of what a net gets right.
    """
    found = {}
    for name, (bits, activations) in SCHEMES.items():
        made = net
        if bits is not None:
            size = None if (bits, activations) == (8, 8) else GROUP
            made, _ = calibrate(net, batches, bits, size, activations=activations)
        found[name] = Score(right(made), _bytes(made))
    return found


def table(tasks: Mapping[str, Mapping[str, Score]]) -> str:
    """Return a row a scheme: right and size, of each task."""
    width = max(map(len, SCHEMES))
    lines = [" " * width + "".join(f"{task:>24}" for task in tasks)]
    for name in SCHEMES:
        cells = (
            f"{found[name].right:>14.2%}, {found[name].bytes / 1000:>4,.0f} kB"
            for found in tasks.values()
        )
        lines.append(f"{name:<{width}}{''.join(cells)}")
    return "\n".join(lines)


def _bytes(net: mlx.nn.Module) -> int:
    arrays: list[tuple[str, mx.array]] = tree_flatten(net.parameters())
    return sum(array.nbytes for _, array in arrays)
