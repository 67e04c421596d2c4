"""Point-cloud files. Needs NumPy: ``pip install 'mlx-lattice[io]'``."""

from .points import PointCloud, PointFileError, read_points

__all__ = ["PointCloud", "PointFileError", "read_points"]
