"""Blocks of nets."""

from . import resnet_block

__all__ = ["resnet_block"]
