"""Where the sources of Metal's and CUDA's kernels are, and their texts."""

from __future__ import annotations

from functools import cache
from pathlib import Path

from ..devices import CUDA, METAL

# A file that every folder of kernel sources has.
_SIGN = {METAL: "relation_traversal.metal", CUDA: "rows.cuh"}


@cache
def folder(backend: str) -> Path:
    """Return the folder of a backend's sources: in the installed package or a checkout.

    Raises:
        FileNotFoundError: neither has them.
    """
    package = Path(__file__).resolve().parent.parent
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
    return (folder(backend) / file).read_text(encoding="utf-8")
