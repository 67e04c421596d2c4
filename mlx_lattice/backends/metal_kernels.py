"""Metal kernels as data: where their sources are, how one is built and launched.

A kernel's body is one call of a function of ``metal/*.metal``, whose text is handed to
``mx.fast.metal_kernel`` as its header. Everything else a launch needs stands here.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import lru_cache
from math import prod
from pathlib import Path

import mlx.core as mx

from .dispatch_bounds import by_rows, ceil_div, cuts

__all__ = ["Kernel", "by_rows", "ceil_div", "cuts", "no_elements", "source"]

# MLX puts an input below this size in the `constant` address space.
LEAST_DEVICE_SIZE = 8
THREADS = 256


@lru_cache(maxsize=1)
def source_folder() -> Path:
    """Return the folder of the .metal files: in the installed package or a checkout."""
    package = Path(__file__).resolve().parent.parent
    for folder in (package / "metal", package.parent / "metal"):
        if any(folder.glob("*.metal")):
            return folder
    raise FileNotFoundError(
        f"the Metal sources are neither in {package / 'metal'} nor in "
        f"{package.parent / 'metal'}; reinstall mlx_lattice"
    )


@lru_cache(maxsize=64)
def source(family: str) -> str:
    """Return the text of ``metal/<family>.metal``."""
    return (source_folder() / f"{family}.metal").read_text(encoding="utf-8")


@dataclass(frozen=True)
class Kernel:
    """One entry point of a family.

    Attributes:
        name: what profilers show.
        family: the .metal files that hold it, in the order they are read.
        inputs: names of the inputs; ``sizes``, where there is one, is last.
        outputs: names of the outputs.
        body: the call of the family's function.
        atomic: whether the outputs are atomic.
    """

    name: str
    family: tuple[str, ...]
    inputs: tuple[str, ...]
    outputs: tuple[str, ...]
    body: str
    atomic: bool = False

    def __call__(
        self,
        inputs: Sequence[mx.array],
        sizes: Sequence[int],
        outputs: Sequence[tuple[Sequence[int], mx.Dtype]],
        grid: Sequence[int],
        *,
        threadgroup: Sequence[int] | None = None,
        init: float | None = None,
        **template: object,
    ) -> list[mx.array]:
        """Put one launch into the graph.

        Args:
            inputs: arrays; read as ``device`` memory whatever their size.
            sizes: up to seven integers, ``constant int* sizes`` in the kernel.
            outputs: shape and dtype of each; none may be empty.
            grid: threads on each axis, the fastest first; none may be 0.
            threadgroup: threads of a threadgroup; by default as wide as fits.
            init: what the outputs hold at the start.
            template: template arguments by name.

        Raises:
            ValueError: an output or the grid is empty, which Metal can't dispatch, or
                there are too many sizes.
        """
        shapes = [tuple(shape) for shape, _ in outputs]
        if 0 in grid or any(map(no_elements, shapes)):
            raise ValueError(
                f"{self.name} was launched for nothing: a grid of {tuple(grid)} and "
                f"outputs of {shapes}; return an empty array instead"
            )
        if len(sizes) >= LEAST_DEVICE_SIZE:
            raise ValueError(
                f"{self.name} takes up to {LEAST_DEVICE_SIZE - 1} sizes, which MLX "
                f"binds as a constant; got {len(sizes)}"
            )
        arrays = [_in_device_memory(a) for a in inputs]
        if sizes:
            arrays.append(_sizes(tuple(sizes)))
        grid = (*grid, 1, 1)[:3]
        optional = {"template": list(template.items())} if template else {}
        return _build(mx.fast.metal_kernel, self)(
            inputs=arrays,
            output_shapes=shapes,
            output_dtypes=[dtype for _, dtype in outputs],
            grid=grid,
            threadgroup=threadgroup or _threadgroup(grid),
            init_value=init,
            **optional,
        )


# Keyed by the factory too, since a stand-in for it runs kernels without a Mac.
@lru_cache(maxsize=512)
def _build(factory: Callable, kernel: Kernel) -> Callable:
    return factory(
        name=f"lattice_{kernel.name}",
        input_names=list(kernel.inputs),
        output_names=list(kernel.outputs),
        # Faults and the compiler's messages then name lines of the file.
        header="\n".join(
            f'#line 1 "metal/{family}.metal"\n{source(family)}'
            for family in kernel.family
        )
        + f'#line 1 "{kernel.name}"\n',
        source=f"  {kernel.body}\n",
        atomic_outputs=kernel.atomic,
    )


@lru_cache(maxsize=4096)
def _sizes(values: tuple[int, ...]) -> mx.array:
    return mx.array(list(values), dtype=mx.int32)


def _in_device_memory(array: mx.array) -> mx.array:
    """Return the array, flat and longer where MLX would bind it as a constant."""
    if array.size >= LEAST_DEVICE_SIZE:
        return array
    return mx.pad(array.flatten(), (0, LEAST_DEVICE_SIZE - array.size))


def _threadgroup(grid: Sequence[int]) -> tuple[int, int, int]:
    width = 1
    while width < grid[0] and width < THREADS:
        width *= 2
    return width, max(1, THREADS // width) if grid[1] > 1 else 1, 1


def no_elements(shape: Sequence[int]) -> bool:
    """Whether an output of this shape is empty, so that nothing is to be launched."""
    return prod(shape) == 0
