"""MLX's lazy graph: its nodes, which are views of which memory, who else holds them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from math import prod

import mlx.core as mx


@dataclass(slots=True)
class Node:
    """An array of the graph, lazy or evaluated.

    Attributes:
        primitive: name of what computes it; "" of an evaluated array.
        shape: its extents.
        itemsize: bytes of an element.
        inputs, siblings: places in the graph. Siblings are the other outputs of its
            primitive, in their order; ``position`` is its own place among them.
        known: how many of the inputs MLX knows. A ``Function`` of ``transformations``
            computes the others itself when MLX computes it, in their order.
        on_gpu: whether its primitive runs on a GPU stream.
        state: parameters of a view's primitive; of a ``Function``, which of its inputs
            its results are.
        data, data_bytes: identity and bytes of an evaluated array's buffer.
        layout: how an evaluated array lies in its buffer.
        layer: the layer that made it, where that is known.
        flops: operations of its contraction, where it is the result of one.
    """

    primitive: str
    shape: tuple[int, ...]
    itemsize: int
    inputs: tuple[int, ...]
    known: int
    siblings: tuple[int, ...]
    position: int
    on_gpu: bool
    state: tuple[int, ...]
    data: int
    data_bytes: int
    layout: Layout | None
    layer: str = ""
    flops: float = 0.0

    @property
    def is_lazy(self) -> bool:
        """Whether it was still to be computed when it was found."""
        return bool(self.primitive)

    @property
    def size(self) -> int:
        """Number of elements."""
        return prod(self.shape)

    @property
    def nbytes(self) -> int:
        """Bytes of its elements."""
        return self.size * self.itemsize


@dataclass(frozen=True, slots=True)
class Layout:
    """How an array lies in its buffer, as MLX describes it.

    Attributes:
        strides: elements from one place to the next, an axis each.
        span: elements of the buffer that it covers.
        dense: whether there are no gaps between them.
        rows, columns: whether they lie one after the other, the last axis fastest or
            the first.
    """

    strides: tuple[int, ...]
    span: int
    dense: bool
    rows: bool
    columns: bool


@dataclass(frozen=True)
class Holders:
    """Who holds what besides the graph: references by place."""

    arrays: Sequence[int]
    data: Sequence[int]


@dataclass
class Graph:
    """What some arrays read, in the order in which it was found.

    Args:
        extension: the compiled extension, whose Graph walks MLX's arrays.
    """

    extension: object
    nodes: list[Node] = field(default_factory=list)

    def __post_init__(self):
        self._native = self.extension.Graph()

    def add(self, arrays: Sequence[mx.array], layer: str = "") -> list[int]:
        """Find what arrays read and return their places. New nodes get the layer."""
        places = self._native.add(list(arrays))
        for at in range(len(self.nodes), len(self._native)):
            self.nodes.append(_node(self._native.node(at), layer))
        return places

    def holders(self) -> Holders:
        """Return who holds what now.

        What was lazy when it was found, and has been computed since, becomes an
        evaluated node.
        """
        found = self._native.holders()
        for at in found.evaluated:
            if self.nodes[at].is_lazy:
                self.nodes[at] = _node(self._native.node(at), self.nodes[at].layer)
        return Holders(found.arrays, found.data)


def _node(found, layer: str) -> Node:
    layout = None
    if found.evaluated:
        layout = Layout(
            tuple(found.strides),
            found.data_size,
            found.contiguous,
            found.row_contiguous,
            found.column_contiguous,
        )
    return Node(
        primitive=found.primitive.partition(" ")[0],  # "View int32"
        shape=tuple(found.shape),
        itemsize=found.itemsize,
        inputs=tuple(found.inputs),
        known=found.known,
        siblings=tuple(found.siblings),
        position=found.position,
        on_gpu=found.gpu,
        state=tuple(found.state),
        data=found.data,
        data_bytes=found.data_bytes,
        layout=layout,
        layer=layer,
    )
