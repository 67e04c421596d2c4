"""The exact source that MLX would hand to Metal, on any machine.

``mx.fast.metal_kernel`` refuses to run without Metal, but not to be exported: exporting
a call gives the generated text, signature and template arguments included, from shapes
and dtypes alone.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import mlx.core as mx


@dataclass(frozen=True)
class Source:
    """One call of a ``mx.fast.metal_kernel`` kernel, as MLX would dispatch it.

    Attributes:
        name: The name of the generated kernel function.
        text: The generated source; MLX compiles it after its own utilities.
        grid: Threads in all.
        threadgroup: Threads of a threadgroup.
        metadata: For each input, whether the kernel gets its shape, strides and ndim.
        row_contiguous: Whether MLX makes the inputs row-contiguous first.
    """

    name: str
    text: str
    grid: tuple[int, int, int]
    threadgroup: tuple[int, int, int]
    metadata: tuple[tuple[bool, bool, bool], ...]
    row_contiguous: bool


def capture(
    kernel: Callable[..., list[mx.array]], inputs: Sequence[mx.array], **call: object
) -> Source:
    """Generates the source of one kernel call; nothing runs.

    Args:
        kernel: What ``mx.fast.metal_kernel`` returned.
        inputs: The inputs; only their shapes and dtypes matter.
        **call: The other arguments of the call.

    Returns:
        The call as MLX would dispatch it.
    """
    records = []
    placeholders = [mx.zeros(x.shape, x.dtype) for x in inputs]
    mx.export_function(
        records.append, lambda *arrays: kernel(inputs=arrays, **call), *placeholders
    )
    a = next(r["arguments"] for r in records if r.get("name") == "CustomKernel")
    metadata = tuple(tuple(map(bool, m)) for m in a[8])
    return Source(a[0], a[1], tuple(a[2:5]), tuple(a[5:8]), metadata, bool(a[9]))
