"""Puts the Metal kernels onto the CPU: MLX_LATTICE_METAL=host, for tests.

The machinery is ``metal/host`` of a source checkout; no wheel has it.
"""

from __future__ import annotations

import sys
from functools import lru_cache
from pathlib import Path


@lru_cache(maxsize=1)
def install() -> None:
    """Make ``mx.fast.metal_kernel`` run its kernels on the CPU.

    Raises:
        RuntimeError: this is no checkout, or clang is missing.
    """
    root = Path(__file__).resolve().parents[2]
    if not (root / "metal" / "host" / "__init__.py").exists():
        raise RuntimeError(
            "MLX_LATTICE_METAL=host runs Metal kernels by metal/host, which is in the "
            "project's checkout only; run from a checkout, or unset the variable"
        )
    if str(root) not in sys.path:
        sys.path.append(str(root))
    from metal import host

    if why := host.missing():
        raise RuntimeError(f"MLX_LATTICE_METAL=host: {why}")
    host.install()
