"""Files: clouds of points, and the checkpoints of other libraries.

Points need NumPy (``pip install numpy``), and laspy for LAS files; checkpoints need
MLX alone.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from .checkpoints import ImportReport, import_checkpoint, load_state
from .errors import CheckpointError
from .layouts import LIBRARIES, convert_weight
from .without_model import convert_state

if TYPE_CHECKING:
    from .points import PointCloud, PointFileError, read_points

__all__ = [
    "LIBRARIES",
    "CheckpointError",
    "ImportReport",
    "PointCloud",
    "PointFileError",
    "convert_state",
    "convert_weight",
    "import_checkpoint",
    "load_state",
    "read_points",
]


def __getattr__(name: str):
    """Import the readers of points, and NumPy with them, when they are first used."""
    if name in ("PointCloud", "PointFileError", "read_points"):
        from . import points

        return getattr(points, name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
