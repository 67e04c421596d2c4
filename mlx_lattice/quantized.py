"""Weights in integers: MLX's affine packing along C_in, and weights for int8 features.

Storage pads channels to whole groups; no output depends on the padding. In a
``QuantizedWeight`` every ``group_size`` input channels of an (offset, output channel)
share a scale and a bias: ``w = scale * q + bias``. In an ``IntegerWeight`` every output
channel has one scale, so that products of int8 features add up in int32; an int4 weight
has an integer multiplier a group beside it (two levels, as in QServe, Lin et al. 2024):
a nibble times its multiplier is the int8 value.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from math import prod
from typing import NamedTuple

import mlx.core as mx

from .checks import INT32_LIMIT, array_of, dtype_name
from .problem import ALIGNMENT, MOST

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
    """Raise unless shapes and dtypes are those of a packed weight."""
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
    """Return the weight as (K, C_out, C_in / groups), and its spatial shape."""
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


NIBBLE, MULTIPLIER = 7, 18  # the greatest ones: 7 * 18 is below 127


class IntegerPacking(NamedTuple):
    """What an integer weight is beside its arrays; see ``IntegerWeight``."""

    in_channels: int
    bits: int
    group_size: int | None
    kernel: tuple[int, ...] | None

    @property
    def count(self) -> int:
        """How many arrays kernels get of a weight: values, or words and multipliers."""
        return 1 if self.bits == 8 else 2

    def weight(self, arrays: Sequence[mx.array]) -> IntegerWeight:
        """Return the weight of arrays that were checked before; it has no scale."""
        values, *multipliers = arrays
        made = object.__new__(IntegerWeight)
        vars(made).update(self._asdict(), values=values, scale=None)
        vars(made)["multipliers"] = multipliers[0] if multipliers else None
        return made


@dataclass(frozen=True, eq=False)
class IntegerWeight:
    """A weight for int8 features, made by ``integer_weight``.

    Attributes:
        values: (K, C_out, padded channels) int8 in -127 ... 127, zeros in the padding;
            of int4 (K, C_out, padded channels / 8) uint32, the first channel in the
            lowest bits, two's complement.
        multipliers: of int4 (K, C_out, padded channels / group_size) int8; else None.
        scale: (C_out,) float32: ``W[k, i, c] = scale[c] * value``.
        in_channels: C_in / groups, without padding.
        bits: 4 or 8.
        group_size: of int4, input channels that share a multiplier: 32, 64 or 128.
        kernel: spatial shape of a module's weight, ``()`` of a linear one, None of a
            kernel-major one.
    """

    values: mx.array
    multipliers: mx.array | None
    scale: mx.array
    in_channels: int
    bits: int = 8
    group_size: int | None = None
    kernel: tuple[int, ...] | None = None

    def __post_init__(self):
        given = self.values, self.multipliers, self.scale
        kinds = tuple([(a.shape, a.dtype) for a in given if a is not None])
        _check_arrays(kinds, self.in_channels, self.bits, self.group_size)

    @property
    def packing(self) -> IntegerPacking:
        """All but the arrays."""
        return IntegerPacking(self.in_channels, self.bits, self.group_size, self.kernel)

    @property
    def arrays(self) -> tuple[mx.array, ...]:
        """What kernels read: ``values``, and of int4 ``multipliers``."""
        return (self.values,) if self.bits == 8 else (self.values, self.multipliers)

    @property
    def padded_channels(self) -> int:
        """Input channels in storage."""
        return padded(self.in_channels, self.group_size or ALIGNMENT)

    @property
    def shape(self) -> tuple[int, int, int]:
        """Shape of the kernel-major float weight, (K, C_in / groups, C_out)."""
        return self.values.shape[0], self.in_channels, self.values.shape[1]

    @property
    def nbytes(self) -> int:
        """Bytes of all arrays."""
        return sum(a.nbytes for a in (*self.arrays, self.scale))

    def integers(self) -> mx.array:
        """Return (K, C_out, padded channels) int8, of int4 unpacked."""
        if self.bits == 8:
            return self.values
        at = 4 * mx.arange(8, dtype=mx.uint32)
        nibbles = (self.values[..., None] >> at) & 15
        signed = nibbles.astype(mx.int8)
        signed = mx.where(signed > NIBBLE, signed - 16, signed)
        shape = *self.values.shape[:2], -1, self.group_size
        made = signed.reshape(shape) * self.multipliers[..., None]
        return made.reshape(*self.values.shape[:2], -1)

    def unpacked(self) -> IntegerWeight:
        """Return the same values and scale as an int8 weight; of int8 itself."""
        if self.bits == 8:
            return self
        values = self.integers()[..., : padded(self.in_channels, ALIGNMENT)]
        facts = self.scale, self.in_channels, 8, None, self.kernel
        return IntegerWeight(mx.contiguous(values), None, *facts)

    def dense(self, dtype: mx.Dtype = mx.float32) -> mx.array:
        """Return (K, C_in / groups, C_out), computed in float32, then cast."""
        dtype_name(dtype)
        w = self.integers()[..., : self.in_channels].astype(mx.float32)
        return (w * self.scale[:, None]).swapaxes(1, 2).astype(dtype)

    def holding(self, values, multipliers, scale) -> IntegerWeight:
        """Return the same weight with other arrays."""
        return replace(self, values=values, multipliers=multipliers, scale=scale)

    def __repr__(self) -> str:
        groups = f" in groups of {self.group_size}" if self.group_size else ""
        return f"IntegerWeight(int{self.bits}{groups}, {self.shape}, {self.nbytes:,} B)"


def integer_weight(
    weight: mx.array,
    *,
    bits: int = 8,
    group_size: int | None = None,
    layout: str | None = None,
    scale: mx.array | None = None,
) -> IntegerWeight:
    """Round a float weight to integers, symmetric about zero.

    Args:
        weight: (C_out, C_in), (K, C_in / groups, C_out) or (C_out, spatial...,
            C_in / groups), float32, float16 or bfloat16. Any number of channels.
        bits: 8, or 4 with a multiplier a group of input channels.
        group_size: of int4, 32, 64 or 128; by default 64.
        layout: "linear", "kernel" or "module"; by default that of 2, 3, and 4 or more
            axes. Only a 1D module's weight, which has 3 axes, has to say so.
        scale: (C_out,) float32; by default the greatest magnitude of each output
            channel over 127 (int8) or 126 (int4). Values beyond it are clipped.

    Raises:
        TypeError: the weight is not floating.
        ValueError: bits, group size or shape are none of these, or the sums could
            leave int32.
    """
    group_size = integer_groups(bits, group_size)
    w, kernel = stored_rows(weight, layout)
    c_in = w.shape[-1]
    w = w.astype(mx.float32)
    missing = padded(c_in, group_size or ALIGNMENT) - c_in
    w = mx.pad(w, [(0, 0), (0, 0), (0, missing)])
    if scale is None:
        most = MOST if bits == 8 else NIBBLE * MULTIPLIER
        scale = mx.abs(w).max(axis=(0, 2)) / most
    scale = array_of(scale, "scale").astype(mx.float32)
    if scale.shape != w.shape[1:2]:
        raise ValueError(
            f"scale must have shape {w.shape[1:2]}, one value an output channel; got "
            f"{tuple(scale.shape)}"
        )
    steps = w / mx.where(scale == 0, 1, scale)[:, None]
    if bits == 8:
        values = mx.clip(mx.round(steps), -MOST, MOST).astype(mx.int8)
        return IntegerWeight(values, None, scale, c_in, 8, None, kernel)
    words, multipliers = _two_levels(steps, group_size)
    return IntegerWeight(words, multipliers, scale, c_in, 4, group_size, kernel)


def _two_levels(steps: mx.array, group_size: int) -> tuple[mx.array, mx.array]:
    """Return words and multipliers of weights in steps of their channel's scale.

    Of the two integers about a group's greatest magnitude over 7, the one with the
    smaller squared error is taken.
    """
    grouped = steps.reshape(*steps.shape[:2], -1, group_size)
    exact = mx.abs(grouped).max(axis=-1, keepdims=True) / NIBBLE

    def rounded(multiplier):
        nibbles = mx.clip(mx.round(grouped / multiplier), -NIBBLE, NIBBLE)
        error = mx.square(nibbles * multiplier - grouped).sum(axis=-1, keepdims=True)
        return multiplier, nibbles, error

    low, high = (
        rounded(mx.clip(side(exact), 1, MULTIPLIER)) for side in (mx.floor, mx.ceil)
    )
    is_low = low[2] <= high[2]
    multipliers, nibbles = (
        mx.where(is_low, a, b) for a, b in zip(low[:2], high[:2], strict=True)
    )
    bits = nibbles.astype(mx.int32).astype(mx.uint32) & 15
    bits = bits.reshape(*steps.shape[:2], -1, 8)
    words = (bits << (4 * mx.arange(8, dtype=mx.uint32))).sum(axis=-1)
    return words.astype(mx.uint32), multipliers.squeeze(-1).astype(mx.int8)


@lru_cache(maxsize=1024)
def _check_arrays(
    found: tuple, in_channels: int, bits: int, group_size: int | None
) -> None:
    """Raise unless these are a weight's shapes and dtypes; layers ask at every call."""
    check_integers(bits, group_size)
    volume, c_out = found[0][0][:2]
    whole = padded(in_channels, group_size or ALIGNMENT)
    wanted = (((volume, c_out, whole), mx.int8),)
    if bits == 4:
        groups = whole // group_size
        wanted = (((volume, c_out, whole // 8), mx.uint32),)
        wanted += (((volume, c_out, groups), mx.int8),)
    wanted += (((c_out,), mx.float32),)
    if found != wanted:
        raise ValueError(
            f"an int{bits} weight of {in_channels} input channels has arrays "
            f"{_said(wanted)}; got {_said(found)}"
        )
    if not fits_int32(volume, whole):
        raise ValueError(
            f"the sums of K = {volume} offsets and {in_channels} input channels could "
            f"leave int32: at most {INT32_LIMIT // MOST**2:,} products a sum fit. Keep "
            "this layer in float"
        )


def fits_int32(volume: int, channels: int) -> bool:
    """Return whether sums over so many offsets and padded channels stay int32."""
    return volume * channels * MOST**2 < INT32_LIMIT


def integer_groups(bits: int, group_size: int | None) -> int | None:
    """Return the group size of a weight: for int4 64 by default."""
    if bits == 4 and group_size is None:
        group_size = DEFAULT_GROUP_SIZE
    check_integers(bits, group_size)
    return group_size


def check_integers(bits: int, group_size: int | None) -> None:
    """Raise unless weights can be held in ``bits`` with such groups."""
    if bits == 4:
        check_packing(bits, group_size)
    check_bits(bits)
    if bits == 8 and group_size is not None:
        raise ValueError(
            "an int8 weight has one scale an output channel: group_size must be None; "
            f"got {group_size!r}"
        )


def _said(arrays: Sequence[tuple[tuple[int, ...], mx.Dtype]]) -> str:
    return ", ".join(f"{shape} {str(d).rpartition('.')[2]}" for shape, d in arrays)
