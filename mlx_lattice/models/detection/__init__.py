"""LiDAR detectors: voxels, backbones, heads, boxes."""

from . import backbones, detector, heads
from .backbones import *
from .detector import *
from .heads import *

__all__ = [*backbones.__all__, *detector.__all__, *heads.__all__]
