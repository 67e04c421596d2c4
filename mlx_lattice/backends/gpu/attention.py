"""Heads before attention on Metal and CUDA: normalised and turned in one launch."""

from __future__ import annotations

from functools import cache
from itertools import accumulate

import mlx.core as mx

from ...checks import FLOATS
from ...devices import CUDA, METAL
from .kernel import (
    LEAST_DEVICE_SIZE,
    BackendKernels,
    GpuKernel,
    Interface,
    blocks_for,
    by_rows,
    ceil_div,
    dispatch_limit,
)
from .norms import CUDA_FILES, PLACE

FILES: dict[str, tuple[str, ...]] = {
    METAL: ("matrix_tiles", "activations", "epilogue", "attention_heads"),
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


class GpuHeads(BackendKernels):
    """Queries and keys, and values beside them, of (N, parts, heads, D)."""

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
        """Return x with its first parts normalised, scaled and turned."""
        return self._launch(FORWARD, [x], turned, scales, angles)[0]

    def gradient(
        self,
        dy: mx.array,
        x: mx.array,
        turned: int,
        scales: tuple[mx.array, ...] = (),
        angles: tuple[mx.array, ...] = (),
    ) -> tuple[mx.array, mx.array | None]:
        """Return that of x, and (L, turned * heads * D) parts of that of the scales."""
        face = GRADIENTS if scales else GRADIENT
        results = self._launch(face, [dy, x], turned, scales, angles)
        return results[0], results[1] if scales else None

    def _launch(self, face, arrays, turned, scales, angles) -> list[mx.array]:
        """Launch a kernel over rows; a dispatch of Metal has some rows."""
        scales, x = (*scales, None, None)[:2], arrays[-1]
        inputs = [*arrays, *scales, *(angles or (None, None))]
        kind = mx.float32 if scales[0] is None else scales[0].dtype
        rows, parts, heads, channels = x.shape
        each = _each(self.backend, x.dtype)
        lanes = 1 << (channels // each - 1).bit_length()
        down = THREADS // lanes
        template = (("T", x.dtype), ("EACH", each), ("LANES", lanes))
        if self.backend == METAL:
            template = ("T", x.dtype), ("SPAN", lanes)
        template = (*template, ("TURNED", turned), ("P", kind))
        kernel = _kernel(self.backend, face, template)
        tiles = ceil_div(parts * heads, down)
        length = max(BLOCK_ROWS, ceil_div(rows, max(1, BLOCKS // tiles)))
        sizes = {"parts": parts, "heads": heads, "channels": channels}
        sizes["block_rows"] = length

        def launch(first: int, count: int) -> list[mx.array]:
            outputs = [((count, parts, heads, channels), x.dtype)]
            grid = ceil_div(count * parts * heads, down) * lanes, down
            if face is not FORWARD:
                blocks = ceil_div(count, length)
                outputs.append(((blocks, turned * heads * channels), mx.float32))
                grid = blocks * lanes, tiles * down
            outputs, numbers = outputs[: len(face.outputs)], {"rows": count, **sizes}
            return kernel(inputs, outputs, grid, (lanes, down), first=first, **numbers)

        if self.backend == CUDA:
            return launch(0, rows)
        return by_rows(rows, x.size, dispatch_limit("elements"), launch)


def _each(backend: str, dtype: mx.Dtype) -> int:
    """Return the channels of a thread."""
    return 4 if backend == METAL else 16 // dtype.size


@cache
def _kernel(backend: str, face: Interface, template: tuple) -> GpuKernel:
    metal = backend == METAL
    symbol = "attention_heads" if face is FORWARD else "attention_heads_gradient"
    place, files = PLACE if metal else "", FILES[backend]
    return GpuKernel(
        backend, symbol, files, face, template, place=place, threads=THREADS
    )


_PATCHES = Interface(
    "Patches",
    ("order", "elements", "extents"),
    ("made",),
    (("rows", "order_shape[0]"), ("elements", "elements_shape[0]")),
)


@cache
def _patches_kernel(backend: str, is_filling: bool) -> GpuKernel:
    is_metal = backend == METAL
    return GpuKernel(
        backend,
        "fill_patches",
        ("patches" if is_metal else "patches.cu",),
        _PATCHES,
        (("FILLING", is_filling),),
        place="thread_position_in_grid.x" if is_metal else "",
        geometry=True,  # patches are kept with a set: it runs in rehearsals
    )


def extents_of(slots: int, results: int) -> mx.array:
    """Return how many there are, as the kernel takes them."""
    return mx.array([slots, results, *(0,) * (LEAST_DEVICE_SIZE - 2)])


class GpuPatches(BackendKernels):
    """Slots of rows by a GPU's kernel."""

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
        """Return the arrays of ``Groups``; ``again`` only if some patch is filled."""
        n = len(order)
        ends = list(accumulate((*parts, *(n,) * (2 + is_filling))))
        sizes, grid = {}, (THREADS * blocks_for(n),)
        if self.backend == METAL:
            sizes, grid = {"rows": n, "elements": len(elements)}, (n,)
        (numbers,) = _patches_kernel(self.backend, is_filling)(
            [order, elements, extents],
            [((ends[-1],), mx.int32)],
            grid,
            fill=-1,
            **sizes,
        )
        return [numbers[a:b] for a, b in zip([0, *ends], ends, strict=False)]
