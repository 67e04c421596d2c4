"""CUDA kernels that this library compiles, in threads, and caches on disk.

NVRTC compiles a kernel to machine code (a cubin), which MLX loads and launches by
``mx.fast.precompiled_cuda_kernel``. MLX itself compiles custom kernels anew in every
process, one after another, in a second or more each; much of that goes into headers
that these kernels do not use. ``MLX_LATTICE_CUDA_CACHE=0`` leaves compiling to MLX.
"""

from __future__ import annotations

import ctypes
import hashlib
import os
import re
import warnings
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager, suppress
from contextvars import ContextVar, copy_context
from functools import cache
from pathlib import Path

import mlx.core as mx

from ... import cache_files
from ...checks import LatticeWarning
from ...devices import CUDA, compute_capability, current, serves

TYPES = {
    mx.bool_: "bool",
    mx.int8: "int8_t",
    mx.uint8: "uint8_t",
    mx.uint16: "uint16_t",
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
using int8_t = signed char;
using uint8_t = unsigned char;
using uint16_t = unsigned short;
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
    """NVRTC for one device. Its calls release Python's lock, so threads can compile."""

    def __init__(self, library: Path, include: Path, capability: tuple[int, int]):
        self.nvrtc: ctypes.CDLL = ctypes.CDLL(str(library))
        self.include: Path = include
        self.capability = capability
        major, minor = ctypes.c_int(), ctypes.c_int()
        self._check(self.nvrtc.nvrtcVersion(ctypes.byref(major), ctypes.byref(minor)))
        self.version: tuple[int, int] = major.value, minor.value

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
        """Return machine code."""
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
def fatbin() -> ctypes.CDLL | None:
    """Return NVIDIA's library nvFatbin, which compresses machine code, if it is here.

    MLX hashes the code of a kernel at each launch: 7 us for 30 KB on an H200's host.
    Compressed, it is a third to a quarter as long.
    """
    nvrtc = loaded("libnvrtc.so")
    folders = [nvrtc.parent, Path("/usr/local/cuda/lib64")] if nvrtc else []
    for file in (f for folder in folders for f in folder.glob("libnvfatbin.so*")):
        with suppress(OSError):
            return ctypes.CDLL(str(file))
    return None


def compressed(code: bytes, capability: tuple[int, int]) -> bytes:
    """Return machine code as a compressed fat binary, or as it is without nvFatbin."""
    library = fatbin()
    if library is None:
        return code

    def call(name: str, *arguments: object) -> None:
        if error := getattr(library, name)(*arguments):
            raise RuntimeError(f"{name} of NVIDIA's nvFatbin failed with code {error}")

    major, minor = capability
    architecture = f"{major}{minor}{'a' if major == 9 else ''}".encode()
    options = (ctypes.c_char_p * 1)(b"-compress-mode=size")
    handle, size = ctypes.c_void_p(), ctypes.c_size_t(len(code))
    call("nvFatbinCreate", ctypes.byref(handle), options, ctypes.c_size_t(1))
    try:
        call("nvFatbinAddCubin", handle, code, size, architecture, b"kernel")
        call("nvFatbinSize", handle, ctypes.byref(size))
        buffer = ctypes.create_string_buffer(size.value)
        call("nvFatbinGet", handle, buffer)
        return buffer.raw
    finally:
        library.nvFatbinDestroy(ctypes.byref(handle))


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


# What launches in this context only see to: "features", or "all" and geometry too.
_rehearsed: ContextVar[str | None] = ContextVar("rehearsed", default=None)


@contextmanager
def rehearsal(what: str = "features") -> Iterator[None]:
    """Have kernels compiled, side by side, in place of launching those that are not."""
    token = _rehearsed.set(what)
    try:
        yield
    finally:
        _rehearsed.reset(token)


# What is rehearsed here, where launches may be left out and be zeros; else None.
rehearsed: Callable[[], str | None] = _rehearsed.get


@cache
def _pool() -> ThreadPoolExecutor:
    return ThreadPoolExecutor(min(32, os.cpu_count() or 1), "mlx_lattice_nvrtc")


VARIABLE = "MLX_LATTICE_CUDA_CACHE"
CODE_SIGNS = b"\x7fELF", b"\x50\xed\x55\xba"  # a cubin, a fat binary


@cache
def compiler(capability: tuple[int, int]) -> Compiler | None:
    """Return NVRTC, or None where MLX compiles kernels."""
    if not cache_files.is_set(VARIABLE, default=True):
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
        f"{lacks} was not found: MLX compiles CUDA kernels one by one, in every "
        "process. Set CUDA_HOME to the folder of a CUDA toolkit, or "
        "MLX_LATTICE_CUDA_CACHE=0 to say that this is wanted",
        LatticeWarning,
        stacklevel=2,
    )
    return None


