"""The C++ extension: loaded, or why it cannot be used.

It is an accelerator. Where it is absent, or was built for another MLX, MLX operations
serve; one warning and ``ml.backend_info()`` say so.
"""

from __future__ import annotations

import importlib
import os
import platform
import warnings

import mlx.core as mx

from .. import distribution

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


extension, absence, repair = _load()
_check_threads(extension)
_warned = False


def usable() -> bool:
    """Whether the extension serves; warns once where it does not."""
    global _warned
    if absence and not _warned:
        _warned = True
        warnings.warn(
            f"mlx_lattice runs without its CPU extension ({absence}): convolutions on "
            f"the CPU use MLX's own operations, many times slower. To get it, {repair}",
            RuntimeWarning,
            stacklevel=3,
        )
    return extension is not None
