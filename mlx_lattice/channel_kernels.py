"""What kernels apply to channels: scales, sums, activations, joins; who observes norms.

The kernels of norms do it with a mean of 0 and a variance of 1, which change no bit.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from contextvars import ContextVar
from dataclasses import dataclass
from typing import Generic, TypeVar

import mlx.core as mx

from . import devices, registry, sync
from .checks import FLOATS, dtype_text
from .epilogue import (
    NONE,
    SLOPE,
    Activation,
    Epilogue,
    EpilogueFacts,
    composed,
    finished,
)
from .registry import Fit, Norms, RowSegments, standard
from .routes import launch
from .transformations import ByKernels, Function, filled

Fact = TypeVar("Fact")
Tell = Callable[..., None]
WORDS = mx.uint64, mx.uint32, mx.uint16
# Rows from which kernels of this library sum columns, instead of MLX; timed on an H200.
SUMMED_ROWS = 256


# Joins.


def beside(parts: Sequence[mx.array]) -> mx.array:
    """Return arrays of one dtype and number of rows, beside each other."""
    kernels = registry.joins()
    if kernels is not None and kernels.takes(parts):
        return _joined(*parts)
    # MLX copies parts of rows number by number: so int8 in the widest words that fit.
    if parts[0].dtype == mx.int8 and parts[0].size:
        channels = [each.shape[1] for each in parts]
        for word in WORDS:
            if not any(c % word.size for c in channels):
                words = [each.view(word) for each in parts]
                return mx.concatenate(words, axis=1).view(mx.int8)
    return mx.concatenate(parts, axis=1)


_joined = Function(
    lambda a, b: registry.joins().join(a, b),
    vjp=lambda at, dy, _: _split(at[0].shape[1])(dy),
    jvp=lambda at, by: mx.concatenate(filled(at, by), axis=1),
)


def _split(c_a: int) -> Function:
    """Return a function that splits rows after their first ``c_a`` channels."""
    return Function(
        lambda y: tuple(registry.joins().split(y, c_a)),
        vjp=lambda _, parts, __: _joined(*parts),
        jvp=lambda _, y: (y[:, :c_a], y[:, c_a:]),
    )


# Observers of norms.


class Observers(Generic[Fact]):
    """The callbacks for one kind of fact; true if there are any."""

    def __init__(self, name: str):
        self._now: ContextVar[tuple[Callable[[Fact], None], ...]] = ContextVar(
            name, default=()
        )

    def __bool__(self) -> bool:
        return bool(self._now.get())

    @contextmanager
    def observe(self, observer: Callable[[Fact], None]) -> Iterator[None]:
        """Call ``observer`` with every fact inside the block."""
        token = self._now.set((*self._now.get(), observer))
        try:
            yield
        finally:
            self._now.reset(token)

    def tell(self, fact: Fact) -> None:
        """Call each observer with a fact."""
        for observer in self._now.get():
            observer(fact)


@dataclass(frozen=True)
class Fused:
    """One norm as it ran, with what was fused into it."""

    scope: object  # the layer that called it, or None
    pass_: str
    parts: tuple[str, ...]  # ("BatchNorm", "residual", "ReLU"), in order
    backend: str
    launches: int | None  # None: MLX operations; 0: with the layer before
    rows: int
    channels: int
    dtype: str

    def __str__(self) -> str:
        """As "BatchNorm + residual + ReLU, one launch"."""
        counts = {None: "MLX operations", 0: "with the layer before", 1: "one launch"}
        count = counts.get(self.launches, f"{self.launches} launches")
        return f"{' + '.join(self.parts)}, {count}"


norm_observers: Observers[Fused] = Observers("norms")


def ignore_event(*_: object) -> None:
    """Report to no observer."""


def norm_teller(parts: Sequence[str], kernels: bool, x: mx.array) -> Tell:
    """Return a function of (pass, launches) that reports a norm over ``x``."""
    if not norm_observers:
        return ignore_event
    scope, named = launch.current_scope(), tuple(filter(None, parts))
    backend = registry.serving() if kernels else registry.MLX
    # MLX may keep the returned function, which keeps no array.
    rows, channels, dtype = *x.shape, dtype_text(x)

    def tell(pass_: str, launches: int | None) -> None:
        norm_observers.tell(
            Fused(scope, pass_, named, backend, launches, rows, channels, dtype)
        )

    return tell


def tell_epilogue(layer: object, after: Epilogue, feats: mx.array) -> None:
    """Report an epilogue that a convolution computed for a layer."""
    with launch.scope(layer) if norm_observers else nullcontext():
        norm_teller(after.facts.parts, True, feats)("forward", 0)


# Scales, sums and activations.


class Affine(ByKernels):
    """``act(x * weight + bias + residual)`` of rows by kernels; norms derive from it.

    A function of x and of those that are ``present`` of weight, bias and residual. It
    holds no array of a call: MLX keeps rules until it has evaluated their results.
    Derivatives that ``back`` does not give are those of ``composed``. ``segments`` of
    rows have a line of weight and bias each, and ``spread`` makes lines of rows.
    """

    def __init__(
        self,
        kernels: Norms | None,
        present: Sequence[bool] = (False, False, False),
        act: Activation = NONE,
        eps: float = 0.0,
        segments: RowSegments | None = None,
        spread: Callable[[mx.array], mx.array] | None = None,
        tell: Callable[..., None] = ignore_event,
    ):
        self.kernels: Norms | None = kernels
        self.present: Sequence[bool] = present
        self.act: Activation = act
        self.eps: float = eps
        self.segments: RowSegments | None = segments
        self.spread: Callable[[mx.array], mx.array] | None = spread
        self.tell: Callable[..., None] = tell

    def named(self, rest: Sequence[mx.array]) -> list[mx.array | None]:
        """Return weight, bias and residual, None for those that are not present."""
        arrays = iter(rest)
        return [next(arrays) if each else None for each in self.present]

    def those(self, *values: mx.array | None) -> list[mx.array]:
        """Return the values of those of weight, bias and residual that are present."""
        pairs = zip(values, self.present, strict=True)
        return [value for value, each in pairs if each]

    def of_rows(self, *lines: mx.array | None) -> list[mx.array | None]:
        """Return a line of each row, of lines of segments."""
        if self.spread is None:
            return [*lines]
        return [None if line is None else self.spread(line) for line in lines]

    def fit(
        self,
        mean: mx.array,
        var: mx.array,
        weight: mx.array | None = None,
        bias: mx.array | None = None,
    ) -> Fit:
        """Return what kernels normalise by."""
        return Fit(mean, var, weight, bias, self.eps, self.act, self.segments)

    @property
    def lines(self) -> int:
        """Return how many lines of weight and bias there are."""
        return 1 if self.segments is None else self.segments.size

    def _scaling(self, x: mx.array, weight=None, bias=None) -> Fit:
        return self.fit(*standard(x.shape[1], self.lines), weight, bias)

    def affine(
        self,
        x: mx.array,
        mean: mx.array,
        var: mx.array,
        weight: mx.array | None,
        bias: mx.array | None,
        residual: mx.array | None,
    ) -> mx.array:
        """Normalise, scale, add and activate in MLX operations and float32."""
        facts = EpilogueFacts(activation=self.act.called, eps=self.eps)
        return finished(x, facts, bias, weight, mean, var, residual)

    def composed(self, x: mx.array, *rest: mx.array) -> mx.array:
        """Return what ``forward`` does, in MLX operations."""
        *lines, residual = self.named(rest)
        # Not x itself: gradients that are one array have one cotangent in MLX's vjp.
        none, one = mx.array(0.0), mx.array(1.0)
        lines = self.of_rows(*lines)
        return self.affine(x, none, one, *lines, residual)

    def forward(self, x: mx.array, *rest: mx.array) -> mx.array:
        """Return the result, by kernels."""
        weight, bias, residual = self.named(rest)
        self.tell("forward", 1)
        return self.kernels.normalize(x, self._scaling(x, weight, bias), residual)

    def back(self, dy: mx.array, x: mx.array, *rest: mx.array) -> tuple[mx.array, ...]:
        """Return the gradients of x and of those that are present of the rest."""
        dy, x = mx.contiguous(dy), mx.contiguous(x)  # several launches read them
        weight, bias, residual = self.named(rest)
        fit, kernels = self._scaling(x, weight, bias), self.kernels
        dx, dresidual = kernels.gradient(dy, x, fit, residual)
        dweight = dbias = None
        if weight is not None:
            *_, dweight, dbias = kernels.gradient_sums(dy, x, fit, residual)
            dweight, dbias = (a.reshape(weight.shape) for a in (dweight, dbias))
        elif bias is not None:
            dbias = column_sums(dx, bias)
        self.tell("backward", 1 if weight is None and bias is None else 3)
        return dx, *self.those(dweight, dbias, dresidual)


def activation(x: mx.array, act: Activation) -> mx.array:
    """Return an activation in one launch; its derivative is one, too."""
    if not x.size:  # of which MLX's compiled activations on CUDA divide by zero
        return x
    kernels = registry.norms() if x.ndim > 1 else None
    if kernels is None or x.dtype not in FLOATS:
        return composed(act)(x)
    # Within a transformation MLX's is several launches; else its ReLU writes in place.
    of_mlx = act.kind == SLOPE and not sync.is_transforming()
    if of_mlx and devices.current().backend != devices.CPU:
        return composed(act)(x)
    rows = x if x.ndim == 2 else x.reshape(-1, x.shape[-1])
    return Affine(kernels, act=act)(rows).reshape(x.shape)


def activation_gradient(dy: mx.array, x: mx.array, act: Activation) -> mx.array:
    """Return ``dy`` times the derivative of an activation at ``x``, in one launch."""
    kernels = registry.norms() if x.size else None
    if kernels is None or x.dtype not in FLOATS:
        return mx.vjp(composed(act), [x], [dy])[1][0]
    return Affine(kernels, act=act).gradient(dy, x)[0]


def activated_sum(
    x: mx.array,
    act: Activation,
    bias: mx.array | None = None,
    residual: mx.array | None = None,
) -> mx.array:
    """Return ``act(x + bias + residual)`` in one launch, and one back."""
    if not x.size:  # of which MLX's compiled activations on CUDA divide by zero
        return x if residual is None else x + residual
    kernels = registry.norms() if x.dtype in FLOATS else None
    rules = Affine(kernels, (False, bias is not None, residual is not None), act)
    function = rules.composed if kernels is None else rules
    return function(x, *[a for a in (bias, residual) if a is not None])


# Sums of columns.


def column_sums(x: mx.array, like: mx.array) -> mx.array:
    """Return the (C,) sums over the rows of (N, C), in the dtype of ``like``."""
    if like.dtype not in FLOATS or not sums_columns(x):
        return x.sum(axis=0).astype(like.dtype)
    return _ColumnSums(registry.norms(), like.dtype)(x)


def sums_columns(x: mx.array) -> bool:
    """Whether kernels sum the columns of an array: not on Metal, nor of few rows."""
    if x.ndim != 2 or x.shape[0] < SUMMED_ROWS or not x.size or x.dtype not in FLOATS:
        return False
    kernels = registry.norms()
    return kernels is not None and kernels.sums_columns


class _ColumnSums(Function):
    """Sums over the rows of (N, C), in a dtype."""

    def __init__(self, kernels: Norms, dtype: mx.Dtype):
        self.kernels, self.dtype = kernels, dtype

    def forward(self, x: mx.array) -> mx.array:
        return self.kernels.column_sums(mx.contiguous(x), self.dtype)

    def by_mlx(self, x: mx.array) -> mx.array:
        return x.sum(axis=0).astype(self.dtype)

    def vjp(self, x, by, _):
        return mx.broadcast_to(by, x.shape).astype(x.dtype)

    def jvp(self, x, by):
        return self.by_mlx(by)

    def vmap(self, x, axis):
        return mx.vmap(self.by_mlx, in_axes=(axis,))(x), 0
