"""Files and data: clouds of points, batches, and the checkpoints of other libraries.

Points need NumPy (``pip install numpy``), and laspy for LAS files; checkpoints need
MLX alone.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from .checkpoints import (
    LIBRARIES,
    ImportReport,
    convert_weight,
    import_checkpoint,
    load_state,
)
from .loader import Loader
from .safetensors import CheckpointError, PointFileError

if TYPE_CHECKING:
    from .labelled import write_labelled
    from .points import PointCloud, read_points, write_ply

__all__ = [
    "LIBRARIES",
    "CheckpointError",
    "ImportReport",
    "Loader",
    "PointCloud",
    "PointFileError",
    "convert_weight",
    "import_checkpoint",
    "load_state",
    "read_points",
    "write_labelled",
    "write_ply",
]


def __dir__() -> list[str]:
    return sorted(__all__)


if not TYPE_CHECKING:  # type checkers find mistyped names

    def __getattr__(name: str) -> Any:
        if name in ("PointCloud", "read_points", "write_ply"):
            from . import points

            return getattr(points, name)
        if name == "write_labelled":
            from .labelled import write_labelled

            return write_labelled
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
