"""A forward pass with an epilogue; its derivatives are those of the composed form."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Protocol
from weakref import ref

import mlx.core as mx

from .channel_kernels import activation_gradient
from .epilogue import EpilogueFacts, finished
from .problem import FORWARD
from .relation import Relation
from .routes import launch
from .transformations import Function, Rules, filled


class Layer(Protocol):
    """A layer of ``contraction_layer``.

    Attributes:
        given: what it was made with, and can be made with again: its relation; facts;
            what observers are told that it is of.
    """

    given: tuple[Relation, tuple, object]

    @property
    def forward(self) -> Callable[..., mx.array]:
        """The pass without an epilogue, with its transformations."""

    def derivatives(self, pass_: str, primals, cotangent) -> Sequence[mx.array]:
        """Return those of a pass by all of its arguments."""


def with_epilogue(layer: Layer, epilogue: EpilogueFacts) -> Callable[..., mx.array]:
    """Return a layer's forward pass with an epilogue, and its transformations.

    What MLX holds of it does not hold the layer.
    """
    rules = _Composed(layer, epilogue)
    return Function(rules.launched, rules)


class _Composed(Rules):
    """The pass and its rules: one object, since each layer of each scan has them."""

    __slots__ = "constants", "epilogue", "given", "kind", "launched", "layer"

    def __init__(self, layer: Layer, epilogue: EpilogueFacts):
        self.given, self.layer, self.kind = layer.given, ref(layer), type(layer)
        relation, facts, _ = layer.given
        self.launched = launch.Pass(FORWARD, relation, facts, epilogue)
        self.epilogue, packing = epilogue, facts[-2]
        self.constants = 0 if packing is None else 3  # packed arrays

    def run(self, call: Callable):
        """Return what ``call`` of the layer does, told as the layer's."""
        now = self.layer() or self.kind(*self.given)
        with launch.scope(self.given[2] or launch.current_scope()):
            return call(now)

    def split(self, arrays: Sequence) -> tuple[Sequence, list]:
        """Return the layer's own arrays, and those of the epilogue in their places."""
        own = max(2, 1 + self.constants)
        return arrays[:own], self.epilogue.named(arrays[own:])

    def composed(self, *arrays: mx.array) -> mx.array:
        own, after = self.split(arrays)
        sums = self.run(lambda layer: layer.forward(*own))
        return finished(sums, self.epilogue, *after)

    def of_result(self, primals, dy, y) -> Sequence[mx.array]:
        """Return the derivatives where the result is enough for them."""
        if self.epilogue.activation:
            dy = activation_gradient(dy, y, self.epilogue.act)
        own, (shift, *_, residual) = self.split(primals)
        own = own if shift is None else (*own, shift)
        found = self.run(lambda layer: layer.derivatives(FORWARD, own, dy))
        return found if residual is None else (*found, dy)

    def variables(self, arrays: Sequence) -> list:
        return [arrays[0], *arrays[1 + self.constants :]]

    def of_variables(self, primals: Sequence[mx.array]) -> Callable[..., mx.array]:
        packed = primals[1 : 1 + self.constants]
        return lambda x, *rest: self.composed(x, *packed, *rest)

    def vjp(self, primals, dy, y):
        if self.epilogue.is_of_result:
            return self.of_result(primals, dy, y)
        at, packed = self.variables(primals), primals[1 : 1 + self.constants]
        _, (dx, *rest) = mx.vjp(self.of_variables(primals), at, [dy])
        return dx, *[mx.zeros_like(a) for a in packed], *rest

    def jvp(self, primals, tangents):
        at = self.variables(primals)
        along = filled(at, self.variables(tangents))
        return mx.jvp(self.of_variables(primals), at, along)[1][0]

    def vmap(self, inputs, axes):
        return mx.vmap(self.composed, tuple(axes))(*inputs), 0
