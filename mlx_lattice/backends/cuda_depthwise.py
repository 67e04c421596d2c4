"""Depthwise convolution on CUDA: every input channel is a group of its own."""

from __future__ import annotations

import mlx.core as mx

from ..devices import current
from .cuda_compile import TYPES
from .cuda_kernels import (
    SHORT,
    THREADS,
    added,
    blocks_for,
    channels_each,
    kernel,
    run,
    without_edges,
)

BLOCKS, ROWS = 4, 256  # of the weight gradient: a multiprocessor, and least of a block


def _function(name, x, inputs, arguments, width, multiplier, shape, suffix=""):
    """Return a kernel of some inputs and one output, the last of its arguments.

    They are followed by the table's sizes, ``width`` and M; ``shape`` are the integers
    of its template.
    """
    shape = tuple(map(str, shape))
    return kernel(
        "_".join((name, SHORT[x.dtype], *shape, str(multiplier))) + suffix,
        ("alignment.cuh", "channels.cuh", "depthwise.cu"),
        inputs,
        arguments[-1:],
        f"lattice::{name}<{', '.join((TYPES[x.dtype], *shape))}>("
        f"{', '.join(arguments)}, table_shape[0], table_shape[1], {width}, "
        f"{multiplier});",
    )


def depthwise(x, w, relation, groups, transposed, bias=None):
    """Return y where each input channel is a group of its own."""
    if w.shape[1] != 1:
        raise ValueError(
            "depthwise runs as many groups as input channels, weights (K, 1, C_out); "
            f"got {tuple(w.shape)} with groups = {groups}"
        )
    multiplier = w.shape[2] // groups
    shape = relation.n_out, groups if transposed else w.shape[2]
    if 0 in (*shape, relation.n_in):
        return without_edges(shape, x.dtype, bias)
    each = channels_each(x, groups) if multiplier == 1 else 1
    names, last = ("x", "w", "table"), added(bias)
    function = _function(
        "depthwise_transposed" if transposed else "depthwise_forward",
        x,
        (*names, *last.names),
        (*names, last.value, "y"),
        f"w_shape[2] / {multiplier}" if transposed else "w_shape[2]",
        multiplier,
        (each,),
        last.suffix,
    )
    blocks = blocks_for(shape[0] * (shape[1] // each))
    inputs = [x, w, relation.out_in, *last.arrays]
    return run(function, inputs, blocks, THREADS, [(shape, x.dtype)])[0]


def depthwise_weight_grad(x, dy, relation, groups):
    """Return dW (K, 1, C_out): sums over ranges of rows, added in order."""
    n, c_out, volume = relation.n_out, dy.shape[1], relation.volume
    if x.shape[1] != groups:
        raise ValueError(
            "depthwise runs as many groups as input channels; got "
            f"{x.shape[1]} channels, groups = {groups}"
        )
    if 0 in (n, c_out, relation.n_in):
        return mx.zeros((volume, 1, c_out), dtype=x.dtype)
    multiplier = c_out // groups
    each = channels_each(x, groups) if multiplier == 1 else 1
    across = 8 if c_out <= 8 * each else 32
    names = "x", "dy", "table"
    function = _function(
        "depthwise_weight_grad",
        x,
        names,
        (*names, "partials"),
        "dy_shape[1]",
        multiplier,
        (each, across),
    )
    tiles = -(-c_out // (across * each))
    ranges = max(1, min(BLOCKS * current().cores // tiles, -(-n // ROWS)))
    slots = [((ranges, volume, c_out), mx.float32)]
    inputs = [x, dy, relation.out_in]
    partials = run(function, inputs, (ranges, tiles), THREADS, slots)[0]
    return partials.sum(axis=0).astype(x.dtype).reshape(volume, 1, c_out)
