"""NVRTC, the compiler of CUDA kernels, which MLX has loaded; found, and called.

Threads may compile side by side: a call leaves Python's lock to others.
"""

from __future__ import annotations

import ctypes
import os
from pathlib import Path


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
