"""Transformations of a function of arrays, by rules that are given."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from types import SimpleNamespace

import mlx.core as mx

from .sync import is_transforming


class Rules:
    """A function of arrays, with its rules for MLX's transformations, in one object.

    A subclass defines ``forward(*arrays)``, ``vjp(primals, cotangents, outputs)``,
    ``jvp(primals, tangents)`` and ``vmap(inputs, axes)``. While MLX transforms, a call
    goes through ``mx.custom_function``. Otherwise it is a call of ``forward``.
    """

    __slots__ = ()

    def __call__(self, *arrays: mx.array):
        """Return what ``forward`` does."""
        if not is_transforming():
            return self.forward(*arrays)
        custom = mx.custom_function(self._stopped)
        custom.vjp(self.vjp)
        custom.jvp(self.jvp)
        custom.vmap(self.vmap)
        return custom(*arrays)

    def _stopped(self, *arrays: mx.array):
        # Forward mode would follow unstopped arrays into kernels without rules.
        return self.forward(*map(mx.stop_gradient, arrays))


class Function:
    """A function of arrays, whose rules for MLX's transformations are set one by one.

    While MLX transforms (gradients, ``vmap``, ``compile``), a call goes through
    ``mx.custom_function``. Otherwise it is a call of ``forward``.
    """

    __slots__ = "_custom", "_forward", "_rules"

    def __init__(self, forward: Callable):
        self._forward = forward
        self._rules = SimpleNamespace(vmap=partial(_each, forward))
        self._custom: Callable | None = None

    def vjp(self, rule: Callable) -> Callable:
        """Set the rule of reverse mode: ``rule(primals, cotangents, outputs)``."""
        self._rules.vjp = rule
        return rule

    def jvp(self, rule: Callable) -> Callable:
        """Set the rule of forward mode: ``rule(primals, tangents)``."""
        self._rules.jvp = rule
        return rule

    def vmap(self, rule: Callable) -> Callable:
        """Set the rule of ``mx.vmap``: ``rule(inputs, axes)``."""
        self._rules.vmap = rule
        return rule

    def __call__(self, *arrays: mx.array):
        """Return what ``forward`` does."""
        if not is_transforming():
            return self._forward(*arrays)
        if self._custom is None:
            forward = self._forward  # arrays are stopped as by Rules
            self._custom = mx.custom_function(
                lambda *a: forward(*map(mx.stop_gradient, a))
            )
            for name in ("vjp", "jvp", "vmap"):
                if rule := getattr(self._rules, name, None):
                    getattr(self._custom, name)(rule)
        return self._custom(*arrays)


def _each(forward: Callable, inputs, axes):
    """Map a function whose operations MLX can map."""
    inputs, axes = several(inputs), several(axes)
    if all(a.size for a in inputs):  # else MLX would take something from nothing
        found = mx.vmap(forward, in_axes=tuple(axes))(*inputs)
    else:
        found = _one_by_one(forward, inputs, axes)
    return found, 0 if isinstance(found, mx.array) else (0,) * len(found)


def _one_by_one(forward: Callable, inputs, axes):
    """Return the results of calls, one after another."""
    size = next(
        a.shape[axis] for a, axis in zip(inputs, axes, strict=True) if axis is not None
    )
    calls = max(size, 1)  # where there is none, one of zeros says the shapes
    slices = [
        [a] * calls if axis is None else [_slice(a, i, axis) for i in range(calls)]
        for a, axis in zip(inputs, axes, strict=True)
    ]
    found = [forward(*each) for each in zip(*slices, strict=True)]
    if isinstance(found[0], mx.array):
        return mx.stack(found)[:size]
    return tuple(mx.stack(each)[:size] for each in zip(*found, strict=True))


def _slice(a: mx.array, i: int, axis: int) -> mx.array:
    """Return ``mx.take(a, i, axis)``, of an array of no numbers too; zeros of none."""
    first = mx.moveaxis(a, axis, 0)
    if not len(first):
        return mx.zeros(first.shape[1:], a.dtype)
    return first[i : i + 1].squeeze(0)


@Function
def constant(*arrays):
    """Return packed arrays as they are; a derivative with respect to them raises."""
    return arrays


def _no_gradient(*_):
    raise ValueError(
        "a packed weight has no gradient: its values are constants. Freeze the layer "
        "(layer.freeze()), take gradients with respect to the features or to an "
        "adapter beside it, or train the float weight and pack it afterwards"
    )


constant.vjp(_no_gradient)
constant.jvp(_no_gradient)
constant.vmap(lambda arrays, axes: (tuple(arrays), tuple(axes)))


class Linear(Rules):
    """Rules of a function that is linear in each operand: one object for them all.

    A subclass defines ``forward``, ``vjp``, and ``linear``: the function with its
    transformations.
    Arguments after ``operands`` of them (a bias) are added to each row of the result.
    """

    __slots__ = ()
    operands: int | None = None

    def rows(self, primals: Sequence[mx.array]) -> int:
        """Return the rows of the result."""
        return len(primals[0])

    def linear(self, *arrays: mx.array) -> mx.array:
        """Return what the function does."""
        raise NotImplementedError

    def vjp(self, primals, cotangent, outputs):
        """Return the derivatives by all arguments."""
        raise NotImplementedError

    def jvp(self, primals, tangents):
        """Return a derivative: a term for each argument that has a tangent."""
        factors = primals[: self.operands]
        terms = [
            self.linear(*factors[:at], tangent, *factors[at + 1 :])
            for at, tangent in enumerate(tangents[: self.operands])
            if tangent is not None
        ]
        terms += [
            mx.broadcast_to(tangent, (self.rows(primals), *tangent.shape))
            for tangent in tangents[len(factors) :]
            if tangent is not None
        ]
        return sum(terms[1:], terms[0])

    def vmap(self, inputs, axes):
        """Return the results of calls, one after another."""
        return _one_by_one(self.linear, inputs, axes), 0


class _Zeros(Rules):
    """A function whose result is zeros, as are its derivatives."""

    __slots__ = "dtype", "shape"

    def __init__(self, shape: Sequence[int], dtype: mx.Dtype):
        self.shape, self.dtype = tuple(shape), dtype

    def forward(self, *_) -> mx.array:
        return mx.zeros(self.shape, self.dtype)

    def vjp(self, primals, cotangent, _):
        return [mx.zeros_like(a) for a in several(primals)]

    def jvp(self, primals, tangents):
        return self.forward()

    def vmap(self, inputs, axes):
        pairs = zip(several(inputs), several(axes), strict=True)
        size = next(a.shape[axis] for a, axis in pairs if axis is not None)
        return mx.zeros((size, *self.shape), self.dtype), 0


def zeros_of(arrays: Sequence[mx.array], shape: Sequence[int], dtype) -> mx.array:
    """Return zeros, or no numbers, as what is made of arrays without rows.

    Gradients go on through it: where processes exchange within a backward pass, one
    without rows must not leave that out.
    """
    return _Zeros(shape, dtype)(*arrays)


def several(values):
    """Return arrays as a sequence: of a function of one, rules get that alone."""
    return values if isinstance(values, (tuple, list)) else (values,)


def filled(
    primals: Sequence[mx.array], tangents: Sequence[mx.array | None]
) -> list[mx.array]:
    """Return tangents, zeros where there is none."""
    pairs = zip(primals, tangents, strict=True)
    return [mx.zeros_like(a) if t is None else t for a, t in pairs]


class Gradient(Rules):
    """A way back by kernels, whose own derivatives are the composed form's.

    Args:
        back: of (dy, x, *arrays).
        composed: of (x, *arrays), the derivative of which it is.
        statistics: arrays after x that ``composed`` computes from x instead.
    """

    __slots__ = "composed", "forward", "statistics"

    def __init__(self, back: Callable, composed: Callable, statistics: int = 0):
        self.forward, self.composed = back, composed
        self.statistics = statistics

    def again(self, dy, x, *arrays):
        """Return what ``forward`` does, by the composed form."""
        at = [x, *arrays[self.statistics :]]
        return tuple(mx.vjp(self.composed, at, [dy])[1])

    def vjp(self, at, by, _):
        """Return the derivatives of the gradients by all arguments."""
        return tuple(mx.vjp(self.again, list(at), list(by))[1])

    def jvp(self, at, by):
        """Return the gradients' change along tangents."""
        return tuple(mx.jvp(self.again, list(at), filled(at, by))[1])

    def vmap(self, inputs, axes):
        """Return the gradients of several calls."""
        found = mx.vmap(self.again, tuple(axes))(*inputs)
        return found, (0,) * len(found)


