"""What a layer runs later, as at its call: a convolution, or a norm of rows."""

from __future__ import annotations

from collections.abc import Callable
from contextvars import Context

import mlx.core as mx

from . import contraction
from .epilogue import Epilogue, Moments
from .ops import fusion
from .relation import Relation
from .routes import launch


class Later:
    """What is to be run as at its call.

    That is with the arrays of that moment, inside its blocks and on its stream; under
    variables of the environment as they are when it runs.

    Attributes:
        context: the blocks.
        stream: where it runs.
    """

    __slots__ = "context", "stream"

    context: Context
    stream: mx.Stream

    def __call__(
        self, epilogue: Epilogue | Moments | None, norm: object = None
    ) -> mx.array:
        """Return the features; ``norm``: the layer that an Epilogue is of."""
        inside = self.context.run
        if mx.default_stream(mx.default_device()) == self.stream:
            return inside(self._run, epilogue, norm)
        with mx.stream(self.stream):
            return inside(self._run, epilogue, norm)

    def _run(self, epilogue: Epilogue | Moments | None, norm: object) -> mx.array:
        raise NotImplementedError


class OfRows(Later):
    """A norm of features, or what else a sum and an activation may follow.

    Attributes:
        run: of a residual and an activation.
        scaled: of a weight and a bias, (C,) or (B, C): what runs, and then multiplies
            by the one and adds the other; or None.
    """

    __slots__ = "run", "scaled"

    run: Callable[..., mx.array]
    scaled: Callable[..., Callable] | None

    def _run(self, epilogue: Epilogue, norm: object) -> mx.array:
        return self.run(epilogue.residual, epilogue.activation or None)

    def by(self, weight: mx.array, bias: mx.array | None) -> OfRows:
        """Return it, multiplied and moved."""
        made = OfRows()
        made.context, made.stream = self.context, self.stream
        made.run, made.scaled = self.scaled(weight, bias), None
        return made


class Convolution(Later):
    """A convolution of features.

    Attributes:
        layer: the module, for who observes.
        arrays: features, weight and relation, as ``contraction.conv`` takes them.
        groups: of channels.
        bias: an array, or None.
    """

    __slots__ = "arrays", "bias", "groups", "layer"

    layer: object
    arrays: tuple[mx.array, object, Relation]
    bias: mx.array | None
    groups: int

    def _run(self, epilogue: Epilogue | Moments | None, norm: object) -> mx.array:
        given = {"groups": self.groups, "bias": self.bias, "epilogue": epilogue}
        if not launch.observed() and not fusion.observed():
            return contraction.conv(*self.arrays, **given)
        with launch.scope(self.layer):
            feats = contraction.conv(*self.arrays, **given)
        if norm is not None:
            fusion.tell_epilogue(norm, epilogue, feats)
        return feats
