"""Epilogue: what a convolution does to its sums before it rounds them.

``y = act((sum - mean) / sqrt(var + eps) * scale + shift + residual)``: a norm with
fixed statistics, a residual and an activation, in the launch of the convolution where
its kernel can.
"""

from __future__ import annotations

import re
import struct
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property, lru_cache, partial
from typing import Any, NamedTuple

import mlx.core as mx
import mlx.nn

# The arrays of an epilogue, in the order of kernels; a bias is a shift.
STATISTICS = "mean", "var"
CHANNELS = "shift", "scale", *STATISTICS
ARRAYS = *CHANNELS, "residual"


class _Facts(NamedTuple):  # hashed at every launch, faster than a dataclass
    there: tuple[str, ...] = ()
    activation: str = ""
    norm: str = ""
    eps: float = 0.0
    dtype: str = "float32"


class EpilogueFacts(_Facts):
    """What an epilogue has, without its arrays: what a plan may depend on."""

    @cached_property
    def act(self) -> Activation:
        """The activation."""
        return named(self.activation)

    @property
    def template(self) -> tuple[tuple[str, int | mx.Dtype], ...]:
        """The template arguments of a kernel that computes it."""
        (bits,) = struct.unpack("<i", struct.pack("<f", self.eps))
        kind = "P", getattr(mx, self.dtype)
        return ("ACTIVATION", self.act.code), kind, ("EPS", bits)

    @cached_property
    def is_of_result(self) -> bool:
        """Whether its derivative takes no more than its result."""
        adds = {"shift", "residual"}.issuperset(self.there)
        return adds and self.act.is_of_result

    def kind(self, name: str) -> str:
        """Return the dtype of one of ``CHANNELS``."""
        return "float32" if name in STATISTICS else self.dtype

    @cached_property
    def dtypes(self) -> tuple[mx.Dtype | None, ...]:
        """The dtype of each array that it has; None of a residual, which keeps its."""
        return tuple(
            None if name == "residual" else getattr(mx, self.kind(name))
            for name in self.there
        )

    def named(self, arrays: Sequence[mx.array]) -> list[mx.array | None]:
        """Return all ``ARRAYS``, None for each that is missing."""
        given = *arrays, None
        return [given[place] for place in self._places]

    @cached_property
    def _places(self) -> tuple[int, ...]:
        """Where each of ``ARRAYS`` stands among those that there are; -1: it is not."""
        return tuple(
            self.there.index(name) if name in self.there else -1 for name in ARRAYS
        )

    @property
    def parts(self) -> tuple[str, ...]:
        """What it computes, in order: ("BatchNorm", "residual", "ReLU")."""
        own = (self.norm,) if self.norm else (n for n in CHANNELS if n in self.there)
        added = "residual" if "residual" in self.there else ""
        return tuple(filter(None, (*own, added, self.act.name)))

    def __str__(self) -> str:
        return " ".join(f"+ {part}" for part in self.parts)

    def __reduce__(self) -> tuple[Any, ...]:
        """Copy and pickle the fields: cached dtypes of MLX do not pickle."""
        return EpilogueFacts, tuple(self)


class _Fields(NamedTuple):
    scale: mx.array | None = None
    shift: mx.array | None = None
    residual: mx.array | None = None
    activation: str = ""
    mean: mx.array | None = None
    var: mx.array | None = None
    eps: float = 0.0
    norm: str = ""
    residual_scale: mx.array | None = None


