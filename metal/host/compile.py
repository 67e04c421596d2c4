"""Metal source to a loaded library of kernels.

The source is preprocessed by clang (Metal's own headers resolve to nothing, MLX's to
the files of its wheel), rewritten to C++ (rewrite.py), compiled against the
precompiled shim and preamble, and linked to the runtime. The library and what a launch
must know about it are kept in the cache under a digest of everything that went in, so a
kernel is compiled once per machine, and a cached one starts no process at all.
"""

from __future__ import annotations

import ctypes
import functools
import json
import os
import tempfile
from collections.abc import Sequence
from dataclasses import astuple, dataclass
from pathlib import Path

from . import arithmetic, rewrite
from .rewrite import Parameter
from .toolchain import (
    COUNTED,
    FAST,
    HERE,
    LIBRARIES,
    CompileError,
    build_once,
    cache_folder,
    call,
    clang,
    contents,
    digest,
    flags,
    linker,
    mlx_headers,
    mlx_include,
    precompiled_shim,
    runtime_library,
    symbolizer,
)

# What MLX puts before the source of every kernel that it compiles at run time.
MLX_PREAMBLE = '#include "mlx/backend/metal/kernels/utils.h"\n'

# Where the preamble ends, in preprocessed text.
_CUT = "metal_host_kernel_begins"

_SYSTEM_HEADERS = (
    "metal_array",
    "metal_assert",
    "metal_atomic",
    "metal_common",
    "metal_compute",
    "metal_cooperative_tensor",
    "metal_extended_vector",
    "metal_geometric",
    "metal_integer",
    "metal_limits",
    "metal_logging",
    "metal_math",
    "metal_pack",
    "metal_quadgroup",
    "metal_relational",
    "metal_simdgroup",
    "metal_simdgroup_matrix",
    "metal_stdlib",
    "metal_tensor",
    "metal_type_traits",
    "metal_types",
    "metal_uniform",
)
_DEFINES = (
    "-D__METAL__=1",
    "-D__METAL_VERSION__=400",
    "-D__METAL_MACOS__=1",
    "-D__HAVE_BFLOAT__=1",
    "-DMLX_METAL_JIT",
    "-U__cplusplus",
    "-D__cplusplus=201703L",
)


@dataclass(frozen=True)
class Entry:
    """A kernel of a loaded library.

    Attributes:
        name: Its host name.
        address: Of the function that runs one thread.
        parameters: All parameters, attributes of the thread included.
        mode: ``"fast"``, ``"checked"`` or ``"counted"``.
        library: The library, which must outlive the launches.
    """

    name: str
    address: int
    parameters: tuple[Parameter, ...]
    mode: str
    library: ctypes.CDLL

    @property
    def buffers(self) -> list[Parameter]:
        """The parameters that a launch passes, by buffer index."""
        return sorted((p for p in self.parameters if p.buffer), key=lambda p: p.index)

    def set_constants(self, constants: dict[int, object]) -> None:
        """Sets function constants by index, for this library's later launches."""
        import numpy as np

        table = (_FunctionConstant * 256).in_dll(self.library, "mtl_constants")
        for constant in table:
            if constant.id < 0:
                break
            if constant.id in constants:
                value = np.asarray(constants[constant.id]).tobytes()
                ctypes.memmove(constant.address, value, constant.size)


class _KernelEntry(ctypes.Structure):
    _fields_ = [("name", ctypes.c_char_p), ("invoke", ctypes.c_void_p)]


class _FunctionConstant(ctypes.Structure):
    _fields_ = [
        ("id", ctypes.c_int),
        ("address", ctypes.c_void_p),
        ("size", ctypes.c_size_t),
    ]


_runtime: ctypes.CDLL | None = None
_loaded: dict[tuple, dict[str, Entry]] = {}


def runtime() -> ctypes.CDLL:
    """The runtime, loaded; kernels find its functions among the global symbols."""
    global _runtime
    if _runtime is None:
        _runtime = ctypes.CDLL(str(runtime_library()), mode=ctypes.RTLD_GLOBAL)
        _runtime.mtl_set_symbolizer(symbolizer().encode())
    return _runtime


def _stand_ins() -> Path:
    """A folder with an empty file for each of Metal's own headers."""
    folder = cache_folder() / f"headers-{digest(_SYSTEM_HEADERS)}"
    for name in _SYSTEM_HEADERS:
        path = folder / name
        if not path.exists():
            path.parent.mkdir(parents=True, exist_ok=True)
            path.touch()
    return folder


