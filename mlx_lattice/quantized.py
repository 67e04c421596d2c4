"""QuantizedWeight: int4 and int8 weights in MLX's affine packing, along C_in.

Every ``group_size`` input channels of an (offset, output channel) share a scale and a
bias: ``w = scale * q + bias``. Storage pads channels to whole groups; no output depends
on the padding.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from math import prod
from typing import NamedTuple

import mlx.core as mx

from .dtypes import dtype_name

BITS = (4, 8)
GROUP_SIZES = (32, 64, 128)
DEFAULT_BITS, DEFAULT_GROUP_SIZE = 4, 64
LAYOUTS = ("linear", "kernel", "module")


class Packing(NamedTuple):
    """What a packed weight is beside its arrays; see ``QuantizedWeight``."""

    in_channels: int
    bits: int
    group_size: int
    kernel: tuple[int, ...] | None

    @property
    def count(self) -> int:
        """How many arrays kernels get of a weight: words, scales, biases."""
        return 3

    def weight(self, arrays: Sequence[mx.array]) -> QuantizedWeight:
        """Return the weight of arrays that were checked against this before."""
        return QuantizedWeight.of(arrays, self)


@dataclass(frozen=True, eq=False)
class QuantizedWeight:
    """A packed weight, made by ``quantize_weight``; every convolution takes it.

    Compiled kernels read the arrays in this one layout. Nothing that is derived from
    them is kept, so a weight cannot be stale.

    Attributes:
        weight: (K, C_out, padded channels * bits / 32) uint32, the first channel in
            the lowest bits.
        scales, biases: (K, C_out, padded channels / group_size), in the dtype of the
            features.
        in_channels: C_in / groups, without padding.
        bits: 4 or 8.
        group_size: input channels that share a scale: 32, 64 or 128.
        kernel: spatial shape of a module's weight, ``()`` of a linear one, None of a
            kernel-major one.
    """

    weight: mx.array
    scales: mx.array
    biases: mx.array
    in_channels: int
    bits: int
    group_size: int
    kernel: tuple[int, ...] | None = None

    def __post_init__(self):
        for array in self.arrays:
            _check_array(array, "weight, scales and biases")
        described = [(tuple(array.shape), array.dtype) for array in self.arrays]
        kernel = None if self.kernel is None else tuple(self.kernel)
        _check_weight(*described, self.in_channels, self.bits, self.group_size, kernel)

    @classmethod
    def of(cls, arrays: Sequence[mx.array], packing: Packing) -> QuantizedWeight:
        """Return a weight of arrays that were checked against the packing before."""
        made, (words, scales, biases) = object.__new__(cls), arrays
        vars(made).update(packing._asdict(), weight=words, scales=scales, biases=biases)
        return made

    def __copy__(self) -> QuantizedWeight:
        """Return it with arrays that nothing done to its own in place changes."""
        return QuantizedWeight.of([a.__copy__() for a in self.arrays], self.packing)

    @property
    def packing(self) -> Packing:
        """All but the arrays."""
        return Packing(self.in_channels, self.bits, self.group_size, self.kernel)

    @property
    def arrays(self) -> tuple[mx.array, mx.array, mx.array]:
        """``weight``, ``scales`` and ``biases``."""
        return self.weight, self.scales, self.biases

    @property
    def shape(self) -> tuple[int, int, int]:
        """Shape of the kernel-major float weight, (K, C_in / groups, C_out)."""
        return self.weight.shape[0], self.in_channels, self.weight.shape[1]

    @property
    def dtype(self) -> mx.Dtype:
        """Dtype of the scales, which the features must have."""
        return self.scales.dtype

    @property
    def padded_channels(self) -> int:
        """Input channels in storage: a multiple of the group size."""
        return padded(self.in_channels, self.group_size)

    @property
    def nbytes(self) -> int:
        """Bytes of the three arrays."""
        return sum(array.nbytes for array in self.arrays)

    def holding(self, weight, scales, biases) -> QuantizedWeight:
        """Return the same weight with other arrays."""
        return replace(self, weight=weight, scales=scales, biases=biases)

    def astype(self, dtype: mx.Dtype) -> QuantizedWeight:
        """Return the weight for features of another dtype: its scales are cast."""
        dtype_name(dtype)
        return self.holding(
            self.weight, self.scales.astype(dtype), self.biases.astype(dtype)
        )

    def dense(self, dtype: mx.Dtype = mx.float32) -> mx.array:
        """Return (K, C_in / groups, C_out): the values that kernels multiply with.

        They are computed in float32, then cast.
        """
        dtype_name(dtype)
        w = mx.dequantize(
            self.weight,
            self.scales.astype(mx.float32),
            self.biases.astype(mx.float32),
            group_size=self.group_size,
            bits=self.bits,
        )
        return w[..., : self.in_channels].swapaxes(1, 2).astype(dtype)

    def __repr__(self) -> str:
        """Return what is packed, and into how much."""
        full = prod(self.shape) * self.dtype.size
        return (
            f"QuantizedWeight(int{self.bits}, groups of {self.group_size}, "
            f"{self.shape}, {dtype_name(self.dtype)}, {self.nbytes:,} bytes for "
            f"{full:,})"
        )


def quantize_weight(
    weight: mx.array,
    *,
    bits: int = DEFAULT_BITS,
    group_size: int = DEFAULT_GROUP_SIZE,
    layout: str | None = None,
) -> QuantizedWeight:
    """Pack a float weight as ``mx.quantize`` does, along its input channels.

    Args:
        weight: (C_out, C_in), (K, C_in / groups, C_out) or (C_out, spatial...,
            C_in / groups), float32, float16 or bfloat16. Any number of channels.
        bits: 4 or 8.
        group_size: input channels that share a scale: 32, 64 or 128.
        layout: "linear", "kernel" or "module"; by default that of 2, 3, and 4 or more
            axes. Only a 1D module's weight, which has 3 axes, has to say so.

    Raises:
        TypeError: the weight is not floating.
        ValueError: bits, group size or shape are none of these.
    """
    check_packing(bits, group_size)
    w, kernel = stored_rows(weight, layout)
    c_in = w.shape[-1]
    w = _padded_by_last(w, group_size)
    _, scales, biases = mx.quantize(w, group_size=group_size, bits=bits)
    # mx.quantize computes levels before it rounds scales to half: compute them again.
    words = pack(w, scales, biases, bits, group_size)
    return QuantizedWeight(words, scales, biases, c_in, bits, group_size, kernel)


def dequantize_weight(q: QuantizedWeight, dtype: mx.Dtype | None = None) -> mx.array:
    """Return the float weight of a packed one, in the layout that was packed.

    Args:
        q: the packed weight.
        dtype: by default that of the scales; float32 is exact.
    """
    if not isinstance(q, QuantizedWeight):
        raise TypeError(
            f"dequantize_weight takes a QuantizedWeight; got {type(q).__name__}"
        )
    w = q.dense(q.dtype if dtype is None else dtype)
    if q.kernel is None:
        return w
    return w.transpose(2, 0, 1).reshape(w.shape[2], *q.kernel, q.in_channels)


def pack(
    w: mx.array, scales: mx.array, biases: mx.array, bits: int, group_size: int
) -> mx.array:
    """Return uint32 words of the nearest values that given scales and biases allow."""
    grouped = w.astype(mx.float32).reshape(*scales.shape, group_size)
    q = levels(grouped, scales[..., None], biases[..., None], bits)
    each = 32 // bits
    q = q.astype(mx.uint32).reshape(*w.shape[:-1], w.shape[-1] // each, each)
    return mx.sum(q << (bits * mx.arange(each, dtype=mx.uint32)), axis=-1)


def levels(w: mx.array, scales: mx.array, biases: mx.array, bits: int) -> mx.array:
    """Return the level 0 ... 2 ** bits - 1 of each value, as float32."""
    scales, biases = scales.astype(mx.float32), biases.astype(mx.float32)
    steps = mx.where(scales == 0, 1, scales)
    return mx.clip(mx.round((w - biases) / steps), 0, 2**bits - 1)


def module_layout(weight: mx.array) -> str:
    """Return the layout of a module's weight: "linear" of two axes, else "module"."""
    return "linear" if weight.ndim == 2 else "module"


