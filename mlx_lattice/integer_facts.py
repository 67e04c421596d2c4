"""IntegerFacts: what a contraction of int8 features does to its int32 sums.

``v = float32(sum) * scale + shift + residual``, then an activation, each operation
rounded by itself, so that every backend and route gives the same bits. The result is
rounded to a float dtype, or to int8 for the next layer.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property

import mlx.core as mx

from .activations import Activation, composed, named

# The arrays that follow x and w, in the order of kernels.
ARRAYS = (
    "scale", "shift", "residual", "residual_scale", "out_inverse", "row_scales",
)  # fmt: skip
FOLLOWING = ARRAYS[:-1]  # what follows the sums: scales of rows are in them
WHOLE = 8  # numbers that a scalar of kernels lies in, see in_device_memory
MOST = 127  # int8 values are -127 ... 127
ALIGNMENT = 32  # weights pad input channels to a multiple of it


@dataclass(frozen=True)
class IntegerFacts:
    """What follows the sums of int8 features, without its arrays.

    Attributes:
        there: those of ``ARRAYS`` that there are, in that order; always ``scale``.
        activation: what it is called, see ``activations``; "" is none.
    """

    there: tuple[str, ...] = ("scale",)
    activation: str = ""

    @cached_property
    def act(self) -> Activation:
        """The activation."""
        return named(self.activation)

    @property
    def writes_int8(self) -> bool:
        """Whether the result is int8, else of the problem's dtype."""
        return "out_inverse" in self.there

    @property
    def residual_int8(self) -> bool:
        """Whether the residual is int8, with a scale."""
        return "residual_scale" in self.there

    @property
    def row_scales(self) -> bool:
        """Whether every input row has a scale of its own."""
        return "row_scales" in self.there

    def out_dtype(self, dtype: mx.Dtype) -> mx.Dtype:
        """Return the dtype of the result in a problem of a float dtype."""
        return mx.int8 if self.writes_int8 else dtype

    def named(self, arrays: Sequence[mx.array]) -> list[mx.array | None]:
        """Return all ``ARRAYS`` of those that there are, None for the others."""
        rest = iter(arrays)
        return [next(rest) if name in self.there else None for name in ARRAYS]

    def __str__(self) -> str:
        added = [name for name in ("shift", "residual") if name in self.there]
        parts = [*added, *filter(None, [self.act.name])]
        text = "by row scales " if self.row_scales else ""
        text += " ".join(f"+ {part}" for part in parts)
        return f"{text.strip()} to int8".strip() if self.writes_int8 else text.strip()


def finished(
    sums: mx.array,
    facts: IntegerFacts,
    dtype: mx.Dtype,
    scale: mx.array,
    shift: mx.array | None = None,
    residual: mx.array | None = None,
    residual_scale: mx.array | None = None,
    out_inverse: mx.array | None = None,
) -> mx.array:
    """Return what follows the sums, in MLX operations.

    Sums are (N, C_out) int32, or float32 if rows have scales of their own.
    """
    v = sums.astype(mx.float32) * scale
    if shift is not None:
        v = v + shift
    if residual is not None:
        added = residual.astype(mx.float32)
        v = v + (added if residual_scale is None else added * residual_scale)
    if facts.activation and v.size:
        v = composed(facts.act)(v)
    return v.astype(dtype) if out_inverse is None else to_int8(v, out_inverse)


def in_device_memory(scalar: mx.array) -> mx.array:
    """Return a (1,) array in memory that a GPU reads as fast as any.

    MLX's CUDA backend keeps arrays of up to 8 bytes in host memory (``scalar_pool_`` of
    its allocator), where every read of a kernel goes over the bus. This one is a view
    of the first of several numbers. It moves to the host when it is read there.
    """
    return mx.pad(scalar, (0, WHOLE - 1))[:1]


def to_int8(x: mx.array, inverse: mx.array) -> mx.array:
    """Return ``clip(round(x * inverse), -127, 127)`` as int8, halves to even."""
    levels = mx.round(x.astype(mx.float32) * inverse)
    return mx.clip(levels, -MOST, MOST).astype(mx.int8)
