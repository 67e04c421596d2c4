"""CUDA kernels compiled once and kept on disk, where MLX_LATTICE_CUDA_CACHE=1 asks.

MLX compiles a kernel anew in every process, for two seconds, most of which go into
headers that these kernels do not use. Without them NVRTC, which MLX has loaded, takes a
third of a second. But MLX looks through the machine code of such a kernel at every
launch, which costs Python some microseconds: so it is a choice.
"""

from __future__ import annotations

import ctypes
import hashlib
import os
import re
import warnings
from collections.abc import Callable, Sequence
from functools import cache
from pathlib import Path

import mlx.core as mx

from .. import kept_files

TYPES = {
    mx.bool_: "bool",
    mx.uint8: "uint8_t",
    mx.int32: "int32_t",
    mx.uint32: "uint32_t",
    mx.int64: "int64_t",
    mx.uint64: "uint64_t",
    mx.float32: "float",
    mx.float16: "__half",
    mx.bfloat16: "__nv_bfloat16",
}
# What kernels use of the headers that MLX puts before them, which take the time.
PRELUDE = """
#include <cuda_fp16.h>
#include <cuda_bf16.h>
using uint8_t = unsigned char;
using int32_t = int;
using uint32_t = unsigned;
using int64_t = long long;
using uint64_t = unsigned long long;
namespace cuda::std {
template <bool V>
struct bool_constant {
  static constexpr bool value = V;
  constexpr operator bool() const { return V; }
};
using true_type = bool_constant<true>;
using false_type = bool_constant<false>;
}  // namespace cuda::std
"""
_SHAPE = re.compile(r"\b(\w+)_shape\[(\d+)\]")


class Compiler:
    """NVRTC for one device.

    Args:
        library: its file.
        include: the folder of CUDA's headers.
        capability: the compute capability of the device.
    """

    def __init__(self, library: Path, include: Path, capability: tuple[int, int]):
        self.nvrtc, self.include = ctypes.CDLL(str(library)), include
        self.capability = capability
        major, minor = ctypes.c_int(), ctypes.c_int()
        self._check(self.nvrtc.nvrtcVersion(ctypes.byref(major), ctypes.byref(minor)))
        self.version = major.value, minor.value

    def architectures(self) -> set[int]:
        """Return the compute capabilities that it knows, as 10 major + minor."""
        count = ctypes.c_int()
        self._check(self.nvrtc.nvrtcGetNumSupportedArchs(ctypes.byref(count)))
        known = (ctypes.c_int * count.value)()
        self._check(self.nvrtc.nvrtcGetSupportedArchs(known))
        return set(known)

    @property
    def options(self) -> tuple[str, ...]:
        """What it compiles with."""
        major, minor = self.capability
        suffix = "a" if major == 9 else ""  # wgmma
        return (
            f"--gpu-architecture=sm_{major}{minor}{suffix}",
            "--std=c++17",
            "--device-as-default-execution-space",
            f"--include-path={self.include}",
        )

    def compile(self, text: str) -> bytes:
        """Return machine code.

        Raises:
            RuntimeError: what the compiler says.
        """
        program = ctypes.c_void_p()
        self._check(
            self.nvrtc.nvrtcCreateProgram(
                ctypes.byref(program), text.encode(), b"kernel.cu", 0, None, None
            )
        )
        try:
            options = [option.encode() for option in self.options]
            given = (ctypes.c_char_p * len(options))(*options)
            if self.nvrtc.nvrtcCompileProgram(program, len(options), given):
                log = self._fetch("ProgramLog", program).rstrip(b"\0").decode()
                raise RuntimeError(f"a CUDA kernel did not compile:\n{log}")
            return self._fetch("CUBIN", program)
        finally:
            self.nvrtc.nvrtcDestroyProgram(ctypes.byref(program))

    def _fetch(self, what: str, program: ctypes.c_void_p) -> bytes:
        size = ctypes.c_size_t()
        get_size = getattr(self.nvrtc, f"nvrtcGet{what}Size")
        self._check(get_size(program, ctypes.byref(size)))
        buffer = ctypes.create_string_buffer(size.value)
        self._check(getattr(self.nvrtc, f"nvrtcGet{what}")(program, buffer))
        return buffer.raw

    def _check(self, code: int) -> None:
        if code:
            self.nvrtc.nvrtcGetErrorString.restype = ctypes.c_char_p
            text = self.nvrtc.nvrtcGetErrorString(code).decode()
            raise RuntimeError(f"NVRTC failed: {text}")


@cache
def compiler(capability: tuple[int, int]) -> Compiler | None:
    """Return NVRTC if kernels are to be kept on disk; None where MLX compiles them.

    Warns where they are to be kept and cannot be.
    """
    if not kept_files.is_set("MLX_LATTICE_CUDA_CACHE"):
        return None
    library = loaded("libnvrtc.so")
    include = library and headers(library)
    lacks = "NVRTC" if library is None else "the folder of cuda_fp16.h"
    if include:
        found = Compiler(library, include, capability)
        if 10 * capability[0] + capability[1] in found.architectures():
            return found
        lacks = "an NVRTC that knows compute capability {}.{}".format(*capability)
    warnings.warn(
        f"MLX_LATTICE_CUDA_CACHE=1 asks for compiled kernels to be kept, but {lacks} "
        "was not found: MLX compiles them, in every process. Set CUDA_HOME to the "
        "folder of a CUDA toolkit, or leave the variable out",
        RuntimeWarning,
        stacklevel=2,
    )
    return None


