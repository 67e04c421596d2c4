"""What the host reads from the device: every wait of a relation goes through here."""

from __future__ import annotations

import mlx.core as mx

from .devices import CUDA, current


def read(*arrays: mx.array) -> list:
    """Return arrays as lists of Python values. The host waits for the device, once.

    On CUDA arrays of up to 8 bytes are read where they are; a larger one is moved to
    host memory first, which takes many times as long.
    """
    wait(*arrays)
    return [array.tolist() for array in arrays]


def wait(*arrays: mx.array) -> None:
    """Evaluate arrays and wait until they are there.

    On CUDA the thread stays awake. MLX waits for an event of CUDA's blocking kind: the
    thread sleeps, and on a virtual machine it woke 0.1 to 0.5 ms after the device was
    done. Waiting for the stream takes 0.04 ms more than the device.
    """
    if current().backend == CUDA:
        try:
            mx.async_eval(*arrays)
            mx.synchronize()
        except ValueError as error:  # while gradients are taken
            if "graph transformation" not in str(error):
                raise
    mx.eval(*arrays)
