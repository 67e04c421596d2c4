"""Activations that kernels compute: after norms, in epilogues, and alone.

Each is called by its name in ``mlx.nn``; one whose slope is not the usual has it behind
the name: "leaky_relu(0.2)", "elu(0.5)".
"""

from __future__ import annotations

import re
import struct
from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property, lru_cache, partial

import mlx.core as mx
import mlx.nn

# Kinds, as kernels of norms number them.
SLOPE, GELU, SILU, GELU_TANH, ELU = range(5)
# Float32 that no kernel rounds to 0, or to infinity.
_LEAST, _MOST = 2.0**-126, 3.4028234e38


@dataclass(frozen=True)
class Activation:
    """One activation.

    Attributes:
        name: as ``explain`` and a trace have it; empty if nothing follows.
        kind: SLOPE, GELU (by erf), SILU, GELU_TANH or ELU.
        slope: of SLOPE below zero: 1 changes nothing, 0 is ReLU; of ELU just below
            zero: its alpha.
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
        """Whether its result says its slope: nobody has to keep what it read."""
        return self.kind == SLOPE

    @cached_property
    def called(self) -> str:
        """What it is called, for ``named``."""
        name = next(n for n, act in _ALL.items() if act.name == self.name)
        return name if _ALL[name] == self else f"{name}({self.slope!r})"

    @cached_property
    def code(self) -> int:
        """What says all of it to kernels with epilogues, in one int.

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
    """Return LeakyReLU of a slope; None where kernels have none of it."""
    slope = float(slope)
    fits = slope == 0 or _LEAST <= slope <= 1
    return Activation("LeakyReLU", slope=abs(slope)) if fits else None


def elu(alpha: float) -> Activation | None:
    """Return ELU of an alpha; None where kernels have none of it."""
    alpha = float(alpha)
    return Activation("ELU", ELU, alpha) if _LEAST <= alpha <= _MOST else None


@lru_cache(maxsize=256)
def named(called: str) -> Activation:
    """Return an activation by what it is called; "" is none. Raises a ValueError."""
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
    """GELU by tanh, as a sigmoid: far from 0 MLX's own has NaN for a second slope."""
    return v * mx.sigmoid(1.5957691216 * v * (1 + 0.044715 * v * v))


def _elu(v: mx.array, alpha: float) -> mx.array:
    """ELU, of which MLX's own has NaN for a slope from 89 on."""
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
