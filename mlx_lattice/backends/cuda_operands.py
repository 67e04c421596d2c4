"""How CUDA's matrix tiles take operands: channels in stages, float32 in parts."""

from __future__ import annotations

import mlx.core as mx

from ..devices import Device
from ..numerics import TF32
from ..problem import WEIGHT_GRAD, Problem
from ..routes import thresholds
from .signatures import rounded_up

# Of summed channels: bytes of a slice, the depth of one product, and slices of a stage.
SLICE_BYTES, STAGE_SLICES = 32, 4
STAGE_BYTES = SLICE_BYTES * STAGE_SLICES
THREE = "three TF32"  # products that keep float32's accuracy
ONE = "TF32"


def multiple(dtype: mx.Dtype) -> int:
    """Return what tiles' channels are padded to a multiple of: 16 bytes."""
    return 16 // dtype.size


def whole_channels(p: Problem) -> tuple[int, int]:
    """Return the channels that the pass sums over and writes, padded."""
    each = 16 // p.read_size
    return rounded_up(p.channels[0], each), rounded_up(p.channels[1], each)


def slices_of(c_in: int, itemsize: int = 2) -> int:
    """Return how many slices of an offset come together in a stage, 0 if that varies.

    A slice is 16 channels, or 8 of float32; a stage has four.

    c_in: padded.
    """
    size = SLICE_BYTES // itemsize
    if c_in % (STAGE_SLICES * size) == 0:
        return STAGE_SLICES
    if c_in <= size:
        return 1
    return 2 if c_in <= 2 * size or c_in % (2 * size) == 0 else 0


def tail_slices(p: Problem) -> int:
    """Return the slices of an offset's last stage, 0 where it is whole."""
    return -(-(whole_channels(p)[0] * p.read_size % STAGE_BYTES) // SLICE_BYTES)


def proof_channels(p: Problem, width: int) -> tuple[int, int]:
    """Return (C_in, C_out) for the proof of a kernel with tiles of so many columns.

    A full column of tiles and another; summed channels in slices as the problem's are.
    Neither fills its last 16 bytes.
    """
    each, stage = 16 // p.read_size, STAGE_BYTES // p.read_size
    c_x = whole_channels(p)[0]
    if c_x > 2 * stage:
        c_x = 2 * stage if c_x % stage == 0 else stage + c_x % stage
    tried = c_x - 3, width + 2 * each - 3
    return tried[::-1] if p.transposed else tried


def products(p: Problem) -> str:
    """Return how tensor cores multiply float32; "" for other dtypes."""
    if p.dtype != "float32":
        return ""
    return ONE if p.precision == TF32 else THREE


def product_count(p: Problem) -> int:
    """Return the products of tensor cores that one of the features' takes."""
    return 3 if products(p) == THREE and not p.integer else 1


def has_wgmma(p: Problem, device: Device) -> bool:
    """Whether Hopper's matrix product takes the features, however they run."""
    return p.dtype != "float32" and device.family in thresholds.HOPPER


def multiplies_one(p: Problem, device: Device) -> bool:
    """Whether one TF32 product of float32 goes as half does: in whole stages."""
    one = products(p) == ONE and not p.bits and device.family in thresholds.HOPPER
    return one and slices_of(whole_channels(p)[0], p.read_size) == STAGE_SLICES


def prepares(p: Problem, device: Device) -> bool:
    """Whether float weights are prepared for Hopper's matrix product on float32.

    It takes operands that run along the summed channels alone. One TF32 product reads
    weights that do so where they stand.
    """
    if p.dtype != "float32" or p.pass_ == WEIGHT_GRAD or p.bits:
        return False
    if multiplies_one(p, device):
        elements = p.rows_written * whole_channels(p)[1]
        return not p.rows_are_summed and elements > thresholds.TURNED_ELEMENTS
    many = p.rows_written * p.channels[1] > thresholds.FLOAT_ELEMENTS
    return many and device.family in thresholds.HOPPER


def weight_parts(p: Problem) -> int:
    """Return the parts in which tiles read a prepared weight: high, or high and low."""
    return 2 if product_count(p) == 3 else 1


def unpacked_bytes(p: Problem) -> int:
    """Return what unpacked weights take."""
    c_x, c_y = whole_channels(p)
    return p.volume * c_x * c_y * p.itemsize


def prepared_bytes(p: Problem) -> int:
    """Return what prepared weights take."""
    return weight_parts(p) * unpacked_bytes(p)
