"""Puts the Metal kernels onto the CPU: MLX_LATTICE_METAL=host, for tests.

The machinery is ``metal/host`` of a source checkout; no wheel has it.
"""

from __future__ import annotations

import sys
from functools import lru_cache

from ..distribution import checkout


class HostMissing(RuntimeError):
    """Metal on the host was asked for where Metal kernels can't run on the CPU."""


def absence() -> str | None:
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
def install() -> None:
    """Make ``mx.fast.metal_kernel`` run its kernels on the CPU.

    Raises:
        HostMissing: this is no checkout, or clang is missing.
    """
    if why := absence():
        raise HostMissing(why)
    from metal import host

    host.install()
