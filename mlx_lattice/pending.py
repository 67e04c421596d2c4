"""Results of layers that wait for what follows them, until they are read.

A net calls a convolution, a norm and an activation one after the other; where the norm
has fixed statistics, or is not there, all that is the convolution's epilogue, and
elsewhere a sum and an activation are part of the norm's launch. So features are
computed when they are first read: with what was asked for until then, if nobody holds
what lies between. To its readers such a tensor is as any other.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import Context, ContextVar, copy_context
from weakref import ref

import mlx.core as mx

from . import contraction, settings
from .activations import named
from .epilogue import Epilogue, Moments
from .geometry import sync
from .memory import limit, stages
from .observers import await_end
from .ops import fusion
from .relation import Relation
from .routes import launch
from .tensor import SparseTensor

# What follows what nothing follows yet.
_NOTHING = Epilogue()
_apart: ContextVar[bool] = ContextVar("apart", default=False)
_ROUTE = settings.reader("MLX_LATTICE_ROUTE")
is_apart: Callable[[], bool] = _apart.get


@contextmanager
def apart() -> Iterator[None]:
    """Give convolutions nothing of what follows them, inside the block."""
    token = _apart.set(True)
    try:
        yield
    finally:
        _apart.reset(token)


def may_wait(x: object) -> bool:
    """Whether a layer of ``x`` that is called now may be computed later.

    Not where one route is asked for, which is to raise at once, nor where layers are
    evaluated one after the other.
    """
    kind = type(x)
    if (kind is not SparseTensor and kind is not Pending) or _apart.get():
        return False
    if settings.forced.get() or limit.active() is not None or stages.evaluates():
        return False
    return not _ROUTE()


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
    arrays: tuple[mx.array | _Result, object, Relation]
    bias: mx.array | None
    groups: int

    def _run(self, epilogue: Epilogue | Moments | None, norm: object) -> mx.array:
        given = {"groups": self.groups, "bias": self.bias, "epilogue": epilogue}
        feats, *rest = self.arrays
        feats = feats.read() if type(feats) is _Result else feats
        if not launch.observed() and not fusion.observed():
            return contraction.conv(feats, *rest, **given)
        with launch.scope(self.layer):
            feats = contraction.conv(feats, *rest, **given)
        if norm is not None:
            fusion.tell_epilogue(norm, epilogue, feats)
        return feats


class _Result:
    """What is computed later, or was: of a layer, or of what follows one.

    Attributes:
        convolve: the convolution, or norm, with an epilogue.
        tensor: refers to the tensor that has it.
        epilogue: all that was asked for so far; None of a convolution itself, and
            ``_NOTHING`` of a norm.
        norm: the layer that the epilogue is of.
        before: the result that this follows.
        own: what it does to the features of ``before``.
        feats: once it is computed.
        is_used: whether it was read, or another result was made of it.
        is_awaited: whether a convolution that waits reads it.
        is_of_trace: whether it was made where MLX traced a graph.
    """

    __slots__ = (
        "before",
        "convolve",
        "epilogue",
        "feats",
        "is_awaited",
        "is_used",
        "is_of_trace",
        "norm",
        "own",
        "tensor",
    )

    def __init__(
        self, convolve, tensor, epilogue=None, norm=None, before=None, own=None
    ):
        self.convolve, self.tensor = convolve, ref(tensor)
        self.epilogue, self.norm, self.before, self.own = epilogue, norm, before, own
        self.feats, self.is_used, self.is_awaited = None, False, False
        self.is_of_trace = sync.is_transforming()

    def read(self) -> mx.array:
        """Return the features, and hold them."""
        if self.feats is not None:
            return self.feats
        feats = self.computed()
        self.hold(feats)
        return feats

    def computed(self) -> mx.array:
        """Return the features: by one launch, or from what somebody holds."""
        steps, at = [self.own], self.before
        while at is not None:
            if at.is_held:
                feats, after = at.read(), self.epilogue
                if at.epilogue is None and self.norm is not None:
                    # The norm is the first of them, and has all others.
                    return steps[-1](feats, after.residual, after.activation or None)
                for own in reversed(steps):
                    feats = own(feats)
                return feats
            steps.append(at.own)
            at = at.before
        return self.convolve(self.epilogue, self.norm)

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
        self.is_used = True
        if self.is_of_trace or not sync.is_transforming():
            self.feats = feats
            self.convolve = self.epilogue = self.norm = self.before = self.own = None

    def settle(self) -> None:
        """Compute what nobody has read, and nothing that was asked for since has."""
        tensor = self.tensor()
        if tensor is not None:
            tensor.feats  # noqa: B018 (computed as it is read)
        elif not self.is_used:
            self.computed()


class Pending(SparseTensor):
    """A tensor that a layer makes, and what followed it, once it is read."""

    @classmethod
    def later(
        cls,
        layer: object,
        x: SparseTensor,
        w: object,
        relation: Relation,
        bias: mx.array | None,
        groups: int,
        channels: int,
    ) -> Pending:
        """Return a convolution's result, of so many channels.

        Arguments are checked: they fit. Others are as of ``contraction.conv``.
        """
        # Set from here: a call more is a tenth of what waiting costs.
        feats = x._awaited() if type(x) is cls else x.feats
        run, made = Convolution(), cls.__new__(cls)
        run.layer, run.arrays, run.bias = layer, (feats, w, relation), bias
        run.context, run.groups = copy_context(), groups
        run.stream = mx.default_stream(mx.default_device())
        made.__dict__ = {
            "manager": x.manager,
            "key": relation.keys[1],
            "coords": relation.out_coords,
            "_facts": (channels, x.dtype),
            "_result": _Result(run, made),
        }
        await_end(made._result.settle)
        return made

    @classmethod
    def of_rows(
        cls,
        x: SparseTensor,
        feats: mx.array,
        run: Callable[..., mx.array],
        scaled: Callable[..., Callable] | None = None,
    ) -> Pending:
        """Return what a function makes of a tensor's features, in shape and dtype.

        Args:
            x: the tensor, which may wait: see ``may_wait``.
            feats: its features.
            run, scaled: as of ``OfRows``.
        """
        later, made = OfRows(), cls.__new__(cls)
        later.run, later.scaled = run, scaled
        later.context = copy_context()
        later.stream = mx.default_stream(mx.default_device())
        made.__dict__ = {
            "manager": x.manager,
            "key": x.key,
            "coords": x.coords,
            "_facts": (feats.shape[1], feats.dtype),
            "_result": _Result(later, made, _NOTHING),
        }
        await_end(made._result.settle)
        return made

    @property
    def feats(self) -> mx.array:
        """(N, C) features, computed as they are first read."""
        return self._result.read()

    @feats.setter
    def feats(self, feats: mx.array) -> None:
        before, self._result = self._result, _Result(None, self)
        if before.is_used:  # what follows is of those that there were
            before.read()
        self._result.hold(feats)

    def __reduce_ex__(self, protocol: int):
        """Copy and pickle as a plain tensor."""
        rows = self.manager, self.key, self.coords
        return SparseTensor.trusted, (*rows, self.feats)

    @property
    def channels(self) -> int:
        """Number of feature channels."""
        return self._facts[0]

    @property
    def dtype(self) -> mx.Dtype:
        """Dtype of the features."""
        return self._facts[1]

    @property
    def shape(self) -> tuple[int, int]:
        """(N, C)."""
        return len(self), self._facts[0]

    def _awaited(self) -> mx.array | _Result:
        """Return what a convolution reads once it is computed itself.

        Then a net has let go of what lies between: ``out = conv(relu(norm(out)))``.
        """
        result = self._result
        if not self._waits():
            return result.read()
        run = result.convolve
        if type(run) is Convolution and type(run.arrays[0]) is _Result:
            run.arrays[0].read()  # two wait, and never a whole net
        result.is_used = result.is_awaited = True
        return result

    def _waits(self) -> bool:
        return self._result.feats is None and not _apart.get()

    def _follow(
        self,
        epilogue: Epilogue,
        norm: object,
        own: Callable,
        run: Later | None = None,
    ) -> Pending:
        before, made = self._result, Pending.__new__(Pending)
        before.is_used = True
        run = before.convolve if run is None else run
        result = _Result(run, made, epilogue, norm, before, own)
        made.__dict__ = self.__dict__ | {"_result": result}
        await_end(result.settle)
        return made

    def normalized(
        self, after: Epilogue | None, norm: object, own: Callable
    ) -> Pending | None:
        """Return what a norm of fixed statistics makes of it, if that can wait.

        Not where a gradient may come, which multiplies again for what the norm read.

        Args:
            after: the norm as an epilogue; None where it cannot be one.
            norm: the layer, for who observes.
            own: the norm, of features.
        """
        result = self._result
        if after is None or result.epilogue is not None or not self._waits():
            return None
        if sync.is_known_to_differentiate():
            return None
        return self._follow(after, norm, own)

    def scaled(
        self, weight: mx.array, bias: mx.array | None, own: Callable
    ) -> Pending | None:
        """Return it multiplied and moved, if a norm that waits can do so.

        Args:
            weight, bias: (C,), or (B, C) of the batch elements.
            own: the same, of features.
        """
        result = self._result
        run = result.convolve
        if result.epilogue is not _NOTHING or run.scaled is None or not self._waits():
            return None
        return self._follow(_NOTHING, None, own, run.by(weight, bias))

    def activated(self, name: str, own: Callable) -> Pending | None:
        """Return the activation of it, if that can wait.

        A gradient multiplies again for what the activation of sums read: where one may
        come, only a norm's waits, or one whose slope its result says.
        """
        result = self._result
        after = result.epilogue or _NOTHING
        if after.activation or not self._waits():
            return None
        is_of_sums = type(result.convolve) is Convolution and result.norm is None
        if is_of_sums and not named(name).is_of_result and sync.is_differentiating():
            return None
        return self._follow(after.activated(name), result.norm, own)

    def _added(self, other: object) -> Pending | None:
        result = self._result
        after = result.epilogue or _NOTHING
        if after.activation or after.residual is not None or not self._waits():
            return None
        if not isinstance(other, SparseTensor) or other.key != self.key:
            return None
        feats = other.feats
        if tuple(feats.shape) != self.shape or feats.dtype != self.dtype:
            return None
        added = after.beside(feats)
        return self._follow(added, result.norm, lambda own: own + feats)

    def __add__(self, other):
        """Add another tensor, in the convolution's launch where that can be."""
        made = self._added(other)
        return super().__add__(other) if made is None else made

    def __radd__(self, other):
        """Be added to another tensor, whose rows the sum has."""
        made = self._added(other)
        if made is not None:
            return made
        is_tensor = isinstance(other, SparseTensor)
        return other.__add__(self) if is_tensor else super().__radd__(other)

    def with_moments(self) -> tuple[mx.array, mx.array | None]:
        """Return the features, and statistics of their rows where a kernel sums them.

        The latter are for a norm in training, see ``Moments``.
        """
        result, moments = self._result, Moments()
        if result.epilogue is not None or not self._waits():
            return self.feats, None
        feats = result.convolve(moments)
        result.hold(feats)
        return feats, moments.lines
