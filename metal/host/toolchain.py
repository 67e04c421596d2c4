"""The compiler and the cache: clang, its flags, the runtime, the precompiled shim."""

from __future__ import annotations

import functools
import hashlib
import importlib.util
import os
import platform
import re
import shlex
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

HERE = Path(__file__).resolve().parent

OLDEST_CLANG = 16
OLDEST_APPLE_CLANG = 15  # Apple's 15 is LLVM's 16

INSTALL_CLANG = (
    "metal/host needs clang 16 or later to run Metal kernels on the CPU: install it "
    "('apt install clang-19', 'dnf install clang' or 'xcode-select --install') or set "
    "CLANG to its path."
)

INSTALL_NANOBIND = (
    "metal/host needs nanobind to run Metal kernels inside MLX's graph: 'pip install "
    "nanobind==3.1.0', the version that MLX 0.32.4 is built with."
)

BESIDE_CUDA = (
    "metal/host runs Metal kernels on the CPU beside MLX's CPU backend, and this MLX "
    "computes on an NVIDIA GPU: use an MLX without CUDA, 'pip install \"mlx[cpu]\"'."
)

CHECKED, FAST, COUNTED = "checked", "fast", "counted"
MEASURED = "measured"  # never run: pressure.py reads what clang makes of it
MODES = FAST, CHECKED, COUNTED  # by the runtime's numbers

_ON_X86 = platform.machine() in ("x86_64", "AMD64")
_COMMON_FLAGS = [
    "-std=gnu++20",
    "-fPIC",
    "-g1",
    "-fno-exceptions",
    "-fno-math-errno",
    "-fno-strict-aliasing",
    # Round half and bfloat after every operation, and never fuse two.
    "-ffp-contract=off",
    "-Xclang",
    "-ffloat16-excess-precision=none",
    # Calls of the runtime are told apart by their return addresses.
    "-fconvergent-functions",
    "-Wno-everything",
]
_MODE_FLAGS = {
    FAST: ["-O2"],
    # Loads and stores that are left after -O1 call hooks, which our runtime supplies.
    CHECKED: [
        "-O1",
        "-fsanitize=thread",
        "-fsanitize=array-bounds,integer-divide-by-zero,alignment",
        # The elements of a vector are the last member of a struct: check them too.
        "-fstrict-flex-arrays=3",
        "-fno-vectorize",
        "-fno-slp-vectorize",
        "-mllvm",
        "-tsan-instrument-func-entry-exit=0",
        "-mllvm",
        "-tsan-instrument-atomics=0",
        "-mllvm",
        "-tsan-instrument-read-before-write=1",
    ],
}
_MODE_FLAGS[MEASURED] = [
    "-O2",
    "-fno-vectorize",
    "-fno-slp-vectorize",
    "-DMTL_MEASURED",
]
_MODE_FLAGS[COUNTED] = [*_MODE_FLAGS[CHECKED], "-DMTL_COUNTED"]


# What a kernel links besides the runtime. C++'s library would take longer than the rest
# of linking, and no kernel calls it.
_LINK, LIBRARIES = [], []
if sys.platform == "linux":
    _LINK, LIBRARIES = ["-nostdlib"], ["-lm", "-lgcc"]


class ToolMissing(RuntimeError):
    """clang, or something else that the host needs, is not installed."""


class CompileError(RuntimeError):
    """The kernel is not valid Metal, or not in the part of it that the host knows."""


@dataclass(frozen=True)
class Clang:
    """A usable compiler.

    Attributes:
        command: How to call it as a C++ compiler.
        version: The first line that it says about itself.
        major: Its major version.
        apple: Whether it is Apple's, which counts differently.
    """

    command: tuple[str, ...]
    version: str
    major: int
    apple: bool