def loaded(name: str) -> Path | None:
    """Return the file of a library that this process has loaded."""
    try:
        lines = Path("/proc/self/maps").read_text().splitlines()
    except OSError:
        return None
    files = (line.split(maxsplit=5)[-1] for line in lines if name in line)
    return next((Path(file) for file in files), None)


def headers(library: Path) -> Path | None:
    """Return the folder that has CUDA's headers, looked for as MLX does."""
    homes = [os.environ.get(name) for name in ("CUDA_HOME", "CUDA_PATH")]
    places = [Path(home) / "include" for home in homes if home]
    places += [
        library.parent.parent / "include",
        library.parents[2] / "cuda_runtime" / "include",
        Path("/usr/local/cuda/include"),
    ]
    return next((place for place in places if (place / "cuda_fp16.h").is_file()), None)


class Kernel:
    """A kernel that is compiled at its first launch, and called as MLX's are.

    Args:
        nvrtc: the compiler.
        name: of the kernel; no other has it.
        inputs: names of the inputs; ``NAME_shape[AXIS]`` may stand in the body.
        outputs: names of the outputs.
        text: what stands before the kernel.
        body: CUDA statements.
        bounds: threads of a block, and blocks that must fit side by side.
        shared_bytes: dynamic shared memory.
    """

    def __init__(
        self,
        nvrtc: Compiler,
        name: str,
        inputs: Sequence[str],
        outputs: Sequence[str],
        text: str,
        body: str,
        bounds: tuple[int, int],
        shared_bytes: int,
    ):
        self.nvrtc, self.name, self.text, self.body = nvrtc, name, text, body
        self.inputs, self.outputs = tuple(inputs), tuple(outputs)
        self.bounds, self.shared_bytes = bounds, shared_bytes
        used = {(self.inputs.index(n), int(axis)) for n, axis in _SHAPE.findall(body)}
        self.sizes = sorted(used)
        self.code: bytes | None = None

    def __call__(
        self,
        *,
        inputs: Sequence[mx.array],
        grid: tuple[int, int, int],
        threadgroup: tuple[int, int, int],
        output_shapes: Sequence[tuple[int, ...]],
        output_dtypes: Sequence[mx.Dtype],
        init_value: float | None = None,
    ) -> list[mx.array]:
        """Launch it; as the function that ``mx.fast.cuda_kernel`` returns."""
        if self.code is None:
            text = self.source([x.dtype for x in inputs], output_dtypes)
            words = "\0".join((str(self.nvrtc.version), *self.nvrtc.options, text))
            key = hashlib.sha256(words.encode()).hexdigest()[:32]
            self.code = kept(key, lambda: self.nvrtc.compile(text))
        return mx.fast.precompiled_cuda_kernel(
            name=self.name,
            compiled_source=self.code,
            inputs=inputs,
            output_shapes=output_shapes,
            output_dtypes=output_dtypes,
            scalars=[inputs[i].shape[axis] for i, axis in self.sizes],
            grid=grid,
            threadgroup=threadgroup,
            shared_memory=self.shared_bytes,
            init_value=init_value,
            ensure_row_contiguous=True,
        )

    def source(self, inputs: Sequence[mx.Dtype], outputs: Sequence[mx.Dtype]) -> str:
        """Return the whole text, for the dtypes of inputs and outputs."""
        given = zip(inputs, self.inputs, strict=True)
        made = zip(outputs, self.outputs, strict=True)
        parameters = [
            *(f"const {TYPES[dtype]}* {name}" for dtype, name in given),
            *(f"{TYPES[dtype]}* {name}" for dtype, name in made),
            *(f"int {self.inputs[i]}_shape_{axis}" for i, axis in self.sizes),
        ]
        shapes = ""
        for i, name in enumerate(self.inputs):
            axes = [axis for j, axis in self.sizes if j == i]
            if axes:
                words = (
                    f"{name}_shape_{axis}" if axis in axes else "0"
                    for axis in range(axes[-1] + 1)
                )
                shapes += f"const int {name}_shape[] = {{{', '.join(words)}}};\n"
        threads, blocks = self.bounds
        return (
            f"{PRELUDE}{self.text}\n"
            f'extern "C" __global__ void __launch_bounds__({threads}, {blocks}) '
            f"{self.name}({', '.join(parameters)}) {{\n"
            f"{shapes}{self.body}\n}}\n"
        )


def kept(key: str, build: Callable[[], bytes]) -> bytes:
    """Return the machine code of a key, built where no file has it.

    Warns where it cannot be kept.
    """
    path = kept_files.folder() / "cuda" / f"{key}.cubin"
    try:
        code = path.read_bytes()
    except OSError:
        code = b""
    if code.startswith(b"\x7fELF"):
        return code
    code = build()
    try:
        kept_files.write_whole(path, code)
    except OSError as error:
        warnings.warn(
            f"compiled CUDA kernels cannot be kept in {path.parent} "
            f"({error.strerror or error}): the next process compiles them again. Set "
            "MLX_LATTICE_CACHE to a folder",
            RuntimeWarning,
            stacklevel=2,
        )
    return code
