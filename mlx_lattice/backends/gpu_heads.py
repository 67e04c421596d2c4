"""Heads before attention on Metal and CUDA: normalised and turned in one launch."""

from __future__ import annotations

from collections.abc import Callable
from functools import cache, lru_cache

import mlx.core as mx

from ..devices import CUDA, METAL
from ..dtypes import FLOATS
from .dispatch_bounds import by_rows, ceil_div, dispatch_limit
from .gpu_kernel import GpuKernel, Interface
from .gpu_norms import CUDA_FILES, PLACE

FILES = {
    METAL: ("matrix_tiles", "epilogue", "attention_heads"),
    CUDA: (*CUDA_FILES, "attention_heads.cu"),
}
THREADS, WARP = 256, 32
# Blocks of the way back, which write a line of sums each, and the least rows of one.
BLOCKS, BLOCK_ROWS = 1024, 8
_SIZES = (
    ("first", "0"),
    ("rows", "x_shape[0]"),
    ("parts", "x_shape[1]"),
    ("heads", "x_shape[2]"),
    ("channels", "x_shape[3]"),
    ("block_rows", "0"),
)
_GIVEN = "x", "q_scale", "k_scale", "cos", "sin"
FORWARD = Interface("AttentionHeads", _GIVEN, ("y",), _SIZES)
GRADIENT = Interface("AttentionHeads", ("dy", *_GIVEN), ("dx",), _SIZES)
GRADIENTS = Interface("AttentionHeads", ("dy", *_GIVEN), ("dx", "lines"), _SIZES)
Launch = Callable[[list[mx.array]], list[mx.array]]


class GpuHeads:
    """Queries and keys, and values beside them, of (N, parts, heads, D).

    Args:
        backend: "metal" or "cuda".
    """

    def __init__(self, backend: str):
        self.backend = backend

    def takes(self, x: mx.array) -> bool:
        """Whether the kernels take such heads."""
        if x.ndim != 4 or x.dtype not in FLOATS or not x.size:
            return False
        each = _each(self.backend, x.dtype)
        return x.shape[3] % each == 0 and x.shape[3] <= WARP * each

    def turned(
        self,
        x: mx.array,
        turned: int,
        scales: tuple[mx.array, ...] = (),
        angles: tuple[mx.array, ...] = (),
    ) -> mx.array:
        """Return x with its first parts normalised, scaled and turned.

        Args:
            x: what ``takes``.
            turned: how many parts, 1 or 2.
            scales: (heads, D) of one floating dtype, one a part, or none: then they
                are not normalised.
            angles: the cosine and the sine, (N, D / 2) float32 each, or none.
        """
        return self._launch(FORWARD, [x], turned, scales, angles)[0]

    def gradient(
        self,
        dy: mx.array,
        x: mx.array,
        turned: int,
        scales: tuple[mx.array, ...] = (),
        angles: tuple[mx.array, ...] = (),
    ) -> tuple[mx.array, mx.array | None]:
        """Return that of x, and (L, turned * heads * D) parts of that of the scales.

        The latter add up to it; None where there are no scales.
        """
        face = GRADIENTS if scales else GRADIENT
        made = self._launch(face, [dy, x], turned, scales, angles)
        return made[0], made[1] if scales else None

    def _launch(self, face, arrays, turned, scales, angles) -> list[mx.array]:
        scales = (*scales, None, None)[:2]
        inputs = [*arrays, *scales, *(angles or (None, None))]
        given = tuple([a is not None for a in inputs])
        kind = mx.float32 if scales[0] is None else scales[0].dtype
        x = arrays[-1]
        limit = dispatch_limit("elements") if self.backend == METAL else 0
        launch = _launcher(
            self.backend, face, given, x.shape, x.dtype, turned, kind, limit
        )
        return launch([a for a in inputs if a is not None])


def _each(backend: str, dtype: mx.Dtype) -> int:
    """Return the channels of a thread."""
    return 4 if backend == METAL else 16 // dtype.size


@lru_cache(maxsize=1024)
def _launcher(
    backend: str,
    face: Interface,
    given: tuple[bool, ...],
    shape: tuple[int, int, int, int],
    dtype: mx.Dtype,
    turned: int,
    kind: mx.Dtype,
    limit: int,
) -> Launch:
    """Return what launches a kernel over rows."""
    rows, parts, heads, channels = shape
    each = _each(backend, dtype)
    lanes = 1 << (channels // each - 1).bit_length()
    down = THREADS // lanes
    template = [("T", dtype), ("EACH", each), ("LANES", lanes), ("TURNED", turned)]
    if backend == METAL:
        template = [("T", dtype), ("SPAN", lanes), ("TURNED", turned)]
    kernel = _kernel(backend, face, (*template, ("P", kind)))
    tiles, back = ceil_div(parts * heads, down), face is not FORWARD
    length = max(BLOCK_ROWS, ceil_div(rows, max(1, BLOCKS // tiles)))

    def part(first: int, count: int) -> Launch:
        slots, grid = [((count, *shape[1:]), dtype)], (lanes, down)
        if back:
            blocks = ceil_div(count, length)
            slots.append(((blocks, turned * heads * channels), mx.float32))
            grid = blocks * lanes, tiles * down
        else:
            grid = ceil_div(count * parts * heads, down) * lanes, down
        sizes = {"first": first, "rows": count, "block_rows": length}
        sizes |= {"parts": parts, "heads": heads, "channels": channels}
        slots = slots[: len(face.outputs)]
        return kernel.launcher(given, slots, grid, (lanes, down), **sizes)

    if backend == CUDA:
        return part(0, rows)

    def launch(arrays: list[mx.array]) -> list[mx.array]:
        work = rows * parts * heads * channels
        return by_rows(rows, work, limit, lambda *share: part(*share)(arrays))

    return launch


@cache
def _kernel(backend: str, face: Interface, template: tuple) -> GpuKernel:
    metal = backend == METAL
    symbol = "attention_heads" if face is FORWARD else "attention_heads_gradient"
    place, files = PLACE if metal else "", FILES[backend]
    return GpuKernel(
        backend, symbol, files, face, template, place=place, threads=THREADS
    )
