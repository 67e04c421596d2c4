"""summary(): the layers of a net with parameters, their weights' shapes and sizes."""

from __future__ import annotations

from dataclasses import dataclass

import mlx.core as mx
import mlx.nn
from mlx.utils import tree_flatten

from ..scene import html_table
from .explain import size
from .trace import drawn

COLUMNS = ("layer", "kind", "weight", "parameters", "size")


@dataclass(frozen=True)
class Layer:
    """One layer of a summary.

    Attributes:
        path: its path in the net, or the class of a net that is one layer.
        kind: its class.
        shape: the shape of its weight, or of its first parameter.
        parameters: the number of values.
        nbytes: their bytes.
    """

    path: str
    kind: str
    shape: tuple[int, ...]
    parameters: int
    nbytes: int

    @property
    def cells(self) -> list[str]:
        """The row of the table."""
        shape = " x ".join(map(str, self.shape))
        counts = f"{self.parameters:,}", size(self.nbytes)
        return [self.path, self.kind, shape, *counts]


@dataclass(frozen=True, repr=False)
class Summary:
    """The layers of a net that have parameters. Prints as a table.

    Attributes:
        net: the class of the net.
        layers: one for each layer with parameters of its own, in the net's order.
        parameters: the number of values in the whole net.
        trainable: how many of them are trained; running statistics are not.
        nbytes: the bytes of the whole net.
    """

    net: str
    layers: tuple[Layer, ...]
    parameters: int
    trainable: int
    nbytes: int

    @property
    def title(self) -> str:
        """One line about the whole net."""
        return (
            f"{self.net}: {len(self.layers)} layers, {self.parameters:,} parameters "
            f"({self.trainable:,} trainable), {size(self.nbytes)}"
        )

    def __str__(self) -> str:
        columns = [(n, "right" if n in COLUMNS[3:] else "left") for n in COLUMNS]
        return f"{drawn(columns, [each.cells for each in self.layers])}\n{self.title}"

    __repr__ = __str__

    def _repr_html_(self) -> str:
        return html_table(self.title, COLUMNS, [each.cells for each in self.layers])


def summary(net: mlx.nn.Module) -> Summary:
    """List the layers of a net that have parameters, with their shapes and sizes.

    The net is not run: ``ml.trace`` lists the rows, routes and times of a call.

    Args:
        net: any module of MLX.

    Returns:
        A ``Summary``, which prints as a table and which notebooks show as one. A
        module that two layers share is listed once. Packed weights count the values
        that are stored.

    Raises:
        TypeError: ``net`` is not a module.

    Examples:
        >>> net = nn.Sequential(nn.SubmConv3d(3, 16, 3), nn.BatchNorm(16), nn.ReLU())
        >>> print(ml.summary(net).title)
        Sequential: 2 layers, 1,376 parameters (1,344 trainable), 5.5 kB
    """
    if not isinstance(net, mlx.nn.Module):
        raise TypeError(f"net must be a module; got {type(net).__name__}")
    seen: set[int] = set()
    layers = []
    for path, module in reversed(net.named_modules()):  # MLX begins with the last
        own = {
            name: value
            for name, value in module.items()
            if isinstance(value, mx.array) and not name.startswith("_")
        }
        if own and id(module) not in seen:
            seen.add(id(module))
            arrays, kind = [*own.values()], type(module).__name__
            shape = tuple(own.get("weight", arrays[0]).shape)
            counts = sum(a.size for a in arrays), sum(a.nbytes for a in arrays)
            layers.append(Layer(path or kind, kind, shape, *counts))
    every = [a for _, a in tree_flatten(net.parameters())]
    trained = [a for _, a in tree_flatten(net.trainable_parameters())]
    return Summary(
        type(net).__name__,
        tuple(layers),
        sum(a.size for a in every),
        sum(a.size for a in trained),
        sum(a.nbytes for a in every),
    )
