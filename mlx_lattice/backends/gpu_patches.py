"""Slots of rows in filled patches on GPUs, in one launch; see ``ops.patches``."""

from __future__ import annotations

from functools import cache
from itertools import accumulate

import mlx.core as mx

from ..devices import METAL
from .dispatch_bounds import dispatch_limit
from .gpu_kernel import LEAST_DEVICE_SIZE, THREADS, GpuKernel, Interface, blocks_for

_FACE = Interface(
    "Patches",
    ("order", "elements", "extents"),
    ("made",),
    (("rows", "order_shape[0]"), ("elements", "elements_shape[0]")),
)


@cache
def _kernel(backend: str, is_filling: bool) -> GpuKernel:
    is_metal = backend == METAL
    return GpuKernel(
        backend,
        "fill_patches",
        ("patches" if is_metal else "patches.cu",),
        _FACE,
        (("FILLING", is_filling),),
        place="thread_position_in_grid.x" if is_metal else "",
        geometry=True,  # patches are kept with a set: it runs in rehearsals
    )


def extents_of(slots: int, results: int) -> mx.array:
    """Return how many there are, as the kernel takes them."""
    return mx.array([slots, results, *(0,) * (LEAST_DEVICE_SIZE - 2)])


class GpuPatches:
    """Slots of rows by a GPU's kernel.

    Args:
        backend: "metal" or "cuda".
    """

    def __init__(self, backend: str):
        self.backend = backend

    def takes(self, rows: int) -> bool:
        """Whether one launch may do so many rows, at least one."""
        most = 1 << 30 if self.backend != METAL else dispatch_limit("elements") // 8
        return 0 < rows <= most

    def filled(
        self,
        order: mx.array,
        elements: mx.array,
        extents: mx.array,
        parts: tuple[int, int],
        is_filling: bool,
    ) -> list[mx.array]:
        """Return ``row``, ``own``, ``slot`` and ``place`` of ``Groups``, and ``again``.

        Args:
            order: (N,) int32 rows along the curve.
            elements: (B, 8) int32: what is known of each element of some rows.
            extents: ``extents_of`` the parts.
            parts: how many slots and results there are.
            is_filling: whether any patch is filled; else there is no ``again``.
        """
        n = len(order)
        ends = list(accumulate((*parts, *(n,) * (2 + is_filling))))
        sizes, grid = {}, (THREADS * blocks_for(n),)
        if self.backend == METAL:
            sizes, grid = {"rows": n, "elements": len(elements)}, (n,)
        (made,) = _kernel(self.backend, is_filling)(
            [order, elements, extents],
            [((ends[-1],), mx.int32)],
            grid,
            fill=-1,
            **sizes,
        )
        return [made[a:b] for a, b in zip([0, *ends], ends, strict=False)]
