"""The C++ extension: loaded, or why it cannot be used.

It is an accelerator. Where it is absent, or was built for another MLX, MLX operations
serve; one warning and ``ml.backend_info()`` say so.
"""

from __future__ import annotations

import importlib
import warnings

import mlx.core as mx

REPAIR = "pip install --force-reinstall --no-deps --no-cache-dir ."


def _load():
    """Return (extension, None), or (None, why it can't be used)."""
    try:
        extension = importlib.import_module("mlx_lattice._cpu")
    except ImportError as error:
        missing = "No module named" in str(error)
        return None, "it is not installed" if missing else f"it does not load: {error}"
    built_for, here = extension.built_for(), mx.__version__
    if built_for != here:
        return None, f"it was built for MLX {built_for}, this is {here}"
    return extension, None


extension, absence = _load()
_warned = False


def usable() -> bool:
    """Whether the extension serves; warns once where it does not."""
    global _warned
    if absence and not _warned:
        _warned = True
        warnings.warn(
            f"mlx_lattice runs without its CPU extension ({absence}): convolutions on "
            f"the CPU use MLX's own operations, many times slower. With a C++ compiler "
            f"at hand, run in the project's folder: {REPAIR}",
            RuntimeWarning,
            stacklevel=3,
        )
    return extension is not None