class ByKernels(Rules):
    """A function by kernels, forward and back.

    A subclass defines ``forward(*arrays)``, ``back(dy, *arrays)``, which returns the
    gradients of all arrays, and ``composed(*arrays)``, the same function in MLX
    operations, for forward mode, vmap and derivatives of the gradients.
    """

    __slots__ = ()
    statistics = 0  # as of Gradient

    def gradient(self, dy, *arrays) -> tuple[mx.array, ...]:
        """Return what ``back`` does, with derivatives."""
        return Gradient(self.back, self.composed, self.statistics)(dy, *arrays)

    def vjp(self, primals, dy, _):
        """Return the gradients of all arrays."""
        primals = several(primals)
        found = self.gradient(dy, *primals)
        return found if len(primals) > 1 else found[0]

    def jvp(self, at, by):
        """Return a derivative along tangents."""
        at, by = [*several(at)], several(by)
        return mx.jvp(self.composed, at, filled(at, by))[1][0]

    def vmap(self, arrays, axes):
        """Return the results of several calls."""
        arrays, axes = several(arrays), tuple(several(axes))
        return mx.vmap(self.composed, axes)(*arrays), 0


class OfKernels(ByKernels):
    """A function by kernels, of functions for each pass: see ``ByKernels``."""

    __slots__ = "back", "composed", "forward"

    def __init__(self, forward: Callable, back: Callable, composed: Callable):
        self.forward, self.back, self.composed = forward, back, composed
