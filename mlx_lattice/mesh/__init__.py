"""Meshes on the host: clean-up, atlas and texture, files and pictures.

What follows ``ops.dual_grid_mesh``; needs the extra ``mesh``.
"""

try:
    # All of the extra, so that none is missed after the long part of a command.
    import fast_simplification  # noqa: F401
    import numpy  # noqa: F401
    import PIL  # noqa: F401
    import scipy  # noqa: F401
    import trimesh  # noqa: F401
    import xatlas  # noqa: F401
except ImportError as error:
    from ..distribution import install

    raise ImportError(
        f"mlx_lattice.mesh needs {error.name}; {install('mesh')}"
    ) from error

from .asset import save
from .surface import Surface
from .texture import Texture, bake, contact_sheet, rendered

__all__ = ["Surface", "Texture", "bake", "contact_sheet", "rendered", "save"]
