"""Transformations of a function of arrays, by rules that are given."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import mlx.core as mx

from .sync import is_transforming


class Function:
    """A function of arrays, with its rules for MLX's transformations.

    While MLX transforms, a call goes through ``mx.custom_function``. Otherwise it is a
    call of ``forward``. Rules are arguments, or methods of a subclass:
    ``forward(*arrays)``, ``vjp(primals, cotangents, outputs)``, ``jvp(primals,
    tangents)`` and ``vmap(inputs, axes)``.
    """

    vjp = jvp = None

    def __init__(self, forward: Callable[..., Any], **rules: Callable[..., Any]):
        self.forward = forward
        self.__dict__.update(rules)

    def vmap(self, inputs: Any, axes: Any) -> tuple[Any, Any]:
        """Map a function whose operations MLX can map."""
        inputs, axes = several(inputs), several(axes)
        if all(a.size for a in inputs):  # else MLX would take something from nothing
            found = mx.vmap(self.forward, in_axes=tuple(axes))(*inputs)
        else:
            found = _one_by_one(self.forward, inputs, axes)
        return found, 0 if isinstance(found, mx.array) else (0,) * len(found)

    def __call__(self, *arrays: mx.array) -> Any:
        """Return what ``forward`` does."""
        if not is_transforming():
            return self.forward(*arrays)
        # Forward mode would follow unstopped arrays into kernels without rules.
        custom = mx.custom_function(
            lambda *arrays: self.forward(*map(mx.stop_gradient, arrays))
        )
        for name in ("vjp", "jvp", "vmap"):
            if rule := getattr(self, name):
                getattr(custom, name)(rule)
        return custom(*arrays)


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


def _no_gradient(*_):
    raise ValueError(
        "a packed weight has no gradient: its values are constants. Freeze the layer "
        "(layer.freeze()), take gradients with respect to the features or to an "
        "adapter beside it, or train the float weight and pack it afterwards"
    )


# Returns packed arrays as they are; a derivative with respect to them raises.
constant: Function = Function(
    lambda *arrays: arrays,
    vjp=_no_gradient,
    jvp=_no_gradient,
    vmap=lambda arrays, axes: (tuple(arrays), tuple(axes)),
)


class Linear(Function):
    """A function that is linear in each operand.

    A subclass defines ``forward``, ``vjp``, and ``linear``: the function with its
    transformations. Arguments after ``operands`` of them (a bias) are added to each row
    of the result.
    """

    operands: int | None = None

    def __init__(self):
        """Take the rules from the subclass's methods."""

    def rows(self, primals: Sequence[mx.array]) -> int:
        """Return the rows of the result."""
        return len(primals[0])

    def jvp(
        self, primals: Sequence[mx.array], tangents: Sequence[mx.array | None]
    ) -> mx.array:
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

    def vmap(
        self, inputs: Sequence[mx.array], axes: Sequence[int | None]
    ) -> tuple[Any, Any]:
        """Return the results of calls, one after another."""
        return _one_by_one(self.linear, inputs, axes), 0


def zeros_of(
    arrays: Sequence[mx.array], shape: Sequence[int], dtype: mx.Dtype
) -> mx.array:
    """Return zeros, or no numbers, as what is made of arrays without rows.

    Gradients go on through it: where processes exchange within a backward pass, one
    without rows must not leave that out.
    """
    shape = tuple(shape)

    def vmap(inputs, axes):
        pairs = zip(several(inputs), several(axes), strict=True)
        size = next(a.shape[axis] for a, axis in pairs if axis is not None)
        return mx.zeros((size, *shape), dtype), 0

    return Function(
        lambda *_: mx.zeros(shape, dtype),
        vjp=lambda primals, *_: [mx.zeros_like(a) for a in several(primals)],
        jvp=lambda *_: mx.zeros(shape, dtype),
        vmap=vmap,
    )(*arrays)


def several(values: Any) -> Sequence[Any]:
    """Return arrays as a sequence: of a function of one, rules get that alone."""
    return values if isinstance(values, (tuple, list)) else (values,)


def filled(
    primals: Sequence[mx.array], tangents: Sequence[mx.array | None]
) -> list[mx.array]:
    """Return tangents, zeros where there is none."""
    pairs = zip(primals, tangents, strict=True)
    return [mx.zeros_like(a) if t is None else t for a, t in pairs]


class Gradient(Function):
    """A way back by kernels, whose own derivatives are the composed form's.

    Args:
        back: of (dy, x, *arrays).
        composed: of (x, *arrays), the derivative of which it is.
        statistics: arrays after x that ``composed`` computes from x instead.
    """

    def __init__(
        self,
        back: Callable[..., Any],
        composed: Callable[..., Any],
        statistics: int = 0,
    ):
        self.forward: Callable[..., Any] = back
        self.composed: Callable[..., Any] = composed
        self.statistics = statistics

    def again(
        self, dy: mx.array, x: mx.array, *arrays: mx.array
    ) -> tuple[mx.array, ...]:
        """Return what ``forward`` does, by the composed form."""
        at = [x, *arrays[self.statistics :]]
        return tuple(mx.vjp(self.composed, at, [dy])[1])

    def vjp(
        self, at: Sequence[mx.array], by: Sequence[mx.array], _: object
    ) -> tuple[mx.array, ...]:
        """Return the derivatives of the gradients by all arguments."""
        return tuple(mx.vjp(self.again, list(at), list(by))[1])

    def jvp(
        self, at: Sequence[mx.array], by: Sequence[mx.array | None]
    ) -> tuple[mx.array, ...]:
        """Return the gradients' change along tangents."""
        return tuple(mx.jvp(self.again, list(at), filled(at, by))[1])

    def vmap(
        self, inputs: Sequence[mx.array], axes: Sequence[int | None]
    ) -> tuple[Any, Any]:
        """Return the gradients of several calls."""
        found = mx.vmap(self.again, tuple(axes))(*inputs)
        return found, (0,) * len(found)


class ByKernels(Function):
    """A function by kernels, forward and back.

    ``back(dy, *arrays)`` returns the gradients of all arrays, and ``composed(*arrays)``
    is the same function in MLX operations, for forward mode, vmap and derivatives of
    the gradients. A subclass may define the three functions as methods.
    """

    statistics = 0  # as of Gradient

    def __init__(
        self,
        forward: Callable[..., Any],
        back: Callable[..., Any],
        composed: Callable[..., Any],
    ):
        self.forward: Callable[..., Any] = forward
        self.back: Callable[..., Any] = back
        self.composed: Callable[..., Any] = composed

    def gradient(self, dy: mx.array, *arrays: mx.array) -> tuple[mx.array, ...]:
        """Return what ``back`` does, with derivatives."""
        return Gradient(self.back, self.composed, self.statistics)(dy, *arrays)

    def vjp(self, primals: Any, dy: Any, _: object) -> tuple[mx.array, ...]:
        """Return the gradients of all arrays."""
        primals = several(primals)
        found = self.gradient(dy, *primals)
        return found if len(primals) > 1 else found[0]

    def jvp(self, at: Any, by: Any) -> mx.array:
        """Return a derivative along tangents."""
        at, by = [*several(at)], several(by)
        return mx.jvp(self.composed, at, filled(at, by))[1][0]

    def vmap(self, arrays: Any, axes: Any) -> tuple[Any, Any]:
        """Return the results of several calls."""
        arrays, axes = several(arrays), tuple(several(axes))
        return mx.vmap(self.composed, axes)(*arrays), 0
