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
from contextvars import ContextVar, copy_context
from functools import partial
from weakref import ref

import mlx.core as mx

from . import settings
from .activations import named
from .epilogue import Epilogue, Moments
from .geometry import sync
from .later import Convolution, Later, OfRows
from .memory import limit, stages
from .observers import awaited
from .relation import Relation
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
        waiter: holds it for the end of a block that observes, until it is used.
        is_of_trace: whether it was made where MLX traced a graph.
    """

    __slots__ = (
        "before",
        "convolve",
        "epilogue",
        "feats",
        "is_used",
        "is_of_trace",
        "norm",
        "own",
        "tensor",
        "waiter",
    )

    def __init__(
        self, convolve, tensor, epilogue=None, norm=None, before=None, own=None
    ):
        self.convolve, self.tensor = convolve, ref(tensor)
        self.epilogue, self.norm, self.before, self.own = epilogue, norm, before, own
        self.feats, self.is_used, self.waiter = None, False, None
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

    def computed(self) -> mx.array:
        """Return the features: by one launch, or from what somebody holds."""
        if self.feats is not None:
            return self.feats
        steps, at = [self.own], self.before
        while at is not None:
            held = at.tensor()
            feats = at.feats if held is None else held.feats
            if feats is not None:
                for own in reversed(steps):
                    feats = own(feats)
                return feats
            steps.append(at.own)
            at = at.before
        return self.convolve(self.epilogue, self.norm)

    def hold(self, feats: mx.array) -> None:
        """Hold the features, and nothing that they are computed from.

        What a graph that is being traced computes is of that graph alone.
        """
        self.use()
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


def _settle(waiter: list[_Result]) -> None:
    while waiter:
        waiter.pop().settle()


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
        *,
        keeps: bool = False,
    ) -> Pending:
        """Return a convolution's result, of so many channels.

        Arguments are checked: they fit. Others are as of ``contraction.conv``;
        ``keeps``: the result has the rows of ``x``, and the relation none of a manager.
        """
        # Set from here: a call more is a tenth of what waiting costs.
        feats, run, made = x.feats, Convolution(), cls.__new__(cls)
        run.layer, run.arrays, run.bias = layer, (feats, w, relation), bias
        run.context, run.groups = copy_context(), groups
        run.stream = mx.default_stream(mx.default_device())
        made.__dict__ = {
            "manager": x.manager,
            "key": x.key if keeps else relation.sets[1].known_key() or relation.out_key,
            "coords": x.coords if keeps else relation.out_coords,
            "_facts": (channels, feats.dtype),
            "_result": _Result(run, made),
        }
        return made

    @classmethod
    def of_rows(
        cls,
        x: SparseTensor,
        feats: mx.array,
        run: Callable[..., mx.array],
        scaled: Callable[..., Callable] | None = None,
        *,
        channels: int | None = None,
    ) -> Pending:
        """Return what a function makes of each row of a tensor's features.

        Args:
            x: the tensor, which may wait: see ``may_wait``.
            feats: its features.
            run, scaled: as of ``OfRows``.
            channels: of the result; by default as many as of the features.
        """
        later, made = OfRows(), cls.__new__(cls)
        later.run, later.scaled = run, scaled
        later.context = copy_context()
        later.stream = mx.default_stream(mx.default_device())
        made.__dict__ = {
            "manager": x.manager,
            "key": x.key,
            "coords": x.coords,
            "_facts": (channels or feats.shape[1], feats.dtype),
            "_result": _Result(later, made, _NOTHING),
        }
        return made

    @property
    def feats(self) -> mx.array:
        """(N, C) features, computed as they are first read."""
        result = self._result
        if result.feats is not None:
            return result.feats
        feats = result.computed()
        result.hold(feats)
        return feats

    @feats.setter
    def feats(self, feats: mx.array) -> None:
        self._result.feats = feats

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
        before.use()
        run = before.convolve if run is None else run
        result = _Result(run, made, epilogue, norm, before, own)
        made.__dict__ = self.__dict__ | {"_result": result}
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
