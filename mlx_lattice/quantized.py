"""Packed weights: MLX's affine packing along C_in, and integers for int8 features.

In a ``QuantizedWeight`` every ``group_size`` input channels of an (offset, output
channel) share a scale and a bias: ``w = scale * q + bias``. In an ``IntegerWeight``
every output channel has one scale, so that products with int8 features add up in int32.
An int4 weight for int8 features also has an integer multiplier for each group of
channels (two levels, as in QServe, Lin et al. 2024): a nibble times its multiplier is
the int8 value. Storage pads channels to whole groups; no output depends on the padding.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from math import prod
from typing import ClassVar, NamedTuple

import mlx.core as mx

from .checks import INT32_LIMIT, array_of, dtype_name
from .problem import ALIGNMENT, MOST

BITS = (4, 8)
GROUP_SIZES = (32, 64, 128)
DEFAULT_BITS, DEFAULT_GROUP_SIZE = 4, 64
# Fewest and most axes of a weight in each layout.
LAYOUTS = {"linear": (2, 2), "kernel": (3, 3), "module": (2, 6)}
NIBBLE, MULTIPLIER = 7, 18  # the greatest ones of int4: 7 * 18 is below 127


class Packing(NamedTuple):
    """A packed weight without its arrays."""

    in_channels: int
    bits: int
    group_size: int | None
    kernel: tuple[int, ...] | None
    is_integer: bool

    @property
    def count(self) -> int:
        """Number of arrays that kernels read; see ``arrays`` of the weights."""
        return 3 if not self.is_integer else 1 if self.bits == 8 else 2

    def weight(self, arrays: Sequence[mx.array]) -> PackedWeight:
        """Return the weight of checked arrays, in the constructor's order."""
        in_channels, bits, group_size, kernel, is_integer = self
        kind = IntegerWeight if is_integer else QuantizedWeight
        weight = object.__new__(kind)
        vars(weight).update(
            zip(kind.names, (*arrays, None, None), strict=False),
            in_channels=in_channels,
            bits=bits,
            group_size=group_size,
            kernel=kernel,
            packing=self,
        )
        return weight


class PackedWeight:
    """What the two kinds of packed weights share."""

    names: ClassVar[tuple[str, ...]]  # of the arrays
    packing: Packing  # all but the arrays

    @property
    def shape(self) -> tuple[int, int, int]:
        """Shape of the kernel-major float weight, (K, C_in / groups, C_out)."""
        volume, c_out, _ = self.arrays[0].shape
        return volume, self.in_channels, c_out

    @property
    def padded_channels(self) -> int:
        """Input channels in storage."""
        return padded(self.in_channels, self.group_size or ALIGNMENT)

    @property
    def nbytes(self) -> int:
        """Bytes of all arrays."""
        arrays = [getattr(self, name) for name in self.names]
        return sum(array.nbytes for array in arrays if array is not None)

    def holding(self, *arrays: mx.array | None) -> PackedWeight:
        """Return the same weight with other arrays, in the constructor's order."""
        return replace(self, **dict(zip(self.names, arrays, strict=True)))

    def __post_init__(self) -> None:
        facts = self.in_channels, self.bits, self.group_size, self.kernel
        vars(self)["packing"] = Packing(*facts, isinstance(self, IntegerWeight))
        _check_weight(self)


@dataclass(frozen=True, eq=False)
class QuantizedWeight(PackedWeight):
    """Hold a packed weight for any convolution; made by ``quantize_weight``.

    Compiled kernels read the arrays in this layout.

    Attributes:
        weight: (K, C_out, padded channels * bits / 32) uint32, the first channel in
            the lowest bits.
        scales, biases: (K, C_out, padded channels / group_size), in the dtype of the
            features.
        in_channels: C_in / groups, without padding.
        bits: 4 or 8.
        group_size: input channels that share a scale: 32, 64 or 128.
        kernel: spatial shape of a module's weight, ``()`` for a linear layer, None for
            a kernel-major weight.
    """

    names: ClassVar[tuple[str, ...]] = "weight", "scales", "biases"
    weight: mx.array
    scales: mx.array
    biases: mx.array
    in_channels: int
    bits: int
    group_size: int
    kernel: tuple[int, ...] | None = None

    @property
    def arrays(self) -> tuple[mx.array, mx.array, mx.array]:
        """``weight``, ``scales`` and ``biases``."""
        return self.weight, self.scales, self.biases

    @property
    def dtype(self) -> mx.Dtype:
        """Dtype of the scales, which the features must have."""
        return self.scales.dtype

    def astype(self, dtype: mx.Dtype) -> QuantizedWeight:
        """Return the weight for features of another dtype: its scales are cast."""
        dtype_name(dtype)
        return self.holding(
            self.weight, self.scales.astype(dtype), self.biases.astype(dtype)
        )

    def dense(self, dtype: mx.Dtype = mx.float32) -> mx.array:
        """Return (K, C_in / groups, C_out), computed in float32, then cast."""
        dtype_name(dtype)
        scales, biases = (a.astype(mx.float32) for a in self.arrays[1:])
        groups = {"group_size": self.group_size, "bits": self.bits}
        w = mx.dequantize(self.weight, scales, biases, **groups)
        return w[..., : self.in_channels].swapaxes(1, 2).astype(dtype)

    def __repr__(self) -> str:
        full = prod(self.shape) * self.dtype.size
        return (
            f"QuantizedWeight(int{self.bits}, groups of {self.group_size}, "
            f"{self.shape}, {dtype_name(self.dtype)}, {self.nbytes:,} bytes for "
            f"{full:,})"
        )


