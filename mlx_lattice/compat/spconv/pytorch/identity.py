"""spconv.pytorch.identity."""

from .modules import Identity

__all__ = ["Identity"]
