"""The contractions of a layer and their derivatives.

All derive from one trilinear form, ``T(x, W, y) = sum over edges of x[i] . W[k] .
y[o]``: the forward pass is its derivative by y (by x, over the transposed relation),
and the weight gradient by W. So every vjp and jvp is again one of them, to any order.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from weakref import ref

import mlx.core as mx

from .channel_kernels import column_sums
from .epilogue import EpilogueFacts
from .problem import FORWARD, INPUT_GRAD, MLX_LAYOUT, WEIGHT_GRAD
from .quantized import QuantizedWeight
from .relation import Relation
from .routes import launch
from .transformations import Function, Linear, constant
from .with_epilogue import with_epilogue

MOMENTS = "moments"  # the forward pass, with statistics of its rows


def layer_of(relation: Relation, facts: tuple, scope: object = None) -> Layer:
    """Return the contractions of a layer, kept on its relation unless observed."""
    if scope is not None:
        return Layer(relation, facts, scope)
    layer = relation.layers.get(facts)
    if layer is None:
        layer = relation.layers[facts] = Layer(relation.bare(), facts)
    return layer


class Layer:
    """The contractions of a layer over a relation, with their transformations.

    The three of a float weight are each other's derivatives. What MLX holds of them
    holds neither this object nor the relation that keeps it: there is no circle, and
    arrays are freed with the last tensor that needs them. A weight and its gradients
    have three axes, in the order of the layout.

    Args:
        relation: the layer's.
        facts: c_in, c_out, dtype, groups, the precision asked for, which so holds for
            gradients too, ``QuantizedWeight.packing`` or None, and the layout.
        scope: what observers are told that it is of.
    """

    __slots__ = "__weakref__", "_flat", "_functions", "_is_packed", "given"

    def __init__(self, relation: Relation, facts: tuple, scope: object = None):
        self.given = relation, facts, scope
        c_in, c_out, _, groups, _, packing, layout = facts
        self._is_packed, self._flat = packing is not None, None
        if layout == MLX_LAYOUT:
            self._flat = c_out, relation.volume, c_in // groups
        self._functions: dict[str | EpilogueFacts, Callable[..., mx.array]] = {}

    def then(self, facts: EpilogueFacts) -> Callable[..., mx.array]:
        """Return ``forward`` with an epilogue, of which these are the facts."""
        function = self._functions.get(facts)
        if function is None:
            function = self._functions[facts] = with_epilogue(self, facts)
        return function

    def weights(self, w: mx.array | QuantizedWeight) -> Sequence[mx.array]:
        """Return a weight's arrays, as the functions take them."""
        if self._is_packed:
            return constant(*w.arrays)
        return (w,) if self._flat is None else (w.reshape(self._flat),)

    @property
    def forward(self) -> Callable[..., mx.array]:
        """The pass that gives y."""
        return self.function(FORWARD)

    def function(self, pass_: str) -> Callable[..., mx.array]:
        """Return a pass with its transformations.

        It returns y of (x, w) or (x, words, scales, biases), and a bias; dx of the same
        with dy in the place of x, and no bias; or dW of (x, dy). ``MOMENTS``: y, and
        statistics of its rows where the kernel sums them.
        """
        function = self._functions.get(pass_)
        if function is None:
            operands, has_moments = 4 if self._is_packed else 2, pass_ == MOMENTS
            own = FORWARD if has_moments else pass_
            launched = launch.Pass(own, *self.given[:2], moments=has_moments)
            rules = _Rules(self, own, operands)
            if has_moments:
                rules = _MomentsRules(self, own, operands, launched)
            function = Function(launched, rules)
            self._functions[pass_] = function
        return function

    def derivatives(self, pass_: str, primals, cotangent) -> Sequence[mx.array]:
        """Return those of a pass by all of its arguments."""
        if self._is_packed:  # linear in x and a bias
            packed, bias = primals[1:4], primals[4:]
            back = self.function(INPUT_GRAD if pass_ == FORWARD else FORWARD)
            zeros = [mx.zeros_like(a) for a in packed]
            dx = back(cotangent, *packed)
            return dx, *zeros, *[column_sums(cotangent, b) for b in bias]
        if pass_ == INPUT_GRAD:
            (dy, w), ddx = primals, cotangent
            return self.forward(ddx, w), self.function(WEIGHT_GRAD)(ddx, dy)
        if pass_ == WEIGHT_GRAD:
            (x, dy), ddw = primals, cotangent
            return self.function(INPUT_GRAD)(dy, ddw), self.forward(x, ddw)
        (x, w, *bias), dy = primals, cotangent
        dx, dw = self.function(INPUT_GRAD)(dy, w), self.function(WEIGHT_GRAD)(x, dy)
        return dx, dw, *[column_sums(dy, b) for b in bias]


class _Rules(Linear):
    """The transformations of a layer's pass, which do not hold the layer."""

    __slots__ = "given", "layer", "pass_"

    def __init__(self, layer: Layer, pass_: str, operands: int):
        super().__init__(operands, layer.given[0].n_out)
        self.given, self.layer, self.pass_ = layer.given, ref(layer), pass_

    def now(self) -> Layer:
        return self.layer() or Layer(*self.given)

    def linear(self, *arrays: mx.array) -> mx.array:
        return self.now().function(self.pass_)(*arrays)

    def vjp(self, primals, cotangent, _):
        if isinstance(cotangent, (tuple, list)):  # of y, and of its statistics
            cotangent = cotangent[0]
        scope = self.given[2]
        if scope is None:
            return self.now().derivatives(self.pass_, primals, cotangent)
        with launch.scope(scope):
            return self.now().derivatives(self.pass_, primals, cotangent)


class _MomentsRules(_Rules):
    """Those of a forward pass that may return statistics of its rows after y.

    Nothing is differentiated through them: a norm's own derivatives are those by y.
    """

    __slots__ = ("launched",)

    def __init__(self, layer: Layer, pass_: str, operands: int, launched: launch.Pass):
        super().__init__(layer, pass_, operands)
        self.launched = launched

    def jvp(self, primals, tangents):
        return self._with_lines(super().jvp(primals, tangents))

    def vmap(self, inputs, axes):
        y, axis = super().vmap(inputs, axes)
        made = self._with_lines(y, y.shape[0])
        return (made, axis) if made is y else (made, (axis, 0))

    def _with_lines(self, y: mx.array, *mapped: int):
        """Return y, and zeros where the pass returns statistics."""
        lines = self.launched.moments_shape()
        return y if lines is None else (y, mx.zeros((*mapped, *lines)))