@dataclass(frozen=True, eq=False)
class IntegerWeight(PackedWeight):
    """Hold a weight for int8 features; made by ``integer_weight``.

    Attributes:
        values: int8 weights: (K, C_out, padded channels) int8 in -127 ... 127, zeros
            in the padding; int4 weights: (K, C_out, padded channels / 8) uint32, the
            first channel in the lowest bits, two's complement.
        multipliers: (K, C_out, padded channels / group_size) int8 for int4 weights;
            else None.
        scale: (C_out,) float32: ``W[k, i, c] = scale[c] * value``.
        group_size: input channels that share a multiplier in an int4 weight: 32, 64 or
            128; else None.
        in_channels, bits, kernel: as for ``QuantizedWeight``.
    """

    names: ClassVar[tuple[str, ...]] = "values", "multipliers", "scale"
    values: mx.array
    multipliers: mx.array | None
    scale: mx.array
    in_channels: int
    bits: int = 8
    group_size: int | None = None
    kernel: tuple[int, ...] | None = None

    @property
    def arrays(self) -> tuple[mx.array, ...]:
        """The arrays that kernels read: ``values``, and for int4 ``multipliers``."""
        return (self.values,) if self.bits == 8 else (self.values, self.multipliers)

    def integers(self) -> mx.array:
        """Return (K, C_out, padded channels) int8; int4 weights are unpacked."""
        if self.bits == 8:
            return self.values
        nibbles = (self.values[..., None] >> (4 * mx.arange(8, dtype=mx.uint32))) & 15
        signed = nibbles.astype(mx.int8)
        signed = mx.where(signed > NIBBLE, signed - 16, signed)
        lines = self.values.shape[:2]
        grouped = signed.reshape(*lines, -1, self.group_size)
        return (grouped * self.multipliers[..., None]).reshape(*lines, -1)

    def unpacked(self) -> IntegerWeight:
        """Return the same values and scale as an int8 weight."""
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

    def __repr__(self) -> str:
        groups = f" in groups of {self.group_size}" if self.group_size else ""
        return f"IntegerWeight(int{self.bits}{groups}, {self.shape}, {self.nbytes:,} B)"


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
        layout: "linear", "kernel" or "module"; by default the layout of 2, 3, and 4 or
            more axes. Only the weight of a 1D module, which has 3 axes, needs it.

    Examples:
        >>> q = ml.quantize_weight(mx.random.normal((32, 3, 3, 3, 64)), bits=4)
        >>> x = ml.SparseTensor.from_dense(mx.ones((1, 4, 4, 4, 64)))
        >>> ops.subm_conv3d(x, q).shape
        (64, 32)
    """
    check_packing(bits, group_size)
    w, kernel = _output_major(weight, layout)
    c_in = w.shape[-1]
    if missing := padded(c_in, group_size) - c_in:
        # Padded with the last channel, which widens the range of no group.
        w = mx.concatenate([w, mx.repeat(w[..., -1:], missing, axis=-1)], axis=-1)
    _, scales, biases = mx.quantize(w, group_size=group_size, bits=bits)
    # mx.quantize computes levels before it rounds scales to half: compute them again.
    words = pack(w, scales, biases, bits, group_size)
    return QuantizedWeight(words, scales, biases, c_in, bits, group_size, kernel)


def dequantize_weight(q: QuantizedWeight, dtype: mx.Dtype | None = None) -> mx.array:
    """Return the float weight of a packed weight, in its original layout.

    The default dtype is that of the scales; float32 is exact.

    Examples:
        >>> q = ml.quantize_weight(mx.random.normal((32, 3, 3, 3, 64)), bits=8)
        >>> ml.dequantize_weight(q).shape
        (32, 3, 3, 3, 64)
    """
    if not isinstance(q, QuantizedWeight):
        raise TypeError(
            f"dequantize_weight takes a QuantizedWeight; got {type(q).__name__}"
        )
    w = q.dense(q.dtype if dtype is None else dtype)
    if q.kernel is None:
        return w
    return w.transpose(2, 0, 1).reshape(w.shape[2], *q.kernel, q.in_channels)


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
        weight, layout: as for ``quantize_weight``.
        bits: 8, or 4 with a multiplier for each group of input channels.
        group_size: 32, 64 or 128 for int4 weights, by default 64; None for int8.
        scale: (C_out,) float32; by default the greatest magnitude of each output
            channel over 127 (int8) or 126 (int4). Values beyond it are clipped.

    Examples:
        >>> w = ml.integer_weight(mx.random.normal((32, 3, 3, 3, 64)))
        >>> w.values.dtype, w.scale.shape
        (mlx.core.int8, (32,))
    """
    group_size = integer_group_size(bits, group_size)
    w, kernel = _output_major(weight, layout)
    c_in = w.shape[-1]
    missing = padded(c_in, group_size or ALIGNMENT) - c_in
    w = mx.pad(w.astype(mx.float32), [(0, 0), (0, 0), (0, missing)])
    if scale is None:
        most = MOST if bits == 8 else NIBBLE * MULTIPLIER
        scale = mx.abs(w).max(axis=(0, 2)) / most
    scale = array_of(scale, "scale").astype(mx.float32)
    if scale.shape != w.shape[1:2]:
        raise ValueError(
            f"scale must have shape {w.shape[1:2]}, one value for each output channel; "
            f"got {tuple(scale.shape)}"
        )
    steps = w / mx.where(scale == 0, 1, scale)[:, None]
    if bits == 8:
        values = mx.clip(mx.round(steps), -MOST, MOST).astype(mx.int8)
        return IntegerWeight(values, None, scale, c_in, 8, None, kernel)
    words, multipliers = _two_levels(steps, group_size)
    return IntegerWeight(words, multipliers, scale, c_in, 4, group_size, kernel)


