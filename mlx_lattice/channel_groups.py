"""Grouped weights as block-diagonal dense ones, for kernels that know one group."""

from __future__ import annotations

from functools import lru_cache

import mlx.core as mx

from .problem import KERNEL_MAJOR


def block_diagonal(w: mx.array, groups: int, layout: str) -> mx.array:
    """Return the dense weight of a grouped one, with zeros between groups.

    (K, C_in / groups, C_out) becomes (K, C_in, C_out). In MLX's layout
    (C_out, K, C_in / groups) becomes (C_out, K, C_in).
    """
    if layout == KERNEL_MAJOR:
        volume, width, c_out = w.shape
        shape, own = (volume, groups * width, c_out), w[:, None]
    else:
        c_out, volume, width = w.shape
        shape, own = (c_out, volume, groups * width), w[:, :, None]
    return mx.where(_is_inside(groups, c_out, layout), own, 0).reshape(shape)


def diagonal_blocks(dw: mx.array, groups: int, layout: str) -> mx.array:
    """Return the gradient of a grouped weight from that of its dense one.

    Arguments and result are those of ``block_diagonal``, the other way round.
    """
    if layout == KERNEL_MAJOR:
        volume, c_in, c_out = dw.shape
        width, each = c_in // groups, c_out // groups
        shape = volume, width, groups, each
        strides = c_in * c_out, c_out, width * c_out + each, 1
        return mx.as_strided(dw, shape, strides).reshape(volume, width, c_out)
    c_out, volume, c_in = dw.shape
    width, each = c_in // groups, c_out // groups
    shape = groups, each, volume, width
    strides = each * volume * c_in + width, volume * c_in, c_in, 1
    return mx.as_strided(dw, shape, strides).reshape(c_out, volume, width)


@lru_cache(maxsize=64)
def _is_inside(groups: int, c_out: int, layout: str) -> mx.array:
    """Return the (groups, 1, C_out) mask of channels, or (C_out, 1, groups, 1)."""
    each, outputs, all_groups = c_out // groups, range(c_out), range(groups)
    # Made of lists, without an operation: the array outlives a trace of mx.compile.
    if layout == KERNEL_MAJOR:
        return mx.array([[[o // each == g for o in outputs]] for g in all_groups])
    return mx.array([[[[o // each == g] for g in all_groups]] for o in outputs])
