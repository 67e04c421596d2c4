"""Packed weights as floats on CUDA, in one launch, for the length of a call."""

from __future__ import annotations

from collections.abc import Callable
from functools import lru_cache

import mlx.core as mx

from ..devices import CUDA
from ..quantized import QuantizedWeight
from . import cuda_operands
from .cuda_rows import SCALES
from .gpu_kernel import GpuKernel, Interface
from .kernel_launches import THREADS, blocks_for
from .signatures import kept, rounded_up

UNPACK = Interface(
    "Unpack",
    ("words", "scales", "biases"),
    ("w",),
    (("c_out", "words_shape[1]"), SCALES, ("padding", "0")),
)


def unpacked_weights(w: QuantizedWeight) -> mx.array:
    """Return packed weights as floats, each rounded once: (K, C_in, C_out).

    Channels are padded to 16 bytes, outputs with zeros.
    """
    launch = _unpacker(w.shape, w.padded_channels, w.dtype, w.bits, w.group_size)
    return launch(list(w.arrays))[0]


@lru_cache(maxsize=1024)
def _unpacker(shape, padded_channels, dtype, bits, group_size) -> Callable:
    """Return the launch that unpacks weights of a shape and packing."""
    multiple, volume = cuda_operands.multiple(dtype), shape[0]
    c_in, c_out = (rounded_up(c, multiple) for c in shape[1:])
    kernel = kept(
        GpuKernel(
            CUDA,
            "unpack_weights",
            ("alignment.cuh", "tiles.cuh", "packed_weights.cuh", "unpack_weights.cu"),
            UNPACK,
            (("T", dtype), ("BITS", bits), ("GROUP_SIZE", group_size)),
            sizes=(("padding", padded_channels - c_in),),
        )
    )
    blocks = blocks_for(c_in * c_out // multiple**2)
    out = (volume, c_in, c_out), dtype
    return kernel.launcher((True,) * 3, [out], (blocks * THREADS, volume))