def _two_levels(steps: mx.array, group_size: int) -> tuple[mx.array, mx.array]:
    """Return words and multipliers of weights in steps of their channel's scale.

    Of the two integers next to a group's greatest magnitude over 7, its multiplier is
    the one with the smaller squared error.
    """
    grouped = steps.reshape(*steps.shape[:2], -1, group_size)
    exact = mx.abs(grouped).max(axis=-1, keepdims=True) / NIBBLE
    candidates = []
    for multiplier in (mx.floor(exact), mx.ceil(exact)):
        multiplier = mx.clip(multiplier, 1, MULTIPLIER)
        nibbles = mx.clip(mx.round(grouped / multiplier), -NIBBLE, NIBBLE)
        error = mx.square(nibbles * multiplier - grouped).sum(axis=-1, keepdims=True)
        candidates.append((multiplier, nibbles, error))
    low, high = candidates
    is_low = low[2] <= high[2]
    multipliers, nibbles = (mx.where(is_low, low[i], high[i]) for i in range(2))
    bits = nibbles.astype(mx.int32).astype(mx.uint32) & 15
    words = _words(bits.reshape(steps.shape), 4)
    return words, multipliers.squeeze(-1).astype(mx.int8)


def _words(levels: mx.array, bits: int) -> mx.array:
    each = 32 // bits
    levels = levels.astype(mx.uint32).reshape(*levels.shape[:-1], -1, each)
    return mx.sum(levels << (bits * mx.arange(each, dtype=mx.uint32)), axis=-1)


def pack(
    w: mx.array, scales: mx.array, biases: mx.array, bits: int, group_size: int
) -> mx.array:
    """Return uint32 words of the values that are nearest with these scales."""
    grouped = w.astype(mx.float32).reshape(*scales.shape, group_size)
    q = levels(grouped, scales[..., None], biases[..., None], bits)
    return _words(q.reshape(w.shape), bits)


def levels(w: mx.array, scales: mx.array, biases: mx.array, bits: int) -> mx.array:
    """Return the level 0 ... 2 ** bits - 1 of each value, as float32."""
    scales, biases = scales.astype(mx.float32), biases.astype(mx.float32)
    steps = mx.where(scales == 0, 1, scales)
    return mx.clip(mx.round((w - biases) / steps), 0, 2**bits - 1)


