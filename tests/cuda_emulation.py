"""CUDA kernels on the CPU, from Python on: each launch's text, compiled as C++ and run.

It runs the text, sizes and grid that a GPU would get: wrong results show, not races.
No tensor core (mma, wgmma), no asynchronous copy; a block's threads only take turns.
"""

import ctypes
import hashlib
import math
import os
import shutil
import subprocess
import tempfile
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from functools import cache
from pathlib import Path
from unittest.mock import patch

import cuda_recorder
import mlx.core as mx
import numpy as np
import pytest

from mlx_lattice import cache_files, registry
from mlx_lattice.backends.cuda import geometry as cuda_geometry
from mlx_lattice.backends.cuda import sort as cuda_sort
from mlx_lattice.backends.gpu import kernel as gpu_kernel
from mlx_lattice.backends.gpu.nvrtc import PRELUDE, TYPES, Kernel

HOST = Path(__file__).parent / "cuda_host"
KEPT = cache_files.folder() / "cuda_host"
COMPILER = os.environ.get("CXX") or shutil.which("c++") or shutil.which("clang++")
CAN_COMPILE = COMPILER is not None and os.uname().sysname == "Linux"
HAS_GPU = hasattr(mx, "cuda") and mx.cuda.is_available()
# Of tests that run them: beside a GPU, MLX's own launches would mix with these.
emulated = pytest.mark.skipif(
    HAS_GPU or not CAN_COMPILE,
    reason="running CUDA's kernels on the CPU needs Linux, a C++ compiler, and no GPU",
)
# Fibers jump from stack to stack, which fortified jumps refuse.
OPTIONS = ["-std=c++17", "-O1", "-w", "-pthread", "-U_FORTIFY_SOURCE"]
SHARED = "extern __shared__ __align__(16) unsigned char lattice_shared[];"
# A barrier of some warps; those that meet there are all of the block here.
BARRIER = 'asm volatile("bar.sync %0, %1;" ::"r"(id), "r"(threads) : "memory");'
LAUNCH = """
extern "C" void launch(void** arrays, const int* sizes, const int* grid, bool all) {{
  emulated::launch(grid, all, [&] {{ {name}({arguments}); }});
}}
"""


def on_host(text: str) -> str:
    """CUDA's text as C++: there dynamic shared memory has no type of its own."""
    text = text.replace(BARRIER, "emulated::meet_block();")
    return text.replace(SHARED, "auto& lattice_shared = emulated::dynamic_memory();")


@cache
def compiler_facts() -> str:
    """What any compiled program depends on: the compiler and what it always reads."""
    said = subprocess.run([COMPILER, "--version"], capture_output=True, text=True)
    read = sorted(path for path in HOST.iterdir() if path.is_file())
    read.append(Path(__file__))  # which has the options
    return "\0".join([said.stdout, *(path.read_text() for path in read)])


def kept_folder(*texts: str) -> Path:
    """The folder, of the user's cache, of what is compiled of some texts."""
    every = "\0".join((compiler_facts(), *texts))
    folder = KEPT / hashlib.sha256(every.encode()).hexdigest()[:24]
    folder.mkdir(parents=True, exist_ok=True)
    return folder


def compiled(source: Path, made: Path, *options: str, linked: tuple = ()) -> Path:
    """Compile what includes ``device.h``, unless that was done before."""
    if not made.exists():
        with tempfile.TemporaryDirectory(dir=made.parent) as folder:
            new = Path(folder) / made.name  # another process may be at the same
            command = [COMPILER, *OPTIONS, f"-I{HOST}", *options, source, *linked]
            subprocess.run([*command, "-o", new], check=True)
            os.replace(new, made)
    return made


def runtime(folder: Path) -> Path:
    """What runs the threads of kernels, for them to link: made once in a folder."""
    return compiled(HOST / "runtime.cpp", folder / "runtime.so", "-fPIC", "-shared")