def compiles() -> bool:
    """Return whether CUDA kernels run here now, and this library compiles them."""
    on_cuda = current().backend == CUDA and serves(CUDA)
    return on_cuda and compiler(compute_capability()) is not None


class Kernel:
    """A kernel that is compiled at its first launch, and called as MLX's are."""

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
        geometry: bool = False,
    ):
        self.nvrtc: Compiler = nvrtc
        self.name: str = name
        self.text: str = text
        self.body: str = body
        self.inputs: tuple[str, ...] = tuple(inputs)
        self.outputs: tuple[str, ...] = tuple(outputs)
        self.bounds: tuple[int, int] = bounds
        self.shared_bytes: int = shared_bytes
        self.geometry = geometry
        used = {(self.inputs.index(n), int(axis)) for n, axis in _SHAPE.findall(body)}
        self.sizes: list[tuple[int, int]] = sorted(used)
        self._job: Future[bytes] | None = None
        self.code: bytes | None = None

    def __call__(
        self,
        *,
        inputs: Sequence[mx.array],
        output_shapes: Sequence[tuple[int, ...]],
        output_dtypes: Sequence[mx.Dtype],
        **settled: object,
    ) -> list[mx.array]:
        """Launch it; as the function that ``mx.fast.cuda_kernel`` returns."""
        if self.code is None:
            job = self._started([x.dtype for x in inputs], output_dtypes)
            what = rehearsed()
            if what == "all" or (what and not self.geometry):
                made = zip(output_shapes, output_dtypes, strict=True)
                return [mx.zeros(shape, dtype=dtype) for shape, dtype in made]
            self.code = job.result()
            self._job = None
        return mx.fast.precompiled_cuda_kernel(
            inputs=inputs,
            output_shapes=output_shapes,
            output_dtypes=output_dtypes,
            name=self.name,
            compiled_source=self.code,
            scalars=[inputs[i].shape[axis] for i, axis in self.sizes],
            shared_memory=self.shared_bytes,
            ensure_row_contiguous=True,
            **settled,
        )

    def _started(self, inputs, outputs) -> Future[bytes]:
        """Return the compilation, begun in a thread the first time."""
        if self._job is None:
            text = self.source(inputs, outputs)
            # A thread has a context of its own, without the block that names a folder.
            run = copy_context().run
            self._job = _pool().submit(run, compiled, self.nvrtc, text)
            if rehearsed():
                _jobs.append(self._job)
        return self._job

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


# Compilations that ``finish`` has not waited for.
_jobs: list[Future[bytes]] = []


def finish(raises: bool = True) -> int:
    """Wait for all compilations since the last call; return how many there were."""
    jobs = _jobs.copy()
    _jobs.clear()
    failed = [error for job in jobs if (error := job.exception())]
    if failed and raises:
        raise failed[0]
    return len(jobs)


def compiled(nvrtc: Compiler, text: str) -> bytes:
    """Return the machine code of a text, from the disk where it is kept."""
    is_compressed = fatbin() is not None
    words = "\0".join((str(nvrtc.version), *nvrtc.options, str(is_compressed), text))
    key = hashlib.sha256(words.encode()).hexdigest()[:32]
    return cached(key, lambda: compressed(nvrtc.compile(text), nvrtc.capability))


def cached(key: str, build: Callable[[], bytes]) -> bytes:
    """Return the machine code of a key, built where no file has it."""
    path = cache_files.folder() / "cuda" / f"{key}.cubin"
    try:
        code = path.read_bytes()
    except OSError:
        code = b""
    if code.startswith(CODE_SIGNS):
        return code
    code = build()
    try:
        cache_files.write_whole(path, code)
    except OSError as error:
        warnings.warn(
            f"compiled CUDA kernels cannot be kept in {path.parent} "
            f"({error.strerror or error}): the next process compiles them again. Set "
            "MLX_LATTICE_CACHE to a folder",
            LatticeWarning,
            stacklevel=2,
        )
    return code