def preprocess(
    source: str,
    name: str = "kernel",
    preamble: str = MLX_PREAMBLE,
    deployment_target: int = 260200,
) -> str:
    """Expands includes and macros as Metal's compiler would.

    Args:
        source: Metal source; it may include MLX's kernel headers.
        name: What diagnostics and faults call the source, unless a ``#line`` says else.
        preamble: What comes before it.
        deployment_target: The oldest macOS that it is compiled for: 260200 is 26.2.

    Raises:
        CompileError: It does not preprocess; a kernel may stop with ``#error``. Or it
            has a character that is not ASCII, for which MLX hands Metal an empty text.
    """
    if not source.isascii():
        line = next(i for i, t in enumerate(source.split("\n"), 1) if not t.isascii())
        raise CompileError(
            f"{name}: line {line} has a character that is not ASCII: MLX would hand "
            "Metal an empty source"
        )
    command = [*clang().command, "-E", "-x", "c++", "-nostdinc", "-std=gnu++17", "-w"]
    command += _DEFINES
    command.append(f"-D__ENVIRONMENT_OS_VERSION_MIN_REQUIRED__={deployment_target}")
    # MLX's complex numbers and pointer traits are written against address spaces.
    folders = (HERE / "stand_ins", _stand_ins(), mlx_include())
    command += [f"-I{folder}" for folder in folders]
    text = f'{preamble}# 1 "{name}.metal"\n{source}'
    return call([*command, "-"], f"preprocessing {name}", text)


def translate(source: str, name: str, mode: str) -> tuple[rewrite.Rewritten, list[str]]:
    """Metal source in C++, and the command to which clang compiles it, from its input.

    MLX's preamble, which is the same before every kernel, is in the precompiled shim.
    """
    text = preprocess(source, name, f"{MLX_PREAMBLE}{_CUT}\n")
    preamble, _, text = text.partition(_CUT)
    shim = precompiled_shim(mode, _rewritten_preamble(preamble))
    command = [*clang().command, *flags(mode), "-include-pch", str(shim), "-x", "c++"]
    return rewrite.rewrite(text), [*command, "-"]


@functools.cache
def _rewritten_preamble(text: str) -> str:
    return rewrite.rewrite(text).text


def _build(
    source: str,
    name: str,
    mode: str,
    instances: Sequence[tuple[str, str]],
    target: Path,
) -> None:
    rewritten, compiler = translate(source, name, mode)
    rewritten.instances += instances
    text = rewritten.text + rewrite.glue(rewritten)
    tables = {
        host_name: [astuple(p) for p in rewrite.parameters_of(rewritten, expression)]
        for host_name, expression in rewrite.entries(rewritten).items()
    }
    with tempfile.TemporaryDirectory(dir=target.parent) as folder:
        unlinked = Path(folder) / "kernel.o"
        what = f"compiling {name}"
        if mode == COUNTED:
            text = call([*compiler, "-S", "-emit-llvm", "-o", "-"], what, text)
            text = arithmetic.instrument(text)
            compiler = [*clang().command, "-O1", "-g1", "-fPIC", "-x", "ir"]
            compiler += ["-Xclang", "-disable-llvm-passes", "-"]
        call([*compiler, "-c", "-o", str(unlinked)], what, text)
        described = Path(folder) / "kernel.json"
        described.write_text(json.dumps(tables))
        os.replace(described, target.with_suffix(".json"))
        build_once(target, [*linker(), str(unlinked), *LIBRARIES], f"linking {name}")


def compile_source(
    source: str,
    *,
    name: str = "kernel",
    mode: str = FAST,
    instances: Sequence[tuple[str, str]] = (),
) -> dict[str, Entry]:
    """Compiles Metal source for the host, or finds it in the cache.

    Args:
        source: The source, without MLX's preamble.
        name: What diagnostics and faults call it.
        mode: ``"fast"``, ``"checked"`` or ``"counted"``.
        instances: (host name, expression) of templates to instantiate, for sources
            that do not do so themselves.

    Returns:
        The kernels by host name.

    Raises:
        CompileError: The source is not valid.
        ToolMissing: There is no clang.
    """
    key = (source, name, mode, tuple(instances))
    if key in _loaded:
        return _loaded[key]
    runtime()
    code = [
        (HERE / f).read_text()
        for f in ("compile.py", "rewrite.py", "arithmetic.py", "toolchain.py")
    ]
    version = digest(
        *key,
        *code,
        clang().version,
        contents("shim", "stand_ins"),
        runtime_library(),
        mlx_headers(),
    )
    target = cache_folder() / f"kernel-{version}.so"
    if not (target.exists() and target.with_suffix(".json").exists()):
        _build(source, name, mode, instances, target)
    library = ctypes.CDLL(str(target))
    tables = json.loads(target.with_suffix(".json").read_text())
    parameters = {k: tuple(Parameter(*p) for p in v) for k, v in tables.items()}
    kernels = (_KernelEntry * len(parameters)).in_dll(library, "mtl_kernels")
    _loaded[key] = {
        e.name.decode(): Entry(
            e.name.decode(), e.invoke, parameters[e.name.decode()], mode, library
        )
        for e in kernels
    }
    return _loaded[key]