def _probe(name: str) -> Clang | None:
    command = (*shlex.split(name), "--driver-mode=g++")
    try:
        out = subprocess.run([*command, "--version"], capture_output=True, text=True)
    except OSError:
        return None
    found = re.search(r"clang version (\d+)", out.stdout)
    if out.returncode or not found:
        return None
    version = out.stdout.splitlines()[0]
    apple = version.startswith("Apple")
    major = int(found.group(1))
    if major < (OLDEST_APPLE_CLANG if apple else OLDEST_CLANG):
        return None
    return Clang(command, version, major, apple)


@functools.cache
def clang() -> Clang:
    """The compiler: ``$CLANG`` if set, else the newest that the path holds.

    Raises:
        ToolMissing: There is none, or none that is new enough.
    """
    names = ["clang", "clang++"]
    names += [f"clang{plus}-{n}" for n in range(30, 15, -1) for plus in ("", "++")]
    if chosen := os.environ.get("CLANG"):
        names = [chosen]
    found = [
        c for name in names if (chosen or shutil.which(name)) and (c := _probe(name))
    ]
    if not found:
        raise ToolMissing(INSTALL_CLANG)
    return max(found, key=lambda c: c.major)


def missing() -> str | None:
    """The sentence that says what to install, or None where nothing is missing."""
    import mlx.core as mx

    if mx.cuda.is_available():
        return BESIDE_CUDA
    try:
        clang()
    except ToolMissing as error:
        return str(error)
    return None if importlib.util.find_spec("nanobind") else INSTALL_NANOBIND


def require() -> None:
    """Skips a test module, with the sentence, where something is missing.

    With ``CI=true`` in the environment it fails instead: there, a skipped test is a
    hole that nobody sees.
    """
    if reason := missing():
        import pytest

        if os.environ.get("CI") == "true":
            pytest.fail(reason, pytrace=False)
        pytest.skip(reason, allow_module_level=True)


def cache_folder() -> Path:
    """Where compiled kernels are kept; any of it may be deleted at any time."""
    if chosen := os.environ.get("MLX_LATTICE_CACHE"):
        root = Path(chosen)
    elif sys.platform == "darwin":
        root = Path.home() / "Library" / "Caches" / "mlx_lattice"
    else:
        home = os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache"
        root = Path(home) / "mlx_lattice"
    folder = root / "metal_host"
    folder.mkdir(parents=True, exist_ok=True)
    return folder


def digest(*parts: object) -> str:
    """A name for some content: 16 hexadecimal digits."""
    text = "\0".join(str(p) for p in parts)
    return hashlib.sha256(text.encode()).hexdigest()[:16]


@functools.cache
def contents(*folders: str) -> str:
    """The digest of all files in folders of metal/host."""
    files = sorted(p for f in folders for p in (HERE / f).rglob("*") if p.is_file())
    return digest(*(f"{p.name}\n{p.read_text()}" for p in files))


def call(command: Sequence[str], what: str, text: str | None = None) -> str:
    """Runs a compiler.

    Args:
        command: The command line.
        what: What it does, for the error.
        text: Its standard input.

    Returns:
        Its standard output.

    Raises:
        CompileError: It failed; the message holds its first diagnostics.
    """
    out = subprocess.run(command, input=text, capture_output=True, text=True)
    if out.returncode:
        raise CompileError(f"{what} failed:\n{out.stderr[:6000]}")
    return out.stdout


def flags(mode: str) -> list[str]:
    """The flags of a kernel and of the precompiled shim, which must agree."""
    compiler = clang()
    chosen = [*_COMMON_FLAGS, *_MODE_FLAGS[mode]]
    if compiler.major >= (16 if compiler.apple else 17):
        chosen += ["-Xclang", "-fbfloat16-excess-precision=none"]
    if _ON_X86:
        chosen += ["-mavx2", "-mfma", "-mf16c"]
    return chosen


def build_once(
    target: Path, command: Sequence[str], what: str, text: str | None = None
) -> Path:
    """Runs ``command -o target``, with its standard input, unless the target is there.

    The file appears in one step, so processes that build the same at the same time do
    not disturb each other.
    """
    if not target.exists():
        with tempfile.TemporaryDirectory(dir=target.parent) as folder:
            new = Path(folder) / target.name
            call([*command, "-o", str(new)], what, text)
            os.replace(new, target)
    return target


