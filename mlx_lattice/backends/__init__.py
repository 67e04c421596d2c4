"""What runs on each backend: kernels and what launches them.

Contractions are planned by the rows of ``routes.table``; geometry and reductions are
in ``backends.registry``.
"""

from __future__ import annotations

from .availability import missing, portable_only

__all__ = ["missing", "portable_only"]