def padded(channels: int, group_size: int) -> int:
    """Return the channels rounded up to whole groups."""
    return -(-channels // group_size) * group_size


def check_bits(bits: int) -> None:
    """Raise unless weights are packed in so many bits."""
    if not isinstance(bits, int) or bits not in BITS:
        raise ValueError(f"bits must be 4 or 8; got {bits!r}")


def check_packing(bits: int, group_size: int) -> None:
    """Raise unless ``bits`` and ``group_size`` can be packed."""
    check_bits(bits)
    if not isinstance(group_size, int) or group_size not in GROUP_SIZES:
        raise ValueError(f"group_size must be 32, 64 or 128; got {group_size!r}")


@lru_cache(maxsize=1024, typed=True)
def _check_weight(
    words: tuple[tuple[int, ...], mx.Dtype],
    scales: tuple[tuple[int, ...], mx.Dtype],
    biases: tuple[tuple[int, ...], mx.Dtype],
    in_channels: int,
    bits: int,
    group_size: int,
    kernel: tuple[int, ...] | None,
) -> None:
    """Raise unless shapes and dtypes are those of a packed weight.

    Layers make one at every call, alike ones: what was right stays right.
    """
    check_packing(bits, group_size)
    if not isinstance(in_channels, int) or in_channels < 1:
        raise ValueError(
            f"in_channels must be an int of at least 1; got {in_channels!r}"
        )
    shape, dtype = words
    if dtype != mx.uint32 or len(shape) != 3:
        raise ValueError(
            f"a packed weight must be (K, C_out, words) uint32; got {shape} {dtype}"
        )
    dtype_name(scales[1])
    if scales[1] != biases[1]:
        raise TypeError(f"scales are {scales[1]}, biases are {biases[1]}; cast one")
    volume, c_out = shape[:2]
    groups = padded(in_channels, group_size) // group_size
    expected = volume, c_out, groups * group_size * bits // 32
    if shape != expected:
        raise ValueError(
            f"{in_channels} input channels in int{bits} and groups of {group_size} "
            f"pack into {expected}; got {shape}"
        )
    for name, (given, _) in (("scales", scales), ("biases", biases)):
        if given != (volume, c_out, groups):
            raise ValueError(
                f"{name} must have shape {(volume, c_out, groups)}, one value a "
                f"group of {group_size} channels; got {given}"
            )
    if kernel is not None and prod(kernel) != volume:
        raise ValueError(
            f"a kernel of {kernel} has {prod(kernel)} offsets, the packed weight "
            f"{volume}"
        )


def _check_array(array: object, what: str) -> None:
    if not isinstance(array, mx.array):
        raise TypeError(f"{what} must be mlx arrays; got {type(array).__name__}")


def stored_rows(weight: mx.array, layout: str | None):
    """Return the weight as (K, C_out, C_in / groups), and its spatial shape.

    Raises:
        TypeError: it is packed already, or not floating.
        ValueError: layout or shape are none that can be packed.
    """
    if not isinstance(weight, mx.array):
        if hasattr(weight, "packing"):
            raise TypeError("the weight is packed already; give the float one")
        raise TypeError(
            f"a weight to pack must be mlx arrays; got {type(weight).__name__}"
        )
    dtype_name(weight.dtype)
    if layout is None:
        layout = {2: "linear", 3: "kernel"}.get(weight.ndim, "module")
    axes = {"linear": (2, 2), "kernel": (3, 3), "module": (3, 6)}
    if layout not in LAYOUTS:
        raise ValueError(f"layout must be one of {LAYOUTS}; got {layout!r}")
    least, most = axes[layout]
    if not least <= weight.ndim <= most or 0 in weight.shape:
        raise ValueError(
            "a weight to pack must have shape (C_out, C_in), (K, C_in / groups, C_out) "
            f"or (C_out, spatial..., C_in / groups); got {tuple(weight.shape)} as "
            f"{layout!r}"
        )
    if layout == "kernel":
        return weight.swapaxes(1, 2), None
    flat = weight.reshape(weight.shape[0], -1, weight.shape[-1])
    return flat.swapaxes(0, 1), tuple(weight.shape[1:-1])


def _padded_by_last(w: mx.array, group_size: int) -> mx.array:
    """Pad to whole groups with the last channel, which widens no group's range."""
    missing = padded(w.shape[-1], group_size) - w.shape[-1]
    if not missing:
        return w
    return mx.concatenate([w, mx.repeat(w[..., -1:], missing, axis=-1)], axis=-1)