class Epilogue(_Fields):
    """``y = act((sum - mean) / sqrt(var + eps) * scale + shift + residual)``.

    Attributes:
        scale, shift, mean, var: (C_out,) float32 or of the features' dtype, or None.
        residual: (N_out, C_out) of the features' dtype, or None.
        activation: what it is called, see ``activations``; "" is none.
        eps: added to the variance.
        norm: name of the layer that it is of, as ``explain`` prints it.
        residual_scale: (1,) float32, of an int8 residual: integer layers alone.
    """

    @property
    def facts(self) -> EpilogueFacts:
        """What it has."""
        dtypes = tuple([a if a is None else a.dtype for a in self.slots])
        return _facts(self.activation, self.norm, self.eps, dtypes)

    @cached_property
    def key(self) -> tuple[Any, ...]:
        """What calls with other arrays share, whatever their rows."""
        of_channels = self.shift, self.scale, self.mean, self.var
        arrays = tuple([a if a is None else (a.shape, a.dtype) for a in of_channels])
        beside = None if self.residual is None else self.residual.dtype
        return self.activation, self.eps, self.norm, arrays, beside

    @property
    def slots(self) -> tuple[mx.array | None, ...]:
        """All of ``ARRAYS``, in their order."""
        return self.shift, self.scale, self.mean, self.var, self.residual

    @cached_property
    def arrays(self) -> tuple[mx.array, ...]:
        """Those of ``ARRAYS`` that there are."""
        return tuple([array for array in self.slots if array is not None])

    def as_kernels_take(self, facts: EpilogueFacts) -> list[mx.array]:
        """Return ``arrays``: scale and shift in one dtype, mean and var in float32."""
        return [
            a if dtype is None else a.astype(dtype)
            for a, dtype in zip(self.arrays, facts.dtypes, strict=True)
        ]

    def is_as_kernels_take(self, facts: EpilogueFacts) -> bool:
        """Whether ``arrays`` have these dtypes as they are."""
        for array, dtype in zip(self.arrays, facts.dtypes, strict=True):
            if dtype is not None and array.dtype != dtype:
                return False
        return True

    def check(self, shape: tuple[int, int], dtype: mx.Dtype) -> None:
        """Raise a TypeError or ValueError for what a contraction cannot take."""
        named(self.activation)
        for name, array in zip(ARRAYS, self.slots, strict=True):
            if array is None:
                continue
            wanted, dtypes = shape[1:], {mx.float32, dtype}
            if name == "residual":
                wanted, dtypes = shape, {dtype}
            if tuple(array.shape) != wanted:
                raise ValueError(
                    f"the epilogue's {name} must have shape {wanted}; got "
                    f"{tuple(array.shape)}"
                )
            if array.dtype not in dtypes:
                raise TypeError(
                    f"the epilogue's {name} must be {' or '.join(map(str, dtypes))}; "
                    f"got {array.dtype}"
                )

    def biased(self, bias: mx.array) -> Epilogue:
        """Return it for sums that a bias is added to first."""
        if all(getattr(self, name) is None for name in CHANNELS):
            return self._replace(shift=bias)
        bias = bias.astype(mx.float32)
        if self.var is not None or self.mean is not None:
            mean = -bias if self.mean is None else self.mean - bias
            return self._replace(mean=mean)
        shift = bias if self.scale is None else self.scale * bias
        shift = shift if self.shift is None else shift + self.shift
        return self._replace(shift=shift)


class Moments:
    """Asks a convolution for statistics of the rows that it writes: a norm follows.

    In the place of an epilogue. Once the convolution was called, ``lines`` are (L, 3,
    C_out) float32: the number of some rows, their mean and sum of squares about it; or
    None if its kernel does not sum them.
    """

    __slots__ = ("lines",)

    key: str = "moments"
    residual: None = None

    def __init__(self):
        self.lines: mx.array | None = None


@lru_cache(maxsize=1024)
def _facts(
    activation: str, norm: str, eps: float, dtypes: tuple[mx.Dtype | None, ...]
) -> EpilogueFacts:
    """Return the facts of an epilogue with arrays of some dtypes, None for no array."""
    named = dict(zip(ARRAYS, dtypes, strict=True))
    there = tuple(name for name, dtype in named.items() if dtype is not None)
    kinds = {named[name] for name in ("shift", "scale")} - {None}
    dtype = kinds.pop() if len(kinds) == 1 else mx.float32
    kind = str(dtype).rpartition(".")[2]
    return EpilogueFacts(there, activation, norm, eps, kind)


def finished(
    sums: mx.array,
    facts: EpilogueFacts,
    shift: mx.array | None = None,
    scale: mx.array | None = None,
    mean: mx.array | None = None,
    var: mx.array | None = None,
    residual: mx.array | None = None,
) -> mx.array:
    """Return an epilogue of sums, in MLX operations and the dtype of the sums."""
    y = sums.astype(mx.float32)
    if mean is not None:
        y = y - mean
    if var is not None:
        y = y * mx.rsqrt(var.astype(mx.float32) + facts.eps)
    if scale is not None:
        y = y * scale
    if shift is not None:
        y = y + shift
    if residual is not None:
        y = y + residual
    if facts.activation and y.size:  # MLX's on CUDA divide by zero of no rows
        y = composed(facts.act)(y)
    return y.astype(sums.dtype)


# Kinds, as kernels of norms number them.
SLOPE, GELU, SILU, GELU_TANH, ELU = range(5)
# Float32 that no kernel rounds to 0, or to infinity.
_LEAST, _MOST = 2.0**-126, 3.4028234e38