class Emulator:
    """Compiles and runs launches; ``launches`` are the names of those so far.

    What a kernel does not write is NaN, or -7.

    Args:
        folder: for what is compiled.
        skewed: whether inputs begin one element after a multiple of 16 bytes; those of
            geometry are where MLX has them.
    """

    def __init__(self, folder: Path, skewed: bool = False):
        self.folder, self.skewed = folder, skewed
        self.launches: list[str] = []

    def launch(
        self,
        kernel: Kernel,
        *,
        inputs,
        grid,
        threadgroup,
        output_shapes,
        output_dtypes,
        init_value=None,
    ) -> list[mx.array]:
        """Run a kernel at once; called as it is."""
        mx.eval(inputs)
        self.launches.append(kernel.name)
        run = self._program(kernel, [a.dtype for a in inputs], output_dtypes)
        read = [_memory(array) for array in inputs]
        # Geometry writes into scratch that launches share: an input, as MLX sees it.
        if not kernel.geometry:
            read = [_placed(array, self.skewed) for array in read]
        made = [
            _placed(_memory(mx.full(shape, _fill(init_value, dtype))))
            for shape, dtype in zip(output_shapes, output_dtypes, strict=True)
        ]
        arrays = read + made
        sizes = [inputs[i].shape[axis] for i, axis in kernel.sizes]
        blocks = [-(-g // t) for g, t in zip(grid, threadgroup, strict=True)]
        assert all(array.flags.c_contiguous for array in arrays)
        assert blocks[2] == threadgroup[2] == 1
        run(
            (ctypes.c_void_p * len(arrays))(*(a.ctypes.data for a in arrays)),
            (ctypes.c_int * (len(sizes) + 1))(*sizes),
            (ctypes.c_int * 4)(*blocks[:2], *threadgroup[:2]),
            kernel.geometry,  # whose blocks wait for each other
        )
        slots = zip(made, output_dtypes, strict=True)
        return [mx.array(array).view(dtype) for array, dtype in slots]

    def _program(self, kernel: Kernel, inputs, outputs):
        """Return what launches a kernel, compiled the first time."""
        text = kernel.source(inputs, outputs)
        assert text.startswith(PRELUDE), "what stands before a kernel's text has moved"
        kinds = [f"const {TYPES[dtype]}*" for dtype in inputs]
        kinds += [f"{TYPES[dtype]}*" for dtype in outputs]
        passed = [f"({kind})arrays[{i}]" for i, kind in enumerate(kinds)]
        passed += [f"sizes[{i}]" for i in range(len(kernel.sizes))]
        text = '#include "device.h"\n' + on_host(text.removeprefix(PRELUDE))
        text += LAUNCH.format(name=kernel.name, arguments=", ".join(passed))
        key = hashlib.sha256(text.encode()).hexdigest()[:24]
        library = self.folder / f"{key}.so"
        if not library.exists():
            source = library.with_suffix(".cpp")
            cache_files.write_whole(source, text.encode())
            # Read once for all kernels: GCC takes this in place of device.h.
            header = self.folder / "device.h.gch"
            compiled(HOST / "device.h", header, "-fPIC", "-x", "c++-header")
            # C's and C++'s libraries are the process's own.
            options = "-fPIC", "-shared", "-nostdlib"
            compiled(source, library, *options, linked=(runtime(self.folder),))
        run = ctypes.CDLL(str(library)).launch
        run.argtypes = *[ctypes.c_void_p] * 3, ctypes.c_bool
        return run


def _fill(value: float | None, dtype: mx.Dtype) -> mx.array:
    """What an output holds at the start; -7 wraps where there is no sign."""
    if value is None:
        value = math.nan if mx.issubdtype(dtype, mx.floating) else -7
    return mx.array(value).astype(dtype)


def _memory(array: mx.array) -> np.ndarray:
    """An array where it is; bfloat16, which NumPy lacks, as uint16."""
    known = array.view(mx.uint16) if array.dtype == mx.bfloat16 else array
    return np.array(known, copy=False)


def _placed(array: np.ndarray, after: int = 0) -> np.ndarray:
    """A copy in order, so many elements after a multiple of 16 bytes."""
    held = np.zeros(array.nbytes + 32, np.uint8)
    start = -held.ctypes.data % 16 + array.itemsize * after
    place = held[start : start + array.nbytes].view(array.dtype)
    place[:] = array.reshape(-1)
    return place.reshape(array.shape)


@contextmanager
def emulating(emulator: Emulator) -> Iterator[None]:
    """Have all that CUDA has but norms launched by an emulator inside the block."""

    def launch(kernel, **given):
        return emulator.launch(kernel, **given)

    with ExitStack() as stack:
        stack.enter_context(cuda_recorder.recording())
        for patched in (
            patch.object(gpu_kernel, "compiler", lambda capability: "none is called"),
            patch.object(Kernel, "__call__", launch),
            patch.object(cuda_sort, "multiprocessors", lambda: 2),
            patch.object(cuda_geometry, "multiprocessors", lambda: 1),
        ):
            stack.enter_context(patched)
        each = "geometry", "updates", "joins", "points", "reductions"
        for name in (*each, "patches"):
            own = getattr(registry, name.upper())["cuda"]
            stack.enter_context(patch.object(registry, name, lambda own=own: own))
        yield
