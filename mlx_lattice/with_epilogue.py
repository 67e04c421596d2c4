"""A forward pass with an epilogue; its derivatives are those of the composed form."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Protocol
from weakref import ref

import mlx.core as mx

from .channel_kernels import column_sums
from .epilogue import EpilogueFacts, finished
from .problem import FORWARD
from .relation import Relation
from .routes import launch
from .transformations import Function, Rules, filled


class Layer(Protocol):
    """A layer of ``contraction``.

    Attributes:
        given: what it was made with, and can be made with again: its relation; facts;
            what observers are told that it is of.
    """

    given: tuple[Relation, tuple, object]

    @property
    def forward(self) -> Callable[..., mx.array]:
        """The pass without an epilogue, with its transformations."""


def with_epilogue(layer: Layer, epilogue: EpilogueFacts) -> Callable[..., mx.array]:
    """Return a layer's forward pass with an epilogue, and its transformations.

    What MLX holds of it does not hold the layer.
    """
    rules = _Composed(layer, epilogue)
    return Function(rules.launched, rules.launched.settled, rules)


class _Composed(Rules):
    """The pass and its rules: one object, since each layer of each scan has them."""

    __slots__ = "constants", "epilogue", "given", "kind", "launched", "layer"

    def __init__(self, layer: Layer, epilogue: EpilogueFacts):
        self.given, self.layer, self.kind = layer.given, ref(layer), type(layer)
        relation, facts, _ = layer.given
        self.launched = launch.Pass(FORWARD, relation, facts, epilogue)
        self.epilogue, packing = epilogue, facts[-2]
        self.constants = 0 if packing is None else 3  # packed arrays

    @property
    def own(self) -> int:
        """How many arrays are the layer's own."""
        return max(2, 1 + self.constants)

    def sums(self, *own: mx.array) -> mx.array:
        now = self.layer() or self.kind(*self.given)
        with launch.scope(self.given[2] or launch.current_scope()):
            return now.forward(*own)

    def composed(self, *arrays: mx.array) -> mx.array:
        after = self.epilogue.named(arrays[self.own :])
        return finished(self.sums(*arrays[: self.own]), self.epilogue, *after)

    def variables(self, arrays: Sequence) -> list:
        return [arrays[0], *arrays[1 + self.constants :]]

    def of_variables(self, primals: Sequence[mx.array]) -> Callable[..., mx.array]:
        packed = primals[1 : 1 + self.constants]
        return lambda x, *rest: self.composed(x, *packed, *rest)

    def of_sum(self, primals, dy) -> list[mx.array]:
        """Return the derivatives where arrays are added to the sums, and no more."""
        x, *weight = primals[: self.own]
        if self.constants:
            found = mx.vjp(lambda x: self.sums(x, *weight), [x], [dy])[1]
        else:
            found = mx.vjp(self.sums, [x, *weight], [dy])[1]
        shift, *_, residual = self.epilogue.named(primals[self.own :])
        if shift is not None:
            found.append(column_sums(dy, shift))
        return found if residual is None else [*found, dy]

    def vjp(self, primals, dy, _):
        if self.epilogue.is_sum:
            dx, *rest = self.of_sum(primals, dy)
            packed = primals[1 : 1 + self.constants]
            return dx, *[mx.zeros_like(a) for a in packed], *rest
        at, packed = self.variables(primals), primals[1 : 1 + self.constants]
        _, (dx, *rest) = mx.vjp(self.of_variables(primals), at, [dy])
        return dx, *[mx.zeros_like(a) for a in packed], *rest

    def jvp(self, primals, tangents):
        at = self.variables(primals)
        along = filled(at, self.variables(tangents))
        return mx.jvp(self.of_variables(primals), at, along)[1][0]

    def vmap(self, inputs, axes):
        return mx.vmap(self.composed, tuple(axes))(*inputs), 0