@dataclass(frozen=True)
class Activation:
    """One activation: its name as ``explain`` has it, its kind and a number.

    The slope below zero of SLOPE: 1 changes nothing, 0 is ReLU; or the alpha of ELU.
    """

    name: str = ""
    kind: int = SLOPE
    slope: float = 1.0

    @property
    def changes(self) -> bool:
        """Whether it does anything."""
        return self.kind != SLOPE or self.slope != 1.0

    @property
    def is_of_result(self) -> bool:
        """Whether the derivative follows from the result, so that no input is kept."""
        return self.kind == SLOPE

    @cached_property
    def called(self) -> str:
        """The name that ``named`` takes."""
        name = next(n for n, act in _ALL.items() if act.name == self.name)
        return name if _ALL[name] == self else f"{name}({self.slope!r})"

    @cached_property
    def code(self) -> int:
        """The activation in one int, as kernels with epilogues take it.

        0 is none, 1 ReLU, 2 to 4 the other kinds; beyond are the bits of a float32: of
        a slope from 0 to 1, or of minus the alpha of ELU.
        """
        if self.kind == ELU:
            return _bits(-self.slope)
        if self.kind != SLOPE or self.slope == 0:
            return self.kind + 1
        return _bits(self.slope) if self.changes else 0


def _bits(value: float) -> int:
    return struct.unpack("<i", struct.pack("<f", value))[0]


NONE = Activation()
ACTIVATIONS = {
    "relu": Activation("ReLU", slope=0.0),
    "gelu": Activation("GELU", GELU),
    "silu": Activation("SiLU", SILU),
    "gelu_tanh": Activation("GELU(tanh)", GELU_TANH),
    "leaky_relu": Activation("LeakyReLU", slope=0.01),
    "elu": Activation("ELU", ELU),
}
_ALL = {"": NONE, **ACTIVATIONS}
_WITH_SLOPE = re.compile(r"(\w+)\((.+)\)")


def leaky_relu(slope: float) -> Activation | None:
    """Return LeakyReLU with this slope, or None if no kernel computes it."""
    slope = float(slope)
    fits = slope == 0 or _LEAST <= slope <= 1
    return Activation("LeakyReLU", slope=abs(slope)) if fits else None


def elu(alpha: float) -> Activation | None:
    """Return ELU with this alpha, or None if no kernel computes it."""
    alpha = float(alpha)
    return Activation("ELU", ELU, alpha) if _LEAST <= alpha <= _MOST else None


@lru_cache(maxsize=256)
def named(called: str) -> Activation:
    """Return the activation of a name, NONE for ""; raise a ValueError if unknown."""
    if called in _ALL:
        return _ALL[called]
    found = _WITH_SLOPE.fullmatch(called)
    if found and found[1] in ("leaky_relu", "elu"):
        try:
            slope = float(found[2])
        except ValueError:
            slope = -1.0
        act = leaky_relu(slope) if found[1] == "leaky_relu" else elu(slope)
        if act is not None:
            return act
    raise ValueError(
        f"the activation must be one of {', '.join(map(repr, _ALL))}, or such as "
        f"'leaky_relu(0.2)' or 'elu(0.5)'; got {called!r}"
    )


def _gelu_tanh(v: mx.array) -> mx.array:
    """Return GELU by tanh; MLX's own has a second derivative of NaN far from 0."""
    return v * mx.sigmoid(1.5957691216 * v * (1 + 0.044715 * v * v))


def _elu(v: mx.array, alpha: float) -> mx.array:
    """Return ELU; the derivative of MLX's own is NaN from 89 on."""
    below = mx.where(v > 0, 0, v)
    return mx.where(v > 0, v, alpha * (mx.exp(below) - 1))


def _same(v: mx.array) -> mx.array:
    return v


_COMPOSED = {GELU: mlx.nn.gelu, SILU: mlx.nn.silu, GELU_TANH: _gelu_tanh}


@lru_cache(maxsize=256)
def composed(act: Activation) -> Callable[[mx.array], mx.array]:
    """Return an activation in MLX operations."""
    if act.kind == ELU:
        return partial(_elu, alpha=act.slope)
    if act.kind != SLOPE:
        return _COMPOSED[act.kind]
    if act.slope == 0:
        return mlx.nn.relu
    return (
        partial(mlx.nn.leaky_relu, negative_slope=act.slope) if act.changes else _same
    )
