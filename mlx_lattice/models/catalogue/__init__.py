"""Published weights by name."""

from . import entries, record
from .entries import *
from .record import *

__all__ = [*entries.__all__, *record.__all__]
