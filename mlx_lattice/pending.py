"""Results of layers that wait for what follows them, until they are read.

A net calls a convolution, a norm and an activation one after the other; where the norm
has fixed statistics, or is not there, all that is the convolution's epilogue, and
elsewhere a sum and an activation are part of the norm's launch. So features are
computed when they are first read: with what was asked for until then, if nobody holds
what lies between. To its readers such a tensor is as any other.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from contextvars import ContextVar, copy_context
from functools import partial

import mlx.core as mx

from . import settings
from .activations import named
from .channel_kernels import activated_sum
from .dtypes import FLOATS
from .epilogue import Epilogue, Moments
from .geometry import sync
from .later import NOTHING, Convolution, Later, OfRows, Result, as_now
from .relation import Relation
from .tensor import SparseTensor

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
    if settings.forced.get() or settings.stage_end.get() is not None:
        return False
    return not _ROUTE()


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
        channels: tuple[int, int],
        *,
        keeps: bool = False,
    ) -> Pending | None:
        """Return a convolution's result; None if features do not fit, to raise now.

        Other arguments are checked, and as of ``contraction.conv``.

        Args:
            channels: that it reads and writes.
            keeps: whether the result has the rows of ``x``, and the relation none of a
                manager.
        """
        # Set from here: a call more is a tenth of what waiting costs.
        feats = x._result.feats if type(x) is cls else x.feats
        given = x if feats is None else feats
        if given.dtype != w.dtype or given.shape[1] != channels[0]:
            return None
        feats = x._awaited() if feats is None else feats.__copy__()
        run, made = Convolution(), cls.__new__(cls)
        run.layer, run.arrays = layer, (feats, w.__copy__(), relation)
        run.bias = bias if bias is None else bias.__copy__()
        run.context, run.groups = copy_context(), groups
        run.stream = mx.default_stream(mx.default_device())
        own = made.__dict__
        own["manager"] = x.manager
        if keeps:
            own["key"], own["coords"] = x.key, x.coords
        else:
            own["key"] = relation.sets[1].known_key() or relation.out_key
            own["coords"] = relation.out_coords
        own["_facts"], own["_result"] = (channels[1], w.dtype), Result(run, made)
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
            run, scaled: as of ``OfRows``; arrays that they read are as of ``as_now``.
            channels: of the result; by default as many as of the features.
        """
        later, made = OfRows(), cls.__new__(cls)
        later.run, later.scaled = run, scaled
        later.context = copy_context()
        later.stream = mx.default_stream(mx.default_device())
        own = made.__dict__
        own["manager"], own["key"], own["coords"] = x.manager, x.key, x.coords
        own["_facts"] = channels or feats.shape[1], feats.dtype
        own["_result"] = Result(later, made, NOTHING)
        return made

    @property
    def feats(self) -> mx.array:
        """(N, C) features, computed as they are first read."""
        return self._result.read()

    @feats.setter
    def feats(self, feats: mx.array) -> None:
        before, self._result = self._result, Result(None, self)
        self._facts = feats.shape[1], feats.dtype
        if before.is_used:  # what follows is of those that there were
            before.read()
        self._result.hold(feats)

    def __copy__(self) -> SparseTensor:
        """Return a plain tensor."""
        place = self.manager, self.key, self.coords
        return SparseTensor.trusted(*place, self.feats)

    def _state(self) -> tuple[type, dict]:
        """Copy and pickle as a plain tensor."""
        return SparseTensor, {"feats": self.feats}

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

    def _awaited(self) -> Result:
        """Return what a convolution reads once it is computed itself, if this waits.

        Then a net has let go of what lies between: ``out = conv(relu(norm(out)))``.
        """
        result = self._result
        run = result.convolve
        if type(run) is Convolution and type(run.arrays[0]) is Result:
            run.arrays[0].read()  # two wait, and never a whole net
        result.use()
        result.is_awaited = True
        return result

    def _waits(self) -> bool:
        return self._result.feats is None and not _apart.get()

    def _follow(
        self,
        epilogue: Epilogue,
        norm: object,
        own: Callable,
        run: Later | None = None,
        lines: Sequence[mx.array | None] | None = None,
    ) -> Pending:
        before, made = self._result, Pending.__new__(Pending)
        before.use()
        run = before.convolve if run is None else run
        lines = before.lines if lines is None else lines
        result = Result(run, made, epilogue, norm, before, own, lines)
        own = made.__dict__
        own |= self.__dict__
        own["_result"] = result
        return made

    def normalized(
        self,
        after: Epilogue | None,
        norm: object,
        own: Callable,
        lines: Sequence[mx.array | None],
    ) -> Pending | None:
        """Return what a norm of fixed statistics makes of it, if that can wait.

        Not where a gradient may come, which multiplies again for what the norm read.

        Args:
            after: the norm as an epilogue; None where it cannot be one.
            norm: the layer, for who observes.
            own: the norm, of features.
            lines: mean, var, scale and shift, as of ``as_now``.
        """
        result = self._result
        if after is None or result.epilogue is not None or not self._waits():
            return None
        if sync.is_known_to_differentiate():
            return None
        return self._follow(after, norm, own, lines=lines)

    def scaled(
        self, weight: mx.array, bias: mx.array | None, own: Callable
    ) -> Pending | None:
        """Return it multiplied and moved, if a norm that waits can do so.

        Args:
            weight, bias: (C,), or (B, C) of the batch elements; as of ``as_now``.
            own: the same, of features.
        """
        result = self._result
        run = result.convolve
        if result.epilogue is not NOTHING or run.scaled is None or not self._waits():
            return None
        return self._follow(NOTHING, None, own, run.by(weight, bias))

    def activated(self, name: str, own: Callable) -> Pending | None:
        """Return the activation of it, if that can wait.

        A gradient multiplies again for what the activation of sums read: where one may
        come, only a norm's waits, or one whose slope its result says.
        """
        result = self._result
        after = result.epilogue or NOTHING
        if after.activation or not self._waits():
            return None
        is_of_sums = type(result.convolve) is Convolution and result.norm is None
        if is_of_sums and not named(name).is_of_result and sync.is_differentiating():
            return None
        return self._follow(after.activated(name), result.norm, own)

    def _added(self, other: object) -> Pending | None:
        result = self._result
        after = result.epilogue or NOTHING
        if after.activation or after.residual is not None or not self._waits():
            return None
        if not isinstance(other, SparseTensor) or other.key != self.key:
            return None
        feats = other.feats
        if tuple(feats.shape) != self.shape or feats.dtype != self.dtype:
            return None
        if not self._waits():  # the other one is made of this
            return None
        (feats,) = as_now(feats)
        added = after.beside(feats)
        return self._follow(added, result.norm, lambda own: own + feats)

    def _summed(self, other: object) -> Pending | None:
        """Return the sum with another tensor that waits for an activation.

        Not inside a transformation: a gradient would read both again for what the sum
        tells, and ``mx.compile`` makes one launch of any number of sums.
        """
        if sync.is_transforming() or not may_wait(self):
            return None
        if not isinstance(other, SparseTensor) or other.key != self.key:
            return None
        a, b = self.feats, other.feats
        if a.shape != b.shape or a.dtype != b.dtype or a.dtype not in FLOATS:
            return None
        return Pending.of_rows(self, a, partial(_sum, *as_now(a, b)))

    def _plus(self, other: object) -> Pending | None:
        made = self._added(other)
        if made is None and type(other) is Pending:
            made = other._added(self)
        return self._summed(other) if made is None else made

    def __add__(self, other):
        """Add another tensor, in the launch of either where that can be."""
        made = self._plus(other)
        return super().__add__(other) if made is None else made

    def __radd__(self, other):
        """Be added to another tensor, whose rows the sum has."""
        made = self._plus(other)
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


def _sum(
    a: mx.array, b: mx.array, residual: mx.array | None, activation: str | None
) -> mx.array:
    """Return a sum of two or three, and what follows it in the launch of the last."""
    if residual is not None:
        a, b = a + b, residual
    return activated_sum(a, named(activation), residual=b) if activation else a + b
