"""Whether a backend's compiled kernels serve here and now, and why not."""

from __future__ import annotations

import importlib
import os
import platform
import sys
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from functools import cache, lru_cache
from pathlib import Path

import mlx.core as mx

from . import distribution, settings
from .devices import CPU, CUDA, METAL, compute_capability, metal_on_host
from .distribution import checkout

OLDEST_GPU = (8, 0)  # compute capability that the CUDA kernels need


@contextmanager
def portable_only() -> Iterator[None]:
    """Leave compiled kernels out inside the block: only MLX operations run."""
    with settings.block(portable=True):
        yield


def serves(backend: str) -> bool:
    """Whether compiled kernels of a backend run on this machine, inside this block."""
    if settings.current().portable:
        return False
    if backend == METAL and metal_on_host():
        install_host()
        return True
    if backend == METAL:
        return mx.metal.is_available()
    if backend == CUDA:
        return mx.cuda.is_available() and _old_gpu() is None
    return backend == CPU and has_extension()


@cache
def _old_gpu() -> str | None:
    """Return why the CUDA kernels can't run on the GPU that is here, or None."""
    if not mx.cuda.is_available() or compute_capability() >= OLDEST_GPU:
        return None
    here, needed = (".".join(map(str, c)) for c in (compute_capability(), OLDEST_GPU))
    return f"the GPU has compute capability {here}; the kernels need {needed}"


def absence(backend: str) -> str | None:
    """Return why a backend's kernels can't run on this machine now, and what to do.

    None where they can: what is said to be there, runs.
    """
    if backend == CPU:
        why = extension_absence
        return f"{why}; {extension_repair}" if why else None
    if backend == METAL and metal_on_host():
        return host_absence()
    if backend == METAL and not mx.metal.is_available():
        return "this MLX has no Metal; it comes with MLX on Apple silicon"
    if backend == CUDA and not mx.cuda.is_available():
        how = distribution.install("cuda")
        return f"this MLX has no CUDA, or finds no NVIDIA GPU; for MLX's CUDA {how}"
    if backend == CUDA and (why := _old_gpu()):
        return why
    try:
        source_folder(backend)
    except FileNotFoundError as error:
        return str(error)
    return None


def missing(backend: str) -> str | None:
    """Return why a backend's compiled kernels cannot be had, or None.

    Metal and CUDA kernels come with the package; the CPU's are an extension.
    """
    if settings.current().portable:
        return "compiled kernels are left out here"
    if backend == METAL and metal_on_host():
        install_host()
    if backend == CUDA:
        return _old_gpu()
    if backend != CPU or has_extension():
        return None
    return extension_absence


# MLX's libraries on Linux, and the extra that installs each.
_LIBRARIES = {"mlx-cuda-13": "cuda13", "mlx-cuda-12": "cuda12", "mlx-cpu": "cpu"}


def _rebuild() -> str:
    """Say how the extension is built from source."""
    options = "--force-reinstall --no-deps --no-cache-dir"
    if not distribution.checkout():
        options += f" --no-binary {distribution.NAME}"
    return f"with a C++ compiler at hand {distribution.install(options=options)}"


def _other_mlx(version: str) -> str:
    """Say how to get another version of MLX with the libraries that are here."""
    from importlib import metadata

    extra = ""
    if platform.system() == "Linux":
        here = {d.metadata["Name"] for d in metadata.distributions()}
        extras = [extra for name, extra in _LIBRARIES.items() if name in here]
        extra = f"[{','.join(extras)}]" if extras else ""
    return f'run: pip install "mlx{extra}=={version}"'


def _load():
    """Return (extension, None, ""), or (None, why it can't be used, what to do)."""
    here = mx.__version__
    try:
        extension = importlib.import_module("mlx_lattice._cpu")
    except ImportError as error:
        if "No module named" in str(error):
            return None, "it is not installed", _rebuild()
        if here != distribution.MLX:
            why = f"it does not load with MLX {here}: {error}"
            return None, why, _other_mlx(distribution.MLX)
        return None, f"it does not load: {error}", _rebuild()
    built_for = extension.built_for()
    if built_for != here:
        why = f"it was built for MLX {built_for}, this is {here}"
        return None, why, _other_mlx(built_for)
    return extension, None, ""


THREADS, MOST_THREADS = "MLX_LATTICE_THREADS", 1024


def _check_threads(extension) -> None:
    """Warn where the variable names no number of threads; the extension reads it."""
    text = os.environ.get(THREADS, "").strip()
    if not text or (text.isdecimal() and 1 <= int(text) <= MOST_THREADS):
        return
    warnings.warn(
        f"{THREADS} must be 1 to {MOST_THREADS}; got {text!r}. The CPU's kernels take "
        "a thread a core",
        RuntimeWarning,
        stacklevel=2,
    )
    if extension is not None:
        extension.set_num_threads(os.cpu_count() or 1)


extension, extension_absence, extension_repair = _load()
_check_threads(extension)
_warned = False


def has_extension() -> bool:
    """Whether the extension serves; warns once where it does not."""
    global _warned
    if extension_absence and not _warned:
        _warned = True
        warnings.warn(
            f"mlx_lattice runs without its CPU extension ({extension_absence}): "
            "convolutions on the CPU use MLX's own operations, many times slower. To "
            f"get it, {extension_repair}",
            RuntimeWarning,
            stacklevel=3,
        )
    return extension is not None


class HostMissing(RuntimeError):
    """Metal on the host was asked for where Metal kernels can't run on the CPU."""


def host_absence() -> str | None:
    """Return why the CPU can't run Metal kernels here, or None."""
    root = checkout()
    if root is None or not (root / "metal" / "host" / "__init__.py").is_file():
        return (
            "MLX_LATTICE_METAL=host runs Metal kernels by metal/host, which is in the "
            "project's checkout only; run from a checkout, or unset the variable"
        )
    if str(root) not in sys.path:
        sys.path.append(str(root))
    from metal import host

    why = host.missing()
    return f"MLX_LATTICE_METAL=host: {why}" if why else None


@lru_cache(maxsize=1)
def install_host() -> None:
    """Make ``mx.fast.metal_kernel`` run its kernels on the CPU.

    Raises:
        HostMissing: this is no checkout, or clang is missing.
    """
    if why := host_absence():
        raise HostMissing(why)
    from metal import host

    host.install()


# A file that every folder of kernel sources has.
_SIGN = {METAL: "relation_traversal.metal", CUDA: "rows.cuh"}


@cache
def source_folder(backend: str) -> Path:
    """Return the folder of a backend's sources: in the installed package or a checkout.

    Raises:
        FileNotFoundError: neither has them.
    """
    package = Path(__file__).resolve().parent
    places = package / backend, package.parent / backend
    for place in places:
        if (place / _SIGN[backend]).is_file():
            return place
    raise FileNotFoundError(
        f"the {backend} kernel sources are neither in {places[0]} nor in {places[1]}; "
        "install mlx_lattice again"
    )


@cache
def source(backend: str, file: str) -> str:
    """Return the text of a file of a backend's folder."""
    return (source_folder(backend) / file).read_text(encoding="utf-8")
