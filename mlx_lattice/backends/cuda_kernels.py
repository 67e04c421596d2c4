"""From ``cuda/*.cu`` to callable kernels: found, compiled on first use, kept."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import cache
from pathlib import Path

import mlx.core as mx

from ..devices import compute_capability
from .cuda_compile import Kernel, compiler

SHORT = {mx.float32: "f32", mx.float16: "f16", mx.bfloat16: "bf16"}
# Of kernels that walk rows: threads of a block, and blocks that are enough.
THREADS, MOST_BLOCKS = 256, 1 << 20


@cache
def folder() -> Path:
    """Return the folder of the kernel sources: in a checkout, or in a wheel.

    Raises:
        FileNotFoundError: neither has them.
    """
    package = Path(__file__).resolve().parent.parent
    for place in (package / "cuda", package.parent / "cuda"):
        if (place / "rows.cuh").is_file():
            return place
    raise FileNotFoundError(
        f"the CUDA kernel sources were not found in {package / 'cuda'} or "
        f"{package.parent / 'cuda'}; reinstall mlx-lattice"
    )


@cache
def source(files: tuple[str, ...], whole: bool) -> str:
    """Return the text of some kernel files, in order, or lines that include them.

    Where MLX compiles, it puts the whole text of a kernel together, and hashes it, at
    every call, so that it is kept short.
    """
    if whole:
        return "\n".join((folder() / name).read_text() for name in files)
    return "\n".join(f'#include "{folder() / name}"' for name in files)


@cache
def kernel(
    name: str,
    files: tuple[str, ...],
    inputs: tuple[str, ...],
    outputs: tuple[str, ...],
    body: str,
    *,
    threads: int = 256,
    blocks_per_multiprocessor: int = 1,
    shared_bytes: int = 0,
    define: str = "",
) -> Callable[..., list[mx.array]]:
    """Return a kernel whose body is one call into ``files``.

    Args:
        name: unique for the body and for the dtypes of its inputs and outputs.
        files: sources, in the order in which they need each other.
        inputs: names of the inputs; ``NAME_shape`` may stand in the body.
        outputs: names of the outputs.
        body: CUDA statements.
        threads: of a block, for the register limit.
        blocks_per_multiprocessor: how many must fit side by side.
        shared_bytes: dynamic shared memory.
        define: preprocessor lines before the sources.
    """
    if nvrtc := compiler(compute_capability()):
        return Kernel(
            nvrtc,
            f"lattice_{name}",
            inputs,
            outputs,
            f"{define}\n{source(files, whole=True)}",
            body,
            (threads, blocks_per_multiprocessor),
            shared_bytes,
        )
    full = f"custom_kernel_lattice_{name}"
    # MLX writes the signature itself; this puts the launch bounds into it.
    bounds = f"__launch_bounds__({threads}, {blocks_per_multiprocessor})"
    header = f"{define}\n{source(files, whole=False)}\n#define {full} {bounds} {full}\n"
    return mx.fast.cuda_kernel(
        name=f"lattice_{name}",
        input_names=list(inputs),
        output_names=list(outputs),
        source=f"\n#undef {full}\n{body}\n",
        header=header,
        shared_memory=shared_bytes,
    )


def run(
    function: Callable[..., list[mx.array]],
    inputs: Sequence[mx.array],
    blocks: tuple[int, int] | int,
    threads: int,
    outputs: Sequence[tuple[tuple[int, ...], mx.Dtype]],
    fill: int | None = None,
) -> list[mx.array]:
    """Launch ``blocks`` blocks of ``threads`` threads.

    Args:
        function: what ``kernel`` returned.
        inputs: arrays, contiguous or not.
        blocks: blocks along x, or along x and y.
        threads: of a block.
        outputs: (shape, dtype) of each.
        fill: what the outputs hold before.
    """
    x, y = (blocks, 1) if isinstance(blocks, int) else blocks
    return function(
        inputs=list(inputs),
        grid=(x * threads, y, 1),
        threadgroup=(threads, 1, 1),
        output_shapes=[shape for shape, _ in outputs],
        output_dtypes=[dtype for _, dtype in outputs],
        init_value=fill,
    )


def channels_each(x: mx.array, channels: int) -> int:
    """Return how many channels a thread takes: 16 bytes of them, or one."""
    each = 16 // x.itemsize
    return 1 if channels % each else each


def blocks_for(threads: int) -> int:
    """Return the blocks of 256 that start so many threads, or as many as is wise."""
    return max(1, min(MOST_BLOCKS, -(-threads // THREADS)))
