"""CUDA kernels of features on the CPU: `cuda_host` in place of ``mx.fast.cuda_kernel``.

Each launch is compiled from the very text that CUDA's compiler gets, for the grid and
the sizes of the launch, and runs at once. What it does not write is NaN.
"""

import ctypes
import hashlib
import os
import shutil
import subprocess
from pathlib import Path

import mlx.core as mx
import numpy as np

from mlx_lattice.backends.cuda_compile import PRELUDE, TYPES, Kernel

HERE = Path(__file__).parent / "cuda_host"
COMPILER = os.environ.get("CXX") or shutil.which("c++") or shutil.which("clang++")
_INCLUDES = "\n".join(PRELUDE.splitlines()[:8])
_LAUNCH = """
extern "C" void launch(void** arrays, const int* sizes, const int* grid) {{
  emulated::launch(grid, [&] {{ {name}({arguments}); }});
}}
"""
NUMPY = {mx.float32: np.float32, mx.float16: np.float16, mx.int32: np.int32}


def to_numpy(array: mx.array) -> np.ndarray:
    """The same bits; bfloat16 as uint16."""
    return np.array(array.view(mx.uint16) if array.dtype == mx.bfloat16 else array)


class Emulator:
    """Builds and runs kernels.

    Args:
        folder: for what is compiled.
        skewed: whether inputs begin one element after a multiple of 16 bytes.
    """

    def __init__(self, folder: Path, skewed: bool = False):
        self.folder, self.skewed = folder, skewed
        self.launches: list[str] = []

    def cuda_kernel(
        self, name, input_names, output_names, source, header="", **_
    ):  # fmt: skip
        """Return what launches a kernel, as MLX's function does."""

        def call(inputs, output_shapes, output_dtypes, grid, threadgroup, **_):
            kernel = Kernel(
                None, name, input_names, output_names, header, source, (1, 1), 0
            )
            dtypes = [[a.dtype for a in inputs], list(output_dtypes)]
            run = self._built(kernel, dtypes)
            self.launches.append(name)
            arrays = [self._placed(to_numpy(a)) for a in inputs]
            made = [
                np.full(shape, np.nan, NUMPY[dtype])
                if dtype in NUMPY
                else np.full(shape, 0x7FC0, np.uint16)
                for shape, dtype in zip(output_shapes, output_dtypes, strict=True)
            ]
            pointers = [a.ctypes.data for a in (*arrays, *made)]
            sizes = [inputs[i].shape[axis] for i, axis in kernel.sizes]
            blocks = [-(-g // t) for g, t in zip(grid, threadgroup, strict=True)]
            assert blocks[2] == threadgroup[2] == 1
            run(
                (ctypes.c_void_p * len(pointers))(*pointers),
                (ctypes.c_int * (len(sizes) + 1))(*sizes),
                (ctypes.c_int * 4)(*blocks[:2], *threadgroup[:2]),
            )
            views = zip(made, output_dtypes, strict=True)
            return [
                mx.array(a).view(dtype) if dtype == mx.bfloat16 else mx.array(a)
                for a, dtype in views
            ]

        return call

    def _placed(self, array: np.ndarray) -> np.ndarray:
        size = array.itemsize
        bytes_ = np.zeros(array.nbytes + 32, np.uint8)
        start = -bytes_.ctypes.data % 16 + size * self.skewed
        place = bytes_[start : start + array.nbytes].view(array.dtype)
        place[:] = array.reshape(-1)
        return place.reshape(array.shape)

    def _built(self, kernel: Kernel, dtypes: list[list[mx.Dtype]]):
        inputs, outputs = dtypes
        text = kernel.source(inputs, outputs)
        assert text.startswith(_INCLUDES), "the prelude of CUDA's compiler has changed"
        kinds = [f"const {TYPES[d]}*" for d in inputs]
        kinds += [f"{TYPES[d]}*" for d in outputs]
        arguments = [f"({kind})arrays[{i}]" for i, kind in enumerate(kinds)]
        arguments += [f"sizes[{i}]" for i in range(len(kernel.sizes))]
        named = {"name": kernel.name, "arguments": ", ".join(arguments)}
        text = '#include "halves.h"\n' + text.removeprefix(_INCLUDES)
        text += _LAUNCH.format(**named)
        key = hashlib.sha256(text.encode()).hexdigest()[:24]
        library = self.folder / f"{key}.so"
        if not library.exists():
            source = self.folder / f"{key}.cpp"
            source.write_text(text)
            options = ["-std=c++17", "-O1", "-w", "-pthread", "-U_FORTIFY_SOURCE"]
            command = [COMPILER, *options, "-shared", "-fPIC", f"-I{HERE}", source]
            subprocess.run([*command, "-o", library], check=True)
        return ctypes.CDLL(str(library)).launch
