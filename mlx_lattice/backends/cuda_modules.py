"""How MLX comes by machine code: with every launch, or from a file that it looks for.

MLX copies what a launch hands over twice, and hashes it: 20 us for the code of one
kernel. But first of all it looks for a file by the kernel's name and that hash, in its
folder of compiled kernels. So a launch hands over a mark of 32 bytes, and the code
stands in the file of the mark. Whether MLX does so is tried once in a process.
"""

from __future__ import annotations

import ctypes
import hashlib
import os
import tempfile
from functools import cache
from pathlib import Path

import mlx.core as mx

from .. import kept_files
from .nvrtc import Compiler

_SEED = 0xC70F6907  # of std::hash, in the C++ library that MLX is linked with
_LONGEST = 200  # name of a file, without the hash
_TRIAL = "lattice_trial"


def handed(nvrtc: Compiler, name: str, code: bytes) -> bytes:
    """Return what launches hand over as a kernel's code: a mark, or the code itself.

    Args:
        nvrtc: the compiler, for the trial.
        name: of the kernel.
        code: its machine code.
    """
    mark = hashlib.sha256(code).hexdigest()[:32].encode()
    if len(name) > _LONGEST or not takes_marks(nvrtc):
        return code
    return mark if place(name, mark, code) else code


@cache
def takes_marks(nvrtc: Compiler) -> bool:
    """Return whether MLX looks for a kernel's file before it takes what is handed over.

    A kernel that writes 1 is launched, for which a file stands that writes 2.
    """
    given, placed = (
        nvrtc.compile(
            f'extern "C" __global__ void {_TRIAL}(int* y) {{ y[0] = {value}; }}'
        )
        for value in (1, 2)
    )
    if not place(_TRIAL, given, placed):
        return False
    written = mx.fast.precompiled_cuda_kernel(
        name=_TRIAL,
        compiled_source=given,
        inputs=[],
        output_shapes=[(1,)],
        output_dtypes=[mx.int32],
        scalars=[],
        grid=(1, 1, 1),
        threadgroup=(1, 1, 1),
        stream=mx.gpu,
    )[0]
    return written.item() == 2


def place(name: str, mark: bytes, code: bytes) -> bool:
    """Write the file in which MLX looks for what is handed over as ``mark``.

    Returns:
        Whether it stands there.
    """
    number = hash_of(mark)
    if number is None:
        return False
    path = folder() / f"{name}_{number:x}.ptx"
    # Names of kernels, and what they are called in the code.
    files = {path.with_suffix(".txt"): f"{name}\t{name}\n".encode(), path: code}
    try:
        for file, content in files.items():
            if not file.is_file() or file.read_bytes() != content:
                kept_files.write_whole(file, content)
    except OSError:
        return False
    return True


@cache
def folder() -> Path:
    """Return the folder in which MLX looks for compiled kernels."""
    if named := os.environ.get("MLX_PTX_CACHE_DIR"):
        return Path(named)
    return Path(tempfile.gettempdir()) / "mlx" / mx.__version__ / "ptx"


@cache
def _hash_bytes():
    """Return the function that std::hash of a string calls, or None."""
    try:
        function = ctypes.CDLL("libstdc++.so.6")._ZSt11_Hash_bytesPKvmm
    except (OSError, AttributeError):
        return None
    function.restype = ctypes.c_size_t
    function.argtypes = ctypes.c_char_p, ctypes.c_size_t, ctypes.c_size_t
    return function


def hash_of(content: bytes) -> int | None:
    """Return the hash by which MLX tells kernels of one name apart, or None."""
    function = _hash_bytes()
    return None if function is None else function(content, len(content), _SEED)
