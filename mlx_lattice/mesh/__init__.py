"""Meshes on the host: clean-up, atlas and texture, files and pictures.

For the triangles of ``ops.dual_grid_mesh``. Needs the extra ``mesh``.
"""

try:
    from .surface import Surface
    from .texture import Texture, bake, contact_sheet, rendered, save
except ModuleNotFoundError as error:
    from ..distribution import install

    raise ImportError(
        f"mlx_lattice.mesh needs {error.name}; {install('mesh')}"
    ) from error

__all__ = ["Surface", "Texture", "bake", "contact_sheet", "rendered", "save"]