def _output_major(weight: mx.array, layout: str | None):
    """Return the weight as (K, C_out, C_in / groups), and its spatial shape."""
    if isinstance(weight, PackedWeight):
        raise TypeError("the weight is packed already; pass the float weight")
    if not isinstance(weight, mx.array):
        raise TypeError(
            f"a weight to pack must be an mlx array; got {type(weight).__name__}"
        )
    dtype_name(weight.dtype)
    if layout is None:
        layout = {2: "linear", 3: "kernel"}.get(weight.ndim, "module")
    if layout not in LAYOUTS:
        raise ValueError(f"layout must be one of {tuple(LAYOUTS)}; got {layout!r}")
    least, most = LAYOUTS[layout]
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


def padded(channels: int, group_size: int) -> int:
    """Return the channels rounded up to whole groups."""
    return -(-channels // group_size) * group_size


def check_packing(bits: int, group_size: int | None, is_integer: bool = False) -> None:
    """Raise unless weights can be packed in ``bits`` with these groups."""
    if not isinstance(bits, int) or bits not in BITS:
        raise ValueError(f"bits must be 4 or 8; got {bits!r}")
    if is_integer and bits == 8:
        if group_size is not None:
            raise ValueError(
                "an int8 weight has one scale for each output channel: group_size must "
                f"be None; got {group_size!r}"
            )
    elif not isinstance(group_size, int) or group_size not in GROUP_SIZES:
        raise ValueError(f"group_size must be 32, 64 or 128; got {group_size!r}")


def integer_group_size(bits: int, group_size: int | None) -> int | None:
    """Return the group size of an integer weight: by default 64 for int4."""
    if bits == 4 and group_size is None:
        group_size = DEFAULT_GROUP_SIZE
    check_packing(bits, group_size, is_integer=True)
    return group_size


def fits_int32(volume: int, channels: int) -> bool:
    """Whether sums over so many offsets and padded channels stay within int32."""
    return volume * channels * MOST**2 < INT32_LIMIT


def _check_weight(weight: PackedWeight) -> None:
    in_channels, bits, group_size, kernel, is_integer = weight.packing
    check_packing(bits, group_size, is_integer)
    if not isinstance(in_channels, int) or in_channels < 1:
        raise ValueError(
            f"in_channels must be an int of at least 1; got {in_channels!r}"
        )
    arrays = {}
    for name in weight.names:
        array = getattr(weight, name)
        if array is None and name == "multipliers":
            continue  # int8 weights have none
        if not isinstance(array, mx.array):
            raise TypeError(
                f"weight and scales must be mlx arrays; got {type(array).__name__} as "
                f"{name}"
            )
        arrays[name] = tuple(array.shape), array.dtype
    what = f"{in_channels} input channels in int{bits}"
    shape = arrays[weight.names[0]][0]
    if len(shape) != 3:
        raise ValueError(
            f"a packed weight must have three axes, (K, C_out, ...); got {shape}"
        )
    volume, c_out, _ = shape
    channels = padded(in_channels, group_size or ALIGNMENT)
    groups = volume, c_out, channels // (group_size or ALIGNMENT)
    words = (volume, c_out, channels * bits // 32), mx.uint32
    if not is_integer:
        dtype_name(kind := arrays["scales"][1])
        expected = {"weight": words, "scales": (groups, kind), "biases": (groups, kind)}
    else:
        expected = {"values": words, "multipliers": (groups, mx.int8)}
        if bits == 8:
            expected = {"values": ((volume, c_out, channels), mx.int8)}
        expected["scale"] = (c_out,), mx.float32
    if arrays.keys() != expected.keys():
        raise ValueError(
            f"{what} are stored as {', '.join(expected)}; got {', '.join(arrays)}"
        )
    for name, array in expected.items():
        if arrays[name] != array:
            error = TypeError if arrays[name][0] == array[0] else ValueError
            raise error(
                f"{name} must be {_described(array)} for {what}; got "
                f"{_described(arrays[name])}"
            )
    if kernel is not None and prod(kernel) != volume:
        raise ValueError(
            f"a kernel of {kernel} has {prod(kernel)} offsets, the packed weight "
            f"{volume}"
        )
    if is_integer and not fits_int32(volume, channels):
        raise ValueError(
            f"the sums of K = {volume} offsets and {in_channels} input channels could "
            f"leave int32: at most {INT32_LIMIT // MOST**2:,} products fit in a sum. "
            "Keep this layer in float"
        )


def _described(array: tuple[tuple[int, ...], mx.Dtype]) -> str:
    return f"{array[0]} {str(array[1]).rpartition('.')[2]}"
