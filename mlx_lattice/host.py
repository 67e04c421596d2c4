"""What the host reads from the device: every wait of a relation goes through here."""

from __future__ import annotations

import mlx.core as mx

from .devices import CUDA, current


def read(*arrays: mx.array) -> list:
    """Return arrays as lists of Python values. The host waits for the device, once.

    On CUDA arrays of up to 8 bytes are read where they are; a larger one is moved to
    host memory first, which takes many times as long.
    """
    if current().backend == CUDA:
        _wait_awake(arrays)
    mx.eval(*arrays)
    return [array.tolist() for array in arrays]


def _wait_awake(arrays: tuple[mx.array, ...]) -> None:
    """Evaluate arrays and wait for the stream without letting the thread sleep.

    MLX waits for an event of CUDA's blocking kind: the thread sleeps, and on a virtual
    machine wakes 0.1 to 0.5 ms after the device was done. A stream is waited for awake.
    """
    try:
        mx.async_eval(*arrays)
    except ValueError as error:
        if "graph transformation" not in str(error):
            raise
        return  # while gradients are taken; the caller's eval will do
    mx.synchronize()