@functools.cache
def runtime_library() -> Path:
    """The host runtime, built on first use (about five seconds)."""
    compiler = clang()
    sources = sorted(str(p) for p in (HERE / "runtime").glob("*.cpp"))
    options = ["-std=c++20", "-O2", "-g1", "-fPIC", "-shared", "-pthread"]
    if _ON_X86:
        options.append("-march=x86-64-v3")
    name = f"libmetalhost-{digest(compiler.version, options, contents('runtime'))}.so"
    command = [*compiler.command, *options, *sources, "-ldl"]
    return build_once(cache_folder() / name, command, "building the host runtime")


@functools.cache
def linker() -> tuple[str, ...]:
    """What clang would call to link a kernel: starting clang takes longer than that.

    The kernel, ``LIBRARIES`` and ``-o`` come after it.
    """
    command = [*clang().command, "-###", "-shared", *_LINK, str(runtime_library())]
    out = subprocess.run(command, capture_output=True, text=True)
    if out.returncode:
        raise CompileError(f"asking for the linker failed:\n{out.stderr}")
    said = shlex.split(out.stderr.splitlines()[-1])
    output = said.index("-o")
    return *said[:output], *said[output + 2 :]


def _precompiled(
    kind: str, options: Sequence[str], header: Path, *files: Path, text: str = ""
) -> Path:
    """A header with its folder, and text after it, parsed once for each checkout.

    clang refuses a precompiled header whose files moved, so their place goes into the
    name, besides their content.
    """
    files = [*header.parent.iterdir(), *files]
    read = sorted((str(f), f.read_text()) for f in files)
    name = digest(clang().version, options, read, text)
    # Templates that the headers use are instantiated here, not in each kernel again.
    command = [*clang().command, *options, "-fpch-instantiate-templates"]
    command += ["-Xclang", "-fno-pch-timestamp", "-include", str(header), "-"]
    target = cache_folder() / f"{kind}-{name}.pch"
    return build_once(target, command, f"precompiling {header.name}", text)


@functools.cache
def precompiled_shim(mode: str, preamble: str) -> Path:
    """The shim and what stands before every kernel, parsed once for each mode."""
    options, header = [*flags(mode), "-x", "c++-header"], HERE / "shim" / "kernel.h"
    interface = HERE / "runtime" / "interface.h"
    return _precompiled(f"shim-{mode}", options, header, interface, text=preamble)


@functools.cache
def precompiled_lint_headers(options: tuple[str, ...]) -> Path:
    """What lint reads kernels against, parsed once."""
    # OpenCL has no kind of header of its own: its source is precompiled instead.
    options = (*options, "-c", "-Xclang", "-emit-pch")
    return _precompiled("lint", options, HERE / "lint_headers" / "library.h")


@functools.cache
def symbolizer() -> str:
    """A command that turns addresses of a library into source lines; '' for none."""
    beside = Path(shutil.which(clang().command[0]) or "").resolve().parent
    for tool in (beside / "llvm-symbolizer", "llvm-symbolizer"):
        if path := shutil.which(tool):
            return f"{path} --inlines --output-style=GNU --relative-address -e"
    if path := shutil.which("addr2line"):
        return f"{path} -i -e"
    return ""


@functools.cache
def mlx_include() -> Path:
    """MLX's own headers, which its wheel carries."""
    import mlx.core  # the wheel's package is a namespace without a file of its own

    return Path(mlx.core.__file__).parent / "include"


@functools.cache
def mlx_headers() -> str:
    """The digest of MLX's headers for Metal, wherever they lie."""
    folder = mlx_include() / "mlx" / "backend" / "metal"
    files = sorted(p for p in folder.rglob("*") if p.is_file())
    return digest(*(f"{p.relative_to(folder)}\n{p.read_text()}" for p in files))
