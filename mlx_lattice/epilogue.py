"""Epilogue: what a convolution does to its sums before it rounds them.

``y = act((sum - mean) / sqrt(var + eps) * scale + shift + residual)``: a norm with
fixed statistics, a residual and an activation, in the launch of the convolution where
its kernel can.
"""

from __future__ import annotations

import struct
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property, lru_cache
from typing import NamedTuple

import mlx.core as mx

from .activations import Activation, composed, named

# The arrays of an epilogue, in the order of kernels; a bias is a shift.
STATISTICS = "mean", "var"
CHANNELS = "shift", "scale", *STATISTICS
ARRAYS = *CHANNELS, "residual"


@dataclass(frozen=True)
class EpilogueFacts:
    """What an epilogue has, without its arrays: what a plan may depend on.

    Attributes:
        there: those of ``ARRAYS`` that it has, in that order.
        activation: what it is called, see ``activations``.
        norm: name of the layer that this is of, for readers.
        eps: what is added to the variance.
        dtype: of scale and shift; mean and var are float32.
    """

    there: tuple[str, ...] = ()
    activation: str = ""
    norm: str = ""
    eps: float = 0.0
    dtype: str = "float32"

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
        """Whether its derivative takes no more than its result.

        Arrays are added, and the activation, if there is one, has its slope by that.
        """
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
        return [arrays[i] if i < len(arrays) else None for i in self._places]

    @cached_property
    def _places(self) -> tuple[int, ...]:
        """Where each of ``ARRAYS`` stands among those that there are, or beyond."""
        return tuple(
            self.there.index(name) if name in self.there else len(ARRAYS)
            for name in ARRAYS
        )

    @property
    def parts(self) -> tuple[str, ...]:
        """What it computes, in order: ("BatchNorm", "residual", "ReLU")."""
        own = (self.norm,) if self.norm else (n for n in CHANNELS if n in self.there)
        added = "residual" if "residual" in self.there else ""
        return tuple(filter(None, (*own, added, self.act.name)))

    def __str__(self) -> str:
        return " ".join(f"+ {part}" for part in self.parts)


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
    def key(self) -> tuple:
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
        if self.var is not None and self.mean is not None:
            # On a GPU in one launch: layers ask for it at every call.
            on_gpu = mx.default_device() == mx.gpu
            about_bias = _IN_ONE_LAUNCH if on_gpu else _mean_and_var
            mean, var = about_bias(self.mean, self.var, bias)
            return self._replace(mean=mean, var=var)
        bias = bias.astype(mx.float32)
        if self.var is not None or self.mean is not None:
            mean = -bias if self.mean is None else self.mean - bias
            return self._replace(mean=mean)
        shift = bias if self.scale is None else self.scale * bias
        shift = shift if self.shift is None else shift + self.shift
        return self._replace(shift=shift)


def _mean_and_var(mean: mx.array, var: mx.array, bias: mx.array) -> list[mx.array]:
    """Return float32 statistics of sums without the bias that ``mean`` is with."""
    mean, var, bias = (a.astype(mx.float32) for a in (mean, var, bias))
    return [mean - bias, var]


_IN_ONE_LAUNCH = mx.compile(_mean_and_var, shapeless=True)


class Moments:
    """Asks a convolution for statistics of the rows that it writes: a norm follows.

    In the place of an epilogue. Kernels that can sum them as they write.

    Attributes:
        lines: (L, 3, C_out) float32: how many rows, and of each channel their mean and
            the sum of squares about it, of some rows each, once the convolution was
            called; None where its kernel does not sum them.
    """

    __slots__ = ("lines",)

    key, residual = "moments", None

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
    if not sums.size:  # of which MLX's compiled activations on CUDA divide by zero
        return sums
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
    if facts.activation:
        y = composed(facts.act)(y)
    return y.astype(sums.dtype)
