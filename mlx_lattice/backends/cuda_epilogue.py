"""CUDA kernels that do to their sums what follows these: a bias, or an epilogue."""

from __future__ import annotations

from collections.abc import Sequence

from ..devices import CUDA
from ..epilogue import EpilogueFacts
from .cuda_compile import TYPES
from .gpu_kernel import GpuKernel, Interface, Value
from .signatures import AFTER, LINES, finishing, kept, with_moments

# What ``cuda/epilogue.cuh`` needs before it.
FILES = "alignment.cuh", "channels.cuh", "epilogue.cuh"


def finishing_kernel(
    symbol: str,
    files: Sequence[str],
    interface: Interface,
    template: Sequence[tuple[str, Value]],
    after: EpilogueFacts | None,
    moments: bool = False,
    **more: object,
) -> GpuKernel:
    """Return a kernel whose template ends with the type of what follows its sums.

    Args:
        symbol: the function.
        files: its sources.
        interface: how it is called, with a bias.
        template: its other arguments; T is the dtype of the features.
        after: the epilogue that it computes; None where it adds a bias alone.
        moments: whether it writes statistics of its rows, too.
        more: other fields of GpuKernel.
    """
    kind, together = "Bias<T>", AFTER[:1]
    if after is not None:
        values = [TYPES.get(value, value) for _, value in after.template]
        kind = f"Epilogue<T, {', '.join(map(str, values))}>"
        interface, together = finishing(interface), AFTER
    elif moments:
        kind, together = "Moments<T>", (*together, LINES)
        interface = with_moments(interface)
    template = *template, ("AFTER", kind)
    fields = {"together": together, **more}
    return kept(GpuKernel(CUDA, symbol, tuple(files), interface, template, **fields))
