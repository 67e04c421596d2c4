"""What a layer runs later, as at its call: a convolution, or a norm of rows.

``Result`` is what it makes, or has made.
"""

from __future__ import annotations

from collections.abc import Callable
from contextvars import Context
from functools import partial
from weakref import ref

import mlx.core as mx

from . import contraction
from .epilogue import Epilogue, Moments
from .geometry import sync
from .observers import awaited
from .ops import fusion
from .relation import Relation
from .routes import launch

# What follows what nothing follows yet.
NOTHING = Epilogue()


def as_now(*arrays: mx.array | None) -> list[mx.array | None]:
    """Return arrays that stay what these are now, and share their memory.

    ``a += 1`` and ``a[i] = v`` make the same object another array.
    """
    return [a if a is None else a.__copy__() for a in arrays]


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
        arrays: features, which may wait too, weight and relation, as
            ``contraction.conv`` takes them.
        groups: of channels.
        bias: an array, or None.
    """

    __slots__ = "arrays", "bias", "groups", "layer"

    layer: object
    arrays: tuple[mx.array | Result, object, Relation]
    bias: mx.array | None
    groups: int

    def _run(self, epilogue: Epilogue | Moments | None, norm: object) -> mx.array:
        given = {"groups": self.groups, "bias": self.bias, "epilogue": epilogue}
        feats, *rest = self.arrays
        feats = feats.read_by_layers() if type(feats) is Result else feats
        if not launch.observed() and not fusion.observed():
            return contraction.conv(feats, *rest, **given)
        with launch.scope(self.layer):
            feats = contraction.conv(feats, *rest, **given)
        if norm is not None:
            fusion.tell_epilogue(norm, epilogue, feats)
        return feats


class Result:
    """What is computed later, or was: of a layer, or of what follows one.

    Attributes:
        convolve: the convolution, or norm, with an epilogue.
        tensor: refers to the tensor that has it.
        epilogue: all that was asked for so far; None of a convolution itself, and
            ``NOTHING`` of a norm.
        norm: the layer that the epilogue is of.
        before: the result that this follows.
        own: what it does to the features of ``before``.
        is_norm: whether it is of a norm with fixed statistics itself, so that ``own``
            takes a residual and an activation too.
        lines: mean, var, scale and shift of the epilogue, as they were when its norm
            was called; None without.
        feats: once it is computed.
        own_feats: the same, whatever a reader of ``feats`` does to these in place.
        is_used: whether it was read, or another result was made of it.
        is_awaited: whether a convolution that waits reads it.
        waiter: holds it for the end of a block that observes, until it is used.
        is_of_trace: whether it was made where MLX traced a graph.
    """

    __slots__ = (
        "before",
        "convolve",
        "epilogue",
        "feats",
        "is_awaited",
        "is_norm",
        "is_used",
        "is_of_trace",
        "lines",
        "norm",
        "own",
        "own_feats",
        "tensor",
        "waiter",
    )

    def __init__(
        self,
        convolve,
        tensor,
        epilogue=None,
        norm=None,
        before=None,
        own=None,
        lines=None,
    ):
        self.convolve, self.tensor = convolve, ref(tensor)
        self.epilogue, self.norm, self.before, self.own = epilogue, norm, before, own
        self.is_norm = norm is not None and before.epilogue is None
        self.lines, self.feats, self.own_feats = lines, None, None
        self.is_used = self.is_awaited = False
        self.waiter = None
        self.is_of_trace = sync.is_transforming()
        held = awaited()
        if held is not None:
            self.waiter = [self]
            held.append(partial(_settle, self.waiter))

    def use(self) -> None:
        """Note that it was used: nobody computes it, nor holds it, for its own sake."""
        self.is_used = True
        if self.waiter:
            self.waiter.clear()

    def read(self) -> mx.array:
        """Return the features, and hold them."""
        if self.feats is not None:
            return self.feats
        feats = self.computed()
        self.hold(feats)
        return feats

    def read_by_layers(self) -> mx.array:
        """Return the features as they were for layers that were called before."""
        feats = self.read()
        return feats if self.own_feats is None else self.own_feats

    def computed(self) -> mx.array:
        """Return the features: by one launch, or from what somebody holds."""
        steps, at = [self], self.before
        while at is not None:
            if at.is_held:
                feats, after = at.read_by_layers(), self.epilogue
                if steps[-1].is_norm:  # the first of them: it has all others
                    own = steps[-1].own
                    return own(feats, after.residual, after.activation or None)
                for step in reversed(steps):
                    feats = step.own(feats)
                return feats
            steps.append(at)
            at = at.before
        after = self.epilogue
        return self.convolve(
            after if self.lines is None else after.of(*self.lines), self.norm
        )

    @property
    def is_held(self) -> bool:
        """Whether the features are there, or somebody may want them."""
        if self.feats is not None or self.is_awaited:
            return True
        tensor = self.tensor()
        return tensor is not None and tensor._result is self

    def hold(self, feats: mx.array) -> None:
        """Hold the features, and nothing that they are computed from.

        What a graph that is being traced computes is of that graph alone.
        """
        followed = self.is_used
        self.use()
        if self.is_of_trace or not sync.is_transforming():
            if followed:
                self.own_feats = feats.__copy__()
            self.feats, self.lines = feats, None
            self.convolve = self.epilogue = self.norm = self.before = self.own = None

    def settle(self) -> None:
        """Compute what nobody has read, and nothing that was asked for since has."""
        tensor = self.tensor()
        if tensor is not None:
            tensor.feats  # noqa: B018 (computed as it is read)
        elif not self.is_used:
            self.computed()


def _settle(waiter: list[Result]) -> None:
    while waiter:
        waiter.pop().settle()
