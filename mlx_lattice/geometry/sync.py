"""What is read from the device: every wait of a relation goes through here."""

from __future__ import annotations

import mlx.core as mx


def read(*arrays: mx.array) -> list:
    """Return arrays as lists of Python values. Waits for the device, once.

    On CUDA arrays of up to 8 bytes are read where they are; a larger one is moved to
    the CPU's memory first, which takes many times as long.
    """
    mx.eval(*arrays)
    return [array.tolist() for array in arrays]
