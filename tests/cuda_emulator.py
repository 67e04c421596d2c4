"""CUDA's geometry on a CPU, from Python to the rows, by ``cuda_host``.

A launch's whole text, as NVRTC would get it, is compiled as C++ against ``device.h``
and run at once, on the arrays that MLX would hand over. So what is tested is what a GPU
runs: kernels, statements before them, sizes, scratch that several launches share.
"""

import ctypes
import hashlib
import subprocess
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from unittest.mock import patch

import cuda_recorder
import mlx.core as mx
import numpy as np

from mlx_lattice.backends import (
    cuda_compile,
    cuda_sort,
    cuda_tables,
    gpu_kernel,
    registry,
)

HOST = Path(__file__).parent / "cuda_host"
DTYPES = {
    mx.int32: np.int32,
    mx.uint32: np.uint32,
    mx.int64: np.int64,
    mx.uint64: np.uint64,
}
# What a compiler of C++ lacks of a kernel's text.
BEFORE = """#include <cstdint>
#include "device.h"
#define __global__
#define __launch_bounds__(...)
"""
MEMORY = "auto& lattice_shared = emulated::dynamic_memory();"
SHARED = "extern __shared__ __align__(16) unsigned char lattice_shared[];"


class _NoCompiler:
    """Stands where NVRTC does."""


class Emulator:
    """Runs launches in a folder's programs; ``names`` are the kernels so far."""

    def __init__(self, compiler: str, folder: Path):
        self.compiler, self.folder = compiler, folder
        self.names: list[str] = []
        self._programs: dict[str, ctypes.CDLL] = {}

    def launch(
        self,
        kernel: cuda_compile.Kernel,
        inputs,
        grid,
        threadgroup,
        output_shapes,
        output_dtypes,
        init_value=None,
    ) -> list[mx.array]:
        """Run a launch; what a kernel leaves out is -7, unless it is filled."""
        mx.eval(inputs)
        self.names.append(kernel.name)
        # Kernels share words of scratch, which MLX takes for an input: no copies.
        read = [np.array(array, copy=False) for array in inputs]
        fill = -7 if init_value is None else init_value
        made = [
            np.full(shape, fill).astype(DTYPES[dtype])
            for shape, dtype in zip(output_shapes, output_dtypes, strict=True)
        ]
        arrays = read + made
        assert all(array.flags.c_contiguous for array in arrays) and grid[1:] == (1, 1)
        places = (ctypes.c_void_p * len(arrays))(*(a.ctypes.data for a in arrays))
        sizes = [inputs[i].shape[axis] for i, axis in kernel.sizes]
        program = self._program(kernel, [a.dtype for a in inputs], output_dtypes)
        threads, numbers = threadgroup[0], (ctypes.c_int * (1 + len(sizes)))(*sizes)
        program.run(places, numbers, -(-grid[0] // threads), threads)
        return [mx.array(array) for array in made]

    def _program(self, kernel, inputs, outputs) -> ctypes.CDLL:
        text = kernel.source(inputs, outputs).replace(cuda_compile.PRELUDE, BEFORE)
        text = text.replace(SHARED, MEMORY)
        passed = [
            f"({cuda_compile.TYPES[dtype]}*)arrays[{i}]"
            for i, dtype in enumerate([*inputs, *outputs])
        ]
        passed += [f"sizes[{i}]" for i in range(len(kernel.sizes))]
        text += (
            '\nextern "C" void run(void** arrays, const int* sizes, int blocks, '
            "int threads) {\n  emulated::launch(blocks, threads, "
            f"[&] {{ {kernel.name}({', '.join(passed)}); }});\n}}\n"
        )
        key = hashlib.sha256(text.encode()).hexdigest()[:16]
        if key not in self._programs:
            source, library = (self.folder / f"{key}.{end}" for end in ("cpp", "so"))
            source.write_text(text)
            # Fibers jump from stack to stack, which fortified jumps refuse.
            options = "-std=c++17 -O1 -w -pthread -U_FORTIFY_SOURCE -fPIC -shared"
            files = [f"-I{HOST}", source, "-o", library]
            subprocess.run([self.compiler, *options.split(), *files], check=True)
            self._programs[key] = ctypes.CDLL(str(library))
        return self._programs[key]


@contextmanager
def emulating(emulator: Emulator) -> Iterator[None]:
    """Build relations by CUDA's geometry inside the block, its launches run here."""

    def launch(self, **given):
        return emulator.launch(self, **given)

    with ExitStack() as stack:
        stack.enter_context(cuda_recorder.recording())
        for patched in (
            patch.object(gpu_kernel, "compiler", lambda capability: _NoCompiler()),
            patch.object(cuda_compile.Kernel, "__call__", launch),
            patch.object(registry, "geometry", lambda: registry.GEOMETRY["cuda"]),
            patch.object(cuda_sort, "multiprocessors", lambda: 2),
            patch.object(cuda_tables, "multiprocessors", lambda: 1),
        ):
            stack.enter_context(patched)
        yield
