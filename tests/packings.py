"""Packed weights, and what they hold by the definition of the packing."""

import cases
import mlx.core as mx
import numpy as np
import reference as ref

import mlx_lattice as ml
from mlx_lattice.quantized import BITS, GROUP_SIZES

PACKINGS = [(bits, size) for bits in BITS for size in GROUP_SIZES]


def unpacked(q: ml.QuantizedWeight) -> np.ndarray:
    """The (K, C_in / groups, C_out) values of a packed weight, by its definition."""
    words = np.array(q.weight).astype(np.uint64)
    shifts = np.arange(0, 32, q.bits, dtype=np.uint64)
    levels = (words[..., None] >> shifts) & np.uint64(2**q.bits - 1)
    levels = levels.reshape(*words.shape[:2], -1).astype(np.float64)
    scales, biases = (
        np.repeat(ref.to_numpy(a).astype(np.float64), q.group_size, axis=-1)
        for a in (q.scales, q.biases)
    )
    values = scales * levels + biases
    return values[..., : q.in_channels].swapaxes(1, 2)


def packed(volume, c_in, c_out, bits=4, size=32, dtype="float32", seed=0):
    w = mx.array(cases.weights(volume, c_in, c_out, seed)).astype(getattr(mx, dtype))
    return ml.quantize_weight(w, bits=bits, group_size=size)


def feats(n, channels, dtype="float32", seed=0):
    return mx.array(cases.features(n, channels, seed)).astype(getattr(mx, dtype))


def exact(a: mx.array) -> np.ndarray:
    return ref.to_numpy(a).astype(np.float64)
